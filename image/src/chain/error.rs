//! Why an image is not opened with what it is based on.

use crate::format::Format;
use crate::printable::printable;
use crate::refused::Refused;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The most images of a chain. Each costs a descriptor, and the first read of a cluster a look into
/// its tables; who makes a snapshot each day merges them down more than once in two months.
pub const CHAIN_MAX: usize = 64;

/// A chain that cannot be opened: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// What an image says of itself.
    #[error("{}: {source}", printable(name))]
    Refused {
        /// The image.
        name: PathBuf,
        /// Why.
        #[source]
        source: Refused,
    },
    /// What an image says of another file.
    #[error("{}: its {kind} '{}' {fault}", printable(by), printable(name))]
    Link {
        /// The image that names it.
        by: PathBuf,
        /// Which of its files.
        kind: LinkKind,
        /// As the header has it.
        name: PathBuf,
        /// What is wrong.
        fault: LinkFault,
    },
    /// More images than a chain may have.
    #[error(
        "{}: it is the last of {CHAIN_MAX} images that are based on each other, and names another one; \
         no more are opened. `qemu-img commit` or `qemu-img rebase` makes a chain shorter",
        printable(.0)
    )]
    Deep(PathBuf),
    /// What the owner says that an image is based on cannot be had.
    #[error("{}: it {fault}", printable(name))]
    Base {
        /// As its owner names it.
        name: PathBuf,
        /// What is wrong.
        fault: LinkFault,
    },
    /// An image is based on something, but not on what its owner says.
    #[error(
        "{}: it is there already, and is not based on {}. Name another image, or leave the base out to \
         serve it as it is",
        printable(name),
        printable(base)
    )]
    NotBased {
        /// The image.
        name: PathBuf,
        /// What it is to be based on.
        base: PathBuf,
    },
    /// What an image is to be based on is based on it.
    #[error(
        "{}: {} is this image, or is based on it: an image cannot be based on itself. Are the two names \
         swapped?",
        printable(name),
        printable(base)
    )]
    Swapped {
        /// The image.
        name: PathBuf,
        /// What it is to be based on.
        base: PathBuf,
    },
    /// The folder that bounds the chain.
    #[error("{}: names of backing files cannot be looked up in this folder: {source}", folder.display())]
    Root {
        /// The folder.
        folder: PathBuf,
        /// What the host says.
        source: io::Error,
    },
    /// Anything else the host says.
    #[error("{}: cannot {what}: {source}", printable(name))]
    Host {
        /// The image.
        name: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
}

/// Which file an image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The one that holds what is not in this one.
    Backing,
    /// The one that holds its data.
    Data,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backing => "backing file",
            Self::Data => "data file",
        })
    }
}

/// What is wrong with a file that an image names.
#[derive(Debug, thiserror::Error)]
pub enum LinkFault {
    /// There is none of this name.
    #[error("is not there. Bring it back, or say where it is now with `qemu-img rebase -u -b`")]
    Missing,
    /// It is somewhere else than names may lead to.
    #[error(
        "is outside {}, or a link leads out of there. A header may name any file of this host: if \
         this one is meant, --backing-root says which folder it may be in",
        .0.display()
    )]
    Outside(PathBuf),
    /// A folder, a pipe, a device.
    #[error("is {0}, not a file or a block device")]
    NotADisk(&'static str),
    /// The image does not say what format it has.
    #[error(
        "has no format there, and formats are never guessed. Say it with `qemu-img rebase -u -F raw -b \
         NAME IMAGE`, or with -F qcow2"
    )]
    NoFormat,
    /// The image says a format that is not known here.
    #[error("has the format '{0}' there; raw and qcow2 are supported")]
    Format(String),
    /// A name of QEMU for something that is no file.
    #[error(
        "is not the name of a file but words for QEMU (a protocol or json:), which are not followed. An export \
         of an NBD server is read only where the image is served: `ringway serve --base nbd://HOST/EXPORT`. \
         `qemu-img rebase -u` gives it a plain name; a file with a colon is ./NAME"
    )]
    Protocol,
    /// The image says another format than the owner.
    #[error("has the format '{0}' there, and its owner says that it is {1}")]
    OtherFormat(Format, Format),
    /// An image that is based on itself.
    #[error("is in this chain already: the image would be based on itself")]
    Loop,
    /// Its name leads elsewhere by now.
    #[error(
        "was removed, or replaced by another file, while it was being opened. Keep images where they are while a \
         daemon starts"
    )]
    Replaced,
    /// It is somebody else's.
    #[error("is not to be had: {0}")]
    Locked(String),
    /// Anything else the host says.
    #[error("cannot be opened: {0}")]
    Host(io::Error),
}
