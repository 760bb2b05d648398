//! Asynchronous file I/O engines behind three verbs: queue, submit, reap.
//!
//! Floor 1a of the house: knows files and memory, but no guest and no disk image.
//!
//! | engine | for |
//! |---|---|
//! | [`null::Null`] | nothing, at once: the tutorial and the yardstick |
//! | [`threads::Threads`] | every file on every host |
//! | [`linux_aio::LinuxAio`] | files opened with O_DIRECT, also where io_uring is forbidden |
//! | [`io_uring::IoUring`] | the best there is, where the kernel has it |
//!
//! For tests and for benchmarks that need a disk nobody has, two wrap another engine:
//! [`faulty::Faulty`] fails operations or cuts them short, [`sim::Sim`] makes them take the time of
//! a simulated disk. [`contract::Suite`] is what all of them pass.

pub mod bells;
#[cfg(any(test, feature = "contract"))]
pub mod contract;
pub mod engine;
#[cfg(any(test, feature = "faulty"))]
pub mod faulty;
mod files;
pub mod io_uring;
pub mod linux_aio;
pub mod null;
mod pool;
pub mod sim;
mod sys;
pub mod threads;

pub use engine::{BellId, Counters, Done, Engine, FileId, Full, Io, IoOp, Limits, OpSet, Reaped};
#[cfg(any(test, feature = "faulty"))]
pub use faulty::{Fault, Faulty};
pub use io_uring::{IoUring, IoUringSetup};
pub use linux_aio::LinuxAio;
pub use null::Null;
pub use sim::{Model, Sim, SimSetup};
pub use threads::{Threads, ThreadsSetup};
