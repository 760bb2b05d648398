//! The options of `ringway copy`.

use crate::io::target::Target;
use crate::new_file::cluster_bits;
use clap::{Args, ValueEnum, ValueHint};
use ringway_control::config::{CephArgs, Format};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ringway copy disk.img backup.img              holes and zeroes take no space
  ringway copy --verify disk.img backup.img     and read back to compare
  ringway copy --resume disk.img backup.img     go on after an interruption
  ringway copy --reflink always a.img b.img     share blocks, or fail
  ringway copy --prealloc falloc a.img b.img    reserve all of its space first
  ringway copy --force disk.img /dev/vg0/vm1    onto a block device
  ringway copy vhost-user:/run/ringway/disk.sock backup.img
  ringway copy --force backup.img vhost-user:/run/ringway/disk.sock
  ringway copy --from-format qcow2 vm7.qcow2 vm7.img   with all it is based on
  ringway copy disk.img disk.qcow2              a qcow2 image, without holes
  ringway copy --compress=zstd disk.img small.qcow2
  ringway copy rbd:rbd/vm7@monday vm7.img
  ringway copy --force vm7.img nbd://10.0.0.5/vm7

A qcow2 image that is made gets its name when it is complete and durable. Of any
other copy that is unfinished there is a journal beside DST (DST.ringway-copy).
When the exit status is 0, DST is complete and durable, the journal is gone.
After 1 and 128+N the copy can go on with --resume, unless DST is qcow2.
Exit status: 0 copied, 1 failed, 2 wrong usage, 3 DST differs from SRC,
4 copied but for what is lost (--salvage), 128+N ended by signal N.";

/// The options of `ringway copy`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CopyArgs {
    /// What to copy: an image file, a block device, vhost-user:SOCKET, nbd:unix:/PATH:EXPORT (or as a
    /// URI), or rbd:POOL/IMAGE, with @SNAP a snapshot of it.
    #[arg(value_name = "SRC", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    pub(super) source: Target,
    /// Where to: a file (made if it is not there), a block device, vhost-user:SOCKET, or what is elsewhere,
    /// as SRC (an image of a cluster is made by `rbd create`).
    #[arg(value_name = "DST", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    pub(super) destination: Target,
    /// Overwrite DST. All but files always need it.
    #[arg(long)]
    pub(super) force: bool,
    /// The format of SRC [default: raw, refused if it looks like another one].
    #[arg(
        short = 'f',
        long,
        visible_alias = "format",
        value_enum,
        value_name = "FORMAT",
        help_heading = "Formats"
    )]
    pub(super) from_format: Option<Format>,
    /// The format of DST [default: qcow2 if DST ends in .qcow2 or with --compress, else raw].
    #[arg(short = 'O', long, value_enum, value_name = "FORMAT", help_heading = "Formats")]
    pub(super) to_format: Option<Format>,
    /// Compress each cluster of a qcow2 image that gets smaller so; KIND follows a =, as in --compress=zstd
    /// [KIND if left out: zlib].
    #[arg(short, long, value_enum, value_name = "KIND", num_args = 0..=1, require_equals = true,
          default_missing_value = "zlib", help_heading = "Formats")]
    pub(super) compress: Option<CompressArg>,
    /// Bytes of a cluster of a qcow2 image, a power of two from 512 to 2M [default: 64K].
    #[arg(long, value_name = "SIZE", value_parser = cluster_bits, help_heading = "Formats")]
    pub(super) cluster_size: Option<u32>,
    /// The folder that names of backing files may not lead out of [default: that of SRC].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Formats")]
    pub(super) backing_root: Option<PathBuf>,
    /// Go on with a copy that was interrupted; begin if there is none.
    #[arg(long, conflicts_with = "force")]
    pub(super) resume: bool,
    /// For --resume from what is no file, whose changes cannot be seen: SRC was not written since.
    #[arg(long, requires = "resume")]
    pub(super) source_unchanged: bool,
    /// Copy a qcow2 image whose end is missing, or that of one that it is based on: what is lost is named,
    /// and zeroes in DST.
    #[arg(long, help_heading = "Formats")]
    pub(super) salvage: bool,
    /// Afterwards read DST back and compare it with SRC.
    #[arg(long)]
    pub(super) verify: bool,
    /// DST (a device or socket) reads as zeroes already: leave zeroes out.
    #[arg(long)]
    pub(super) target_is_zero: bool,
    /// Write the zeroes that SRC holds as data; only its holes stay holes.
    #[arg(long)]
    pub(super) keep_zeroes: bool,
    /// Let DST share the blocks of SRC until one of them is written: files on one file system
    /// (btrfs, XFS and others). Takes no time and no space.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    pub(super) reflink: Reflink,
    /// Give a DST that is a new file space for its holes and zeroes, too; it shares nothing then
    /// [default: off].
    #[arg(long, value_enum, value_name = "HOW")]
    pub(super) prealloc: Option<Prealloc>,
    /// The journal [default: DST.ringway-copy; none for block devices and what is elsewhere].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) journal: Option<PathBuf>,
    /// Requests in flight, of 1 MiB each.
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Speed",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) in_flight: u16,
    /// How files are read and written.
    #[arg(long, value_enum, default_value_t = EngineArg::Auto, help_heading = "Speed")]
    pub(super) engine: EngineArg,
    /// How to get to a Ceph cluster.
    #[command(flatten)]
    pub(super) ceph: CephArgs,
    /// Print JSON instead of a line about what was done.
    #[arg(long, help_heading = "Output")]
    pub(super) json: bool,
}

/// The engine for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum EngineArg {
    // The first one that works here.
    Auto,
    #[value(name = "io_uring")]
    IoUring,
    Threads,
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum CompressArg {
    /// Deflate: every program reads it.
    Zlib,
    /// Zstandard: faster; QEMU 5.1 and later.
    Zstd,
}

/// Whether blocks are shared; words and default as those of cp(1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Reflink {
    /// Where it can be done; copy otherwise.
    #[default]
    Auto,
    /// Fail where it cannot be done.
    Always,
    /// Always copy.
    Never,
}

/// What holes and zeroes get; words as those of qemu-img(1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Prealloc {
    /// No space: they become holes.
    #[default]
    Off,
    /// Space that is reserved, not written (fallocate).
    Falloc,
    /// Zeroes that are written.
    Full,
}

impl fmt::Display for Prealloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Falloc => "falloc",
            Self::Full => "full",
        })
    }
}
