//! `ringway io`: reads and writes by hand, or by a script.
//!
//! `command.rs` is what can be said, `medium.rs` what it is said to, `pattern.rs` what is written and
//! expected, `prompt.rs` the line editor.

mod command;
pub(crate) mod disk;
mod dump;
mod medium;
mod pattern;
mod prompt;
pub(crate) mod target;

use clap::{Args, ValueHint};
use command::{Failure, Next, Session};
use medium::{Medium, Open};
use ringway_control::config::{CephArgs, Format};
use ringway_control::log::{LogArgs, LogLevel};
use ringway_terminal::logging;
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use target::Target;

const EXAMPLES: &str = "\
Examples:
  ringway io disk.img                       a prompt; `help` tells the commands
  ringway io vhost-user:/run/ringway/disk.sock -c 'write -P 7 1M 64K' -c flush
  ringway io vhost-user:/run/ringway/disk.sock -c 'verify -P 7 1M 64K'
  ringway io --read-only disk.img -c 'read -v 0 512'
  ringway io --format qcow2 vm7.qcow2 -c 'read -v 1M 512'
  ringway io --read-only rbd:rbd/vm7 -c 'read -v 0 512'
  ringway io disk.img < script              a command on each line, # comments

Commands: read, write, verify, zero, discard, flush, id, info, sleep, quit.
`ringway io TARGET -c 'help write'` tells more; TARGET is not touched by help.

A script ends with the first command that fails, unless --keep-going is given.
Exit status: 0 all done, 1 a command failed, 2 wrong usage, 3 data were not
those expected.";

/// The options of `ringway io`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct IoArgs {
    /// An image file, a block device, vhost-user:SOCKET, nbd:unix:/PATH:EXPORT (or as a URI), or
    /// rbd:POOL/IMAGE.
    #[arg(value_name = "TARGET", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    target: Target,
    /// Carry out CMD instead of asking; may be repeated.
    #[arg(short, long = "command", value_name = "CMD")]
    commands: Vec<String>,
    /// Refuse commands that change the disk.
    #[arg(short, long)]
    read_only: bool,
    /// Files: go around the page cache (O_DIRECT).
    #[arg(long)]
    direct: bool,
    /// The format of an image [default: raw, not written if it looks like another one].
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    format: Option<Format>,
    /// The folder that names of backing files may not lead out of [default: that of the image].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    backing_root: Option<PathBuf>,
    /// How to get to a Ceph cluster.
    #[command(flatten)]
    ceph: CephArgs,
    /// Go on after a command that failed; the exit status tells of the first.
    #[arg(short, long)]
    keep_going: bool,
}

/// Carries out `ringway io`.
///
/// # Errors
/// A target that cannot be opened.
pub(crate) fn run(args: &IoArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, Some(LogLevel::Warn));
    // Before anything is touched: help, and words that are no command.
    for line in &args.commands {
        if let Err(error) = command::parse(line) {
            return misspelt(line, &error);
        }
    }
    let backing_root = args.backing_root.clone();
    let (read_only, direct, format) = (args.read_only, args.direct, args.format);
    args.ceph.check(args.target.source()).map_err(anyhow::Error::msg)?;
    let open = Open { read_only, direct, format, backing_root, ceph: args.ceph.clone() };
    let medium = Medium::open(&args.target, open)?;
    let mut session = Session::new(medium, log.quiet);
    if args.commands.is_empty() && std::io::stdin().is_terminal() {
        prompt::run(&mut session, &args.target)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut lines: Box<dyn Iterator<Item = std::io::Result<String>>> = if args.commands.is_empty() {
        Box::new(std::io::stdin().lock().lines())
    } else {
        Box::new(args.commands.iter().cloned().map(Ok))
    };
    script(&mut session, &mut lines, args)
}

/// Carries out line by line.
fn script(
    session: &mut Session,
    lines: &mut dyn Iterator<Item = std::io::Result<String>>,
    args: &IoArgs,
) -> anyhow::Result<ExitCode> {
    let mut first = None;
    for (number, line) in (1..).zip(lines) {
        let line = line?;
        match session.line(&line) {
            Ok(Next::GoOn) => {}
            Ok(Next::Quit) => break,
            Err(failure) => {
                let line = line.trim();
                let place = if args.commands.is_empty() { "line" } else { "command" };
                ringway_terminal::logging::complain(
                    &failure.error().context(format!("{place} {number}: {line}")),
                );
                first.get_or_insert(failure.status());
                if !args.keep_going {
                    break;
                }
            }
        }
    }
    Ok(first.map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// Help is no mistake; anything else is wrong usage.
fn misspelt(line: &str, failure: &Failure) -> anyhow::Result<ExitCode> {
    match failure {
        Failure::Help(text) => {
            crate::io::command::say(text.trim_end())?;
            Ok(ExitCode::SUCCESS)
        }
        failure => {
            ringway_terminal::logging::complain(&failure.error().context(line.to_owned()));
            Ok(ExitCode::from(2))
        }
    }
}
