//! The vhost-user transport: a Unix socket for control, shared memory for the rings.
//!
//! [`Session`] serves one connection of an [`Export`], whose queues run on the workers of a [`Pool`].
//!
//! A disk of your own, with an engine of your own: here its sectors are in a vector.
//!
//! ```
//! use ringway_aio::{Immediate, Io, IoOp};
//! use ringway_disk::CustomDisk;
//! use ringway_export::{ExportOptions, WorkerOptions};
//! use ringway_vhost_user::{Access, Export, Pool, Session, bind};
//! use std::os::{fd::OwnedFd, unix::net::UnixStream};
//! use std::sync::{Arc, Mutex};
//!
//! let sectors = Arc::new(Mutex::new(vec![0u8; 1 << 20]));
//! let copy = move |io: &Io<'_>| {
//!     let mut sectors = sectors.lock().unwrap();
//!     let mut at = io.offset as usize; // within the disk: that has been checked
//!     for segment in io.memory.segments() {
//!         let ours = sectors[at..at + segment.len].as_mut_ptr();
//!         let (from, to) = match io.op {
//!             IoOp::Read => (ours, segment.base),
//!             _ => (segment.base, ours),
//!         };
//!         // SAFETY: both are mapped and as long as this; the guest's is used by copying only.
//!         unsafe { to.copy_from(from, segment.len) };
//!         at += segment.len;
//!     }
//!     match io.op {
//!         IoOp::PunchHole | IoOp::ZeroRange => sectors[at..at + io.len as usize].fill(0),
//!         _ => {} // a flush: nothing is behind this memory
//!     }
//!     i32::try_from(at - io.offset as usize).expect("at most 2 GiB")
//! };
//! let disk = Arc::new(CustomDisk::new(1 << 20).open(Some("mine"))?);
//! let engine = move |_worker| Immediate::new(256, copy.clone());
//! let pool = Pool::with_engines(2, WorkerOptions::default(), Arc::new(|| {}), engine)?;
//! let options = ExportOptions { queues: 2, queue_size: 256 };
//! let export = Arc::new(Export::new(disk, options, pool.handles().to_vec(), 0));
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("disk.sock");
//! let listener = bind(&path, Access::PRIVATE)?;
//! # let client = std::thread::spawn(move || {
//! #     let mut device = ringway_driver::Device::connect(&path).unwrap();
//! #     let mut queue = device.queue::<()>().unwrap();
//! #     let mut buffer = device.pool().alloc(4096).unwrap();
//! #     buffer.fill(0x55);
//! #     queue.write(8192, buffer, ()).unwrap();
//! #     queue.wait_for(1, None).unwrap();
//! #     assert!(queue.completions().all(|done| done.is_ok()));
//! #     let buffer = device.pool().alloc(8192).unwrap();
//! #     queue.read(4096, buffer, ()).unwrap();
//! #     queue.wait_for(1, None).unwrap();
//! #     let done = queue.pop().unwrap().unwrap();
//! #     assert!(done.is_ok());
//! #     let buffer = done.data.into_buffer().unwrap();
//! #     assert!(buffer[..4096].iter().all(|&byte| byte == 0));
//! #     assert!(buffer[4096..].iter().all(|&byte| byte == 0x55));
//! # });
//! let (_stopper, stop) = UnixStream::pair()?; // a byte written to it ends the session
//! let (socket, _) = listener.accept()?; // one front-end after another, or in a loop
//! Session::new(&export, socket, &Arc::new(OwnedFd::from(stop)))?.run();
//! # client.join().unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
mod session;
mod socket;
mod start;
mod vring;

pub use queue::{Queue, Token};
pub use received::NO_PATH;
pub use session::{Ended, Session, Wakes};
pub use socket::{Access, BindError, bind};

/// A disk that is offered over vhost-user.
pub type Export = ringway_export::Export<Queue>;

/// Workers that serve virtqueues.
pub type Pool = ringway_export::Pool<Queue>;
