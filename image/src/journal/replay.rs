//! Entries that a process left in its journal when it was killed go into the tables of their image.

use super::{Journal, MARK_BITS, is_of_this_boot};
use crate::budget::Budget;
use crate::failure::read_as_stored;
use crate::file::{BlockFile, NotReplaced};
use crate::header::{Header, L1_BYTES_MAX};
use crate::l2::Tables;
use crate::layer::{Layer, LayerFormat};
use crate::layout::{COPIED, Entry, OFFSET, Shape, corrupt, words};
use crate::refcounts::Refcounts;
use crate::snapshot::Snapshot;
use ringway_core::host::{File, forget};
use ringway_core::sync_turn::sync_patiently;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Seek, SeekFrom};
use std::sync::Arc;

/// What became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// There were none, and nobody had begun to make any.
    Nothing,
    /// So many are in the tables now.
    Entries(usize),
    /// The image was written by others since, its file has older contents, or its journal is another one: what was
    /// answered and not yet flushed when its process was killed may be lost.
    Lost,
}

/// Puts what a killed process had answered and not written to the tables of `file` there, gives back clusters that it
/// had counted and that no table names, and takes its mark away. The lock of the image has to be ours, and nothing known of its tables. Without a journal it is only found
/// out whether there was one. The file has so many `bytes`, and I/O is in multiples of `unit`. `lost` is called before
/// that something may be lost is forgotten here. It may be killed, and begins again then.
///
/// # Errors
/// What the host says, or what is wrong with the metadata. The entries are still there then, unless a sync has
/// failed: whoever comes next takes them for lost.
pub fn replay(
    file: &Arc<File>,
    bytes: u64,
    unit: u32,
    journal: Option<&Journal>,
    lost: &mut dyn FnMut(),
) -> io::Result<Replayed> {
    let file = BlockFile::new(Arc::clone(file), unit);
    let header = Header::read(&file, bytes)?.map_err(io::Error::other)?;
    let mut shape = Shape::from(&header);
    let mark = shape.autoclear & MARK_BITS;
    let replayed = match journal {
        Some(journal) if journal.has_mark(mark) => {
            header.may_write().map_err(io::Error::other)?;
            put(&file, bytes, shape, journal, lost)?
        }
        _ if is_of_this_boot(mark) => Replayed::Lost,
        Some(journal) if journal.is_used() && !journal.is_empty() => Replayed::Lost,
        _ => Replayed::Nothing,
    };
    if replayed == Replayed::Lost {
        lost();
        // Before the entries, by which it is found out that the file is another one than it was.
        journal.into_iter().for_each(Journal::forget_loose);
    }
    // Not after the mark has gone, which would leave entries that nobody knows to be in the file.
    journal.into_iter().for_each(Journal::clear);
    if mark != 0 {
        set_mark(&file, &mut shape, 0).map_err(|not| not.error)?;
    }
    journal.into_iter().for_each(Journal::end);
    Ok(replayed)
}

/// Has the files of an image, top first, read as storage has them, where a sync had failed in an earlier process: tables of
/// the top are written once more ([`write_tables_again`]), and the rest of what the host holds is forgotten, before any of
/// it is believed. What waits in the `journal` is lost: that process may have been killed before it could say so there, and
/// entries lead to what was to be durable first.
///
/// # Errors
/// As [`write_tables_again`].
pub fn leave_unwritten(layers: &[Layer], unit: u32, journal: Option<&Journal>) -> io::Result<()> {
    let [top, below @ ..] = layers else { return Ok(()) };
    journal.into_iter().for_each(Journal::end);
    let bytes = (&*top.file).seek(SeekFrom::End(0))?;
    write_tables_again(&top.file, bytes, unit)?;
    let data = match &top.format {
        LayerFormat::Qcow2 { data, .. } => data.as_ref().map(|(file, _)| file),
        _ => None,
    };
    for file in [&top.file].into_iter().chain(data) {
        // What cannot be written now either is known to be lost.
        let _ = read_as_stored(file);
    }
    below.iter().for_each(|layer| forget(&layer.file));
    Ok(())
}

/// Writes all tables of an image once more, as they are read, and makes them durable. After a sync that failed the
/// host's cache may hold what storage does not, as if it were durable: later syncs leave it out, and it is gone when the
/// host needs the memory. The lock of the image has to be ours; it has so many `bytes`, and I/O is in multiples of
/// `unit`.
///
/// # Errors
/// What the host says, or what is wrong with the metadata.
pub fn write_tables_again(file: &Arc<File>, bytes: u64, unit: u32) -> io::Result<()> {
    let file = BlockFile::new(Arc::clone(file), unit);
    let header = Header::read(&file, bytes)?.map_err(io::Error::other)?;
    let shape = Shape::from(&header);
    let (cluster, tables) = (shape.cluster(), Tables::open(file.clone(), shape)?);
    let counts = u64::from(shape.refcount_table_clusters) << shape.cluster_bits;
    let mut buffer = vec![0; usize::try_from(counts).map_err(io::Error::other)?];
    file.read_or_zero(&mut buffer, shape.refcount_table_offset)?;
    let blocks: Vec<u64> = words(&buffer).map(|word| word & OFFSET).filter(|at| *at != 0).collect();
    let whole = [
        (0, cluster),
        (shape.l1_offset, 8 * u64::from(shape.l1_entries)),
        (shape.refcount_table_offset, counts),
    ];
    let each = blocks.into_iter().chain(tables.l2_offsets()).map(|at| (at, cluster));
    for (at, len) in whole.into_iter().chain(each) {
        // What is behind the end was never written.
        let len = len.min(bytes.saturating_sub(at));
        buffer.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        if len > 0 {
            file.read_whole(&mut buffer, at)?;
            file.write_at(&buffer, at)?;
        }
    }
    sync_patiently(|| file.sync_data())
}

fn put(
    file: &BlockFile,
    bytes: u64,
    shape: Shape,
    journal: &Journal,
    lost: &mut dyn FnMut(),
) -> io::Result<Replayed> {
    // The latest of each cluster, in their order on the disk.
    let entries = journal.entries();
    let words: BTreeMap<u64, u64> = entries.iter().copied().collect();
    let (last, loose) = (journal.last_written(), journal.loose());
    let mut tables = Tables::open(file.clone(), shape)?;
    if let Some(last) = last {
        if !has_last_written(&mut tables, last, &entries)? {
            return Ok(Replayed::Lost);
        }
    }
    if words.is_empty() && loose.is_empty() {
        return Ok(Replayed::Nothing);
    }
    let offsets: Vec<u64> = tables.l2_offsets().collect();
    let mut refcounts = Refcounts::open(file.clone(), shape, bytes, false, offsets.into_iter())?;
    let mut hosts = HashSet::new();
    for (cluster, word) in &words {
        let Some(host) = judge(&tables, bytes, *cluster, *word) else { return Ok(Replayed::Lost) };
        let Some(host) = host else { continue };
        if refcounts.metadata.contains(host) || refcounts.count(host)? != 1 || !hosts.insert(host) {
            return Ok(Replayed::Lost);
        }
    }
    let words: Vec<(u64, u64)> = words.into_iter().collect();
    if !words.is_empty() {
        // What they lead to has to be durable before they are. The host tells once that it is not.
        sync_patiently(|| file.sync_data()).inspect_err(|_| {
            lost();
            journal.end();
        })?;
        tables.write_all(&words)?;
    }
    if let Err(error) = give_back(&mut tables, &mut refcounts, loose) {
        if refcounts.sync_failed {
            lost();
            journal.end();
            return Err(error);
        }
        tracing::warn!("clusters that are not used could not be given back: {error}");
    }
    Ok(if words.is_empty() { Replayed::Nothing } else { Replayed::Entries(words.len()) })
}

/// Gives back those of these clusters that are not used.
fn give_back(
    tables: &mut Tables,
    refcounts: &mut Refcounts,
    loose: Vec<(u64, Option<u64>)>,
) -> io::Result<()> {
    let was_used = loose.iter().any(|(_, user)| user.is_some());
    let mut unused = unused(tables, refcounts, loose)?;
    if was_used && !unused.is_empty() {
        // That no entry leads there has to be durable before others get it.
        refcounts.sync()?;
    }
    let (mut shared, mut alone) = (Vec::new(), Vec::new());
    for cluster in unused.drain(..) {
        match refcounts.count(cluster)? {
            1 => alone.push(cluster),
            _ => shared.push(cluster),
        }
    }
    refcounts.free(&mut alone).and(refcounts.release(&mut shared))
}

/// Those of these clusters, in ascending order, that are counted once more than tables name them: none but the entry
/// of its user ever led there, since it was counted, and L1 tables of snapshots if it is a table.
pub(crate) fn unused(
    tables: &mut Tables,
    refcounts: &mut Refcounts,
    mut loose: Vec<(u64, Option<u64>)>,
) -> io::Result<Vec<u64>> {
    let shape = tables.shape;
    let clusters = shape.size.div_ceil(shape.cluster());
    let behind: HashSet<u64> =
        tables.behind()?.into_iter().map(|(_, offset)| offset >> shape.cluster_bits).collect();
    let listed = loose.iter().map(|(cluster, _)| *cluster).collect();
    let of_snapshots = of_snapshots(&tables.file, refcounts.end(), &listed)?;
    // Each table is read once.
    loose.sort_unstable_by_key(|(cluster, user)| (*user, *cluster));
    let mut unused = Vec::new();
    for (cluster, user) in loose {
        let is_table = refcounts.metadata.contains(cluster) || behind.contains(&cluster);
        let named = of_snapshots.get(&cluster).copied().unwrap_or(0);
        if is_table || refcounts.count(cluster)? != named + 1 {
            continue;
        }
        let is_named = match user {
            None => false,
            Some(user) if user >= clusters => true,
            Some(user) => tables.word(user)? & OFFSET == cluster << shape.cluster_bits,
        };
        if !is_named {
            unused.push(cluster);
        }
    }
    unused.sort_unstable();
    unused.dedup();
    Ok(unused)
}

/// How often L1 tables of internal snapshots name each of these clusters, if any does. The file has `end` bytes.
fn of_snapshots(
    file: &BlockFile,
    end: u64,
    clusters: &HashSet<u64>,
) -> io::Result<HashMap<u64, u64>> {
    let header = Header::read(file, end)?.map_err(io::Error::other)?;
    let (snapshots, _) = Snapshot::read_all(file, &header, end)?.map_err(io::Error::other)?;
    let (mut named, mut budget) = (HashMap::new(), Budget::default());
    for Snapshot { l1_offset, l1_entries, .. } in snapshots {
        budget.take(l1_entries.into())?;
        let len = 8 * u64::from(l1_entries);
        if len > L1_BYTES_MAX || l1_offset.saturating_add(len) > end {
            return Err(corrupt());
        }
        let mut bytes = vec![0; 8 * l1_entries as usize];
        file.read_or_zero(&mut bytes, l1_offset)?;
        for cluster in words(&bytes).map(|word| (word & OFFSET) >> header.cluster_bits) {
            if clusters.contains(&cluster) {
                *named.entry(cluster).or_default() += 1;
            }
        }
    }
    Ok(named)
}

/// Whether the tables have the entry that was written last. If they do not, the file has older contents, which
/// were put back in place. A later one of the same cluster, of `entries`, may be there in its place: its write was
/// under way.
fn has_last_written(
    tables: &mut Tables,
    (cluster, word): (u64, u64),
    entries: &[(u64, u64)],
) -> io::Result<bool> {
    if cluster >= tables.shape.size.div_ceil(tables.shape.cluster()) {
        return Ok(false);
    }
    let found = tables.word(cluster)?;
    Ok(found == word || entries.contains(&(cluster, found)))
}

/// Has the header say which journal may hold entries of this image; 0: none.
pub(crate) fn set_mark(file: &BlockFile, shape: &mut Shape, mark: u64) -> Result<(), NotReplaced> {
    let autoclear = shape.autoclear & !MARK_BITS | mark;
    // autoclear_features.
    file.replace_at(&shape.autoclear.to_be_bytes(), &autoclear.to_be_bytes(), 88)?;
    shape.autoclear = autoclear;
    Ok(())
}

/// Which cluster of the file an entry leads to, if to any; the outer `None` if it leads out of the file, to what
/// is no cluster of data, or belongs to a table that is not the image's alone: nobody has written such an entry.
#[allow(clippy::option_option, reason = "an entry that leads nowhere is a good one")]
fn judge(tables: &Tables, file_bytes: u64, cluster: u64, word: u64) -> Option<Option<u64>> {
    let shape = tables.shape;
    if cluster >= shape.size.div_ceil(shape.cluster()) {
        return None;
    }
    let within = |offset: u64| offset != 0 && offset % shape.cluster() == 0 && offset < file_bytes;
    let l1 = tables.l1(shape.split(cluster).0);
    if l1 & COPIED == 0 || !within(l1 & OFFSET) {
        return None;
    }
    match shape.entry(word) {
        Ok(Entry::Data { host, copied: true }) if within(host) => {
            Some(Some(host >> shape.cluster_bits))
        }
        Ok(Entry::Unallocated | Entry::Zero { host: None }) => Some(None),
        _ => None,
    }
}
