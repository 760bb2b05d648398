//! One worker's hand on a disk: slots, and the way of a request through them (hot).
//!
//! ```text
//! let tag = queue.acquire()?;                    // no slot free: leave the request in the ring
//! fill(queue.request_mut(tag));
//! queue.start(&mut engine, tag, context);        // bounds → alignment → engine
//! …
//! if let Some(done) = queue.finish(&mut engine, tag, result) { answer(done) }
//! while let Some(done) = queue.take_late() { answer(done) }
//! queue.unplug(&mut engine);                     // once a turn, after the last start
//! ```
//!
//! The straight way is here: one request, one operation of the engine (the path `bio`). Plugging and
//! merging are in `path.rs`; bounce buffers, pieces, zeroing, flushes in `bounce.rs`.

use crate::arena::Arena;
use crate::disk::{CacheMode, Disk};
use crate::incidents::Stretch;
use crate::path::Way;
use crate::slot::{Cold, Slot, Stage};
use crate::stats::DiskStats;
use crate::watcher::Watcher;
use ringway_aio::{Engine, FileId, Full, Io, IoOp, Limits};
use ringway_core::mem::{Pool, Segments};
use ringway_core::{Op, Request, Status, TagList, injected};
use ringway_scheduler::SchedulerMode;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// The most segments of a request: what `preadv2` takes (IOV_MAX).
pub const SEGMENTS_MAX: usize = 1024;

/// Memory for bounce buffers, in bytes. It only costs pages once a guest needs it. Large enough for
/// the largest piece on each of a few requests; more requests wait their turn.
const POOL_BYTES: usize = 4 << 20;

/// The longest operation, in bytes; longer requests go in parts. From the page cache the bytes are
/// copied within the submission, which must not keep other queues waiting for long.
const fn part_max(cache: CacheMode) -> u32 {
    if matches!(cache, CacheMode::None) { 4 << 20 } else { 1 << 20 }
}

/// A request that is done.
#[derive(Debug)]
pub struct Finished<C> {
    /// What the caller gave to [`DiskQueue::start`].
    pub context: C,
    /// The slot it was in, which is free again.
    pub tag: u16,
    /// The answer.
    pub status: Status,
    /// Bytes written to guest memory.
    pub written: u32,
}

/// Slots for the requests of one ring on one worker.
///
/// # Invariants
/// 1. A tag is either free, or being filled, or in exactly one of: the engine, `backlog`, `waiting`,
///    a run of `way`. The first tag of a run in flight stands for the run in engine or `backlog`.
#[derive(Debug)]
pub struct DiskQueue<C> {
    pub(crate) disk: Arc<Disk>,
    pub(crate) limits: Limits,
    file: FileId,
    tag_base: u64,
    pub(crate) slots: Box<[Slot<C>]>,
    pub(crate) cold: Box<[Cold]>,
    tags: TagList,
    /// Operations the engine had no room for.
    backlog: VecDeque<u16>,
    /// Requests that wait for bounce memory or for a range being written.
    pub(crate) waiting: VecDeque<u16>,
    /// Answers that no operation of the engine will bring.
    pub(crate) late: VecDeque<Finished<C>>,
    pub(crate) pool: Pool,
    pub(crate) durable_writes: bool,
    pub(crate) needs_locks: bool,
    /// The operations that go straight if the file takes them as they are: a bit for each [`Op`].
    pub(crate) straight: u8,
    /// `way` holds requests.
    pub(crate) held: bool,
    /// The path may change.
    pub(crate) adapts: bool,
    pub(crate) turns: u8,
    /// None if the path is bio by order.
    pub(crate) way: Option<Box<Way>>,
    pub(crate) stats: DiskStats,
    pub(crate) detours: Stretch,
    watcher: Option<Watcher>,
    /// The memory of the slots' segment lists; the last to go.
    _arena: Arena,
}

impl<C> DiskQueue<C> {
    /// `depth` slots on `disk`, whose file the engine knows as `file`. Operations carry the tag
    /// `tag_base | slot`; the low 16 bits of `tag_base` are 0. Allocates; call at start only.
    ///
    /// # Errors
    /// What the host says to mapping the bounce pool.
    pub fn new(
        disk: Arc<Disk>,
        limits: &Limits,
        file: FileId,
        tag_base: u64,
        depth: u16,
    ) -> io::Result<Self> {
        debug_assert_eq!(tag_base & 0xffff, 0);
        let disk_cache = disk.cache;
        let depth_usize = usize::from(depth);
        let mut arena = Arena::new(2 * depth_usize, SEGMENTS_MAX)?;
        // SAFETY: the queue drops its arena after all that holds a list.
        let mut list = || unsafe { arena.list() };
        let slots = (0..depth).map(|_| Slot::new(Request::with_segments(list()))).collect();
        let cold = (0..depth).map(|_| Cold::new(list())).collect();
        let max_bytes = limits.max_bytes.min(part_max(disk_cache));
        let kind = disk.policy.mode();
        let way = (kind != SchedulerMode::Bio).then(|| {
            Way::new(&disk.policy, depth, max_bytes, limits.max_segments.min(SEGMENTS_MAX))
        });
        let mut queue = Self {
            needs_locks: disk.needs_locks(),
            straight: 0,
            held: false,
            adapts: kind == SchedulerMode::Auto,
            turns: 0,
            way,
            disk,
            limits: Limits { max_bytes, ..limits.clone() },
            file,
            tag_base,
            slots,
            cold,
            tags: TagList::new(depth),
            backlog: VecDeque::with_capacity(depth_usize),
            waiting: VecDeque::with_capacity(depth_usize),
            late: VecDeque::with_capacity(depth_usize),
            pool: Pool::new(POOL_BYTES)?,
            durable_writes: false,
            stats: DiskStats::default(),
            detours: Stretch::default(),
            watcher: None,
            _arena: arena,
        };
        queue.choose_straight();
        Ok(queue)
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The file, as the engine knows it.
    #[must_use]
    pub fn file(&self) -> FileId {
        self.file
    }

    /// From now on every write is durable before it completes (no write cache, or no FLUSH
    /// negotiated; VIRTIO 1.2 §5.2.6.2). `unsafe` disks ignore it.
    pub fn set_durable_writes(&mut self, durable: bool) {
        self.durable_writes = durable && self.disk.cache != CacheMode::Unsafe;
    }

    /// From now on `watcher` is told of the memory that is written, also for requests in flight.
    pub fn watch_memory(&mut self, watcher: Option<Watcher>) {
        self.watcher = watcher;
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        let path = self.way.as_ref().map(|way| way.stats()).unwrap_or_default();
        DiskStats { path, ..self.stats }
    }

    /// Requests begun and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tags.in_use()
    }

    /// Counts a request that was answered with an error before it could be started.
    #[cold]
    pub fn count_refused(&mut self) {
        self.stats.errors += 1;
        self.stats.refused += 1;
    }

    /// Bytes of bounce memory in use; 0 when nothing is in flight.
    #[must_use]
    pub fn bounce_bytes(&self) -> usize {
        self.pool.in_use()
    }

    /// True if there are requests that only [`DiskQueue::retry`] will move.
    #[inline]
    #[must_use]
    pub fn has_deferred(&self) -> bool {
        !self.backlog.is_empty() || !self.waiting.is_empty()
    }

    /// Takes a slot; `None` means leave the request in the ring.
    #[inline]
    pub fn acquire(&mut self) -> Option<u16> {
        self.tags.acquire()
    }

    /// Gives back a slot that was not started.
    #[inline]
    pub fn abandon(&mut self, tag: u16) {
        debug_assert!(self.slots[usize::from(tag)].context.is_none());
        self.tags.release(tag);
    }

    /// The request of a slot, to be filled before [`DiskQueue::start`].
    #[inline]
    pub fn request_mut(&mut self, tag: u16) -> &mut Request {
        &mut self.slots[usize::from(tag)].request
    }

    /// Begins the request in slot `tag`; `context` comes back with the answer.
    ///
    /// # Safety
    /// The request's segments must stay valid memory until the answer was taken, and for a read
    /// nobody relies on their content until then.
    #[inline]
    pub unsafe fn start<E: Engine>(&mut self, engine: &mut E, tag: u16, context: C) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.context = Some(context);
        slot.done = 0;
        let request = &self.slots[usize::from(tag)].request;
        if let Err(status) = self.disk.authorise(request) {
            return self.refuse_guest(tag, status);
        }
        if self.straight & 1 << request.op as u8 != 0 && self.takes_directly(request) {
            self.slots[usize::from(tag)].stage = Stage::Whole;
            if self.try_issue(engine, tag).is_err() {
                self.backlog.push_back(tag);
            }
        } else {
            self.start_other(engine, tag);
        }
    }

    /// True if the file takes this request as it is, in one operation.
    #[inline]
    pub(crate) fn takes_directly(&self, request: &Request) -> bool {
        let segments = &request.segments;
        segments.len() <= self.limits.max_segments
            && segments.bytes() <= u64::from(self.limits.max_bytes)
            && request.range.is_aligned(u64::from(self.disk.alignment.offset))
            && self.memory_aligned(segments)
    }

    /// True if the file takes this memory without a bounce buffer.
    #[inline]
    pub(crate) fn memory_aligned(&self, segments: &Segments) -> bool {
        let (memory, offset) = (self.disk.alignment.memory, self.disk.alignment.offset);
        let (memory, offset) = (memory as usize - 1, offset as usize - 1);
        segments.as_slice().iter().all(|s| s.base as usize & memory == 0 && s.len & offset == 0)
    }

    /// Hands the present operation of a slot to the engine, or to the backlog if it is full. Apart
    /// from the straight way, which has it in line.
    #[inline(never)]
    pub(crate) fn issue<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        if self.try_issue(engine, tag).is_err() {
            self.backlog.push_back(tag);
        }
    }

    #[inline(always)]
    fn try_issue<E: Engine>(&mut self, engine: &mut E, tag: u16) -> Result<(), Full> {
        let slot = &self.slots[usize::from(tag)];
        let request = &slot.request;
        let io = if slot.stage.is_request() {
            Io {
                tag: self.tag_base | u64::from(tag),
                op: self.data_op(request.op),
                file: self.file,
                offset: request.range.offset(),
                len: request.range.len(),
                memory: request.segments.as_slice().into(),
            }
        } else {
            let cold = &self.cold[usize::from(tag)];
            Io {
                tag: self.tag_base | u64::from(tag),
                op: cold.op,
                file: self.file,
                offset: cold.offset,
                len: cold.len,
                memory: cold.part.as_slice().into(),
            }
        };
        // SAFETY: the slot owns the list of segments, and by the contract of `start` their memory,
        // until the operation's result came back (Slot invariant 1); bounce pages are kept in the
        // slot likewise. The file is attached as long as this queue exists.
        let queued = unsafe { engine.queue(&io) };
        if self.durable_writes && queued.is_ok() {
            self.count_durable(tag);
        }
        queued
    }

    /// Read or write, the latter durable if it has to be.
    #[inline]
    pub(crate) fn data_op(&self, op: Op) -> IoOp {
        match op {
            Op::Read => IoOp::Read,
            _ if self.durable_writes => IoOp::WriteDurable,
            _ => IoOp::Write,
        }
    }

    /// Takes the result of a slot's operation; returns the answer if the request is done.
    #[inline]
    pub fn finish<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let result = injected!(result, self.present(tag));
        let slot = &self.slots[usize::from(tag)];
        if slot.stage == Stage::Whole && i64::from(result) == slot.request.range.len().cast_signed()
        {
            return Some(self.retire(tag, Status::Ok));
        }
        self.finish_rare(engine, tag, result)
    }

    /// Frees the slot and makes the answer. The slot holds neither pages nor a lock any more.
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

    /// Answers a request that must not be carried out.
    #[cold]
    fn refuse_guest(&mut self, tag: u16, status: Status) {
        self.stats.refused += 1;
        self.refuse(tag, status);
    }

    /// Answers a request without an operation of the engine.
    #[cold]
    pub(crate) fn refuse(&mut self, tag: u16, status: Status) {
        let finished = self.retire(tag, status);
        self.late.push_back(finished);
    }

    /// The next answer that no operation brought.
    #[inline]
    pub fn take_late(&mut self) -> Option<Finished<C>> {
        self.late.pop_front()
    }

    /// True if [`DiskQueue::take_late`] would give one.
    #[inline]
    #[must_use]
    pub fn has_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Tries again what the engine or the bounce pool had no room for, `budget` requests at most,
    /// so that other queues have their turn. Call once a turn while
    /// [`DiskQueue::has_deferred`].
    #[cold]
    pub fn retry<E: Engine>(&mut self, engine: &mut E, budget: usize) {
        for _ in 0..budget {
            let Some(&tag) = self.backlog.front() else { break };
            if self.try_issue(engine, tag).is_err() {
                return;
            }
            self.backlog.pop_front();
        }
        for _ in 0..self.waiting.len().min(budget) {
            let Some(tag) = self.waiting.pop_front() else { break };
            self.advance(engine, tag);
        }
    }
}
