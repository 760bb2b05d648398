//! One file of a chain, and what each place of its disk is.

use crate::budget::Budget;
use crate::chain::{Chain, ImageFile};
use crate::decompress::Packed;
use crate::file::BlockFile;
use crate::header::Header;
use crate::journal::is_of_this_boot;
use crate::l2::Tables;
use crate::layout::{Entry, Shape};
use crate::missing::Missing;
use crate::printable::printable;
use crate::read_at::{ReadElsewhere, cut_off};
use ringway_core::host::File;
use ringway_core::host::sync::Mutex;
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// One file of a chain, as it is opened.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The file, not open for direct I/O.
    pub file: Arc<File>,
    /// Bytes of the file, or of the device.
    pub file_bytes: u64,
    /// Its format.
    pub format: LayerFormat,
    /// Where it was when the chain was opened. Another file may have that name by now.
    pub name: PathBuf,
}

/// How a file holds its disk.
#[derive(Clone, Debug)]
pub enum LayerFormat {
    /// As it is.
    Raw,
    /// As it is, in no file of this host; `None` until it is known how it is read.
    Elsewhere(Option<Arc<dyn ReadElsewhere>>),
    /// By tables.
    Qcow2 {
        /// What its header says.
        shape: Shape,
        /// Where its data are, if they are in another file, and that file's bytes.
        data: Option<(Arc<File>, u64)>,
    },
}

/// What to tell of an image that waits for the journal of a daemon ([`Header::waits_for_journal`]).
pub const NOT_WHOLE: &str = "not all that was written to it is in it: its daemon was killed together with its helper, and what \
     the guest had not flushed is in that daemon's --state-dir. Serve it once with that folder, not read-only, and \
     go on when that listens. A copy of an image that was in use says the same: serve it once, too";

impl Header {
    /// True if not all that was answered of it is in it: a daemon was killed together with its helper since the host
    /// came up, and has what its guest did not flush in its state folder. A copy of an image that was in use
    /// says the same.
    #[must_use]
    pub fn waits_for_journal(&self) -> bool {
        is_of_this_boot(Shape::from(self).autoclear)
    }
}

impl Layer {
    /// As [`Header::waits_for_journal`], of what its header said when the chain was
    /// opened.
    #[must_use]
    pub fn waits_for_journal(&self) -> bool {
        match &self.format {
            LayerFormat::Raw | LayerFormat::Elsewhere(_) => false,
            LayerFormat::Qcow2 { shape, .. } => is_of_this_boot(shape.autoclear),
        }
    }

    /// True if it has no tables: nothing was ever written to it. I/O is in multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says, or what is wrong with its first table.
    pub fn is_empty(&self, unit: u32) -> io::Result<bool> {
        let LayerFormat::Qcow2 { shape, .. } = &self.format else { return Ok(false) };
        let tables = Tables::open(BlockFile::new(Arc::clone(&self.file), unit), *shape)?;
        Ok(tables.l2_offsets().next().is_none())
    }

    /// The files of a chain, top first. Backing files cannot be longer than they are now.
    ///
    /// # Errors
    /// What the host says to the question of their sizes.
    pub fn of_chain(chain: Chain) -> io::Result<Vec<Self>> {
        let bytes = |mut file: &File| file.seek(SeekFrom::End(0));
        let layer = |image: ImageFile| {
            if image.is_elsewhere {
                let (file_bytes, format) = (image.virtual_size, LayerFormat::Elsewhere(None));
                return Ok(Self {
                    file: Arc::new(image.file),
                    file_bytes,
                    format,
                    name: image.name,
                });
            }
            let format = match &image.header {
                None => LayerFormat::Raw,
                Some(header) => LayerFormat::Qcow2 {
                    shape: Shape::from(header),
                    data: match image.data_file {
                        None => None,
                        Some(data) => {
                            let end = bytes(&data.file)?;
                            Some((Arc::new(data.file), end))
                        }
                    },
                },
            };
            let file_bytes = bytes(&image.file)?;
            Ok(Self { file: Arc::new(image.file), file_bytes, format, name: image.name })
        };
        chain.files.into_iter().map(layer).collect()
    }
}

/// True if nobody has been told of this mark of this image yet: a chain is opened several times.
fn is_new(mark: u64, image: &Path) -> bool {
    static TOLD: Mutex<Vec<(u64, PathBuf)>> = Mutex::new(Vec::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = !told.iter().any(|(other, path)| *other == mark && path == image);
    if is_new {
        told.push((mark, image.into()));
    }
    is_new
}

/// Where a piece of a disk is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    Zero,
    /// In a file, at an offset.
    Data {
        file: u8,
        offset: u64,
    },
    /// In a compressed cluster, at an offset in it.
    Packed(Packed, usize),
}

impl Found {
    /// The same, as an image says it that is based on it.
    pub(crate) fn above(self) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Data { file, offset } => Self::Data { file: file + 1, offset },
            Self::Packed(packed, within) => {
                Self::Packed(Packed { file: packed.file + 1, ..packed }, within)
            }
        }
    }
}

/// One file of a chain.
#[derive(Debug)]
pub(crate) struct Open {
    /// Bytes of its disk.
    pub(crate) bytes: u64,
    /// Where its data are, among the files.
    file: u8,
    /// Bytes of that file, or fewer if a merge has made it longer since.
    pub(crate) end: u64,
    data: Arc<File>,
    /// None: raw.
    pub(crate) tables: Option<Tables>,
    /// What is missing of it, in words.
    pub(crate) missing: Option<String>,
}

impl Open {
    /// Reads what is needed to begin with. Also gives the file with its data, which is number `file`. All
    /// I/O is in multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says, or what is wrong with it.
    pub(crate) fn new(
        layer: Layer,
        file: u8,
        unit: u32,
        budget: &mut Budget,
    ) -> io::Result<(Self, Arc<File>)> {
        let (mut data, mut end, mut missing) = (Arc::clone(&layer.file), layer.file_bytes, None);
        let (bytes, tables) = match layer.format {
            LayerFormat::Raw | LayerFormat::Elsewhere(_) => (end, None),
            LayerFormat::Qcow2 { shape, data: other } => {
                if is_of_this_boot(shape.autoclear) && is_new(shape.autoclear, &layer.name) {
                    tracing::warn!(
                        "{}: it is a copy of one that was in use, or was served by a daemon that \
                         was killed together with its helper: what that had answered since the last flush is in \
                         its --state-dir, and not in the image. Serve it once with that folder",
                        printable(&layer.name)
                    );
                }
                let data_end = other.as_ref().map(|(_, end)| *end);
                if let Some(other) = other {
                    (data, end) = other;
                }
                let blocks = BlockFile::new(layer.file, unit);
                missing = Missing::of(&blocks, &shape, layer.file_bytes, data_end, budget)?
                    .map(|missing| format!("{}: {missing}", layer.name.display()));
                (shape.size, Some(Tables::open(blocks, shape)?))
            }
        };
        Ok((Self { bytes, file, end, data: Arc::clone(&data), tables, missing }, data))
    }

    /// The same as file number `file` of a base. Nothing is read for it; nothing is written to it any more.
    pub(crate) fn fresh(&self, file: u8) -> Self {
        let tables = self.tables.as_ref().map(Tables::fresh);
        Self { file, data: Arc::clone(&self.data), tables, missing: self.missing.clone(), ..*self }
    }

    /// The file with its data.
    pub(crate) fn data(&self) -> &Arc<File> {
        &self.data
    }

    /// Where the beginning of a range is, of which `len` becomes what is known; `None` if it is where
    /// the file below says.
    pub(crate) fn find(&mut self, at: u64, len: &mut u64) -> io::Result<Option<Found>> {
        if at >= self.bytes {
            // Also where a layer below is longer.
            return Ok(Some(Found::Zero));
        }
        *len = (*len).min(self.bytes - at);
        let Some(tables) = &mut self.tables else {
            return Ok(Some(Found::Data { file: self.file, offset: at }));
        };
        let (size, zstd) = (tables.shape.cluster(), tables.shape.zstd);
        let within = at % size;
        *len = (*len).min(size - within);
        let entry = tables.entry(at / size)?;
        if let Entry::Data { host, .. } | Entry::Compressed { host, .. } = entry {
            if host.saturating_add(size) > self.end {
                // What is merged into a base goes behind the end that it had.
                self.end = self.end.max(self.data.metadata()?.len());
            }
        }
        Ok(match entry {
            Entry::Unallocated => None,
            Entry::Zero { .. } => Some(Found::Zero),
            // Nothing was written there: the file has lost its end.
            Entry::Data { host, .. } | Entry::Compressed { host, .. } if host >= self.end => {
                return Err(cut_off());
            }
            // The last cluster of a file may lack its end, which reads as zeroes.
            Entry::Data { host, .. } if host + within >= self.end => Some(Found::Zero),
            Entry::Data { host, .. } => {
                *len = (*len).min(self.end - (host + within));
                Some(Found::Data { file: self.file, offset: host + within })
            }
            Entry::Compressed { host, bytes } => {
                // Within one cluster of at most 2 MiB.
                #[allow(clippy::cast_possible_truncation)]
                let (cluster, within) = (size as usize, within as usize);
                Some(Found::Packed(Packed { file: self.file, host, bytes, cluster, zstd }, within))
            }
        })
    }
}

/// A range in one piece: zeroes, or wholly within one file. `find` says where the beginning of a range is.
pub(crate) fn piece(
    mut find: impl FnMut(u64, u64) -> io::Result<(Found, u64)>,
    at: u64,
    len: u64,
) -> io::Result<Option<Found>> {
    let (first, mut known) = find(at, len)?;
    while known < len {
        let (next, more) = find(at + known, len - known)?;
        let continues = match (first, next) {
            (Found::Zero, Found::Zero) => true,
            (
                Found::Data { file, offset },
                Found::Data { file: next_file, offset: next_offset },
            ) => file == next_file && offset + known == next_offset,
            _ => false,
        };
        if !continues {
            return Ok(None);
        }
        known += more;
    }
    Ok(match first {
        Found::Packed(..) => None,
        first => Some(first),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies of one image have one mark.
    #[test]
    fn e68_each_copy_of_an_image_in_use_is_named_once() {
        let (one, other) = (Path::new("one.qcow2"), Path::new("other.qcow2"));
        assert_eq!(
            [one, one, other, other].map(|image| is_new(5, image)),
            [true, false, true, false]
        );
    }
}
