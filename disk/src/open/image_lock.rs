//! The lock of an image: one writer, or any number of readers, told to other daemons and to QEMU.
//!
//! Daemons of this kind exclude each other by `flock`. Programs of QEMU do not look at that: they
//! mark an image with shared record locks on single bytes, which belong to the open file
//! (F_OFD_SETLK) as `flock` does. Byte 100 + n is locked by who uses permission n, byte 200 + n by
//! who does not let others use it, and both look whether anybody has the other one's byte. Here this
//! is done as a disk of a QEMU machine would: nobody else may write or resize what is served, and
//! who reads may.

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Permissions as QEMU counts them.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// The byte that marks the use of permission 0.
const USED: i64 = 100;
/// The byte that bars others from permission 0.
const BARRED: i64 = 200;

/// What others may not do while an image is locked, for reading or for writing.
const BARS: [i64; 2] = [WRITE, RESIZE];

/// Why an image is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has its lock.
    #[error("another process has its lock")]
    Locked,
    /// A program of QEMU, or one that locks as they do, has marked this byte.
    #[error("a program of QEMU, or another ringway, uses it, by its lock on byte {0}")]
    Marked(i64),
    /// What the host says.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Locks an open image for this process, as long as a descriptor of the same open file is open:
/// exclusively, or with `read_only` beside other readers. It must be open for reading. Waits for
/// nobody. Who has it locked already may ask again.
///
/// # Errors
/// [`LockError`]; it is not locked then.
pub fn lock_image(file: &File, read_only: bool) -> Result<(), LockError> {
    // Whoever waits asks again and again: a look does not get in the way of others, a lock does.
    if let Some(byte) = marked_by_others(file, read_only)? {
        return Err(LockError::Marked(byte));
    }
    try_flock(file, read_only)?;
    // First one's own marks, then a look at those of others: of two that come at once none misses
    // the other.
    let marked = mark(file, read_only).and_then(|()| {
        marked_by_others(file, read_only)?.map_or(Ok(()), |byte| Err(LockError::Marked(byte)))
    });
    marked.inspect_err(|_| unlock_image(file))
}

/// Gives up the lock of an image that nobody uses any more, though descriptors may still be open.
pub fn unlock_image(file: &File) {
    // Without a lock there is nothing to let go. QEMU's bytes first: who has `flock` marks them.
    let _ = set(file, libc::F_UNLCK, USED, 2 * (BARRED - USED));
    let _ = drop_flock(file);
}

/// `flock` alone, which programs of QEMU do not look at. Waits for nobody.
pub(super) fn try_flock(file: &File, shared: bool) -> Result<(), LockError> {
    let operation = match shared {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(file, operation).map_err(|error| match error {
        Errno::WOULDBLOCK => LockError::Locked,
        error => LockError::Host(error.into()),
    })
}

/// Gives up `flock` alone.
pub(crate) fn drop_flock(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, FlockOperation::Unlock)?)
}

/// A file that was locked for writing is only read from now on, beside other readers.
pub(crate) fn share_lock(file: &File) -> Result<(), LockError> {
    // Our own marks would not bar us, and nobody else has any of these.
    for byte in [USED + WRITE, USED + RESIZE, BARRED + READ] {
        let _ = set(file, libc::F_UNLCK, byte, 1);
    }
    try_flock(file, true)
}

/// A file that was locked for reading, beside other readers, is ours alone from now on, until its lock is
/// shared again.
///
/// # Errors
/// [`LockError`]; it is locked for reading then.
pub(crate) fn raise_lock(file: &File) -> Result<(), LockError> {
    lock_image(file, false).and_then(|()| bar_readers(file)).inspect_err(|_| {
        // `flock` lets the old lock go before it takes the new one.
        if let Err(error) = share_lock(file).and_then(|()| lock_image(file, true)) {
            tracing::error!("the lock of what a disk is based on was lost: {error}");
        }
    })
}

/// Refuses who reads, and keeps others from it. Many a program of QEMU allows that what it reads is
/// written, as long as it is whole at any time.
fn bar_readers(file: &File) -> Result<(), LockError> {
    let barred = set(file, libc::F_RDLCK, BARRED + READ, 1);
    match barred.and_then(|()| is_marked(file, USED + READ)) {
        Ok(true) => Err(LockError::Marked(USED + READ)),
        Ok(false) => Ok(()),
        Err(error) if cannot(&error) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Marks what we do, and what nobody else may.
fn mark(file: &File, read_only: bool) -> Result<(), LockError> {
    let uses: &[i64] = if read_only { &[READ] } else { &[READ, WRITE, RESIZE] };
    let bytes = uses.iter().map(|n| USED + n).chain(BARS.map(|n| BARRED + n));
    for byte in bytes {
        match set(file, libc::F_RDLCK, byte, 1) {
            Ok(()) => {}
            // Nobody locks these bytes exclusively; if somebody does, it is meant.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Err(LockError::Marked(byte));
            }
            Err(error) if cannot(&error) => {
                tracing::warn!(
                    "this file system has no record locks ({error}): programs of QEMU that use the \
                     same image are not noticed, and do not notice"
                );
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The first byte by which somebody else forbids what we want, or does what we forbid.
pub(super) fn marked_by_others(file: &File, read_only: bool) -> io::Result<Option<i64>> {
    let uses: &[i64] = if read_only { &[READ] } else { &[READ, WRITE, RESIZE] };
    for byte in uses.iter().map(|n| BARRED + n).chain(BARS.map(|n| USED + n)) {
        match is_marked(file, byte) {
            Ok(true) => return Ok(Some(byte)),
            Ok(false) => {}
            Err(error) if cannot(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// True if there are no such locks here: by the file system, or by a server that it asks.
fn cannot(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS)
    )
}

fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: a plain C struct for which zeroes are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // All are small constants, of types that differ from target to target.
    #[allow(clippy::cast_possible_truncation)]
    {
        lock.l_type = kind as _;
        lock.l_whence = libc::SEEK_SET as _;
    }
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

fn set(file: &File, kind: i32, start: i64, len: i64) -> io::Result<()> {
    let lock = range(kind, start, len);
    // SAFETY: the descriptor is open, the struct is ours.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// True if another open file, or another process, has a lock of any kind on this byte.
pub(super) fn is_marked(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, the struct is ours.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests;
