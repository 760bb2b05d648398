//! The record of a packed queue: `QueueRegionPacked` and `DescStatePacked`.
//!
//! A packed ring overwrites its descriptors when chains come back, so the record keeps a copy of
//! each descriptor in flight. Its entries are either on the free list, which ends with a link beyond
//! the last entry, or belong to exactly one chain in flight.
//!
//! Two fields hold the same thing before and after a batch, `x` and `old_x`: equal means that no
//! batch is under way. The protocol compares the used indices; the wrap counters belong to them, or
//! a batch that goes once around the ring would not be noticed. For the same reason an index and its
//! wrap counter are stored together, in one word: between two stores they would name a place in
//! another lap, where stale marks may say anything.

use super::record::{COUNTER_MAX, InflightError, InflightRegion, damaged};
use crate::virtqueue::chain::Chain;
use crate::virtqueue::chain_error::ChainError;
use crate::virtqueue::packed::{Copied, PackedDevice};
use crate::virtqueue::packed_layout::{PackedBase, Position, Word};
use crate::virtqueue::types::{Areas, Broken, Format, Head};
use ringway_core::kill_point;
use ringway_core::mem::Translator;

const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
/// `used_idx`, `old_used_idx` (16 bits each), `used_wrap_counter`, `old_used_wrap_counter` (8 bits
/// each), and padding: one aligned word.
const USED: usize = 16;

const INFLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDR: usize = 24;

/// A chain in flight, as an earlier device has left it.
#[derive(Debug)]
pub(super) struct Again {
    id: u16,
    descs: Vec<Copied>,
}

/// A packed queue and its record.
///
/// # Invariants
/// 1. Between calls, the chains with `inflight = 1` in the record are those that `ring` has handed
///    out and not published, and those in `backlog`; `entry[id]` is the first entry of such a chain
///    and `last[id]` its last.
/// 2. `next` and `free_head` are the free list of the record; each of its entries is below the number
///    of entries, or the end.
/// 3. `pushed` holds the ids pushed and not published; it has room for as many as the queue.
#[derive(Debug)]
pub struct PackedTracked {
    pub(super) ring: PackedDevice,
    /// The record was not new.
    pub(super) resumed: bool,
    part: InflightRegion,
    counter: u64,
    /// Where the used ring was when it was last published.
    used: Position,
    free_head: u16,
    next: Box<[u16]>,
    entry: Box<[u16]>,
    last: Box<[u16]>,
    pushed: Vec<u16>,
    /// The first one last.
    pub(super) backlog: Vec<Again>,
    /// The chain popped last, if it was one of these.
    pub(super) retaken: Option<Again>,
}

// SAFETY: the record stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for PackedTracked {}

impl PackedTracked {
    /// # Safety
    /// As [`super::Tracked::start`].
    pub(super) unsafe fn start(
        part: InflightRegion,
        format: Format,
        at: Areas,
        base: Option<u32>,
    ) -> Result<Self, InflightError> {
        let Format { size, event_idx, indirect, .. } = format;
        let new = part.is_new(size)?;
        // What the front-end says is only asked for when there is no record of it.
        let base = base.filter(|_| new).map_or(PackedBase::START, PackedBase);
        // SAFETY: the caller vouches for the memory.
        let mut ring = unsafe { PackedDevice::new(size, at.packed(), base, event_idx, indirect)? };
        let left = if new {
            let used = ring.used();
            if ring.taken() != 0 {
                return Err(InflightError::Base { base: base.0, used: used.to_bits().into() });
            }
            make(&part, used);
            Left {
                free_head: 0,
                used,
                next: (1..=part.entries).collect(),
                to_clear: Vec::new(),
                chains: Vec::new(),
                commit: false,
            }
        } else {
            let left = read(&part, &ring)?;
            kill_point!(Judged);
            let lengths = left.chains.iter().map(|chain| (chain.id(), chain.count()));
            ring.resume(left.used, lengths);
            left.store(&part);
            ring.withdraw();
            kill_point!(Recovered);
            left
        };
        let mut queue = Self {
            ring,
            resumed: !new,
            part,
            counter: left.chains.first().map_or(0, |chain| chain.counter + 1),
            used: left.used,
            free_head: left.free_head,
            next: left.next.into(),
            entry: vec![0; usize::from(size)].into(),
            last: vec![0; usize::from(size)].into(),
            pushed: Vec::with_capacity(usize::from(size)),
            backlog: Vec::with_capacity(left.chains.len()),
            retaken: None,
        };
        for chain in left.chains {
            let id = chain.id();
            queue.entry[usize::from(id)] = chain.first;
            queue.last[usize::from(id)] = chain.last;
            queue.backlog.push(Again { id, descs: chain.descs });
        }
        Ok(queue)
    }

    /// Takes the next chain: first those that an earlier device has left, in their old order.
    #[allow(clippy::type_complexity)]
    pub(super) fn pop(
        &mut self,
        mem: &mut Translator,
    ) -> Result<Option<(Head, Result<&Chain, ChainError>)>, Broken> {
        self.retaken = self.backlog.pop();
        if let Some(Again { id, descs }) = &self.retaken {
            kill_point!(Retaken);
            return Ok(Some(self.ring.retake(*id, descs, mem)));
        }
        let Some((head, chain)) = self.ring.pop(mem)? else { return Ok(None) };
        let verdict = chain.map(drop);
        kill_point!(Popped);
        self.took(head.index());
        kill_point!(Marked);
        Ok(Some((head, verdict.map(|()| self.ring.chain()))))
    }

    /// Records the chain that the ring handed out last.
    fn took(&mut self, id: u16) {
        let part = &self.part;
        // A batch is recorded when it is published, so no other one is under way now:
        // `free_head` is also the old one.
        let first = self.free_head;
        part.put_u16(part.entry(first, NUM), 0);
        part.put_u64(part.entry(first, COUNTER), self.counter);
        self.counter += 1;
        part.put_u8(part.entry(first, INFLIGHT), 1);
        let count = self.ring.length(id);
        for number in 1..=count {
            let Copied { addr, word } = self.ring.taken_last(count - number);
            let at = self.free_head;
            if number == count {
                part.put_u16(part.entry(first, LAST), at);
                self.last[usize::from(id)] = at;
            }
            part.put_u16(part.entry(first, NUM), number);
            part.put_u64(part.entry(at, ADDR), addr);
            part.put_u32(part.entry(at, LEN), word.len());
            part.put_u16(part.entry(at, FLAGS), word.flags());
            // The id of the chain stands in its last descriptor only; here it is in each.
            part.put_u16(part.entry(at, ID), id);
            self.free_head = self.next[usize::from(at)];
            part.put_u16(FREE_HEAD, self.free_head);
            kill_point!(Marking);
        }
        part.put_u16(OLD_FREE_HEAD, self.free_head);
        self.entry[usize::from(id)] = first;
    }

    /// Puts back the chain popped last. One of a predecessor's stays in the record; any other leaves
    /// it as a process would that was killed while it recorded the chain: `old_free_head` says that
    /// the entries are free, and the rest follows.
    #[cold]
    pub(super) fn put_back(&mut self, head: Head) {
        if let Some(again) = self.retaken.take() {
            return self.backlog.push(again);
        }
        let first = self.entry[usize::from(head.index())];
        self.part.put_u16(OLD_FREE_HEAD, first);
        self.part.put_u16(FREE_HEAD, first);
        self.part.put_u8(self.part.entry(first, INFLIGHT), 0);
        // The entries were taken in the order of the free list and their links are as they were.
        self.free_head = first;
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
        for &id in &self.pushed {
            let (first, last) = (self.entry[usize::from(id)], self.last[usize::from(id)]);
            self.next[usize::from(last)] = self.free_head;
            part.put_u16(part.entry(last, NEXT), self.free_head);
            self.free_head = first;
            part.put_u16(FREE_HEAD, first);
        }
        let used = self.ring.used();
        part.put_u64(USED, used_word(used, self.used));
        kill_point!(Linked);
        let wants_call = self.ring.publish();
        kill_point!(Published);
        for &id in &self.pushed {
            part.put_u8(part.entry(self.entry[usize::from(id)], INFLIGHT), 0);
            kill_point!(Unmarking);
        }
        part.put_u16(OLD_FREE_HEAD, self.free_head);
        part.put_u64(USED, used_word(used, used));
        kill_point!(Unmarked);
        self.used = used;
        self.pushed.clear();
        wants_call
    }
}

/// Makes a new record of a queue whose next descriptor to be used is `used`.
fn make(part: &InflightRegion, used: Position) {
    for index in 0..part.entries {
        part.put_u8(part.entry(index, INFLIGHT), 0);
        part.put_u16(part.entry(index, NEXT), index + 1);
    }
    part.put_u16(FREE_HEAD, 0);
    part.put_u16(OLD_FREE_HEAD, 0);
    part.put_u64(USED, used_word(used, used));
    part.is_made();
}

/// The word at [`USED`].
fn used_word(used: Position, old: Position) -> u64 {
    let wrap = |at: Position| u64::from(at.wrap());
    u64::from(used.index()) | u64::from(old.index()) << 16 | wrap(used) << 32 | wrap(old) << 40
}

/// What an earlier device has left.
struct Left {
    free_head: u16,
    used: Position,
    /// Links of all entries.
    next: Vec<u16>,
    /// Entries on the free list that say they are in flight.
    to_clear: Vec<u16>,
    /// Chains in flight, the first one last.
    chains: Vec<LeftChain>,
    /// The last batch was published: the old fields follow the new ones, and not the other way.
    commit: bool,
}

struct LeftChain {
    counter: u64,
    first: u16,
    last: u16,
    descs: Vec<Copied>,
}

impl LeftChain {
    fn id(&self) -> u16 {
        self.descs.last().map_or(0, |desc| desc.word.id())
    }

    fn count(&self) -> u16 {
        // As many as `NUM`, a u16, has said.
        #[allow(clippy::cast_possible_truncation)]
        let count = self.descs.len() as u16;
        count
    }
}

impl Left {
    /// Brings the record to one state. Each store leaves it such that this would be done again.
    fn store(&self, part: &InflightRegion) {
        part.put_u16(if self.commit { OLD_FREE_HEAD } else { FREE_HEAD }, self.free_head);
        part.put_u64(USED, used_word(self.used, self.used));
        for &entry in &self.to_clear {
            part.put_u8(part.entry(entry, INFLIGHT), 0);
        }
    }
}

/// Reads and judges a record; changes nothing.
fn read(part: &InflightRegion, ring: &PackedDevice) -> Result<Left, InflightError> {
    let (size, entries) = (ring.size(), part.entries);
    let word = part.u64(USED).to_le_bytes();
    let position = |index: usize, wrap: usize| {
        let (index, wrap) = (u16::from_le_bytes([word[index], word[index + 1]]), word[wrap]);
        if index >= size || wrap > 1 {
            return damaged("a used index is not in the ring", index);
        }
        Ok(Position::new(index, wrap == 1))
    };
    let (used, old_used) = (position(0, 4)?, position(2, 5)?);
    let (free_head, old_free_head) = (part.u16(FREE_HEAD), part.u16(OLD_FREE_HEAD));
    // A batch is published by its first descriptor: until then that is available in its lap.
    let commit = used != old_used && !ring.is_available(old_used);
    let (used, free_head) = if commit { (used, free_head) } else { (old_used, old_free_head) };

    let next: Vec<u16> = (0..entries).map(|index| part.u16(part.entry(index, NEXT))).collect();
    let mut seen = vec![false; usize::from(entries)];
    let mut see = |entry: u16| {
        if entry >= entries {
            return damaged("a chain leads beyond the region", entry);
        }
        if std::mem::replace(&mut seen[usize::from(entry)], true) {
            return damaged("an entry is on two lists, or twice on one", entry);
        }
        Ok(())
    };
    let (mut to_clear, mut free, mut at) =
        (Vec::new(), vec![false; usize::from(entries)], free_head);
    while at != entries {
        see(at)?;
        free[usize::from(at)] = true;
        at = next[usize::from(at)];
    }
    let (mut chains, mut taken) = (Vec::new(), 0u32);
    let mut ids = vec![false; usize::from(size)];
    for first in 0..entries {
        if !part.is_in_flight(first)? {
            continue;
        }
        if free[usize::from(first)] {
            to_clear.push(first);
            continue;
        }
        let chain = read_chain(part, &next, first, &mut see)?;
        taken += u32::from(chain.count());
        let id = chain.id();
        match ids.get_mut(usize::from(id)) {
            None => return damaged("a buffer id is beyond the queue", first),
            Some(true) => return damaged("a buffer id is in flight twice", first),
            Some(id) => *id = true,
        }
        chains.push(chain);
    }
    if let Some(lost) = (0..entries).find(|&entry| !seen[usize::from(entry)]) {
        return damaged("an entry is neither free nor in flight", lost);
    }
    if taken > u32::from(size) {
        return damaged("more is in flight than the queue holds", 0);
    }
    chains.sort_unstable_by_key(|chain| std::cmp::Reverse((chain.counter, chain.first)));
    Ok(Left { free_head, used, next, to_clear, chains, commit })
}

fn read_chain(
    part: &InflightRegion,
    next: &[u16],
    first: u16,
    see: &mut impl FnMut(u16) -> Result<(), InflightError>,
) -> Result<LeftChain, InflightError> {
    let field = |name| part.u16(part.entry(first, name));
    let (num, last, counter) = (field(NUM), field(LAST), part.u64(part.entry(first, COUNTER)));
    if counter >= COUNTER_MAX {
        return damaged("the counter is beyond all bounds", first);
    }
    let mut descs = Vec::new();
    let mut at = first;
    for number in 1..=num {
        see(at)?;
        let of = |name| part.entry(at, name);
        let word = Word::new(part.u32(of(LEN)), part.u16(of(ID)), part.u16(of(FLAGS)));
        descs.push(Copied { addr: part.u64(of(ADDR)), word });
        if number < num {
            at = next[usize::from(at)];
        }
    }
    if num == 0 || at != last {
        return damaged("a chain does not end where it should", first);
    }
    Ok(LeftChain { counter, first, last, descs })
}
