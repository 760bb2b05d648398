//! Why a disk could not be opened.

use super::foreign::ForeignFormat;
use crate::choices::EngineKind;
use crate::new_image::BackingError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a disk could not be opened: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No such file.
    #[error(
        "{0}: there is no such file. Check the path; `serve --size SIZE` makes a sparse raw image, and \
             `ringway create` others"
    )]
    Missing(PathBuf),
    /// No such file, and none is to be made.
    #[error(
        "{0}: there is no such file. --incoming waits for an image that another daemon serves: check \
         the path, and that its storage is mounted here"
    )]
    NothingIncoming(PathBuf),
    /// No such file, and its guest would find an empty one.
    #[error(
        "{path}: there is no such file, and it was served before: none is made in its place, which the guest that it has \
         would find empty. Is what it lies on mounted, or was it moved? To begin anew make it yourself (`ringway \
         create`), or remove the file {note} from the state folder (--state-dir)"
    )]
    Gone {
        /// The image.
        path: PathBuf,
        /// What says that it was served.
        note: String,
    },
    /// The folder it should be in does not exist.
    #[error("{0}: its folder does not exist. Check the path")]
    NoFolder(PathBuf),
    /// Permission.
    #[error("{path}: no permission to open it for {mode}. {hint}")]
    Permission {
        /// The file.
        path: PathBuf,
        /// "reading and writing" or "reading".
        mode: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A directory, a pipe, …
    #[error("{path}: it is {what}, not a file or block device. {}", instead_of(what, path))]
    NotADisk {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// It looks like another format, and nobody has said that it is raw.
    #[error(
        "{path}: it looks like {}, and as a raw disk a guest could not use it, and its first write could \
         destroy it. {}. If a guest has written what is there, --format raw serves it as it is",
        format.words(),
        what_to_do(*format, path)
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        format: ForeignFormat,
    },
    /// Its length is no whole number of sectors.
    #[error(
        "{path}: its size, {bytes} bytes, is not a multiple of {unit}. A raw image is a whole \
         number of blocks; `truncate -s %{unit} {path}` rounds it up"
    )]
    NotWhole {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
        /// What it should be a multiple of.
        unit: u32,
    },
    /// The size of the disk that an image holds is no whole number of blocks.
    #[error(
        "{path}: its disk has {bytes} bytes, which is no multiple of {unit}. `ringway resize {path} {}` makes it \
         one, or serve it without --block-size",
        bytes.next_multiple_of(u64::from(*unit))
    )]
    NotWholeDisk {
        /// The image.
        path: PathBuf,
        /// Bytes of its disk.
        bytes: u64,
        /// What it should be a multiple of.
        unit: u32,
    },
    /// Nothing to serve.
    #[error("{0}: it is empty. Give it a size first, for example `truncate -s 10G {0}`")]
    Empty(PathBuf),
    /// Somebody else serves it.
    #[error(
        "{path}: it is in use by {holder}. One image can be written by one daemon only; stop the \
         other one{}",
        ways_to_share(*.moves)
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Who holds the lock, as far as is known.
        holder: String,
        /// Its lock can be handed over with a guest.
        moves: bool,
    },
    /// Another file has its name by now, or none.
    #[error(
        "{0}: it was removed, or replaced by another file, while it was being opened. Keep images \
         where they are while a daemon starts"
    )]
    Replaced(PathBuf),
    /// The limits of an image, its guest and an export that it is based on do not go together.
    #[error("{}: it cannot be based on {}: {why}", path.display(), base.display())]
    BaseBlocks {
        /// The image.
        path: PathBuf,
        /// The export.
        base: PathBuf,
        /// What does not fit, and what to do.
        why: String,
    },
    /// O_DIRECT was asked for and is not to be had.
    #[error("{path}: --cache none needs O_DIRECT, but {why}. Use --cache writeback")]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// An engine was asked for and does not work here.
    #[error("--engine {engine} does not work here: {why}. Use --engine auto")]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The reason.
        why: String,
    },
    /// The serial does not fit.
    #[error("serial '{0}': at most 20 bytes of printable ASCII can be shown to a guest")]
    Serial(String),
    /// A block size nobody can use.
    #[error("block size {size}: {why}")]
    BlockSize {
        /// What was asked for, in bytes.
        size: u32,
        /// The reason.
        why: String,
    },
    /// A size nobody can use.
    #[error("{name}: size {bytes} is not a positive multiple of 512 bytes")]
    Size {
        /// The disk.
        name: String,
        /// The size in bytes.
        bytes: u64,
    },
    /// A size that no file can have.
    #[error("{}: a size of {bytes} bytes is too large: a file has less than 8 EiB (8E)", name.display())]
    TooLarge {
        /// The file that was to be made.
        name: PathBuf,
        /// The size in bytes.
        bytes: u64,
    },
    /// What a qcow2 image says of itself, or of those it is based on.
    #[error(transparent)]
    Chain(#[from] ringway_image::ChainError),
    /// A qcow2 image cannot be served so.
    #[error("{path}: its format is qcow2, and {what} is not to be had for that. {hint}")]
    NotQcow2 {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// A daemon that was killed has more of it.
    #[error("{}: {}", .0.display(), ringway_image::NOT_WHOLE)]
    Waits(PathBuf),
    /// What a clone is to be based on.
    #[error("{base}: nothing can be based on it: {source}")]
    Base {
        /// The file.
        base: PathBuf,
        /// Why.
        source: BackingError,
    },
    /// A clone is not made.
    #[error("{path}: no clone can be made there: {why}")]
    NoClone {
        /// The clone.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// An NVMe namespace is not served, or not so.
    #[error("{path}: {why}")]
    Nvme {
        /// Its character device.
        path: PathBuf,
        /// The reason, and what to do.
        why: String,
    },
    /// A server does not give the disk, or not so.
    #[error("{target}: {why}")]
    Remote {
        /// What was named.
        target: String,
        /// The reason, and what to do.
        why: String,
    },
    /// Anything else the host says.
    #[error("{path}: cannot {what}: {source}")]
    Host {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
}

/// What to do with an image that looks like another format.
fn what_to_do(format: ForeignFormat, path: &Path) -> String {
    if format == ForeignFormat::Qcow2 {
        return "Add --format qcow2 to serve the disk that it holds".into();
    }
    let path = path.display();
    format!(
        "Only raw and qcow2 images are served: make one of it (`qemu-img convert -O qcow2 {path} NEW`)"
    )
}

/// What a socket is called.
pub(super) const A_SOCKET: &str = "a socket";

/// What to name in the place of something that is no disk.
fn instead_of(what: &str, path: &Path) -> String {
    if what == A_SOCKET {
        let path = path.display();
        format!("For a disk that is served there say vhost-user:{path} (bench, copy, info, io)")
    } else {
        "Name a disk image".into()
    }
}

/// What else can be done about an image that somebody has, to end a sentence with.
fn ways_to_share(moves: bool) -> &'static str {
    if moves {
        ", serve it --read-only from both, or with --incoming if a guest is to be migrated here \
         (not an image whose data are in another file)"
    } else {
        ", or serve it --read-only from both"
    }
}
