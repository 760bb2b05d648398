//! Disks that NBD servers export, behind the three verbs of an engine: queue, submit, reap.
//!
//! ```no_run
//! use ringway_aio::Engine;
//! use ringway_nbd_client::{Nbd, Patience, Remote, Target, connect};
//!
//! let target: Target = "nbd:unix:/run/disk.sock".parse()?;
//! let connected = connect(&target)?;
//! let remote = Remote::new("disk", &connected);
//! // When the connection is lost, it comes back like this; requests wait meanwhile.
//! let again = move || Ok(connect(&target)?);
//! remote.supervise(Box::new(again), Patience::default())?;
//! let mut engine = Nbd::new(128)?;
//! let file = engine.attach(&connected.socket)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `handshake.rs` and `reply.rs` judge what a server says, `connection.rs` is one connection as a worker
//! uses it, `remote.rs` has it come back. Engine's threads write to sockets by `pwritev2`: the process has
//! to ignore SIGPIPE, as programs in Rust do.

mod allocation;
mod connect;
mod connection;
mod engine;
mod handshake;
mod incoming;
mod loss;
mod memory;
mod operations;
mod remote;
mod reply;
mod target;
mod tls;

pub use allocation::{Allocation, AllocationError};
pub use connect::{ConnectError, Connected, connect};
pub use engine::Nbd;
pub use handshake::{HandshakeError, Negotiated};
pub use remote::{Connect, Patience, Remote};
pub use target::{Address, Target, TargetError, Tls};
pub use tls::TlsError;
