//! The back side of a block ring: what a disk's server does.
//!
//! ```text
//! while let Some((token, asked)) = ring.pop(grants)? { … }   // one load of req_prod per batch
//! ring.push(token, status);                                  // an answer, not yet visible
//! if ring.publish() { notify() }                             // one store of rsp_prod per batch
//! match ring.arm()? { Quiet => sleep, WorkArrived => go on }
//! ```

use super::asked::{Asked, Broken, Command, Grants, NotGranted, Offered, Refused, Token};
use super::layout::{
    DIRECT_SEGMENTS_MAX, DISCARD_SECURE, INDIRECT_SEGMENTS_MAX, LayoutError, OP_DISCARD,
    OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER, RSP_EOPNOTSUPP,
    RSP_ERROR, RSP_OKAY, RingAt, RingMemory, RingSlot, SEGMENTS_PER_PAGE, event_reached,
};
use super::piece::{GrantPiece, pieces_as_bytes};
use crate::shared::fence;
use crate::virtqueue::Armed;
use ringway_core::{ByteRange, Status};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

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
    /// For a ring that another back-end has left in the middle there is [`Back::resumed`].
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

    /// As [`Back::new`], for a ring that a predecessor has left, after it had taken `taken` requests
    /// (as [`Back::taken`] says it). It owes answers to all of them but those that are published, and
    /// knows by itself to which: `Token::from_parts`.
    ///
    /// # Errors
    /// As [`Back::new`], also if the ring's own indices say that it cannot have been so.
    ///
    /// # Safety
    /// As of [`Back::new`].
    pub unsafe fn resumed(at: RingAt, offered: Offered, taken: u32) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for it.
        let mut back = unsafe { Self::new(at, offered)? };
        let (size, answered) = (back.ring.size(), back.rsp_next);
        let asked = back.ring.req_prod().load(Relaxed);
        if taken.wrapping_sub(answered) > size || asked.wrapping_sub(taken) > size {
            return Err(LayoutError::Indices { answered, asked: taken, size });
        }
        (back.req_next, back.req_seen) = (taken, taken);
        Ok(back)
    }

    /// Requests taken so far, counted as the ring does: from its beginning, modulo 2^32.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.req_next
    }

    /// Answers that the front-end can see, counted in the same way.
    #[must_use]
    pub fn published(&self) -> u32 {
        self.rsp_published
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
        if self.req_next == self.req_seen && !self.read_request_index()? {
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
    fn read_request_index(&mut self) -> Result<bool, Broken> {
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
    fn token(&self, slot: &RingSlot) -> Token {
        let [operation, inner, ..] = slot.head();
        let operation = if operation == OP_INDIRECT { inner } else { operation };
        Token { id: slot.long(self.ring.abi().id_at()), operation }
    }

    #[inline]
    fn judge(&mut self, slot: &RingSlot, grants: &mut impl Grants) -> Result<(), Refused> {
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
    fn direct(&mut self, slot: &RingSlot, command: Command) -> Result<(), Refused> {
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
    fn indirect(&mut self, slot: &RingSlot, grants: &mut impl Grants) -> Result<(), Refused> {
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
    fn discard(&mut self, slot: &RingSlot) -> Result<(), Refused> {
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
            Status::IoError | Status::NoSpace => RSP_ERROR,
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
        Ok(if self.read_request_index()? { Armed::WorkArrived } else { Armed::Quiet })
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
