//! A disk becomes larger while it is served.
//!
//! ```text
//! a longer L1 table ─ sync ─► the header names it ─ sync ─► what was added reads as zeroes ─ sync ─►
//! the header has the new size ─ sync ─► whoever asked ─► the guest
//! ```
//!
//! A kill or a power cut at any moment leaves the old size or the new one.

use super::Writer;
use crate::header::{L1_BYTES_MAX, l1_entries};
use crate::layout::corrupt;
use crate::map::Map;
use ringway_core::ByteRange;
use std::io;

/// Header fields size, crypt_method (0), l1_size, l1_table_offset: neighbours in one sector.
const SIZE_AT: u64 = 24;
/// Header field nb_snapshots.
const SNAPSHOTS_AT: u64 = 60;
/// So many clusters become zeroes at a time.
const BATCH: u64 = 4096;

impl Writer {
    /// Gives the disk `size` bytes; what was added reads as zeroes. Durable when it returns.
    ///
    /// # Errors
    /// What the host says, or why it cannot be so large. The size is the old one then; if the header could
    /// not be written, nothing is changed any more.
    pub(crate) fn grow(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let old = map.layers.top().shape.size;
        if self.is_broken() {
            return Err(corrupt());
        }
        if size == old {
            return Ok(());
        }
        judge(map, old, size)?;
        map.table.grow(size)?;
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
        map.set_size(size);
        let grown = self.hide_base(map, old, size).and_then(|()| self.sync(map));
        if let Err(error) = grown {
            map.set_size(old);
            return Err(error);
        }
        self.write_size(map, size)
    }

    /// Has the header say how large the disk is, and where its L1 table.
    pub(super) fn write_size(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let mut fields = [0; 24];
        fields[..8].copy_from_slice(&size.to_be_bytes());
        fields[12..16].copy_from_slice(&shape.l1_entries.to_be_bytes());
        fields[16..].copy_from_slice(&shape.l1_offset.to_be_bytes());
        let written = map.layers.top().file.write_at(&fields, SIZE_AT);
        // Nobody knows what it says, if this fails.
        written.and_then(|()| self.sync(map)).inspect_err(|_| self.broken = true)
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
        if want <= have {
            // What is behind the entries that were needed may be anything.
            let rest = map.layers.top().l1_bytes(whole).split_off(8 * there);
            let at = shape.l1_offset + 8 * there as u64;
            map.layers.top().file.write_at(&rest, at)?;
            self.sync(map)?;
            let entries = number(needed)?.max(shape.l1_entries);
            map.layers.top().set_l1_table(shape.l1_offset, entries);
            return self.write_size(map, shape.size);
        }
        self.renew_mark(map)?;
        let (first, rest) = self.reserve_run(want)?;
        map.layers.set_top_end(self.refcounts.end());
        self.reserve.extend(rest);
        let bytes = map.layers.top().l1_bytes(whole);
        let offset = first << shape.cluster_bits;
        if let Err(error) = map.layers.top().file.write_at(&bytes, offset) {
            self.freed.extend(first..first + want);
            return Err(error);
        }
        self.refcounts.note_metadata(first..first + want);
        self.sync(map)?;
        map.layers.top().set_l1_table(offset, number(needed)?);
        self.write_size(map, shape.size)?;
        let before = shape.l1_offset >> shape.cluster_bits;
        self.free_tables((before..before + have).collect());
        Ok(())
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
                    self.refcounts.release(&got)?;
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
        self.refcounts.release(&got)?;
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
            self.write_zeroes(map, range)?;
            self.commit(map)?;
        }
        let end = map.layers.base_bytes().min(size).div_ceil(cluster);
        let mut first = whole.div_ceil(cluster);
        while first < end {
            let next = (first + BATCH).min(end);
            self.zero(map, first..next)?;
            self.commit(map)?;
            first = next;
        }
        Ok(())
    }
}

/// Refuses what cannot be, before anything is changed.
fn judge(map: &mut Map, old: u64, size: u64) -> io::Result<()> {
    let refuse = |text: String| Err(io::Error::new(io::ErrorKind::Unsupported, text));
    let shape = map.layers.top().shape;
    if size < old || !size.is_multiple_of(512) || size > i64::MAX.unsigned_abs() {
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
