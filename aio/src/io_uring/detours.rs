//! Operations on registered buffers, and those that go to the polled ring.

use super::{IoUring, entry};
use crate::engine::{Full, Io, IoMemory, Reaped};
use io_uring::squeue;
use io_uring::types::Fd;
use ringway_core::Segment;
use std::io;

impl IoUring {
    #[cold]
    pub(super) fn queue_polled(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let Some(polled) = &mut self.polled else { return Err(Full) };
        // SAFETY: a polled ring has no registered buffers (invariant 4).
        let segments = unsafe { io.memory.segments_unchecked() };
        let entry = entry(io, Fd(self.files.get(io.file).fd), segments, None);
        // SAFETY: as in `queue`.
        unsafe { polled.queue(entry, io.tag, io.file) }?;
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    /// Takes what polled transfers came to. A file that could not be polled for is not polled any more; others are.
    #[cold]
    pub(super) fn reap_polled(&mut self, out: &mut Reaped) {
        let Some(polled) = &mut self.polled else { return };
        polled.reap(out);
        while let Some(file) = polled.take_refused() {
            let note = self.files.note_mut(file);
            (note.polled, note.cannot_poll) = (false, true);
        }
    }

    /// Submits polled transfers and asks their devices.
    #[cold]
    pub(super) fn poll(&mut self, want: u32) -> io::Result<()> {
        match &mut self.polled {
            Some(polled) if polled.is_busy() => {
                self.counters.syscalls += 1;
                polled.enter(want)
            }
            _ => Ok(()),
        }
    }

    /// The entry of an operation, where there are registered buffers.
    #[inline(never)]
    pub(super) fn entry_with_buffers(&self, io: &Io<'_>, fd: Fd) -> squeue::Entry {
        match io.memory {
            IoMemory::Segments(segments) => entry(io, fd, segments, self.buffers.find(segments)),
            IoMemory::Registered { buffer, offset } => {
                entry_registered(io, fd, buffer, self.buffers.address(buffer, offset))
            }
        }
    }
}

/// Translates an operation on a registered buffer, from `address` on.
fn entry_registered(io: &Io<'_>, fd: Fd, buffer: u16, address: u64) -> squeue::Entry {
    let at = Segment {
        // The kernel counts in the buffer: this is no pointer that anybody follows.
        base: std::ptr::without_provenance_mut(usize::try_from(address).expect("64 bits")),
        len: usize::try_from(io.len).expect("within limits().max_bytes"),
    };
    entry(io, fd, &[at], Some(buffer))
}
