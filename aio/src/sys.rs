//! The few system calls that engines share, with results as the kernel says them.

use ringway_core::Segment;
use std::ffi::{c_int, c_ulong};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::engine::{Io, IoOp};

/// The mode of `fallocate` for [`IoOp::PunchHole`].
pub(crate) const PUNCH_HOLE: c_int = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// The mode of `fallocate` for [`IoOp::ZeroRange`].
pub(crate) const ZERO_RANGE: c_int = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// `BLKDISCARD`, `_IO(0x12, 119)` of `linux/fs.h`.
const BLKDISCARD: c_ulong = 0x1277;

/// Everything beyond what the kernel can address becomes one offset that it refuses with EINVAL.
/// (Plain -1 would mean "at the file's own position" to it.)
#[inline]
pub(crate) fn kernel_offset(offset: u64) -> i64 {
    offset.min(1 << 63) as i64
}

/// An operation that a thread does by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) tag: u64,
    /// The number of its file.
    pub(crate) file: usize,
    op: IoOp,
    fd: RawFd,
    offset: i64,
    len: u64,
    segments: *const Segment,
    count: c_int,
}

// SAFETY: the pointers are followed by `perform` only, whose caller answers for them.
unsafe impl Send for Job {}

impl Job {
    /// # Safety
    /// The memory is no registered buffer.
    pub(crate) unsafe fn new(io: &Io<'_>, fd: RawFd) -> Self {
        // SAFETY: passed on to the caller.
        let segments = unsafe { io.memory.segments_unchecked() };
        let count = c_int::try_from(segments.len()).expect("within limits().max_segments");
        let (offset, segments) = (kernel_offset(io.offset), segments.as_ptr());
        let file = io.file.0 as usize;
        Self { tag: io.tag, file, op: io.op, fd, offset, len: io.len, segments, count }
    }

    pub(crate) fn op(&self) -> IoOp {
        self.op
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.len
    }

    /// Does it now, on this thread; EINTR is retried. `flags` are RWF flags to add.
    ///
    /// # Safety
    /// The rules of [`crate::Engine::queue`] hold for the operation.
    pub(crate) unsafe fn perform(&self, flags: c_int) -> i32 {
        #[cfg(test)]
        hanging::wait_for(self.fd);
        loop {
            // SAFETY: passed on to the caller.
            let result = unsafe { self.call(flags) };
            if result != -libc::EINTR {
                return result;
            }
        }
    }

    unsafe fn call(&self, flags: c_int) -> i32 {
        let (fd, iov) = (self.fd, self.segments.cast::<libc::iovec>());
        // Only a block device takes more than i64::MAX for what it is: an error of its own.
        let (offset, len) = (self.offset, kernel_offset(self.len));
        let discard = [self.offset as u64, self.len];
        // SAFETY: the caller vouches for the segments, which are laid out as iovecs; `discard` is
        // the pair of u64 that BLKDISCARD reads.
        result(unsafe {
            match self.op {
                IoOp::Read => libc::preadv2(fd, iov, self.count, offset, flags),
                IoOp::Write => libc::pwritev2(fd, iov, self.count, offset, flags),
                IoOp::WriteDurable => {
                    libc::pwritev2(fd, iov, self.count, offset, flags | libc::RWF_DSYNC)
                }
                IoOp::Sync => libc::fdatasync(fd) as isize,
                IoOp::PunchHole => libc::fallocate(fd, PUNCH_HOLE, offset, len) as isize,
                IoOp::ZeroRange => libc::fallocate(fd, ZERO_RANGE, offset, len) as isize,
                IoOp::Discard => libc::ioctl(fd, BLKDISCARD as _, &raw const discard) as isize,
            }
        })
    }
}

/// What a call returned, or the negative `errno`.
fn result(returned: isize) -> i32 {
    if returned < 0 {
        return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    i32::try_from(returned).expect("the kernel moves at most MAX_RW_COUNT bytes")
}

/// Turns a C return value into a result.
pub(crate) fn check(returned: c_int) -> io::Result<c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// A new eventfd with a counter of zero.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Rings an eventfd.
pub(crate) fn ring(fd: RawFd) {
    let one = 1u64;
    // SAFETY: eight bytes of `one` are read. A full counter (EAGAIN) has rung already.
    unsafe { libc::write(fd, (&raw const one).cast(), size_of::<u64>()) };
}

/// Refuses a descriptor that is not open.
pub(crate) fn check_open(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(fd, libc::F_GETFD) }).map(drop)
}

/// True if the file bypasses the page cache.
pub(crate) fn is_direct(file: &File) -> io::Result<bool> {
    // SAFETY: no memory is involved.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    Ok(flags & libc::O_DIRECT != 0)
}

/// True if the file's bytes lie in memory (tmpfs), so that reading and writing is copying. Only such files have seals,
/// which the kernel knows by itself: `fstatfs` asks the file system, whose server may not answer, and takes a device
/// for its node in `/dev`.
pub(crate) fn is_in_memory(file: &File) -> bool {
    // SAFETY: no memory is involved.
    (unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }) >= 0
}

/// Tells the kernel what it does not know of tmpfs: its files never block. io_uring then copies in
/// place; without this it sends each transfer to a thread of its own. Other calls do not care.
pub(crate) fn mark_nonblocking(file: &File) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// True if the kernel answers EAGAIN instead of blocking when asked so (RWF_NOWAIT).
pub(crate) fn can_refuse_to_block(file: &File) -> bool {
    let mut byte = 0u8;
    let iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one byte is read into `byte`.
    let got = unsafe { libc::preadv2(file.as_raw_fd(), &raw const iov, 1, 0, libc::RWF_NOWAIT) };
    got >= 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device is none, though its node is in a file system of memory.
    #[test]
    fn b68_files_in_memory_are_told_from_devices_and_others() {
        // SAFETY: the name is a string of C.
        let made = check(unsafe { libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC) });
        // SAFETY: the descriptor is new and nobody else's.
        let memory = File::from(unsafe { OwnedFd::from_raw_fd(made.unwrap()) });
        assert!(is_in_memory(&memory));
        for path in ["/dev/null", "/dev/zero", "/proc/self/stat", "/proc/self/exe"] {
            assert!(!is_in_memory(&File::open(path).unwrap()), "{path}");
        }
    }
}

#[cfg(test)]
/// Files that hang.
pub(crate) mod hanging {
    use std::os::fd::RawFd;
    use std::sync::{Condvar, Mutex};

    static HANG: (Mutex<Vec<RawFd>>, Condvar) = (Mutex::new(Vec::new()), Condvar::new());

    /// A descriptor whose operations do not end as long as this is there.
    pub(crate) struct Hang(RawFd);

    impl Hang {
        pub(crate) fn new(fd: RawFd) -> Self {
            HANG.0.lock().unwrap().push(fd);
            Self(fd)
        }
    }

    impl Drop for Hang {
        fn drop(&mut self) {
            HANG.0.lock().unwrap().retain(|&fd| fd != self.0);
            HANG.1.notify_all();
        }
    }

    pub(super) fn wait_for(fd: RawFd) {
        drop(HANG.1.wait_while(HANG.0.lock().unwrap(), |fds| fds.contains(&fd)).unwrap());
    }
}
