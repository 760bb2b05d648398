//! Commands for drivers.

use super::IoUring;
use super::tags::{BELL, COMMAND};
use crate::engine::{Command, CommandPort, CommandRefused};
use io_uring::types::Fd;
use io_uring::{opcode, squeue};

/// Bytes of a command's data in an entry of 64 bytes. Entries of 128 bytes have room for 80, which
/// NVMe passthrough needs, but a ring has entries of one size only, and half as many operations to a
/// cache line; ublk's commands fit here.
pub(super) const COMMAND_BYTES: usize = 16;

impl IoUring {
    /// As [`Engine::queue_command`](crate::Engine::queue_command).
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn push_command(
        &mut self,
        asked: &Command<'_>,
    ) -> Result<(), CommandRefused> {
        let Some(CommandPort { depth, bytes }) = self.limits.commands else {
            return Err(CommandRefused::NoPort);
        };
        let mut data = [0; COMMAND_BYTES];
        let Some(room) = data.get_mut(..asked.data.len()) else {
            return Err(CommandRefused::TooLong { bytes: asked.data.len(), most: bytes });
        };
        room.copy_from_slice(asked.data);
        debug_assert!(asked.tag & (BELL | COMMAND) == 0, "the top two bits of a tag are clear");
        if self.commands == depth {
            return Err(CommandRefused::Full);
        }
        let file = self.files.get(asked.file);
        let flags = file.note.flags;
        let fd = if flags.is_empty() { file.fd } else { asked.file.0 as i32 };
        let entry = command(asked, Fd(fd), data).flags(flags);
        let entry = entry.user_data(asked.tag | BELL | COMMAND);
        // SAFETY: the caller vouches for what the command names.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| CommandRefused::Full)?;
        self.commands += 1;
        Ok(())
    }
}

/// Translates a command. Its data has its length in the type: what is shorter ends in zeroes.
#[inline]
fn command(command: &Command<'_>, fd: Fd, data: [u8; COMMAND_BYTES]) -> squeue::Entry {
    opcode::UringCmd16::new(fd, command.op).addr(Some(command.addr)).cmd(data).build()
}
