//! Ringway: block I/O between virtual machines and disks, in user space.
//!
//! Floor 4 of the house, the one program. `cli.rs` is what can be said on the command line; the daemon is
//! `ringway-server`, the benchmark `ringway-bench`, and each other command has its file here.

mod check;
mod cli;
mod commit;
mod copy;
mod create;
mod ctl;
mod demo;
mod doctor;
mod flatten;
mod happened;
mod info;
mod interrupt;
mod io;
mod man;
mod merge;
mod new_file;
mod resize;
mod top;
mod version;
mod waiting;
mod wrong_usage;

use clap::{CommandFactory, Parser};
use ringway_terminal::logging::{self, complain};
use ringway_terminal::output;
use std::process::ExitCode;
use wrong_usage::WrongUsage;

fn main() -> ExitCode {
    let args = cli::with_command(std::env::args_os());
    let cli = match cli::Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => cli::with_tip(error, &args).exit(),
        Err(help) => return print_help(&help),
    };
    let result = match cli.command {
        cli::Command::Serve(args) => ringway_server::run(*args, &cli.log, &mut cli::of("serve")),
        cli::Command::Nbd(args) => ringway_server::run_nbd(*args, &cli.log, &mut cli::of("nbd")),
        cli::Command::Bench(args) => ringway_bench::run(*args, &cli.log, &mut cli::of("bench")),
        cli::Command::Demo(args) => demo::run(&args, &cli.log),
        cli::Command::Ctl(args) => ctl::run(args, &cli.log, &mut cli::of("ctl")),
        cli::Command::Top(args) => top::run(args, &cli.log, &mut cli::of("top")),
        cli::Command::Doctor(args) => doctor::run(&args, &cli.log),
        cli::Command::Copy(args) => copy::run(&args, &cli.log),
        cli::Command::Io(args) => io::run(&args, &cli.log),
        cli::Command::Info(args) => info::run(&args, &cli.log),
        cli::Command::Create(args) => create::run(&args, &cli.log),
        cli::Command::Check(args) => check::run(&args, &cli.log),
        cli::Command::Commit(args) => commit::run(&args, &cli.log),
        cli::Command::Flatten(args) => flatten::run(&args, &cli.log),
        cli::Command::Resize(args) => resize::run(&args, &cli.log),
        cli::Command::Completions(args) => man::completions(&args, &mut cli::Cli::command()),
        cli::Command::Man(args) => man::pages(&args, cli::Cli::command()),
    };
    let code = result.unwrap_or_else(|error| {
        complain(&error);
        if error.is::<WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
    });
    logging::finish();
    code
}

/// What `--help` and `--version` ask for. A script that keeps it should hear if it has not arrived.
fn print_help(help: &clap::Error) -> ExitCode {
    match output::print(&help.render().ansi().to_string()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}
