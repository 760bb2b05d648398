//! The judge: what each sector of a disk may hold.
//!
//! Each change that was begun is kept with when it was, until a later one is durable that began after its end. What is
//! read has to be of a change that no other one that was answered has followed; after a power cut, that none has
//! followed which a flush covers.

use std::collections::BTreeMap;

pub(crate) const SECTOR: usize = 512;

/// When a change ends that is under way.
const OPEN: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: u64,
    /// What fills the sector; 0: zeroes.
    value: u64,
    start: u64,
    end: u64,
    /// It has happened: what ended before it began is over.
    sure: bool,
}

/// What a disk may hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    sectors: Vec<Vec<Entry>>,
    /// What was answered before is durable.
    flushed: u64,
    /// When reads began that are under way.
    reading: Vec<u64>,
    /// What was not flushed may be gone: a sync has failed.
    pub(crate) lossy: bool,
    /// Power was cut since all of it was read.
    pub(crate) cut: bool,
    /// Sizes, in sectors, that the disk was to get: it may have one of them though whoever asked was not told.
    resizing: Vec<usize>,
    /// The process is over that had it resized.
    is_over: bool,
    /// Sizes that it may have again after a power cut, until something is flushed.
    undone: Vec<usize>,
    /// What lies from here on may be anything until something is flushed: it was to be cut off.
    cut_off: Option<usize>,
    next: u64,
}

/// The bytes of a sector.
pub(crate) fn sector(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(SECTOR / 8)
}

fn value_of(sector: &[u8]) -> Option<u64> {
    let value = u64::from_le_bytes(*sector.first_chunk()?);
    sector.chunks(8).all(|word| *word == value.to_le_bytes()).then_some(value)
}

fn is_over(list: &[Entry], entry: &Entry, until: u64) -> bool {
    list.iter().any(|by| by.sure && by.end != OPEN && by.end <= until && by.start > entry.end)
}

impl Model {
    /// A disk that holds this, durably.
    pub(crate) fn of(values: impl Iterator<Item = u64>) -> Self {
        let mut model = Self { next: 1, ..Self::default() };
        model.sectors.extend(values.map(|value| vec![settled(value, 0)]));
        model
    }

    pub(crate) fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// The disk is about to have so many sectors.
    pub(crate) fn resize(&mut self, sectors: usize) {
        self.resizing.push(sectors);
        if sectors < self.sectors() {
            self.cut_off = Some(self.cut_off.map_or(sectors, |at| at.min(sectors)));
        }
    }

    /// It has so many sectors, durably; what was added reads as zeroes.
    pub(crate) fn resized(&mut self, sectors: usize, now: u64) {
        self.sectors.resize(sectors, vec![settled(0, now)]);
        self.resizing.clear();
        self.undone.clear();
        self.cut_off = None;
    }

    /// It is found with so many sectors.
    fn find_size(&mut self, sectors: usize, now: u64) -> Result<(), String> {
        let before = self.sectors();
        let may = self.resizing.contains(&sectors) || self.cut && self.undone.contains(&sectors);
        if sectors != before && !may {
            return Err(format!("{sectors} sectors, not {before}"));
        }
        if std::mem::take(&mut self.is_over) {
            self.undone.append(&mut self.resizing);
        }
        self.undone.push(before);
        self.sectors.resize(sectors, vec![settled(0, now)]);
        Ok(())
    }

    /// A change begins; its number and what it writes.
    pub(crate) fn begin(
        &mut self,
        range: std::ops::Range<usize>,
        zeroes: bool,
        now: u64,
    ) -> (u64, u64) {
        self.next += 1;
        let id = self.next;
        let value = if zeroes { 0 } else { id };
        let entry = Entry { id, value, start: now, end: OPEN, sure: false };
        self.sectors[range].iter_mut().for_each(|list| list.push(entry));
        (id, value)
    }

    /// It is answered; whether it has happened, as far as its answer says.
    pub(crate) fn end(&mut self, range: std::ops::Range<usize>, id: u64, sure: bool, now: u64) {
        for entry in self.sectors[range].iter_mut().flatten().filter(|entry| entry.id == id) {
            (entry.end, entry.sure) = (now, sure);
        }
    }

    /// A flush is answered that began then.
    pub(crate) fn flush(&mut self, began: u64) {
        self.flushed = self.flushed.max(began);
        self.undone.clear();
        self.cut_off = None;
        let read = self.reading.iter().copied().min().unwrap_or(OPEN);
        for list in &mut self.sectors {
            let before = list.clone();
            list.retain(|entry| entry.end >= read || !is_over(&before, entry, self.flushed));
        }
    }

    fn may(&self, sector: usize, until: u64) -> Vec<Entry> {
        let list = &self.sectors[sector];
        list.iter().filter(|entry| !is_over(list, entry, until)).copied().collect()
    }

    /// What a read may find that begins now, but for what is yet to come.
    pub(crate) fn before_read(
        &mut self,
        range: std::ops::Range<usize>,
        now: u64,
    ) -> BTreeMap<usize, Vec<u64>> {
        self.reading.push(now);
        let values = |at| self.may(at, OPEN - 1).iter().map(|entry| entry.value).collect();
        range.map(|at| (at, values(at))).collect()
    }

    /// A read is over that began then.
    pub(crate) fn after_read(&mut self, began: u64) {
        if let Some(at) = self.reading.iter().position(|at| *at == began) {
            self.reading.swap_remove(at);
        }
    }

    /// A read is answered that began then.
    pub(crate) fn judge_read(
        &self,
        from: usize,
        found: &[u8],
        mut may: BTreeMap<usize, Vec<u64>>,
        began: u64,
    ) -> Result<(), String> {
        if self.lossy {
            // What it holds is unknown until it is opened anew, and its flushes fail.
            return Ok(());
        }
        for (at, bytes) in (from..).zip(found.chunks(SECTOR)) {
            let may = may.entry(at).or_default();
            let meanwhile = self.sectors[at].iter().filter(|entry| entry.end >= began);
            may.extend(meanwhile.map(|entry| entry.value));
            if !value_of(bytes).is_some_and(|value| may.contains(&value)) {
                return Err(format!(
                    "sector {at} holds {:x?}, and may hold {may:x?}: {:x?}",
                    value_of(bytes),
                    self.sectors[at]
                ));
            }
        }
        Ok(())
    }

    /// The process is over, and what was under way with it.
    pub(crate) fn is_killed(&mut self, now: u64) {
        self.reading.clear();
        self.is_over = true;
        for entry in self.sectors.iter_mut().flatten().filter(|entry| entry.end == OPEN) {
            entry.end = now;
        }
    }

    /// All of the disk is read by whoever opens it next, who has heard that something may be `lost`, or not.
    pub(crate) fn settle(&mut self, found: &[u8], lost: bool, now: u64) -> Result<(), String> {
        let (cut, may_lose) = (self.cut, self.cut || self.lossy);
        if lost && !may_lose {
            return Err("something is said to be lost, and nothing can be".into());
        }
        let until = if may_lose { self.flushed } else { OPEN - 1 };
        self.find_size(found.len() / SECTOR, now)?;
        for (at, bytes) in found.chunks(SECTOR).enumerate() {
            let may = self.may(at, until);
            let value = value_of(bytes);
            let is_cut_off = self.cut_off.is_some_and(|from| at >= from) && value.is_some();
            if !is_cut_off && !may.iter().any(|entry| Some(entry.value) == value) {
                return Err(format!(
                    "sector {at} holds {value:x?} afterwards (lost {lost}, power cut {cut}, lossy {}, flushed {}): {:x?}",
                    self.lossy, self.flushed, self.sectors[at]
                ));
            }
            let entry = settled(value.unwrap_or(0), now);
            if cut {
                self.sectors[at].clear();
            }
            self.sectors[at].push(entry);
        }
        (self.lossy, self.cut) = (false, false);
        Ok(())
    }
}

fn settled(value: u64, now: u64) -> Entry {
    Entry { id: 0, value, start: now, end: now, sure: true }
}
