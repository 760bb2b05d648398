//! A host that is simulated: storage that fails on purpose, threads of which one runs at a time, chosen by a seed, a
//! clock that goes when somebody waits, chance that is the seed's. What happens is the same for a seed every time.
//!
//! A kill stops everything where it is and forgets it: no destructor runs, threads stay where they stand. So worlds
//! are made in processes that end ([`World`]).

mod call;
mod inode;
mod storage;
pub mod sync;
pub mod thread;
mod time;
mod world;

pub use call::{
    Bell, allocate, boot, forget, identity, punch, random, read_at, wait_for, write_at,
};
pub use inode::Losses;
pub use storage::{File, FileExt, Metadata};
pub use time::Instant;
pub use world::{Faults, Life, World};
