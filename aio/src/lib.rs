//! Asynchronous file I/O engines behind three verbs: queue, submit, reap.
//!
//! ```
//! use ringway_aio::{Engine, Io, IoOp, Reaped, Threads, ThreadsSetup};
//! use ringway_core::Segment;
//! use std::{fs::File, sync::Arc};
//!
//! # fn main() -> std::io::Result<()> {
//! # let path = std::env::temp_dir().join(format!("ringway-aio-{}", std::process::id()));
//! # std::fs::write(&path, "one two three four")?;
//! // 8 operations at a time. `IoUring::new(IoUringSetup::new(8))` and `LinuxAio::new(8)` are alike.
//! let mut engine = Threads::new(ThreadsSetup::new(8))?;
//! let file = engine.attach(&Arc::new(File::open(&path)?))?;
//!
//! let mut bytes = [0u8; 8];
//! let list = [Segment { base: bytes.as_mut_ptr(), len: bytes.len() }];
//! let io = Io { tag: 42, op: IoOp::Read, file, offset: 4, len: 8, memory: list[..].into() };
//! // SAFETY: `bytes` and `list` stay where they are, untouched, until the tag is reaped below.
//! unsafe { engine.queue(&io) }.expect("8 are allowed, and none is in flight");
//! engine.submit()?;
//!
//! let mut out = Reaped::with_capacity(8, 0);
//! while engine.reap(&mut out) == 0 {
//!     engine.wait(None)?;
//! }
//! assert_eq!((out.done[0].tag, out.done[0].result), (42, 8));
//! assert_eq!(&bytes, b"two thre");
//! # std::fs::remove_file(&path)
//! # }
//! ```
//!
//! An engine belongs to one thread. It never blocks but in `wait`, which sleeps for completions and for
//! doorbells (eventfds, sockets, pipes: [`Engine::watch`]) in one system call. It knows files and memory,
//! and nothing of guests or images.
//!
//! | engine | for |
//! |---|---|
//! | [`null::Null`] | nothing, at once: the tutorial and the yardstick |
//! | [`threads::Threads`] | every file on every host |
//! | [`linux_aio::LinuxAio`] | files opened with O_DIRECT, also where io_uring is forbidden |
//! | [`io_uring::IoUring`] | the best there is, where the kernel has it |
//!
//! [`sim::Sim`] wraps another engine and makes it take the time of a disk that nobody has.
//!
//! To write an engine, copy the source of [`null`], which uses nothing that is not public. With the
//! feature `contract` there is `contract::Suite`, the tests that every engine passes; with the feature
//! `faulty` there is `faulty::Faulty`, which fails the operations of another engine or cuts them short.

pub mod bells;
#[cfg(any(test, feature = "contract"))]
pub mod contract;
pub mod engine;
#[cfg(any(test, feature = "faulty"))]
pub mod faulty;
pub mod files;
pub mod io_uring;
pub mod linux_aio;
pub mod null;
mod operation;
mod pool;
pub mod sim;
mod sys;
pub mod threads;

pub use engine::{
    BellId, Command, CommandPort, CommandRefused, Counters, Done, Engine, FileId, Full, Io,
    IoMemory, IoOp, Limits, OpSet, Reaped,
};
#[cfg(any(test, feature = "faulty"))]
pub use faulty::{Fault, Faulty};
pub use io_uring::{IoUring, IoUringSetup};
pub use linux_aio::LinuxAio;
pub use null::Null;
pub use sim::{Model, Sim, SimSetup};
pub use threads::{Threads, ThreadsSetup};
