//! What outlives the process that serves a disk: that a flush has failed, that the disk was paused.
//!
//! A page that whoever opens the disk has put where it stays (a file in memory), and that this process
//! has mapped as long as it has the image's lock: what is stored there is there after SIGKILL, without a system call. Guests cannot reach
//! it. Nothing is known without one, and all else goes on ([ADR
//! 0016](../../docs/adr/0016-state-beside-the-rings.md)).

use ringway_core::file::FileShape;
use ringway_core::mem::{Mapping, MappingError};
use ringway_image::Journal;
use std::any::Any;
use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Bytes of what is kept of every disk.
pub const STATE_BYTES: u64 = 4096;
/// Bytes of the file of a disk: behind that there is a journal for a disk whose image has tables.
pub const STATE_FILE_BYTES: u64 = STATE_BYTES + Journal::BYTES;

/// Where it stands in the page of an export of an NBD server what of it is answered and durable: behind what
/// belongs to whoever looks after the page.
pub const STATE_EXPORT_AT: u64 = 256;

/// A flush has failed, and its guest goes on.
pub const STATE_FLUSH_FAILED: u64 = 1;
/// No requests are taken.
pub const STATE_PAUSED: u64 = 4;
/// What stays true when the process is gone, of the word.
pub const STATE_KEPT: u64 = STATE_FLUSH_FAILED | STATE_PAUSED;
/// A sync through the page cache is under way, and nobody knows its outcome: there is one at a time. (Earlier versions
/// counted them in the upper half of the word.)
pub const STATE_FLUSHING: u64 = 1 << 32;

/// The page of one disk: one word, with the bits above.
pub(crate) struct State {
    mapping: Mapping,
    pub(crate) file: Arc<File>,
    /// Goes when the image is left.
    pub(crate) keeper: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "State({:#x})", self.word().load(SeqCst))
    }
}

impl State {
    /// Maps the page, of [`STATE_BYTES`] bytes. `keeper` is dropped with it.
    pub(crate) fn map(
        file: &File,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, MappingError> {
        let mapping = Mapping::of_file(file, 0, STATE_BYTES)?;
        Ok(Self { mapping, file: Arc::new(file.try_clone()?), keeper })
    }

    /// True if whoever serves the disk next finds it: nobody has deleted its file.
    pub(crate) fn is_found(&self) -> bool {
        !self.mapping.is_lost() && FileShape::of(&self.file).is_ok_and(|shape| shape.links > 0)
    }

    pub(crate) fn word(&self) -> &AtomicU64 {
        // SAFETY: the beginning of the mapping, aligned to a page, which lives as long as `self` and
        // is only touched atomically.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr(self.mapping.at(0).cast())
        }
    }
}
