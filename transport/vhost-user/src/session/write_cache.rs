//! The guest's write cache: who knows whether it is on, and what happens when it is switched.
//!
//! It is not in the rings, and front-ends say it once: QEMU does not repeat it when it reconnects, and
//! a guest that believes in a write-through disk flushes nothing. So whoever serves a guest that was
//! served before has to know, and what is not known counts as off: every write is durable then, which
//! is right for any belief ([ADR 0016](../../../../docs/adr/0016-state-beside-the-rings.md)).

use super::write_cache_known::Known;
use super::{Refusal, Session};
use crate::vring::Vring;
use ringway_core::kill_point;
use ringway_disk::CacheMode;
use ringway_ring::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_F_RING_PACKED};
use ringway_ring::virtqueue::PackedBase;
use tracing::info;

impl Session {
    /// VIRTIO 1.2 §5.2.6.2: without a write cache, or without a way to flush it, every write is
    /// durable before it completes.
    pub(super) fn durable_writes(&self) -> bool {
        !self.export.may_write_back()
            || !self.has(VIRTIO_BLK_F_FLUSH)
            || (self.has(VIRTIO_BLK_F_CONFIG_WCE) && !self.writeback)
    }

    /// The front-end has read the configuration space. One that was told of a change reads it too, but
    /// takes nothing over except for the size (QEMU): its guest goes on in an older belief.
    pub(super) fn write_cache_was_read(&mut self) {
        if !self.announced {
            self.has_asked = true;
            if self.cache_known == Known::Offered {
                self.cache_known = Known::Read;
            }
        }
    }

    /// There is a region now; what it says of the write cache is of the guest that it belongs to.
    pub(super) fn write_cache_of_region(&mut self) {
        if let Some(on) = self.inflight.as_ref().and_then(|inflight| inflight.write_cache()) {
            if self.cache_known != Known::Settled {
                self.cache_known = Known::Settled;
                self.writeback = on && self.export.may_write_back();
                self.export.set_writeback(self.writeback);
            }
        }
    }

    /// Queue `at` is about to run, for the first time in this connection: does its guest begin here, with all of its
    /// queues? One that goes on says that of all: another that was not used yet looks like a new one. Most front-ends
    /// have said by now where each is; of others the rest is found out later.
    fn sees_a_guest(&mut self, at: usize, goes_on: bool) {
        let start = if self.has(VIRTIO_F_RING_PACKED) { PackedBase::START.0 } else { 0 };
        // Some say 0 of new packed rings, too: those are judged when they start.
        let used = |base: u32| base != start && base != 0;
        let waits = |vring: &&Vring| !vring.has_run;
        self.vrings[at].has_run = true;
        self.goes_on |=
            goes_on || self.vrings.iter().filter(waits).any(|vring| vring.base.is_some_and(used));
    }

    /// Queue `at` is about to run. If it is the first time in this connection, and the guest may have
    /// been served before with a cache that nobody here knows of, all writes are durable from now on.
    pub(super) fn settle_write_cache(&mut self, at: usize, goes_on: bool) -> Result<(), Refusal> {
        let first = !self.vrings[at].has_run;
        if first {
            self.sees_a_guest(at, goes_on);
        }
        let known = self.cache_known == Known::Settled
            || (self.cache_known == Known::Read && !self.goes_on)
            || !self.has(VIRTIO_BLK_F_CONFIG_WCE)
            || !self.writeback;
        if first && !known {
            if let Some(pass) = self.export.limits().settled.pass() {
                info!(
                    disk = self.export.disk().name(),
                    suppressed = pass.suppressed,
                    "this guest was served before and nobody knows whether its write cache is on: \
                     every write is durable, until the guest switches it on"
                );
            }
            self.cache_known = Known::Settled;
            self.forgets_cache = true;
            self.switch_off()?;
        }
        self.note_write_cache();
        if first {
            self.judge_failed_flush();
        }
        Ok(())
    }

    /// A flush that had failed does not concern a guest that begins, and goes on concerning one that does not.
    fn judge_failed_flush(&mut self) {
        let disk = self.export.disk();
        let said = if self.goes_on {
            if !std::mem::take(&mut self.forgave) {
                return;
            }
            disk.take_up_failure();
            "another queue of this guest was used before: that a flush had failed is not over"
        } else {
            if !self.has_asked || !disk.forgive_flush() {
                return;
            }
            self.forgave = true;
            "a guest begins afresh: that a flush had failed is over"
        };
        if let Some(pass) = self.export.limits().settled.pass() {
            info!(disk = disk.name(), suppressed = pass.suppressed, "{said}");
        }
    }

    /// The guest sets its write cache (SET_CONFIG).
    ///
    /// Off: noted first, and acknowledged when all that was written before is durable, because the
    /// guest will not flush it any more; also where it was off, as that may have failed then. On:
    /// [`Session::write_cache_was_set`].
    pub(super) fn set_write_cache(&mut self, on: bool) -> Result<(), Refusal> {
        self.cache_known = Known::Settled;
        self.forgets_cache = false;
        self.switching_on = on && self.export.may_write_back();
        if self.switching_on {
            return Ok(());
        }
        if self.writeback {
            self.switch_off()?;
        }
        self.sync_at_rest()
    }

    /// SET_CONFIG was answered. Before that the guest may not know that it has a cache to flush, and if
    /// this process died now its front-end would never say so.
    pub(super) fn write_cache_was_set(&mut self) -> Result<(), Refusal> {
        if !std::mem::take(&mut self.switching_on) || self.writeback {
            return Ok(());
        }
        kill_point!(CacheAnswered);
        self.writeback = true;
        self.note_write_cache();
        self.export.set_writeback(true);
        self.pass_durability_on()
    }

    fn switch_off(&mut self) -> Result<(), Refusal> {
        self.writeback = false;
        self.note_write_cache();
        kill_point!(CacheNoted);
        self.export.set_writeback(false);
        self.pass_durability_on()
    }

    fn note_write_cache(&self) {
        if let Some(inflight) = &self.inflight {
            inflight.note_write_cache(self.writeback);
        }
    }

    /// All workers know before anything is answered.
    fn pass_durability_on(&self) -> Result<(), Refusal> {
        let durable = self.durable_writes();
        for (at, vring) in self.vrings.iter().enumerate() {
            if let Some(id) = vring.worker_queue {
                self.export.worker(at).set_durable(id, durable).map_err(Refusal::Worker)?;
            }
        }
        Ok(())
    }

    /// Lets writes end that began with the cache on, and makes them durable.
    fn sync_at_rest(&mut self) -> Result<(), Refusal> {
        self.stop_all()?;
        let disk = self.export.disk();
        let synced = match disk.cache() {
            CacheMode::Unsafe => Ok(()),
            _ if disk.geometry().read_only => Ok(()),
            _ => self.export.sync(),
        };
        self.start_ready()?;
        synced.map_err(Refusal::Sync)
    }

    /// The connection is over. The next one need not be of the same guest, unless this one has set it.
    pub(super) fn leave_write_cache(&mut self) {
        if self.forgets_cache {
            self.export.set_writeback(true);
        }
    }
}
