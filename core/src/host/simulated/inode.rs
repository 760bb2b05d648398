//! What of a file is in the page cache, and what is durable.

use std::collections::BTreeMap;

pub(super) const SECTOR: usize = 512;

/// What a power cut leaves of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Losses {
    /// All of it is lost.
    All,
    /// Each sector has any of the contents that it had.
    Some,
    /// Nothing is lost.
    None,
}

/// A file of a simulated disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Inode {
    /// As it reads.
    pub(super) cache: Vec<u8>,
    /// Of each sector that is dirty, the contents that it had since it was durable, and that with which it was.
    former: BTreeMap<usize, Vec<Vec<u8>>>,
    /// The sizes that it had since.
    sizes: Vec<usize>,
    /// What is durable of sectors whose write-back has failed: the cache says otherwise, and is clean.
    lost: BTreeMap<usize, Vec<u8>>,
    /// Syncs that have failed.
    pub(super) errors: u64,
    /// When it was written last.
    pub(super) written: u64,
}

impl Inode {
    pub(super) fn error_count(&self) -> u64 {
        self.errors
    }

    fn sector(&self, nth: usize) -> Vec<u8> {
        let from = (nth * SECTOR).min(self.cache.len());
        let mut sector = self.cache[from..(from + SECTOR).min(self.cache.len())].to_vec();
        sector.resize(SECTOR, 0);
        sector
    }

    /// A range is about to change.
    fn dirty(&mut self, at: usize, len: usize) {
        if len == 0 {
            return;
        }
        for nth in at / SECTOR..=(at + len - 1) / SECTOR {
            let now = self.sector(nth);
            let former = self.former.entry(nth).or_default();
            if let Some(durable) = self.lost.remove(&nth) {
                former.push(durable);
            }
            former.push(now);
        }
    }

    pub(super) fn resize(&mut self, len: usize) {
        if len == self.cache.len() {
            return;
        }
        self.sizes.push(self.cache.len());
        if len < self.cache.len() {
            self.dirty(len, self.cache.len() - len);
        }
        self.cache.resize(len, 0);
    }

    pub(super) fn write(&mut self, bytes: &[u8], at: usize) {
        if bytes.is_empty() {
            return;
        }
        self.resize(self.cache.len().max(at + bytes.len()));
        self.dirty(at, bytes.len());
        self.cache[at..at + bytes.len()].copy_from_slice(bytes);
        self.written += 1;
    }

    pub(super) fn synced(&mut self) {
        self.former.clear();
        self.sizes.clear();
    }

    /// A write-back fails: some sectors are written all the same, and of the others nothing is tried again.
    pub(super) fn lose(&mut self, below: &mut dyn FnMut(u64) -> u64) {
        for (nth, former) in std::mem::take(&mut self.former) {
            if below(2) == 0 {
                let which = usize::try_from(below(former.len() as u64)).unwrap_or(0);
                self.lost.insert(nth, former[which].clone());
            }
        }
        self.sizes.clear();
        self.errors += 1;
    }

    /// What the cache has of sectors that could not be written back is dropped.
    pub(super) fn evict(&mut self) {
        self.evict_some(&mut || true);
    }

    /// The same of those of which this says so.
    pub(super) fn evict_some(&mut self, is_dropped: &mut dyn FnMut() -> bool) {
        for (nth, durable) in std::mem::take(&mut self.lost) {
            if is_dropped() {
                self.put(nth, &durable);
            } else {
                self.lost.insert(nth, durable);
            }
        }
    }

    /// Whether the cache has something that storage lacks and is not to be told.
    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    fn put(&mut self, nth: usize, sector: &[u8]) {
        let from = nth * SECTOR;
        if from < self.cache.len() {
            let end = (from + SECTOR).min(self.cache.len());
            self.cache[from..end].copy_from_slice(&sector[..end - from]);
        }
    }

    pub(super) fn cut_power(&mut self, losses: Losses, below: &mut dyn FnMut(u64) -> u64) {
        self.evict();
        let sizes = std::mem::take(&mut self.sizes);
        if losses != Losses::None && !sizes.is_empty() {
            let which = match losses {
                Losses::All => 0,
                _ => usize::try_from(below(sizes.len() as u64 + 1)).unwrap_or(0),
            };
            let size = sizes.get(which).copied().unwrap_or(self.cache.len());
            self.cache.resize(size, 0);
        }
        for (nth, former) in std::mem::take(&mut self.former) {
            let which = match losses {
                Losses::All => 0,
                Losses::Some => usize::try_from(below(former.len() as u64 + 1)).unwrap_or(0),
                Losses::None => former.len(),
            };
            if let Some(sector) = former.get(which) {
                self.put(nth, sector);
            }
        }
    }
}
