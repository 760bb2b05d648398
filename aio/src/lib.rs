//! Asynchronous file I/O engines behind three verbs: queue, submit, reap.
//!
//! Floor 1a of the house: knows files and memory, but no guest and no disk image.

pub mod engine;

pub use engine::{BellId, Counters, Done, Engine, FileId, Full, Io, IoOp, Limits, OpSet, Reaped};
