//! Images whose data are in another file: there each cluster lies where it does on the disk.
//!
//! Nobody counts what is in that file, and what is there before an entry leads to it may be anything. So a
//! first write makes the rest of its cluster zeroes, and is durable before its entry. Zeroes are written in
//! place, so that the file stays a raw image of the disk where it has to be one (`data_file_raw`).

use super::{Pending, Writer};
use crate::layout::{Entry, corrupt};
use crate::map::Map;
use std::io;
use std::ops::Range;

impl Writer {
    /// Where a cluster of the disk is to be; with `zero` it reads as zeroes there now.
    pub(super) fn place_in_data_file(
        &mut self,
        map: &mut Map,
        cluster: u64,
        zero: bool,
    ) -> io::Result<u64> {
        let (host, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
        self.barrier = true;
        if zero {
            map.layers.data().punch(host, bytes)?;
        }
        Ok(host)
    }

    /// As [`Writer::zero`]. An entry changes only where a backing file would be seen otherwise.
    pub(super) fn zero_data_file(&mut self, map: &mut Map, clusters: Range<u64>) -> io::Result<()> {
        for cluster in clusters {
            let (at, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
            let host = match self.pending.get(&cluster) {
                Some(pending) => pending.host,
                None => match map.layers.top().entry(cluster)? {
                    Entry::Data { host, .. } => Some(host),
                    Entry::Zero { .. } => None,
                    old => {
                        if !map.layers.is_zero(at, bytes)? {
                            self.own_l2(map, cluster)?;
                            self.pending.insert(cluster, Pending { host: None, old });
                        }
                        None
                    }
                },
            };
            let Some(host) = host else { continue };
            if host + bytes > map.layers.data_end() {
                return Err(corrupt());
            }
            map.layers.data().punch(host, bytes)?;
        }
        Ok(())
    }
}
