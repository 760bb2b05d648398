//! From what was said about a disk to the open disk.

use crate::config::DiskSpec;
use crate::size::Size;
use anyhow::{Context, bail};
use ringway_aio::io_uring::can_poll;
use ringway_disk::{CacheMode, Disk, EngineKind, OpenOptions, Source, open};
use ringway_export::engines_to_choose;
use std::path::PathBuf;

/// Opens the disk of a plan, and says what its user should know.
///
/// # Errors
/// What is wrong with it; nothing was created or changed then.
pub(super) fn open_disk(spec: &DiskSpec) -> anyhow::Result<Disk> {
    let disk = open(&OpenOptions {
        source: spec.source.clone(),
        read_only: spec.read_only,
        cache: spec.cache,
        engine: spec.engine,
        engines: engines_to_choose(spec.engine),
        serial: spec.serial.clone(),
        block_size: spec.block_size,
        create_bytes: spec.create_bytes,
        lock_wait: spec.lock_wait,
        path: spec.path,
    })?;
    if disk.cache() == CacheMode::Unsafe && disk.is_real() {
        tracing::warn!(
            "{}: --cache unsafe ignores flushes: a crash of this host LOSES what guests believe is \
             safe. Use it for data you can make again",
            disk.name()
        );
    }
    let bytes = disk.geometry().capacity;
    if let Some(wanted) = spec.create_bytes.filter(|&wanted| wanted != bytes) {
        tracing::warn!(
            "{} exists and has {}, not {}: it is served as it is",
            disk.name(),
            Size(bytes),
            Size(wanted)
        );
    }
    Ok(disk)
}

/// Looks whether completions of this disk can be polled for.
///
/// # Errors
/// That they cannot, and why.
pub(super) fn check_iopoll(disk: &Disk) -> anyhow::Result<()> {
    let name = disk.name();
    if disk.engine() != EngineKind::IoUring {
        bail!("{name}: --iopoll is a matter of io_uring, and the engine is {}", disk.engine());
    }
    can_poll(disk.file()).with_context(|| format!("{name}: --iopoll cannot work"))
}

/// An image that was made just now and goes again unless the daemon starts.
pub(super) struct NewImage(Option<PathBuf>);

impl NewImage {
    /// The image, if opening the disk has made it.
    pub(super) fn of(disk: &Disk, spec: &DiskSpec) -> Option<Self> {
        match &spec.source {
            Source::Path(path) if disk.created() => Some(Self(Some(path.clone()))),
            _ => None,
        }
    }

    /// The daemon has started.
    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Best effort: the error that brought us here is the one worth telling.
            let _ = std::fs::remove_file(path);
        }
    }
}
