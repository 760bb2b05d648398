//! A disk becomes larger while it is served.
//!
//! ```text
//! a longer L1 table ─ sync ─► the header names it ─ sync ─► what was added reads as zeroes ─ sync ─►
//! the header has the new size ─ sync ─► whoever asked ─► the guest
//! ```
//!
//! A kill or a power cut at any moment leaves the old size or the new one.

use super::Writer;
use crate::ahead::Ranges;
use crate::header::{L1_BYTES_MAX, l1_entries};
use crate::layout::{Shape, corrupt, words};
use crate::map::Map;
use ringway_core::ByteRange;
use std::io;
use std::ops::Range;

/// Header fields size, crypt_method (0), l1_size, l1_table_offset: neighbours in one sector.
const SIZE_AT: u64 = 24;
/// Header field nb_snapshots.
const SNAPSHOTS_AT: u64 = 60;
/// So many clusters become zeroes at a time.
const BATCH: u64 = 4096;

/// What [`Writer::grow`] reads of what is on no file of this host.
pub(crate) fn needs_to_grow(map: &mut Map, size: u64) -> Ranges {
    let (old, cluster) = (map.layers.top().shape.size, map.cluster());
    let begin = old / cluster * cluster;
    if begin == old || size <= old {
        return Ranges::new();
    }
    // Also what a longer base holds behind the end.
    map.layers.set_size(size);
    let needs = map.layers.needs_ahead(begin, cluster.min(size - begin));
    map.layers.set_size(old);
    needs
}

impl Writer {
    /// Gives the disk `size` bytes; what was added reads as zeroes. Durable when it returns.
    ///
    /// # Errors
    /// What the host says, or why it cannot be so large. The size is the old one then; if nobody knows what
    /// the header says, nothing is changed any more.
    pub(crate) fn grow(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let old = map.layers.top().shape.size;
        if self.is_broken() {
            return Err(corrupt());
        }
        if size == old {
            return Ok(());
        }
        judge(map, old, size)?;
        map.table.make_room(size)?;
        self.longer_l1(map, size)?;
        if map.layers.has_data_file() {
            let end = map.layers.data_end();
            if end > old {
                // Whatever is behind the disk's end in that file.
                map.layers.data().punch(old, end.min(size) - old)?;
            }
            if end < size {
                map.layers.data().set_len(size)?;
                map.layers.set_data_end(size);
            }
        }
        let before = map.layers.top().shape;
        map.set_size(size);
        let grown = self
            .hide_base(map, old, size)
            .and_then(|()| self.sync())
            .and_then(|()| self.write_size(map, &before, &Shape { size, ..before }));
        match grown {
            Ok(()) => map.show_size(old),
            Err(_) => map.set_size(old),
        }
        grown
    }

    /// Has the header say how large the disk is, and where its L1 table and how long: what `after` does, where it
    /// says what `before` does.
    ///
    /// # Errors
    /// What the host says. If nobody knows what the header says, nothing is changed any more.
    pub(super) fn write_size(
        &mut self,
        map: &mut Map,
        before: &Shape,
        after: &Shape,
    ) -> io::Result<()> {
        let fields = |shape: &Shape| {
            let mut fields = [0; 24];
            fields[..8].copy_from_slice(&shape.size.to_be_bytes());
            fields[12..16].copy_from_slice(&shape.l1_entries.to_be_bytes());
            fields[16..].copy_from_slice(&shape.l1_offset.to_be_bytes());
            fields
        };
        let file = map.layers.top().file.clone();
        let replaced = file.replace_at(&fields(before), &fields(after), SIZE_AT);
        replaced.map_err(|not| self.not_replaced(not))?;
        self.sync()
    }

    /// Has the L1 table be long enough for `size` bytes: in its last cluster, or in other clusters.
    fn longer_l1(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let needed = l1_entries(size, shape.cluster_bits);
        let there = map.layers.top().l1_len();
        let number = |count: u64| u32::try_from(count).map_err(io::Error::other);
        if needed <= there as u64 {
            return Ok(());
        }
        let clusters = |entries: u64| (8 * entries).div_ceil(shape.cluster());
        let (have, want) = (clusters(shape.l1_entries.into()), clusters(needed));
        let whole =
            usize::try_from(want.max(have) * shape.cluster() / 8).map_err(io::Error::other)?;
        let behind = Behind::read(map)?;
        if want <= have {
            // What is behind the entries that were needed may be anything.
            let rest = map.layers.top().l1_bytes(whole).split_off(8 * there);
            let at = shape.l1_offset + 8 * there as u64;
            let written = map.layers.top().file.write_at(&rest, at);
            // If that has failed, some of them may be there.
            let cut = behind.cut(map, written.is_ok());
            self.free_behind(cut);
            written?;
            self.sync()?;
            let l1_entries = number(needed)?.max(shape.l1_entries);
            self.write_size(map, &shape, &Shape { l1_entries, ..shape })?;
            map.layers.top().set_l1_table(shape.l1_offset, l1_entries);
            return Ok(());
        }
        self.renew_mark(map)?;
        let run = self.reserve_run(want);
        map.layers.set_top_end(self.refcounts.end());
        self.freed.append(&mut self.refcounts.unused);
        let (first, rest) = run?;
        self.reserve.extend(rest);
        let bytes = map.layers.top().l1_bytes(whole);
        let l1_offset = first << shape.cluster_bits;
        let after = Shape { l1_offset, l1_entries: number(needed)?, ..shape };
        let file = map.layers.top().file.clone();
        let named = file
            .write_at(&bytes, l1_offset)
            .and_then(|()| self.sync())
            .and_then(|()| self.write_size(map, &shape, &after));
        if let Err(error) = named {
            // It may not read as zeroes any more, so it is no reserve.
            self.freed.extend(first..first + want);
            return Err(error);
        }
        self.refcounts.note_metadata(first..first + want);
        (first..first + want).for_each(|cluster| self.refcounts.loose.remove(cluster));
        map.layers.top().set_l1_table(l1_offset, after.l1_entries);
        let before = shape.l1_offset >> shape.cluster_bits;
        let before: Vec<u64> = (before..before + have).collect();
        self.refcounts.loose.take_ahead(&before);
        self.free_tables(before);
        let cut = behind.cut(map, true);
        self.free_behind(cut);
        Ok(())
    }

    /// Nothing leads to what lay behind the disk any more.
    fn free_behind(&mut self, cut: Vec<Cut>) {
        for Cut { table, data, .. } in cut {
            self.free_tables(vec![table]);
            data.into_iter().for_each(|clusters| self.free(clusters));
        }
    }

    /// Takes so many free clusters in one piece, as `Refcounts::reserve`: the first of them, and others
    /// that were taken on the way.
    ///
    /// # Errors
    /// What the host says, or that there is no such piece.
    fn reserve_run(&mut self, count: u64) -> io::Result<(u64, Vec<u64>)> {
        let want = usize::try_from(count).map_err(io::Error::other)?;
        let mut got: Vec<u64> = Vec::new();
        while got.len() < 16 * want + 1024 {
            match self.refcounts.reserve(want) {
                Ok(more) => got.extend(more),
                Err(error) => {
                    self.freed.append(&mut got);
                    return Err(error);
                }
            }
            got.sort_unstable();
            let run = got.windows(want).position(|run| run[want - 1] - run[0] == count - 1);
            if let Some(at) = run {
                let first = got[at];
                got.drain(at..at + want);
                return Ok((first, got));
            }
        }
        self.freed.append(&mut got);
        Err(io::Error::other(format!(
            "no {count} clusters in one piece are to be had for its L1 table. Use `qemu-img resize`, \
             while nobody serves it"
        )))
    }

    /// Has what was added read as zeroes: the rest of the last cluster, and what a longer base holds there.
    fn hide_base(&mut self, map: &mut Map, old: u64, size: u64) -> io::Result<()> {
        let cluster = map.cluster();
        let whole = old.next_multiple_of(cluster).min(size);
        if let Some(range) = ByteRange::new(old, whole - old).filter(|range| !range.is_empty()) {
            let zeroed = self.write_zeroes(map, range);
            self.commit(map).and(zeroed)?;
        }
        let end = map.layers.base_bytes().min(size).div_ceil(cluster);
        let mut first = whole.div_ceil(cluster);
        while first < end {
            let next = (first + BATCH).min(end);
            let zeroed = self.zero(map, first..next);
            // Also if some of them could not be.
            self.commit(map).and(zeroed)?;
            first = next;
        }
        Ok(())
    }
}

/// What L1 entries lead to that lie behind those of the disk: the state of a machine that was saved with it.
struct Behind(Vec<Cut>);

/// What one of them leads to.
struct Cut {
    index: usize,
    /// The cluster of its table,
    table: u64,
    /// and those that this names.
    data: Vec<Range<u64>>,
}

impl Behind {
    fn read(map: &mut Map) -> io::Result<Self> {
        let tables = map.layers.top();
        let (shape, mut all) = (tables.shape, Vec::new());
        for (index, offset) in tables.behind()? {
            let mut bytes = vec![0; 1 << shape.cluster_bits];
            tables.file.read_or_zero(&mut bytes, offset)?;
            // What is damaged leaks.
            let entries = words(&bytes).filter_map(|word| shape.entry(word).ok());
            let data = entries.map(|entry| entry.clusters(shape.cluster()));
            let data = data.filter(|clusters| !clusters.is_empty()).collect();
            all.push(Cut { index, table: offset >> shape.cluster_bits, data });
        }
        Ok(Self(all))
    }

    /// Those that the L1 table does not name any more: all of them if `all`.
    fn cut(mut self, map: &mut Map, all: bool) -> Vec<Cut> {
        if !all {
            // Nobody knows.
            let Ok(left) = map.layers.top().behind() else { return Vec::new() };
            self.0.retain(|cut| left.iter().all(|(index, _)| *index != cut.index));
        }
        self.0
    }
}

/// Refuses what cannot be, before anything is changed.
fn judge(map: &mut Map, old: u64, size: u64) -> io::Result<()> {
    let refuse = |text: String| Err(io::Error::new(io::ErrorKind::Unsupported, text));
    let shape = map.layers.top().shape;
    if size < old || size % 512 != 0 || size > i64::MAX.unsigned_abs() {
        return refuse(format!("{size} bytes are no size that it can grow to"));
    }
    let l1_bytes = l1_entries(size, shape.cluster_bits).saturating_mul(8);
    if l1_bytes > L1_BYTES_MAX {
        let cluster = shape.cluster();
        return refuse(format!(
            "{size} bytes need an L1 table of more than 32 MiB with clusters of {cluster} bytes"
        ));
    }
    if shape.version < 3 {
        let mut snapshots = [0; 4];
        map.layers.top().file.read_or_zero(&mut snapshots, SNAPSHOTS_AT)?;
        if snapshots != [0; 4] {
            return refuse("version 2 cannot say that its snapshots have another size".into());
        }
        if !map.zeroes_clusters() && map.layers.base_bytes() > old {
            return refuse(
                "it is version 2, which has no word for zeroes where its base is longer than it is. \
                 `qemu-img amend -o compat=1.1` makes it version 3"
                    .into(),
            );
        }
    }
    Ok(())
}
