//! Serves a disk to a guest: rings on one hand, a disk on the other.
//!
//! What all transports share. `worker.rs` is the loop and the only file that sees both a ring and a
//! disk. A transport has a crate of its own, with the queues ([`RequestQueue`]) and their control
//! plane: `ringway-vhost-user`, `ringway-xen-blkback`, `ringway-nbd`.
//!
//! A transport of your own, beside those: clients in the same process ask for sectors by their numbers. A disk
//! and an engine of your own are on the first page of `ringway-vhost-user`; here each sector is full of its
//! number.
//!
//! ```
//! use ringway_aio::{Immediate, Io};
//! use ringway_core::{ByteRange, Op, Request, Segment, Status};
//! use ringway_disk::CustomDisk;
//! use ringway_export::{
//!     Armed, Broken, Pool, Pop, QueueLifecycle, RequestQueue, WorkerOptions,
//! };
//! use rustix::event::{EventfdFlags, eventfd};
//! use std::collections::VecDeque;
//! use std::io;
//! use std::os::fd::{AsRawFd, OwnedFd, RawFd};
//! use std::sync::mpsc::{Sender, channel};
//! use std::sync::{Arc, Mutex};
//!
//! struct Mailbox {
//!     asked: Arc<Mutex<VecDeque<u64>>>,
//!     answers: Sender<Vec<u8>>,
//!     bell: Arc<OwnedFd>,
//! }
//!
//! impl RequestQueue for Mailbox {
//!     type Token = Vec<u8>; // a sector on its way; better taken from memory that was made at the start
//!     fn pop(&mut self, request: &mut Request) -> Result<Pop<Vec<u8>>, Broken> {
//!         let Some(sector) = self.asked.lock().unwrap().pop_front() else { return Ok(Pop::Empty) };
//!         let mut token = vec![0; 512];
//!         let Some(range) = ByteRange::from_sector(sector, 512) else {
//!             return Ok(Pop::Refused(token, Status::IoError));
//!         };
//!         (request.op, request.range) = (Op::Read, range);
//!         request.segments.clear();
//!         request.segments.push(Segment { base: token.as_mut_ptr(), len: 512 });
//!         Ok(Pop::Request(token))
//!     }
//!     fn effort(&self) -> u32 { 1 }
//!     fn complete(&mut self, mut token: Vec<u8>, status: Status, _written: u32) {
//!         if status != Status::Ok {
//!             token.clear();
//!         }
//!         let _ = self.answers.send(token); // whoever asked may have gone
//!     }
//!     fn publish(&mut self) -> io::Result<()> { Ok(()) } // the channel does
//!     fn has_work(&self) -> bool { !self.asked.lock().unwrap().is_empty() }
//!     fn arm(&mut self) -> Result<Armed, Broken> {
//!         Ok(if self.has_work() { Armed::WorkArrived } else { Armed::Quiet })
//!     }
//!     fn disarm(&mut self) {} // clients ring for each request
//! }
//!
//! impl QueueLifecycle for Mailbox {
//!     fn doorbell(&self) -> RawFd { self.bell.as_raw_fd() }
//!     fn depth(&self) -> u16 { 16 }
//! }
//!
//! let number = |io: &Io<'_>| {
//!     let sector = (io.offset / 512) as u8;
//!     let segments = io.memory.segments();
//!     // SAFETY: the memory of the request, as long as this, is written by nobody else.
//!     segments.iter().for_each(|one| unsafe { one.base.write_bytes(sector, one.len) });
//!     segments.iter().map(|one| one.len as i32).sum()
//! };
//! let disk = Arc::new(CustomDisk::new(104 * 512).open(Some("numbers"))?);
//! let engine = move |_worker| Immediate::new(256, number);
//! let pool = Pool::with_engines(1, WorkerOptions::default(), Arc::new(|| {}), engine)?;
//!
//! let (asked, (answers, answered)) = (Arc::default(), channel());
//! let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
//! let queue = Mailbox { asked: Arc::clone(&asked), answers, bell: Arc::clone(&bell) };
//! let worker = &pool.handles()[0];
//! let id = worker.add(queue, disk, false, Box::new(|alarm| eprintln!("{alarm:?}")));
//! let id = id.map_err(|refused| refused.error)?; // the queue comes back with it
//!
//! asked.lock().unwrap().extend([7, 42, 104]);
//! rustix::io::write(&*bell, &1u64.to_ne_bytes())?;
//! let mut sectors: Vec<_> = answered.iter().take(3).collect();
//! sectors.sort(); // answers come in any order
//! assert_eq!(sectors, [vec![], vec![7; 512], vec![42; 512]]); // there is no sector 104
//! worker.stop(id)?.recv()?; // nothing is in flight any more, and the queue is back
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod clock;
mod command;
mod cpu;
mod export;
mod front_end;
mod latency;
mod limit;
mod memory;
mod notice;
mod peer_eventfd;
mod penalty;
mod pinned;
mod polling;
mod pool;
mod quarantine;
mod queue;
mod queue_commands;
mod queue_id;
mod ring_pool;
mod sampler;
mod session_inbox;
mod small_counts;
mod stats;
mod totals;
mod waiting;
mod worker;
mod worker_options;

pub use answer::{AnswerDue, abandon};
pub use command::{
    Alarm, Findings, Handle, Inbox, NotAdded, QueueFindings, QueueId, Raise, Rouse, Stopped,
    command_channel,
};
pub use export::{
    ChangeError, Counts, Export, ExportOptions, ExportReport, GuestNotice, LockWait, Names,
    Offered, QueueReport, Resized, Retried,
};
pub use front_end::Lack;
pub use latency::Latency;
pub use limit::{Pass, WarningLimit, WarningLimits, on_suppressed, report_suppressed};
pub use memory::SharedMemory;
pub use notice::{Listener, Notice};
pub use peer_eventfd::{PeerEventfd, watchdog_signal};
pub use polling::Polling;
pub use pool::{
    Cpus, ENGINE_DEPTH, OnFailure, Pool, PoolOptions, WorkerOptions, engines_to_choose,
    install_handlers, usable_engines,
};
pub use quarantine::Quarantine;
pub use queue::{Armed, Broken, Pop, QueueLifecycle, RequestQueue};
pub use queue_commands::{CommandSender, CommandSetup, QueueCommand};
pub use ring_pool::RingPool;
pub use session_inbox::{SessionCommand, SessionInbox};
pub use stats::{QueueStats, WorkerStats};
pub use totals::{DURATION_BOUNDS_NS, Durations, OPERATIONS, QueueTotals};
pub use worker::Worker;
