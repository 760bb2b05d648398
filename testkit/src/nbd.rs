//! NBD: a server in the test's own process, a client that keeps no rule, and one case of the fuzzer.

mod client;
mod fuzz_case;
mod rig;

pub use client::{
    CLOSED, Client, EXTENDED, Mode, QEMU, Reply, SIMPLE, STRUCTURED, command, extents_of, flag,
    request,
};
pub use fuzz_case::{CaseCounters, check};
pub use rig::NbdRig;
