//! The words between a ring's back side and its user: what was asked, what is wrong with it, and the
//! right to answer.

use super::piece::GrantPiece;
use ringway_core::{ByteRange, Status};

/// The bytes of granted pages. A ring reads the lists of indirect requests through it; the rest of a
/// request's data is its user's business.
///
/// ```
/// # use ringway_ring::blkif::{Grants, NotGranted};
/// let page = [7; 4096];
/// let mut grants = |grant: u32, into: &mut [u8]| {
///     if grant != 5 { return Err(NotGranted) }
///     into.copy_from_slice(&page[..into.len()]);
///     Ok(())
/// };
/// let mut bytes = [0; 8];
/// assert_eq!(grants.read(5, &mut bytes), Ok(()));
/// assert_eq!(bytes, [7; 8]);
/// ```
pub trait Grants {
    /// Copies the first `into.len()` bytes, at most 4096, of the page granted as `grant`. Each byte
    /// must be read once: the guest may change it at any time.
    ///
    /// # Errors
    /// [`NotGranted`] if the page cannot be read. `into` may hold anything then.
    fn read(&mut self, grant: u32, into: &mut [u8]) -> Result<(), NotGranted>;
}

impl<F: FnMut(u32, &mut [u8]) -> Result<(), NotGranted>> Grants for F {
    fn read(&mut self, grant: u32, into: &mut [u8]) -> Result<(), NotGranted> {
        self(grant, into)
    }
}

/// The page is not granted, or cannot be mapped or copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grant cannot be read")]
pub struct NotGranted;

/// What a back-end has announced to its front-end. What it has not is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `feature-max-indirect-segments`, at most [`super::INDIRECT_SEGMENTS_MAX`]; 0: no indirect requests.
    pub indirect_segments: u16,
}

/// The front-end broke the rules of the ring itself. The ring stops; everything else goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// `RING_REQUEST_PROD_OVERFLOW`: more requests than slots, or fewer than there were.
    #[error("req_prod moved from {from} to {to}, with {owed} of {size} slots in use")]
    IndexJump {
        /// Where the back side has got to.
        from: u32,
        /// What the front side wrote.
        to: u32,
        /// Requests taken whose answers the front side cannot have seen.
        owed: u32,
        /// Slots.
        size: u32,
    },
}

/// The right to answer one request: given back by value, exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request that is not answered is lost to the guest"]
pub struct Token {
    pub(super) id: u64,
    pub(super) operation: u8,
}

impl Token {
    /// The guest's own name for the request. Guests that keep the rules use each once at a time, but
    /// nothing here relies on it.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// What there is to it, to be kept where it outlives this process.
    #[must_use]
    pub const fn parts(&self) -> (u64, u8) {
        (self.id, self.operation)
    }

    /// From its parts. There must be only one of them at a time: the other one is to be forgotten.
    pub const fn from_parts((id, operation): (u64, u8)) -> Self {
        Self { id, operation }
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Disk to memory. At least one piece.
    Read,
    /// Memory to disk. At least one piece.
    Write,
    /// All requests before it are carried out and durable first, then its own pieces are written and
    /// made durable, and only then the requests after it are carried out. Pieces are optional.
    WriteBarrier,
    /// Make what was written durable. Linux never sends pieces; if there are any, they are to be
    /// written afterwards, as Linux's and QEMU's back-ends do.
    Flush,
    /// The guest no longer needs the range, which may be empty.
    Discard {
        /// All copies are to become unreadable. To be ignored unless `discard-secure` was offered.
        secure: bool,
    },
}

/// One well-formed request, from a private copy.
///
/// # Invariants
/// 1. The first `count` pieces are proper, and as long together as `range` unless that of a discard.
#[derive(Debug)]
pub struct Asked {
    pub(super) command: Command,
    pub(super) range: ByteRange,
    pub(super) count: usize,
    /// Room for as many pieces as a request may have.
    pub(super) pieces: Box<[GrantPiece]>,
}

impl Asked {
    /// What to do.
    #[must_use]
    pub fn command(&self) -> Command {
        self.command
    }

    /// Where on the disk. Empty for a flush or a barrier without pieces, whatever the guest wrote.
    #[must_use]
    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// Where in memory, in the order of the disk. None for a discard.
    #[must_use]
    pub fn pieces(&self) -> &[GrantPiece] {
        &self.pieces[..self.count]
    }
}

/// What is wrong with a request. It costs the guest this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Unknown, or not offered.
    #[error("operation {0} is not offered")]
    Operation(u8),
    /// An indirect request is to read or to write.
    #[error("operation {0} in an indirect request")]
    InnerOperation(u8),
    /// A read or a write without data.
    #[error("no segments")]
    NoSegments,
    /// More segments than allowed.
    #[error("{count} segments, of {max} at most")]
    TooManySegments {
        /// In the request.
        count: u16,
        /// Allowed.
        max: u16,
    },
    /// A segment that ends before it begins, or behind its page.
    #[error("sectors {first} to {last} of a page")]
    Sectors {
        /// First sector.
        first: u8,
        /// Last sector.
        last: u8,
    },
    /// The range leaves 64 bits, counted in bytes.
    #[error("{sectors} sectors from sector {sector}")]
    Range {
        /// First sector.
        sector: u64,
        /// How many.
        sectors: u64,
    },
    /// A page of segments cannot be read.
    #[error("the indirect page of grant {0} cannot be read")]
    Page(u32),
}

impl Refused {
    /// What to tell the guest.
    #[must_use]
    pub const fn status(self) -> Status {
        match self {
            Self::Operation(_) => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}
