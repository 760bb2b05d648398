//! The rare ways of a request: bounce buffers, pieces, zeroing, flushes.
//!
//! A request that the file does not take as it is is carried out piece by piece. Each piece is one
//! operation (two for a read-modify-write), and the slot remembers how far it has got:
//!
//! ```text
//! advance ── waits for a lock or pages ──► waiting ──► advance
//!    │ issues one operation
//! finish_rare ── short, EINTR, EAGAIN, next piece ──► advance ── done ──► retire
//! ```

use crate::disk::CacheMode;
use crate::overdue::Mark;
use crate::queue::{DiskQueue, Finished};
use crate::slot::Stage;
use ringway_aio::{Engine, IoOp};
use ringway_core::mem::Segment;
use ringway_core::{ByteRange, Op, Status};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The longest piece that goes through a bounce buffer, in bytes.
const PIECE_MAX: u64 = 1 << 20;

/// How often an operation is begun again after EINTR or EAGAIN before the request fails.
const RETRIES_MAX: u8 = 100;

impl<C> DiskQueue<C> {
    /// Begins a request that is not one plain operation.
    #[cold]
    pub(crate) fn start_rare<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        (cold.retries, cold.counted, cold.bounce) = (0, false, false);
        slot.stage = Stage::Part;
        match slot.request.op {
            Op::GetId => {
                // SAFETY: the caller of `start` vouches for the segments; the serial is ours.
                unsafe {
                    let copied = slot.request.segments.scatter(0, &self.disk.serial);
                    slot.request.segments.zero_from(copied as u64);
                }
                self.refuse(tag, Status::Ok);
            }
            Op::Flush if self.disk.cache == CacheMode::Unsafe || self.disk.geometry.read_only => {
                self.refuse(tag, Status::Ok);
            }
            Op::Flush => self.sync(engine, tag),
            Op::Discard | Op::WriteZeroes if slot.request.range.is_empty() => {
                self.refuse(tag, Status::Ok);
            }
            Op::Discard | Op::WriteZeroes => {
                slot.stage = Stage::Erase;
                self.advance(engine, tag);
            }
            Op::Read | Op::Write => {
                let request = &self.slots[usize::from(tag)].request;
                let block = u64::from(self.disk.alignment.offset);
                let takes =
                    request.range.is_aligned(block) && self.memory_aligned(&request.segments);
                self.cold[usize::from(tag)].bounce = !takes;
                self.advance(engine, tag);
            }
        }
    }

    /// Takes the next step of a rare request, or lets it wait.
    pub(crate) fn advance<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        if !self.lock(tag) {
            self.waiting.push_back(tag);
            return;
        }
        match self.slots[usize::from(tag)].stage {
            Stage::Whole | Stage::Part if !self.cold[usize::from(tag)].bounce => {
                self.next_part(engine, tag);
            }
            Stage::Erase => self.erase(engine, tag),
            Stage::Sync => self.sync(engine, tag),
            _ => self.next_bounce(engine, tag),
        }
    }

    /// Keeps the request's blocks to itself while it writes, where neighbours may share a block.
    fn lock(&mut self, tag: u16) -> bool {
        let request = &self.slots[usize::from(tag)].request;
        let cold = &mut self.cold[usize::from(tag)];
        if !self.needs_locks || !request.op.changes_disk() || cold.lock.is_some() {
            return true;
        }
        let range = self.disk.widened(request.range);
        let locked = self.disk.locks.try_lock(range);
        if locked {
            cold.lock = Some(range);
        }
        locked
    }

    /// The next part of a request whose memory the file takes, up to the engine's limits.
    fn next_part<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let op = self.data_op(self.slots[usize::from(tag)].request.op);
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let range = slot.request.range;
        let block = u64::from(self.disk.alignment.offset);
        let max_bytes = u64::from(self.limits.max_bytes) / block * block;
        cold.part.clear();
        let rest = (range.len() - slot.done).min(max_bytes);
        let fits = slot.request.segments.slice_into(slot.done, rest, &mut cold.part);
        debug_assert!(fits, "a part has no more segments than the whole");
        // Engines may take fewer segments than a request has.
        cold.part.truncate(self.limits.max_segments);
        let len = cold.part.bytes();
        // Through the page cache parts cost nothing worth telling.
        let told = self.disk.cache == CacheMode::None;
        if told && len < range.len() - slot.done && !cold.counted {
            cold.counted = true;
            self.stats.split += 1;
            self.detours.look(&self.stats, &self.disk);
        }
        (cold.op, cold.offset, cold.len, cold.piece) = (op, range.offset() + slot.done, len, len);
        slot.stage = Stage::Part;
        self.issue(engine, tag);
    }

    /// The next piece of a request that needs bounce pages.
    fn next_bounce<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let range = slot.request.range;
        let start = range.offset() + slot.done;
        let block = u64::from(self.disk.alignment.offset);
        // Later pieces start on a block, so that only the first and last can share one.
        let end = range.end().min((start / block * block).saturating_add(PIECE_MAX));
        let Some(piece) = ByteRange::new(start, end - start) else {
            return self.fail(tag, Status::IoError);
        };
        let blocks = piece.widened(block).unwrap_or(piece);
        // `blocks` is at most PIECE_MAX long plus one block.
        let need = usize::try_from(blocks.len()).unwrap_or(usize::MAX);
        if cold.pages.is_none() {
            cold.pages = self.pool.acquire(need);
        }
        let Some(pages) = cold.pages.as_mut() else {
            self.waiting.push_back(tag);
            return;
        };
        if !cold.counted {
            cold.counted = true;
            self.stats.bounced += 1;
            self.detours.look(&self.stats, &self.disk);
        }
        cold.piece = piece.len();
        (cold.offset, cold.len) = (blocks.offset(), blocks.len());
        cold.part.clear();
        let pushed = cold.part.push(Segment { base: pages.base(), len: need });
        debug_assert!(pushed, "an empty list has room");
        if slot.request.op == Op::Read {
            (slot.stage, cold.op) = (Stage::BounceRead, IoOp::Read);
        } else if blocks == piece {
            return self.write_pages(engine, tag);
        } else {
            (slot.stage, cold.op) = (Stage::ModifyRead, IoOp::Read);
            // SAFETY: no operation on these pages is in flight yet. Zeroes, so that a short read
            // leaves nothing old in what is written back.
            unsafe { pages.bytes().fill(0) };
        }
        self.issue(engine, tag);
    }

    /// The disk failed a request, where it has got to.
    fn note_failure(&self, tag: u16, errno: Option<i32>) {
        let slot = &self.slots[usize::from(tag)];
        let offset = slot.request.range.offset() + slot.done;
        self.disk.incidents.failed(slot.request.op, errno, offset);
    }

    /// Puts the guest's bytes (or zeroes) into the bounce pages and writes them.
    fn write_pages<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let op = self.data_op(Op::Write);
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let pages = cold.pages.as_mut().expect("a bounced write holds pages");
        let at = usize::try_from(slot.request.range.offset() + slot.done - cold.offset)
            .expect("a piece lies in its pages");
        let len = usize::try_from(cold.piece).expect("a piece is short");
        // SAFETY: no operation on the pages is in flight; the caller of `start` vouches for the
        // segments.
        unsafe {
            let bytes = &mut pages.bytes()[at..at + len];
            if slot.request.op == Op::Write {
                slot.request.segments.gather(slot.done, bytes);
            } else {
                bytes.fill(0);
            }
        }
        (slot.stage, cold.op) = (Stage::BounceWrite, op);
        self.issue(engine, tag);
    }

    /// Discard or write-zeroes by the file itself.
    fn erase<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let request = &slot.request;
        let range = request.range;
        let ops = self.limits.ops;
        cold.op = match request.op {
            Op::Discard if self.disk.block_device && ops.has(IoOp::Discard) => IoOp::Discard,
            Op::Discard => IoOp::PunchHole,
            _ if request.unmap && self.disk.geometry.discard => IoOp::PunchHole,
            _ => IoOp::ZeroRange,
        };
        // Block devices refuse parts of a block. A discard may leave them; zeroing may not.
        if !range.is_aligned(u64::from(self.disk.erase_block)) || !ops.has(cold.op) {
            if request.op == Op::Discard {
                return self.fail(tag, Status::Ok);
            }
            return self.erase_by_writing(engine, tag);
        }
        (cold.offset, cold.len) = (range.offset(), range.len());
        cold.part.clear();
        self.issue(engine, tag);
    }

    /// Write-zeroes where the file cannot do it by itself.
    fn erase_by_writing<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        self.slots[usize::from(tag)].stage = Stage::BounceWrite;
        self.cold[usize::from(tag)].bounce = true;
        self.next_bounce(engine, tag);
    }

    fn sync<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        if self.disk.flush_failed.load(Relaxed) {
            self.note_failure(tag, None);
            return self.fail(tag, Status::IoError);
        }
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        slot.stage = Stage::Sync;
        // Through the page cache the host tells a lost write-back to one sync only: with two at a
        // time the other one would report success for the same lost data.
        if self.disk.cache != CacheMode::None && self.disk.syncing.swap(true, SeqCst) {
            self.waiting.push_back(tag);
            return;
        }
        cold.syncing = true;
        self.disk.set_flushing(true);
        self.stats.syncs += 1;
        (cold.op, cold.offset, cold.len) = (IoOp::Sync, 0, 0);
        cold.part.clear();
        self.issue(engine, tag);
    }

    /// Takes the result of an operation that was not simply all of a request.
    #[cold]
    pub(crate) fn finish_rare<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        match self.slots[usize::from(tag)].stage {
            Stage::Run => return self.finish_run(engine, tag, result),
            Stage::Probe => return self.finish_probe(engine, tag, result),
            Stage::Watched => return self.finish_watched(engine, tag, result),
            _ => {}
        }
        if result < 0 {
            return self.failed(engine, tag, -result);
        }
        self.leave_whole(tag);
        let moved = u64::from(result.unsigned_abs());
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let range = slot.request.range;
        let advanced = match slot.stage {
            Stage::Whole | Stage::Run | Stage::Probe | Stage::Watched | Stage::Part => {
                moved.min(cold.piece)
            }
            Stage::BounceRead => {
                let skip = range.offset() + slot.done - cold.offset;
                let got = moved.saturating_sub(skip).min(cold.piece);
                let pages = cold.pages.as_mut().expect("a bounced read holds pages");
                let (from, len) = (usize::try_from(skip).ok()?, usize::try_from(got).ok()?);
                // SAFETY: the operation on the pages is over; the caller of `start` vouches for
                // the segments. Only bytes that were read are copied.
                unsafe {
                    slot.request.segments.scatter(slot.done, &pages.bytes()[from..from + len]);
                }
                got
            }
            Stage::ModifyRead if moved == cold.len => {
                self.write_pages(engine, tag);
                return None;
            }
            // The blocks to be modified were not read whole: never write them back.
            Stage::ModifyRead => 0,
            Stage::BounceWrite => {
                let skip = range.offset() + slot.done - cold.offset;
                moved.saturating_sub(skip).min(cold.piece)
            }
            Stage::Erase => {
                slot.done = range.len();
                return self.made(engine, tag);
            }
            Stage::Sync => {
                // Of several syncs at a time the host tells only one that it failed.
                let failed = self.disk.flush_failed.load(Relaxed);
                if failed {
                    self.note_failure(tag, None);
                }
                return Some(self.end(tag, if failed { Status::IoError } else { Status::Ok }));
            }
        };
        if advanced == 0 {
            // Less came than the part of a block before the request: the same once more.
            if moved > 0 && cold.retries < RETRIES_MAX {
                cold.retries += 1;
                self.stats.continued += 1;
                self.issue(engine, tag);
                return None;
            }
            // Nothing moved: the file ends here, or the disk takes nothing. Not again.
            self.note_failure(tag, None);
            return Some(self.end(tag, Status::IoError));
        }
        slot.done += advanced;
        if slot.done >= range.len() {
            return self.made(engine, tag);
        }
        if advanced < cold.piece {
            self.stats.continued += 1;
            // The rest of a short transfer may begin anywhere in a block.
            let block = u64::from(self.disk.alignment.offset);
            cold.bounce |= !(range.offset() + slot.done).is_multiple_of(block);
        }
        self.give_back_pages(tag);
        self.advance(engine, tag);
        None
    }

    /// A request that was one plain operation goes on as a rare one.
    fn leave_whole(&mut self, tag: u16) {
        let op = self.data_op(self.slots[usize::from(tag)].request.op);
        let slot = &mut self.slots[usize::from(tag)];
        if slot.stage == Stage::Whole {
            let cold = &mut self.cold[usize::from(tag)];
            cold.op = op;
            (cold.retries, cold.counted, cold.bounce) = (0, false, false);
            cold.mark = Mark::default();
            cold.piece = slot.request.range.len();
            slot.stage = Stage::Part;
        }
    }

    /// All bytes are where they belong: make them durable if that is owed, and answer.
    fn made<E: Engine>(&mut self, engine: &mut E, tag: u16) -> Option<Finished<C>> {
        let slot = &self.slots[usize::from(tag)];
        // Durable writes were durable one by one; erasing by the file was not.
        if self.durable_writes && slot.stage == Stage::Erase {
            self.sync(engine, tag);
            return None;
        }
        Some(self.end(tag, Status::Ok))
    }

    fn failed<E: Engine>(&mut self, engine: &mut E, tag: u16, errno: i32) -> Option<Finished<C>> {
        self.leave_whole(tag);
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        let stage = slot.stage;
        match errno {
            libc::EINTR | libc::EAGAIN if cold.retries < RETRIES_MAX => {
                cold.retries += 1;
                self.stats.continued += 1;
                if stage == Stage::Part {
                    self.advance(engine, tag);
                } else {
                    self.issue(engine, tag);
                }
                None
            }
            // The file does not take this memory after all: it does take ours.
            libc::EINVAL
                if stage == Stage::Part && self.disk.cache == CacheMode::None && !cold.bounce =>
            {
                cold.bounce = true;
                self.advance(engine, tag);
                None
            }
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV if stage == Stage::Erase => {
                if slot.request.op == Op::Discard {
                    return Some(self.end(tag, Status::Ok));
                }
                self.erase_by_writing(engine, tag);
                None
            }
            _ => {
                // A durable write through the page cache ends in a sync, too. Only EIO is the sync's
                // alone: a full disk refuses the write itself, and may have room again.
                let synced = cold.op == IoOp::WriteDurable
                    && matches!(stage, Stage::Part | Stage::BounceWrite)
                    && self.disk.cache != CacheMode::None
                    && errno == libc::EIO;
                if stage == Stage::Sync || synced {
                    // After a failed fsync the kernel forgets which pages were not written: only
                    // reopening the disk makes a later success mean anything.
                    self.disk.flush_has_failed();
                }
                self.note_failure(tag, Some(errno));
                Some(self.end(tag, Status::IoError))
            }
        }
    }

    fn give_back_pages(&mut self, tag: u16) {
        if let Some(pages) = self.cold[usize::from(tag)].pages.take() {
            self.pool.release(pages);
        }
    }

    /// Lets go of pages and lock and makes the answer.
    fn end(&mut self, tag: u16, status: Status) -> Finished<C> {
        self.give_back_pages(tag);
        if std::mem::take(&mut self.cold[usize::from(tag)].syncing) {
            self.disk.set_flushing(false);
            self.disk.syncing.store(false, SeqCst);
        }
        if let Some(range) = self.cold[usize::from(tag)].lock.take() {
            self.disk.locks.unlock(range);
        }
        self.retire(tag, status)
    }

    /// As [`DiskQueue::end`], for answers that no operation brings.
    fn fail(&mut self, tag: u16, status: Status) {
        let finished = self.end(tag, status);
        self.late.push_back(finished);
    }
}
