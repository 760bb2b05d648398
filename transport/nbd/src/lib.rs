//! The NBD transport: a disk over a socket, for programs on this host and on others.
//!
//! A disk without data, served until somebody writes to `stopper`; [`Portal::with_tls`] has its clients use TLS.
//!
//! ```
//! use ringway_disk::{OpenOptions, Source};
//! use ringway_export::{ExportOptions, PoolOptions};
//! use ringway_nbd::{Export, Listener, Pool, Portal, Server};
//! use std::os::{fd::AsFd, unix::net::{UnixListener, UnixStream}};
//! use std::sync::Arc;
//!
//! let disk = ringway_disk::open(&OpenOptions::new(Source::Null { bytes: 1 << 30, latency_us: 0 }))?;
//! let pool = Pool::start(PoolOptions::new(disk.engine(), 1))?;
//! // At most 4 connections, each with 64 requests in flight.
//! let options = ExportOptions { queues: 4, queue_size: 64 };
//! let export = Export::new(Arc::new(disk), options, pool.handles().to_vec(), 0);
//!
//! let folder = tempfile::tempdir()?;
//! let listener = UnixListener::bind(folder.path().join("nbd.sock"))?;
//! listener.set_nonblocking(true)?;
//! let reservation = Arc::new(Portal::new(Listener::Unix(listener))).reserve("mine")?; // its name for clients
//! let (stopper, stop) = UnixStream::pair()?;
//! # let client = std::thread::spawn(move || {
//! #     use std::io::{Read, Write};
//! #     let mut server = UnixStream::connect(folder.path().join("nbd.sock")).unwrap();
//! #     let mut greeting = [0; 18];
//! #     server.read_exact(&mut greeting).unwrap();
//! #     assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
//! #     server.write_all(&3u32.to_be_bytes()).unwrap();
//! #     // NBD_OPT_EXPORT_NAME: the size, the flags, and the client may begin.
//! #     server.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04mine").unwrap();
//! #     let mut size = [0; 10];
//! #     server.read_exact(&mut size).unwrap();
//! #     assert_eq!(u64::from_be_bytes(size[..8].try_into().unwrap()), 1 << 30);
//! #     (&stopper).write_all(b"x").unwrap();
//! # });
//! Server::new(&export).serve(&reservation, stop.as_fd())?;
//! # client.join().unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `handshake.rs`, `request.rs` and `reply.rs` are the protocol, without any I/O. `queue.rs` is one
//! connection as a worker sees it; `session.rs` is the thread behind it, which shakes hands, answers
//! block status and ends it; `server.rs` lets clients come and go. `portal.rs` is a listener with the
//! disks behind it; `relay.rs` speaks TLS with a client, on a thread that is no worker.

mod extents;
mod handshake;
mod input;
mod lines;
mod offer;
mod output;
mod portal;
mod protocol;
mod queue;
mod reply;
mod request;
mod server;
mod session;
mod socket;
mod tls;

pub use handshake::{Handshake, HandshakeError, Negotiated, Next, Replies, TlsRule};
pub use offer::Offer;
pub use portal::{Listener, Portal, Reservation};
pub use protocol::{BLOCK_MIN, PAYLOAD_MAX};
pub use queue::{ConnectionEnd, MEMORY_PER_CONNECTION, Queue, Token};
pub use request::{Action, Asked, NbdError, ProtocolError, Rules};
pub use server::Server;
pub use session::Ended;
pub use tls::{Tls, TlsError};

/// A disk that is offered over NBD.
pub type Export = ringway_export::Export<Queue>;

/// Workers that serve connections.
pub type Pool = ringway_export::Pool<Queue>;
