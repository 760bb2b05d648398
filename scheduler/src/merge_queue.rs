//! Plug, sort, merge, and a window: requests meet each other before the disk sees them.
//!
//! ```text
//! queue.plug(slot, op, range, segments, now);        // for each request of a batch
//! while let Some(run) = queue.next(now) { … }        // unplug: runs, each one operation
//! …
//! queue.slots(run)                                   // whose operation it was
//! queue.done(run);                                   // its operation is over: room for the next
//! ```
//!
//! A *run* is what becomes one operation: requests of one kind, each of which begins where the one
//! before it ends. Runs that are held are kept sorted by sector, each kind by itself.
//!
//! What is sent, and when:
//! - At most [`WINDOW`] operations are in flight; beyond that requests are held, sorted, and meet.
//! - A run that continues one in flight waits for it: more of the same stream is on its way, as the
//!   answers to the one in flight will bring it. (Nagle's rule, for disks.) It does not wait if it
//!   cannot grow any more, nor longer than [`HOLD_NS`].
//! - Among those that may go, the next one at or after the place where the last one ended (C-SCAN).
//! - But first the oldest one whose deadline has passed.
//!
//! A flush, a discard or zeroing is not plugged: all that is held goes before it
//! ([`MergeQueue::next_of_all`]), so that nothing is merged across it and it overtakes nothing.

mod run;

use crate::stats::SchedulerStats;
use ringway_core::{ByteRange, DataOp, TagList};
use run::{NO_RUN, RunState};
pub use run::{READ_DEADLINE_NS, WRITE_DEADLINE_NS};

/// The most bytes that requests are merged to: some milliseconds of a slow disk. More wins nothing
/// and delays the others.
pub const MERGED_MAX: u64 = 1 << 20;

/// Operations in flight at a time: what SATA disks take (NCQ), and enough for any single disk that
/// gains by sorting.
pub const WINDOW: usize = 32;

/// The longest that a run waits for more of its stream: a turn of a slow disk. By then what it
/// waits for has been overtaken by other things.
pub const HOLD_NS: u64 = 10_000_000;

const NONE: u16 = u16::MAX;

/// Up to where requests are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one operation.
    pub max_bytes: u64,
    /// Segments of one operation.
    pub max_segments: usize,
}

/// Names a run from [`MergeQueue::next`] to [`MergeQueue::done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId(u16);

/// The kinds of operation, by their numbers: those of one kind are merged.
const KINDS: [DataOp; 3] = [DataOp::Read, DataOp::Write, DataOp::WriteDurable];

/// Requests of one queue on their way to one disk.
///
/// # Invariants
/// 1. A run is free, or held (in `held[its kind]`, sorted by `start`), or in `flying`.
/// 2. `holds` is the number of runs that are held.
/// 3. A slot is in one run at most; a run's ranges touch without overlapping, in the order of its
///    slots, and keep within `limits` unless it is a single request.
#[derive(Debug)]
pub struct MergeQueue {
    limits: Limits,
    /// The slot behind a slot in its run.
    next: Box<[u16]>,
    runs: Box<[RunState]>,
    free: TagList,
    held: [Vec<u16>; KINDS.len()],
    /// Runs in all lists of `held`.
    holds: u16,
    /// The held run that was added to last, by kind.
    recent: [u16; KINDS.len()],
    flying: Vec<u16>,
    /// Where the last run that was sent ended.
    head: u64,
    /// Nothing that is held has its deadline before this.
    expiry: u64,
    stats: SchedulerStats,
}

impl MergeQueue {
    /// A queue for requests of slots below `depth`. Allocates; call at start only.
    #[must_use]
    pub fn new(depth: u16, limits: Limits) -> Self {
        let depth_usize = usize::from(depth);
        Self {
            limits,
            next: vec![NONE; depth_usize].into_boxed_slice(),
            runs: vec![NO_RUN; depth_usize].into_boxed_slice(),
            free: TagList::new(depth),
            held: std::array::from_fn(|_| Vec::with_capacity(depth_usize)),
            holds: 0,
            recent: [NONE; KINDS.len()],
            flying: Vec::with_capacity(depth_usize),
            head: 0,
            expiry: u64::MAX,
            stats: SchedulerStats::default(),
        }
    }

    /// True if requests are held.
    #[inline]
    #[must_use]
    pub fn holds(&self) -> bool {
        self.holds > 0
    }

    /// True if no request is held or in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.holds() && self.flying.is_empty()
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        self.stats
    }

    /// Takes in the request of `slot`, which is not in any run: `range` is not empty, `op` moves
    /// data, its memory is a list of `segments` pieces. `now` in nanoseconds.
    pub fn plug(&mut self, slot: u16, op: DataOp, range: ByteRange, segments: usize, now: u64) {
        debug_assert!(!range.is_empty());
        self.stats.plugged += 1;
        self.next[usize::from(slot)] = NONE;
        let kind = op as usize;
        // A stream goes on where it was: no search.
        let recent = self.recent[kind];
        if recent != NONE
            && self.runs[usize::from(recent)].end == range.offset()
            && self.fits(recent, range.len(), segments)
        {
            self.append(recent, slot, range, segments, now);
            let at = self.place(kind, range.offset());
            // Behind the run itself, if others start at the same sector as this request.
            self.join_next(kind, recent, at);
            return;
        }
        let at = self.place(kind, range.offset());
        let before = at.checked_sub(1).map(|before| self.held[kind][before]);
        if let Some(run) = before.filter(|&run| {
            self.runs[usize::from(run)].end == range.offset()
                && self.fits(run, range.len(), segments)
        }) {
            self.append(run, slot, range, segments, now);
            self.join_next(kind, run, at);
            return;
        }
        let after = self.held[kind].get(at).copied();
        if let Some(run) = after.filter(|&run| {
            self.runs[usize::from(run)].start == range.end()
                && self.fits(run, range.len(), segments)
        }) {
            self.prepend(run, slot, range, segments);
            self.recent[kind] = run;
            return;
        }
        let run = self.free.acquire().expect("no more runs than slots");
        // `kind` is below 3.
        #[allow(clippy::cast_possible_truncation)]
        let made = RunState {
            kind: kind as u8,
            start: range.offset(),
            end: range.end(),
            segments,
            first: slot,
            last: slot,
            count: 1,
            step: range.len(),
            born: now,
        };
        self.expiry = self.expiry.min(made.deadline());
        self.runs[usize::from(run)] = made;
        self.held[kind].insert(at, run);
        self.holds += 1;
        self.recent[kind] = run;
    }

    /// Where in `held` a run that starts at `start` belongs: before those of the same start.
    fn place(&self, kind: usize, start: u64) -> usize {
        self.held[kind].partition_point(|&run| self.runs[usize::from(run)].start < start)
    }

    fn fits(&self, run: u16, bytes: u64, segments: usize) -> bool {
        let run = &self.runs[usize::from(run)];
        run.end - run.start + bytes <= self.limits.max_bytes
            && run.segments + segments <= self.limits.max_segments
    }

    fn append(&mut self, run: u16, slot: u16, range: ByteRange, segments: usize, now: u64) {
        let run = &mut self.runs[usize::from(run)];
        debug_assert!(run.born <= now, "time does not go back");
        self.next[usize::from(run.last)] = slot;
        (run.last, run.end, run.step) = (slot, range.end(), range.len());
        run.segments += segments;
        run.count += 1;
    }

    fn prepend(&mut self, run: u16, slot: u16, range: ByteRange, segments: usize) {
        let run = &mut self.runs[usize::from(run)];
        self.next[usize::from(slot)] = run.first;
        (run.first, run.start, run.step) = (slot, range.offset(), range.len());
        run.segments += segments;
        run.count += 1;
    }

    /// Joins the run at place `at` to `run` if it begins where that one ends.
    fn join_next(&mut self, kind: usize, run: u16, at: usize) {
        self.recent[kind] = run;
        let Some(&other) = self.held[kind].get(at) else { return };
        let b = self.runs[usize::from(other)];
        if other == run
            || self.runs[usize::from(run)].end != b.start
            || !self.fits(run, b.end - b.start, b.segments)
        {
            return;
        }
        let a = &mut self.runs[usize::from(run)];
        self.next[usize::from(a.last)] = b.first;
        (a.last, a.end) = (b.last, b.end);
        a.segments += b.segments;
        a.count += b.count;
        a.born = a.born.min(b.born);
        self.held[kind].remove(at);
        self.holds -= 1;
        self.free.release(other);
    }

    /// The next run to send, if one may go now. It is in flight from then on.
    #[must_use]
    pub fn next(&mut self, now: u64) -> Option<RunId> {
        if self.flying.len() >= WINDOW {
            return None;
        }
        if now >= self.expiry {
            if let Some((kind, at)) = self.expired(now) {
                let run = self.send(kind, at);
                self.stats.expired += u64::from(self.runs[usize::from(run.0)].count);
                return Some(run);
            }
        }
        let mut best: Option<(u64, usize, usize)> = None;
        for kind in 0..KINDS.len() {
            let runs = &self.held[kind];
            let from = self.place(kind, self.head);
            let around = (from..runs.len()).chain(0..from);
            let ready = around.into_iter().find(|&at| !self.waits(runs[at], now));
            if let Some(at) = ready {
                let distance = self.runs[usize::from(runs[at])].start.wrapping_sub(self.head);
                if best.is_none_or(|(least, ..)| distance < least) {
                    best = Some((distance, kind, at));
                }
            }
        }
        best.map(|(_, kind, at)| self.send(kind, at))
    }

    /// The next run of all that are held, whether it may go or not, in the order of sectors: for
    /// what must not be overtaken.
    #[must_use]
    pub fn next_of_all(&mut self) -> Option<RunId> {
        let kind = self.held.iter().position(|runs| !runs.is_empty())?;
        Some(self.send(kind, 0))
    }

    /// When to call [`MergeQueue::next`] again even if no operation has ended by then: `None` if
    /// nothing is held, or if only an operation's end makes room.
    #[must_use]
    pub fn wake_at(&self) -> Option<u64> {
        if self.flying.len() >= WINDOW {
            return None;
        }
        let held = self.held.iter().flatten().map(|&run| self.runs[usize::from(run)].born);
        held.min().map(|born| born.saturating_add(HOLD_NS))
    }

    /// True if a held run should wait for the one in flight that it continues.
    fn waits(&self, run: u16, now: u64) -> bool {
        let run = &self.runs[usize::from(run)];
        let full = run.end - run.start + run.step > self.limits.max_bytes
            || run.segments >= self.limits.max_segments;
        if full || now >= run.born.saturating_add(HOLD_NS) {
            return false;
        }
        self.flying.iter().any(|&other| {
            let other = &self.runs[usize::from(other)];
            other.kind == run.kind && (other.end == run.start || other.start == run.end)
        })
    }

    /// The run whose deadline passed first, if one has; otherwise corrects `expiry`.
    #[cold]
    fn expired(&mut self, now: u64) -> Option<(usize, usize)> {
        let (held, runs) = (&self.held, &self.runs);
        let places = held.iter().enumerate().flat_map(|(kind, list)| {
            let places = list.iter().enumerate();
            places.map(move |(at, &run)| (runs[usize::from(run)].deadline(), kind, at))
        });
        let first = places.min();
        if let Some((deadline, kind, at)) = first {
            if deadline <= now {
                return Some((kind, at));
            }
        }
        self.expiry = first.map_or(u64::MAX, |(deadline, ..)| deadline);
        None
    }

    fn send(&mut self, kind: usize, at: usize) -> RunId {
        let id = self.held[kind].remove(at);
        self.holds -= 1;
        if self.recent[kind] == id {
            self.recent[kind] = NONE;
        }
        self.flying.push(id);
        let run = &self.runs[usize::from(id)];
        self.head = run.end;
        self.stats.runs += 1;
        self.stats.merged += u64::from(run.count) - 1;
        RunId(id)
    }

    /// What a run's operation is.
    #[must_use]
    pub fn op(&self, run: RunId) -> DataOp {
        KINDS[usize::from(self.runs[usize::from(run.0)].kind)]
    }

    /// Where it is: the ranges of its requests, one behind the other.
    ///
    /// # Panics
    /// Never: ranges that touch make a range.
    #[must_use]
    pub fn range(&self, run: RunId) -> ByteRange {
        let run = &self.runs[usize::from(run.0)];
        ByteRange::new(run.start, run.end - run.start).expect("made of ranges that touch")
    }

    /// The first of its slots, in the order of sectors.
    #[must_use]
    pub fn first(&self, run: RunId) -> u16 {
        self.runs[usize::from(run.0)].first
    }

    /// The slot behind `slot` in its run.
    #[must_use]
    pub fn after(&self, slot: u16) -> Option<u16> {
        Some(self.next[usize::from(slot)]).filter(|&slot| slot != NONE)
    }

    /// A run's slots, in the order of sectors.
    pub fn slots(&self, run: RunId) -> impl Iterator<Item = u16> + '_ {
        std::iter::successors(Some(self.first(run)), |&slot| self.after(slot))
    }

    /// A run's operation is over. Its slots may be plugged again.
    pub fn done(&mut self, run: RunId) {
        let at = self.flying.iter().position(|&other| other == run.0);
        self.flying.swap_remove(at.expect("a run that is in flight"));
        self.free.release(run.0);
    }

    /// A run's operation did not do all that it should; its requests go one by one.
    pub fn was_split(&mut self) {
        self.stats.split += 1;
    }
}
