//! How slots begin, and what looks at all of them.

use super::slow_slot::SlowSlot;
use super::{Slot, Slots, Stage};
use crate::queue::arena::Arena;
use crate::stats::DiskStats;
use ringway_core::mem::{HostRange, Segment, Segments};
use ringway_core::{Request, TagList};
use std::collections::VecDeque;
use std::io;

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
    pub(super) fn begin_slot(&mut self) {
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

    /// Frees a slot whose request nobody answers.
    #[cold]
    pub(crate) fn free(&mut self, tag: u16) {
        debug_assert!(self.get(tag).context.is_none());
        self.tags.release(tag);
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
        let asked = |slot: &Slot<C>| {
            slot.context.is_some() && matches!(slot.stage, Stage::Asked | Stage::Entries)
        };
        (0..).zip(&self.slots).filter(|(_, slot)| asked(slot)).map(|(tag, _)| tag).collect()
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
