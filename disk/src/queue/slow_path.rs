//! The slow path: requests that are not one plain operation. Pieces, locks, zeroing; flushes in `slow_path/sync.rs`.
//!
//! A request that the file does not take as it is is carried out piece by piece. Each piece is one
//! operation (two for a read-modify-write), and the slot remembers how far it has got:
//!
//! ```text
//! start ─► advance ── waits for a lock or pages ──► waiting ──► retry ─► advance
//!             │ issues one operation
//!          finish ── short, EINTR, EAGAIN, next piece ──► advance
//!             ├── failed, and to be held ──► hold ─► … ─► waiting
//!             └── done, or failed ──► the answer
//! ```

mod behind;
mod erase;
pub(crate) mod finish;
mod hold;
mod late;
mod mapped;
mod sync;

use super::bounce::{Bounce, beginning_of, rest_of};
use super::detours::DetourWatch;
use super::dispatch::Dispatch;
use super::erases::Erases;
use super::held::Held;
use super::slots::{Finished, Stage};
use super::syncs::Syncs;
use crate::choices::{Alignment, CacheMode};
use crate::disk::Disk;
use behind::BehindLate;
use ringway_aio::{Engine, IoOp};
use ringway_core::sync_turn::Sleeper;
use ringway_core::{Op, Status};
use ringway_image::ImageClient;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// What requests that are not one plain operation go through.
///
/// # Invariants
/// 1. `waiting` holds tags of slots in flight that have no operation with the engine or in its
///    backlog: they wait for pages or for a lock of the disk's ranges.
///    `behind_late` holds those that wait for late writes.
#[derive(Debug)]
pub(crate) struct SlowPath {
    waiting: VecDeque<u16>,
    behind_late: BehindLate,
    /// Who has asked may be gone without a word, and back elsewhere.
    pub(crate) peer_may_vanish: bool,
    bounce: Bounce,
    detours: DetourWatch,
    pub(crate) held: Held,
    pub(crate) syncs: Syncs,
    pub(crate) erases: Erases,
    /// It is woken when what it waits for has ended elsewhere.
    sleeper: Option<Arc<Sleeper>>,
    /// First slots of runs that an image does not have in one piece, for a moment.
    pub(crate) scattered: VecDeque<u16>,
    /// The line to the image's thread, if the disk is no raw image.
    pub(crate) client: Option<ImageClient>,
    /// Guests may write less than what the file takes in one piece.
    needs_locks: bool,
    /// The files of an image with a map take whole blocks only.
    needs_blocks: bool,
}

impl SlowPath {
    /// Allocates; call at start only.
    pub(crate) fn new(disk: &Disk, depth: u16) -> io::Result<Self> {
        Ok(Self {
            waiting: VecDeque::with_capacity(depth.into()),
            behind_late: BehindLate::new(depth),
            peer_may_vanish: false,
            bounce: Bounce::new()?,
            detours: DetourWatch::default(),
            held: Held::new(depth),
            syncs: Syncs::new(depth),
            erases: Erases::new(depth),
            sleeper: None,
            scattered: VecDeque::with_capacity(match disk.image() {
                Some(_) => depth.into(),
                None => 0,
            }),
            client: None,
            needs_locks: disk.needs_locks(),
            needs_blocks: disk.image().is_some() && disk.alignment != Alignment::ANY,
        })
    }

    /// True if writes have to keep their blocks to themselves.
    pub(crate) fn needs_locks(&self) -> bool {
        self.needs_locks
    }

    /// True if requests wait.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.behind_late.is_empty()
    }

    /// `wake` is called when something has ended for which this queue waits.
    pub(crate) fn wake_by(&mut self, disk: &Disk, wake: impl Fn() + Send + Sync + 'static) {
        self.sleeper = Some(disk.turn.sleeper(wake));
    }

    /// Whether the end of what others do is to wake the queue.
    fn note_sleep(&self) {
        if let Some(sleeper) = &self.sleeper {
            sleeper.sleeps(self.syncs.waits() || self.erases.has_some());
        }
    }

    /// True if the thread of the image has not answered all questions, or that was not looked at.
    #[inline]
    pub(crate) fn has_asked(&self) -> bool {
        self.client.as_ref().is_some_and(ImageClient::has_asked)
    }

    /// Bytes of bounce pages in use.
    pub(crate) fn bounce_bytes(&self) -> usize {
        self.bounce.in_use()
    }

    /// Begins a request.
    #[cold]
    pub(crate) fn start<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        (slow.retries, slow.counted, slow.bounce) = (0, false, false);
        slot.stage = Stage::Part;
        match slot.request.op {
            Op::GetId => {
                // SAFETY: the caller of `start` vouches for the segments; the serial is ours.
                unsafe {
                    let copied = slot.request.segments.scatter(0, &disk.serial);
                    slot.request.segments.zero_from(copied as u64);
                }
                d.answer(tag, Status::Ok);
            }
            Op::Flush if disk.cache == CacheMode::Unsafe || disk.geometry.read_only => {
                d.answer(tag, Status::Ok);
            }
            Op::Flush => self.sync(d, tag),
            Op::Discard | Op::WriteZeroes if slot.request.range.is_empty() => {
                d.answer(tag, Status::Ok);
            }
            _ if d.issuer.image.is_some() => self.advance(d, tag),
            Op::Discard | Op::WriteZeroes => {
                slot.stage = Stage::Erase;
                self.advance(d, tag);
            }
            Op::Read | Op::Write => {
                let request = &slot.request;
                let block = u64::from(disk.alignment.offset);
                slow.bounce = !(request.range.is_aligned(block)
                    && d.issuer.memory_aligned(&request.segments));
                self.advance(d, tag);
            }
        }
    }

    /// Begins a request anew that went along in a merged operation and did not get its bytes.
    #[cold]
    pub(crate) fn restart<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let (slot, slow) = d.slots.both(tag);
        (slow.retries, slow.counted, slow.bounce) = (0, false, false);
        (slot.stage, slot.done) = (Stage::Part, 0);
        self.advance(d, tag);
    }

    /// Tries again what waits, `budget` requests at most.
    pub(crate) fn retry<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, budget: usize) {
        for _ in 0..self.waiting.len().min(budget) {
            let Some(tag) = self.waiting.pop_front() else { break };
            self.advance(d, tag);
        }
        self.retry_late(d, budget);
    }

    /// Takes the next step of a request, or lets it wait.
    fn advance<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        if !self.lock(d, tag) {
            self.waiting.push_back(tag);
            return;
        }
        match d.slots.get(tag).stage {
            Stage::Part | Stage::Asked if d.issuer.image.is_some() => self.next_place(d, tag),
            Stage::Whole | Stage::Part if !d.slots.slow(tag).bounce => self.next_part(d, tag),
            Stage::Erase => self.erase(d, tag),
            Stage::Entries => self.sync(d, tag),
            _ => self.next_bounce(d, tag),
        }
    }

    /// Keeps the request's blocks to itself while it writes, where neighbours may share a block.
    fn lock<C, E>(&self, d: &mut Dispatch<'_, C, E>, tag: u16) -> bool {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        let request = &slot.request;
        if !self.needs_locks || !request.op.changes_disk() || slow.lock.is_some() {
            return true;
        }
        let range = disk.widened(request.range);
        let locked = disk.locks.try_lock(range);
        if locked {
            slow.lock = Some(range);
        }
        locked
    }

    /// The next part of a request whose memory the file takes, up to the engine's limits.
    fn next_part<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        let range = slot.request.range;
        let rest = rest_of(range, slot.done);
        let block = u64::from(disk.alignment.offset);
        let max_bytes = u64::from(d.issuer.limits.max_bytes) / block * block;
        let most = rest.len().min(max_bytes);
        slow.part.clear();
        let fits = slot.request.segments.slice_into(slot.done, most, &mut slow.part);
        debug_assert!(fits, "a part has no more segments than the whole");
        // Engines may take fewer segments than a request has.
        slow.part.truncate(d.issuer.limits.max_segments);
        slow.piece = slow.part.bytes();
        slow.range = beginning_of(rest, slow.piece);
        slow.op = d.issuer.data_op(slot.request.op).into();
        slot.stage = Stage::Part;
        // Through the page cache parts cost nothing worth telling.
        let costs = disk.cache == CacheMode::None;
        if costs && slow.piece < rest.len() && !slow.counted {
            slow.counted = true;
            d.slots.stats.split += 1;
            self.detours.count(&d.slots.stats, disk);
        }
        d.issue(tag);
    }

    /// The next piece of a request that needs bounce pages.
    fn next_bounce<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        if !self.bounce.next_piece(d, tag) {
            self.waiting.push_back(tag);
            return;
        }
        self.count_bounce(d, tag);
        d.issue(tag);
    }

    /// A request goes through memory of ours.
    fn count_bounce<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let (_, slow) = d.slots.both(tag);
        if !slow.counted {
            slow.counted = true;
            d.slots.stats.bounced += 1;
            self.detours.count(&d.slots.stats, &d.issuer.disk);
        }
    }

    /// Discard or write-zeroes by the file itself.
    fn erase<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        let request = &slot.request;
        let range = request.range;
        let ops = d.issuer.limits.ops;
        slow.op = match request.op {
            Op::Discard if disk.block_device && ops.has(IoOp::Discard) => IoOp::Discard,
            Op::Discard => IoOp::PunchHole,
            _ if request.unmap && disk.geometry.discard => IoOp::PunchHole,
            _ => IoOp::ZeroRange,
        };
        // Block devices refuse parts of a block. A discard may leave them; zeroing may not.
        let takes = range.is_aligned(u64::from(disk.erase_block));
        if !takes || !ops.has(slow.op) {
            if request.op == Op::Discard {
                return self.answer(d, tag, Status::Ok);
            }
            return self.erase_by_writing(d, tag);
        }
        slow.range = range;
        slow.part.clear();
        self.issue_erase(d, tag);
    }

    /// Write-zeroes where the file cannot do it by itself.
    fn erase_by_writing<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let (slot, slow) = d.slots.both(tag);
        slot.stage = Stage::BounceWrite;
        slow.bounce = true;
        self.next_bounce(d, tag);
    }

    /// Lets go of pages and lock and makes the answer.
    fn end<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        status: Status,
    ) -> Finished<C> {
        self.bounce.release(d, tag);
        d.leave_late(tag);
        let disk = &d.issuer.disk;
        let (_, slow) = d.slots.both(tag);
        if let Some(range) = slow.lock.take() {
            disk.locks.unlock(range);
        }
        if let Some(held) = slow.held.take() {
            self.release_held(d, held, status);
        }
        d.slots.retire(tag, status)
    }

    /// As [`SlowPath::end`], for answers that no operation brings.
    fn answer<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16, status: Status) {
        let finished = self.end(d, tag, status);
        d.slots.push_late(finished);
    }
}
