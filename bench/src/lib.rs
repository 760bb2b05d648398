//! How fast a target is, and how that compares: `ringway bench`, and what measures in other programs.
//!
//! ```
//! use ringway_bench::{AccessArgs, Load, Rw, Sizes, Target, measure};
//! use std::time::Duration;
//!
//! # fn main() -> anyhow::Result<()> {
//! // 4 KiB reads anywhere, 32 at a time, of a disk without data that this process serves.
//! let target: Target = "null:1G".parse().map_err(anyhow::Error::msg)?;
//! let runtime = Some(Duration::from_millis(100));
//! let load = Load { runtime, ..Load::new(Rw::Randread, Sizes::one(4096), 32) };
//! let opened = target.open(&load, &AccessArgs::default())?;
//! let outcome = measure(opened, &load, &mut || Ok(()))?;
//! let p99 = outcome.latency_ns(Some(99.0)).unwrap_or(0.0);
//! println!("{:.0} requests a second, p99 {:.1} µs", outcome.iops(), p99 / 1000.0);
//! # assert!(outcome.done() > 0 && p99 > 0.0);
//! # Ok(())
//! # }
//! ```
//!
//! `options.rs` is what can be said, `target.rs` opens (`elsewhere.rs` what is behind a network),
//! `runner.rs` runs one job per thread (`job.rs`, hot) and adds up (`counters.rs`), `summary.rs`
//! prints, `html.rs` draws. `origins.rs` repeats published measurements.

mod backend;
mod command;
pub mod content;
mod counters;
pub mod elsewhere;
mod file_backend;
pub mod fill;
mod handle;
mod harvest_later;
mod host;
mod html;
mod image_disk;
mod indirect;
mod inside;
mod job;
mod load;
mod measured;
mod options;
pub mod origins;
mod outcome;
mod pattern;
pub mod peer;
mod queue_set;
mod rate_limit;
mod record;
mod refusal;
mod round;
mod runner;
mod served_here;
mod summary;
mod target;
mod trace;
mod units;
pub mod usage;
mod verifier;
mod versus;

pub use backend::{Ask, Backend, Effort};
pub use command::run;
pub use host::{Host, HostLook, Interrupts};
pub use indirect::IndirectArg;
pub use load::{AccessArgs, Load, seconds};
pub use options::BenchArgs;
pub use outcome::Outcome;
pub use pattern::{Rw, Sizes};
pub use queue_set::QueueSet;
pub use rate_limit::Rate;
pub use runner::measure;
pub use served_here::ServedHere;
pub use target::{Opened, Server, Target};
pub use versus::median;
