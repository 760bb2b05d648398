//! Direct I/O on the files of an image.

use super::OpenError;
use super::probe::{FileKind, direct_alignment};
use crate::choices::Alignment;
use ringway_image::{Layer, LayerFormat};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Turns direct I/O on for the files of an image: for its first, or it is an error, and for those that
/// are only read where their file systems have it, in blocks no larger than clusters of the first: that is
/// written in blocks that all of them take. Gives what these take.
pub(super) fn turn_on(path: &Path, layers: &[Layer]) -> Result<Alignment, OpenError> {
    let fail = |why: String| OpenError::NoDirect { path: path.into(), why };
    let mut all = Alignment { memory: 1, offset: 1 };
    let top = layers.first().map_or(u64::MAX, cluster_of);
    let here = layers.iter().filter(|layer| !matches!(layer.format, LayerFormat::Elsewhere(_)));
    for (nth, layer) in here.enumerate() {
        let cluster = cluster_of(layer).min(top);
        let mut files = vec![&layer.file];
        if let LayerFormat::Qcow2 { data, .. } = &layer.format {
            files.extend(data.iter().map(|(data, _)| data));
        }
        for file in files {
            match turn_on_one(file).and_then(|found| judge(found, cluster)) {
                Ok(found) => {
                    all.memory = all.memory.max(found.memory);
                    all.offset = all.offset.max(found.offset);
                }
                Err(why) if nth == 0 => return Err(fail(why)),
                Err(why) => {
                    // Nobody writes it, so that the page cache tells the truth.
                    tracing::debug!("{}: image {nth} of its chain: {why}", path.display());
                    let _ = set_direct(file, false);
                }
            }
        }
    }
    Ok(all)
}

/// Bytes of a cluster: a raw image has none.
fn cluster_of(layer: &Layer) -> u64 {
    match &layer.format {
        LayerFormat::Raw | LayerFormat::Elsewhere(_) => u64::MAX,
        LayerFormat::Qcow2 { shape, .. } => 1 << shape.cluster_bits,
    }
}

fn turn_on_one(file: &File) -> Result<Alignment, String> {
    set_direct(file, true).map_err(|_| "its file system does not offer it".to_owned())?;
    let meta = file.metadata().map_err(|error| error.to_string())?;
    let device = meta.file_type().is_block_device();
    direct_alignment(file, if device { FileKind::BlockDevice } else { FileKind::File }).1
}

/// Where clusters begin anywhere in a block, neighbours would be in one.
fn judge(found: Alignment, cluster: u64) -> Result<Alignment, String> {
    let block = found.offset.max(found.memory);
    if cluster < u64::from(block) {
        return Err(format!("clusters have {cluster} bytes, and blocks {block} here"));
    }
    Ok(found)
}

fn set_direct(file: &File, on: bool) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = if on { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
    // SAFETY: as above.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
