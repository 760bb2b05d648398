//! The two levels of tables of one qcow2 file.

use crate::file::{BlockFile, NotReplaced};
use crate::kept::Kept;
use crate::layout::{COPIED, Entry, OFFSET, Shape, corrupt, words};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// So much memory for L2 tables of one file, in bytes, or two of them.
const CACHE: u64 = 1 << 20;

/// The most entries of an L1 table: QEMU makes no longer ones.
const L1_MAX: u64 = 4 << 20;

/// Entries of a page of memory, as a power of two.
const STRETCH_BITS: u32 = 9;

/// Entries that could not be written, in ascending order of their clusters.
#[derive(Debug, Default)]
pub(crate) struct Unwritten {
    /// The file says of them what it did before.
    kept: Vec<u64>,
    /// Nobody knows what it says of them.
    unknown: Vec<u64>,
    /// What the host said first.
    error: Option<io::Error>,
}

impl Unwritten {
    pub(crate) fn is_kept(&self, cluster: u64) -> bool {
        self.kept.binary_search(&cluster).is_ok()
    }

    pub(crate) fn is_unknown(&self, cluster: u64) -> bool {
        self.unknown.binary_search(&cluster).is_ok()
    }

    /// All of them, of which the file says what it did before.
    pub(crate) fn all_of(words: &[(u64, u64)], error: io::Error) -> Self {
        let kept = words.iter().map(|(cluster, _)| *cluster).collect();
        Self { kept, unknown: Vec::new(), error: Some(error) }
    }

    /// Whether the file says of all of `words` what it did before.
    pub(crate) fn has_kept_all(&self, words: &[(u64, u64)]) -> bool {
        self.kept.len() == words.len()
    }

    /// Whether it is in the file, if it was to be.
    pub(crate) fn has_written(&self, cluster: u64) -> bool {
        !self.is_kept(cluster) && !self.is_unknown(cluster)
    }

    pub(crate) fn into_result(self) -> io::Result<()> {
        self.error.map_or(Ok(()), Err)
    }
}

/// The tables of a file: L1 in memory, L2 tables as they are needed. What is written goes to the
/// file at once, unless it is deferred.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) file: BlockFile,
    pub(crate) shape: Shape,
    l1: Vec<u64>,
    /// L2 tables, by their place in L1.
    kept: Kept<Box<[u64]>>,
    /// L2 entries by cluster that are not in the file, and count instead of what is there.
    deferred: BTreeMap<u64, u64>,
    /// Whether there are any, for others: set before a word of the disk's table says where a cluster is by such an entry,
    /// and cleared once the file says so, too.
    has_deferred: Arc<AtomicBool>,
}

impl Tables {
    /// Reads the L1 table.
    ///
    /// # Errors
    /// What reading says.
    pub(crate) fn open(file: BlockFile, shape: Shape) -> io::Result<Self> {
        let needed = shape.size.div_ceil(shape.cluster()).div_ceil(1 << shape.l2_bits());
        if needed > u64::from(shape.l1_entries) {
            return Err(io::Error::other("its L1 table is shorter than its disk"));
        }
        if needed > L1_MAX {
            return Err(io::Error::other(format!("an L1 table of more than {L1_MAX} entries")));
        }
        let needed = usize::try_from(needed).map_err(io::Error::other)?;
        let mut bytes = vec![0; 8 * needed];
        file.read_or_zero(&mut bytes, shape.l1_offset)?;
        Ok(Self {
            file,
            shape,
            l1: words(&bytes).collect(),
            kept: Kept::new(CACHE, shape.cluster()),
            deferred: BTreeMap::new(),
            has_deferred: Arc::default(),
        })
    }

    /// The same for whoever only reads, in whose memory is no more than the L1 table. None of its entries is deferred.
    pub(crate) fn fresh(&self) -> Self {
        debug_assert!(self.deferred.is_empty());
        Self {
            file: self.file.clone(),
            shape: self.shape,
            l1: self.l1.clone(),
            kept: Kept::new(CACHE, self.shape.cluster()),
            deferred: BTreeMap::new(),
            has_deferred: Arc::default(),
        }
    }

    /// Where the L2 tables are that it has, in bytes.
    pub(crate) fn l2_offsets(&self) -> impl Iterator<Item = u64> {
        self.l1.iter().map(|word| word & OFFSET).filter(|&offset| offset != 0)
    }

    /// What the L1 table says.
    pub(crate) fn l1(&self, index: usize) -> u64 {
        self.l1[index]
    }

    /// Changes an L1 entry in memory; [`Tables::write_l1`] makes it so in the file.
    pub(crate) fn set_l1(&mut self, index: usize, word: u64) {
        self.l1[index] = word;
    }

    /// Has the file say what memory does of an L1 entry, where it says `before`.
    pub(crate) fn write_l1(&self, index: usize, before: u64) -> Result<(), NotReplaced> {
        let at = self.shape.l1_offset + 8 * index as u64;
        self.file.replace_at(&before.to_be_bytes(), &self.l1[index].to_be_bytes(), at)
    }

    /// Entries of the L1 table that are in memory: as many as the disk needs, or more.
    pub(crate) fn l1_len(&self) -> usize {
        self.l1.len()
    }

    /// L1 entries of the file behind those that are in memory, by their place: where their tables are. A saved machine has
    /// some, and a disk of which a kill has left the old size while it grew.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn behind(&self) -> io::Result<Vec<(usize, u64)>> {
        let there = self.l1_len();
        let count = (self.shape.l1_entries as usize).saturating_sub(there);
        let mut bytes = vec![0; 8 * count];
        self.file.read_or_zero(&mut bytes, self.shape.l1_offset + 8 * there as u64)?;
        let offsets = (there..).zip(words(&bytes).map(|word| word & OFFSET));
        Ok(offsets.filter(|(_, offset)| *offset != 0).collect())
    }

    /// The L1 table is elsewhere from now on, or longer by entries that are zero.
    pub(crate) fn set_l1_table(&mut self, offset: u64, entries: u32) {
        (self.shape.l1_offset, self.shape.l1_entries) = (offset, entries);
        self.l1.resize(self.l1.len().max(entries as usize), 0);
    }

    /// The bytes of an L1 table of so many entries, those that there are not yet zero.
    pub(crate) fn l1_bytes(&self, entries: usize) -> Vec<u8> {
        let words = self.l1.iter().copied().chain(std::iter::repeat(0)).take(entries);
        words.flat_map(u64::to_be_bytes).collect()
    }

    /// The L2 entry of a cluster of the disk.
    pub(crate) fn word(&mut self, cluster: u64) -> io::Result<u64> {
        let (index, within) = self.shape.split(cluster);
        Ok(self.table(index)?.map_or(0, |table| table[within]))
    }

    /// What it says.
    pub(crate) fn entry(&mut self, cluster: u64) -> io::Result<Entry> {
        let word = self.word(cluster)?;
        self.shape.entry(word)
    }

    /// An L2 table, if there is one.
    pub(crate) fn table(&mut self, index: usize) -> io::Result<Option<&mut [u64]>> {
        let offset = self.l1[index] & OFFSET;
        if offset == 0 {
            return Ok(None);
        }
        if self.kept.peek(index).is_none() {
            if offset % self.shape.cluster() != 0 {
                return Err(corrupt());
            }
            let mut bytes = vec![0; 1 << self.shape.cluster_bits];
            self.file.read_table(&mut bytes, offset)?;
            let mut table: Box<[u64]> = words(&bytes).collect();
            let first = (index as u64) << self.shape.l2_bits();
            for (cluster, word) in self.deferred.range(first..first + table.len() as u64) {
                table[self.shape.split(*cluster).1] = *word;
            }
            self.keep(index, table);
        }
        Ok(self.kept.get(index).map(|table| &mut table[..]))
    }

    /// Keeps a table in memory.
    pub(crate) fn keep(&mut self, index: usize, table: Box<[u64]>) {
        self.kept.keep(index, table);
    }

    /// Forgets what is in memory of a table.
    pub(crate) fn forget(&mut self, index: usize) {
        self.kept.forget(index);
    }

    /// Gives clusters these entries, without writing them: [`Tables::write_all`] has to, at some time. Their
    /// tables are there and this file's alone.
    pub(crate) fn defer(&mut self, entries: &[(u64, u64)]) {
        self.has_deferred.fetch_or(!entries.is_empty(), SeqCst);
        for &(cluster, word) in entries {
            let (index, within) = self.shape.split(cluster);
            debug_assert!(self.l1[index] & COPIED != 0, "a shared table is copied first");
            if let Some(table) = self.kept.get(index) {
                table[within] = word;
            }
            self.deferred.insert(cluster, word);
        }
    }

    /// Entries that are not in the file.
    pub(crate) fn deferred(&self) -> &BTreeMap<u64, u64> {
        &self.deferred
    }

    /// Whether there are any, for whoever makes the file durable beside the image's thread.
    pub(crate) fn has_deferred(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_deferred)
    }

    /// Those that were deferred are in the file now, but for these.
    pub(crate) fn keep_deferred(&mut self, unwritten: &Unwritten) {
        self.deferred.retain(|&at, _| unwritten.is_kept(at) || unwritten.is_unknown(at));
        self.has_deferred.store(!self.deferred.is_empty(), SeqCst);
    }

    /// Clusters of the file that its tables still name for clusters of the disk whose entries are deferred.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn superseded(&self) -> io::Result<HashSet<u64>> {
        let deferred: Vec<(u64, u64)> = self.deferred.iter().map(|(at, to)| (*at, *to)).collect();
        let mut named = HashSet::new();
        for run in deferred.chunk_by(|one, next| self.is_together(one.0, next.0)) {
            for word in self.words_in_file(run)? {
                named.extend(self.shape.entry(word)?.clusters(self.shape.cluster()));
            }
        }
        Ok(named)
    }

    /// What the file says of clusters, in ascending order, all of one table.
    fn words_in_file(&self, run: &[(u64, u64)]) -> io::Result<Vec<u64>> {
        let (Some(&(first, _)), Some(&(last, _))) = (run.first(), run.last()) else {
            return Ok(Vec::new());
        };
        let ((index, from), (_, to)) = (self.shape.split(first), self.shape.split(last));
        let mut bytes = vec![0; 8 * (to + 1 - from)];
        self.file.read_or_zero(&mut bytes, (self.l1[index] & OFFSET) + 8 * from as u64)?;
        let all: Vec<u64> = words(&bytes).collect();
        Ok(run.iter().map(|(cluster, _)| all[self.shape.split(*cluster).1 - from]).collect())
    }

    /// True if one write of the entries of both clusters costs no more than one of each.
    fn is_together(&self, one: u64, next: u64) -> bool {
        stretch(&self.shape, one) == stretch(&self.shape, next)
    }

    /// As [`Tables::write`], for entries of any of its tables.
    ///
    /// # Errors
    /// What the host says first; the others are written, if they can be.
    pub(crate) fn write_all(&mut self, entries: &[(u64, u64)]) -> io::Result<()> {
        self.write_each(entries).into_result()
    }

    /// As [`Tables::write`], for entries of any of its tables; those that could not be written. Entries of a table
    /// that is not there, or not this file's alone, are among them.
    pub(crate) fn write_each(&mut self, entries: &[(u64, u64)]) -> Unwritten {
        let (shape, mut unwritten) = (self.shape, Unwritten::default());
        for run in entries.chunk_by(|one, next| stretch(&shape, one.0) == stretch(&shape, next.0)) {
            if self.l1[shape.split(run[0].0).0] & COPIED == 0 {
                unwritten.kept.extend(run.iter().map(|(cluster, _)| cluster));
                unwritten.error.get_or_insert_with(corrupt);
            } else if let Err(error) = self.write_run(run) {
                unwritten.error.get_or_insert(error);
                self.learn(run, &mut unwritten);
            }
        }
        unwritten
    }

    /// Looks up what the file says of entries that were being written, any part of which may be there.
    fn learn(&mut self, run: &[(u64, u64)], unwritten: &mut Unwritten) {
        let (shape, there) = (self.shape, self.words_in_file(run).ok());
        let table = self.kept.peek(shape.split(run[0].0).0);
        for (nth, &(cluster, word)) in run.iter().enumerate() {
            let before = table.map(|table| table[shape.split(cluster).1]);
            match there.as_ref().map(|words| words[nth]) {
                Some(now) if now == word => {}
                // What is deferred is not what the file said before.
                Some(now) if before == Some(now) || self.deferred.contains_key(&cluster) => {
                    unwritten.kept.push(cluster);
                }
                _ => unwritten.unknown.push(cluster),
            }
        }
        self.forget(shape.split(run[0].0).0);
    }

    /// Gives clusters these entries, in ascending order, all of one table, which is there and this file's
    /// alone. It is one write, with what lies between them as it was, in whole blocks of the file:
    /// nothing has to be read for it.
    pub(crate) fn write(&mut self, run: &[(u64, u64)]) -> io::Result<()> {
        let written = self.write_run(run);
        if let (Err(_), Some((first, _))) = (&written, run.first()) {
            // Some of them may have been.
            self.forget(self.shape.split(*first).0);
        }
        written
    }

    /// As [`Tables::write`]; what is in memory of the table stays as it was if it fails.
    fn write_run(&mut self, run: &[(u64, u64)]) -> io::Result<()> {
        let (Some(&(first, _)), Some(&(last, _))) = (run.first(), run.last()) else {
            return Ok(());
        };
        let ((index, from), (_, to)) = (self.shape.split(first), self.shape.split(last));
        let l1 = self.l1[index];
        debug_assert!(l1 & COPIED != 0, "a shared table is copied first");
        let per_block = (self.file.unit() / 8).max(1);
        let from = from - from % per_block;
        let shape = self.shape;
        let table = self.table(index)?.ok_or_else(corrupt)?;
        let to = (to + 1).next_multiple_of(per_block).min(table.len());
        let mut words = table[from..to].to_vec();
        run.iter().for_each(|&(cluster, word)| words[shape.split(cluster).1 - from] = word);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.file.write_at(&bytes, (l1 & OFFSET) + 8 * from as u64)?;
        self.table(index)?.ok_or_else(corrupt)?[from..to].copy_from_slice(&words);
        Ok(())
    }
}

/// Which stretch of a table the entry of a cluster is in: entries near enough to each other that one write
/// of them all costs no more than one of each.
fn stretch(shape: &Shape, cluster: u64) -> u64 {
    cluster >> shape.l2_bits().min(STRETCH_BITS)
}
