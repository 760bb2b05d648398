//! A range of clusters: how often each is in use, and how often the image says so.
//!
//! Memory is bounded by going through the image once for each range of a bounded number of clusters.

use super::refcounts::Counts;
use crate::header::Header;
use crate::layout;
use crate::read_at::ReadAt;
use std::io;

/// Bytes that are read at once of tables.
const CHUNK: usize = 65536;

/// Bits of an entry of the refcount table that hold an offset.
pub(super) const REFCOUNT_OFFSET: u64 = !0x1ff;

/// One range of clusters.
pub(super) struct Window {
    /// The first cluster.
    pub(super) start: u64,
    /// How often each is used.
    uses: Vec<u32>,
    /// What the image says; more than 32 bits say is as much as they can.
    stored: Vec<u32>,
    /// The first cluster behind the file. It may be used: what was allocated last need not be written.
    file_end: u64,
    /// The first cluster behind the range that is used, or that may be counted.
    pub(super) next: Option<u64>,
    counts: Counts,
    cluster_bits: u32,
}

impl Window {
    /// The range of at most `clusters` from `start` on, in a file of `file_end` clusters and the one behind it.
    ///
    /// # Errors
    /// What reading says.
    pub(super) fn load<R: ReadAt + ?Sized>(
        source: &R,
        header: &Header,
        start: u64,
        clusters: usize,
        file_end: u64,
    ) -> io::Result<Self> {
        let end = file_end + 1;
        let clusters = usize::try_from(end.saturating_sub(start)).unwrap_or(clusters).min(clusters);
        let mut window = Self {
            start,
            uses: vec![0; clusters],
            stored: vec![0; clusters],
            file_end,
            next: None,
            counts: Counts::new(header.refcount_order),
            cluster_bits: header.cluster_bits,
        };
        window.load_counts(source, header, end)?;
        Ok(window)
    }

    /// The first cluster behind the range.
    pub(super) fn end(&self) -> u64 {
        self.start + self.uses.len() as u64
    }

    /// Reads what the image says of the range, from each block that can be one.
    fn load_counts<R: ReadAt + ?Sized>(
        &mut self,
        source: &R,
        header: &Header,
        end: u64,
    ) -> io::Result<()> {
        let file_end = self.file_end << self.cluster_bits;
        let mut chunk = vec![0; CHUNK];
        for_each_block(source, header, |block, entry| {
            let first = block * self.per_block();
            let at = entry & REFCOUNT_OFFSET;
            let usable = at != 0 && at % (1 << self.cluster_bits) == 0 && at < file_end;
            if !usable || first >= end || first + self.per_block() <= self.start {
                return Ok(());
            }
            if first + self.per_block() > self.end() && self.end() < end {
                self.note_next(first.max(self.end()));
            }
            let (from, to) = (first.max(self.start), (first + self.per_block()).min(self.end()));
            let mut done = from;
            while done < to {
                // A chunk has whole bytes: ranges begin at multiples of 8 clusters.
                let bytes = self.counts.bytes((to - done).next_multiple_of(8));
                let len = usize::try_from(bytes).unwrap_or(CHUNK).min(CHUNK);
                source.read_padded(&mut chunk[..len], at + self.counts.bytes(done - first))?;
                let here = self.counts.per_block(len as u64).min(to - done);
                for index in 0..usize::try_from(here).unwrap_or(0) {
                    let stored = self.counts.get(&chunk, index);
                    let slot = usize::try_from(done - self.start).unwrap_or(0) + index;
                    self.stored[slot] = u32::try_from(stored).unwrap_or(u32::MAX);
                }
                done += here;
            }
            Ok(())
        })
    }

    fn per_block(&self) -> u64 {
        self.counts.per_block(1 << self.cluster_bits)
    }

    fn note_next(&mut self, cluster: u64) {
        self.next = Some(self.next.map_or(cluster, |next| next.min(cluster)));
    }

    fn slot(&self, cluster: u64) -> Option<usize> {
        let slot = usize::try_from(cluster.checked_sub(self.start)?).ok()?;
        (slot < self.uses.len()).then_some(slot)
    }

    /// Counts one use of the clusters that the bytes from `at` on lie in.
    pub(super) fn count(&mut self, at: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let (first, last) = (at >> self.cluster_bits, (at + (bytes - 1)) >> self.cluster_bits);
        if last >= self.end() {
            self.note_next(first.max(self.end()));
        }
        for cluster in first.max(self.start)..=last.min(self.end().saturating_sub(1)) {
            if let Some(slot) = self.slot(cluster) {
                self.uses[slot] = self.uses[slot].saturating_add(1);
            }
        }
    }

    /// What the image says of the cluster that byte `at` lies in, if that is in the range.
    pub(super) fn stored_at(&self, at: u64) -> Option<u32> {
        self.slot(at >> self.cluster_bits).map(|slot| self.stored[slot])
    }

    /// How often the cluster that byte `at` lies in was used so far, if it is in the range.
    pub(super) fn uses_at(&self, at: u64) -> Option<u32> {
        self.slot(at >> self.cluster_bits).map(|slot| self.uses[slot])
    }

    /// Each cluster that is used, or counted and in the file: its number, what the image says, how often it is used.
    pub(super) fn clusters(&self) -> impl Iterator<Item = (u64, u32, u32)> {
        let both = (self.start..).zip(self.stored.iter().copied().zip(self.uses.iter().copied()));
        both.map(|(cluster, (stored, uses))| (cluster, stored, uses)).filter(
            |(cluster, stored, uses)| *uses != 0 || *stored != 0 && *cluster < self.file_end,
        )
    }
}

/// Calls `each` with the number and the entry of each refcount block that the table has.
///
/// # Errors
/// What reading says, or `each`.
pub(super) fn for_each_block<R: ReadAt + ?Sized>(
    source: &R,
    header: &Header,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let entries = (u64::from(header.refcount_table_clusters) << header.cluster_bits) / 8;
    for_each_word(source, header.refcount_table_offset, entries, |block, entry| match entry {
        0 => Ok(()),
        _ => each(block, entry),
    })
}

/// Calls `each` with the number and the value of each of `count` big-endian words from `at` on.
///
/// # Errors
/// What reading says, or `each`.
pub(super) fn for_each_word<R: ReadAt + ?Sized>(
    source: &R,
    at: u64,
    count: u64,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK.min(usize::try_from(count.saturating_mul(8)).unwrap_or(CHUNK))];
    let mut done = 0;
    while done < count {
        let words = (count - done).min(chunk.len() as u64 / 8);
        let len = usize::try_from(words * 8).unwrap_or(CHUNK);
        source.read_padded(&mut chunk[..len], at.saturating_add(done * 8))?;
        for (word, number) in layout::words(&chunk[..len]).zip(done..) {
            each(number, word)?;
        }
        done += words;
    }
    Ok(())
}
