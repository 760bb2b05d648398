//! The record of a split queue: `QueueRegionSplit` and `DescStateSplit`.

use super::record::{COUNTER_MAX, InflightError, InflightRegion, damaged};
use crate::virtqueue::chain::Chain;
use crate::virtqueue::chain_error::ChainError;
use crate::virtqueue::layout::LayoutError;
use crate::virtqueue::split::SplitDevice;
use crate::virtqueue::types::{Areas, Broken, Format, Head};
use ringway_core::kill_point;
use ringway_core::mem::Translator;

const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;

const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// A split queue and its record.
///
/// # Invariants
/// 1. Between calls, the chains with `inflight = 1` in the record are those that `ring` has handed
///    out and not published, and those in `backlog`.
/// 2. `pushed` holds the chains pushed and not published; it has room for as many as the queue.
#[derive(Debug)]
pub struct SplitTracked {
    pub(super) ring: SplitDevice,
    /// The record was not new.
    pub(super) resumed: bool,
    part: InflightRegion,
    /// The next chain's place in the order of all.
    counter: u64,
    last_batch_head: u16,
    pushed: Vec<u16>,
    /// Chains that an earlier device left in flight, the first one last.
    pub(super) backlog: Vec<u16>,
    /// The chain popped last was one of these.
    pub(super) retaken: bool,
}

// SAFETY: the record stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for SplitTracked {}

/// What an earlier device has left.
struct Left {
    /// Chains that were published, whose marks may be wrong.
    published: Vec<u16>,
    /// Chains in flight, the first one last.
    in_flight: Vec<u16>,
    counter: u64,
    last_batch_head: u16,
}

impl SplitTracked {
    /// # Safety
    /// As [`super::Tracked::start`].
    pub(super) unsafe fn start(
        part: InflightRegion,
        format: Format,
        at: Areas,
        base: Option<u32>,
    ) -> Result<Self, InflightError> {
        let Format { size, event_idx, indirect, .. } = format;
        let base = base.unwrap_or(0);
        let next = u16::try_from(base).map_err(|_| LayoutError::SplitBase(base))?;
        // SAFETY: the caller vouches for the memory.
        let mut ring = unsafe { SplitDevice::new(size, at.split(), next, event_idx, indirect)? };
        let used = ring.used_index();
        let new = part.is_new(size)?;
        let left = if new {
            if next != used {
                return Err(InflightError::Base { base, used: used.into() });
            }
            make(&part, used);
            Left { published: Vec::new(), in_flight: Vec::new(), counter: 0, last_batch_head: 0 }
        } else {
            let left = read(&part, size, used)?;
            kill_point!(Judged);
            // Whatever front-ends say: each chain taken was either returned or is in flight.
            ring.resume(used, &left.in_flight);
            for &head in &left.published {
                part.put_u8(part.entry(head, INFLIGHT), 0);
            }
            part.put_u16(USED_IDX, used);
            kill_point!(Recovered);
            left
        };
        Ok(Self {
            ring,
            resumed: !new,
            part,
            counter: left.counter,
            last_batch_head: left.last_batch_head,
            pushed: Vec::with_capacity(usize::from(size)),
            backlog: left.in_flight,
            retaken: false,
        })
    }

    /// Takes the next chain: first those that an earlier device has left, in their old order.
    #[allow(clippy::type_complexity)]
    pub(super) fn pop(
        &mut self,
        mem: &mut Translator,
    ) -> Result<Option<(Head, Result<&Chain, ChainError>)>, Broken> {
        if let Some(head) = self.backlog.pop() {
            kill_point!(Retaken);
            self.retaken = true;
            return Ok(Some(self.ring.retake(head, mem)));
        }
        self.retaken = false;
        let Some((head, chain)) = self.ring.pop(mem)? else { return Ok(None) };
        kill_point!(Popped);
        let part = &self.part;
        part.put_u64(part.entry(head.index(), COUNTER), self.counter);
        self.counter += 1;
        kill_point!(Marking);
        part.put_u8(part.entry(head.index(), INFLIGHT), 1);
        kill_point!(Marked);
        Ok(Some((head, chain)))
    }

    /// Puts back the chain popped last. One of a predecessor's stays in the record.
    #[cold]
    pub(super) fn put_back(&mut self, head: Head) {
        if self.retaken {
            return self.backlog.push(head.index());
        }
        self.part.put_u8(self.part.entry(head.index(), INFLIGHT), 0);
        self.ring.put_back(head);
    }

    pub(super) fn push(&mut self, head: Head, written: u32) {
        self.pushed.push(head.index());
        self.ring.push(head, written);
    }

    pub(super) fn publish(&mut self) -> bool {
        if self.pushed.is_empty() {
            return false;
        }
        kill_point!(Linking);
        let part = &self.part;
        for &head in &self.pushed {
            part.put_u16(part.entry(head, NEXT), self.last_batch_head);
            self.last_batch_head = head;
            part.put_u16(LAST_BATCH_HEAD, head);
        }
        kill_point!(Linked);
        let wants_call = self.ring.publish();
        kill_point!(Published);
        for &head in &self.pushed {
            part.put_u8(part.entry(head, INFLIGHT), 0);
            kill_point!(Unmarking);
        }
        part.put_u16(USED_IDX, self.ring.used_index());
        kill_point!(Unmarked);
        self.pushed.clear();
        wants_call
    }
}

/// Makes a new record of a queue whose used index is `used`: it need not begin at 0.
fn make(part: &InflightRegion, used: u16) {
    for index in 0..part.entries {
        part.put_u8(part.entry(index, INFLIGHT), 0);
    }
    part.put_u16(LAST_BATCH_HEAD, 0);
    part.put_u16(USED_IDX, used);
    part.is_made();
}

/// Reads and judges a record; changes nothing.
fn read(part: &InflightRegion, size: u16, used: u16) -> Result<Left, InflightError> {
    let mut in_flight = vec![false; usize::from(part.entries)];
    for index in 0..part.entries {
        let is = part.is_in_flight(index)?;
        if is && index >= size {
            return damaged("in flight beyond the queue", index);
        }
        in_flight[usize::from(index)] = is;
    }
    let last_batch_head = part.u16(LAST_BATCH_HEAD);
    if last_batch_head >= part.entries {
        return damaged("the last batch begins beyond the queue", last_batch_head);
    }
    let mut published = Vec::new();
    let batch = used.wrapping_sub(part.u16(USED_IDX));
    // Without anything in flight there is nothing to be cleared, wherever the index is.
    if batch != 0 && in_flight.contains(&true) {
        if batch > size {
            return damaged("the used index is further on than a batch can take it", batch);
        }
        let mut seen = vec![false; usize::from(size)];
        let mut head = last_batch_head;
        for _ in 0..batch {
            if head >= size {
                return damaged("the last batch leads beyond the queue", head);
            }
            if std::mem::replace(&mut seen[usize::from(head)], true) {
                return damaged("the last batch holds a chain twice", head);
            }
            in_flight[usize::from(head)] = false;
            published.push(head);
            head = part.u16(part.entry(head, NEXT));
        }
    }
    let mut order = Vec::new();
    for index in (0..size).filter(|&index| in_flight[usize::from(index)]) {
        let counter = part.u64(part.entry(index, COUNTER));
        if counter >= COUNTER_MAX {
            return damaged("the counter is beyond all bounds", index);
        }
        order.push((counter, index));
    }
    order.sort_unstable_by(|a, b| b.cmp(a));
    let counter = order.first().map_or(0, |(counter, _)| counter + 1);
    let in_flight = order.into_iter().map(|(_, index)| index).collect();
    Ok(Left { published, in_flight, counter, last_batch_head })
}
