//! What can be said on the command line.

use crate::check::CheckArgs;
use crate::commit::CommitArgs;
use crate::copy::args::CopyArgs;
use crate::create::CreateArgs;
use crate::ctl::CtlArgs;
use crate::demo::DemoArgs;
use crate::doctor::DoctorArgs;
use crate::flatten::FlattenArgs;
use crate::info::InfoArgs;
use crate::io::IoArgs;
use crate::man::{CompletionsArgs, ManArgs};
use crate::resize::ResizeArgs;
use crate::top::TopArgs;
use crate::version;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use ringway_bench::BenchArgs;
use ringway_control::log::LogArgs;
use ringway_server::{NbdArgs, ServeArgs};
use std::ffi::OsString;

const EXAMPLES: &str = "\
Examples:
  ringway demo                                      see it work; no VM needed
  ringway serve disk.img --socket disk.sock         serve a disk image
  ringway serve --config disks.toml                 serve several disks
  ringway nbd disk.img --listen unix:nbd.sock       serve it to NBD clients
  ringway doctor disk.img                           what it can do here
  ringway top --control control.sock                what a daemon does, live
  ringway ctl --control control.sock list           its disks; and changes
  ringway bench vhost-user:disk.sock                how fast it is
  ringway copy --verify disk.img backup.img         copy it, leaving out zeroes
  ringway info vhost-user:disk.sock                 what a server serves
  ringway create new.qcow2 --backing base.qcow2     a clone of an image
  ringway check new.qcow2                           is it whole?
  ringway commit new.qcow2                          merge it into its base
  ringway flatten new.qcow2                         or that into it
  ringway help serve                                all options, with examples

Exit status: 0 done, 1 failed, 2 wrong usage, 3 data differ (copy, io,
bench) or are damaged (check), 4 leaks only (check), 128+N ended by signal N.";

/// Block I/O between virtual machines and disks, in user space, over several rings at once.
#[derive(Debug, Parser)]
#[command(name = "ringway", version = version::SHORT, long_version = version::LONG,
          after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// One subcommand, one file.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve disks to virtual machines, over vhost-user-blk or to guests of a Xen host.
    Serve(Box<ServeArgs>),
    /// Serve a disk to NBD clients, on this host or another one.
    // Options of disks that mean nothing here, and are refused.
    #[command(
        mut_arg("socket", |arg| arg.hide(true)),
        mut_arg("nbd", |arg| arg.hide(true)),
        mut_arg("incoming", |arg| arg.hide(true)),
        mut_arg("isolate", |arg| arg.hide(true)),
        mut_arg("memory_max", |arg| arg.hide(true))
    )]
    Nbd(Box<NbdArgs>),
    /// Measure a served disk, a file, or two of them in turn.
    Bench(Box<BenchArgs>),
    /// Serve a temporary disk, verify it, measure it.
    Demo(DemoArgs),
    /// Look into a running daemon and change its disks.
    Ctl(CtlArgs),
    /// Watch what a running daemon does, disk by disk, as it happens.
    Top(TopArgs),
    /// Say what this host and a disk can do, and what would be chosen.
    Doctor(DoctorArgs),
    /// Copy a disk: files, block devices and served disks, either way.
    Copy(Box<CopyArgs>),
    /// Read, write and verify by hand or by a script.
    Io(IoArgs),
    /// Say what a disk is: an image, or one that any server serves.
    Info(InfoArgs),
    /// Make an image: an empty one, or one based on another.
    Create(CreateArgs),
    /// Go through a qcow2 image: is each cluster counted as often as it is used?
    Check(CheckArgs),
    /// Merge an image into the one that it is based on.
    Commit(CommitArgs),
    /// Copy what an image is based on into it.
    Flatten(FlattenArgs),
    /// Make the disk of an image larger or smaller.
    Resize(ResizeArgs),
    /// Print a script with which a shell completes commands and options.
    Completions(CompletionsArgs),
    /// Write manual pages.
    Man(ManArgs),
}

/// The options by which managers of virtual machines start any vhost-user back-end.
const DISCOVERY: [&str; 5] =
    ["--socket-path", "--fd", "--blk-file", "--read-only", "--print-capabilities"];

/// Adds `serve` where a manager left it out: `ringway --socket-path=S --blk-file=F`.
pub(crate) fn with_command(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<_> = args.collect();
    let is_discovery = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        let name = arg.split_once('=').map_or(&*arg, |(name, _)| name);
        DISCOVERY.contains(&name)
    };
    if args.get(1).is_some_and(is_discovery) {
        args.insert(1, "serve".into());
    }
    args
}

/// What people look for who know other programs, and where it is here.
const ELSEWHERE: [(&str, &str); 9] = [
    (
        "convert",
        "`ringway copy` converts between raw and qcow2, and from and to disks that are served",
    ),
    (
        "rebase",
        "`ringway flatten` or `ringway commit` ends a chain; another base is named by `qemu-img rebase`",
    ),
    ("map", "`ringway info --json` tells of extents; `qemu-img map` lists them"),
    (
        "compare",
        "`ringway copy --verify` compares what it has copied; `qemu-img compare` any two images",
    ),
    (
        "snapshot",
        "`ringway ctl snapshot` of a disk that is served, `ringway create --backing` of one that is not",
    ),
    ("measure", "`qemu-img measure` tells how large an image would be"),
    ("amend", "`qemu-img amend` changes what an image is, while nobody serves it"),
    ("bitmap", "`qemu-img bitmap`, while nobody serves the image"),
    ("dd", "`ringway copy` copies whole disks, `ringway io` parts of them"),
];

/// As [`ELSEWHERE`], of options that begin so; of a command, or of all.
const OPTIONS: [(&str, &str, &str); 17] = [
    ("", "--output", "JSON is asked for by --json"),
    (
        "",
        "--log-level",
        "-v, -vv and -q say how much is logged; log-level is a word of the configuration file",
    ),
    ("", "--tls-psk", "TLS is by certificates here: --tls-cert and --tls-key"),
    ("", "--none", "a limit is lifted by its own option: --iops none"),
    (
        "",
        "-U",
        "it waits for no locks of others where it only looks, and never reads past them else",
    ),
    ("", "--image-opts", "an image is named by its path, its format by --format"),
    ("create", "-o", "its options have names of their own: --size, --backing, --cluster-size"),
    ("create", "-u", "what an image is based on is looked at, and has to be there"),
    ("copy", "-o", "its options have names of their own: --cluster-size, --prealloc"),
    ("copy", "-p", "on a terminal it shows by itself how far it is"),
    (
        "copy",
        "-n",
        "an image that is there is overwritten by --force; a block device needs no word",
    ),
    ("copy", "-S", "zeroes are left out; --keep-zeroes writes them"),
    ("copy", "-m", "--in-flight says how many pieces are under way"),
    ("check", "-r", "--repair leaks gives lost space back; `qemu-img check -r` mends more"),
    ("info", "--backing-chain", "--format qcow2 shows all that an image is based on"),
    (
        "resize",
        "--preallocation",
        "it is made larger without it; `ringway copy --prealloc full` takes the room",
    ),
    ("commit", "-d", "the image that was merged stays as it is; nobody needs it any more"),
];

/// The error with a tip, if there is a better one than clap's.
pub(crate) fn with_tip(mut error: clap::Error, args: &[OsString]) -> clap::Error {
    let word = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => String::new(),
    };
    let tip = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = word(&error, ContextKind::InvalidSubcommand);
            let known = ELSEWHERE.iter().find(|(name, _)| *name == word);
            let of_ctl = || of("ctl").find_subcommand(&word).map(|_| format!("`ringway ctl {word}`"));
            known.map(|(_, tip)| (*tip).to_owned()).or_else(of_ctl)
        }
        ErrorKind::UnknownArgument => {
            // To have it taken for a file is never what was meant.
            error.remove(ContextKind::Suggested);
            of_argument(&word(&error, ContextKind::InvalidArg), args)
        }
        // As `qemu-img resize` takes it.
        ErrorKind::ValueValidation if word(&error, ContextKind::InvalidValue).starts_with('+') => {
            Some("name the size that it is to have, not what is added: `ringway info` says what it has".to_owned())
        }
        _ => None,
    };
    if let Some(tip) = tip {
        error.remove(ContextKind::SuggestedSubcommand);
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// The tip for an argument that is not known.
fn of_argument(word: &str, args: &[OsString]) -> Option<String> {
    let is_kind = |pair: &&[OsString]| {
        ["--compress", "-c"].iter().any(|option| pair[0] == **option)
            && ["zlib", "zstd"].iter().any(|kind| pair[1] == **kind)
    };
    if let Some([_, kind]) = args.windows(2).find(is_kind) {
        return Some(format!("write --compress={}", kind.to_string_lossy()));
    }
    let said = args.get(1).map_or("".into(), |command| command.to_string_lossy());
    let is_it = |(command, option, _): &&(&str, &str, &str)| {
        word.starts_with(option) && (command.is_empty() || *command == said)
    };
    if let Some((_, _, tip)) = OPTIONS.iter().find(is_it) {
        return Some((*tip).to_owned());
    }
    let negative =
        word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    negative.then(|| format!("{word} is no size: sizes are as 512, 64K, 10G"))
}

/// One subcommand, for errors that look like those of its options.
///
/// # Panics
/// If there is none of this name.
pub(crate) fn of(name: &str) -> clap::Command {
    let mut cli = Cli::command();
    cli.build();
    cli.find_subcommand(name).expect("it is a subcommand").clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn managers_may_leave_serve_out() {
        let with = |args: &[&str]| with_command(args.iter().map(OsString::from));
        assert_eq!(with(&["ringway", "--socket-path=s", "-q"])[1], "serve");
        assert_eq!(with(&["ringway", "--print-capabilities"])[1], "serve");
        assert_eq!(with(&["ringway", "--version"])[1], "--version");
        assert_eq!(with(&["ringway", "demo", "--fd"])[1], "demo");
        assert_eq!(with(&["ringway"]).len(), 1);
    }
}
