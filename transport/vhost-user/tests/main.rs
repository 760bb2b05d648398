//! Sessions with front-ends, one test program, because each one is linked anew; what counts for its whole process has a
//! program of its own beside it (`Cargo.toml`).
#![allow(missing_docs)]

mod cost;
mod dirty_log;
mod failing_engine;
mod hazards_drain;
mod hazards_guest;
mod hazards_resize;
mod held;
mod inflight;
mod iommu;
mod memory_slots;
mod message_states;
mod migration;
mod negotiation;
mod overdue;
mod queue_reset;
mod turns;
mod two_drivers;
mod write_cache;
