//! What engines are asked to do, with which files, and what became of it (hot). How files come and go:
//! `operation/files.rs`.

mod files;

use ringway_core::{DataOp, Segment};
use std::fs::File;
use std::os::fd::RawFd;
use std::sync::Arc;

/// What an engine can do to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IoOp {
    /// `preadv2`.
    Read,
    /// `pwritev2`.
    Write,
    /// `pwritev2` with RWF_DSYNC: durable when it completes.
    WriteDurable,
    /// `fdatasync`.
    Sync,
    /// `fallocate` PUNCH_HOLE | KEEP_SIZE: gives the space back; the range reads as zeroes.
    PunchHole,
    /// `fallocate` ZERO_RANGE | KEEP_SIZE: the range reads as zeroes, its space stays reserved.
    ZeroRange,
    /// BLKDISCARD on a block device: the range may read as anything.
    Discard,
}

impl From<DataOp> for IoOp {
    #[inline]
    fn from(op: DataOp) -> Self {
        match op {
            DataOp::Read => Self::Read,
            DataOp::Write => Self::Write,
            DataOp::WriteDurable => Self::WriteDurable,
        }
    }
}

impl IoOp {
    /// True if bytes move between memory and the file.
    #[must_use]
    pub const fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::WriteDurable)
    }
}

/// A file that an engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// The table of files an engine knows: each attached, with a note of the engine's about it.
///
/// ```
/// # use ringway_aio::Files;
/// # use std::{fs::File, sync::Arc};
/// let mut files = Files::new();
/// let id = files.attach(&Arc::new(File::open("/dev/null").unwrap()), "what the engine notes");
/// assert_eq!(files.get(id).note, "what the engine notes");
/// files.detach(id); // lets the file go
/// ```
///
/// # Invariants
/// 1. A slot holds its file open, so its descriptor is good as long as it is attached.
#[derive(Debug)]
pub struct Files<T> {
    slots: Vec<Option<Known<T>>>,
}

/// An attached file.
#[derive(Debug)]
pub struct Known<T> {
    /// Its descriptor.
    pub fd: RawFd,
    /// What the engine noted about it.
    pub note: T,
    _open: Arc<File>,
}

impl<T> Files<T> {
    /// The file.
    ///
    /// # Panics
    /// If it is not attached, which is a duty of [`crate::Engine::queue`]'s caller.
    #[inline]
    #[must_use]
    pub fn get(&self, id: FileId) -> &Known<T> {
        self.slots[id.0 as usize].as_ref().expect("the file is attached")
    }

    /// What is to be known of it.
    pub(crate) fn note_mut(&mut self, id: FileId) -> &mut T {
        &mut self.slots[id.0 as usize].as_mut().expect("the file is attached").note
    }
}

/// One operation on a file.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// Comes back with the result. The top bit must be clear: engines use it for doorbells.
    pub tag: u64,
    /// What to do.
    pub op: IoOp,
    /// To which file.
    pub file: FileId,
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes. For data the length of the memory; 0 for [`IoOp::Sync`].
    pub len: u64,
    /// The memory; [`IoMemory::NONE`] unless [`IoOp::moves_data`].
    pub memory: IoMemory<'a>,
}

/// The memory of an operation.
#[derive(Clone, Copy, Debug)]
pub enum IoMemory<'a> {
    /// Pieces of our address space. The list itself must live as long as the operation: engines
    /// hand it to the kernel without copying it.
    Segments(&'a [Segment]),
    /// [`Io::len`] bytes of a buffer that the engine knows by a number, from `offset` on: one of
    /// [`Engine::set_buffer`](crate::Engine::set_buffer), or one that a kernel driver has put there, whose bytes are then moved
    /// without ever being mapped here. Only for engines with [`Limits::registered_buffers`](crate::Limits::registered_buffers).
    Registered {
        /// The number, below [`Limits::registered_buffers`](crate::Limits::registered_buffers).
        buffer: u16,
        /// Where in the buffer, in bytes.
        offset: u32,
    },
}

// No larger than the list alone: the discriminant is the list's pointer.
const _: () = assert!(size_of::<IoMemory<'_>>() == size_of::<&[Segment]>());

impl<'a> IoMemory<'a> {
    /// For operations that move no data.
    pub const NONE: Self = Self::Segments(&[]);

    /// The segments; none if the memory is a registered buffer.
    #[inline]
    #[must_use]
    pub const fn segments(self) -> &'a [Segment] {
        match self {
            Self::Segments(segments) => segments,
            Self::Registered { .. } => &[],
        }
    }

    /// The segments, for engines without registered buffers: nothing to ask.
    ///
    /// # Safety
    /// The memory is no registered buffer, which [`Engine::queue`](crate::Engine::queue) promises to an engine that has no
    /// [`Limits::registered_buffers`](crate::Limits::registered_buffers).
    #[inline]
    #[must_use]
    pub const unsafe fn segments_unchecked(self) -> &'a [Segment] {
        match self {
            Self::Segments(segments) => segments,
            // SAFETY: passed on to the caller.
            Self::Registered { .. } => unsafe { std::hint::unreachable_unchecked() },
        }
    }
}

impl<'a> From<&'a [Segment]> for IoMemory<'a> {
    fn from(segments: &'a [Segment]) -> Self {
        Self::Segments(segments)
    }
}

/// The only refusal of [`Engine::queue`](crate::Engine::queue): nothing was queued, try again after a reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What became of one operation, or of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag of its [`Io`] or [`Command`](crate::Command).
    pub tag: u64,
    /// Bytes moved (0 for operations that move none), or a negative `errno`, as the kernel says it. Of
    /// a command what the driver says, below zero if it is an `errno`.
    pub result: i32,
}
