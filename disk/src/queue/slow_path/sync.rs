//! Flushes, and whatever else has to be durable before it is answered: one sync of a disk at a time, whatever its
//! queues, and all who wait for one share the next ([`SyncTurn`]).
//!
//! ```text
//! sync ─► entries by the image's thread, if some wait ─► join ─► tend_syncs ── nobody's turn ─► begin ─► engine
//!                                                          ▲                                       │
//!                                  the worker's bell ──────┴── wakes all others ◄── end_sync ◄── finish
//! ```

use super::SlowPath;
use super::finish::has_lost;
use crate::queue::dispatch::Dispatch;
use crate::queue::slots::{Finished, Stage};
use crate::queue::syncs::NEVER;
use ringway_aio::{Engine, IoOp};
use ringway_core::sync_turn::{SyncTurn, pause_before_sync};
use ringway_core::{ByteRange, Status};
use std::sync::atomic::Ordering::SeqCst;

impl SlowPath {
    /// Makes durable what was done, for a request that is answered then.
    pub(super) fn sync<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        if d.issuer.disk.flush_failed.load(SeqCst) {
            d.note_failure(tag, None);
            return self.answer(d, tag, Status::IoError);
        }
        // What was answered before has to be where it will be looked for after a power cut.
        if d.issuer.image.as_ref().is_some_and(|image| image.has_deferred()) {
            return self.ask_for_entries(d, tag);
        }
        self.join(d, tag);
    }

    /// All that a sync has to make durable for this request is in the file.
    pub(super) fn join<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        d.slots.get_mut(tag).stage = Stage::Joined;
        self.syncs.joined.push_back((tag, d.issuer.disk.turn.join()));
        self.tend_syncs(d);
    }

    /// Answers those whose sync has ended, and begins the next one if it is nobody's turn. Once a turn while
    /// `Syncs::has_some`.
    #[cold]
    pub(crate) fn tend_syncs<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        if self.syncs.again_ns != NEVER && self.syncs.again_ns <= d.issuer.disk.now() {
            self.begin_again(d);
        }
        // Before looking: what changes afterwards rings.
        self.note_sleep();
        while let Some(&(tag, number)) = self.syncs.joined.front() {
            let ended = d.issuer.disk.turn.has_ended(number);
            let failed = self.has_failed(d);
            if !failed && !ended {
                break;
            }
            self.syncs.joined.pop_front();
            if failed {
                d.note_failure(tag, None);
            }
            self.answer(d, tag, if failed { Status::IoError } else { Status::Ok });
        }
        if let Some(&(tag, _)) = self.syncs.joined.front() {
            if d.issuer.disk.turn.try_begin() {
                self.syncs.joined.pop_front();
                self.begin(d, tag);
            }
        }
        self.note_sleep();
    }

    /// True if a sync has failed: this one, or one by whomever. No later one may succeed.
    fn has_failed<C, E: Engine>(&self, d: &Dispatch<'_, C, E>) -> bool {
        if has_lost(d) && !d.issuer.disk.flush_failed.load(SeqCst) {
            // The host has told the image's thread, and tells the guest nothing.
            d.issuer.disk.flush_has_failed();
        }
        d.issuer.disk.flush_failed.load(SeqCst)
    }

    /// The turn is this queue's.
    fn begin<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        self.syncs.owner = Some(tag);
        d.issuer.disk.set_flushing(true);
        let (slot, slow) = d.slots.both(tag);
        (slot.stage, slow.retries) = (Stage::Sync, 0);
        self.issue_sync(d, tag);
    }

    /// The file with the data, if that is another one, and then the image itself.
    fn issue_sync<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let (_, slow) = d.slots.both(tag);
        (slow.op, slow.range, slow.place) = (IoOp::Sync, ByteRange::default(), None);
        slow.part.clear();
        d.slots.stats.syncs += 1;
        self.sync_data_file(d, tag);
        d.issue(tag);
    }

    fn begin_again<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        self.syncs.again_ns = NEVER;
        let Some(tag) = self.syncs.owner else { return };
        d.slots.stats.continued += 1;
        self.issue_sync(d, tag);
    }

    /// The sync of this queue has ended with an error.
    pub(super) fn sync_failed<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        errno: i32,
    ) -> Option<Finished<C>> {
        let (_, slow) = d.slots.both(tag);
        let again = matches!(errno, libc::EINTR | libc::EAGAIN);
        if let Some(pause) = pause_before_sync(slow.retries).filter(|_| again) {
            slow.retries += 1;
            let pause = u64::try_from(pause.as_nanos()).unwrap_or(NEVER);
            self.syncs.again_ns = d.issuer.disk.now().saturating_add(pause);
            return None;
        }
        if errno == libc::ENOTCONN && d.issuer.disk.has_no_sync() {
            // No answer of a server that cannot be reached is no result. What was lost with it the engine knows, and
            // fails later syncs for that.
            d.note_failure(tag, Some(errno));
            self.leave_turn(d, SyncTurn::end_in_vain);
            return Some(self.end(d, tag, Status::IoError));
        }
        // Reported whatever was chosen: what it has lost, no second try brings back. Before anybody is told.
        d.issuer.disk.flush_has_failed();
        d.note_failure(tag, Some(errno));
        Some(self.end_sync(d, tag))
    }

    /// The sync of this queue has ended. If it failed, all who look know that by now.
    pub(super) fn end_sync<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
    ) -> Finished<C> {
        let failed = self.has_failed(d);
        self.leave_turn(d, SyncTurn::end);
        self.end(d, tag, if failed { Status::IoError } else { Status::Ok })
    }

    fn leave_turn<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, end: fn(&SyncTurn)) {
        self.syncs.owner = None;
        // It looks itself, also for erasures that wait.
        self.sleeper.iter().for_each(|sleeper| sleeper.sleeps(false));
        d.issuer.disk.set_flushing(false);
        end(&d.issuer.disk.turn);
        self.tend_syncs(d);
        self.tend_erases(d);
    }

    /// Nobody waits for those that have joined. What is under way goes on.
    pub(super) fn drop_joined<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        while let Some((tag, _)) = self.syncs.joined.pop_front() {
            self.answer(d, tag, Status::IoError);
        }
    }
}
