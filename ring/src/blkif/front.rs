//! The front side of a block ring: what a guest does.
//!
//! ```text
//! let id = ring.push(ask)?;                               // a slot; not yet visible
//! if ring.publish() { notify() }                          // one store of req_prod per batch
//! while let Some(answer) = ring.pop_response()? { … }     // one load of rsp_prod per batch
//! match ring.arm(1)? { Quiet => sleep, WorkArrived => go on }
//! ```

use super::asked::Command;
use super::layout::{
    DIRECT_SEGMENTS_MAX, DISCARD_SECURE, INDIRECT_PAGES_MAX, LayoutError, OP_DISCARD,
    OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER, PAGE_BYTES,
    RSP_EOPNOTSUPP, RSP_OKAY, RingAt, RingMemory, RingSlot, SEGMENTS_PER_PAGE, SLOT_WORDS,
    event_reached,
};
use super::piece::GrantPiece;
use crate::shared::fence;
use crate::virtqueue::Armed;
use ringway_core::{Status, TagList};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask<'a> {
    /// What to do.
    pub command: Command,
    /// First sector on the disk, in units of 512 bytes.
    pub sector: u64,
    /// With what.
    pub with: With<'a>,
}

/// What a request works with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With<'a> {
    /// At most 11 pieces, in the slot.
    Pieces(&'a [GrantPiece]),
    /// Pieces listed in granted pages, [`super::pieces_to_bytes`]; for reads and writes only.
    Pages {
        /// How many pieces.
        segments: u16,
        /// The grants of the pages, 512 pieces in each.
        pages: &'a [u32],
    },
    /// Sectors, for a discard.
    Sectors(u64),
}

/// Why nothing was added to the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// All slots are in use: take answers first.
    #[error("the ring is full")]
    Full,
    /// More pieces or pages than a slot holds, or another number of pages than the pieces need.
    #[error("{segments} segments in {pages} indirect pages do not make a request")]
    Segments {
        /// How many pieces.
        segments: usize,
        /// How many pages list them.
        pages: usize,
    },
    /// An operation that does not go with this kind of list.
    #[error("{0:?} does not take what it was given")]
    Kind(Command),
}

/// The back-end broke the rules of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackFault {
    /// More answers than requests, or fewer than there were.
    #[error("rsp_prod moved from {from} to {to} with {in_flight} requests in flight")]
    IndexJump {
        /// Where the front side has got to.
        from: u32,
        /// What the back side wrote.
        to: u32,
        /// Requests that can be answered.
        in_flight: u32,
    },
    /// An answer to a request that is not in flight.
    #[error("an answer to request {0}, which is not in flight")]
    NotInFlight(u64),
    /// The answer to an indirect request names the operation inside.
    #[error("request {id} has operation {asked}, its answer {answered}")]
    WrongOperation {
        /// The request.
        id: u16,
        /// Its operation.
        asked: u8,
        /// That of the answer.
        answered: u8,
    },
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request, as [`Front::push`] has named it.
    pub id: u16,
    /// What came of it.
    pub status: Status,
}

/// Nothing is in flight under this id.
const IDLE: u8 = u8::MAX;

/// One block ring, seen from the front-end.
///
/// # Invariants
/// 1. `ids` hands out the numbers below the ring's size; `operations[id]` is not `IDLE` exactly for
///    those in flight, of which there are `req_next - rsp_next`, at most the ring's size.
/// 2. `rsp_seen - rsp_next <= req_published - rsp_next`.
/// 3. Nothing that decides where memory is accessed is ever read back from shared memory.
#[derive(Debug)]
pub struct Front {
    ring: RingMemory,
    /// The next request to write.
    req_next: u32,
    /// The requests made visible.
    req_published: u32,
    /// The next answer to read.
    rsp_next: u32,
    /// The answers that were visible when last looked at.
    rsp_seen: u32,
    ids: TagList,
    /// The operation that the answer to each request in flight must name.
    operations: Box<[u8]>,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for Front {}

impl Front {
    /// A new, empty ring at `at` whose indices start at `first`: 0, but for tests of the wrap.
    ///
    /// # Errors
    /// [`LayoutError`] if the ring cannot be.
    ///
    /// # Safety
    /// `at` names mapped memory for as long as the ring exists, and no back-end uses it yet.
    pub unsafe fn new(at: RingAt, first: u32) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { RingMemory::new(at)? };
        // SAFETY: likewise.
        unsafe { at.base.write_bytes(0, PAGE_BYTES << at.order) };
        // SHARED_RING_INIT: both sides want to hear of the first message.
        ring.req_prod().store(first, Relaxed);
        ring.rsp_prod().store(first, Relaxed);
        ring.req_event().store(first.wrapping_add(1), Relaxed);
        ring.rsp_event().store(first.wrapping_add(1), Relaxed);
        // At most 512.
        #[allow(clippy::cast_possible_truncation)]
        let size = ring.size() as u16;
        Ok(Self {
            ring,
            req_next: first,
            req_published: first,
            rsp_next: first,
            rsp_seen: first,
            ids: TagList::new(size),
            operations: vec![IDLE; usize::from(size)].into_boxed_slice(),
        })
    }

    /// Slots of the ring.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// Requests added whose answers were not taken.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.req_next.wrapping_sub(self.rsp_next)
    }

    /// Adds a request and names it, by a number below the ring's size that no other request in
    /// flight has. Visible to the back-end with [`Front::publish`].
    ///
    /// # Errors
    /// [`NoRoom`]; nothing has changed.
    #[inline]
    pub fn push(&mut self, ask: Ask<'_>) -> Result<u16, NoRoom> {
        let (mut slot, words, operation) = self.slot(ask)?;
        let id = self.ids.acquire().ok_or(NoRoom::Full)?;
        slot.set_long(self.ring.abi().id_at(), u64::from(id));
        self.operations[usize::from(id)] = operation;
        self.ring.write(self.req_next, &slot, words);
        self.req_next = self.req_next.wrapping_add(1);
        Ok(id)
    }

    /// The slot of a request but for its id; how many words of it count; the operation of its answer.
    #[inline]
    fn slot(&self, ask: Ask<'_>) -> Result<(RingSlot, usize, u8), NoRoom> {
        let abi = self.ring.abi();
        let mut slot = RingSlot([0; SLOT_WORDS]);
        slot.set_long(abi.sector_at(), ask.sector);
        let operation = match ask.command {
            Command::Read => OP_READ,
            Command::Write => OP_WRITE,
            Command::WriteBarrier => OP_WRITE_BARRIER,
            Command::Flush => OP_FLUSH_DISKCACHE,
            Command::Discard { .. } => OP_DISCARD,
        };
        let rest = abi.rest_at();
        match (ask.with, ask.command) {
            (With::Sectors(sectors), Command::Discard { secure }) => {
                let flag = if secure { DISCARD_SECURE } else { 0 };
                slot.0[0] = u32::from_le_bytes([operation, flag, 0, 0]);
                slot.set_long(rest, sectors);
                Ok((slot, rest + 2, operation))
            }
            (With::Sectors(_), _) | (_, Command::Discard { .. }) => Err(NoRoom::Kind(ask.command)),
            (With::Pieces(pieces), _) => {
                // At most 11.
                let count = match u8::try_from(pieces.len()) {
                    Ok(count) if pieces.len() <= DIRECT_SEGMENTS_MAX => count,
                    _ => return Err(NoRoom::Segments { segments: pieces.len(), pages: 0 }),
                };
                slot.0[0] = u32::from_le_bytes([operation, count, 0, 0]);
                for (words, piece) in slot.0[rest..].chunks_exact_mut(2).zip(pieces) {
                    words.copy_from_slice(&piece.to_words());
                }
                Ok((slot, rest + 2 * pieces.len(), operation))
            }
            (With::Pages { segments, pages }, Command::Read | Command::Write) => {
                let needed = usize::from(segments).div_ceil(SEGMENTS_PER_PAGE);
                if pages.len() != needed || needed > INDIRECT_PAGES_MAX {
                    return Err(NoRoom::Segments { segments: segments.into(), pages: pages.len() });
                }
                let [low, high] = segments.to_le_bytes();
                slot.0[0] = u32::from_le_bytes([OP_INDIRECT, operation, low, high]);
                let at = abi.pages_at();
                slot.0[at..at + pages.len()].copy_from_slice(pages);
                Ok((slot, at + pages.len(), operation))
            }
            (With::Pages { .. }, _) => Err(NoRoom::Kind(ask.command)),
        }
    }

    /// Makes the added requests visible; true if the back-end wants to be notified.
    #[inline]
    #[must_use = "true means the back-end waits for a notification"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.req_published, self.req_next);
        if old == new {
            return false;
        }
        // Release: slots, lists and data are visible before the index.
        self.ring.req_prod().store(new, Release);
        self.req_published = new;
        // Pairs with the fence in Back::arm.
        fence(SeqCst);
        event_reached(self.ring.req_event().load(Relaxed), new, old)
    }

    /// Takes the next answer, if there is one.
    ///
    /// # Errors
    /// [`BackFault`] ends the ring: it would be reported again and again.
    #[inline]
    pub fn pop_response(&mut self) -> Result<Option<Response>, BackFault> {
        if self.rsp_next == self.rsp_seen && !self.read_response_index()? {
            return Ok(None);
        }
        let (id, answered, status) = self.ring.read_response(self.rsp_next);
        let fault = BackFault::NotInFlight(id);
        let id = u16::try_from(id).map_err(|_| fault)?;
        let operation = self.operations.get_mut(usize::from(id)).ok_or(fault)?;
        let asked = *operation;
        if asked == IDLE {
            return Err(fault);
        }
        if asked != answered {
            return Err(BackFault::WrongOperation { id, asked, answered });
        }
        *operation = IDLE;
        self.ids.release(id);
        self.rsp_next = self.rsp_next.wrapping_add(1);
        let status = match status {
            RSP_OKAY => Status::Ok,
            RSP_EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoError,
        };
        Ok(Some(Response { id, status }))
    }

    /// Reads `rsp_prod`; true if answers arrived.
    #[inline]
    fn read_response_index(&mut self) -> Result<bool, BackFault> {
        // Acquire: what the back side wrote before the index is visible after this load.
        let to = self.ring.rsp_prod().load(Acquire);
        let from = self.rsp_next;
        let in_flight = self.req_published.wrapping_sub(from);
        if to.wrapping_sub(from) > in_flight {
            return Err(BackFault::IndexJump { from, to, in_flight });
        }
        self.rsp_seen = to;
        Ok(to != from)
    }

    /// True if at least `count` answers (1 to all that are awaited) arrived and were not taken yet.
    ///
    /// # Errors
    /// [`BackFault`] ends the ring.
    #[inline]
    pub fn has_responses(&mut self, count: u32) -> Result<bool, BackFault> {
        self.read_response_index()?;
        let awaited = self.req_published.wrapping_sub(self.rsp_next);
        Ok(self.rsp_seen.wrapping_sub(self.rsp_next) >= count.clamp(1, awaited.max(1)))
    }

    /// Asks the back-end for a notification once `after` more answers (1 to all that are awaited)
    /// arrived, then looks once more: `WorkArrived` if they are here already.
    ///
    /// # Errors
    /// [`BackFault`] ends the ring.
    pub fn arm(&mut self, after: u32) -> Result<Armed, BackFault> {
        let awaited = self.req_published.wrapping_sub(self.rsp_next);
        let after = after.clamp(1, awaited.max(1));
        self.ring.rsp_event().store(self.rsp_next.wrapping_add(after), Relaxed);
        // The wish must be visible before the index is read again; pairs with the fence in
        // Back::publish.
        fence(SeqCst);
        Ok(if self.has_responses(after)? { Armed::WorkArrived } else { Armed::Quiet })
    }

    /// Asks for no notifications while polling. Nothing needs to be done: the event index stays
    /// behind until the ring is armed again.
    pub fn disarm(&mut self) {}
}
