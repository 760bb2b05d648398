//! Files whose end is missing: half a copy, a file system that was full, a crash. What tables lead to behind the
//! end of a file is lost, and must not look like zeroes.
//!
//! Whether that may be is told by the counts: they reach a cluster or more beyond the end. Then tables are gone
//! through: what no entry leads to is counted and not used, and nothing is lost with it.
//!
//! Source: the public specification of qcow2.

use crate::file::BlockFile;
use crate::header::{Header, L1_BYTES_MAX};
use crate::layout::{Entry, OFFSET, Shape, words};
use crate::refcounts::last_counted;
use crate::snapshot::Snapshot;
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
    /// What reading says.
    pub(crate) fn of(
        file: &BlockFile,
        shape: &Shape,
        end: u64,
        data_end: Option<u64>,
    ) -> io::Result<Option<Self>> {
        let is_short = |end: &u64| *end < shape.size;
        let counted = last_counted(file, shape, end)?;
        if counted.is_some_and(|last| last < end) && !data_end.as_ref().is_some_and(is_short) {
            return Ok(None);
        }
        let missing = Self {
            end: data_end.filter(is_short).unwrap_or(end),
            of_counts: counted.is_none(),
            ..Self::default()
        };
        let data_end = data_end.unwrap_or(end);
        let mut walk = Walk { file, shape, end, data_end, missing, is_active: true };
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
}

impl Walk<'_> {
    fn l1(&mut self, offset: u64, entries: u32) -> io::Result<()> {
        let mut bytes = vec![0; 8 * entries as usize];
        self.file.read_or_zero(&mut bytes, offset)?;
        let mut table = vec![0; 1 << self.shape.cluster_bits];
        for (index, word) in (0_u64..).zip(words(&bytes)) {
            let first = index << self.shape.l2_bits();
            match word & OFFSET {
                0 => {}
                at if at >= self.end => self.lose(first..first + (1 << self.shape.l2_bits())),
                at => {
                    self.file.read_or_zero(&mut table, at)?;
                    self.l2(first, &table);
                }
            }
        }
        Ok(())
    }

    fn l2(&mut self, first: u64, table: &[u8]) {
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
            }
        }
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
            let bytes = 8 * u64::from(snapshot.l1_entries);
            if bytes > L1_BYTES_MAX || snapshot.l1_offset.saturating_add(bytes) > self.end {
                self.missing.of_snapshots |= bytes > 0;
            } else {
                self.l1(snapshot.l1_offset, snapshot.l1_entries)?;
            }
        }
        Ok(())
    }
}
