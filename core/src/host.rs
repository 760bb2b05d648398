//! What code asks of the host that a simulation answers in its place: files, threads, locks, time and chance.
//!
//! A crate that goes through here for all of it can be run in a simulated world, the same every time for a seed. In the
//! product these are the items of std and a few calls; with `--cfg simulated` they are those of `simulated/world.rs`.

mod identity;
#[cfg(not(simulated))]
mod real;
#[cfg(simulated)]
mod simulated;

pub use identity::Identity;
#[cfg(not(simulated))]
pub use real::*;
#[cfg(simulated)]
pub use simulated::*;

/// A file that is mapped: its memory is what a kill leaves, in a simulation, too.
pub use std::fs::File as StateFile;
