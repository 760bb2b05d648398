//! First writes: clusters are allocated, filled, and put into the tables.
//!
//! The order, by which a kill or a power cut at any moment leaves an image that is whole:
//!
//! ```text
//! refcounts of a reserve ─ sync ─► data ─ sync, if they replace others ─► L1, L2 ─► table ─► answers
//! L2 says otherwise ─► nothing in flight ─ sync ─► refcounts go down ─► clusters are used again
//! ```
//!
//! With a journal, L2 entries of guests' writes come last: see `writer/deferred.rs`.
//!
//! A call may fail anywhere in between. Then each table says in memory what it says in the file, entry by entry, and what
//! that is is read again where it is not known; a cluster that no table names is given back later, and leaks where nobody
//! knows.
//!
//! Reserved clusters read as zeroes, durably. So a first write where the disk read as zeroes needs no
//! sync: if its entry survives a power cut and its data do not, the disk reads as it did before.

mod batch;
pub(crate) mod cluster_write;
mod crew;
mod data_file;
mod deferred;
mod detach;
mod give_back;
mod grow;
mod name_backing;
mod pull;
mod put;
mod shrink;

use crate::aligned::Aligned;
use crate::file::NotReplaced;
use crate::journal::Journal;
use crate::l2::Unwritten;
use crate::layout::{COPIED, Entry, OFFSET, Shape, ZERO, corrupt};
use crate::map::Map;
use crate::refcounts::Refcounts;
use crate::table::Word;
use cluster_write::ClusterWrite;
use crew::Crew;
pub(crate) use grow::needs_to_grow;
pub(crate) use pull::needs_to_pull;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// The most that is reserved ahead, in bytes: what a kill may leave as a leak, until the image is opened again.
const RESERVE_BYTES: u64 = 64 << 20;

/// The most room that is found ahead in the file system, in bytes, where that is a gain: each image may have it.
const ROOM_BYTES: u64 = 2 << 20;

/// What becomes of a cluster when the batch is committed.
#[derive(Clone, Copy, Debug)]
struct Pending {
    /// Where its data are now; `None`: it reads as zeroes.
    host: Option<u64>,
    /// What its entry still says.
    old: Entry,
}

/// Changes the mapping of an image.
#[derive(Debug)]
pub(crate) struct Writer {
    refcounts: Refcounts,
    /// Clusters that are counted and not used, and read as zeroes.
    reserve: VecDeque<u64>,
    reserve_next: usize,
    /// So many of the first ones of the reserve have room in the file system ([`BlockFile::find_room`]).
    reserve_ready: usize,
    /// Clusters of the disk that are about to change.
    pending: HashMap<u64, Pending>,
    /// What is to be written, in the order in which it was planned, and where in that a cluster is.
    writes: Vec<ClusterWrite>,
    planned: HashMap<u64, usize>,
    /// Clusters that are written whole for the first time with them, and what was pending of each.
    filled: HashMap<u64, Option<Pending>>,
    /// Requests of the batch that could not be written, and why, as `errno` says it.
    failures: Vec<(usize, i32)>,
    crew: Option<Crew>,
    /// L1 entries that changed in memory, with what they were.
    l1: Vec<(usize, u64)>,
    /// What was written replaces other content: it has to be durable before its entry is.
    barrier: bool,
    /// Clusters that the file needs no more, once nothing is in flight there and the tables are
    /// durable.
    pub(crate) freed: Vec<u64>,
    /// A sync failed: nobody knows what the file holds.
    broken: bool,
    /// A write of the header failed, and nobody knows what it says: nothing is changed any more.
    is_unsure: bool,
    /// It was told that an entry leads to metadata.
    told: bool,
    buffer: Aligned,
    journal: Option<Arc<Journal>>,
    defers: bool,
    /// The journal has this mark already, and the header may; 0 if that is not in doubt.
    begun: u64,
    /// What the header says of whose entries it has; 0 if it says nothing.
    mark: Arc<AtomicU64>,
}

impl Writer {
    /// The mark of the journal is shared with whoever hears that a sync has failed.
    pub(crate) fn new(
        refcounts: Refcounts,
        journal: Option<(Arc<Journal>, Arc<AtomicU64>)>,
    ) -> Self {
        let (journal, mark) = journal.unzip();
        let mark = mark.unwrap_or_default();
        Self {
            refcounts,
            reserve: VecDeque::new(),
            reserve_next: 8,
            reserve_ready: 0,
            pending: HashMap::new(),
            writes: Vec::new(),
            planned: HashMap::new(),
            filled: HashMap::new(),
            failures: Vec::new(),
            crew: None,
            l1: Vec::new(),
            barrier: false,
            freed: Vec::new(),
            broken: false,
            is_unsure: false,
            told: false,
            buffer: Aligned::default(),
            journal,
            defers: true,
            begun: 0,
            mark,
        }
    }

    /// Has whole clusters read as zeroes, and their space given back. A discard may
    /// leave some as they are; zeroing is only asked for where [`Map::zeroes_clusters`] says so.
    pub(crate) fn zero(&mut self, map: &mut Map, clusters: Range<u64>) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        if !map.zeroes_clusters() {
            return Ok(());
        }
        // They may have been asked for before.
        self.carry_out_writes(map);
        if map.layers.has_data_file() {
            return self.zero_data_file(map, clusters);
        }
        let (size, backing) = (map.cluster(), map.layers.has_backing());
        for cluster in clusters {
            if let Some(pending) = self.pending.get_mut(&cluster) {
                self.freed.extend(pending.host.take().map(|host| host / size));
                continue;
            }
            let old = map.layers.top().entry(cluster)?;
            let (at, bytes) = (cluster * size, map.bytes_of(cluster));
            let nothing = match old {
                Entry::Unallocated => !backing || map.layers.is_zero(at, bytes)?,
                Entry::Zero { host } => host.is_none(),
                _ => false,
            };
            if !nothing {
                self.own_l2(map, cluster)?;
                self.pending.insert(cluster, Pending { host: None, old });
            }
        }
        Ok(())
    }

    /// Has the L2 table of a cluster be there and ours alone. The L1 entry says so after the commit.
    ///
    /// # Errors
    /// What the host says; nothing has changed then.
    fn own_l2(&mut self, map: &mut Map, cluster: u64) -> io::Result<()> {
        let shape = map.layers.top().shape;
        let (index, _) = shape.split(cluster);
        let l1 = map.layers.top().l1(index);
        let old = l1 & OFFSET;
        if old != 0 && l1 & COPIED != 0 {
            let within = old % shape.cluster() == 0 && old < map.layers.top_end();
            return if within { Ok(()) } else { Err(corrupt()) };
        }
        // A snapshot may have it, too.
        let shared = map.layers.top().table(index)?.map(|table| table.to_vec());
        let cluster = self.allocate(map)?;
        let new = cluster << shape.cluster_bits;
        let tables = map.layers.top();
        let table = match shared {
            None => vec![0; 1 << shape.l2_bits()],
            Some(table) => {
                let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_be_bytes()).collect();
                // It may not read as zeroes any more, so it is no reserve.
                let written = tables.file.write_at(&bytes, new);
                written.inspect_err(|_| self.freed.push(cluster))?;
                self.barrier = true;
                table
            }
        };
        self.refcounts.metadata.add([cluster]);
        tables.set_l1(index, new | COPIED);
        tables.keep(index, table.into_boxed_slice());
        self.l1.push((index, l1));
        Ok(())
    }

    /// A cluster of the reserve.
    fn allocate(&mut self, map: &mut Map) -> io::Result<u64> {
        if self.reserve.is_empty() {
            let most = (RESERVE_BYTES / map.cluster()).clamp(8, 1024);
            self.begin_mark(map)?;
            self.renew_mark(map)?;
            let got = self.refcounts.reserve(self.reserve_next);
            map.layers.set_top_end(self.refcounts.end());
            self.freed.append(&mut self.refcounts.unused);
            self.reserve.extend(got?);
            self.reserve_next = (2 * self.reserve_next).min(usize::try_from(most).unwrap_or(8));
            self.reserve_ready = 0;
        }
        if self.reserve_ready == 0 && map.layers.data().unit() > 1 {
            self.find_room(map);
        }
        self.reserve_ready = self.reserve_ready.saturating_sub(1);
        self.reserve.pop_front().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// Has room found for the first clusters of the reserve, as many as lie together, but no more than `ROOM_BYTES`.
    fn find_room(&mut self, map: &mut Map) {
        let Some(&first) = self.reserve.front() else { return };
        let size = map.cluster();
        let most = (ROOM_BYTES / size).max(1);
        let together = |(cluster, expected): &(&u64, u64)| **cluster == *expected;
        let run = self.reserve.iter().zip(first..first + most).take_while(together).count();
        map.layers.top().file.find_room(first * size, run as u64 * size);
        self.reserve_ready = run;
    }

    /// Puts all that changed into the tables, and says so.
    ///
    /// # Errors
    /// What the host says first. What the file says by then of each cluster is what is known of it, the old or the
    /// new; where nobody knows, the image's thread looks again when it is asked.
    pub(crate) fn commit(&mut self, map: &mut Map) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        if self.pending.is_empty() && self.l1.is_empty() {
            return Ok(());
        }
        let pending = sorted(std::mem::take(&mut self.pending));
        let words = words(map, &pending);
        self.sync_replaced()?;
        self.name_loose(map, &pending);
        let l1 = self.write_l1(map);
        let unwritten = self.write_entries(map, &words);
        let (mut done, mut kept) = (pending, Vec::new());
        done.retain(|&(cluster, change)| {
            if unwritten.is_unknown(cluster) {
                // Its clusters of the file leak, the old or the new, until the image is opened again after a
                // kill.
                map.publish(cluster, Word::ASK);
            } else if unwritten.is_kept(cluster) {
                kept.push((cluster, change));
            } else {
                return true;
            }
            false
        });
        self.abandon(map, kept);
        self.publish(map, done);
        l1.and(unwritten.into_result())
    }

    /// Has whoever looks for these clusters find them where they are now.
    fn publish(&mut self, map: &mut Map, pending: Vec<(u64, Pending)>) {
        let (size, data) = (map.cluster(), map.layers.data);
        for (cluster, Pending { host, old }) in pending {
            let word = host.map_or(Word::ZERO, |host| Word::data(data, host, true));
            map.publish(cluster, word);
            host.into_iter().for_each(|host| self.refcounts.loose.remove(host / size));
            match old {
                // Nobody counts what is in a data file.
                _ if data != 0 => {}
                old => self.free(old.clusters(size)),
            }
        }
    }

    /// Has whoever comes after a kill know which clusters entries are about to lead to, and which no more. What
    /// others may have, too, is left out: a snapshot, or the rest of compressed data.
    fn name_loose(&mut self, map: &mut Map, pending: &[(u64, Pending)]) {
        if map.layers.has_data_file() {
            return;
        }
        let (size, loose) = (map.cluster(), &mut self.refcounts.loose);
        for (cluster, Pending { host, old }) in pending {
            host.iter().for_each(|host| loose.set_user(host / size, *cluster));
            if let Entry::Data { host, copied: true } = old {
                loose.free(host / size, *cluster);
            }
        }
    }

    /// What was to become of these clusters did not: no table names where they were to be, and entries lead where they
    /// did.
    fn abandon(&mut self, map: &mut Map, pending: Vec<(u64, Pending)>) {
        if map.layers.has_data_file() {
            return;
        }
        let size = map.cluster();
        for (_, Pending { host, old }) in pending {
            self.freed.extend(host.map(|host| host / size));
            if let Entry::Data { host, copied: true } = old {
                self.refcounts.loose.remove(host / size);
            }
        }
    }

    /// No entry leads to these clusters any more. What holds metadata stays, whatever a damaged entry said.
    fn free(&mut self, clusters: Range<u64>) {
        if self.refcounts.metadata.any_of(clusters.clone()) {
            self.tell_of_damage(clusters.start);
        } else {
            self.freed.extend(clusters);
        }
    }

    /// Nothing leads to these clusters of metadata any more.
    fn free_tables(&mut self, mut clusters: Vec<u64>) {
        self.refcounts.metadata.remove(&clusters);
        self.freed.append(&mut clusters);
    }

    /// True if data would be written over metadata there.
    fn is_metadata(&mut self, map: &mut Map, host: u64) -> bool {
        let at = host / map.cluster();
        let over = !map.layers.has_data_file() && self.refcounts.metadata.contains(at);
        if over {
            self.tell_of_damage(at);
        }
        over
    }

    /// Once: a guest can ask for such a cluster as often as it likes.
    fn tell_of_damage(&mut self, cluster: u64) {
        if !std::mem::replace(&mut self.told, true) {
            tracing::error!(
                "its tables lead a guest to cluster {cluster}, which holds metadata: nothing is written there. \
                 Look at it with `ringway check`"
            );
        }
    }

    /// What was written in the place of other content is durable, if there is any.
    fn sync_replaced(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.barrier) {
            self.sync()?;
            // A queue may have heard that what this was for is lost.
            if self.is_broken() {
                return Err(corrupt());
            }
        }
        Ok(())
    }

    /// Writes what changed in L1: each entry then leads to a table that says the same. Those that could not be written
    /// are in memory what they are in the file.
    fn write_l1(&mut self, map: &mut Map) -> io::Result<()> {
        let (size, mut outcome) = (map.cluster(), Ok(()));
        for (index, before) in std::mem::take(&mut self.l1) {
            let tables = map.layers.top();
            let (mut unused, table) = (before, (tables.l1(index) & OFFSET) / size);
            // It may be a snapshot's, too.
            let old = (before & OFFSET) / size;
            if old != 0 {
                self.refcounts.loose.free(old, (index as u64) << tables.shape.l2_bits());
            }
            match tables.write_l1(index, before) {
                Ok(()) => self.refcounts.loose.remove(table),
                Err(not) => {
                    if not.is_old {
                        self.refcounts.loose.remove(old);
                    }
                    unused = if not.is_old { tables.l1(index) } else { 0 };
                    tables.set_l1(index, before);
                    tables.forget(index);
                    outcome = outcome.and(Err(self.not_replaced(not)));
                }
            }
            if unused & OFFSET != 0 {
                self.free_tables(vec![(unused & OFFSET) / size]);
            }
        }
        outcome
    }

    /// Writes entries of L2, and all that were deferred; those that could not be written. A cluster whose deferred entry
    /// is in the file, or a newer one, is deferred no more, and the journal says nothing of it.
    fn write_entries(&mut self, map: &mut Map, words: &[(u64, u64)]) -> Unwritten {
        let mut all = map.layers.top().deferred().clone();
        all.extend(words.iter().copied());
        let all: Vec<(u64, u64)> = all.into_iter().collect();
        if all.is_empty() {
            return Unwritten::default();
        }
        let before = match self.begin_writing(map, &all, !words.is_empty()) {
            Ok(before) => before,
            Err(error) => return Unwritten::all_of(&all, error),
        };
        let unwritten = map.layers.top().write_each(&all);
        map.layers.top().keep_deferred(&unwritten);
        self.end_writing(map, &all, before, &unwritten);
        unwritten
    }

    /// Why a few bytes of metadata were not replaced. If nobody knows whether they were, nothing is changed any more.
    fn not_replaced(&mut self, not: NotReplaced) -> io::Error {
        if !not.is_old {
            tracing::error!("nobody knows what its header or its L1 table says: {}", not.error);
            self.is_unsure = true;
        }
        not.error
    }

    /// Puts into what the header says where the table of counts is by now, and how many clusters it has.
    pub(crate) fn place_table(&self, shape: &mut Shape) {
        let now = &self.refcounts.shape;
        shape.refcount_table_offset = now.refcount_table_offset;
        shape.refcount_table_clusters = now.refcount_table_clusters;
    }

    /// True if nothing may be changed any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.has_lost() || self.is_unsure || self.refcounts.is_unsure
    }

    /// True if a sync has failed.
    pub(crate) fn has_lost(&self) -> bool {
        self.broken || self.refcounts.sync_failed || self.refcounts.failure.failed.load(SeqCst)
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// What the host says; nothing is changed any more then.
    fn sync(&mut self) -> io::Result<()> {
        if !self.refcounts.barriers {
            return Ok(());
        }
        self.refcounts.sync_files().inspect_err(|_| {
            self.broken = true;
            // What they lead to may be lost, and what the image held before is not.
            self.end_journal();
        })
    }

    /// Gives clusters back with which nothing is in flight, and that no table will name. Those that cannot be given back
    /// yet are among the freed ones again: an entry in the file may lead to them that finds no room for a newer one.
    ///
    /// # Errors
    /// What the host says first.
    pub(crate) fn release(&mut self, map: &mut Map, mut clusters: Vec<u64>) -> io::Result<()> {
        if clusters.is_empty() || self.is_broken() {
            return Ok(());
        }
        let written = self.write_deferred(map);
        self.sync()?;
        // A queue may have heard meanwhile that what the tables say is lost.
        if self.is_broken() {
            return Err(corrupt());
        }
        self.renew_mark(map).inspect_err(|_| self.freed.extend(&clusters))?;
        if Self::has_deferred(map) {
            let named = map.layers.top().superseded();
            let named = named.inspect_err(|_| self.freed.extend(&clusters))?;
            let (kept, rest) = clusters.into_iter().partition(|cluster| named.contains(cluster));
            clusters = rest;
            self.freed.extend::<Vec<_>>(kept);
        }
        let released = self.refcounts.release(&mut clusters);
        self.freed.append(&mut clusters);
        written.and(released)
    }
}

fn sorted(pending: HashMap<u64, Pending>) -> Vec<(u64, Pending)> {
    let mut pending: Vec<(u64, Pending)> = pending.into_iter().collect();
    pending.sort_unstable_by_key(|(cluster, _)| *cluster);
    pending
}

/// What the entries of clusters are to say.
fn words(map: &mut Map, pending: &[(u64, Pending)]) -> Vec<(u64, u64)> {
    let zero = if map.layers.has_backing() { ZERO } else { 0 };
    let word = |pending: &Pending| pending.host.map_or(zero, |host| host | COPIED);
    pending.iter().map(|(cluster, pending)| (*cluster, word(pending))).collect()
}
