//! Which parts of a table are loaded: a bounded number, the oldest of which make room.

use crate::table::{Table, page};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;

/// So much memory for words of a table, in bytes: enough for 512 GiB in clusters of 64 KiB. What is
/// asked for beyond it is loaded in the place of what was loaded first.
const WORDS: u64 = 64 << 20;

/// The parts of one table.
#[derive(Debug)]
pub(crate) struct Units {
    /// Clusters of a unit, as a power of two; whole pages of words.
    bits: u32,
    most: usize,
    /// Oldest first.
    loaded: VecDeque<u64>,
    is_loaded: Vec<bool>,
}

/// The smallest unit: what fits a page of memory, as a power of two.
pub(crate) fn page_bits() -> u32 {
    (page() / 8).ilog2()
}

impl Units {
    /// None is loaded of a table. A unit has 2 to the power of `bits` clusters, at least.
    ///
    /// # Errors
    /// That there are too many of them for this machine.
    pub(crate) fn new(table: &Table, bits: u32) -> io::Result<Self> {
        let bits = bits.max(page_bits());
        let count = usize::try_from(table.clusters().div_ceil(1 << bits));
        let most = usize::try_from(WORDS >> (bits + 3)).unwrap_or(0).max(4);
        let is_loaded = vec![false; count.map_err(io::Error::other)?];
        Ok(Self { bits, most, loaded: VecDeque::new(), is_loaded })
    }

    /// The clusters whose words are to be published now, if those of a cluster's unit are not there
    /// yet. The oldest unit is forgotten if there are too many.
    pub(crate) fn load(&mut self, table: &Table, cluster: u64) -> Option<Range<u64>> {
        let unit = cluster >> self.bits;
        let loaded = self.is_loaded.get_mut(usize::try_from(unit).ok()?)?;
        if std::mem::replace(loaded, true) {
            return None;
        }
        if self.loaded.len() == self.most {
            if let Some(oldest) = self.loaded.pop_front() {
                table.forget(oldest << self.bits, 1 << self.bits);
                self.is_loaded[usize::try_from(oldest).unwrap_or(0)] = false;
            }
        }
        self.loaded.push_back(unit);
        table.note_bytes((self.loaded.len() as u64) << (self.bits + 3));
        let first = unit << self.bits;
        Some(first..(first + (1 << self.bits)).min(table.clusters()))
    }

    /// There are so many clusters by now, not fewer than before.
    pub(crate) fn grow(&mut self, clusters: u64) {
        let count = usize::try_from(clusters.div_ceil(1 << self.bits)).unwrap_or(0);
        self.is_loaded.resize(count.max(self.is_loaded.len()), false);
    }

    /// Forgets the words of a cluster's unit.
    pub(crate) fn unload(&mut self, table: &Table, cluster: u64) {
        let unit = cluster >> self.bits;
        if self.has(cluster) {
            table.forget(unit << self.bits, 1 << self.bits);
            self.is_loaded[usize::try_from(unit).unwrap_or(0)] = false;
            self.loaded.retain(|loaded| *loaded != unit);
        }
    }

    /// True if a cluster's words are there.
    pub(crate) fn has(&self, cluster: u64) -> bool {
        let unit = usize::try_from(cluster >> self.bits).unwrap_or(usize::MAX);
        self.is_loaded.get(unit) == Some(&true)
    }
}
