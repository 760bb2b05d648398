//! Ranges of a disk that others keep out of.
//!
//! [`RangeLocks`] keep a read-modify-write apart from writes to the same blocks. Only disks whose file takes larger
//! pieces than a guest's sector ever lock: the rare path. [`LateWrites`] are those that may land after newer ones
//! (`late.rs`).

use ringway_core::ByteRange;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges being written, of all queues of a disk.
#[derive(Debug, Default)]
pub(crate) struct RangeLocks(Mutex<Vec<ByteRange>>);

impl RangeLocks {
    /// Room for `max` ranges at a time.
    pub(crate) fn with_capacity(max: usize) -> Self {
        Self(Mutex::new(Vec::with_capacity(max)))
    }

    /// Locks `range` unless a part of it is locked.
    pub(crate) fn try_lock(&self, range: ByteRange) -> bool {
        let mut held = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let free = !held.iter().any(|other| other.overlaps(range));
        if free {
            held.push(range);
        }
        free
    }

    /// Gives a locked range back.
    pub(crate) fn unlock(&self, range: ByteRange) {
        let mut held = self.0.lock().unwrap_or_else(|e| e.into_inner());
        match held.iter().position(|&other| other == range) {
            Some(at) => drop(held.swap_remove(at)),
            None => debug_assert!(false, "{range:?} was not locked"),
        }
    }

    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// Writes that are late or behind such, and requests that outlive their connections, of all queues of a disk.
#[derive(Debug, Default)]
pub(crate) struct LateWrites {
    list: Mutex<Late>,
    /// How often somebody may have had their turn: nobody need look at the list while this is as before.
    changes: AtomicU64,
}

/// A request's turn among late ones: it waits for the writes before it that it overlaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// 0 if storage was given it before it was late: nobody is before it.
    pub(crate) number: u64,
    pub(crate) range: ByteRange,
    /// Those with higher numbers wait for it.
    pub(crate) writes: bool,
}

impl Turn {
    /// True if it has to wait for the other one.
    pub(crate) fn is_behind(&self, other: &Self) -> bool {
        other.number < self.number && other.range.overlaps(self.range)
    }
}

/// What is known of them.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// Those of writes.
    pub(crate) turns: Vec<Turn>,
    /// The highest number so far.
    pub(crate) last: u64,
    /// In flight of queues that stop.
    pub(crate) outliving: Outliving,
}

/// Requests in flight of queues that stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outliving {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

impl LateWrites {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Late> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those who wait have to look at the list.
    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Release);
    }

    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_exclude_each_other() {
        let locks = RangeLocks::with_capacity(4);
        let range = |offset, len| ByteRange::new(offset, len).unwrap();
        assert!(locks.try_lock(range(0, 4096)));
        assert!(!locks.try_lock(range(4095, 1)));
        assert!(locks.try_lock(range(4096, 4096)));
        locks.unlock(range(0, 4096));
        assert!(locks.try_lock(range(512, 512)));
        assert_eq!(locks.held(), 2);
    }
}
