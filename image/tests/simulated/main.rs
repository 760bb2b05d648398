//! Images on simulated hosts (`core/src/host/simulated.rs`): the real code, with its threads, on storage that fails on
//! purpose, in processes that are killed and on hosts whose power is cut, from a seed. docs/testing.md says how.
//!
//! `RUSTFLAGS="--cfg simulated" CARGO_TARGET_DIR=target/simulated cargo test -p ringway-image --test simulated`
#![cfg(simulated)]

mod history;
mod jobs;
mod model;
mod nth_call;
mod process;
mod served;
