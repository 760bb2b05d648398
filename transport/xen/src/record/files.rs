//! Files of records: made, found, removed by name in a folder.

use super::types::RecordError;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, fallocate, openat, unlinkat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of the longest record: of a ring of 16 pages of slots, each with the longest indirect request.
pub(super) const BYTES_MAX: u64 = 4096 + 512 * (56 + 256 * 8);

fn host(path: &Path) -> impl Fn(io::Error) -> RecordError + '_ {
    move |error| RecordError::Host { path: path.into(), error }
}

/// A new file for this user alone: whoever maps one that was there keeps it. It has all of its room, so that
/// no store to it fails later for want of a page.
///
/// # Errors
/// What the host says to it; nothing is left then.
pub(crate) fn make(dir: BorrowedFd<'_>, path: &Path, bytes: u64) -> Result<File, RecordError> {
    // Whoever asks may be in wrong hands.
    if bytes > BYTES_MAX {
        return Err(host(path)(io::ErrorKind::InvalidInput.into()));
    }
    match unlinkat(dir, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(host(path)(error.into())),
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(dir, path, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.map_err(|error| host(path)(error.into()))?);
    match make_room(&file, bytes) {
        Ok(()) => Ok(file),
        Err(error) => {
            remove(dir, path);
            Err(host(path)(error))
        }
    }
}

fn make_room(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    let allocate = || fallocate(file, FallocateFlags::empty(), 0, bytes);
    match rustix::io::retry_on_intr(allocate) {
        // Folders of a kind that cannot promise it.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What a predecessor has left.
///
/// # Errors
/// That there is none, that somebody else could have written it, or what the host says.
pub(crate) fn find(dir: BorrowedFd<'_>, path: &Path) -> Result<File, RecordError> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match openat(dir, path, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Err(RecordError::None(path.into())),
        opened => File::from(opened.map_err(|error| host(path)(error.into()))?),
    };
    let meta = file.metadata().map_err(host(path))?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(RecordError::Foreign(path.into()));
    }
    Ok(file)
}

/// Best effort: a file that stays is replaced by the next record.
pub(crate) fn remove(dir: BorrowedFd<'_>, path: &Path) {
    let _ = unlinkat(dir, path, AtFlags::empty());
}
