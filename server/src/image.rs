//! From what was said about a disk to the open disk.

use anyhow::{Context, bail};
use ringway_aio::io_uring::can_poll;
use ringway_control::size::Size;
use ringway_disk::open::open_unmapped;
use ringway_disk::{CacheMode, Disk, EngineKind, OpenOptions};

/// Opens the disk of a plan, whose image's tables are not read if it is no raw one, and says what its user should know.
///
/// # Errors
/// What is wrong with it; nothing was created or changed then.
pub(super) fn open_disk(options: &OpenOptions) -> anyhow::Result<Disk> {
    let disk = open_unmapped(options)?;
    if disk.cache() == CacheMode::Unsafe && disk.is_real() {
        tracing::warn!(
            "{}: --cache unsafe ignores flushes: a crash of this host LOSES what guests believe is \
             safe. Use it for data you can make again",
            disk.name()
        );
    }
    if disk.is_incoming() && disk.is_real() && disk.cache() != CacheMode::None {
        tracing::warn!(
            "{}: --cache {} and --incoming: if the source is on another host, a daemon that is killed \
             at the wrong moment can leave writes in that host's page cache. --cache none has none",
            disk.name(),
            disk.cache()
        );
    }
    let bytes = disk.geometry().capacity;
    if let Some(wanted) = options.create_bytes.filter(|&wanted| wanted != bytes) {
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
    can_poll(&disk.file()).with_context(|| format!("{name}: --iopoll cannot work"))
}
