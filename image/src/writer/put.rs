//! Content goes into an image from elsewhere, whatever its tables say of the place.

use super::{Pending, Writer};
use crate::layout::{Entry, corrupt};
use crate::map::Map;
use ringway_core::ByteRange;
use std::io;

impl Writer {
    /// Writes `bytes` from byte `at` of the disk on, within it. Nobody else writes the image meanwhile.
    /// In the tables with the next commit.
    ///
    /// # Errors
    /// What the host says. What was written before is in the tables with the next commit.
    pub(crate) fn put(&mut self, map: &mut Map, at: u64, bytes: &[u8]) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let size = map.cluster();
        let mut done = 0;
        while done < bytes.len() {
            let at = at + done as u64;
            let within = at % size;
            let rest = &bytes[done..];
            let part = usize::try_from(size - within).map_or(rest.len(), |to| to.min(rest.len()));
            self.put_cluster(map, at / size, within, &rest[..part])?;
            done += part;
        }
        Ok(())
    }

    fn put_cluster(
        &mut self,
        map: &mut Map,
        cluster: u64,
        within: u64,
        part: &[u8],
    ) -> io::Result<()> {
        let (old, zero) = match self.pending.get(&cluster) {
            Some(Pending { host: Some(host), .. }) => {
                return map.layers.data().write_at(part, host + within);
            }
            Some(Pending { host: None, old }) => (*old, true),
            None => match map.layers.top().entry(cluster)? {
                Entry::Data { host, copied } if copied || map.layers.has_data_file() => {
                    if host + map.bytes_of(cluster) > map.layers.data_end() {
                        return Err(corrupt());
                    }
                    if self.is_metadata(map, host) {
                        return Err(corrupt());
                    }
                    return map.layers.data().write_at(part, host + within);
                }
                old => (old, false),
            },
        };
        let number = |bytes| usize::try_from(bytes).map_err(io::Error::other);
        let (bytes, within) = (number(map.bytes_of(cluster))?, number(within)?);
        let mut whole = vec![0; bytes];
        if part.len() < bytes && !zero {
            let at = cluster * map.cluster();
            map.layers.read(at, &mut whole)?;
        }
        whole[within..within + part.len()].copy_from_slice(part);
        self.own_l2(map, cluster)?;
        let apart = map.layers.has_data_file();
        let host = match apart {
            true => self.place_in_data_file(map, cluster, false)?,
            false => self.allocate(map)? << map.layers.top().shape.cluster_bits,
        };
        // It may replace other content: data before the entry.
        self.barrier = true;
        if let Err(error) = map.layers.data().write_at(&whole, host) {
            // It may not read as zeroes any more, so it is no reserve.
            self.freed.extend((!apart).then(|| host / map.cluster()));
            return Err(error);
        }
        self.pending.insert(cluster, Pending { host: Some(host), old });
        Ok(())
    }

    /// As [`Writer::put`], of zeroes: whole clusters are given back where the image has a word for that.
    ///
    /// # Errors
    /// As [`Writer::put`].
    pub(crate) fn put_zeroes(&mut self, map: &mut Map, range: ByteRange) -> io::Result<()> {
        let size = map.cluster();
        let mut whole = map.whole_clusters(range);
        if !map.zeroes_clusters() {
            whole.end = whole.start;
        }
        let first = (whole.start * size).min(range.end());
        let end = (whole.end * size).min(range.end());
        self.put_zero_bytes(map, range.offset(), first)?;
        self.zero(map, whole)?;
        self.put_zero_bytes(map, end, range.end())
    }

    /// By writing them, where there is something else.
    fn put_zero_bytes(&mut self, map: &mut Map, from: u64, end: u64) -> io::Result<()> {
        let size = map.cluster();
        let mut at = from;
        while at < end {
            let len = (size - at % size).min(end - at);
            if self.pending.contains_key(&(at / size)) || !map.layers.is_zero(at, len)? {
                let zeroes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
                self.put(map, at, &zeroes)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Puts all that was written into the tables, and makes it durable.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn settle(&mut self, map: &mut Map) -> io::Result<()> {
        self.commit(map)?;
        self.sync()
    }
}
