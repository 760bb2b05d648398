//! The room kept for each request of a queue, and the answers (hot). How slots begin, and what looks at
//! all of them: `slots/setup.rs`; what few requests need: `slots/slow_slot.rs`.

mod setup;
mod slow_slot;

use super::arena::Arena;
use super::watcher::Watcher;
use crate::stats::DiskStats;
use ringway_core::{Op, Request, Status, TagList};
pub(crate) use setup::touches;
pub(crate) use slow_slot::Sighting;
pub(crate) use slow_slot::SlowSlot;
use std::collections::VecDeque;

/// A request that is done.
#[derive(Debug)]
pub struct Finished<C> {
    /// What the caller gave to [`DiskQueue::start`](crate::DiskQueue::start).
    pub context: C,
    /// The slot it was in, which is free again.
    pub tag: u16,
    /// The answer.
    pub status: Status,
    /// Bytes written to guest memory.
    pub written: u32,
}

/// What every request needs.
///
/// # Invariants
/// 1. While its tag is acquired and `context` is `Some`, the request's segments belong to the slot
///    and, if an operation is queued, to the engine.
#[derive(Debug)]
pub(crate) struct Slot<C> {
    pub(crate) request: Request,
    pub(crate) context: Option<C>,
    pub(crate) stage: Stage,
    /// Bytes of the request's range that are done.
    pub(crate) done: u64,
}

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The whole request is one operation on the guest's memory.
    Whole,
    /// As `Whole`, and timed.
    Probe,
    /// As `Whole`, and seen by a scan for overdue requests.
    Watched,
    /// As `Whole`, where the image's map has it in one piece.
    Placed,
    /// The whole request is held, or goes along in a merged operation.
    Run,
    /// A part of the request, on the guest's memory.
    Part,
    /// A part of a read, into bounce pages.
    BounceRead,
    /// A part of a write or of zeroing, from bounce pages.
    BounceWrite,
    /// The blocks around an unaligned write are read into bounce pages.
    ModifyRead,
    /// A hole is punched, a range zeroed or discarded.
    Erase,
    /// It waits for a late write that it overlaps; nothing is done yet.
    Late,
    /// What was done is to be made durable by the next sync.
    Joined,
    /// The sync of the disk that is under way.
    Sync,
    /// The image's thread does a part of the request.
    Asked,
    /// The image's thread writes entries of its tables, before the file is made durable.
    Entries,
}

impl Stage {
    /// The operation is the request itself.
    #[inline]
    pub(crate) const fn is_request(self) -> bool {
        matches!(self, Self::Whole | Self::Probe | Self::Watched | Self::Placed)
    }
}

/// The slots of a queue: room for all of them is there from the start, and each begins to use its part
/// with its first request. So a queue that never has many in flight costs the pages of few.
///
/// # Invariants
/// 1. A tag is free in `tags`, or being filled, or its slot has a context.
/// 2. A slot in flight holds neither pages nor a lock when it is retired.
/// 3. `slots` and `slow` have the slots of tags that were acquired before, and room for all.
#[derive(Debug)]
pub(crate) struct Slots<C> {
    slots: Vec<Slot<C>>,
    slow: Vec<SlowSlot>,
    tags: TagList,
    /// Answers that no operation of the engine will bring.
    late: VecDeque<Finished<C>>,
    pub(crate) watcher: Option<Watcher>,
    pub(crate) stats: DiskStats,
    /// The memory of the slots' segment lists; the last to go.
    arena: Arena,
}

impl<C> Slots<C> {
    /// Takes a slot, if one is free.
    #[inline]
    pub(crate) fn acquire(&mut self) -> Option<u16> {
        let tag = self.tags.acquire()?;
        // Tags are handed out for the first time in their order.
        if usize::from(tag) == self.slots.len() {
            self.begin_slot();
        }
        Some(tag)
    }

    /// Gives back a slot that was not started.
    #[inline]
    pub(crate) fn abandon(&mut self, tag: u16) {
        debug_assert!(self.get(tag).context.is_none());
        self.tags.release(tag);
    }

    /// Slots that are in use.
    pub(crate) fn in_use(&self) -> usize {
        self.tags.in_use()
    }

    #[inline]
    pub(crate) fn get(&self, tag: u16) -> &Slot<C> {
        &self.slots[usize::from(tag)]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, tag: u16) -> &mut Slot<C> {
        &mut self.slots[usize::from(tag)]
    }

    #[inline]
    pub(crate) fn slow(&self, tag: u16) -> &SlowSlot {
        &self.slow[usize::from(tag)]
    }

    /// A slot and its slow part.
    #[inline]
    pub(crate) fn both(&mut self, tag: u16) -> (&mut Slot<C>, &mut SlowSlot) {
        (&mut self.slots[usize::from(tag)], &mut self.slow[usize::from(tag)])
    }

    /// Frees the slot and makes the answer.
    #[inline]
    pub(crate) fn retire(&mut self, tag: u16, status: Status) -> Finished<C> {
        let slot = &mut self.slots[usize::from(tag)];
        let context = slot.context.take().expect("a slot in flight has a context");
        if let Some(watcher) = &mut self.watcher {
            watcher.tell(&slot.request);
        }
        let request = &slot.request;
        let mut written = 0;
        if status == Status::Ok {
            match request.op {
                Op::Read => {
                    self.stats.reads += 1;
                    self.stats.read_bytes += request.range.len();
                    written = request.range.len();
                }
                Op::Write => {
                    self.stats.writes += 1;
                    self.stats.written_bytes += request.range.len();
                }
                _ => written = self.stats.count_other(request),
            }
        } else {
            self.stats.errors += 1;
        }
        self.tags.release(tag);
        // A chain describes less than 2^32 bytes.
        Finished { context, tag, status, written: u32::try_from(written).unwrap_or(u32::MAX) }
    }

    /// Keeps an answer that no operation of the engine brings.
    #[inline]
    pub(crate) fn push_late(&mut self, finished: Finished<C>) {
        self.late.push_back(finished);
    }

    /// The next of them.
    #[inline]
    pub(crate) fn take_late(&mut self) -> Option<Finished<C>> {
        self.late.pop_front()
    }

    /// True if there is one.
    #[inline]
    pub(crate) fn has_late(&self) -> bool {
        !self.late.is_empty()
    }
}

#[cfg(test)]
mod tests;
