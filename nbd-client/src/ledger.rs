//! What of an export is answered, and what is durable, over all of its connections (hot).
//!
//! A flush covers what was answered on any connection before it was asked for: only exports that offer
//! `CAN_MULTI_CONN` have more than one. So there is one count for all of them, and whichever connection is
//! lost is judged by it: that a server was started anew may be seen on another one first.

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
}

impl Ledger {
    /// A write is answered: said before its guest hears of it.
    #[inline]
    pub(crate) fn write_answered(&self) {
        self.written.fetch_add(1, SeqCst);
    }

    /// What a flush covers that is asked for from now on.
    pub(crate) fn mark(&self) -> u64 {
        self.written.load(SeqCst)
    }

    /// A flush has succeeded that was asked for at this mark. Whether its guest may be told so is another
    /// matter ([`Ledger::is_lost`]).
    pub(crate) fn flush_answered(&self, mark: u64) {
        self.flushed.fetch_max(mark, SeqCst);
    }

    /// A connection is lost. True if writes may be lost with it, for the first time.
    pub(crate) fn connection_lost(&self) -> bool {
        self.written.load(SeqCst) > self.flushed.load(SeqCst) && !self.lost.swap(true, SeqCst)
    }

    /// True once writes may be lost.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(SeqCst)
    }
}

#[cfg(test)]
mod model;
