//! An image or a block device: what the doctor finds, its extents, and its share of the page cache.

use super::chain::Link;
use crate::doctor::image::{Image, inspect as examine};
use anyhow::{anyhow, bail};
use ringway_control::config::CephArgs;
use ringway_image::printable;
use rustix::fs::{SeekFrom, seek};
use serde::Serialize;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A file with more extents is not gone through to its end.
const EXTENTS_MAX: u64 = 100_000;

/// What an image is.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    pub(super) target: String,
    #[serde(flatten)]
    pub(super) image: Image,
    pub(super) extents: Option<Extents>,
    pub(super) memory: Option<Memory>,
    /// What it is if it is a qcow2 image, the first image first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) chain: Option<Vec<Link>>,
    /// Why that cannot be said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) chain_error: Option<String>,
}

/// Where there is data.
#[derive(Debug, Default, Serialize)]
pub(super) struct Extents {
    pub(super) data: u64,
    pub(super) data_bytes: u64,
    pub(super) hole_bytes: u64,
    /// False if there are too many to look at all of them.
    pub(super) complete: bool,
}

/// The page cache's share, in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Memory {
    pub(super) cached_bytes: u64,
    /// Not written to the disk yet.
    pub(super) dirty_bytes: u64,
}

/// Looks at an image, without opening it for writing.
///
/// # Errors
/// One that is not there, or no image.
pub(super) fn inspect(path: &Path) -> anyhow::Result<Facts> {
    // What follows says what it would take to serve it, which nobody has asked for.
    let meta = path.metadata().map_err(|error| cannot_read(path, error))?;
    if meta.is_file() {
        File::open(path).map_err(|error| cannot_read(path, error))?;
    }
    let image = examine(path, &ringway_export::usable_engines(), None, &CephArgs::default());
    if let (None, Some(error)) = (image.bytes, &image.error) {
        bail!("{error}");
    }
    let file = File::open(path).ok();
    let extents = file.as_ref().filter(|_| image.kind == Some("file")).and_then(extents);
    let memory = file.as_ref().and_then(cached);
    Ok(Facts { target: printable(path), image, extents, memory, chain: None, chain_error: None })
}

fn cannot_read(path: &Path, error: io::Error) -> anyhow::Error {
    let name = printable(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match error.kind() {
        io::ErrorKind::NotFound if folder.is_some_and(|folder| !folder.exists()) => {
            anyhow!("{name}: its folder does not exist")
        }
        io::ErrorKind::NotFound => anyhow!("{name}: there is no such file"),
        io::ErrorKind::PermissionDenied => anyhow!("{name}: no permission to read it"),
        _ => anyhow!("{name}: cannot read it: {error}"),
    }
}

fn extents(file: &File) -> Option<Extents> {
    let end = file.metadata().ok()?.len();
    let (mut at, mut found) = (0, Extents { complete: true, ..Extents::default() });
    while at < end {
        if found.data == EXTENTS_MAX {
            found.complete = false;
            break;
        }
        // Without data from here on: ENXIO.
        let data = seek(file, SeekFrom::Data(at)).unwrap_or(end).min(end);
        found.hole_bytes += data - at;
        if data == end {
            break;
        }
        at = seek(file, SeekFrom::Hole(data)).ok()?.clamp(data + 1, end);
        found.data += 1;
        found.data_bytes += at - data;
    }
    Some(found)
}

/// By cachestat(2), since Linux 6.5.
fn cached(file: &File) -> Option<Memory> {
    /// The same number on all architectures.
    const CACHESTAT: libc::c_long = 451;
    // From the first byte to the last.
    let range = [0u64; 2];
    // struct cachestat: cached, dirty, writeback, evicted, recently evicted, in pages.
    let mut pages = [0u64; 5];
    let fd = file.as_raw_fd();
    // SAFETY: the kernel reads two words and writes five.
    let rc = unsafe { libc::syscall(CACHESTAT, fd, &raw const range, &raw mut pages, 0u32) };
    let page = ringway_core::mem::page_size() as u64;
    (rc == 0).then(|| Memory {
        cached_bytes: pages[0] * page,
        dirty_bytes: (pages[1] + pages[2]) * page,
    })
}
