//! Header extensions of a qcow2 image: type, length, data, padded to 8 bytes.

use crate::fields::{field, wide, wrong};
use crate::refused::Refused;

/// Types of extensions, by the specification.
pub(crate) mod kind {
    pub(crate) const END: u32 = 0;
    pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
    pub(crate) const BITMAPS: u32 = 0x2385_2875;
    pub(crate) const DATA_FILE: u32 = 0x4441_5441;
}

/// Bytes of an entry of the table of feature names: kind, bit, name.
const NAME_ENTRY: usize = 48;
/// The most bitmaps: QEMU's limit.
const BITMAPS_MAX: u32 = 65535;
/// Bytes of the largest directory of bitmaps: QEMU's limit, 65535 entries of 1024 bytes.
const BITMAP_DIRECTORY_MAX: u64 = 65535 * 1024;

/// Dirty bitmaps that are kept in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// How many.
    pub count: u32,
    /// Bytes of their directory.
    pub directory_bytes: u64,
    /// Where it is.
    pub directory_offset: u64,
    /// Somebody who knows them has written last, so they are right.
    pub consistent: bool,
}

/// What is known of the extensions.
#[derive(Debug, Default)]
pub(crate) struct Extensions {
    pub(crate) backing_format: Option<String>,
    pub(crate) data_file: Option<Vec<u8>>,
    pub(crate) bitmaps: Option<Bitmaps>,
    /// Entries of the table of feature names.
    names: Vec<u8>,
}

impl Extensions {
    /// Reads the extensions between the header and the name of the backing file, or the end of the
    /// first cluster.
    pub(crate) fn parse(bytes: &[u8], length: usize, backing: u64) -> Result<Self, Refused> {
        let end = match usize::try_from(backing) {
            Ok(at) if at != 0 => at.min(bytes.len()),
            _ => bytes.len(),
        };
        let (mut found, mut at) = (Self::default(), length);
        // Without an end each of them takes 8 bytes at least: the first cluster bounds the walk.
        while at + 8 <= end {
            let kind = field(bytes, at, "a header extension")?;
            let len = field(bytes, at + 4, "a header extension")?;
            if kind == kind::END {
                break;
            }
            let data = bytes[..end].get(at + 8..).and_then(|rest| rest.get(..len as usize));
            let data = data.ok_or(Refused::Truncated("a header extension"))?;
            found.take(kind, data)?;
            at += 8 + data.len().next_multiple_of(8);
        }
        Ok(found)
    }

    fn take(&mut self, kind: u32, data: &[u8]) -> Result<(), Refused> {
        match kind {
            kind::BACKING_FORMAT => {
                self.backing_format = Some(String::from_utf8_lossy(data).into_owned());
            }
            kind::DATA_FILE => self.data_file = Some(data.to_vec()),
            kind::FEATURE_NAMES => self.names = data.to_vec(),
            kind::BITMAPS => self.bitmaps = Some(bitmaps(data)?),
            // Others may be ignored, says the specification.
            _ => {}
        }
        Ok(())
    }

    /// True if the extensions end by their own mark, not by the name of the backing file behind them:
    /// then they are the same without that name.
    pub(crate) fn end_by_mark(bytes: &[u8], length: usize, backing: u64) -> bool {
        let end = usize::try_from(backing).map_or(bytes.len(), |at| at.min(bytes.len()));
        let mut at = length;
        while at + 8 <= end {
            match (field(bytes, at, ""), field(bytes, at + 4, "")) {
                (Ok(kind::END), _) => return true,
                (Ok(_), Ok(len)) => at += 8 + (len as usize).next_multiple_of(8),
                _ => return false,
            }
        }
        false
    }

    /// Where the format of the backing file is, whose name has 8 bytes at most, and where the extensions
    /// end, if they do so by their own mark.
    pub(crate) fn backing_format(
        bytes: &[u8],
        length: usize,
        backing: u64,
    ) -> Option<(usize, usize)> {
        let end = usize::try_from(backing).map_or(bytes.len(), |at| at.min(bytes.len()));
        let (mut at, mut format) = (length, None);
        while at + 8 <= end {
            let (kind, len) = (field(bytes, at, "").ok()?, field(bytes, at + 4, "").ok()?);
            match kind {
                kind::END => return Some((format?, at + 8)),
                kind::BACKING_FORMAT if (1..=8).contains(&len) => format = Some(at + 8),
                kind::BACKING_FORMAT => return None,
                _ => {}
            }
            at += 8 + (len as usize).next_multiple_of(8);
        }
        None
    }

    /// The image's own name for an incompatible feature, for people to read.
    pub(crate) fn incompatible_name(&self, bit: u8) -> Option<String> {
        let entry = self.names.chunks_exact(NAME_ENTRY).find(|entry| entry[..2] == [0, bit])?;
        let name = entry[2..].split(|byte| *byte == 0).next().unwrap_or_default();
        let plain = |c: char| if c.is_control() { '?' } else { c };
        Some(String::from_utf8_lossy(name).chars().map(plain).collect())
    }
}

fn bitmaps(data: &[u8]) -> Result<Bitmaps, Refused> {
    let count = field(data, 0, "the bitmaps extension")?;
    let directory_bytes = wide(data, 8, "the bitmaps extension")?;
    let directory_offset = wide(data, 16, "the bitmaps extension")?;
    if count > BITMAPS_MAX {
        return Err(wrong("nb_bitmaps", count, "there are at most 65535"));
    }
    if directory_bytes > BITMAP_DIRECTORY_MAX {
        let why = "a directory has at most 1024 bytes for each of 65535 bitmaps";
        return Err(wrong("bitmap_directory_size", directory_bytes, why));
    }
    Ok(Bitmaps { count, directory_bytes, directory_offset, consistent: false })
}
