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

#[cfg(test)]
mod tests {
    use super::Xtask;
    use clap::{Command, CommandFactory, Parser};

    /// The commands below `command` that have none below them, as they are typed.
    fn leaves(command: &Command, words: &[String], found: &mut Vec<Vec<String>>) {
        let mut words = words.to_vec();
        words.push(command.get_name().to_owned());
        if command.has_subcommands() {
            command.get_subcommands().for_each(|below| leaves(below, &words, found));
        } else {
            found.push(words);
        }
    }

    /// Two options of one name and different types are found by clap when it parses, and not before.
    #[test]
    fn every_chore_can_be_called() {
        let mut found = Vec::new();
        leaves(&Xtask::command(), &[], &mut found);
        assert!(found.len() > 10, "{found:?}");
        for words in found {
            if let Err(error) = Xtask::try_parse_from(&words) {
                let missing = clap::error::ErrorKind::MissingRequiredArgument;
                assert_eq!(error.kind(), missing, "{words:?}: {error}");
            }
        }
    }
}
