//! What a disk of a Xen guest needs of this host by its name: two devices, the store, records.
//!
//! [`Here`] opens them itself. A daemon in a sandbox cannot, and has another process do it.
//!
//! ```text
//! access.open(Named::Grants)?                        // a device, opened for one queue
//! access.open(Named::Store)?                         // a connection of one's own
//! access.open(Named::NewRecord(name, bytes))?        // a file, instead of the one that was there
//! ```

use super::record::files;
use super::record::types::RecordError;
use super::xenstore;
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

const GRANTS: &str = "/dev/xen/gntdev";
const EVENTS: &str = "/dev/xen/evtchn";

/// Something that has a name on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// The grant device: pages that other domains have granted.
    Grants,
    /// The device of event channels. Reading it does not wait.
    Events,
    /// A connection to xenstore: a socket, or a device of the kernel.
    Store,
    /// A new record of what is in flight, of so many bytes; one that was there goes.
    NewRecord(RecordName, u64),
    /// The record that a predecessor has left, if there is one.
    LeftRecord(RecordName),
    /// Nothing: the record goes.
    EndedRecord(RecordName),
}

/// Which ring a record is of. Numbers only, so that it can name nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordName {
    /// The front-end's domain.
    pub domid: u16,
    /// The virtual device.
    pub devid: u32,
    /// The number of the queue.
    pub queue: u32,
}

impl fmt::Display for RecordName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "xen-{}-{}-{}", self.domid, self.devid, self.queue)
    }
}

/// Whoever may open what has a name.
///
/// ```
/// use ringway_xen_blkback::{Access, Named};
/// # use std::{io, os::fd::OwnedFd};
/// /// A host without Xen.
/// struct Nothing;
/// impl Access for Nothing {
///     fn open(&self, what: Named) -> io::Result<Option<OwnedFd>> {
///         match what {
///             Named::LeftRecord(_) | Named::EndedRecord(_) => Ok(None),
///             _ => Err(io::ErrorKind::NotFound.into()),
///         }
///     }
/// }
/// ```
pub trait Access: Send + Sync {
    /// Opens `what`; `None` where there is none to be had, which is no mistake of records only.
    ///
    /// # Errors
    /// What is wrong, with its name.
    fn open(&self, what: Named) -> io::Result<Option<OwnedFd>>;
}

/// Opens what must be there.
pub(super) fn need(access: &dyn Access, what: Named) -> io::Result<OwnedFd> {
    access.open(what)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// This very process opens it.
#[derive(Debug)]
pub struct Here {
    /// Where the store is reached; `None` is wherever it answers.
    store: Option<PathBuf>,
    records: OwnedFd,
}

impl Here {
    /// With a folder of records, which stays the same whatever becomes of its name.
    #[must_use]
    pub fn new(store: Option<PathBuf>, records: OwnedFd) -> Self {
        Self { store, records }
    }

    /// The folder of records.
    #[must_use]
    pub fn records(&self) -> &OwnedFd {
        &self.records
    }
}

impl Access for Here {
    fn open(&self, what: Named) -> io::Result<Option<OwnedFd>> {
        let dir = self.records.as_fd();
        let path = |name: RecordName| PathBuf::from(name.to_string());
        let given = |file: Result<File, RecordError>| match file {
            Ok(file) => Ok(Some(file.into())),
            Err(RecordError::None(_)) => Ok(None),
            Err(error) => Err(io::Error::other(error)),
        };
        match what {
            Named::Grants => device(GRANTS, OFlags::empty(), "xen-gntdev").map(Some),
            Named::Events => device(EVENTS, OFlags::NONBLOCK, "xen-evtchn").map(Some),
            Named::Store => xenstore::connect(self.store.as_deref()).map(Some),
            Named::NewRecord(name, bytes) => given(files::make(dir, &path(name), bytes)),
            Named::LeftRecord(name) => given(files::find(dir, &path(name))),
            Named::EndedRecord(name) => {
                files::remove(dir, &path(name));
                Ok(None)
            }
        }
    }
}

fn device(path: &str, flags: OFlags, module: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | flags;
    openat(CWD, path, flags, Mode::empty()).map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("{path}: {error}; is {module} loaded?"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::path::Path;

    fn here(dir: &Path) -> Here {
        Here::new(None, File::open(dir).unwrap().into())
    }

    #[test]
    fn records_come_and_go_in_their_folder_only() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("records");
        std::fs::create_dir(&folder).unwrap();
        let (here, name) = (here(&folder), RecordName { domid: 7, devid: 51712, queue: 3 });
        assert!(here.open(Named::LeftRecord(name)).unwrap().is_none());
        let made = File::from(here.open(Named::NewRecord(name, 8192)).unwrap().unwrap());
        let meta = folder.join("xen-7-51712-3").metadata().unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (8192, 0o600));
        let found = File::from(here.open(Named::LeftRecord(name)).unwrap().unwrap());
        assert_eq!(found.metadata().unwrap().ino(), made.metadata().unwrap().ino());
        // A new one is another file: whoever has the old one keeps it.
        let next = File::from(here.open(Named::NewRecord(name, 4096)).unwrap().unwrap());
        assert_ne!(next.metadata().unwrap().ino(), made.metadata().unwrap().ino());
        // The folder may be called something else by now.
        std::fs::rename(&folder, dir.path().join("moved")).unwrap();
        assert!(here.open(Named::LeftRecord(name)).unwrap().is_some());
        assert!(here.open(Named::EndedRecord(name)).unwrap().is_none());
        assert!(!dir.path().join("moved/xen-7-51712-3").exists());
    }

    #[test]
    fn a_link_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("precious"), "data").unwrap();
        symlink("precious", dir.path().join("xen-1-2-0")).unwrap();
        let name = RecordName { domid: 1, devid: 2, queue: 0 };
        let here = here(dir.path());
        assert!(here.open(Named::LeftRecord(name)).is_err());
        drop(here.open(Named::NewRecord(name, 4096)).unwrap());
        assert_eq!(std::fs::read(dir.path().join("precious")).unwrap(), b"data");
    }

    #[test]
    fn a_store_that_is_named_is_the_only_one() {
        let dir = tempfile::tempdir().unwrap();
        let nowhere = dir.path().join("nowhere");
        let records = File::open(dir.path()).unwrap().into();
        let here = Here::new(Some(nowhere.clone()), records);
        let error = here.open(Named::Store).unwrap_err().to_string();
        assert!(error.contains(nowhere.to_str().unwrap()), "{error}");
        let listener = std::os::unix::net::UnixListener::bind(&nowhere).unwrap();
        let socket = here.open(Named::Store).unwrap().unwrap();
        listener.accept().unwrap();
        // A read of it waits, whatever it was while it was connected.
        assert!(!rustix::fs::fcntl_getfl(&socket).unwrap().contains(OFlags::NONBLOCK));
    }
}
