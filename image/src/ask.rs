//! What a queue asks of an image's thread, and what it is answered.

use ringway_core::mem::Segments;
use ringway_core::{ByteRange, Op};

/// A part of a request that is not simply in a file.
#[derive(Debug)]
pub struct Ask {
    /// Comes back with the answer.
    pub tag: u16,
    /// Read, write, discard, write zeroes; or flush: entries of tables that wait for one go into the file,
    /// which is then to be made durable by whoever asks.
    pub op: Op,
    /// Which part of the disk; not empty, and within it, unless it is a flush.
    pub range: ByteRange,
    /// The memory of the request; not looked at for operations that move no data. A read without any
    /// (null) only has the table say where it would begin.
    pub memory: *const Segments,
    /// Where in that memory the part begins, in bytes.
    pub skip: u64,
    /// What becomes of the room that zeroes have in the file.
    pub room: Room,
}

/// Room in the file of what is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It may be given back.
    Freed,
    /// What has some keeps it, and nothing else gets any, but for parts of clusters.
    Kept,
    /// All of it has some afterwards, as what is written has.
    Made,
}

// SAFETY: whoever asks vouches for the memory until the answer is there (`ImageClient::ask`).
unsafe impl Send for Ask {}

impl Ask {
    /// True if a file that takes multiples of `unit` bytes takes this.
    pub(crate) fn fits(&self, unit: u32) -> bool {
        if unit == 1 {
            return true;
        }
        let (mask, unit) = (unit as usize - 1, u64::from(unit));
        // SAFETY: the list is valid until the answer (`ImageClient::ask`).
        let segments = unsafe { (*self.memory).as_slice() };
        let memory = segments.iter().all(|s| (s.base as usize | s.len) & mask == 0);
        memory && self.range.is_aligned(unit)
    }

    /// Copies into guest memory, from `done` bytes behind the beginning of the part.
    pub(crate) fn scatter(&self, done: u64, from: &[u8]) {
        // SAFETY: as above; nobody relies on the content of the memory until then.
        unsafe { (*self.memory).scatter(self.skip + done, from) };
    }
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// That of the question.
    pub tag: u16,
    /// So many bytes from its beginning are done; 0: the table knows where they are by now. A negative
    /// `errno` if it failed.
    pub result: i64,
}

/// What became of a part that was to be copied from what an image is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// So many bytes of the disk, from its beginning, are no longer looked for in what it is based on.
    pub next: u64,
    /// Bytes that were read from there.
    pub read: u64,
    /// Bytes of clusters that were copied: the others were zeroes.
    pub copied: u64,
}
