//! What an engine passes on to drivers.

use crate::operation::FileId;

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
    /// As [`Full`](crate::Full): try again after a reap.
    #[error("the engine has as many commands in flight as it takes")]
    Full,
}
