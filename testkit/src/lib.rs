//! Test tools: a back-end in the test's own process, a client that keeps no rule, content that
//! proves itself, random numbers that can be repeated, a simulated disk whose power fails, a
//! xenstore, campaigns that kill a daemon, and the one way to leave a test out.

/// The examples of `docs/embedding.md`.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
struct Embedding;

pub mod kill;
pub mod late_store;
pub mod loop_device;
pub mod mounted;
pub mod nbd;
pub mod pattern;
pub mod power_cut;
pub mod raw;
pub mod rig;
pub mod seed;
pub mod session_fuzz_case;
pub mod skip;
pub mod stalling;
pub mod xenstore;

pub use late_store::LateStore;
pub use loop_device::LoopDevice;
pub use mounted::{Mounted, Thin};
pub use rig::Rig;
pub use seed::Rng;
pub use skip::{Lack, Need, skip};
pub use stalling::StallingStore;
pub use xenstore::FakeStore;
