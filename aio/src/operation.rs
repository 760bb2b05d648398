//! What engines are asked to do, and what became of it.

use ringway_core::{DataOp, Segment};

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
    /// All operations, for tables and tests.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteDurable,
        Self::Sync,
        Self::PunchHole,
        Self::ZeroRange,
        Self::Discard,
    ];

    /// True if bytes move between memory and the file.
    #[must_use]
    pub const fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::WriteDurable)
    }
}

/// A set of [`IoOp`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSet(u16);

impl OpSet {
    /// Every operation.
    pub const ALL: Self = Self((1 << IoOp::ALL.len()) - 1);

    /// The set without `op`.
    #[must_use]
    pub const fn without(self, op: IoOp) -> Self {
        Self(self.0 & !(1 << op as u16))
    }

    /// True if `op` is in the set.
    #[must_use]
    pub const fn has(self, op: IoOp) -> bool {
        self.0 & (1 << op as u16) != 0
    }
}

/// A file that an engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

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

/// A command for the driver behind a file, in the driver's own language: what ublk calls FETCH and
/// COMMIT, or NVMe passthrough (`IORING_OP_URING_CMD`). To engines it is opaque.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// Comes back with the result, in [`Reaped::commands`](crate::Reaped::commands): a space of its own, apart from the tags of
    /// operations. The top two bits must be clear.
    pub tag: u64,
    /// Whose driver.
    pub file: FileId,
    /// What to do (`cmd_op`).
    pub op: u32,
    /// An address or whatever the driver takes there (`addr`).
    pub addr: u64,
    /// The driver's structure, at most [`CommandPort::bytes`](crate::CommandPort::bytes) long; copied at once, and followed by
    /// zeroes.
    pub data: &'a [u8],
}

/// Why [`Engine::queue_command`](crate::Engine::queue_command) did not take a command. Nothing was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandRefused {
    /// The engine has no port for commands: [`Limits::commands`](crate::Limits::commands).
    #[error("the engine takes no commands")]
    NoPort,
    /// The command is longer than [`CommandPort::bytes`](crate::CommandPort::bytes).
    #[error("a command of {bytes} bytes, where the engine takes {most}")]
    TooLong {
        /// Its bytes.
        bytes: usize,
        /// What the engine takes.
        most: usize,
    },
    /// As [`Full`]: try again after a reap.
    #[error("the engine has as many commands in flight as it takes")]
    Full,
}

/// The only refusal of [`Engine::queue`](crate::Engine::queue): nothing was queued, try again after a reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What became of one operation, or of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag of its [`Io`] or [`Command`].
    pub tag: u64,
    /// Bytes moved (0 for operations that move none), or a negative `errno`, as the kernel says it. Of
    /// a command what the driver says, below zero if it is an `errno`.
    pub result: i32,
}
