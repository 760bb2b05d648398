//! A file that is only read, opened for writing as well.

use ringway_image::identity;
use rustix::fs::{Mode, OFlags, fcntl_getfl, openat};
use rustix::io::Errno;
use std::fs::{File, Metadata};
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
    /// Its name leads elsewhere.
    #[error(
        "another file has the name of what it would be merged into, {}, or none: whoever opens the image by its \
         names would not find what is merged. Put the file back, or serve the disk anew",
        .0.display()
    )]
    Renamed(PathBuf),
    /// What the host says.
    #[error("cannot open what it would be merged into for writing: {0}")]
    Host(#[from] io::Error),
}

/// Opens the very file for reading and writing; for direct I/O if it is open for that. Refuses what `base` leads
/// to, and a file that `name` does not lead to any more.
///
/// # Errors
/// [`NotWritable`].
pub fn reopen_for_writing(
    file: &File,
    name: Option<&Path>,
    base: Option<&Path>,
) -> Result<File, NotWritable> {
    let here = file.metadata()?;
    if let Some(base) = base {
        if leads_to(base, &here)? {
            return Err(NotWritable::Base(base.into()));
        }
    }
    if let Some(name) = name {
        match leads_to(name, &here) {
            Ok(true) => {}
            Ok(false) => return Err(NotWritable::Renamed(name.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(NotWritable::Renamed(name.into()));
            }
            Err(error) => return Err(error.into()),
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

fn leads_to(path: &Path, here: &Metadata) -> io::Result<bool> {
    Ok(identity(&path.metadata()?) == identity(here))
}
