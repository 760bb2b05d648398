//! The end of an operation on the slow path: the next piece, once more, an answer, an error.

use super::SlowPath;
use crate::choices::CacheMode;
use crate::holding::status_of;
use crate::queue::bounce;
use crate::queue::dispatch::Dispatch;
use crate::queue::slots::{Finished, Sighting, Stage};
use ringway_aio::{Engine, IoOp};
use ringway_core::{Op, Status};

/// How often an operation is begun again after EINTR or EAGAIN before the request fails.
const RETRIES_MAX: u8 = 100;

impl SlowPath {
    /// Takes the result of an operation that was not simply all of a request. Gives the answer, once
    /// the request is done.
    pub(crate) fn finish<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let slot = d.slots.get(tag);
        if slot.stage.is_request() {
            if i64::from(result) == slot.request.range.len() as i64 {
                self.leave_place(d, tag);
                d.leave_late(tag);
                return Some(d.slots.retire(tag, Status::Ok));
            }
            leave_whole(d, tag);
        }
        if d.slots.get(tag).stage == Stage::Erase {
            self.end_erase(d);
        }
        let was_mapped = self.leave_place(d, tag);
        let Ok(moved) = u64::try_from(result) else {
            return self.failed(d, tag, result.saturating_neg());
        };
        let (slot, slow) = d.slots.both(tag);
        match slot.stage {
            Stage::ModifyRead if moved == slow.range.len() => {
                bounce::fill(d, tag);
                d.issue(tag);
                return None;
            }
            Stage::Erase => {
                slot.done = slot.request.range.len();
                return self.made(d, tag);
            }
            Stage::Sync if was_mapped => {
                // That was the file with its data; now the image itself.
                d.issue(tag);
                return None;
            }
            Stage::Sync => return Some(self.end_sync(d, tag)),
            _ => {}
        }
        let advanced = bounce::take_moved(d, tag, moved);
        if advanced == 0 {
            return self.nothing_moved(d, tag, moved);
        }
        let (slot, slow) = d.slots.both(tag);
        let range = slot.request.range;
        slot.done += advanced;
        if slot.done >= range.len() {
            return self.made(d, tag);
        }
        if advanced < slow.piece {
            // The rest of a short transfer may begin anywhere in a block.
            let block = u64::from(d.issuer.disk.alignment.offset);
            slow.bounce |= (range.offset() + slot.done) % block != 0;
            d.slots.stats.continued += 1;
        }
        self.bounce.release(d, tag);
        self.advance(d, tag);
        None
    }

    /// An operation ended well without a byte of the request.
    #[cold]
    fn nothing_moved<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        moved: u64,
    ) -> Option<Finished<C>> {
        // Less came than the part of a block before the request: the same once more.
        if moved > 0 && d.slots.slow(tag).retries < RETRIES_MAX {
            d.slots.both(tag).1.retries += 1;
            d.slots.stats.continued += 1;
            d.issue(tag);
            return None;
        }
        // The file ends here, or the disk takes nothing. Not again at once.
        if self.hold(d, tag, 0) {
            return None;
        }
        d.note_failure(tag, None);
        Some(self.end(d, tag, Status::IoError))
    }

    /// All bytes are where they belong: make them durable if that is owed, and answer.
    pub(super) fn made<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
    ) -> Option<Finished<C>> {
        // Durable writes past the page cache were durable one by one; erasing by the file was not.
        let slot = d.slots.get(tag);
        let changes = d.issuer.syncs_changes() && slot.request.op.changes_disk();
        if changes || (d.issuer.durable_writes && slot.stage == Stage::Erase) {
            if slot.request.op == Op::Write {
                d.issuer.durable_bytes += slot.request.range.len();
            }
            self.sync(d, tag);
            return None;
        }
        Some(self.end(d, tag, Status::Ok))
    }

    #[cold]
    pub(super) fn failed<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        errno: i32,
    ) -> Option<Finished<C>> {
        if d.slots.get(tag).stage == Stage::Sync {
            return self.sync_failed(d, tag, errno);
        }
        let (cache, lost) = (d.issuer.disk.cache, has_lost(d));
        let (slot, slow) = d.slots.both(tag);
        let stage = slot.stage;
        match errno {
            libc::EINTR | libc::EAGAIN if slow.retries < RETRIES_MAX => {
                slow.retries += 1;
                d.slots.stats.continued += 1;
                d.issuer.note_polling(d.engine);
                match stage {
                    Stage::Part | Stage::Asked | Stage::Entries | Stage::Erase => {
                        self.advance(d, tag)
                    }
                    _ => d.issue(tag),
                }
                None
            }
            // The file does not take this memory after all: it does take ours.
            libc::EINVAL if stage == Stage::Part && cache == CacheMode::None && !slow.bounce => {
                slow.bounce = true;
                self.advance(d, tag);
                None
            }
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV if stage == Stage::Erase => {
                if slot.request.op == Op::Discard {
                    return Some(self.end(d, tag, Status::Ok));
                }
                self.erase_by_writing(d, tag);
                None
            }
            _ => {
                let data = matches!(stage, Stage::Part | Stage::BounceWrite);
                let changes = stage == Stage::Asked && slot.request.op.changes_disk();
                let in_vain = lost && (changes || stage == Stage::Entries);
                let synced = data && was_sync(cache, slow.op, errno);
                if synced {
                    // Reported whatever was chosen: what it has lost, no second try brings back.
                    d.issuer.disk.flush_has_failed();
                } else if !in_vain && self.hold(d, tag, errno) {
                    return None;
                }
                d.note_failure(tag, Some(errno));
                // Nobody shall wait for room to have a sync again.
                Some(self.end(d, tag, if synced { Status::IoError } else { status_of(errno) }))
            }
        }
    }
}

/// True if a write that failed so failed in the sync that makes it durable. After a failed sync the
/// kernel forgets which pages were not written: only reopening the disk makes a later success mean
/// anything. Only EIO is the sync's alone: a full disk refuses the write itself, and may have room
/// again. Past the page cache nothing is forgotten.
pub(crate) fn was_sync(cache: CacheMode, op: IoOp, errno: i32) -> bool {
    op == IoOp::WriteDurable && cache != CacheMode::None && errno == libc::EIO
}

/// The image's thread, or a queue, has heard that written data is lost.
pub(super) fn has_lost<C, E>(d: &Dispatch<'_, C, E>) -> bool {
    d.issuer.image.as_ref().is_some_and(|image| image.has_failed())
}

/// A request that was one plain operation goes on by the slow path.
fn leave_whole<C, E>(d: &mut Dispatch<'_, C, E>, tag: u16) {
    let (slot, slow) = d.slots.both(tag);
    slow.op = d.issuer.data_op(slot.request.op).into();
    (slow.retries, slow.counted, slow.bounce) = (0, false, false);
    slow.piece = slot.request.range.len();
    if slot.stage == Stage::Whole {
        slow.seen = Sighting::default();
    }
    slot.stage = Stage::Part;
}
