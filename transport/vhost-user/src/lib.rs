//! The vhost-user transport: a Unix socket for control, shared memory for the rings.
//!
//! [`Session`] serves one connection of an [`Export`], whose queues run on the workers of a [`Pool`].
//!
//! The guide to these crates (docs/embedding.md, *Serving a disk of your own*) has a whole server:
//! the sectors of its disk are in a vector. It runs as a test.
//!
//! `session.rs` is the state machine of one connection, `message.rs` reads and writes its messages,
//! `queue.rs` is what a worker gets, `socket.rs` makes the socket file.

mod device;
mod dirty_log;
mod inflight;
mod iommu;
mod memory;
mod message;
mod queue;
mod received;
mod ring_place;
mod session;
mod socket;
mod start;
mod vring;

pub use queue::{Queue, Token};
pub use session::{Ended, Session, Wakes};
pub use socket::{Access, BindError, bind, connect_at_once};

/// A disk that is offered over vhost-user.
pub type Export = ringway_export::Export<Queue>;

/// Workers that serve virtqueues.
pub type Pool = ringway_export::Pool<Queue>;
