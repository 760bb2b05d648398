//! How fast a target is, and how that compares: `ringway bench`.
//!
//! `options.rs` is what can be said, `target.rs` opens, `crew.rs` runs one job per thread
//! (`lane.rs`, hot) and adds up (`tally.rs`), `summary.rs` prints, `html.rs` draws. `origins.rs`
//! repeats published measurements.

mod command;
pub mod content;
mod crew;
mod file_port;
pub mod fill;
mod harvest_later;
mod html;
mod inside;
mod lane;
mod ledger;
mod measured;
mod options;
pub mod origins;
mod pace;
mod pattern;
pub mod peer;
mod port;
pub mod random;
mod record;
mod round;
mod summary;
mod tally;
mod target;
mod trace;
pub mod usage;
mod versus;

pub use command::run;
pub use options::{BenchArgs, seconds};
