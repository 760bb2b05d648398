//! A second ring, for transfers whose completions are looked for at the device itself instead of
//! being told by an interrupt (IORING_SETUP_IOPOLL). Such a ring takes reads and writes with O_DIRECT
//! and nothing else, so doorbells, flushes and the rest stay with the first ring.

use io_uring::types::Fd;
use io_uring::{EnterFlags, IoUring as Ring, opcode, squeue};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::transient::is_transient;
use crate::engine::{Done, Reaped};

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
    let mut polled = Polled { ring, in_flight: 0, refused: false };
    let mut block = Box::new(Block([0; TRIAL_BYTES]));
    let fd = Fd(file.as_raw_fd());
    // 4096 fits.
    #[allow(clippy::cast_possible_truncation)]
    let read = opcode::Read::new(fd, block.0.as_mut_ptr(), TRIAL_BYTES as u32).build();
    let mut out = Reaped::with_capacity(1, 0);
    // SAFETY: the block outlives the ring's use of it: the loop ends when the read has.
    unsafe { polled.queue(&read) }.map_err(|_| io::Error::other("a new ring is full"))?;
    while polled.reap(&mut out) == 0 {
        polled.enter(1)?;
    }
    if polled.refused {
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
/// 1. `in_flight` counts transfers from `queue` to `reap`.
pub(super) struct Polled {
    ring: Ring,
    in_flight: u32,
    /// A device has no queues to poll. What a file says at first need not be so: its first block may have been a
    /// hole, which no device is asked for, and another file of a disk may be elsewhere.
    refused: bool,
}

fn set_up(entries: u32) -> io::Result<Ring> {
    let mut builder = Ring::builder();
    builder.dontfork().setup_iopoll();
    builder.build(entries)
}

impl Polled {
    pub(super) fn new(depth: u32) -> io::Result<Self> {
        Ok(Self { ring: set_up(depth)?, in_flight: 0, refused: false })
    }

    /// False once a device could not be polled: transfers go to the first ring from then on.
    #[inline]
    pub(super) fn works(&self) -> bool {
        !self.refused
    }

    /// # Safety
    /// The rules of [`crate::Engine::queue`].
    #[inline]
    pub(super) unsafe fn queue(&mut self, entry: &squeue::Entry) -> Result<(), squeue::PushError> {
        // SAFETY: passed on to the caller.
        unsafe { self.ring.submission().push(entry) }?;
        self.in_flight += 1;
        Ok(())
    }

    /// True if there is something to submit or to poll for.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight > 0
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
            let mut result = found.result();
            if result == -libc::EOPNOTSUPP {
                self.refused = true;
                result = -libc::EAGAIN;
            }
            out.done.push(Done { tag: found.user_data(), result });
        }
        let found = out.done.len() - before;
        // At most as many as are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = found as u32;
        self.in_flight -= fewer;
        found
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
