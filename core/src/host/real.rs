//! The host itself.

use super::identity::Identity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::sync::OnceLock;

pub use std::fs::File;
pub use std::os::unix::fs::FileExt;
pub use std::time::Instant;

/// Locks, and lines between threads.
pub mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, mpsc};
}

/// Threads.
pub mod thread {
    pub use std::thread::{Builder, JoinHandle, Thread, panicking, park, park_timeout, sleep};
}

/// Rings for a thread that waits for descriptors: an eventfd, which counts and cannot be full.
#[derive(Debug)]
pub struct Bell(File);

impl Bell {
    /// A new one, that nobody has rung.
    ///
    /// # Errors
    /// What the host says.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is involved; the descriptor is new and nobody else's.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(File::from_raw_fd(fd))) }
        }
    }

    /// Rings.
    pub fn ring(&self) {
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// What to wait for until it can be read.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits until a bell has been rung since it was waited for last.
///
/// # Errors
/// What the host says.
pub fn wait_for(bell: RawFd) -> io::Result<()> {
    // SAFETY: whoever has the bell keeps it open meanwhile; any other descriptor with its number does no harm either.
    let bell = unsafe { BorrowedFd::borrow_raw(bell) };
    match poll(&mut [PollFd::new(&bell, PollFlags::IN)], None) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    // Rung once more meanwhile is as good as waited for.
    let _ = rustix::io::read(bell, &mut [0; 8]);
    Ok(())
}

fn moved(moved: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Reads a part of a file, by a call that a sandboxed thread may make: so many bytes.
///
/// # Errors
/// What the host says, `EINTR` among it.
pub fn read_at(file: &File, memory: &mut [u8], at: u64) -> io::Result<usize> {
    let iov = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
    let at = place(at)?;
    // SAFETY: the vector names `memory`, which is ours for the call.
    moved(unsafe { libc::preadv2(file.as_raw_fd(), &raw const iov, 1, at, 0) })
}

/// Writes a part of a file, by a call that a sandboxed thread may make: so many bytes.
///
/// # Errors
/// What the host says, `EINTR` among it.
pub fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<usize> {
    let iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let at = place(at)?;
    // SAFETY: the vector names `bytes`, which the kernel only reads.
    moved(unsafe { libc::pwritev2(file.as_raw_fd(), &raw const iov, 1, at, 0) })
}

/// Has the file system find room for a range.
///
/// # Errors
/// What the host says.
pub fn allocate(file: &File, at: u64, len: u64) -> io::Result<()> {
    fallocate(file, 0, at, len)
}

/// Has the file system take a range within a file away.
///
/// # Errors
/// What the host says, `EINTR` among it.
pub fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    fallocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, len)
}

/// Forgets what the host holds of a file in its memory, as far as that has not changed. It is advice: what the host does
/// not drop, it does not know to be old.
pub fn forget(file: &File) {
    // SAFETY: no memory is involved.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

fn fallocate(file: &File, mode: i32, at: u64, len: u64) -> io::Result<()> {
    let (from, bytes) = (place(at)?, place(len)?);
    // SAFETY: no memory is involved.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, from, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Which file it is, when it was written last, and whether it is open for direct I/O.
///
/// # Errors
/// What the host says.
pub fn identity(file: &File) -> io::Result<Identity> {
    let stat = fstat(file)?;
    let direct = fcntl_getfl(file)?.contains(OFlags::DIRECT);
    // Types differ from target to target.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
    let written = (i64::from(stat.st_mtime), stat.st_mtime_nsec as u64);
    let place = (stat.st_dev, stat.st_ino, stat.st_rdev);
    Ok(Identity { place, written, direct })
}

fn place(at: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// In which boot of the host this process is, learned once by a path of the system; 0 if nobody tells.
#[must_use]
pub fn boot() -> u64 {
    static BOOT: OnceLock<u64> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits = id.chars().filter_map(|digit| digit.to_digit(16));
        // 128 bits that are random, but for six: 64 of them say as much.
        digits.fold(0_u64, |bits, digit| bits.rotate_left(4) ^ u64::from(digit))
    })
}

/// Bits that nobody can guess.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().hash_one(0)
}
