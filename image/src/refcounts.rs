//! Refcounts: which clusters of a file are in use, and how often.
//!
//! What is counted here is in the file at once; each function says what is durable when.

mod counts;
mod metadata;

use crate::budget::Budget;
use crate::failure::Failure;
use crate::file::BlockFile;
use crate::journal::LooseClusters;
use crate::kept::Kept;
use crate::layout::{OFFSET, Shape, corrupt, words};
use crate::read_at::cut_off;
use counts::{count, set_count};
pub(crate) use metadata::Metadata;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// So much memory for refcount blocks, in bytes, or two of them.
const CACHE: u64 = 1 << 20;

/// The most entries of a refcount table: QEMU makes none of more than 8 MiB.
const TABLE_MAX: u64 = 1 << 20;

/// Where the last cluster begins that is counted in a file of `end` bytes; `None` if the file ends before some of
/// the counts.
///
/// # Errors
/// What reading says, or that it would be too much.
pub(crate) fn last_counted(
    file: &BlockFile,
    shape: &Shape,
    end: u64,
    budget: &mut Budget,
) -> io::Result<Option<u64>> {
    let bytes = u64::from(shape.refcount_table_clusters) << shape.cluster_bits;
    let mut table = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
    file.read_or_zero(&mut table, shape.refcount_table_offset)?;
    let blocks = words(&table).map(|word| word & OFFSET).enumerate();
    let blocks: Vec<(usize, u64)> = blocks.filter(|(_, offset)| *offset != 0).collect();
    if blocks.iter().any(|(_, offset)| *offset >= end) {
        return Ok(None);
    }
    let (order, mut block) = (shape.refcount_order, vec![0; 1 << shape.cluster_bits]);
    let per_block = (block.len() * 8) >> order;
    let mut empty = HashSet::new();
    for (index, offset) in blocks.into_iter().rev() {
        if empty.contains(&offset) {
            continue;
        }
        budget.take(per_block as u64)?;
        file.read_table(&mut block, offset)?;
        let last = (0..per_block).rfind(|within| count(&block, order, *within) != 0);
        if let Some(within) = last {
            return Ok(Some(((index * per_block + within) as u64) << shape.cluster_bits));
        }
        empty.insert(offset);
    }
    Ok(Some(0))
}

/// The refcounts of a file.
#[derive(Debug)]
pub(crate) struct Refcounts {
    file: BlockFile,
    pub(crate) shape: Shape,
    /// Where the table is now.
    table_offset: u64,
    /// Up to its last block; there are `entries`.
    table: Vec<u64>,
    entries: usize,
    /// Blocks by their place in the table.
    kept: Kept<Box<[u8]>>,
    /// No cluster before it is free, as far as is known.
    cursor: u64,
    /// Bytes of the file.
    end: u64,
    /// A device does not grow.
    grows: bool,
    /// What the refcounts must not call free, by cluster.
    pub(crate) metadata: Metadata,
    /// Those that are counted though no table names them, for whoever comes after a kill.
    pub(crate) loose: LooseClusters,
    /// The file with the data, if that is another one.
    pub(crate) data_file: Option<BlockFile>,
    pub(crate) failure: Arc<Failure>,
    /// Sync where order matters.
    pub(crate) barriers: bool,
    /// A sync failed: nobody knows what the file holds, and the host tells nobody else.
    pub(crate) sync_failed: bool,
    /// Nobody knows which table the header names: nothing is counted any more.
    pub(crate) is_unsure: bool,
    /// Clusters that are counted and that nothing needs any more: to be released once nothing is in flight.
    pub(crate) unused: Vec<u64>,
}

impl Refcounts {
    /// Reads the table. `tables` are the L2 tables in use.
    ///
    /// # Errors
    /// What reading says.
    pub(crate) fn open(
        file: BlockFile,
        shape: Shape,
        end: u64,
        grows: bool,
        tables: impl Iterator<Item = u64>,
    ) -> io::Result<Self> {
        let entries = u64::from(shape.refcount_table_clusters) << shape.l2_bits();
        if entries > TABLE_MAX {
            return Err(io::Error::other(format!(
                "a refcount table of {entries} entries, and the most is {TABLE_MAX}"
            )));
        }
        let mut bytes = vec![0; usize::try_from(8 * entries).map_err(io::Error::other)?];
        file.read_or_zero(&mut bytes, shape.refcount_table_offset)?;
        let mut table: Vec<u64> = Vec::new();
        for (index, offset) in words(&bytes).map(|word| word & OFFSET).enumerate() {
            if offset != 0 {
                table.resize(index, 0);
                table.push(offset);
            }
        }
        let bits = shape.cluster_bits;
        let l1 = (8 * u64::from(shape.l1_entries)).div_ceil(shape.cluster());
        let first = shape.refcount_table_offset >> bits;
        let metadata = Metadata::default();
        let twice = metadata.add(
            std::iter::once(0)
                .chain(tables.map(|offset| offset >> bits))
                .chain((first..).take(shape.refcount_table_clusters as usize))
                .chain((shape.l1_offset >> bits..).take(usize::try_from(l1).unwrap_or(0)))
                .chain(table.iter().filter(|&&offset| offset != 0).map(|offset| offset >> bits)),
        );
        if let Some(cluster) = twice {
            return Err(io::Error::other(format!(
                "two of its tables are at {:#x}: it is damaged, and not written to. Look at it with `ringway \
                 check`",
                cluster << bits
            )));
        }
        let table_offset = shape.refcount_table_offset;
        Ok(Self {
            file,
            shape,
            table_offset,
            table,
            entries: usize::try_from(entries).map_err(io::Error::other)?,
            kept: Kept::new(CACHE, shape.cluster()),
            cursor: 0,
            end,
            grows,
            metadata,
            loose: LooseClusters::default(),
            data_file: None,
            failure: Arc::default(),
            barriers: true,
            sync_failed: false,
            is_unsure: false,
            unused: Vec::new(),
        })
    }

    /// Bytes of the file.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Clusters that one block counts.
    fn per_block(&self) -> u64 {
        1 << (self.shape.cluster_bits + 3 - self.shape.refcount_order)
    }

    /// Which block a cluster is in, and where in it.
    #[allow(clippy::cast_possible_truncation)]
    fn split(&self, cluster: u64) -> (usize, usize) {
        ((cluster / self.per_block()) as usize, (cluster % self.per_block()) as usize)
    }

    pub(crate) fn sync(&mut self) -> io::Result<()> {
        let synced = if self.barriers { self.sync_files() } else { Ok(()) };
        synced.inspect_err(|_| self.sync_failed = true)
    }

    /// Makes durable all that was written: whoever waits for a sync is answered by this one, too.
    pub(crate) fn sync_files(&self) -> io::Result<()> {
        self.failure.sync(|| {
            self.data_file.as_ref().map_or(Ok(()), BlockFile::sync_data)?;
            self.file.sync_data()
        })
    }

    /// A block, if there is one.
    fn block(&mut self, index: usize) -> io::Result<Option<&mut Box<[u8]>>> {
        let offset = self.offset(index);
        if offset == 0 {
            return Ok(None);
        }
        if self.kept.peek(index).is_none() {
            if offset % self.shape.cluster() != 0 {
                return Err(corrupt());
            }
            let mut block = vec![0; 1 << self.shape.cluster_bits].into_boxed_slice();
            self.file.read_table(&mut block, offset)?;
            self.kept.keep(index, block);
        }
        Ok(self.kept.get(index))
    }

    /// How often a cluster is used; 0 if nothing counts it.
    ///
    /// # Errors
    /// What reading says.
    pub(crate) fn count(&mut self, cluster: u64) -> io::Result<u64> {
        let ((index, within), order) = (self.split(cluster), self.shape.refcount_order);
        Ok(self.block(index)?.map_or(0, |block| count(block, order, within)))
    }

    /// Where a block is; 0 if there is none.
    fn offset(&self, index: usize) -> u64 {
        self.table.get(index).copied().unwrap_or(0)
    }

    /// Writes entries `from..to` of a block that is in memory, in whole blocks of the file: nothing has to
    /// be read for it. What the file holds is unknown if it fails, and so the block is forgotten.
    fn write_block(&mut self, index: usize, from: usize, to: usize) -> io::Result<()> {
        let (order, unit) = (self.shape.refcount_order, self.file.unit());
        let (from, to) = ((from << order) / 8 / unit * unit, (to << order).div_ceil(8));
        let block = self.kept.peek(index).ok_or_else(corrupt)?;
        let to = to.next_multiple_of(unit).min(block.len());
        let written = self.file.write_at(&block[from..to], self.table[index] + from as u64);
        if written.is_err() {
            self.kept.forget(index);
        }
        written
    }

    /// Takes one reference away from each of these clusters, none of which the file needs durably any
    /// more. The space of those that are free then goes back to the host. Those that are done with, or never will be,
    /// are taken off the list.
    ///
    /// # Errors
    /// What the host says first; those that are left keep their counts.
    pub(crate) fn release(&mut self, clusters: &mut Vec<u64>) -> io::Result<()> {
        let mut first = None;
        clusters.retain(|&cluster| match self.release_one(cluster) {
            Ok(()) => false,
            Err((error, is_counted)) => {
                first.get_or_insert(error);
                is_counted
            }
        });
        first.map_or(Ok(()), Err)
    }

    /// As [`Refcounts::release`], of one. With an error, whether it is known to have its count still.
    fn release_one(&mut self, cluster: u64) -> Result<(), (io::Error, bool)> {
        // It was data when it was freed, and has been taken for a table since: two entries led to it.
        if self.metadata.contains(cluster) {
            return Ok(());
        }
        let (order, (index, within)) = (self.shape.refcount_order, self.split(cluster));
        let block = self.block(index).map_err(|error| (error, true))?;
        let block = block.ok_or_else(|| (corrupt(), false))?;
        let before = count(block, order, within);
        let less = before.checked_sub(1).ok_or_else(|| (corrupt(), false))?;
        set_count(block, order, within, less);
        if let Err(error) = self.write_block(index, within, within + 1) {
            // It may be there all the same.
            let now = self.block(index).ok().flatten().map(|block| count(block, order, within));
            if now != Some(less) {
                return Err((error, now == Some(before)));
            }
        }
        self.loose.remove(cluster);
        if less == 0 {
            self.cursor = self.cursor.min(cluster);
            let size = self.shape.cluster();
            // Only space: what is free may hold anything.
            let _ = self.file.punch(cluster << self.shape.cluster_bits, size);
        }
        Ok(())
    }

    /// Counts these clusters no more, which were counted once, in ascending order, and which no table has named
    /// durably since. Their space goes back to the host. Those that are done with, or of which nobody knows, are taken
    /// off the list.
    ///
    /// # Errors
    /// What the host says first; those that are left keep their counts.
    pub(crate) fn free(&mut self, clusters: &mut Vec<u64>) -> io::Result<()> {
        let (per_block, mut outcome, mut left) = (self.per_block(), Ok(()), Vec::new());
        for of_block in clusters.chunk_by(|one, next| one / per_block == next / per_block) {
            outcome = outcome.and(self.free_in_block(of_block, &mut left));
        }
        *clusters = left;
        outcome
    }

    /// As [`Refcounts::free`], of one block.
    fn free_in_block(&mut self, clusters: &[u64], left: &mut Vec<u64>) -> io::Result<()> {
        let (order, bits, per_block) =
            (self.shape.refcount_order, self.shape.cluster_bits, self.per_block());
        let (Some(&first), Some(&last)) = (clusters.first(), clusters.last()) else {
            return Ok(());
        };
        // Less than a block has.
        #[allow(clippy::cast_possible_truncation)]
        let place = |cluster: u64| (cluster % per_block) as usize;
        let index = self.split(first).0;
        let block = self.block(index).inspect_err(|_| left.extend(clusters))?;
        let block = block.ok_or_else(corrupt)?;
        clusters.iter().for_each(|&cluster| set_count(block, order, place(cluster), 0));
        let written = self.write_block(index, place(first), place(last) + 1);
        let mut free = clusters.to_vec();
        if written.is_err() {
            // Some of it may be there all the same.
            let there = self.block(index).ok().flatten();
            let is_free =
                |cluster| there.as_ref().map(|block| count(block, order, place(cluster)) == 0);
            left.extend(clusters.iter().filter(|cluster| is_free(**cluster) == Some(false)));
            free.retain(|cluster| is_free(*cluster) == Some(true));
        }
        self.cursor = free.first().map_or(self.cursor, |first| self.cursor.min(*first));
        free.iter().for_each(|cluster| self.loose.remove(*cluster));
        for run in free.chunk_by(|one, next| one + 1 == *next) {
            // Only space: what is free may hold anything.
            let _ = self.file.punch(run[0] << bits, (run.len() as u64) << bits);
        }
        written
    }

    /// Takes free clusters, at most `want` and at least one. When this returns, their counts are
    /// durable, and they read as zeroes, durably.
    ///
    /// # Errors
    /// What the host says, ENOSPC among it; none is taken then, unless a sync has failed.
    pub(crate) fn reserve(&mut self, want: usize) -> io::Result<Vec<u64>> {
        let mut got: Vec<u64> = Vec::with_capacity(want);
        let mut at = self.cursor;
        while got.len() < want {
            match self.reserve_in_block(&mut at, want, &mut got) {
                Ok(()) => {}
                Err(error) if got.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        self.sync()?;
        self.cursor = at;
        Ok(got)
    }

    /// These clusters hold metadata from now on.
    pub(crate) fn note_metadata(&mut self, clusters: std::ops::Range<u64>) {
        self.metadata.add(clusters);
    }

    /// Takes free clusters of the block that `at` is in, from there on; `at` moves on.
    fn reserve_in_block(
        &mut self,
        at: &mut u64,
        want: usize,
        got: &mut Vec<u64>,
    ) -> io::Result<()> {
        let (index, from) = self.split(*at);
        if index >= self.entries {
            return self.grow_table();
        }
        if self.offset(index) == 0 {
            self.add_block(index)?;
        }
        let (order, bits) = (self.shape.refcount_order, self.shape.cluster_bits);
        let first = index as u64 * self.per_block();
        let room = if self.grows { u64::MAX } else { self.end >> bits };
        let to = usize::try_from(self.per_block()).map_err(io::Error::other)?;
        let block = self.block(index)?.ok_or_else(corrupt)?;
        let (mut found, mut within) = (Vec::new(), from);
        while within < to && got.len() + found.len() < want {
            if first + within as u64 >= room {
                break;
            }
            if count(block, order, within) == 0 {
                found.push(first + within as u64);
            }
            within += 1;
        }
        let full = first + within as u64 >= room;
        let next = first + within as u64;
        if let Some(taken) = found.iter().find(|&&cluster| self.metadata.contains(cluster)) {
            tracing::error!(
                "its refcounts call cluster {taken} free, which holds metadata: nothing is \
                 allocated any more. Look at it with `qemu-img check`"
            );
            return Err(corrupt());
        }
        self.clear(&found)?;
        // They stay there if it is not known whether they are counted: those that are not do no harm.
        self.loose.take_ahead(&found);
        let counted = self.count_once(index, &mut found);
        got.append(&mut found);
        counted?;
        *at = next;
        if full && got.len() < want {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(())
    }

    /// Has clusters that nobody counts be within the file and read as zeroes.
    fn clear(&mut self, clusters: &[u64]) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        let mut rest = clusters;
        while let Some(&first) = rest.first() {
            let run = (first..).zip(rest).take_while(|(expected, cluster)| expected == *cluster);
            let count = run.count();
            rest = &rest[count..];
            let (from, to) = (first << bits, (first + count as u64) << bits);
            if from < self.end {
                self.file.punch(from, to.min(self.end) - from)?;
            }
        }
        self.grow_file(clusters.last().map_or(0, |last| (last + 1) << bits))
    }

    /// Counts clusters of a block that is in memory once, all of which are free. If that fails, those are left of
    /// which the file says so.
    fn count_once(&mut self, index: usize, clusters: &mut Vec<u64>) -> io::Result<()> {
        let (order, per_block) = (self.shape.refcount_order, self.per_block());
        // Less than a block has.
        #[allow(clippy::cast_possible_truncation)]
        let place = |cluster: u64| (cluster % per_block) as usize;
        let (Some(&first), Some(&last)) = (clusters.first(), clusters.last()) else {
            return Ok(());
        };
        let block = self.block(index)?.ok_or_else(corrupt)?;
        clusters.iter().for_each(|&cluster| set_count(block, order, place(cluster), 1));
        let written = self.write_block(index, place(first), place(last) + 1);
        if written.is_err() {
            let there = self.block(index).ok().flatten();
            clusters.retain(|&cluster| {
                there.as_ref().is_some_and(|block| count(block, order, place(cluster)) == 1)
            });
        }
        written
    }

    fn grow_file(&mut self, end: u64) -> io::Result<()> {
        if end > self.end {
            if !self.grows {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            if self.file.len()? < self.end {
                tracing::error!("its file has become shorter: nothing is allocated any more");
                return Err(cut_off());
            }
            self.file.set_len(end)?;
            self.end = end;
        }
        Ok(())
    }

    /// A block for clusters that none counts yet, all of which are free. It is in the first of them,
    /// and counts itself.
    fn add_block(&mut self, index: usize) -> io::Result<()> {
        let cluster = index as u64 * self.per_block();
        if self.metadata.contains(cluster) {
            tracing::error!(
                "no refcount block counts cluster {cluster}, which holds metadata: nothing is allocated any more. \
                 `qemu-img check -r all` mends it while nobody serves it"
            );
            return Err(corrupt());
        }
        let offset = cluster << self.shape.cluster_bits;
        let mut block = vec![0; 1 << self.shape.cluster_bits].into_boxed_slice();
        set_count(&mut block, self.shape.refcount_order, 0, 1);
        self.grow_file(offset + self.shape.cluster())?;
        self.file.write_at(&block, offset)?;
        // The table must not name a block that counts nothing.
        self.sync()?;
        self.file.write_at(&offset.to_be_bytes(), self.table_offset + 8 * index as u64)?;
        self.table.resize(self.table.len().max(index + 1), 0);
        self.table[index] = offset;
        self.metadata.add([cluster]);
        self.kept.keep(index, block);
        Ok(())
    }

    /// A longer table, behind all that the present one can count, with blocks that count both.
    fn grow_table(&mut self) -> io::Result<()> {
        let (per_block, bits, order) =
            (self.per_block(), self.shape.cluster_bits, self.shape.refcount_order);
        let old_entries = self.entries as u64;
        let first = old_entries * per_block;
        let (mut clusters, mut blocks) = (1, 1);
        loop {
            let entries = (old_entries * 3 / 2).max(old_entries + blocks);
            let needs = (8 * entries).div_ceil(self.shape.cluster());
            let more = (needs + blocks).div_ceil(per_block);
            if (needs, more) == (clusters, blocks) {
                break;
            }
            (clusters, blocks) = (needs, more.max(blocks));
        }
        let entries = clusters << self.shape.l2_bits();
        if entries > TABLE_MAX {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        self.grow_file((first + clusters + blocks) << bits)?;
        let mut table = self.table.clone();
        table.resize(usize::try_from(entries).map_err(io::Error::other)?, 0);
        for nth in 0..blocks {
            let offset = (first + clusters + nth) << bits;
            let mut block = vec![0; 1 << bits];
            let counted =
                (clusters + blocks - (nth * per_block).min(clusters + blocks)).min(per_block);
            for within in 0..usize::try_from(counted).map_err(io::Error::other)? {
                set_count(&mut block, order, within, 1);
            }
            self.file.write_at(&block, offset)?;
            table[self.entries + usize::try_from(nth).map_err(io::Error::other)?] = offset;
        }
        let bytes: Vec<u8> = table.iter().flat_map(|offset| offset.to_be_bytes()).collect();
        self.file.write_at(&bytes, first << bits)?;
        self.sync()?;
        let entries = u32::try_from(clusters).map_err(io::Error::other)?;
        let mut words = [0; 12];
        words[..8].copy_from_slice(&(first << bits).to_be_bytes());
        words[8..].copy_from_slice(&entries.to_be_bytes());
        // refcount_table_offset and refcount_table_clusters, neighbours in one sector.
        let mut before = [0; 12];
        before[..8].copy_from_slice(&self.table_offset.to_be_bytes());
        before[8..].copy_from_slice(&self.shape.refcount_table_clusters.to_be_bytes());
        self.file.replace_at(&before, &words, 48).map_err(|not| {
            self.is_unsure = !not.is_old;
            not.error
        })?;
        self.sync()?;
        let old = self.table_offset >> bits..;
        let old: Vec<u64> = old.take(self.shape.refcount_table_clusters as usize).collect();
        (self.table_offset, self.entries, self.table) = (first << bits, table.len(), table);
        self.shape.refcount_table_offset = self.table_offset;
        self.shape.refcount_table_clusters = entries;
        self.metadata.add(first..first + clusters + blocks);
        self.metadata.remove(&old);
        self.loose.take_ahead(&old);
        self.unused.extend(old);
        Ok(())
    }
}
