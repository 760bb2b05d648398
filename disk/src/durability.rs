//! Flushes that have failed, and what of that outlives this process: see [`crate::state`].

use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::state::{
    STATE_BYTES, STATE_FLUSH_FAILED, STATE_FLUSHING, STATE_KEPT, STATE_PAUSED, State,
};
use crate::storage::Flush;
use ringway_core::file::FileShape;
use ringway_core::kill_point;
use ringway_core::mem::MappingError;
use ringway_core::sync_turn::SyncTurn;
use ringway_image::Journal;
use std::any::Any;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// For whom flushes fail after one that had failed under an earlier process, and what ends that.
const FAIL_UNTIL: &str = "for the guest that it had, until one begins afresh (for NBD clients and Xen guests until the \
                          disk is removed), or somebody who knows what is lost says 'ringway ctl retry --flushes'";

impl Disk {
    /// From now on what has to outlive this process is kept in `file`, of
    /// [`STATE_FILE_BYTES`](crate::STATE_FILE_BYTES) bytes or, without room for a journal,
    /// [`STATE_BYTES`](crate::STATE_BYTES), and what a predecessor has left there counts. The lock of the image has to
    /// be ours: the file belongs to who has it. An image that has tables has them read after this
    /// ([`Disk::map_image`]). `keeper` is dropped when the image is left ([`Disk::leave_state`], or when the disk is
    /// closed), before its lock goes.
    ///
    /// # Errors
    /// That the file cannot be mapped.
    pub fn keep_state(
        &self,
        file: &File,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), MappingError> {
        let state = State::map(file, keeper)?;
        // With a journal that was there and is not taken up, what it holds would be lost.
        let has_journal = FileShape::of(file).is_ok_and(|shape| shape.bytes > STATE_BYTES);
        let wants = has_journal && self.active().unmapped.is_some();
        let kept = Arc::clone(&state.file);
        let journal = wants.then(|| Journal::map(kept, STATE_BYTES)).transpose()?;
        let keep = self.storage.map_state(file)?;
        // It has failed here, whatever others know.
        let ours = self.flush_failed_here();
        if ours {
            state.word().fetch_or(STATE_FLUSH_FAILED, SeqCst);
        }
        let left = state.word().fetch_and(STATE_KEPT, SeqCst);
        let failed = left & STATE_FLUSH_FAILED != 0;
        if failed && !ours {
            self.failure_inherited.store(true, SeqCst);
            self.flush_failed.store(true, SeqCst);
            tracing::warn!(
                disk = self.name(),
                "a flush had failed when this disk was served before: flushes fail {FAIL_UNTIL}"
            );
        }
        let is_unsure = !failed && left & !STATE_KEPT != 0 && self.cache != CacheMode::None;
        if is_unsure {
            tracing::warn!(
                disk = self.name(),
                "a flush was under way when the daemon and its helper died: if it failed, the host \
                 may have told nobody else"
            );
        }
        let mut active = self.active();
        active.is_unsure = is_unsure;
        let _before = active.state.replace(state);
        if wants {
            active.journal = journal.map(Arc::new);
        }
        drop(active);
        if let Some(keep) = keep {
            keep(&|| self.server_may_have_lost());
        }
        Ok(())
    }

    /// The lock of the image is about to go to others, and with it what outlives this process: nothing of that is
    /// read or changed here any more. All that is known of the image has to be in its file
    /// ([`Disk::leave_journal`], [`Disk::forget_image`]), and nothing in flight.
    pub fn leave_state(&self) {
        let mut active = self.active();
        let left = (active.state.take(), active.journal.take());
        drop(active);
        // Who looks after it may have to ask others.
        drop(left);
    }

    /// The tables of its image may lack what only a flush has to find there: whoever serves it next with this state
    /// puts that into them, and a witness sees if a sync fails while this process dies. For a disk that keeps its
    /// state, and whose tables are not read yet.
    pub fn defer_entries(&self) {
        self.active().defers = true;
    }

    /// What an earlier process had answered, and its guest not flushed, may not be in the image: to that guest
    /// flushes fail.
    #[cold]
    pub(crate) fn answered_is_lost(&self) {
        tracing::warn!(
            disk = self.name(),
            "what a guest had written and not flushed may be lost: the daemon that served it was killed with its \
             helper, and others have written the image since, or older contents were put in its place, or this is \
             not its --state-dir; or a sync had failed; or this is a copy of an image that was in use. Flushes fail \
             {FAIL_UNTIL}"
        );
        self.inherit_failure();
    }

    /// What an earlier process had answered, and its guest not flushed, may be lost with the server of this disk:
    /// to that guest flushes fail.
    #[cold]
    pub fn server_may_have_lost(&self) {
        tracing::error!(
            disk = self.name(),
            "writes that the NBD server had answered to an earlier daemon, and that were not flushed, may be lost: \
             that daemon was killed, and nobody can tell whether the server was started anew since. Flushes fail \
             {FAIL_UNTIL}. --cache writethrough leaves nothing to be lost"
        );
        self.inherit_failure();
    }

    /// Flushes fail for the guest that was served before, until one begins afresh.
    #[cold]
    pub(crate) fn inherit_failure(&self) {
        self.keep(STATE_FLUSH_FAILED, true);
        self.failure_inherited.store(true, SeqCst);
        self.flush_failed.store(true, SeqCst);
    }

    fn keep(&self, bit: u64, on: bool) {
        if let Some(state) = &self.active().state {
            if on {
                state.word().fetch_or(bit, SeqCst);
            } else {
                state.word().fetch_and(!bit, SeqCst);
            }
        }
    }

    /// A flush has failed: later ones fail, too, here and in whatever serves this guest next. To be
    /// called before anybody is told.
    #[cold]
    pub fn flush_has_failed(&self) {
        kill_point!(FlushFailing);
        self.keep(STATE_FLUSH_FAILED, true);
        if let Some(image) = self.image() {
            // The host has told it here, and tells its thread nothing.
            image.has_lost();
        }
        self.failure_inherited.store(false, SeqCst);
        self.flush_failed.store(true, SeqCst);
        kill_point!(FlushFailed);
    }

    /// A sync by whoever has the turn begins or is over: whoever serves the disk next is told, if it goes through the
    /// page cache.
    pub(crate) fn set_flushing(&self, under_way: bool) {
        if self.cache != CacheMode::None && !self.has_no_sync() {
            self.keep(STATE_FLUSHING, under_way);
        }
    }

    /// The turn, for whoever else syncs its files, if the host tells only one of them what is lost.
    pub(crate) fn cached_turn(&self) -> Option<Arc<SyncTurn>> {
        (self.cache != CacheMode::None).then(|| Arc::clone(&self.turn))
    }

    /// A guest begins afresh, or somebody answers for the one that goes on: that a flush had failed when the disk was
    /// served before does not concern it. True if one had. A failure that this process saw itself stays as long as the
    /// disk is open.
    pub fn forgive_flush(&self) -> bool {
        let forgiven = self.failure_inherited.swap(false, SeqCst);
        if forgiven {
            self.flush_failed.store(false, SeqCst);
            self.keep(STATE_FLUSH_FAILED, false);
        }
        forgiven
    }

    /// The guest that was forgiven goes on after all: as it was inherited. One that has been seen here meanwhile stays.
    pub fn take_up_failure(&self) {
        if !self.flush_failed.swap(true, SeqCst) {
            self.failure_inherited.store(true, SeqCst);
            self.keep(STATE_FLUSH_FAILED, true);
        }
    }

    /// True if flushes fail, as one has before.
    #[must_use]
    pub fn flushes_fail(&self) -> bool {
        self.flush_failed.load(SeqCst)
    }

    /// True if a flush has failed since the disk was opened.
    #[must_use]
    pub fn flush_failed_here(&self) -> bool {
        self.flush_failed.load(SeqCst) && !self.failure_inherited.load(SeqCst)
    }

    /// True if whoever served it last had it paused.
    #[must_use]
    pub fn was_paused(&self) -> bool {
        self.active()
            .state
            .as_ref()
            .is_some_and(|state| state.word().load(SeqCst) & STATE_PAUSED != 0)
    }

    /// It is served no more, and `guest_ends` if nobody goes on with it: nothing of that is left then.
    pub fn ends(&self, guest_ends: bool) {
        self.keep_paused(false);
        if guest_ends {
            self.keep(STATE_FLUSH_FAILED, false);
        }
    }

    /// True if a pause outlives this process, or need not: nothing is written, or no data is left.
    #[must_use]
    pub fn can_keep_pause(&self) -> bool {
        let needs = self.nature.flush != Flush::Nobody && !self.geometry.read_only;
        !needs || self.active().state.as_ref().is_some_and(State::is_found)
    }

    /// Keeps whether it is paused, for whoever serves it next.
    pub fn keep_paused(&self, paused: bool) {
        self.keep(STATE_PAUSED, paused);
    }
}
