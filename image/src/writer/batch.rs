//! What is asked for in a batch is planned cluster by cluster, and then written, several clusters at a time.

use super::cluster_write::{ClusterWrite, Piece};
use super::crew::Crew;
use super::{Pending, Writer};
use crate::ask::{Ask, Room};
use crate::layout::{Entry, corrupt};
use crate::map::Map;
use ringway_core::{ByteRange, Op};
use std::io;

/// The most clusters that are planned to be written together.
const WRITES: usize = 1024;

/// A part of a request, all of one cluster.
#[derive(Debug)]
struct Part<'a> {
    /// The request, and its number in its batch.
    index: usize,
    ask: &'a Ask,
    /// So many bytes behind the beginning of what is asked for.
    done: u64,
    /// So many bytes behind the beginning of the cluster.
    within: u64,
    bytes: u64,
}

impl Writer {
    /// Plans to write (or zero) `len` bytes of a part, `skip` bytes behind its beginning; how many bytes.
    /// A write ends where the mapping needs no change: 0 if that is at the beginning. `asked` is a request
    /// and its number in its batch.
    ///
    /// # Errors
    /// What the host says; nothing of the range is mapped then.
    pub(crate) fn write(
        &mut self,
        map: &mut Map,
        asked: (usize, &Ask),
        skip: u64,
        len: u64,
    ) -> io::Result<u64> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let (size, (index, ask)) = (map.cluster(), asked);
        let mut done = 0;
        while done < len {
            if self.writes.len() == WRITES {
                self.carry_out_writes(map);
            }
            let at = ask.range.offset() + skip + done;
            let within = at % size;
            let bytes = (size - within).min(len - done);
            let part = Part { index, ask, done: skip + done, within, bytes };
            match self.write_cluster(map, at / size, &part) {
                Ok(true) => done += bytes,
                Ok(false) => break,
                Err(error) if done == 0 || ask.op != Op::Write => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Writes zeroes to a part of a cluster; in the tables with the next commit. No batch is under way.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn write_zeroes(&mut self, map: &mut Map, range: ByteRange) -> io::Result<()> {
        let (op, memory) = (Op::WriteZeroes, std::ptr::null());
        let ask = Ask { tag: 0, op, range, memory, skip: 0, room: Room::Freed };
        self.write(map, (0, &ask), 0, range.len())?;
        match self.finish_writes(map).first() {
            Some(&(_, errno)) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    /// Has all that is planned be written. Which requests of the batch it, or what was planned before,
    /// could not be written for, and why.
    pub(crate) fn finish_writes(&mut self, map: &mut Map) -> Vec<(usize, i32)> {
        self.carry_out_writes(map);
        std::mem::take(&mut self.failures)
    }

    pub(super) fn carry_out_writes(&mut self, map: &mut Map) {
        if self.writes.is_empty() {
            return;
        }
        let (size, apart) = (map.cluster(), map.layers.has_data_file());
        let layers = &map.layers;
        let crew = self.crew.get_or_insert_with(|| Crew::new(layers.blocks(), layers.data));
        self.planned.clear();
        for (write, result) in crew.carry_out(std::mem::take(&mut self.writes)) {
            let Err(error) = result else { continue };
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.failures.extend(write.asks().map(|ask| (ask, errno)));
            if let Some(before) = self.filled.remove(&write.cluster) {
                match before {
                    Some(before) => self.pending.insert(write.cluster, before),
                    None => self.pending.remove(&write.cluster),
                };
                // It may not read as zeroes any more, so it is no reserve.
                self.freed.extend((!apart).then(|| write.host / size));
            }
        }
        self.filled.clear();
    }

    /// False if the cluster is one that is written in place.
    fn write_cluster(&mut self, map: &mut Map, cluster: u64, part: &Part<'_>) -> io::Result<bool> {
        let ask = part.ask;
        let (old, zero) = match self.pending.get(&cluster) {
            Some(&Pending { host: Some(host), .. }) => {
                // Nobody else writes there before it is published.
                self.plan(cluster, host, Vec::new(), part);
                return Ok(true);
            }
            Some(Pending { host: None, old }) => (*old, true),
            None => match map.layers.top().entry(cluster)? {
                Entry::Data { host, copied } if copied || map.layers.has_data_file() => {
                    let beyond = host + map.bytes_of(cluster) > map.layers.data_end();
                    if beyond {
                        return Err(corrupt());
                    }
                    // Zeroes go there from here, and what the file does not take as it is; all other
                    // writes are the queue's own.
                    let from_here = ask.op != Op::Write || !ask.fits(map.layers.unit);
                    if self.is_metadata(map, host) {
                        return Err(corrupt());
                    }
                    if from_here {
                        self.plan(cluster, host, Vec::new(), part);
                    } else if !map.renew(cluster) {
                        // The queue would ask again, for ever.
                        return Err(corrupt());
                    }
                    return Ok(from_here);
                }
                old => {
                    let (at, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
                    (old, map.layers.is_zero(at, bytes)?)
                }
            },
        };
        if zero && ask.op != Op::Write && ask.room != Room::Made {
            return Ok(true);
        }
        let is_whole = part.bytes == map.bytes_of(cluster);
        let can_be_zero = map.zeroes_clusters() && !map.layers.has_data_file();
        self.own_l2(map, cluster)?;
        if ask.op == Op::WriteZeroes && ask.room == Room::Kept && is_whole && can_be_zero {
            // What it holds is not in a cluster of its own, so it needs none to hold zeroes.
            self.pending.insert(cluster, Pending { host: None, old });
            return Ok(true);
        }
        let host = match map.layers.has_data_file() {
            true => self.place_in_data_file(map, cluster, zero)?,
            false => self.allocate(map)? << map.layers.top().shape.cluster_bits,
        };
        if !zero {
            self.barrier = true;
        }
        let is_all = zero || is_whole;
        let held = self.held(map, cluster, host, is_all)?;
        let before = self.pending.insert(cluster, Pending { host: Some(host), old });
        self.filled.insert(cluster, before);
        self.plan(cluster, host, held, part);
        Ok(true)
    }

    /// Plans to write a part into a cluster that nobody else uses, behind what was planned for it before.
    fn plan(&mut self, cluster: u64, host: u64, held: Vec<Piece>, part: &Part<'_>) {
        let writes = &mut self.writes;
        let at = *self.planned.entry(cluster).or_insert_with(|| {
            writes.push(ClusterWrite::new(cluster, host, held));
            writes.len() - 1
        });
        // At most a cluster.
        #[allow(clippy::cast_possible_truncation)]
        let bytes = part.within as usize..(part.within + part.bytes) as usize;
        writes[at].push(part.index, part.ask, part.done, bytes);
    }

    /// What a cluster holds that is to be at `host`, and has to be written there with the first part;
    /// nothing if that `is_all`, or what is compressed: it is written now.
    fn held(
        &mut self,
        map: &mut Map,
        cluster: u64,
        host: u64,
        is_all: bool,
    ) -> io::Result<Vec<Piece>> {
        if is_all {
            return Ok(Vec::new());
        }
        let (at, bytes) = (cluster * map.cluster(), map.bytes_of(cluster));
        let result = match map.layers.pieces(at, bytes) {
            Ok(Some(pieces)) => return Ok(pieces),
            Ok(None) => self.unpack(map, at, bytes, host),
            Err(error) => Err(error),
        };
        if result.is_err() && !map.layers.has_data_file() {
            // It may not read as zeroes any more, so it is no reserve.
            self.freed.push(host / map.cluster());
        }
        result.map(|()| Vec::new())
    }

    /// Writes what a range of the disk holds to `host`.
    fn unpack(&mut self, map: &mut Map, at: u64, bytes: u64, host: u64) -> io::Result<()> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        let whole = self.buffer.room(bytes, map.layers.unit);
        map.layers.read(at, whole)?;
        map.layers.data().write_at(whole, host)
    }
}
