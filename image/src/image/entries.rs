//! Entries of an image's tables that wait for a flush, for whoever serves it; and what a failed sync means to them.

use super::Image;
use crate::thread::Work;
use ringway_core::sync_turn::SyncTurn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Image {
    /// True if entries of its tables wait for a flush: before its file is made durable they have to be there
    /// ([`Op::Flush`](ringway_core::Op::Flush) asks for that, or [`Image::write_deferred`]).
    #[inline]
    #[must_use]
    pub fn has_deferred(&self) -> bool {
        self.deferred.load(SeqCst)
    }

    /// Has entries that wait for a flush be in the file, though not durably. Waits for the image's thread.
    ///
    /// # Errors
    /// What the host says; the others wait on.
    pub fn write_deferred(&self) -> io::Result<()> {
        if !self.has_deferred() {
            return Ok(());
        }
        self.in_thread(Work::write_deferred)?
    }

    /// Has all entries be in the file, and the journal be for another image. Nothing may be in flight, and
    /// nothing is written any more.
    ///
    /// # Errors
    /// What the host says.
    pub fn leave_journal(&self) -> io::Result<()> {
        self.in_thread(Work::leave_journal)?
    }

    /// Whether entries of its tables wait for a flush from now on, if it has a journal: they do unless this was
    /// said. Those that do are in the file when it says that they do not. Waits for the image's thread.
    ///
    /// # Errors
    /// What the host says.
    pub fn set_defers(&self, defers: bool) -> io::Result<()> {
        self.in_thread(move |work| work.set_defers(defers))?
    }

    /// A sync of its file has failed, which the host tells once, and whoever serves it next knows that: nothing of
    /// its map is changed any more, and entries that wait for a flush are forgotten, because what they lead to may
    /// be lost.
    pub fn has_lost(&self) {
        self.mailbox.failure.failed.store(true, SeqCst);
        self.mailbox.failure.kept.store(true, SeqCst);
        if let Some((journal, mark)) = &self.entries {
            journal.end_of(mark.load(SeqCst));
        }
    }

    /// From now on its thread makes its files durable when it is its turn, which queues and others take that sync the
    /// same files: for files through the page cache, where the host tells one of them what is lost. The thread waits for
    /// what is under way and for nothing else. Once, before it is served.
    pub fn share_turn(&self, turn: Arc<SyncTurn>) {
        let _ = self.mailbox.failure.turn.set(turn);
    }

    /// Others sync other files from now on: a sync of these answers nobody but its thread, and none of theirs answers that.
    ///
    /// # Errors
    /// That its thread has ended.
    pub fn leave_turn(&self) -> io::Result<()> {
        let failure = Arc::clone(&self.mailbox.failure);
        // Between two syncs.
        self.in_thread(move |_| failure.apart.store(true, SeqCst))
    }

    /// True if a sync of its thread, or of a queue, has failed: what it holds is unknown, and flushes must fail.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.mailbox.failure.failed.load(SeqCst)
    }
}
