//! What of an export is answered, and what is durable, over all of its connections (hot).
//!
//! A flush covers what was answered on any connection before it was asked for: only exports that offer
//! `CAN_MULTI_CONN` have more than one. So there is one count for all of them, and whichever connection is
//! lost is judged by it: that a server was started anew may be seen on another one first.
//!
//! A server may be started anew while nobody is connected, too, so the counts outlive the process where somebody
//! keeps a page for them ([`Counts`]).

use ringway_core::mem::{Mapping, MappingError};
use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// Answered and durable writes of an export, counted.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// Writes that were answered and are not durable by themselves.
    written: AtomicU64,
    /// Of these the ones that a flush has made durable.
    flushed: AtomicU64,
    /// Some were answered and not flushed, and may be lost: no flush succeeds any more.
    lost: AtomicBool,
    /// The same for a successor of this process.
    kept: OnceLock<Counts>,
}

impl Ledger {
    /// From now on the counts outlive the process. Before anything is written.
    ///
    /// `lost` is called if writes that a predecessor had answered may be lost: its connections have ended, and
    /// nobody knows whether the server is the same one. What it keeps has to be kept when it returns.
    pub(crate) fn keep(&self, counts: Counts, lost: impl FnOnce()) {
        if counts.may_be_lost() {
            lost();
        }
        [Counts::LOST, Counts::WRITTEN, Counts::FLUSHED]
            .into_iter()
            .for_each(|at| counts.word(at).store(0, SeqCst));
        // Whoever owns the export does it once.
        let _ = self.kept.set(counts);
    }

    /// A write is answered: said before its guest hears of it.
    #[inline]
    pub(crate) fn write_answered(&self) {
        let written = self.written.fetch_add(1, SeqCst) + 1;
        if let Some(counts) = self.kept.get() {
            counts.word(Counts::WRITTEN).fetch_max(written, SeqCst);
        }
    }

    /// What a flush covers that is asked for from now on.
    pub(crate) fn mark(&self) -> u64 {
        self.written.load(SeqCst)
    }

    /// A flush has succeeded that was asked for at this mark. Whether its guest may be told so is another
    /// matter ([`Ledger::is_lost`]).
    pub(crate) fn flush_answered(&self, mark: u64) {
        self.flushed.fetch_max(mark, SeqCst);
        if let Some(counts) = self.kept.get() {
            counts.word(Counts::FLUSHED).fetch_max(mark, SeqCst);
        }
    }

    /// A connection is lost. True if writes may be lost with it, for the first time.
    pub(crate) fn connection_lost(&self) -> bool {
        let lost = self.is_owed();
        if let Some(counts) = self.kept.get().filter(|_| lost) {
            counts.word(Counts::LOST).store(1, SeqCst);
        }
        lost && !self.lost.swap(true, SeqCst)
    }

    /// True once writes may be lost.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(SeqCst)
    }

    /// True if writes are answered and not flushed.
    pub(crate) fn is_owed(&self) -> bool {
        self.written.load(SeqCst) > self.flushed.load(SeqCst)
    }
}

/// The counts of an export in three words of a file that outlives the process. Nothing that is stored there
/// needs a system call.
#[derive(Debug)]
pub struct Counts(Mapping);

impl Counts {
    /// How many bytes of the file they take.
    pub const BYTES: u64 = 24;

    const WRITTEN: usize = 0;
    const FLUSHED: usize = 8;
    const LOST: usize = 16;

    /// Those at `offset`, a multiple of 8, of a file that is long enough.
    ///
    /// # Errors
    /// That it cannot be mapped.
    ///
    /// # Panics
    /// If `offset` is no multiple of 8.
    pub fn map(file: &File, offset: u64) -> Result<Self, MappingError> {
        assert!(offset % 8 == 0, "words are aligned");
        Ok(Self(Mapping::of_file(file, offset, Self::BYTES)?))
    }

    /// True if writes were answered of which nobody knows whether they are durable, once the process that
    /// counted them has ended.
    #[must_use]
    pub fn may_be_lost(&self) -> bool {
        let [written, flushed, lost] =
            [Self::WRITTEN, Self::FLUSHED, Self::LOST].map(|offset| self.word(offset).load(SeqCst));
        lost != 0 || written > flushed
    }

    /// `offset` is one of those above.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: within the mapping, which has `BYTES` bytes, aligned, because it begins at a multiple of 8
        // of a page, and living as long as `self`; it is only touched atomically.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr(self.0.at(offset).cast())
        }
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
