//! Commands that a queue hands to the engine of its worker ([ADR 0023](../../docs/adr/0023-commands-and-numbered-buffers.md)).

use ringway_aio::{Command, CommandRefused, Engine, FileId};
use std::fs::File;
use std::sync::Arc;

/// What the commands of a queue need. A worker keeps it free for the queue as long as that is there.
#[derive(Clone, Debug)]
pub struct CommandSetup {
    /// Whose driver takes them.
    pub file: Arc<File>,
    /// How many are in flight at most.
    pub depth: u32,
    /// The most bytes of [`QueueCommand::data`].
    pub bytes: usize,
}

/// A command of a queue, in its driver's own language: as [`Command`], for the queue's file.
#[derive(Clone, Copy, Debug)]
pub struct QueueCommand<'a> {
    /// Comes back with the result. Other queues may use the same.
    pub tag: u32,
    /// What to do (`cmd_op`).
    pub op: u32,
    /// An address or whatever the driver takes there (`addr`).
    pub addr: u64,
    /// The driver's structure; copied at once.
    pub data: &'a [u8],
}

/// A queue's way to the engine of its worker.
#[derive(Debug)]
pub struct CommandSender<'a, E> {
    pub(crate) engine: &'a mut E,
    pub(crate) commands: &'a mut QueueCommands,
    pub(crate) queue: u32,
}

impl<E: Engine> CommandSender<'_, E> {
    /// Takes a command in; no system call. It starts with the operations of the worker's next turn.
    ///
    /// # Errors
    /// [`CommandRefused`]: nothing is in flight. [`CommandRefused::Full`] if as many are as the queue
    /// has asked for, and now and then for a turn. The queue keeps the command and sends it again when it
    /// is asked to: in the next turn, or after the next result.
    ///
    /// # Safety
    /// The driver yields one result for the command. Memory that the command names lives as long as the
    /// queue, wherever that is moved to, and is used as the driver asks until the result has come. (A
    /// worker neither drops a queue nor gives it back before; one that ends leaves it for good.)
    pub unsafe fn send(&mut self, command: &QueueCommand<'_>) -> Result<(), CommandRefused> {
        let QueueCommands { file, depth, in_flight, refused } = self.commands;
        let Some(file) = *file else { return Err(CommandRefused::NoPort) };
        if in_flight == depth {
            return Err(CommandRefused::Full);
        }
        let &QueueCommand { tag, op, addr, data } = command;
        let command = Command { tag: tag_of(self.queue, tag), file, op, addr, data };
        // SAFETY: the file is attached while the queue is there; memory as the caller says.
        let sent = unsafe { self.engine.queue_command(&command) };
        // Room comes with the next submission, for which nothing rings.
        *refused |= sent == Err(CommandRefused::Full);
        *in_flight += u32::from(sent.is_ok());
        sent
    }
}

/// Where a queue's commands are.
///
/// # Invariants
/// 1. `in_flight` counts them from `send` until their results are given to the queue, and is at most `depth`.
#[derive(Debug, Default)]
pub(crate) struct QueueCommands {
    pub(crate) file: Option<FileId>,
    pub(crate) depth: u32,
    pub(crate) in_flight: u32,
    /// The engine had no room for one: the queue is to be asked again.
    pub(crate) refused: bool,
}

impl QueueCommands {
    /// True if nothing of the queue is in flight or waits to be sent.
    pub(crate) fn are_done(&self) -> bool {
        self.in_flight == 0 && !self.refused
    }
}

/// The engine's tag of a command. Queues are numbered from 0, by far fewer than 2^30: the top two bits stay
/// clear.
fn tag_of(queue: u32, tag: u32) -> u64 {
    debug_assert!(queue >> 30 == 0, "queue {queue}");
    u64::from(queue) << 32 | u64::from(tag)
}

/// The queue and its own tag.
pub(crate) fn queue_and_tag(tag: u64) -> (u32, u32) {
    // Both halves have 32 bits.
    #[allow(clippy::cast_possible_truncation)]
    let halves = ((tag >> 32) as u32, tag as u32);
    halves
}
