//! With a journal, entries of L2 wait there until a guest flushes.
//!
//! ```text
//! the header has the mark ─► data ─► the journal ─► table ─► answers
//! flush ─ sync, if they replace others ─► L2 ─► the journal is empty ─► the flush goes on
//! ```
//!
//! What was answered is in the journal, and so survives a kill: whoever opens the image next puts it into the
//! tables ([`crate::journal::replay`]). A power cut takes it, as it may take whatever was not flushed: until then
//! no table says anything of it. So neither a sync nor a write of tables is owed before the answer. An L2 table
//! that is new, or shared with a snapshot, is written as without a journal: its L1 entry leads to it at once.

use super::{Writer, sorted, words};
use crate::journal::{CAPACITY, Journal, MARK_BITS, set_mark};
use crate::l2::Unwritten;
use crate::layout::{OFFSET, corrupt};
use crate::map::Map;
use std::io;
use std::sync::atomic::Ordering::SeqCst;

impl Writer {
    /// As [`Writer::commit`], but what it can be is put into the journal, for the writes of a guest.
    ///
    /// # Errors
    /// As [`Writer::commit`].
    pub(crate) fn commit_batch(&mut self, map: &mut Map) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let has_journal = self.journal.is_some() && self.defers;
        let defers = has_journal && self.l1.is_empty() && !self.pending.is_empty();
        if !defers || self.pending.len() > CAPACITY {
            return self.commit(map);
        }
        let pending = sorted(std::mem::take(&mut self.pending));
        let words = words(map, &pending);
        let deferred = self.begin_mark(map).and_then(|()| {
            self.name_loose(map, &pending);
            self.defer(map, &words)
        });
        match deferred {
            Ok(()) => self.publish(map, pending),
            Err(error) => {
                self.abandon(map, pending);
                return Err(error);
            }
        }
        Ok(())
    }

    fn defer(&mut self, map: &mut Map, words: &[(u64, u64)]) -> io::Result<()> {
        let Some(journal) = self.journal.clone() else { return Err(corrupt()) };
        if journal.len() + words.len() > CAPACITY {
            let written = self.write_deferred(map);
            // Some of them may have found no room in the tables.
            if journal.len() + words.len() > CAPACITY {
                return written.and(Err(corrupt()));
            }
        }
        let tables = map.layers.top();
        if !journal.append(words) {
            return Err(corrupt());
        }
        tables.defer(words);
        Ok(())
    }

    /// Whether entries are in the journal and not in the file.
    pub(crate) fn has_deferred(map: &mut Map) -> bool {
        !map.layers.top().deferred().is_empty()
    }

    /// Has all entries be in the file, though not durably.
    ///
    /// # Errors
    /// What the host says first; those that could not be written stay in the journal.
    pub(crate) fn write_deferred(&mut self, map: &mut Map) -> io::Result<()> {
        if !Self::has_deferred(map) {
            return Ok(());
        }
        if self.is_broken() {
            return Err(corrupt());
        }
        self.sync_replaced()?;
        self.write_entries(map, &[]).into_result()
    }

    /// Has the header name the journal, if there is one to be used and it does not yet.
    ///
    /// # Errors
    /// What the host says. The header may have the mark then, or get it later, and the journal has it: nothing is in that
    /// before this succeeds, by the same mark.
    pub(super) fn begin_mark(&mut self, map: &mut Map) -> io::Result<()> {
        let Some(journal) = self.journal.clone().filter(|_| self.defers) else { return Ok(()) };
        if self.mark.load(SeqCst) != 0 {
            return Ok(());
        }
        if self.begun == 0 {
            self.begun = journal.begin();
        }
        let tables = map.layers.top();
        let file = tables.file.clone();
        set_mark(&file, &mut tables.shape, self.begun).map_err(|not| not.error)?;
        self.refcounts.loose.begin(&journal);
        self.mark.store(std::mem::take(&mut self.begun), SeqCst);
        Ok(())
    }

    /// The journal, if the header names it.
    fn marked_journal(&self) -> Option<&Journal> {
        self.journal.as_deref().filter(|_| self.mark.load(SeqCst) != 0)
    }

    /// `words` are about to be written to the tables, among them `others` that are not in the journal. Gives the entry
    /// that the file is known to have before that.
    ///
    /// # Errors
    /// What the host says; nothing has changed then.
    pub(super) fn begin_writing(
        &self,
        map: &mut Map,
        words: &[(u64, u64)],
        others: bool,
    ) -> io::Result<Option<(u64, u64)>> {
        let Some(journal) = self.marked_journal() else { return Ok(None) };
        let before = journal.last_written();
        if !words.iter().any(leads) {
            self.renew_mark(map)?;
        }
        if others {
            journal.forget_last_written();
        }
        Ok(before)
    }

    /// `words` are in the tables, but for those that are unwritten; `before` is what [`Writer::begin_writing`] gave. The
    /// journal keeps what is still deferred, and says which entry tells these tables from what they were before
    /// ([`Journal::written`]): one that leads somewhere, which no entry did before. Without one the mark tells it.
    pub(super) fn end_writing(
        &self,
        map: &mut Map,
        words: &[(u64, u64)],
        before: Option<(u64, u64)>,
        unwritten: &Unwritten,
    ) {
        let Some(journal) = self.marked_journal() else { return };
        let mut written = words.iter().filter(|(cluster, _)| unwritten.has_written(*cluster));
        let mut last = written.rfind(|word| leads(word)).copied();
        if last.is_none() && unwritten.has_kept_all(words) {
            last = before;
        } else if last.is_none() && words.iter().any(leads) {
            // If it keeps its mark, a copy of the file from before passes for the file. Why some of them could not
            // be written is told.
            let _ = self.renew_mark(map);
        }
        let deferred = map.layers.top().deferred();
        match deferred.is_empty() {
            true => journal.written(last),
            false => journal.keep(last, |cluster| deferred.contains_key(&cluster)),
        }
    }

    /// Has the header name the journal by another mark from now on, if it names it: by the one that it has, a copy
    /// of the file from before could be taken for the file. Called before reference counts change.
    ///
    /// # Errors
    /// What the host says; either mark is that of the journal then.
    pub(super) fn renew_mark(&self, map: &mut Map) -> io::Result<()> {
        let Some(journal) = self.marked_journal() else { return Ok(()) };
        if !journal.is_used() {
            // A queue has heard that what it led to is lost.
            return Err(corrupt());
        }
        let tables = map.layers.top();
        let (file, before) = (tables.file.clone(), tables.shape.autoclear & MARK_BITS);
        let renewed = set_mark(&file, &mut tables.shape, journal.next_mark(before));
        renewed.map_err(|not| not.error)?;
        journal.marked(before);
        Ok(())
    }

    /// Has all entries be in the file, and its header say so, for whoever opens it next.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn leave_journal(&mut self, map: &mut Map) -> io::Result<()> {
        let written = self.write_deferred(map);
        if written.is_err() && !(self.is_broken() && self.refcounts.failure.kept.load(SeqCst)) {
            return written;
        }
        // That entries are lost is known by now, if they are: the mark would say no more.
        if self.mark.load(SeqCst) != 0 || self.begun != 0 {
            let tables = map.layers.top();
            let file = tables.file.clone();
            set_mark(&file, &mut tables.shape, 0).map_err(|not| self.not_replaced(not))?;
            self.end_journal();
            self.mark.store(0, SeqCst);
            self.begun = 0;
            // Nobody knows of those any more that are taken ahead: a kill would lose them.
            self.refcounts.loose.end();
            self.free_reserve();
        }
        written
    }

    /// Counts the clusters no more that were taken ahead.
    fn free_reserve(&mut self) {
        if self.is_broken() {
            return;
        }
        let mut unused: Vec<u64> = std::mem::take(&mut self.reserve).into();
        self.reserve_ready = 0;
        unused.sort_unstable();
        if let Err(error) = self.refcounts.free(&mut unused) {
            tracing::warn!("clusters that are not used could not be given back: {error}");
        }
        self.freed.append(&mut unused);
    }

    /// The journal holds nothing of this image any more. It may hold entries of another one by now.
    pub(crate) fn end_journal(&self) {
        for mark in [self.mark.load(SeqCst), self.begun] {
            self.journal.iter().for_each(|journal| journal.end_of(mark));
        }
    }

    /// Whether entries wait for a flush from now on. Those that do are in the file afterwards.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn set_defers(&mut self, map: &mut Map, defers: bool) -> io::Result<()> {
        self.defers = defers;
        if defers { Ok(()) } else { self.leave_journal(map) }
    }
}

/// Whether an entry leads anywhere.
fn leads((_, word): &(u64, u64)) -> bool {
    word & OFFSET != 0
}
