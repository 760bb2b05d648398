//! Chores of the workspace: `cargo run --release -p xtask -- help`.

mod bench;
mod kill;
mod metrics;
mod power_cut;
mod schema;
mod tidy;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "xtask", about = "Chores of the workspace", max_term_width = 100)]
struct Xtask {
    #[command(subcommand)]
    task: Task,
}

/// One subcommand, one module.
#[derive(Debug, Subcommand)]
enum Task {
    /// Measure the daemon beside its peers and beside the bare disk.
    Bench(Box<bench::BenchArgs>),
    /// Kill the daemon again and again under verified traffic: nothing may be lost or done twice.
    Kill(kill::KillArgs),
    /// Write what is made from the list of metrics: docs/metrics.md, contrib/.
    Metrics,
    /// Write docs/control.schema.json from the words of the control socket.
    Schema,
    /// Simulate power cuts: what was acknowledged must be there, and nothing else be touched.
    PowerCut(power_cut::PowerCutArgs),
    /// Style as a test: lengths, floors, names of hazard tests, stray blanks and paths.
    Tidy,
}

fn main() -> anyhow::Result<()> {
    match Xtask::parse().task {
        Task::Bench(args) => bench::run(*args),
        Task::Kill(args) => kill::run(&args),
        Task::Metrics => metrics::run(),
        Task::Schema => schema::run(),
        Task::PowerCut(args) => power_cut::run(&args),
        Task::Tidy => tidy::run(),
    }
}
