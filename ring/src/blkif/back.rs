//! The back side of a block ring: what a disk's server does.
//!
//! ```text
//! while let Some((token, asked)) = ring.pop(grants)? { … }   // one load of req_prod per batch
//! ring.push(token, status);                                  // an answer, not yet visible
//! if ring.publish() { notify() }                             // one store of rsp_prod per batch
//! match ring.arm()? { Quiet => sleep, WorkArrived => go on }
//! ```

use super::Armed;
use super::layout::{
    DIRECT_SEGMENTS_MAX, DISCARD_SECURE, GrantPiece, INDIRECT_SEGMENTS_MAX, LayoutError,
    OP_DISCARD, OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER,
    RSP_EOPNOTSUPP, RSP_ERROR, RSP_OKAY, RingAt, RingMemory, SEGMENTS_PER_PAGE, Slot,
    event_reached, pieces_as_bytes,
};
use crate::shared::fence;
use ringway_core::{ByteRange, Status};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

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
    /// `feature-max-indirect-segments`, at most [`INDIRECT_SEGMENTS_MAX`]; 0: no indirect requests.
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
    id: u64,
    operation: u8,
}

impl Token {
    /// The guest's own name for the request. Guests that keep the rules use each once at a time, but
    /// nothing here relies on it.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
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
    command: Command,
    range: ByteRange,
    count: usize,
    /// Room for as many pieces as a request may have.
    pieces: Box<[GrantPiece]>,
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

/// One block ring, seen from the back-end.
///
/// # Invariants
/// 1. In the order of the counters, `rsp_published <= rsp_next <= req_next <= req_seen`, and the last
///    is at most the ring's size ahead of the first: so no answer overwrites a request that was not
///    taken.
/// 2. `req_next - rsp_next` tokens are out.
#[derive(Debug)]
pub struct Back {
    ring: RingMemory,
    /// The next request to read.
    req_next: u32,
    /// The requests that were visible when last looked at.
    req_seen: u32,
    /// The next answer to write.
    rsp_next: u32,
    /// The answers made visible.
    rsp_published: u32,
    offered: Offered,
    asked: Asked,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for Back {}

impl Back {
    /// The back side of the ring at `at`. It goes on where the ring's answers end: at the beginning
    /// of a new ring. Allocates; the last to do so.
    ///
    /// A ring that another back-end has left is taken over with its newest requests. Those that this
    /// one answered out of order come again, and as many older ones do not: only its front-end knows
    /// which, so it has to set up the ring anew.
    ///
    /// # Errors
    /// [`LayoutError`] if the ring cannot be.
    ///
    /// # Safety
    /// `at` names mapped memory for as long as the ring exists, and there is no other back side.
    pub unsafe fn new(at: RingAt, offered: Offered) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { RingMemory::new(at)? };
        if offered.indirect_segments > INDIRECT_SEGMENTS_MAX {
            return Err(LayoutError::IndirectSegments(offered.indirect_segments));
        }
        let (answered, asked) = (ring.rsp_prod().load(Relaxed), ring.req_prod().load(Relaxed));
        if asked.wrapping_sub(answered) > ring.size() {
            return Err(LayoutError::Indices { answered, asked, size: ring.size() });
        }
        let room = usize::from(offered.indirect_segments).max(DIRECT_SEGMENTS_MAX);
        let pieces = vec![GrantPiece::default(); room].into_boxed_slice();
        Ok(Self {
            ring,
            req_next: answered,
            req_seen: answered,
            rsp_next: answered,
            rsp_published: answered,
            offered,
            asked: Asked { command: Command::Flush, range: ByteRange::default(), count: 0, pieces },
        })
    }

    /// Slots of the ring: the most requests that can be in flight.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// Requests taken and not answered.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.req_next.wrapping_sub(self.rsp_next)
    }

    /// Takes the next request, if there is one. A malformed request is handed out with what is wrong
    /// with it: it must be answered like any other. `grants` is asked for the pages of indirect
    /// requests.
    ///
    /// # Errors
    /// [`Broken`] ends the ring.
    #[inline]
    #[allow(clippy::type_complexity)]
    pub fn pop(
        &mut self,
        grants: &mut impl Grants,
    ) -> Result<Option<(Token, Result<&Asked, Refused>)>, Broken> {
        if self.req_next == self.req_seen && !self.look()? {
            return Ok(None);
        }
        let slot = self.ring.read(self.req_next);
        self.req_next = self.req_next.wrapping_add(1);
        let token = self.token(&slot);
        let judged = self.judge(&slot, grants);
        Ok(Some((token, judged.map(|()| &self.asked))))
    }

    /// Reads `req_prod`; true if there are new requests.
    #[inline]
    fn look(&mut self) -> Result<bool, Broken> {
        // Acquire: what the front side wrote before the index is visible after this load.
        let to = self.ring.req_prod().load(Acquire);
        let (from, size) = (self.req_next, self.ring.size());
        // The front side may use a slot again once it has seen an answer, which it cannot have before
        // the answer was published.
        let owed = from.wrapping_sub(self.rsp_published);
        if to.wrapping_sub(from) > size - owed {
            return Err(Broken::IndexJump { from, to, owed, size });
        }
        self.req_seen = to;
        Ok(to != from)
    }

    /// How to answer. The answer to an indirect request names the operation inside.
    #[inline]
    fn token(&self, slot: &Slot) -> Token {
        let [operation, inner, ..] = slot.head();
        let operation = if operation == OP_INDIRECT { inner } else { operation };
        Token { id: slot.long(self.ring.abi().id_at()), operation }
    }

    #[inline]
    fn judge(&mut self, slot: &Slot, grants: &mut impl Grants) -> Result<(), Refused> {
        match slot.head()[0] {
            OP_READ => self.direct(slot, Command::Read),
            OP_WRITE => self.direct(slot, Command::Write),
            OP_WRITE_BARRIER if self.offered.barrier => self.direct(slot, Command::WriteBarrier),
            OP_FLUSH_DISKCACHE if self.offered.flush => self.direct(slot, Command::Flush),
            OP_DISCARD if self.offered.discard => self.discard(slot),
            OP_INDIRECT if self.offered.indirect_segments > 0 => self.indirect(slot, grants),
            other => Err(Refused::Operation(other)),
        }
    }

    /// `struct blkif_request`.
    #[inline]
    fn direct(&mut self, slot: &Slot, command: Command) -> Result<(), Refused> {
        let count = slot.head()[1];
        if usize::from(count) > DIRECT_SEGMENTS_MAX {
            return Err(too_many(count.into(), DIRECT_SEGMENTS_MAX));
        }
        let abi = self.ring.abi();
        let words = slot.0[abi.rest_at()..].chunks_exact(2);
        for (piece, words) in self.asked.pieces.iter_mut().zip(words).take(count.into()) {
            *piece = GrantPiece::from_words([words[0], words[1]]);
        }
        self.settle(command, slot.long(abi.sector_at()), count.into())
    }

    /// `struct blkif_request_indirect`.
    fn indirect(&mut self, slot: &Slot, grants: &mut impl Grants) -> Result<(), Refused> {
        let [_, inner, low, high] = slot.head();
        let command = match inner {
            OP_READ => Command::Read,
            OP_WRITE => Command::Write,
            other => return Err(Refused::InnerOperation(other)),
        };
        let (count, max) = (u16::from_le_bytes([low, high]), self.offered.indirect_segments);
        if count > max {
            return Err(too_many(count, max.into()));
        }
        let abi = self.ring.abi();
        // At most 8 pages: `new` has judged `max`.
        let pages = &slot.0[abi.pages_at()..];
        let lists = self.asked.pieces[..usize::from(count)].chunks_mut(SEGMENTS_PER_PAGE);
        for (list, grant) in lists.zip(pages) {
            let bytes = pieces_as_bytes(list);
            grants.read(*grant, bytes).map_err(|NotGranted| Refused::Page(*grant))?;
            list.iter_mut().for_each(GrantPiece::forget_reserved);
        }
        self.settle(command, slot.long(abi.sector_at()), count.into())
    }

    /// Judges the first `count` pieces, which are private already.
    #[inline]
    fn settle(&mut self, command: Command, sector: u64, count: usize) -> Result<(), Refused> {
        let asked = &mut self.asked;
        (asked.command, asked.count, asked.range) = (command, count, ByteRange::default());
        if count == 0 {
            let needed = matches!(command, Command::Read | Command::Write);
            return if needed { Err(Refused::NoSegments) } else { Ok(()) };
        }
        let mut sectors = 0;
        for piece in asked.pieces() {
            if !piece.is_proper() {
                return Err(Refused::Sectors { first: piece.first(), last: piece.last() });
            }
            sectors += u64::from(piece.sectors());
        }
        asked.range = range(sector, sectors)?;
        Ok(())
    }

    /// `struct blkif_request_discard`.
    #[inline(never)]
    fn discard(&mut self, slot: &Slot) -> Result<(), Refused> {
        let abi = self.ring.abi();
        let secure = slot.head()[1] & DISCARD_SECURE != 0;
        self.asked.command = Command::Discard { secure };
        self.asked.count = 0;
        self.asked.range = range(slot.long(abi.sector_at()), slot.long(abi.rest_at()))?;
        Ok(())
    }

    /// Answers a request. Not visible before [`Back::publish`].
    #[inline]
    #[allow(clippy::needless_pass_by_value)]
    pub fn push(&mut self, token: Token, status: Status) {
        debug_assert!(self.in_flight() > 0, "an answer to nothing");
        let status = match status {
            Status::Ok => RSP_OKAY,
            Status::IoError => RSP_ERROR,
            Status::Unsupported => RSP_EOPNOTSUPP,
        };
        self.ring.write_response(self.rsp_next, token.id, token.operation, status);
        self.rsp_next = self.rsp_next.wrapping_add(1);
    }

    /// Makes the answers visible; true if the front-end wants to be notified.
    #[inline]
    #[must_use = "true means the front-end waits for a notification"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.rsp_published, self.rsp_next);
        if old == new {
            return false;
        }
        // Release: the answers and the data are visible before the index.
        self.ring.rsp_prod().store(new, Release);
        self.rsp_published = new;
        // The index must be visible before the front side's wish is read: otherwise both sides could
        // decide that the other one will look again. Pairs with the fence in Front::arm.
        fence(SeqCst);
        event_reached(self.ring.rsp_event().load(Relaxed), new, old)
    }

    /// True if [`Back::pop`] would find something, if only that the front-end is wrong.
    #[inline]
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.req_next != self.req_seen || self.ring.req_prod().load(Relaxed) != self.req_next
    }

    /// Asks the front-end for a notification with its next request, then looks once more
    /// (`RING_FINAL_CHECK_FOR_REQUESTS`): drain, re-arm, look again.
    ///
    /// # Errors
    /// [`Broken`] ends the ring.
    pub fn arm(&mut self) -> Result<Armed, Broken> {
        self.ring.req_event().store(self.req_next.wrapping_add(1), Relaxed);
        // The wish must be visible before the index is read again; pairs with the fence in
        // Front::publish.
        fence(SeqCst);
        Ok(if self.look()? { Armed::WorkArrived } else { Armed::Quiet })
    }

    /// Asks for no notifications while polling. Nothing needs to be done: the event index stays
    /// behind until the ring is armed again.
    pub fn disarm(&mut self) {}
}

#[cold]
#[allow(clippy::cast_possible_truncation)] // at most 4096
fn too_many(count: u16, max: usize) -> Refused {
    Refused::TooManySegments { count, max: max as u16 }
}

#[inline]
fn range(sector: u64, sectors: u64) -> Result<ByteRange, Refused> {
    let bytes = sectors.checked_mul(ringway_core::SECTOR_BYTES);
    bytes
        .and_then(|bytes| ByteRange::from_sector(sector, bytes))
        .ok_or(Refused::Range { sector, sectors })
}
