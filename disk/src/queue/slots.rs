//! The room kept for each request of a queue, and the answers.

use super::arena::Arena;
use super::held::HeldSlot;
use super::watcher::Watcher;
use crate::stats::DiskStats;
use ringway_aio::IoOp;
use ringway_core::mem::{HostRange, PoolPages, Segment, Segments};
use ringway_core::{ByteRange, Op, Request, Status, TagList};
use ringway_scheduler::RunId;
use std::collections::VecDeque;
use std::io;

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
    /// What was done is made durable.
    Sync,
    /// The image's thread does a part of the request.
    Asked,
}

impl Stage {
    /// The operation is the request itself.
    #[inline]
    pub(crate) const fn is_request(self) -> bool {
        matches!(self, Self::Whole | Self::Probe | Self::Watched)
    }
}

/// What only requests need that are more than one plain operation.
#[derive(Debug)]
pub(crate) struct SlowSlot {
    /// The operation in flight, unless the stage says that it is the request.
    pub(crate) op: IoOp,
    /// Where on the disk it is; empty for syncs.
    pub(crate) range: ByteRange,
    /// Where the image's map has that: in which file, and where in it.
    pub(crate) place: Option<(u8, ByteRange)>,
    /// What the image's port has to be told when an operation there is over.
    pub(crate) generation: u8,
    pub(crate) part: Segments,
    /// Bytes of the request that the operation in flight carries out.
    pub(crate) piece: u64,
    pub(crate) pages: Option<PoolPages>,
    pub(crate) lock: Option<ByteRange>,
    pub(crate) retries: u8,
    /// The guest's memory must not be given to the file.
    pub(crate) bounce: bool,
    pub(crate) counted: bool,
    /// This is the one sync of a cached disk that is under way.
    pub(crate) syncing: bool,
    /// The run whose operation is in flight in this slot, its first one.
    pub(crate) run: Option<RunId>,
    /// The disk has failed it, and it is held, or tried again.
    pub(crate) held: Option<HeldSlot>,
    /// Since when it has been seen in flight. Means nothing at [`Stage::Whole`].
    pub(crate) seen: Sighting,
}

/// When a request in flight was first seen by a scan, in the time of the caller; and whether it was
/// counted as overdue already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) since_ns: Option<u64>,
    pub(crate) counted: bool,
}

impl SlowSlot {
    fn new(part: Segments) -> Self {
        Self {
            op: IoOp::Sync,
            range: ByteRange::default(),
            place: None,
            generation: 0,
            part,
            piece: 0,
            pages: None,
            lock: None,
            retries: 0,
            bounce: false,
            counted: false,
            syncing: false,
            run: None,
            held: None,
            seen: Sighting::default(),
        }
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
    /// `depth` slots for requests of at most `segments` pieces of memory. Allocates; call at start
    /// only.
    pub(crate) fn new(depth: u16, segments: usize) -> io::Result<Self> {
        let count = usize::from(depth);
        Ok(Self {
            slots: Vec::with_capacity(count),
            slow: Vec::with_capacity(count),
            tags: TagList::new(depth),
            late: VecDeque::with_capacity(count),
            watcher: None,
            stats: DiskStats::default(),
            arena: Arena::new(2 * count, segments)?,
        })
    }

    /// The next slot has its first request.
    #[cold]
    fn begin_slot(&mut self) {
        assert!(self.slots.len() < self.slots.capacity(), "there is room for all (invariant 3)");
        // SAFETY: the slots are dropped before the arena: fields are dropped in order.
        let mut list = || unsafe { self.arena.list() };
        self.slots.push(Slot {
            request: Request::with_segments(list()),
            context: None,
            stage: Stage::Whole,
            done: 0,
        });
        self.slow.push(SlowSlot::new(list()));
    }

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

    /// Frees a slot whose request nobody answers.
    #[cold]
    pub(crate) fn free(&mut self, tag: u16) {
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

    /// Adds the memory of a slot's request to the operation of the slot `to`. Neighbours on the disk
    /// are none in memory: a list, whatever the addresses (A20).
    pub(crate) fn append_segments(&mut self, tag: u16, to: u16) {
        let part = &mut self.slow[usize::from(to)].part;
        for &segment in self.slots[usize::from(tag)].request.segments.as_slice() {
            let pushed = part.push(segment);
            debug_assert!(pushed, "a run keeps within the limits of segments");
        }
    }

    /// All slots that have a request in flight.
    pub(crate) fn in_flight(&mut self) -> impl Iterator<Item = (&mut Slot<C>, &mut SlowSlot)> {
        self.slots.iter_mut().zip(&mut self.slow).filter(|(slot, _)| slot.context.is_some())
    }

    /// The slots whose request is with the image's thread. Allocates.
    #[cold]
    pub(crate) fn asked(&self) -> Vec<u16> {
        let asked = |slot: &Slot<C>| slot.context.is_some() && slot.stage == Stage::Asked;
        (0..).zip(&self.slots).filter(|(_, slot)| asked(slot)).map(|(tag, _)| tag).collect()
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
                Op::Flush => self.stats.flushes += 1,
                Op::Discard | Op::WriteZeroes => self.stats.erases += 1,
                Op::GetId => written = request.segments.bytes(),
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

    /// True if a request is in flight that reaches beyond `end` bytes.
    pub(crate) fn reaches_beyond(&self, end: u64) -> bool {
        self.slots.iter().any(|slot| slot.context.is_some() && slot.request.range.end() > end)
    }

    /// True if a request is in flight, or done and not taken, whose data lies in one of these ranges
    /// of memory, or whose context says so.
    pub(crate) fn uses(&self, ranges: &[HostRange], by: impl Fn(&C) -> bool) -> bool {
        self.late.iter().any(|finished| by(&finished.context))
            || self.slots.iter().any(|slot| {
                slot.context
                    .as_ref()
                    .is_some_and(|context| by(context) || touches(&slot.request.segments, ranges))
            })
    }
}

/// True if memory of these segments lies in one of these ranges.
pub(crate) fn touches(segments: &Segments, ranges: &[HostRange]) -> bool {
    let touches = |segment: &Segment| {
        let first = segment.base as usize;
        let end = first.saturating_add(segment.len);
        ranges.iter().any(|&(from, to)| first <= to && end > from)
    };
    segments.as_slice().iter().any(touches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_begin_with_their_first_request_and_have_lists_of_their_own() {
        let mut slots = Slots::<()>::new(64, 8).unwrap();
        let places = (slots.slots.as_ptr(), slots.slow.as_ptr());
        for _ in 0..3 {
            let tags: Vec<_> = (0..4).map(|_| slots.acquire().unwrap()).collect();
            let mut sorted = tags.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3]);
            assert_eq!(
                (slots.slots.len(), slots.slow.len()),
                (4, 4),
                "no more than were in flight"
            );
            tags.into_iter().for_each(|tag| slots.abandon(tag));
        }
        let tags: Vec<_> = std::iter::from_fn(|| slots.acquire()).collect();
        assert_eq!((tags.len(), slots.slots.len(), slots.slow.len()), (64, 64, 64));
        assert_eq!((slots.slots.as_ptr(), slots.slow.as_ptr()), places, "nothing has moved");
        // Each has both lists to itself, as long as was asked for.
        for tag in 0..64u16 {
            let (slot, slow) = slots.both(tag);
            for list in [&mut slot.request.segments, &mut slow.part] {
                for _ in 0..8 {
                    assert!(list.push(Segment { base: std::ptr::null_mut(), len: tag.into() }));
                }
                assert!(!list.push(Segment::EMPTY));
            }
        }
        for tag in 0..64u16 {
            let (slot, slow) = slots.both(tag);
            assert_eq!(slot.request.segments.bytes(), 8 * u64::from(tag));
            assert!(slow.part.as_slice().iter().all(|segment| segment.len == usize::from(tag)));
        }
    }
}
