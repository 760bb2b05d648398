//! The flow: a bounded number of slots, each with a piece of the source on its way.
//!
//! ```text
//! copy:     extents → read → find zeroes → write or zero     compare: extents → read both → compare
//! ```
//!
//! One thread, many requests in flight at both ends, no byte copied but between two sockets.

mod answers;
mod mode;
mod slots;
mod steps;

use super::end::{End, Given, Method, Operation, POLL_EVERY, Patience, Ticket, Verb};
use super::extents::{Extents, Holes, Item};
use super::zero::Run;
use anyhow::{Context, bail};
pub(super) use mode::{DST, Mode, SRC};
use ringway_aio::{Engine, Reaped};
use ringway_bench::elsewhere::{Allocated, Allocation};
use ringway_core::Segment;
use ringway_core::mem::Mapping;
use slots::{CopySlot, Transfer, slots_of};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

/// How often what is done so far is made durable and noted.
const CHECKPOINT: Duration = Duration::from_secs(5);

/// How much there was of what, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// Read from the source.
    pub(super) read: u64,
    /// Written to the destination as data.
    pub(super) written: u64,
    /// Zeroes: of holes, or found.
    pub(super) zeroes: u64,
}

/// Why a flow ended early.
#[derive(Debug)]
pub(super) enum Halt {
    /// The caller said so.
    Stopped,
    /// The first byte that differs.
    Differs(u64),
    Failed(anyhow::Error),
}

/// How a flow ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Everything before this byte is done, though not yet durable.
    pub(super) done: u64,
    pub(super) counters: Counters,
    /// Why, if early.
    pub(super) halt: Option<Halt>,
    /// False if a sync of the destination has failed or was not answered: what was lost is reported
    /// once, so that a later one that succeeds says nothing of it.
    pub(super) may_sync: bool,
}

/// A request has failed, and nobody has said yet why: a reason takes its place.
#[derive(Debug, thiserror::Error)]
#[error("a request failed")]
struct RequestFailed;

/// Where the caller hears of progress and decides.
pub(super) trait Watcher {
    /// Everything before `done` is finished.
    fn progress(&mut self, done: u64);
    /// Everything before `done` is durable.
    fn durable(&mut self, done: u64) -> anyhow::Result<()>;
}

/// A copy or comparison under way.
///
/// # Invariants
/// 1. The memory of a slot's parts that are under way is not touched here.
/// 2. Everything before the offset of the first busy slot, or of the next item, is done.
pub(super) struct Flow<'a> {
    // First: dropping it waits until the kernel has let go of all memory.
    engine: Box<dyn Engine>,
    slots: Vec<CopySlot>,
    ends: &'a mut [End; 2],
    mode: Mode,
    chunk: usize,
    unit: usize,
    extents: Extents,
    free: Vec<usize>,
    /// Orders that found no room.
    later: Vec<Ticket>,
    runs: Vec<Run>,
    reaped: Reaped,
    counters: Counters,
    halt: Option<Halt>,
    syncing: Option<u64>,
    synced_at: Instant,
    /// A sync of the destination has failed.
    sync_failed: bool,
    /// An engine or a queue is beyond use.
    dead: bool,
    _own: Vec<Mapping>,
}

/// What a flow goes through, and how.
#[derive(Debug)]
pub(super) struct Course {
    pub(super) mode: Mode,
    /// First byte.
    pub(super) start: u64,
    /// One past the last byte.
    pub(super) end: u64,
    /// Pieces in flight.
    pub(super) slots: usize,
    /// Bytes of a piece.
    pub(super) chunk: usize,
    /// Zeroes are looked for in multiples of this many bytes.
    pub(super) unit: usize,
    /// Data are widened to multiples of this many bytes.
    pub(super) edge: u64,
}

impl<'a> Flow<'a> {
    pub(super) fn new(
        mut engine: Box<dyn Engine>,
        ends: &'a mut [End; 2],
        course: &Course,
    ) -> anyhow::Result<Self> {
        let Course { mode, start, end, slots, chunk, unit, edge } = *course;
        for (bell, end) in (0..).zip(ends.iter_mut()) {
            end.attach(&mut *engine, bell).context("cannot prepare for I/O")?;
        }
        let mut own = Vec::new();
        let slots = slots_of(ends, mode, slots, chunk, &mut own)?;
        let mut regions: Vec<_> =
            own.iter().map(|memory| Segment { base: memory.at(0), len: memory.len() }).collect();
        let disks = slots.iter().flat_map(|slot| &slot.memory).filter(|m| !m.pieces.is_empty());
        regions.extend(disks.map(|memory| Segment { base: memory.base, len: chunk }));
        // SAFETY: nothing is in flight; all memory outlives the engine, which is dropped first.
        // A kernel that will not pin it does without.
        let _ = unsafe { engine.map_memory(&regions) };
        let holes = match &ends[SRC] {
            End::File(file) if file.regular => Holes::File(Arc::clone(&file.file)),
            End::Image(image) => match image.reader()? {
                Some(reader) => Holes::Image(Box::new(reader)),
                None => Holes::Unknown,
            },
            End::Disk(disk) => match &disk.allocation {
                Some(Allocation::Export(export)) => Holes::Export(Arc::clone(export)),
                Some(Allocation::Cluster(image)) => {
                    Holes::Cluster(Box::new(Allocated::new(image)?))
                }
                None => Holes::Unknown,
            },
            End::File(_) => Holes::Unknown,
        };
        let depth = engine.limits().depth as usize;
        Ok(Self {
            engine,
            free: (0..slots.len()).rev().collect(),
            slots,
            ends,
            mode,
            chunk,
            extents: Extents::new(holes, start..end, chunk as u64, edge),
            unit,
            later: Vec::new(),
            runs: Vec::new(),
            reaped: Reaped::with_capacity(depth, 2),
            counters: Counters::default(),
            halt: None,
            syncing: None,
            synced_at: Instant::now(),
            sync_failed: false,
            dead: false,
            _own: own,
        })
    }

    /// Carries it out, to its end or until it has to end early: not before all that is in flight has come
    /// back, unless a server is silent and the program is to end.
    pub(super) fn run(mut self, watcher: &mut dyn Watcher, signal: &AtomicUsize) -> Ended {
        let mut patience = Patience::new(signal);
        loop {
            if let Err(error) = self.turn(watcher) {
                self.fail(error);
                // What a server or an engine had that is gone will not come back.
                if self.dead || self.is_lost() {
                    break;
                }
            }
            let busy = self.free.len() < self.slots.len() || self.syncing.is_some();
            if !busy && (self.halt.is_some() || self.extents.is_done()) {
                break;
            }
            if patience.is_asked() && self.halt.is_none() {
                self.halt = Some(Halt::Stopped);
            }
            if patience.is_over() && self.ends.iter().any(End::awaits_server) {
                break;
            }
        }
        Ended {
            done: self.mark(),
            counters: self.counters,
            halt: self.halt.take(),
            may_sync: !self.sync_failed && self.syncing.is_none(),
        }
    }

    /// Everything before this is done.
    fn mark(&self) -> u64 {
        let busy = self.slots.iter().filter_map(|slot| slot.busy.map(|item| item.offset));
        busy.fold(self.extents.at(), u64::min)
    }

    fn turn(&mut self, watcher: &mut dyn Watcher) -> anyhow::Result<()> {
        self.again()?;
        self.start()?;
        self.checkpoint(watcher)?;
        self.submit().inspect_err(|_| self.dead = true)?;
        if self.harvest(watcher)? == 0 {
            self.sleep().inspect_err(|_| self.dead = true)?;
        }
        watcher.progress(self.mark());
        Ok(())
    }

    fn submit(&mut self) -> anyhow::Result<()> {
        self.engine.submit()?;
        for end in self.ends.iter_mut() {
            if let End::Disk(disk) = end {
                disk.queue.submit()?;
            }
        }
        Ok(())
    }

    /// Fills free slots.
    fn start(&mut self) -> anyhow::Result<()> {
        while self.halt.is_none() {
            let Some(&slot) = self.free.last() else { break };
            let Some(item) = self.extents.next().context("cannot find the holes of the source")?
            else {
                break;
            };
            if item.hole {
                self.counters.zeroes += item.len;
                if matches!(self.mode, Mode::Copy { fresh: true, .. }) {
                    continue;
                }
            }
            self.free.pop();
            self.slots[slot].busy = Some(item);
            self.slots[slot].writing = item.hole;
            match self.mode {
                Mode::Copy { .. } if item.hole => {
                    self.push(slot, DST, Verb::Zero, item.offset, item.len, 0);
                }
                Mode::Copy { .. } => self.push(slot, SRC, Verb::Read, item.offset, item.len, 0),
                Mode::Compare => self.compare_next(slot, item),
            }
            self.send_all(slot)?;
        }
        Ok(())
    }

    /// Reads what is to be compared. Holes of the source come in pieces: the item shrinks from its
    /// beginning.
    fn compare_next(&mut self, slot: usize, item: Item) {
        let len = item.len.min(self.chunk as u64);
        if !item.hole {
            self.push(slot, SRC, Verb::Read, item.offset, len, 0);
        }
        self.push(slot, DST, Verb::Read, item.offset, len, 0);
    }

    fn push(&mut self, slot: usize, end: usize, verb: Verb, offset: u64, len: u64, at: usize) {
        if verb == Verb::Read && end == SRC {
            self.counters.read += len;
        }
        let segment = Box::new(Segment::EMPTY);
        let (done, method, repeat) = (0, Method::Only, false);
        let part = Transfer { end, verb, offset, len, done, method, at, repeat, segment };
        self.slots[slot].parts.push(part);
    }

    fn send_all(&mut self, slot: usize) -> anyhow::Result<()> {
        self.slots[slot].pending = self.slots[slot].parts.len();
        let parts = self.slots[slot].parts.len();
        for part in 0..parts {
            if let Err(error) = self.send(slot, part) {
                // Neither it nor those behind it will ever be under way.
                (part..parts).for_each(|_| self.failed(slot));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives the operation for what is left of a part.
    fn send(&mut self, slot: usize, part: usize) -> anyhow::Result<()> {
        let ticket = Ticket { slot: u32::try_from(slot)?, part: u32::try_from(part)? };
        loop {
            let CopySlot { memory, parts, busy, .. } = &mut self.slots[slot];
            let Transfer { end, verb, offset, len, done, method, at, repeat, segment } =
                &mut parts[part];
            let (mut left, mut at) = (*len - *done, *at);
            if *repeat {
                left = left.min(self.chunk as u64);
            } else if *verb != Verb::Zero {
                at += usize::try_from(*done)?;
            }
            let operation =
                Operation { ticket, verb: *verb, offset: *offset + *done, len: left, at };
            // SAFETY: invariant 1: until the ticket comes back the slot stays as it is, and the
            // engine is dropped before the slots.
            let given = unsafe {
                self.ends[*end].give(&mut *self.engine, &operation, &mut memory[*end], segment)?
            };
            match given {
                Given::Sent(by) => {
                    *method = by;
                    return Ok(());
                }
                Given::Full => {
                    self.later.push(ticket);
                    return Ok(());
                }
                Given::CannotZero => {
                    // The memory of zeroes among data holds zeroes; a hole has none yet.
                    *verb = Verb::Write;
                    if busy.is_some_and(|item| item.hole) {
                        let base = memory[DST].base;
                        // SAFETY: the slot's memory, of which nothing is under way.
                        unsafe { base.write_bytes(0, self.chunk) };
                        *repeat = true;
                    }
                }
            }
        }
    }

    /// Tries again what found no room.
    fn again(&mut self) -> anyhow::Result<()> {
        for ticket in std::mem::take(&mut self.later) {
            if self.halt.is_some() {
                self.slots[ticket.slot as usize].pending -= 1;
                self.release_failed(ticket.slot as usize);
            } else {
                self.send_again(ticket.slot as usize, ticket.part as usize)?;
            }
        }
        Ok(())
    }

    /// As [`Flow::send`], for a part that was under way.
    fn send_again(&mut self, slot: usize, part: usize) -> anyhow::Result<()> {
        let sent = self.send(slot, part);
        if sent.is_err() {
            self.failed(slot);
        }
        sent
    }

    fn fail(&mut self, error: anyhow::Error) {
        let first = match &self.halt {
            Some(Halt::Failed(before)) => before.is::<RequestFailed>(),
            _ => true,
        };
        if first {
            self.halt = Some(Halt::Failed(error));
        }
    }

    /// Makes what is done durable, now and then.
    fn checkpoint(&mut self, watcher: &mut dyn Watcher) -> anyhow::Result<()> {
        let due = self.synced_at.elapsed() >= CHECKPOINT;
        let copying = matches!(self.mode, Mode::Copy { .. });
        if !due || !copying || self.syncing.is_some() || self.halt.is_some() {
            return Ok(());
        }
        self.synced_at = Instant::now();
        let mark = self.mark();
        if self.ends[DST].sync(&mut *self.engine)? {
            self.syncing = Some(mark);
            Ok(())
        } else {
            watcher.durable(mark)
        }
    }

    /// True if a server has gone: what it has will not come back.
    fn is_lost(&self) -> bool {
        self.ends.iter().any(|end| matches!(end, End::Disk(disk) if !disk.queue.is_connected()))
    }

    fn sleep(&mut self) -> anyhow::Result<()> {
        for end in self.ends.iter_mut() {
            if let End::Disk(disk) = end {
                if disk.queue.in_flight() > 0 && disk.queue.arm()? {
                    return Ok(());
                }
            }
        }
        let begin = Instant::now();
        self.engine.wait(Some(POLL_EVERY))?;
        if begin.elapsed() >= POLL_EVERY && self.is_lost() {
            bail!("the server has gone, with requests of ours in flight");
        }
        Ok(())
    }
}

impl Drop for Flow<'_> {
    /// The memory of slots goes: nobody may touch it any more.
    fn drop(&mut self) {
        self.ends.iter_mut().for_each(End::quiesce);
    }
}
