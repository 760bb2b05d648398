//! Which bytes of which file a range of a disk is.

use crate::disk::Disk;
use ringway_core::ByteRange;

/// The most files of a disk. A raw image is one file. An image with backing files will have more,
/// and needs a `map` that looks, files that are attached to each engine, and syncs of all that are
/// written.
pub(crate) const FILES_MAX: usize = 1;

/// Bytes that lie in one file, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Which of the disk's files.
    pub(crate) file: usize,
    /// Where in the file, in bytes.
    pub(crate) offset: u64,
    /// Bytes of the range from its beginning on; the rest lies elsewhere.
    pub(crate) len: u64,
}

impl Disk {
    /// Where the beginning of `range` lies. Each operation asks, so that its file is a choice for
    /// each extent; for a disk of one file the compiler leaves nothing of it.
    #[inline(always)]
    pub(crate) fn extent(&self, range: ByteRange) -> Extent {
        Extent { file: 0, offset: range.offset(), len: range.len() }
    }

    /// True if all of `range` lies in one file, one byte behind the other.
    #[inline(always)]
    pub(crate) fn is_one_extent(&self, range: ByteRange) -> bool {
        self.extent(range).len == range.len()
    }
}
