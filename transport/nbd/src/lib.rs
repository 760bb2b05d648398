//! The NBD transport: a disk over a socket, for programs on this host and on others.
//!
//! `handshake.rs`, `request.rs` and `reply.rs` are the protocol, without any I/O. `queue.rs` is one
//! connection as a worker sees it; `session.rs` is the thread behind it, which shakes hands, answers
//! block status and ends it; `server.rs` lets clients come and go. `portal.rs` is a listener with the
//! disks behind it; `relay.rs` speaks TLS with a client, on a thread that is no worker.

mod extents;
mod handshake;
mod input;
mod offer;
mod output;
mod portal;
mod queue;
mod relay;
mod reply;
mod request;
mod server;
mod session;
mod socket;
mod tls;
mod wire;
mod words;

pub use handshake::{Handshake, HandshakeError, Negotiated, Next, Replies, TlsRule};
pub use offer::Offer;
pub use portal::{Listener, Portal, Seat};
pub use queue::{Gone, MEMORY_PER_CONNECTION, Queue, Token};
pub use request::{Action, Asked, NbdError, ProtocolError, Rules};
pub use server::Server;
pub use session::Ended;
pub use tls::{Tls, TlsError};
pub use words::{BLOCK_MIN, PAYLOAD_MAX};

/// A disk that is offered over NBD.
pub type Export = ringway_export::Export<Queue>;

/// Workers that serve connections.
pub type Pool = ringway_export::Pool<Queue>;
