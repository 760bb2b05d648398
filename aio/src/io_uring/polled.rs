//! A second ring, for transfers whose completions are looked for at the device itself instead of
//! being told by an interrupt (IORING_SETUP_IOPOLL). Such a ring takes reads and writes with O_DIRECT
//! and nothing else, so doorbells, flushes and the rest stay with the first ring.

use io_uring::types::Fd;
use io_uring::{EnterFlags, IoUring as Ring, opcode, squeue};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::transient::is_transient;
use crate::engine::{Done, FileId, Full, Reaped};

/// Bytes of the read that tries a file out: a block of any disk.
const TRIAL_BYTES: usize = 4096;

#[repr(C, align(4096))]
struct Block([u8; TRIAL_BYTES]);

/// Whether transfers of `file` can be polled for. Reads one block of it.
///
/// # Errors
/// Says why not.
pub fn can_poll(file: &File) -> io::Result<()> {
    let ring = set_up(1).map_err(|e| {
        io::Error::new(e.kind(), format!("the kernel refuses a polled io_uring: {e}"))
    })?;
    let (slots, free, refused) = (vec![(0, FileId(0))], vec![0], Vec::with_capacity(1));
    let mut polled = Polled { ring, slots, free, refused };
    let mut block = Box::new(Block([0; TRIAL_BYTES]));
    let fd = Fd(file.as_raw_fd());
    // 4096 fits.
    #[allow(clippy::cast_possible_truncation)]
    let read = opcode::Read::new(fd, block.0.as_mut_ptr(), TRIAL_BYTES as u32).build();
    let file = FileId(0);
    let mut out = Reaped::with_capacity(1, 0);
    // SAFETY: the block outlives the ring's use of it: the loop ends when the read has.
    unsafe { polled.queue(read, 0, file) }.map_err(|_| io::Error::other("a new ring is full"))?;
    while polled.reap(&mut out) == 0 {
        polled.enter(1)?;
    }
    if !polled.refused.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its device has no queues to poll (for NVMe: nvme.poll_queues=N on the kernel's \
             command line), or the file was not opened with O_DIRECT",
        ));
    }
    match out.done.first().map_or(0, |done| done.result) {
        0.. => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

/// The polled ring of one worker.
///
/// # Invariants
/// 1. Each transfer has a place in `slots` from `queue` to `reap`, which is not in `free` then.
pub(super) struct Polled {
    ring: Ring,
    /// Tag and file of each transfer.
    slots: Vec<(u64, FileId)>,
    free: Vec<u32>,
    /// Files whose devices have no queues to poll, as it turned out, until somebody asks. What a file says at first
    /// need not be so: its first block may have been a hole, which no device is asked for.
    refused: Vec<FileId>,
}

fn set_up(entries: u32) -> io::Result<Ring> {
    let mut builder = Ring::builder();
    builder.dontfork().setup_iopoll();
    builder.build(entries)
}

impl Polled {
    pub(super) fn new(depth: u32) -> io::Result<Self> {
        let (slots, free) = (vec![(0, FileId(0)); depth as usize], (0..depth).collect());
        let refused = Vec::with_capacity(depth as usize);
        Ok(Self { ring: set_up(depth)?, slots, free, refused })
    }

    /// A file that could not be polled for: its transfers are to go to the first ring from now on.
    #[inline]
    pub(super) fn take_refused(&mut self) -> Option<FileId> {
        self.refused.pop()
    }

    /// # Safety
    /// The rules of [`crate::Engine::queue`].
    #[inline]
    pub(super) unsafe fn queue(
        &mut self,
        entry: squeue::Entry,
        tag: u64,
        file: FileId,
    ) -> Result<(), Full> {
        let &slot = self.free.last().ok_or(Full)?;
        let entry = entry.user_data(slot.into());
        // SAFETY: passed on to the caller.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Full)?;
        self.free.pop();
        self.slots[slot as usize] = (tag, file);
        Ok(())
    }

    /// True if there is something to submit or to poll for.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.free.len() < self.slots.len()
    }

    /// One `io_uring_enter`: submits, and asks the device at least once; with `want` = 1 until
    /// something is done.
    pub(super) fn enter(&mut self, want: u32) -> io::Result<()> {
        let count = u32::try_from(self.ring.submission().len()).expect("the ring is smaller");
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: the queued entries follow the rules of `queue`; there is no argument.
        let entered = unsafe { self.ring.submitter().enter::<()>(count, want, flags, None) };
        match entered {
            Err(e) if is_transient(&e) => Ok(()),
            entered => entered.map(drop),
        }
    }

    /// Takes what is done; asks nobody. What could not be polled for comes back as `EAGAIN`, to be queued again.
    #[inline]
    pub(super) fn reap(&mut self, out: &mut Reaped) -> usize {
        let before = out.done.len();
        for found in self.ring.completion() {
            // A place in `slots`.
            #[allow(clippy::cast_possible_truncation)]
            let slot = found.user_data() as u32;
            let (tag, file) = self.slots[slot as usize];
            self.free.push(slot);
            let mut result = found.result();
            if result == -libc::EOPNOTSUPP {
                self.refused.push(file);
                result = -libc::EAGAIN;
            }
            out.done.push(Done { tag, result });
        }
        out.done.len() - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_polled_is_said_why() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        // Opened without O_DIRECT: no kernel polls for that.
        match can_poll(&file) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                assert!(e.to_string().contains("O_DIRECT"), "{e}");
            }
            Err(e) => assert!(e.to_string().contains("io_uring"), "{e}"),
            Ok(()) => panic!("a cached file cannot be polled for"),
        }
    }
}
