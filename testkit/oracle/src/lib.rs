//! The code under test against an oracle, on a driver made from arbitrary bytes.
//!
//! [`check`], [`packed::check`], [`header::check`], [`inflight::check`] and [`blkif::check`] are each one
//! function for three uses: property tests and corpus tests of `ring`, and the targets
//! `chain`, `packed`, `header`, `inflight` and `blkif` of cargo-fuzz.

#![allow(missing_docs, reason = "a tool of tests; its counts are named")]

pub mod blkif;
pub mod chain;
mod device;
mod fuzz_case;
pub mod header;
pub mod inflight;
pub mod memory;
pub mod packed;

pub use chain::{Counters, check, check_with};
pub use device::{Buffer, Queue};
