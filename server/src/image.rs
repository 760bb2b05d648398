//! From what was said about a disk to the open disk.

use anyhow::{Context, bail};
use ringway_aio::io_uring::can_poll;
use ringway_control::size::Size;
use ringway_disk::open::open_unmapped;
use ringway_disk::{CacheMode, Disk, EngineKind, OpenOptions, Source};
use std::path::Path;

/// Formats that names say by their ending; raw has none of its own.
const ENDINGS: [&str; 10] =
    ["qcow2", "vmdk", "vdi", "vhd", "vhdx", "qcow", "qed", "parallels", "hdd", "luks"];

/// The format that the ending of a name says, unless that is raw.
#[must_use]
pub fn named_format(path: &Path) -> Option<String> {
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    ENDINGS.contains(&ending.as_str()).then_some(ending)
}

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
    if let (Source::Path(path), false, None) = (&options.source, options.raw, &options.qcow2) {
        if named_format(path).is_some() {
            tracing::warn!(
                "{}: it is a raw image, whatever its name says: `ringway create` makes qcow2 images, to be served \
                 with --format qcow2. --format raw says that it is meant so",
                disk.name()
            );
        }
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
