//! Files within a folder, whatever their names are and wherever symbolic links lead.
//!
//! The kernel holds the bound while it resolves the name (openat2(2), RESOLVE_BENEATH): there is no
//! moment between a look and the opening in which a link could be changed. What stays to be decided
//! here is only which name, relative to the folder, a header means.

use ringway_core::file::usual_node;
use ringway_core::host::{File, Instant, thread::sleep};
use rustix::fs::{self, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// How often a name is looked up again when folders are renamed meanwhile (EAGAIN).
const RACES_MAX: u32 = 8;

/// How long a block device may be claimed by whoever was killed.
const CLAIM_LASTS: Duration = Duration::from_secs(1);

/// Why a file is not opened.
#[derive(Debug)]
pub(crate) enum NotOpened {
    /// Its name, or a link, leads out of the folder.
    Outside,
    /// It is neither a regular file nor a block device: what it is.
    Kind(&'static str),
    /// What the host says.
    Host(io::Error),
}

impl From<Errno> for NotOpened {
    fn from(error: Errno) -> Self {
        // EXDEV: RESOLVE_BENEATH. ELOOP: a link to what cannot be bounded, as in /proc.
        if error == Errno::XDEV { Self::Outside } else { Self::Host(error.into()) }
    }
}

/// The folder that names may not lead out of.
#[derive(Debug)]
pub(crate) struct Root {
    folder: OwnedFd,
    /// From the root of the file system, without links.
    real: PathBuf,
    /// As its owner names it, from the root of the file system.
    said: PathBuf,
}

impl Root {
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let said = std::path::absolute(folder)?;
        let real = folder.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // openat: the only call of them that the sandbox of who opens images allows.
        let folder = fs::openat(fs::CWD, &real, flags, Mode::empty())?;
        Ok(Self { folder, real, said })
    }

    /// As its owner named it.
    pub(crate) fn said(&self) -> &Path {
        &self.said
    }

    /// A file of it by a name relative to it, from the root of the file system.
    pub(crate) fn full(&self, relative: &Path) -> PathBuf {
        self.real.join(relative)
    }

    /// What a name means that is relative to `folder`, which has no links in it: a name relative to
    /// this root, if it is within. Where links lead is not looked at here.
    pub(crate) fn relative(&self, folder: &Path, name: &Path) -> Option<PathBuf> {
        let (mut folder, mut rest) = (folder.to_owned(), name.components().peekable());
        // Without links in it, the folder above the folder is its path without the last part.
        while let Some(Component::CurDir | Component::ParentDir) = rest.peek() {
            if rest.next() == Some(Component::ParentDir) {
                folder.pop();
            }
        }
        let path = folder.join(rest.collect::<PathBuf>());
        let within = path.strip_prefix(&self.real).or_else(|_| path.strip_prefix(&self.said));
        within.ok().map(Path::to_owned)
    }

    /// Opens a file by its name relative to this root: for reading, or for writing too. Opens no device but block
    /// devices; one that is to be written is claimed, so that nobody has it mounted. Waits for nobody else than a process
    /// that was killed, which lets go of its claim a moment late.
    pub(crate) fn open(&self, relative: &Path, write: bool) -> Result<(File, Identity), NotOpened> {
        // What it is has to be known before: to open a tape or a watchdog does something already.
        let node = self.resolve(relative, OFlags::PATH)?;
        let found = judge_kind(&node)?;
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let claim = if write && found.0 { OFlags::EXCL } else { OFlags::empty() };
        let flags = access | claim | OFlags::NONBLOCK | OFlags::NOCTTY;
        let begun = Instant::now();
        let mut device = found.0.then(|| usual_node(found.1)).flatten();
        let file = loop {
            let opened = match &device {
                // By a call that the sandbox knows.
                Some(node) => fs::openat(fs::CWD, node, flags | OFlags::CLOEXEC, Mode::empty()),
                None => self.resolve(relative, flags),
            };
            match opened {
                // The one that is named may be open to more.
                Err(Errno::ACCESS | Errno::PERM | Errno::NOENT) if device.take().is_some() => {}
                Err(Errno::BUSY) if begun.elapsed() < CLAIM_LASTS => sleep(CLAIM_LASTS / 100),
                opened => break opened?,
            }
        };
        if judge_kind(&file)? != found {
            return Err(NotOpened::Host(io::Error::other("it was replaced meanwhile")));
        }
        // io_uring would not wait for the disk otherwise.
        fs::fcntl_setfl(&file, fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok((file.into(), found))
    }

    fn resolve(&self, relative: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        // Who allows everything allows absolute links, too.
        let bound = if self.real == Path::new("/") {
            ResolveFlags::NO_MAGICLINKS
        } else {
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS
        };
        let mut tries = 0;
        loop {
            tries += 1;
            let flags = flags | OFlags::CLOEXEC;
            match fs::openat2(&self.folder, relative, flags, Mode::empty(), bound) {
                Err(Errno::AGAIN | Errno::INTR) if tries < RACES_MAX => {}
                opened => return opened,
            }
        }
    }
}

/// Opens a file that its owner has named, for reading, as [`Root::open`] does: the file, what it is, and
/// its path without links.
pub(crate) fn open_said(path: &Path) -> Result<(File, Identity, PathBuf), NotOpened> {
    let real = path.canonicalize().map_err(NotOpened::Host)?;
    let root = Root::new(Path::new("/")).map_err(NotOpened::Host)?;
    let relative = real.strip_prefix("/").unwrap_or(&real);
    let (file, identity) = root.open(relative, false)?;
    Ok((file, identity, real))
}

/// What a name leads to, if it leads anywhere. Opens nothing.
pub(crate) fn identity_of(path: &Path) -> Option<Identity> {
    path.metadata().ok().map(|meta| identity(&meta))
}

/// A file's device and inode, or a block device's number: the same for whatever name it has.
pub type Identity = (bool, u64, u64);

/// What a file is, whatever its name.
#[must_use]
pub fn identity(meta: &Metadata) -> Identity {
    match meta.file_type().is_block_device() {
        true => (true, meta.rdev(), 0),
        false => (false, meta.dev(), meta.ino()),
    }
}

/// Refuses what is neither a regular file nor a block device.
pub(crate) fn judge_kind(file: impl AsFd) -> Result<Identity, NotOpened> {
    let stat = fs::fstat(file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((false, stat.st_dev, stat.st_ino)),
        FileType::BlockDevice => Ok((true, stat.st_rdev, 0)),
        FileType::Directory => Err(NotOpened::Kind("a folder")),
        FileType::Fifo => Err(NotOpened::Kind("a pipe")),
        FileType::CharacterDevice => Err(NotOpened::Kind("a character device")),
        FileType::Socket => Err(NotOpened::Kind("a socket")),
        _ => Err(NotOpened::Kind("something else")),
    }
}
