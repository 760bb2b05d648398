//! A simulation: an engine that takes the time a disk would take.
//!
//! It wraps another engine, which moves the data (a file, a memfd, or [`crate::Null`]'s nothing),
//! and holds each result back until a model of a disk says that it is due. The figures are those of
//! the model and of no disk you can touch: say "sim" wherever you show them.

mod model;

use ringway_core::Segment;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::{
    BellId, Command, CommandRefused, Counters, Done, Engine, FileId, Full, Handle, Io, IoOp,
    Limits, Reaped,
};
use fastrand::Rng;
use model::{Access, Disk};

pub use model::Model;

/// Shorter sleeps end late, by the slack of the kernel's timers; whoever waits spins instead.
const SHORTEST_SLEEP: Duration = Duration::from_micros(60);

/// How [`Sim`] is set up.
#[derive(Clone, Copy, Debug)]
pub struct SimSetup {
    /// The disk.
    pub model: Model,
    /// Of the chances below: the same seed, the same choices.
    pub seed: u64,
    /// How many in a thousand operations are late, and by how much at most.
    pub late: (u16, Duration),
    /// How many in a thousand operations stall the whole disk, and for how long.
    pub stall: (u16, Duration),
    /// Whether results that are due together come in random order.
    pub reorder: bool,
}

impl SimSetup {
    /// The disk as the model has it, without mishaps.
    #[must_use]
    pub const fn new(model: Model) -> Self {
        let never = (0, Duration::ZERO);
        Self { model, seed: 0, late: never, stall: never, reorder: false }
    }
}

/// The simulation, over an engine that moves the data.
///
/// # Invariants
/// 1. A slot is free, or has one operation from `queue` to `reap`; the inner engine knows it by
///    the slot's number. It is in exactly one of `queued`, `waiting`, `due` and `ripe`.
#[derive(Debug)]
pub struct Sim<E> {
    inner: E,
    setup: SimSetup,
    limits: Limits,
    slots: Box<[SimSlot]>,
    free: Vec<u32>,
    /// Not submitted yet.
    queued: Vec<u32>,
    /// Submitted; the head has not begun with them.
    waiting: Vec<u32>,
    /// Begun, with the time at which they end.
    due: BinaryHeap<Reverse<(Instant, u32)>>,
    /// At their end, but perhaps not the inner engine's.
    ripe: Vec<u32>,
    disk: Disk,
    random: Rng,
    from_inner: Reaped,
}

#[derive(Clone, Copy, Debug)]
struct SimSlot {
    tag: u64,
    access: Access,
    arrived: Instant,
    result: Option<i32>,
}

impl<E: Engine> Sim<E> {
    /// Wraps `inner`.
    pub fn new(inner: E, setup: SimSetup) -> Self {
        let limits = Limits { name: "sim", ..inner.limits().clone() };
        let depth = limits.depth as usize;
        let epoch = Instant::now();
        let slot = SimSlot {
            tag: 0,
            access: Access { op: IoOp::Sync, offset: 0, len: 0 },
            arrived: epoch,
            result: None,
        };
        Self {
            inner,
            setup,
            slots: vec![slot; depth].into_boxed_slice(),
            free: (0..limits.depth).rev().collect(),
            limits,
            queued: Vec::with_capacity(depth),
            waiting: Vec::with_capacity(depth),
            due: BinaryHeap::with_capacity(depth),
            ripe: Vec::with_capacity(depth),
            disk: Disk::new(&setup.model, epoch),
            random: Rng::with_seed(setup.seed),
            from_inner: Reaped::with_capacity(depth, 8),
        }
    }

    /// Lets the disk begin with what it can begin with until `now`.
    fn advance(&mut self, now: Instant) {
        while let Some((place, begin)) = self.next_to_begin(now) {
            let number = self.waiting.swap_remove(place);
            let slot = self.slots[number as usize];
            let mut end = self.disk.serve(&self.setup.model, slot.access, begin);
            let (rate, stall) = self.setup.stall;
            if self.random.u16(..1000) < rate {
                self.disk.stall(end + stall);
                end += stall;
            }
            let (rate, late) = self.setup.late;
            if self.random.u16(..1000) < rate {
                let nanos = u64::try_from(late.as_nanos()).unwrap_or(u64::MAX).max(1);
                end += Duration::from_nanos(self.random.u64(..nanos));
            }
            self.due.push(Reverse((end, number)));
        }
    }

    /// Which of `waiting` the disk takes next, and when, if that is not after `now`.
    fn next_to_begin(&self, now: Instant) -> Option<(usize, Instant)> {
        let arrived = |number: &u32| self.slots[*number as usize].arrived;
        let first = self.waiting.iter().map(arrived).min()?;
        let begin = first.max(self.disk.idle_at());
        let Model::Head { .. } = self.setup.model else {
            // A channel can be promised in advance: nothing that comes later is preferred.
            let place = self.waiting.iter().position(|number| arrived(number) == first)?;
            return Some((place, begin));
        };
        if begin > now {
            return None;
        }
        let here = self.waiting.iter().enumerate().filter(|(_, number)| arrived(number) <= begin);
        let time = |(_, number): &(usize, &u32)| {
            self.disk.reach(&self.setup.model, self.slots[**number as usize].access, begin)
        };
        here.min_by_key(time).map(|(place, _)| (place, begin))
    }

    /// Takes over what the inner engine has done, and what is due by now.
    fn collect(&mut self, out: &mut Reaped) {
        self.from_inner.clear();
        self.inner.reap(&mut self.from_inner);
        out.rung.append(&mut self.from_inner.rung);
        out.commands.append(&mut self.from_inner.commands);
        for done in self.from_inner.done.drain(..) {
            let slot = usize::try_from(done.tag).expect("tags of the inner engine are slots");
            self.slots[slot].result = Some(done.result);
        }
        let now = Instant::now();
        self.advance(now);
        while let Some(&Reverse((end, number))) = self.due.peek() {
            if end > now {
                break;
            }
            self.due.pop();
            self.ripe.push(number);
        }
    }
}

impl<E: Engine> Engine for Sim<E> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.inner.attach(file)
    }

    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        self.inner.attach_handle(file, handle)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.map_memory(regions) }
    }

    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.set_buffer(number, buffer) }
    }

    fn detach(&mut self, file: FileId) {
        self.inner.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.inner.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.inner.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let Some(&number) = self.free.last() else { return Err(Full) };
        // SAFETY: passed on to the caller.
        unsafe { self.inner.queue(&Io { tag: number.into(), ..*io }) }?;
        let slot = &mut self.slots[number as usize];
        let &Io { tag, op, offset, len, .. } = io;
        (slot.tag, slot.access) = (tag, Access { op, offset, len });
        slot.result = None;
        self.free.pop();
        self.queued.push(number);
        Ok(())
    }

    unsafe fn queue_command(&mut self, command: &Command<'_>) -> Result<(), CommandRefused> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.queue_command(command) }
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.queued.is_empty() {
            let now = Instant::now();
            for &number in &self.queued {
                self.slots[number as usize].arrived = now;
            }
            self.waiting.append(&mut self.queued);
        }
        self.inner.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.collect(out);
        if self.setup.reorder {
            for i in (1..self.ripe.len()).rev() {
                self.ripe.swap(i, self.random.usize(..=i));
            }
        }
        let before = out.done.len();
        let (slots, free) = (&self.slots, &mut self.free);
        self.ripe.retain(|&number| {
            let SimSlot { tag, result: Some(result), .. } = slots[number as usize] else {
                return true;
            };
            out.done.push(Done { tag, result });
            free.push(number);
            false
        });
        out.done.len() - before
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.inner.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let now = Instant::now();
        self.advance(now);
        let next = self.due.peek().map(|Reverse((end, _))| end.saturating_duration_since(now));
        if next.is_some_and(|left| left < SHORTEST_SLEEP) {
            return self.inner.poll_doorbells();
        }
        // The earlier of the two, where nothing is later than anything.
        self.inner.wait(next.into_iter().chain(timeout).min())
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Null;
    use crate::engine::IoMemory;

    /// Reads at `offsets`, `depth` at a time; the time it took, and the order of completion.
    fn run(setup: SimSetup, depth: u32, offsets: &[u64]) -> (Duration, Vec<u64>) {
        let mut engine = Sim::new(Null::new(depth).unwrap(), setup);
        let file = engine.attach(&Arc::new(tempfile::tempfile().unwrap())).unwrap();
        let mut out = Reaped::default();
        let mut left = offsets.iter().enumerate();
        let mut memory = [0u8; 4096];
        let memory = &[Segment { base: memory.as_mut_ptr(), len: 4096 }];
        let start = Instant::now();
        let mut next = left.next();
        while out.done.len() < offsets.len() {
            while let Some((i, &offset)) = next {
                let memory = IoMemory::Segments(memory);
                let io = Io { tag: i as u64, op: IoOp::Read, file, offset, len: 4096, memory };
                // SAFETY: null moves no data.
                if unsafe { engine.queue(&io) }.is_err() {
                    break;
                }
                next = left.next();
            }
            engine.submit().unwrap();
            if engine.reap(&mut out) == 0 {
                engine.wait(None).unwrap();
            }
        }
        (start.elapsed(), out.done.iter().map(|d| d.tag).collect())
    }

    /// The shortest of a few runs: whoever else wants the processor makes them longer.
    fn shortest(setup: SimSetup, depth: u32, offsets: &[u64]) -> Duration {
        (0..8).map(|_| run(setup, depth, offsets).0).min().unwrap_or_default()
    }

    fn scattered(count: u64) -> Vec<u64> {
        let mut random = Rng::with_seed(5);
        (0..count).map(|_| random.u64(..1 << 28) * 4096).collect()
    }

    #[test]
    fn an_ssd_does_many_at_a_time() {
        let offsets = scattered(64);
        let (alone, _) = run(SimSetup::new(Model::SSD), 1, &offsets);
        let together = shortest(SimSetup::new(Model::SSD), 64, &offsets);
        assert!(alone >= Duration::from_micros(80) * 64, "{alone:?}");
        assert!(together * 4 < alone, "{together:?} and {alone:?}");
    }

    #[test]
    fn a_hard_disk_seeks_and_prefers_what_is_near() {
        let sequential: Vec<_> = (0..32).map(|i| i * 4096).collect();
        let stream = shortest(SimSetup::new(Model::HDD), 1, &sequential);
        let offsets = scattered(32);
        let (one_by_one, order) = run(SimSetup::new(Model::HDD), 1, &offsets);
        assert!(order.is_sorted());
        let (_, order) = run(SimSetup::new(Model::HDD), 32, &offsets);
        assert!(!order.is_sorted(), "the head takes them as they lie");
        assert!(stream >= Duration::from_micros(50) * 32, "{stream:?}: commands cost time");
        assert!(stream * 10 < one_by_one, "{stream:?} and {one_by_one:?}");
        let chosen = shortest(SimSetup::new(Model::HDD), 32, &offsets);
        assert!(chosen * 3 < one_by_one * 2, "{chosen:?} and {one_by_one:?}");
    }

    #[test]
    fn mishaps_cost_time_and_order() {
        let calm = SimSetup::new(Model::RAM);
        let stall = (100, Duration::from_millis(5));
        let late = (500, Duration::from_millis(3));
        let offsets = scattered(64);
        let smooth = shortest(calm, 8, &offsets);
        let (stalled, _) = run(SimSetup { stall, seed: 7, ..calm }, 8, &offsets);
        assert!(stalled > smooth + Duration::from_millis(4), "{stalled:?} and {smooth:?}");
        let (_, order) = run(SimSetup { late, reorder: true, seed: 7, ..calm }, 64, &offsets);
        assert!(!order.is_sorted());
    }
}
