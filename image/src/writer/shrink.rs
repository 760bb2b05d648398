//! A disk becomes smaller while nobody serves it.
//!
//! ```text
//! the last cluster ends in zeroes, no entry leads to what is cut off ─ sync ─► its clusters are given back
//! ─► the header has the new size ─ sync
//! ```
//!
//! A kill or a power cut at any moment leaves the old size or the new one. With the old one what was to be
//! cut off may be gone, wholly or in part, and all before it is there. The other way round, with the new size
//! first, a disk that grows again would show what it once held.

use super::{Pending, Writer};
use crate::file::BlockFile;
use crate::header::{Header, l1_entries};
use crate::layout::{Entry, OFFSET, Shape, corrupt};
use crate::map::Map;
use crate::snapshot::Snapshot;
use ringway_core::ByteRange;
use std::io;

/// So many clusters are given back together, at least.
const PORTION: usize = 1 << 16;

impl Writer {
    /// Gives the disk `size` bytes, fewer than it has. Durable when it returns, but for clusters that are
    /// not given back yet. Nobody may look into the table any more, which is not made shorter.
    ///
    /// # Errors
    /// What the host says, or why it cannot be so small. What lies beyond `size` may be gone then, unless
    /// that is what is in the way.
    pub(crate) fn shrink(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        judge(map, size)?;
        self.cut_cluster(map, size)?;
        self.cut_table(map, size)?;
        self.cut_tables(map, size)?;
        self.give_back_portion(map)?;
        let before = map.layers.top().shape;
        self.write_size(map, &before, &Shape { size, ..before })?;
        map.layers.set_size(size);
        Ok(())
    }

    /// Has the rest of the last cluster be zeroes: QEMU shows what is there to a disk that grows again.
    fn cut_cluster(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let entry = map.layers.top().entry(size / shape.cluster())?;
        let end = size.next_multiple_of(shape.cluster()).min(shape.size);
        let rest = ByteRange::new(size, end - size).filter(|range| !range.is_empty());
        if let (Some(range), false) = (rest, entry == Entry::Unallocated) {
            self.write_zeroes(map, range)?;
        }
        self.commit(map)
    }

    /// Has the entries beyond the new end lead nowhere that lie in a table with some before it.
    fn cut_table(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let first = size.div_ceil(shape.cluster());
        let next_table = first.next_multiple_of(1 << shape.l2_bits());
        let end = next_table.min(shape.size.div_ceil(shape.cluster()));
        for cluster in first..end {
            let old = map.layers.top().entry(cluster)?;
            if !matches!(old, Entry::Unallocated | Entry::Zero { host: None }) {
                self.own_l2(map, cluster)?;
                self.pending.insert(cluster, Pending { host: None, old });
            }
        }
        self.commit(map)
    }

    /// Has no entry of L1 lead to the tables that lie beyond the new end as a whole.
    fn cut_tables(&mut self, map: &mut Map, size: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let number = |count: u64| usize::try_from(count).map_err(io::Error::other);
        let first = number(l1_entries(size, shape.cluster_bits))?;
        let end = number(l1_entries(shape.size, shape.cluster_bits))?;
        for index in first..end {
            let tables = map.layers.top();
            let before = tables.l1(index);
            let Some(words) = tables.table(index)?.map(|words| words.to_vec()) else { continue };
            let table = (before & OFFSET) >> shape.cluster_bits;
            let entries: io::Result<Vec<Entry>> =
                words.into_iter().map(|word| shape.entry(word)).collect();
            let entries = entries?;
            tables.set_l1(index, 0);
            tables.forget(index);
            if let Err(not) = tables.write_l1(index, before) {
                tables.set_l1(index, before);
                return Err(self.not_replaced(not));
            }
            self.free_tables(vec![table]);
            entries.into_iter().for_each(|entry| self.free(entry.clusters(shape.cluster())));
            if self.freed.len() >= PORTION {
                self.give_back_portion(map)?;
            }
        }
        Ok(())
    }

    /// Gives back what no entry leads to any more, once that is durable. Nothing is in flight.
    fn give_back_portion(&mut self, map: &mut Map) -> io::Result<()> {
        self.sync()?;
        let freed = std::mem::take(&mut self.freed);
        self.release(map, freed)
    }
}

/// Refuses what cannot be, before anything is changed.
fn judge(map: &mut Map, size: u64) -> io::Result<()> {
    let refuse = |text: String| Err(io::Error::new(io::ErrorKind::Unsupported, text));
    let shape = map.layers.top().shape;
    if size == 0 || size >= shape.size || size % 512 != 0 {
        return refuse(format!("{size} bytes are no size that it can shrink to"));
    }
    if map.layers.has_data_file() {
        return refuse("its data are in another file: use `qemu-img resize --shrink`".into());
    }
    if shape.version < 3 && map.layers.has_backing() {
        return refuse(
            "it is version 2, which has no word for zeroes over what it is based on. `qemu-img amend -o \
             compat=1.1` makes it version 3"
                .into(),
        );
    }
    let end = map.layers.top_end();
    let file: &BlockFile = &map.layers.top().file;
    let header = Header::read(file, end)?.map_err(io::Error::other)?;
    let (snapshots, _) = Snapshot::read_all(file, &header, end)?.map_err(io::Error::other)?;
    if shape.version < 3 && !snapshots.is_empty() {
        return refuse("version 2 cannot say that its snapshots have another size".into());
    }
    match snapshots.iter().find(|snapshot| snapshot.virtual_size.is_none()) {
        Some(snapshot) => refuse(format!(
            "its snapshot '{}' does not say how large the disk was: it would become smaller, too. Delete it \
             first (qemu-img snapshot -d)",
            snapshot.name
        )),
        None => Ok(()),
    }
}
