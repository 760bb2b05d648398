//! Requests that the disk has failed and that are held: they wait in their slots until they are tried
//! again, and their guest waits for them.
//!
//! ```text
//! failed ─► hold ─► parked ── time, or a command ──► try_again ─► waiting ─► advance
//!             │        └───── too long, or given up ──► the answer
//!             └── not to be held ──► the answer
//! ```
//!
//! What was done of a request stays done. A held one has let go of its pages and of the lock on its
//! blocks, so that others go on; a read-modify-write begins again with the read.

use super::SlowPath;
use super::late::go_to_storage;
use crate::holding::status_of;
use crate::queue::dispatch::Dispatch;
use crate::queue::held::{HeldSlot, RETRY_EVERY};
use crate::queue::slots::{Sighting, Slots, Stage};
use ringway_aio::Engine;
use ringway_core::{Op, Request, Status, kill_point};

/// No time at which anything is due.
const NEVER: u64 = u64::MAX;

impl SlowPath {
    /// Holds a request that the disk has failed, unless its guest is to be told: false then.
    #[cold]
    pub(super) fn hold<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        errno: i32,
    ) -> bool {
        let disk = &d.issuer.disk;
        let now = disk.now();
        let (slot, slow) = d.slots.both(tag);
        // A table that finds no place is a write's: without a journal it would have been found with that.
        let op = if slot.stage == Stage::Entries { Op::Write } else { slot.request.op };
        let before = slow.held;
        // One that a queue had held which was stopped meanwhile goes on with its time.
        let left = || disk.held_since(slot.request.op, slot.request.range).unwrap_or(now);
        let since_ns = before.map_or_else(left, |held| held.since_ns);
        let deadline = deadline_ns(disk.error_policy().hold_timeout, since_ns);
        if self.held.closed || now >= deadline || !disk.holds(op, errno) {
            return false;
        }
        kill_point!(Holding);
        let range = slot.request.range;
        if let Some(turn) = &mut slow.late {
            // Nothing else of the blocks around it is touched now.
            disk.change_late(turn, range);
        } else if self.peer_may_vanish && slot.request.op.changes_disk() && !range.is_empty() {
            // Whoever has asked for it may be back elsewhere when it is tried again.
            slow.late = Some(disk.take_turn(range));
        }
        let held = HeldSlot { since_ns, errno, tried: false };
        slow.held = Some(held);
        if let Some(range) = slow.lock.take() {
            disk.locks.unlock(range);
        }
        disk.hold(op, errno, before.map(|held| held.errno));
        self.held.due_ns = self.held.due_ns.min(deadline);
        if held.by_itself() {
            if self.held.retry_ns <= now || self.held.retry_ns == NEVER {
                self.held.retry_ns = after(now);
            }
            disk.try_held_at(self.held.retry_ns);
            self.held.due_ns = self.held.due_ns.min(self.held.retry_ns);
        }
        self.bounce.release(d, tag);
        let slots = &*d.slots;
        let older = |&other: &u16| since(slots, other) <= since_ns;
        let at = self.held.parked.partition_point(older);
        self.held.parked.insert(at, tag);
        d.slots.stats.held += u64::from(before.is_none());
        kill_point!(Held);
        true
    }

    /// What is due now: requests that have been held for too long are reported; of those that are
    /// tried again by themselves the oldest one goes.
    #[cold]
    pub(crate) fn tend_held<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        let (now, timeout) = (d.issuer.disk.now(), d.issuer.disk.error_policy().hold_timeout);
        if now < self.held.due_ns {
            return;
        }
        while let Some(&oldest) = self.held.parked.front() {
            if now < deadline_ns(timeout, since(d.slots, oldest)) {
                break;
            }
            self.held.parked.pop_front();
            self.give_up(d, oldest);
        }
        let slots = &*d.slots;
        let by_itself = |&tag: &u16| slots.slow(tag).held.is_some_and(|held| held.by_itself());
        let first = self.held.parked.iter().position(by_itself);
        if first.is_none() {
            self.held.retry_ns = NEVER;
        } else if now >= self.held.retry_ns {
            self.held.retry_ns = after(now);
            d.issuer.disk.try_held_at(self.held.retry_ns);
            if let Some(tag) = first.and_then(|at| self.held.parked.remove(at)) {
                self.try_again(d, tag);
            }
        }
        let oldest = self.held.parked.front();
        let deadline = oldest.map_or(NEVER, |&tag| deadline_ns(timeout, since(d.slots, tag)));
        self.held.due_ns = deadline.min(self.held.retry_ns);
    }

    /// Tries those again of which `which` says so, in their order. How many they are.
    #[cold]
    pub(crate) fn try_held<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        which: impl Fn(&HeldSlot) -> bool,
    ) -> usize {
        let mut tried = 0;
        for _ in 0..self.held.parked.len() {
            let Some(tag) = self.held.parked.pop_front() else { break };
            if d.slots.slow(tag).held.as_ref().is_some_and(&which) {
                self.try_again(d, tag);
                tried += 1;
            } else {
                self.held.parked.push_back(tag);
            }
        }
        tried
    }

    /// Reports those of which `which` says so, without another try. How many they are.
    #[cold]
    pub(crate) fn fail_held<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        which: impl Fn(&Request, &C) -> bool,
    ) -> usize {
        let mut failed = 0;
        for _ in 0..self.held.parked.len() {
            let Some(tag) = self.held.parked.pop_front() else { break };
            let slot = d.slots.get(tag);
            if slot.context.as_ref().is_some_and(|context| which(&slot.request, context)) {
                self.give_up(d, tag);
                failed += 1;
            } else {
                self.held.parked.push_back(tag);
            }
        }
        failed
    }

    /// Ends what waits for time, a command, pages or a lock: nothing of it is with the disk.
    #[cold]
    pub(crate) fn drop_waiting<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        let next = |it: &mut Self| {
            let tag = it.held.parked.pop_front().or_else(|| it.waiting.pop_front());
            tag.or_else(|| it.behind_late.pop())
        };
        while let Some(tag) = next(self) {
            self.answer(d, tag, Status::IoError);
        }
        self.drop_joined(d);
        self.drop_erases(d);
    }

    /// The disk may have another size by now, which would have been looked at when it began.
    fn try_again<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        kill_point!(Retrying);
        d.issuer.disk.try_held();
        let (slot, slow) = d.slots.both(tag);
        if let Some(held) = &mut slow.held {
            held.tried = true;
        }
        (slow.retries, slow.seen) = (0, Sighting::default());
        let disk = &d.issuer.disk;
        if let Err(status) = disk.authorise(&slot.request) {
            return self.answer(d, tag, status);
        }
        let waits = match slow.late {
            Some(turn) => disk.has_to_wait(&turn).then_some(turn),
            None => disk.await_turn(slot.request.range, slot.request.op.changes_disk()),
        };
        match waits {
            Some(turn) => self.await_late(d.slots, tag, turn),
            None => {
                go_to_storage(d, tag);
                self.waiting.push_back(tag);
            }
        }
    }

    /// Tells the guest after all.
    fn give_up<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let errno = d.slots.slow(tag).held.map_or(0, |held| held.errno);
        d.note_failure(tag, (errno != 0).then_some(errno));
        self.answer(d, tag, status_of(errno));
    }

    /// A request that was held is answered. If there was space for it now, the others follow.
    #[cold]
    pub(super) fn release_held<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        held: HeldSlot,
        status: Status,
    ) {
        kill_point!(Releasing);
        d.issuer.disk.release_held(held.errno, held.tried);
        if status == Status::Ok && held.by_itself() {
            self.try_held(d, HeldSlot::by_itself);
        }
    }
}

fn since<C>(slots: &Slots<C>, tag: u16) -> u64 {
    slots.slow(tag).held.map_or(0, |held| held.since_ns)
}

fn after(now_ns: u64) -> u64 {
    now_ns.saturating_add(nanos(RETRY_EVERY))
}

fn deadline_ns(timeout: Option<std::time::Duration>, since_ns: u64) -> u64 {
    timeout.map_or(NEVER, |timeout| since_ns.saturating_add(nanos(timeout)))
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(NEVER)
}
