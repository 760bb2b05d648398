//! The Xen transport: xenstore for control, granted pages for rings and data.
//!
//! `xenbus.rs` decides the life of a disk, `session.rs` carries it out, `queue.rs` is what a worker
//! gets. `xenstore.rs`, `gntdev.rs` and `evtchn.rs` are thin layers over the host's own interfaces.

mod access;
mod domain;
mod evtchn;
#[cfg(test)]
mod fake_host;
mod gntdev;
mod host;
mod ioctls;
mod keys;
mod limits;
mod movement;
mod persistent;
mod queue;
mod record;
mod session;
mod sys;
mod xenbus;
mod xenstore;

pub use access::{Access, Here, Named, RecordName};
pub use domain::Domain;
pub use host::{Direction, GrantCopy, GrantMapping, Host, PAGE};
pub use ioctls::{session_ioctls, worker_ioctls};
pub use keys::Address;
pub use movement::Movement;
pub use queue::{AdoptError, Queue, QueueSetup, Token};
pub use record::{Identity, Record, RecordError};
pub use session::{Ended, Session, SessionOptions};
pub use xenstore::{Change, Changes, StoreError, Tx, Xenstore};
