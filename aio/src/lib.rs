//! Asynchronous file I/O engines behind three verbs: queue, submit, reap.
//!
//! ```
//! use ringway_aio::{Engine, Io, IoOp, Reaped, Threads, ThreadsSetup};
//! use ringway_core::Segment;
//! use std::{fs::File, sync::Arc};
//!
//! // 8 operations at a time, as with `IoUring::new(IoUringSetup::new(8))`.
//! let mut engine = Threads::new(ThreadsSetup::new(8))?;
//! let file = engine.attach(&Arc::new(File::open("/proc/self/exe")?))?;
//! let mut bytes = [0u8; 4];
//! let list = [Segment { base: bytes.as_mut_ptr(), len: bytes.len() }];
//! let io = Io { tag: 42, op: IoOp::Read, file, offset: 0, len: 4, memory: list[..].into() };
//! // SAFETY: `bytes` and `list` stay where they are, untouched, until the tag is reaped below.
//! unsafe { engine.queue(&io) }.expect("8 are allowed, and none is in flight");
//! engine.submit()?;
//! let mut out = Reaped::with_capacity(8, 0);
//! while engine.reap(&mut out) == 0 {
//!     engine.wait(None)?;
//! }
//! assert_eq!((out.done[0].tag, out.done[0].result), (42, 4));
//! assert_eq!(&bytes, b"\x7fELF");
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! | engine | for |
//! |---|---|
//! | [`null::Null`] | nothing, at once: the tutorial and the yardstick |
//! | [`Immediate`] | data in memory, or computed, by a function of yours |
//! | [`threads::Threads`] | every file on every host |
//! | [`linux_aio::LinuxAio`] | files opened with O_DIRECT, also where io_uring is forbidden |
//! | [`io_uring::IoUring`] | the best there is, where the kernel has it |
//! | [`nvme::Nvme`] | namespaces of NVMe past the block layer, by commands of their own |
//!
//! [`Pair`] is two of them in one worker, and [`blocking`] one for threads that wait.
//! [`sim::Sim`] gives another engine the time of a disk that nobody has. To write one, copy [`null`]; the
//! feature `contract` has the tests it must pass, `faulty` an engine that fails on purpose.

pub mod bells;
pub mod blocking;
mod command;
#[cfg(any(test, feature = "contract"))]
pub mod contract;
pub mod engine;
#[cfg(any(test, feature = "faulty"))]
pub mod faulty;
mod immediate;
pub mod io_uring;
pub mod linux_aio;
pub mod null;
pub mod nvme;
mod op_set;
mod operation;
pub mod pair;
mod pool;
pub mod sim;
mod sys;
pub mod threads;

pub use command::{Command, CommandRefused};
pub use engine::{BellId, CommandPort, Counters, Engine, Handle, Limits, Reaped};
#[cfg(any(test, feature = "faulty"))]
pub use faulty::{Fault, Faulty};
pub use immediate::Immediate;
pub use io_uring::{IoUring, IoUringSetup};
pub use linux_aio::LinuxAio;
pub use null::Null;
pub use nvme::Nvme;
pub use op_set::OpSet;
pub use operation::*;
pub use pair::{Pair, Second};
pub use sim::{Model, Sim, SimSetup};
pub use threads::{Threads, ThreadsSetup};
