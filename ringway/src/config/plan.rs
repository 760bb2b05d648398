//! All that one daemon does.

use super::{CpuList, DiskSpec, Place};
use crate::logging::{LogFormat, LogLevel};
use clap::{Args, ValueEnum};
use ringway_disk::Source;
use ringway_export::Polling;
use serde::Deserialize;
use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What concerns the daemon as a whole; options win over the file.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Workers")]
pub(crate) struct DaemonArgs {
    /// Threads that serve queues [default: one per queue, at most one per CPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) workers: Option<u16>,
    /// CPUs for workers, such as 0,2-3: each is pinned to one, in turn [default: any].
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuList>,
    /// Whether workers look for work before they sleep: as long as it pays, always (least latency,
    /// a whole CPU each), or never (least CPU time) [default: adaptive].
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) poll: Option<Poll>,
    /// The longest adaptive look, in microseconds [default: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) poll_max_us: Option<u32>,
    /// Let io_uring pin guest memory: less CPU time per byte. Not with a balloon or free page
    /// reporting in the guest, which would corrupt its data.
    #[arg(long)]
    pub(crate) pin_memory: bool,
    /// Let io_uring ask the device for completions instead of waiting for its interrupt: less
    /// latency, a busy CPU while requests are under way. Needs a device with poll queues.
    #[arg(long)]
    pub(crate) iopoll: bool,
    /// Print counts at the end.
    #[arg(long, help_heading = "Output")]
    pub(crate) stats: bool,
}

/// Whether a worker spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    // As long as it pays.
    Adaptive,
    // Never sleeps.
    Always,
    // Sleeps at once.
    Never,
}

impl DaemonArgs {
    /// `self`, and where it says nothing `other`.
    pub(crate) fn or(self, other: &Self) -> Self {
        Self {
            workers: self.workers.or(other.workers),
            cpus: self.cpus.or_else(|| other.cpus.clone()),
            poll: self.poll.or(other.poll),
            poll_max_us: self.poll_max_us.or(other.poll_max_us),
            pin_memory: self.pin_memory || other.pin_memory,
            iopoll: self.iopoll || other.iopoll,
            stats: self.stats || other.stats,
        }
    }

    /// How workers wait.
    ///
    /// # Errors
    /// A limit for something that is switched off.
    pub(crate) fn polling(&self) -> Result<Polling, String> {
        match (self.poll, self.poll_max_us) {
            (Some(Poll::Always | Poll::Never), Some(_)) => {
                Err("poll-max-us is the limit of adaptive polling: leave it out, or choose \
                     adaptive"
                    .into())
            }
            (Some(Poll::Always), None) => Ok(Polling::Always),
            (Some(Poll::Never), None) => Ok(Polling::Never),
            (_, Some(us)) => Ok(Polling::Adaptive { max: Duration::from_micros(us.into()) }),
            (_, None) => Ok(Polling::default()),
        }
    }
}

/// All that one daemon does.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The disks; at least one.
    pub(crate) disks: Vec<DiskSpec>,
    /// What concerns all of them.
    pub(crate) daemon: DaemonArgs,
    /// How log lines look.
    pub(crate) log_format: Option<LogFormat>,
    /// What is logged.
    pub(crate) log_level: Option<LogLevel>,
}

impl Plan {
    /// Refuses two disks on one socket, and two on one image unless both only read it.
    ///
    /// # Errors
    /// The message, with both places.
    pub(crate) fn check_apart(&self) -> Result<(), String> {
        let mut sockets: HashMap<PathBuf, &DiskSpec> = HashMap::new();
        let mut images: HashMap<Identity, &DiskSpec> = HashMap::new();
        for disk in &self.disks {
            if let Place::Socket(path) = &disk.place
                && let Some(other) = sockets.insert(real(path), disk)
            {
                return Err(format!(
                    "{}: socket {} is taken by the disk at {}. Give each disk its own",
                    disk.origin,
                    path.display(),
                    other.origin
                ));
            }
            if let Source::Path(path) = &disk.source
                && let Some(other) = images.insert(identity(path), disk)
                && !(disk.read_only && other.read_only)
            {
                return Err(format!(
                    "{}: image {} is served by the disk at {} as well. Serve it once, or \
                     read-only from both",
                    disk.origin,
                    path.display(),
                    other.origin
                ));
            }
        }
        Ok(())
    }
}

/// What makes two images the same one.
#[derive(PartialEq, Eq, Hash)]
enum Identity {
    /// A file: file system and inode.
    File(u64, u64),
    /// A block device, whatever its node is called.
    Device(u64),
    /// Nothing there yet.
    Path(PathBuf),
}

fn identity(path: &Path) -> Identity {
    match path.metadata() {
        Ok(meta) if meta.file_type().is_block_device() => Identity::Device(meta.rdev()),
        Ok(meta) => Identity::File(meta.dev(), meta.ino()),
        Err(_) => Identity::Path(real(path)),
    }
}

/// The path without links in its folder.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    match (absolute.parent().map(Path::canonicalize), absolute.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

/// The CPUs this process may use.
pub(crate) fn cpus() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| u16::try_from(n.get()).unwrap_or(u16::MAX))
}
