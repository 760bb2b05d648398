//! A file that is only read, opened for writing as well.

use rustix::fs::{Mode, OFlags, fcntl_getfl, openat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why it is not.
#[derive(Debug, thiserror::Error)]
pub enum NotWritable {
    /// The owner says that clones are made of it.
    #[error(
        "{}: the disk is served as a clone of it (base), and other clones may be based on it, which would \
         change. Serve the disk without base once that is not so",
        .0.display()
    )]
    Base(PathBuf),
    /// By its mode.
    #[error(
        "what it would be merged into may not be written: {0}. If nothing else is based on it, allow that \
         (chmod u+w)"
    )]
    Forbidden(io::Error),
    /// What the host says.
    #[error("cannot open what it would be merged into for writing: {0}")]
    Host(#[from] io::Error),
}

/// Opens the very file, whatever its name is by now, for reading and writing; for direct I/O if it is open
/// for that. Refuses what `base` leads to.
///
/// # Errors
/// [`NotWritable`].
pub fn reopen_for_writing(file: &File, base: Option<&Path>) -> Result<File, NotWritable> {
    let here = file.metadata()?;
    if let Some(base) = base {
        let there = base.metadata()?;
        if (there.dev(), there.ino()) == (here.dev(), here.ino()) {
            return Err(NotWritable::Base(base.into()));
        }
    }
    // To root the kernel forbids nothing, and whoever has taken the right away has meant it.
    if here.is_file() && here.mode() & 0o222 == 0 {
        return Err(NotWritable::Forbidden(Errno::ACCESS.into()));
    }
    let direct = fcntl_getfl(file).map_err(io::Error::from)? & OFlags::DIRECT;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC | direct;
    match openat(rustix::fs::CWD, path, flags, Mode::empty()) {
        Ok(file) => Ok(file.into()),
        Err(error @ (Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY)) => {
            Err(NotWritable::Forbidden(error.into()))
        }
        Err(error) => Err(NotWritable::Host(error.into())),
    }
}
