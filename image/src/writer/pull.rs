//! What an image lacks is copied into it from those it is based on.

use super::{Pending, Writer};
use crate::ahead::Ranges;
use crate::aligned::Aligned;
use crate::ask::Pulled;
use crate::layout::{Entry, corrupt};
use crate::map::Map;
use ringway_core::ByteRange;
use std::io;
use std::ops::Range;

/// The most clusters that are looked at together, if there is nothing to read.
const CLUSTERS: u64 = 8192;

/// What [`Writer::pull`] of a range reads of what is on no file of this host.
///
/// # Errors
/// What the host says.
pub(crate) fn needs_to_pull(map: &mut Map, range: ByteRange) -> io::Result<Ranges> {
    let (mut ranges, mut read) = (Ranges::new(), 0);
    for cluster in clusters(map, range) {
        if let Some((at, bytes)) = lacks(map, cluster)? {
            ranges.extend(map.layers.needs_ahead(at, bytes));
            read += bytes;
        }
        if read >= range.len() {
            break;
        }
    }
    Ok(ranges)
}

/// The clusters that are looked at together.
fn clusters(map: &mut Map, range: ByteRange) -> Range<u64> {
    let first = range.offset() / map.cluster();
    first..map.table.clusters().min(first.saturating_add(CLUSTERS))
}

/// Where a cluster begins, and its bytes, if the top says nothing of it and it is not zeroes.
fn lacks(map: &mut Map, cluster: u64) -> io::Result<Option<(u64, u64)>> {
    let (at, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
    let is_there = map.layers.top().entry(cluster)? != Entry::Unallocated;
    Ok((!is_there && !map.layers.is_zero(at, bytes)?).then_some((at, bytes)))
}

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
        let (mut pulled, mut outcome) =
            (Pulled { next: range.offset(), read: 0, copied: 0 }, Ok(()));
        for cluster in clusters(map, range) {
            outcome = self.pull_cluster(map, cluster, &mut pulled);
            if let Err(error) = &outcome {
                // A guest has written some of what was fetched: so far, and then the rest is fetched.
                if error.kind() == io::ErrorKind::WouldBlock && pulled.next > range.offset() {
                    outcome = Ok(());
                }
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
        let Some((_, bytes)) = lacks(map, cluster)? else { return Ok(()) };
        let mut buffer = std::mem::take(&mut self.buffer);
        let copied = self.copy_up(map, cluster, &mut buffer);
        self.buffer = buffer;
        let copied = copied?;
        pulled.read += bytes;
        if let Some(host) = copied {
            self.pending.insert(cluster, Pending { host: Some(host), old: Entry::Unallocated });
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
