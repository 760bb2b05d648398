//! What an image lacks is copied into it from those it is based on.

use super::{Pending, Writer};
use crate::aligned::Aligned;
use crate::ask::Pulled;
use crate::layout::{Entry, corrupt};
use crate::map::Map;
use ringway_core::ByteRange;
use std::io;

/// The most clusters that are looked at together, if there is nothing to read.
const CLUSTERS: u64 = 8192;

impl Writer {
    /// Copies from the beginning of `range` on, until as many bytes were read as that has, or many
    /// clusters looked at. Whatever is zeroes is left out: an entry that says nothing means the same with
    /// and without a backing file then.
    ///
    /// # Errors
    /// What the host says. What was copied before is in the tables.
    pub(crate) fn pull(&mut self, map: &mut Map, range: ByteRange) -> io::Result<Pulled> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let size = map.cluster();
        let first = range.offset() / size;
        let end = map.table.clusters().min(first.saturating_add(CLUSTERS));
        let (mut pulled, mut outcome) =
            (Pulled { next: range.offset(), read: 0, copied: 0 }, Ok(()));
        for cluster in first..end {
            outcome = self.pull_cluster(map, cluster, &mut pulled);
            if outcome.is_err() {
                break;
            }
            pulled.next = cluster * size + map.bytes_of(cluster);
            if pulled.read >= range.len() {
                break;
            }
        }
        // Also if the next one could not be copied.
        self.commit(map)?;
        outcome.map(|()| pulled)
    }

    fn pull_cluster(&mut self, map: &mut Map, cluster: u64, pulled: &mut Pulled) -> io::Result<()> {
        let (at, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
        let old = map.layers.top().entry(cluster)?;
        if old != Entry::Unallocated || map.layers.is_zero(at, bytes)? {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let copied = self.copy_up(map, cluster, &mut buffer);
        self.buffer = buffer;
        pulled.read += bytes;
        if let Some(host) = copied? {
            self.pending.insert(cluster, Pending { host: Some(host), old });
            pulled.copied += bytes;
        }
        Ok(())
    }

    /// Copies a cluster; where it is then, or `None` if it is zeroes.
    fn copy_up(
        &mut self,
        map: &mut Map,
        cluster: u64,
        buffer: &mut Aligned,
    ) -> io::Result<Option<u64>> {
        let bytes = usize::try_from(map.bytes_of(cluster)).map_err(io::Error::other)?;
        let buffer = buffer.room(bytes, map.layers.unit);
        let at = cluster * map.cluster();
        map.layers.read(at, buffer)?;
        if buffer.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        self.own_l2(map, cluster)?;
        let apart = map.layers.has_data_file();
        let host = match apart {
            true => self.place_in_data_file(map, cluster, false)?,
            false => self.allocate(map)? << map.layers.top().shape.cluster_bits,
        };
        // It replaces what the backing file says: data before the entry.
        self.barrier = true;
        if let Err(error) = map.layers.data().write_at(buffer, host) {
            // It may not read as zeroes any more, so it is no reserve.
            self.freed.extend((!apart).then(|| host / map.cluster()));
            return Err(error);
        }
        Ok(Some(host))
    }
}
