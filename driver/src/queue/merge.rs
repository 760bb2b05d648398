//! Requests that do not take the fast path into the ring: held, merged, timed, or waiting for room.
//!
//! ```text
//! read, flush… ─► fresh ─┄ submit ┄─► admit ─┄ held ┄─► dispatch ─► one chain for a run ─► end_run
//!                                        └────────────────► out ─► one chain for a request ─┘ │
//! pop ◄─── late ◄─── a completion for each request ◄───────────────────────────────────────────┘
//! ```
//!
//! A queue whose mode is bio knows none of this. When requests go, and with whom, is decided by
//! [`Scheduler`]; here it meets buffers and the ring.

pub(super) mod owner;

use super::limits::QueueLimits;
use super::policy::DevicePolicy;
use super::wire::WireRequest;
use crate::completion::{Completion, Data};
use owner::{Outgoing, RingOwner, RingSide, SlowRequest, SlowRequests};
use ringway_core::{Status, TagList};
use ringway_ring::virtqueue::NoRoom;
use ringway_scheduler::{
    Admitted, Limits, MERGED_MAX, Policy, Scheduler, SchedulerMode, SchedulerStats,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// What a queue needs for any mode but bio.
#[derive(Debug)]
pub(super) struct MergeState<C> {
    policy: Arc<DevicePolicy>,
    scheduler: Scheduler,
    requests: SlowRequests<C>,
    /// Slots queued since the last [`BlkQueue::submit`](crate::BlkQueue::submit), in order.
    fresh: Vec<u16>,
    /// Bytes of all requests that were queued.
    bytes: u64,
}

impl<C> MergeState<C> {
    /// Allocates; call at start only.
    pub(super) fn new(
        policy: Arc<DevicePolicy>,
        depth: u16,
        limits: &QueueLimits,
    ) -> Option<Box<Self>> {
        if policy.shared.mode() == SchedulerMode::Bio {
            return None;
        }
        let count = usize::from(depth);
        let QueueLimits { merge_max, size_max, .. } = *limits;
        let limits = Limits { max_bytes: MERGED_MAX, max_segments: merge_max };
        let slot = || SlowRequest { wire: WireRequest::default(), ctx: None, data: Data::None };
        let requests = SlowRequests {
            slots: (0..depth).map(|_| slot()).collect(),
            tags: TagList::new(depth),
            out: VecDeque::with_capacity(count),
            chains: vec![None; count].into(),
            sent: 0,
            merged: 0,
            longest: 1,
            size_max,
            // Those of all slots, and of all chains of the fast path before the policy changed.
            late: VecDeque::with_capacity(2 * count),
        };
        Some(Box::new(Self {
            scheduler: Scheduler::new(&policy.shared, depth, limits),
            requests,
            fresh: Vec::with_capacity(count),
            bytes: 0,
            policy,
        }))
    }

    /// True if new requests are merged.
    pub(super) fn merges(&self) -> bool {
        self.scheduler.merges()
    }

    /// True if requests may take the fast path: nothing is merged or timed, and they overtake
    /// nobody.
    pub(super) fn allows_fast_path(&self) -> bool {
        self.scheduler.is_idle() && !self.waits()
    }

    /// True if completions come from here: not all that comes back took the fast path.
    pub(super) fn has_completions(&self) -> bool {
        self.requests.sent > 0 || !self.requests.late.is_empty()
    }

    /// Requests queued and not popped, `chains` of the ring included.
    pub(super) fn in_flight(&self, chains: u16) -> u16 {
        let fast = usize::from(chains - self.requests.sent);
        u16::try_from(fast + self.taken()).unwrap_or(u16::MAX)
    }

    /// Slots that are in use, and completions that take up the room of one.
    fn taken(&self) -> usize {
        self.requests.tags.in_use() + self.requests.late.len()
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// The policy that was chosen, and how often it has changed.
    pub(super) fn policy(&self) -> (Policy, u64) {
        (self.policy.shared.chosen(), self.policy.shared.switches())
    }

    /// True if requests wait for something before they are sent, other than a submission.
    pub(super) fn waits(&self) -> bool {
        self.scheduler.holds() || !self.requests.out.is_empty()
    }

    /// True if each chain is one request, and brings one completion.
    pub(super) fn is_one_by_one(&self) -> bool {
        self.requests.merged == 0 && self.requests.late.is_empty() && !self.waits()
    }

    /// How many chains have to come back before there can be `count` completions.
    pub(super) fn chains_for(&self, count: usize) -> u16 {
        if self.waits() {
            // What comes back makes room for what waits.
            return 1;
        }
        let requests = &self.requests;
        let more = count.saturating_sub(requests.late.len());
        u16::try_from(more.div_ceil(requests.longest.into())).unwrap_or(u16::MAX)
    }

    /// How long what is held may wait at most: `None` if nothing is held, or if something has to come
    /// back first anyway.
    pub(super) fn wake_in(&self) -> Option<Duration> {
        if !self.requests.out.is_empty() {
            return None;
        }
        let at = self.scheduler.wake_at()?;
        Some(Duration::from_nanos(at.saturating_sub(self.policy.now())))
    }

    /// Takes a request that was judged; gives it back if there is no slot for it.
    pub(super) fn push(&mut self, wire: WireRequest, data: Data, ctx: C) -> Result<(), (Data, C)> {
        if self.taken() >= self.requests.slots.len() {
            return Err((data, ctx));
        }
        let tag = self.requests.tags.acquire().expect("as many tags as slots");
        self.bytes += data.bytes();
        self.requests.slots[usize::from(tag)] = SlowRequest { wire, ctx: Some(ctx), data };
        self.fresh.push(tag);
        Ok(())
    }

    /// Counts the bytes of a request on the fast path, for the choice of the policy.
    pub(super) fn count(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// What was queued since the last call is held, or goes as it is. `in_flight`: all requests that
    /// are queued and not popped.
    pub(super) fn admit_fresh(&mut self, side: RingSide<'_>, in_flight: usize) {
        let waiting = self.fresh.len() + self.requests.late.len();
        let under_way = in_flight.saturating_sub(waiting);
        let Self { policy, scheduler, requests, fresh, .. } = self;
        let mut owner = RingOwner { requests, side, policy, written: 0 };
        for (before, tag) in fresh.drain(..).enumerate() {
            let kind = owner.requests.kind(tag);
            if scheduler.admit(&mut owner, tag, kind, under_way + before) != Admitted::Held {
                owner.requests.out.push_back(Outgoing::Alone(tag));
            }
        }
    }

    /// Puts into the ring what may go and fits.
    pub(super) fn dispatch(&mut self, side: RingSide<'_>) {
        let Self { policy, scheduler, requests, .. } = self;
        let mut owner = RingOwner { requests, side, policy, written: 0 };
        while let Some(&first) = owner.requests.out.front() {
            if let Err(why) = owner.send(first, scheduler) {
                debug_assert_eq!(why, NoRoom::Full, "a request that was judged fits in the ring");
                return;
            }
            owner.requests.out.pop_front();
        }
        if scheduler.holds() {
            scheduler.dispatch(&mut owner);
        }
    }

    /// Takes back the chain `head`, which the fast path does not know. A merged one completes each of
    /// its requests; if it failed they go again one by one, so that only those fail that have to.
    pub(super) fn take_back(
        &mut self,
        side: RingSide<'_>,
        head: u16,
        status: Status,
        used_len: u32,
    ) {
        let Self { policy, scheduler, requests, .. } = self;
        let chain = requests.chains[usize::from(head)].take();
        requests.sent -= 1;
        let run = match chain.expect("invariant 2: the ring checks heads") {
            Outgoing::Alone(tag) => {
                scheduler.finished(tag, || policy.now());
                return requests.complete(tag, status, used_len);
            }
            Outgoing::Run(run) => run,
        };
        if let Some(tag) = scheduler.end_single(run) {
            return requests.complete(tag, status, used_len);
        }
        requests.merged -= 1;
        if requests.merged == 0 {
            requests.longest = 1;
        }
        let moved = if status == Status::Ok { scheduler.run(run).range().len() } else { 0 };
        // The status byte is not data.
        let written = used_len.saturating_sub(1);
        scheduler.end_run(&mut RingOwner { requests, side, policy, written }, run, moved);
    }

    /// Keeps a completion of the fast path for later.
    pub(super) fn push_late(&mut self, done: Completion<C>) {
        self.requests.late.push_back(done);
    }

    /// The next completion that came back along with others.
    pub(super) fn pop_late(&mut self) -> Option<Completion<C>> {
        self.requests.late.pop_front()
    }

    /// How many of them there are.
    pub(super) fn late(&self) -> usize {
        self.requests.late.len()
    }

    /// Counts a turn. True if the policy is to be followed.
    pub(super) fn turn(&mut self) -> bool {
        self.scheduler.turn()
    }

    /// The next turn follows the policy: a while has passed.
    pub(super) fn follow_soon(&mut self) {
        self.scheduler.follow_soon();
    }

    /// Takes up the policy that is chosen now. `done`: requests completed; `fast_bytes`: those of
    /// requests in flight on the fast path.
    pub(super) fn follow(&mut self, done: u64, fast_bytes: impl FnOnce() -> u64) {
        let Self { policy, scheduler, requests, bytes, .. } = self;
        scheduler.follow(&policy.shared, policy.now(), || {
            let slots = requests.slots.iter().map(|slot| slot.data.bytes());
            let late = requests.late.iter().map(|done| done.data.bytes());
            (done, *bytes - fast_bytes() - slots.chain(late).sum::<u64>())
        });
    }

    /// Gives up the buffers that the server may still write to; all contexts come back.
    pub(super) fn give_up(&mut self) -> impl Iterator<Item = C> + '_ {
        let Self { scheduler, requests, .. } = self;
        for head in 0..requests.chains.len() {
            match requests.chains[head].take() {
                Some(Outgoing::Alone(tag)) => requests.abandon(tag),
                Some(Outgoing::Run(run)) => {
                    scheduler.run(run).slots().for_each(|tag| requests.abandon(tag));
                }
                None => {}
            }
        }
        let late = requests.late.drain(..).map(|done| done.ctx);
        requests.slots.iter_mut().filter_map(|slot| slot.ctx.take()).chain(late)
    }
}

#[cfg(test)]
mod tests;
