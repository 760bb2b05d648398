//! How fast a target is, and how that compares: `ringway bench`.
//!
//! `options.rs` is what can be said, `target.rs` opens, `runner.rs` runs one job per thread
//! (`job.rs`, hot) and adds up (`counters.rs`), `summary.rs` prints, `html.rs` draws. `origins.rs`
//! repeats published measurements.

mod backend;
mod command;
pub mod content;
mod counters;
mod file_backend;
pub mod fill;
mod harvest_later;
mod html;
mod inside;
mod job;
mod load;
mod measured;
mod options;
pub mod origins;
mod pattern;
pub mod peer;
mod rate_limit;
mod record;
mod round;
mod runner;
mod summary;
mod target;
mod trace;
mod units;
pub mod usage;
mod verifier;
mod versus;

pub use command::run;
pub use load::seconds;
pub use options::BenchArgs;
