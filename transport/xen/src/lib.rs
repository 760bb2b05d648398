//! The Xen transport: xenstore for control, granted pages for rings and data.
//!
//! `xenbus.rs` decides the life of a disk, `session.rs` carries it out, `queue.rs` is what a worker
//! gets. `xenstore.rs`, `gntdev.rs` and `evtchn.rs` are thin layers over the host's own interfaces.
//!
//! A queue works with any [`Host`] that has granted pages and an event channel. Here the guest is in the same
//! process: its pages are in one vector, and a grant is the number of a page.
//!
//! ```
//! use ringway_core::{Op, Request, Status};
//! use ringway_export::{Pop, RequestQueue};
//! use ringway_ring::blkif::{Abi, Ask, Command, Front, GrantPiece, Offered, RingAt, With};
//! use ringway_xen_blkback::{
//!     Direction, GrantCopy, GrantMapping, Host, Identity, Movement, PAGE, Queue, QueueSetup, Record,
//! };
//! use std::{io, os::fd::RawFd};
//!
//! #[repr(align(4096))]
//! struct Page([u8; PAGE]);
//!
//! struct Local(*mut u8);
//! // SAFETY: the pages are leaked below, and used by one thread.
//! unsafe impl Send for Local {}
//! impl GrantMapping for Local {
//!     fn base(&self) -> *mut u8 { self.0 }
//! }
//! impl Host for Local {
//!     type Mapped = Local;
//!     unsafe fn copy(&mut self, copies: &mut [GrantCopy]) -> io::Result<()> {
//!         for copy in copies {
//!             let at = copy.grant as usize * PAGE + usize::from(copy.offset);
//!             let page = self.0.wrapping_add(at);
//!             let (from, to) = match copy.direction {
//!                 Direction::FromGuest => (page, copy.local),
//!                 Direction::ToGuest => (copy.local, page),
//!             };
//!             // SAFETY: the example grants none but its own pages; the caller vouches for `local`.
//!             unsafe { to.copy_from(from, copy.len.into()) };
//!             copy.done = true;
//!         }
//!         Ok(())
//!     }
//!     fn map(&mut self, grants: &[u32], _writable: bool) -> io::Result<Local> {
//!         Ok(Local(self.0.wrapping_add(grants[0] as usize * PAGE)))
//!     }
//!     fn notify(&mut self) -> io::Result<()> { Ok(()) }
//!     fn doorbell(&self) -> RawFd { -1 }
//!     fn hush(&mut self) {}
//! }
//!
//! let pages = vec![Page([0; PAGE]), Page([0x5a; PAGE])].leak(); // a ring and data
//! let mut host = Local(pages.as_mut_ptr().cast());
//! let at = RingAt { base: host.0, order: 0, abi: Abi::X86_64 };
//! // SAFETY: the page is never freed, and this is its only front side.
//! let mut guest = unsafe { Front::new(at, 0) }?;
//! let ring_pages = host.map(&[0], true)?;
//! let offered = Offered { flush: true, barrier: false, discard: false, indirect_segments: 0 };
//! let setup =
//!     QueueSetup { host, ring_pages, at, offered, movement: Movement::Copy, persistent: false };
//! let record = Record::unkept(&Identity {
//!     domid: 1, devid: 51712, queue: 0, slots: 32, pieces: 11, port: 5, pages: [0; 16],
//! })?;
//! // SAFETY: the ring is in its page, and this is its only back side.
//! let mut queue = unsafe { Queue::new(setup, record) }?;
//!
//! let data = With::Pieces(&[GrantPiece::whole(1)]);
//! let id = guest.push(Ask { command: Command::Write, sector: 8, with: data })?;
//! let _ = guest.publish();
//! // What a worker does in its loop.
//! let mut request = Request::with_capacity(11);
//! let Pop::Request(token) = queue.pop(&mut request)? else { panic!("one was pushed") };
//! assert_eq!((request.op, request.range.offset(), request.range.len()), (Op::Write, 4096, 4096));
//! // SAFETY: the segments are the queue's own pages, with a copy of what the guest writes.
//! assert_eq!(unsafe { *request.segments.as_slice()[0].base }, 0x5a);
//! queue.complete(token, Status::Ok, 0);
//! queue.publish()?;
//! assert_eq!(guest.pop_response()?.map(|answer| answer.id), Some(id));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
pub use xenstore::{Change, Changes, StoreError, Tx, XENSTORES, Xenstore};
