//! How a queue of a disk begins, what is chosen for it, and what it is asked beside requests.

use super::issue::Issuer;
use super::slots::Slots;
use super::slow_path::SlowPath;
use super::watcher::Watcher;
use super::{DiskQueue, merge};
use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::locks::Outliving;
use crate::places::Share;
use crate::stats::DiskStats;
use ringway_aio::{FileId, Limits};
use ringway_core::mem::HostRange;
use std::io;
use std::sync::Arc;

/// The most segments of a request: what `preadv2` takes (IOV_MAX).
const SEGMENTS_MAX: usize = 1024;

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
        let slow = SlowPath::new(&disk, depth)?;
        let issuer = Issuer::new(disk, limits, file, tag_base, depth);
        let most =
            Limits { max_segments: limits.max_segments.min(SEGMENTS_MAX), ..issuer.limits.clone() };
        let scheduler = merge::scheduler(&issuer.disk, &most, depth);
        let slots = Slots::new(depth, SEGMENTS_MAX)?;
        let outliving = Outliving::default();
        let mut queue = Self { fast: 0, slots, issuer, slow, scheduler, outliving };
        queue.choose_fast();
        Ok(queue)
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.issuer.disk
    }

    /// The file, as the engine knows it.
    #[must_use]
    pub fn file(&self) -> FileId {
        self.issuer.file()
    }

    /// From now on every write is durable before it completes (no write cache, or no FLUSH
    /// negotiated; VIRTIO 1.2 §5.2.6.2). `unsafe` disks ignore it.
    pub fn set_durable_writes(&mut self, durable: bool) {
        self.issuer.durable_writes = durable && self.issuer.disk.cache != CacheMode::Unsafe;
        self.choose_fast();
    }

    /// Who sends its requests may go without a word and come back elsewhere, as over a network: from now on what
    /// overlaps a held write waits for it.
    pub fn set_peer_may_vanish(&mut self, may: bool) {
        self.slow.peer_may_vanish = may;
    }

    /// From now on operations take places of this part of the engine's: what finds none waits. Nothing may be in flight.
    pub fn take_places_of(&mut self, share: Arc<Share>) {
        self.issuer.set_share(share);
    }

    /// From now on `wake` is called, from any thread, when something has happened elsewhere that requests of this queue
    /// wait for: [`DiskQueue::retry`] is to be called then. It must not block. Allocates.
    pub fn wake_by(&mut self, wake: impl Fn() + Send + Sync + 'static) {
        let disk = Arc::clone(&self.issuer.disk);
        self.slow.wake_by(&disk, wake);
    }

    /// Its engine has ended, or nobody knows what it does (`is_over` says which): no operation ends here any more, and
    /// others are kept waiting for none. A sync of the disk that was under way has failed. So have all later ones, if a
    /// write may still land for which others have waited: what they write may be gone then.
    #[cold]
    pub fn let_go(&mut self, is_over: bool) {
        let disk = &self.issuer.disk;
        self.slow.syncs.abandon(disk);
        self.slow.erases.abandon(disk);
        let mut was_awaited = false;
        for (slot, slow) in self.slots.in_flight() {
            let (turn, range) = (slow.late.take(), slow.lock.take());
            was_awaited |= turn.is_some_and(|turn| turn.writes) || range.is_some();
            turn.into_iter().for_each(|turn| disk.end_late(&turn));
            range.into_iter().for_each(|range| disk.locks.unlock(range));
            match slow.held.take() {
                Some(held) if held.tried => disk.release_held(held.errno, true),
                Some(held) => {
                    let what = (slot.request.op, slot.request.range);
                    disk.leave_held(held.errno, what, held.since_ns);
                }
                None => {}
            }
        }
        self.slow.held.parked.clear();
        if was_awaited && !is_over {
            disk.flush_has_failed();
        }
        self.give_back_room();
    }

    /// From now on `watcher` is told of the memory that is written, also for requests in flight.
    pub fn watch_memory(&mut self, watcher: Option<Watcher>) {
        self.slots.watcher = watcher;
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            path: self.scheduler.as_ref().map(|scheduler| scheduler.stats()).unwrap_or_default(),
            durable_bytes: self.issuer.durable_bytes,
            ..self.slots.stats
        }
    }

    /// Counts a request that was answered with an error before it could be started.
    #[cold]
    pub fn count_refused(&mut self) {
        self.slots.stats.errors += 1;
        self.slots.stats.refused += 1;
    }

    /// Bytes of bounce memory in use; 0 when nothing is in flight.
    #[must_use]
    pub fn bounce_bytes(&self) -> usize {
        self.slow.bounce_bytes()
    }

    /// True if a request is in flight that reaches beyond `end` bytes. Looks at every slot.
    #[must_use]
    pub fn reaches_beyond(&self, end: u64) -> bool {
        self.slots.reaches_beyond(end)
    }

    /// True if a request is in flight, or done and not taken, whose data lies in one of these ranges
    /// of memory, or whose context says so. Looks at every slot.
    #[must_use]
    pub fn uses(&self, ranges: &[HostRange], by: impl Fn(&C) -> bool) -> bool {
        self.slots.uses(ranges, by)
    }
}
