//! All that an image refers to, counted once for each reference.

use super::findings::Findings;
use super::window::{REFCOUNT_OFFSET, Window, for_each_block, for_each_word};
use crate::extension::Bitmaps;
use crate::fields::{field, wide};
use crate::header::{Header, L1_BYTES_MAX};
use crate::read_at::ReadAt;
use crate::refused::Refused;
use crate::snapshot::Snapshot;
use ringway_core::host::{File, FileExt};
use std::io;

/// Entries that are looked at in one way through. An image that has more of them names the same tables
/// again and again: an honest one of 2 PiB with clusters of 64 KiB and 7 snapshots has as many.
pub(super) const STEPS_MAX: u64 = 1 << 38;

/// Bits of an L1 or L2 entry, or of a bitmap's table, that hold an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster has this one reference: it may be written in place.
const COPIED: u64 = 1 << 63;
/// The cluster is compressed.
const COMPRESSED: u64 = 1 << 62;
/// It reads as zeroes.
const ZERO: u64 = 1;
/// An entry of a bitmap's table that has no cluster: all its bits are set.
const ALL_ONES: u64 = 1;
/// Bits of an L1 entry that have no meaning.
const L1_RESERVED: u64 = !(COPIED | OFFSET);
/// Bits of an L2 entry that have no meaning, if it is not compressed.
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZERO);
/// Bits of an entry of the refcount table that have no meaning.
const REFCOUNT_RESERVED: u64 = !REFCOUNT_OFFSET;

/// One way through the image.
pub(super) struct Walk<'a, R: ReadAt + ?Sized> {
    pub(super) source: &'a R,
    pub(super) header: &'a Header,
    /// Of the file, in bytes.
    pub(super) file_bytes: u64,
    pub(super) window: Window,
    pub(super) findings: &'a mut Findings,
    /// Only the first way tells what does not depend on the range.
    pub(super) first: bool,
    /// How many entries may be looked at.
    pub(super) steps: u64,
    /// Where COPIED is set if the count says so, instead of telling that it is not.
    pub(super) marks: Option<&'a File>,
}

/// Which L1 table is gone through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table<'a> {
    Active,
    Snapshot(&'a str),
}

impl<R: ReadAt + ?Sized> Walk<'_, R> {
    /// Goes through everything.
    ///
    /// # Errors
    /// The outer one: what reading says. The inner one: too many steps.
    pub(super) fn run(&mut self) -> io::Result<Result<(), Refused>> {
        match self.go() {
            Ok(()) => Ok(Ok(())),
            Err(error) => match error.downcast::<Refused>() {
                Ok(refused) => Ok(Err(refused)),
                Err(error) => Err(error),
            },
        }
    }

    fn go(&mut self) -> io::Result<()> {
        let header = self.header;
        self.window.count(0, header.cluster_bytes());
        self.l1(Table::Active, header.l1_offset, header.l1_entries)?;
        self.snapshots()?;
        // Those that were left by somebody who does not know them are lost anyway.
        if let Some(bitmaps) = header.bitmaps.filter(|bitmaps| bitmaps.consistent) {
            self.bitmaps(bitmaps)?;
        }
        self.refcounts()
    }

    fn step(&mut self) -> io::Result<()> {
        match self.steps.checked_sub(1) {
            Some(left) => {
                self.steps = left;
                Ok(())
            }
            None => Err(io::Error::other(Refused::TooMuch(STEPS_MAX))),
        }
    }

    fn error(&mut self, words: impl FnOnce() -> String) {
        if self.first {
            self.findings.error(words);
        }
    }

    /// Counts a range of the file, unless it is beyond the end.
    fn count(&mut self, at: u64, bytes: u64, what: impl FnOnce() -> String) {
        let cluster = self.header.cluster_bytes();
        let end =
            at.checked_add(bytes).filter(|end| *end < self.file_bytes.saturating_add(cluster));
        match end {
            Some(_) => self.window.count(at, bytes),
            None => self.beyond(|| format!("{} at {at:#x}", what())),
        }
    }

    fn beyond(&mut self, what: impl FnOnce() -> String) {
        self.findings.beyond += u64::from(self.first);
        self.error(|| format!("{} is beyond the end of the file", what()));
    }

    fn aligned(&self, at: u64) -> bool {
        at % self.header.cluster_bytes() == 0
    }

    /// The refcount table and its blocks.
    fn refcounts(&mut self) -> io::Result<()> {
        let (source, header) = (self.source, self.header);
        let bytes = u64::from(header.refcount_table_clusters) << header.cluster_bits;
        self.count(header.refcount_table_offset, bytes, || "the refcount table".into());
        for_each_block(source, header, |block, entry| {
            self.step()?;
            let at = entry & REFCOUNT_OFFSET;
            if entry & REFCOUNT_RESERVED != 0 {
                self.error(|| {
                    format!("refcount block {block}: reserved bits are set ({entry:#x})")
                });
            } else if !self.aligned(at) {
                self.error(|| format!("refcount block {block} at {at:#x} is not aligned"));
            } else {
                self.count(at, header.cluster_bytes(), || format!("refcount block {block}"));
                // Everything else was counted before.
                if let Some(uses) = self.window.uses_at(at).filter(|uses| *uses != 1) {
                    self.findings.error(|| format!("refcount block {block} is used {uses} times"));
                }
            }
            Ok(())
        })
    }

    /// An L1 table and all that it leads to.
    fn l1(&mut self, table: Table<'_>, offset: u64, entries: u32) -> io::Result<()> {
        let (source, header) = (self.source, self.header);
        self.count(offset, u64::from(entries) * 8, || format!("{} L1 table", table.words()));
        for_each_word(source, offset, entries.into(), |index, entry| {
            self.step()?;
            if entry == 0 {
                return Ok(());
            }
            let at = entry & OFFSET;
            let words = || format!("{} L1 entry {index} ({entry:#x})", table.words());
            if entry & L1_RESERVED != 0 {
                self.error(|| format!("{}: reserved bits are set", words()));
            }
            if at == 0 {
                self.error(|| format!("{}: it has no table, and is not 0", words()));
                return Ok(());
            }
            if !self.aligned(at) {
                self.error(|| format!("{}: the L2 table is not aligned", words()));
                return Ok(());
            }
            if at >= self.file_bytes {
                self.beyond(|| format!("{}: the L2 table", words()));
                return Ok(());
            }
            self.window.count(at, header.cluster_bytes());
            if table == Table::Active {
                self.copied(offset + index * 8, entry, words)?;
            }
            self.l2(table, at)
        })
    }

    /// COPIED has to be set if there is one reference, and only then. The entry is at `place`.
    fn copied(&mut self, place: u64, entry: u64, words: impl FnOnce() -> String) -> io::Result<()> {
        let stored = self.window.stored_at(entry & OFFSET);
        let Some(stored) = stored.filter(|one| (*one == 1) != (entry & COPIED != 0)) else {
            return Ok(());
        };
        match self.marks {
            Some(file) if stored == 1 => file.write_all_at(&(entry | COPIED).to_be_bytes(), place),
            _ => {
                let is = if entry & COPIED == 0 { "is not" } else { "is" };
                self.findings.error(|| {
                    format!("{}: COPIED {is} set, but the refcount is {stored}", words())
                });
                Ok(())
            }
        }
    }

    fn l2(&mut self, table: Table<'_>, offset: u64) -> io::Result<()> {
        let (source, header) = (self.source, self.header);
        let mut follows = None;
        for_each_word(source, offset, header.l2_entries(), |index, entry| {
            self.step()?;
            if entry == 0 {
                return Ok(());
            }
            let words =
                || format!("{} L2 entry {index} of {offset:#x} ({entry:#x})", table.words());
            if entry & COMPRESSED != 0 {
                self.compressed(table, entry, words);
                return Ok(());
            }
            if entry & L2_RESERVED != 0 {
                self.error(|| format!("{}: reserved bits are set", words()));
            }
            let at = entry & OFFSET;
            // In a data file, offset 0 is a cluster like any other.
            let external = header.data_file.is_some();
            if at == 0 && !(external && entry & COPIED != 0) {
                return Ok(());
            }
            if table == Table::Active && self.first {
                self.findings.allocated += 1;
                let fragmented = follows.is_some_and(|follows| follows != at);
                self.findings.fragmented += u64::from(fragmented);
                follows = Some(at + header.cluster_bytes());
            }
            if !self.aligned(at) {
                self.error(|| format!("{}: the data cluster is not aligned", words()));
            } else if external {
                if table == Table::Active && entry & COPIED == 0 {
                    self.error(|| format!("{}: COPIED is not set, in a data file", words()));
                }
            } else {
                self.count(at, header.cluster_bytes(), words);
                if table == Table::Active && at < self.file_bytes {
                    self.copied(offset + index * 8, entry, words)?;
                }
            }
            Ok(())
        })
    }

    fn compressed(&mut self, table: Table<'_>, entry: u64, words: impl Fn() -> String) {
        if table == Table::Active && self.first {
            self.findings.allocated += 1;
            self.findings.compressed += 1;
            self.findings.fragmented += 1;
        }
        if entry & COPIED != 0 {
            self.error(|| format!("{}: COPIED is set on a compressed cluster", words()));
        }
        if self.header.data_file.is_some() {
            self.error(|| format!("{}: a data file has no compressed clusters", words()));
            return;
        }
        let (at, bytes) = compressed_range(entry, self.header.cluster_bits);
        self.count(at, bytes, words);
    }

    fn snapshots(&mut self) -> io::Result<()> {
        let at = self.header.snapshots_offset;
        if self.header.snapshots == 0 && at != 0 {
            self.error(|| format!("there are no snapshots, but a table of them at {at:#x}"));
        }
        let read = Snapshot::read_all(self.source, self.header, self.file_bytes)?;
        let (snapshots, bytes) = match read {
            Ok(read) => read,
            Err(refused) => {
                self.error(|| format!("the snapshot table: {refused}"));
                return Ok(());
            }
        };
        self.count(self.header.snapshots_offset, bytes, || "the snapshot table".into());
        for snapshot in &snapshots {
            let (id, at) = (&snapshot.id, snapshot.l1_offset);
            let bytes = u64::from(snapshot.l1_entries) * 8;
            let end = at.checked_add(bytes);
            if at == 0 && snapshot.l1_entries > 0
                || !self.aligned(at)
                || bytes > L1_BYTES_MAX
                || end.is_none_or(|end| end > self.file_bytes)
            {
                self.error(|| format!("snapshot {id:?}: its L1 table at {at:#x} cannot be one"));
                continue;
            }
            self.l1(Table::Snapshot(id), at, snapshot.l1_entries)?;
        }
        Ok(())
    }

    fn bitmaps(&mut self, bitmaps: Bitmaps) -> io::Result<()> {
        let (source, cluster) = (self.source, self.header.cluster_bytes());
        let at = bitmaps.directory_offset;
        let end = at.checked_add(bitmaps.directory_bytes);
        if !self.aligned(at) || end.is_none_or(|end| end > self.file_bytes) {
            self.error(|| format!("the directory of bitmaps at {at:#x} cannot be one"));
            return Ok(());
        }
        self.count(at, bitmaps.directory_bytes, || "the directory of bitmaps".into());
        let mut from = 0;
        for number in 0..bitmaps.count {
            let mut fixed = [0; BitmapEntry::FIXED];
            source.read_padded(&mut fixed, at + from)?;
            let entry = BitmapEntry::of(&fixed);
            from += entry.bytes();
            let (table, entries) = (entry.table, entry.entries);
            let end = table.checked_add(entries * 8);
            let fits = end.is_some_and(|end| end <= self.file_bytes);
            let may_be = entry.may_be(self.header) && self.aligned(table) && fits;
            if from > bitmaps.directory_bytes || !may_be {
                self.error(|| format!("bitmap {number}: its entry or its table cannot be one"));
                return Ok(());
            }
            self.count(table, entries * 8, || format!("the table of bitmap {number}"));
            for_each_word(source, table, entries, |_, word| {
                self.step()?;
                let at = word & OFFSET;
                if word & !(OFFSET | ALL_ONES) != 0 || !self.aligned(at) {
                    self.error(|| format!("bitmap {number}: {word:#x} in its table cannot be"));
                } else if at != 0 {
                    self.count(at, cluster, || format!("a cluster of bitmap {number}"));
                }
                Ok(())
            })?;
        }
        if from != bitmaps.directory_bytes {
            let said = bitmaps.directory_bytes;
            self.error(|| format!("the directory of bitmaps has {from} bytes, not {said}"));
        }
        Ok(())
    }
}

/// An entry of the directory of bitmaps, before its extra data and name.
struct BitmapEntry {
    table: u64,
    /// Of the table.
    entries: u64,
    flags: u32,
    kind: u8,
    granularity_bits: u8,
    name_bytes: u16,
    extra_bytes: u32,
}

impl BitmapEntry {
    const FIXED: usize = 24;
    /// It was not closed: its content means nothing.
    const IN_USE: u32 = 1;
    /// Flags that have a meaning: in use, automatic, extra data that may be ignored.
    const FLAGS: u32 = 7;
    /// A bitmap of what was written, the only kind.
    const DIRTY_TRACKING: u8 = 1;
    /// Bytes of a name: QEMU's limit.
    const NAME_MAX: u16 = 1023;

    fn of(fixed: &[u8; Self::FIXED]) -> Self {
        Self {
            table: wide(fixed, 0, "").unwrap_or(0),
            entries: u64::from(field(fixed, 8, "").unwrap_or(0)),
            flags: field(fixed, 12, "").unwrap_or(0),
            kind: fixed[16],
            granularity_bits: fixed[17],
            name_bytes: u16::from_be_bytes([fixed[18], fixed[19]]),
            extra_bytes: field(fixed, 20, "").unwrap_or(0),
        }
    }

    /// With all that belongs to it.
    fn bytes(&self) -> u64 {
        let rest = u64::from(self.name_bytes) + u64::from(self.extra_bytes);
        (Self::FIXED as u64 + rest).next_multiple_of(8)
    }

    /// False if it was damaged, or is read from the wrong place. A table that is too short for its disk
    /// would make leaks of what it does not name any more.
    fn may_be(&self, header: &Header) -> bool {
        let bits = u128::from(self.entries) << (header.cluster_bits + 3);
        let covers = bits << self.granularity_bits.min(63) >= u128::from(header.virtual_size);
        self.flags & !Self::FLAGS == 0
            && self.kind == Self::DIRTY_TRACKING
            && self.granularity_bits <= 63
            && (1..=Self::NAME_MAX).contains(&self.name_bytes)
            && self.table != 0
            && (covers || self.flags & Self::IN_USE != 0)
    }
}

impl Table<'_> {
    fn words(self) -> String {
        match self {
            Self::Active => "active".into(),
            Self::Snapshot(id) => format!("snapshot {id:?}:"),
        }
    }
}

/// Where the sectors of a compressed cluster are: the offset, and the bytes from there to the end of
/// its last sector.
fn compressed_range(entry: u64, cluster_bits: u32) -> (u64, u64) {
    let offset_bits = 62 - (cluster_bits - 8);
    let at = entry & ((1 << offset_bits) - 1);
    let sectors = ((entry & !(COPIED | COMPRESSED)) >> offset_bits) + 1;
    (at, sectors * 512 - at % 512)
}
