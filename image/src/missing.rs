//! Files whose end is missing: half a copy, a file system that was full, a crash. What tables lead to behind the
//! end of a file is lost, and must not look like zeroes.
//!
//! Whether that may be is told by the counts: they reach a cluster or more beyond the end. Then tables are gone
//! through: what no entry leads to is counted and not used, and nothing is lost with it.
//!
//! Source: the public specification of qcow2.

use crate::budget::Budget;
use crate::file::BlockFile;
use crate::header::{Header, L1_BYTES_MAX};
use crate::layout::{Entry, OFFSET, Shape, words};
use crate::refcounts::last_counted;
use crate::snapshot::Snapshot;
use std::collections::HashSet;
use std::fmt;
use std::io;
use std::ops::Range;

/// So many ranges are named.
const RANGES: usize = 4;

/// What is missing of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Bytes of the file that is too short.
    end: u64,
    /// Of the disk, in bytes: the first ranges, and how many there are.
    ranges: Vec<Range<u64>>,
    more: usize,
    bytes: u64,
    /// What other tables lead to.
    of_snapshots: bool,
    /// Reference counts.
    of_counts: bool,
}

impl Missing {
    /// What is missing of the image in `file`, which has `end` bytes. Its data may be in another file, of
    /// `data_end` bytes.
    ///
    /// # Errors
    /// What reading says, or that it would be too much.
    pub(crate) fn of(
        file: &BlockFile,
        shape: &Shape,
        end: u64,
        data_end: Option<u64>,
        budget: &mut Budget,
    ) -> io::Result<Option<Self>> {
        let is_short = |end: &u64| *end < shape.size;
        let counted = last_counted(file, shape, end, budget)?;
        if counted.is_some_and(|last| last < end) && !data_end.as_ref().is_some_and(is_short) {
            return Ok(None);
        }
        let missing = Self {
            end: data_end.filter(is_short).unwrap_or(end),
            of_counts: counted.is_none(),
            ..Self::default()
        };
        let data_end = data_end.unwrap_or(end);
        let whole = HashSet::new();
        let mut walk = Walk { file, shape, end, data_end, missing, is_active: true, whole, budget };
        walk.l1(shape.l1_offset, shape.l1_entries)?;
        walk.snapshots()?;
        let found = walk.missing;
        let is_any = found.bytes > 0 || found.of_snapshots || found.of_counts;
        Ok(is_any.then_some(found))
    }

    /// A range of the disk is lost, behind those before.
    fn add(&mut self, range: Range<u64>) {
        self.bytes += range.end - range.start;
        let is_full = self.ranges.len() == RANGES;
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start && self.more == 0 => last.end = range.end,
            _ if is_full => self.more += 1,
            _ => self.ranges.push(range),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the end of the file is missing, which has {} bytes", self.end)?;
        if self.bytes > 0 {
            let ranges = self.ranges.iter().map(|range| format!("{}..{}", range.start, range.end));
            let ranges = ranges.collect::<Vec<_>>().join(", ");
            let more = if self.more > 0 { ", …" } else { "" };
            write!(f, ": {} bytes of the disk are lost ({ranges}{more})", self.bytes)?;
        }
        if self.of_snapshots {
            write!(f, ", and content of internal snapshots")?;
        }
        if self.of_counts {
            write!(f, ", and reference counts")?;
        }
        Ok(())
    }
}

struct Walk<'a> {
    file: &'a BlockFile,
    shape: &'a Shape,
    end: u64,
    data_end: u64,
    missing: Missing,
    /// These are the tables of the disk.
    is_active: bool,
    /// L2 tables that lead nowhere behind the end. Snapshots share them with the disk.
    whole: HashSet<u64>,
    budget: &'a mut Budget,
}

impl Walk<'_> {
    fn l1(&mut self, offset: u64, entries: u32) -> io::Result<()> {
        self.budget.take(entries.into())?;
        let mut bytes = vec![0; 8 * entries as usize];
        self.file.read_or_zero(&mut bytes, offset)?;
        let mut table = vec![0; 1 << self.shape.cluster_bits];
        for (index, word) in (0_u64..).zip(words(&bytes)) {
            let first = index << self.shape.l2_bits();
            match word & OFFSET {
                0 => {}
                at if at >= self.end => self.lose(first..first + (1 << self.shape.l2_bits())),
                at if self.whole.contains(&at) => {}
                at => {
                    self.budget.take(1 << self.shape.l2_bits())?;
                    self.file.read_or_zero(&mut table, at)?;
                    if self.is_l2_whole(first, &table) {
                        self.whole.insert(at);
                    }
                }
            }
            if !self.is_active && self.missing.of_snapshots {
                // No more is told of them.
                break;
            }
        }
        Ok(())
    }

    /// True if nothing is lost that a table leads to.
    fn is_l2_whole(&mut self, first: u64, table: &[u8]) -> bool {
        let mut is_whole = true;
        for (cluster, word) in (first..).zip(words(table)) {
            let is_lost = match self.shape.entry(word) {
                Ok(Entry::Data { host, .. }) => host >= self.data_end,
                // Its last sector need not be whole.
                Ok(Entry::Compressed { host, bytes }) => {
                    host + bytes > self.end.saturating_add(511)
                }
                _ => false,
            };
            if is_lost {
                self.lose(cluster..cluster + 1);
                is_whole = false;
            }
        }
        is_whole
    }

    fn lose(&mut self, clusters: Range<u64>) {
        if !self.is_active {
            self.missing.of_snapshots = true;
            return;
        }
        let at = |cluster: u64| (cluster << self.shape.cluster_bits).min(self.shape.size);
        let range = at(clusters.start)..at(clusters.end);
        if !range.is_empty() {
            self.missing.add(range);
        }
    }

    fn snapshots(&mut self) -> io::Result<()> {
        self.is_active = false;
        let Ok(header) = Header::read(self.file, self.end)? else { return Ok(()) };
        let Ok((snapshots, _)) = Snapshot::read_all(self.file, &header, self.end)? else {
            self.missing.of_snapshots = true;
            return Ok(());
        };
        for snapshot in snapshots {
            if self.missing.of_snapshots {
                break;
            }
            let bytes = 8 * u64::from(snapshot.l1_entries);
            if bytes > L1_BYTES_MAX || snapshot.l1_offset.saturating_add(bytes) > self.end {
                self.missing.of_snapshots = bytes > 0;
            } else {
                self.l1(snapshot.l1_offset, snapshot.l1_entries)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const CLUSTER: u64 = 512;
    const L1: u32 = 4096;
    const SNAPSHOTS: u32 = 100;

    fn image(header: &[(usize, u64)], clusters: &[(u64, Vec<u8>)]) -> (BlockFile, Shape, u64) {
        let file: File = tempfile::tempfile().unwrap();
        let mut head = [0; CLUSTER as usize];
        head[..4].copy_from_slice(b"QFI\xfb");
        // Version, cluster_bits, size, refcount_order, and bytes of the header.
        for &(at, value) in
            [(4, 3), (20, 9), (24, 1 << 20), (96, 4), (100, 112)].iter().chain(header)
        {
            let is_wide = [24, 40, 48, 64].contains(&at);
            let bytes = value.to_be_bytes();
            let bytes = if is_wide { &bytes[..] } else { &bytes[4..] };
            head[at..at + bytes.len()].copy_from_slice(bytes);
        }
        file.write_all_at(&head, 0).unwrap();
        for (cluster, bytes) in clusters {
            file.write_all_at(bytes, cluster * CLUSTER).unwrap();
        }
        let end = file.metadata().unwrap().len().next_multiple_of(CLUSTER);
        file.set_len(end).unwrap();
        let header = Header::read(&file, end).unwrap().unwrap();
        (BlockFile::new(Arc::new(file), 1), Shape::from(&header), end)
    }

    /// Each snapshot has the L1 table of the disk, all of whose entries lead to one L2 table.
    #[test]
    fn b46_a_table_that_is_named_again_and_again_is_looked_at_once() {
        let (counts, block, l1, l2) = (1, 2, 3, 67);
        let mut snapshot = Vec::new();
        snapshot.extend((l1 * CLUSTER).to_be_bytes());
        snapshot.extend(L1.to_be_bytes());
        // The lengths of its id and its name, the date, the clock, the state, and 16 bytes of extra data.
        snapshot.extend([0, 1, 0, 0]);
        snapshot.extend([0; 20]);
        snapshot.extend([0, 0, 0, 16]);
        snapshot.extend(0_u64.to_be_bytes());
        snapshot.extend((1_u64 << 20).to_be_bytes());
        snapshot.extend([b'1', 0, 0, 0, 0, 0, 0, 0]);
        let mut block_bytes = vec![0; CLUSTER as usize];
        // Behind the end of the file.
        block_bytes[2 * 200 + 1] = 1;
        let header = [
            (36, L1.into()),
            (40, l1 * CLUSTER),
            (48, counts * CLUSTER),
            (56, 1),
            (60, SNAPSHOTS.into()),
            (64, (l2 + 1) * CLUSTER),
        ];
        let entry = ((1 << 63) | (l2 * CLUSTER)).to_be_bytes();
        let clusters = [
            (counts, (block * CLUSTER).to_be_bytes().to_vec()),
            (block, block_bytes),
            (l1, entry.repeat(L1 as usize)),
            (l2 + 1, snapshot.repeat(SNAPSHOTS as usize)),
        ];
        let (file, shape, end) = image(&header, &clusters);
        let header = Header::read(&file, end).unwrap().unwrap();
        let (snapshots, _) = Snapshot::read_all(&file, &header, end).unwrap().unwrap();
        assert_eq!(snapshots.len(), SNAPSHOTS as usize);
        let mut budget = Budget::of(1 << 40);
        assert_eq!(Missing::of(&file, &shape, end, None, &mut budget).unwrap(), None);
        // A block of counts, an L2 table, and all L1 tables.
        assert_eq!((1 << 40) - budget.left(), 512 + 512 + 101 * u64::from(L1));
        let error = Missing::of(&file, &shape, end, None, &mut Budget::of(50 * 4096)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("ringway check"), "{error}");
    }

    #[test]
    fn b46_a_block_of_counts_that_is_named_again_and_again_is_looked_at_once() {
        let header = [(36, 32), (40, CLUSTER), (48, 2 * CLUSTER), (56, 16)];
        let clusters = [(2, (20 * CLUSTER).to_be_bytes().repeat(1024)), (20, vec![0; 512])];
        let (file, shape, end) = image(&header, &clusters);
        let mut budget = Budget::of(1 << 40);
        assert_eq!(last_counted(&file, &shape, end, &mut budget).unwrap(), Some(0));
        assert_eq!((1 << 40) - budget.left(), 512);
        assert!(last_counted(&file, &shape, end, &mut Budget::of(511)).is_err());
    }
}
