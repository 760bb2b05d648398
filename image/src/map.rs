//! What the table says, made from the metadata of all files of a chain.

use crate::ahead::Ranges;
use crate::base::word;
use crate::layer::Found;
use crate::layers::Layers;
use crate::layout::Entry;
use crate::refcounts::Metadata;
use crate::table::{Below, Table, Word};
use crate::units::{Units, page_bits};
use ringway_core::ByteRange;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The layers of a disk and its table. Words are loaded in units: what one L2 table says, or what fits
/// a page of memory. Where the top says nothing the words of its base are looked at, which it shares
/// with others, until something is written there.
#[derive(Debug)]
pub(crate) struct Map {
    pub(crate) layers: Layers,
    pub(crate) table: Arc<Table>,
    units: Units,
    pub(crate) read_only: bool,
    /// Of the top's file.
    metadata: Metadata,
}

impl Map {
    /// Nothing is loaded yet.
    ///
    /// # Errors
    /// What the host says to the address space of the table.
    pub(crate) fn new(mut layers: Layers, read_only: bool, metadata: Metadata) -> io::Result<Self> {
        let shape = layers.top().shape;
        let mut table = Table::new(shape.size, shape.cluster_bits, !read_only)?;
        let mut unit_bits = shape.l2_bits();
        if let Some(base) = layers.base.clone() {
            // As little as can be: what is not loaded costs nothing.
            unit_bits = page_bits();
            let (tables, clusters) = (layers.top(), table.clusters());
            let absent = |unit: u64| {
                let (first, end) = (unit << unit_bits, ((unit + 1) << unit_bits).min(clusters));
                (shape.split(first).0..=shape.split(end - 1).0).all(|index| tables.l1(index) == 0)
            };
            table.set_below(Below::new(Arc::clone(&base.table), table.clusters(), absent));
        }
        let units = Units::new(&table, unit_bits)?;
        Ok(Self { layers, table: Arc::new(table), units, read_only, metadata })
    }

    /// Bytes of a cluster.
    pub(crate) fn cluster(&mut self) -> u64 {
        self.layers.top().shape.cluster()
    }

    /// Bytes of the disk in a cluster: fewer in the last one.
    pub(crate) fn bytes_of(&mut self, cluster: u64) -> u64 {
        let shape = self.layers.top().shape;
        shape.cluster().min(shape.size - (cluster << shape.cluster_bits))
    }

    /// What a write of a range reads of what is on no file of this host: the rest of clusters of which it has only a part.
    pub(crate) fn needs_to_write(&mut self, range: ByteRange) -> Ranges {
        let (size, mut ranges) = (self.cluster(), Ranges::new());
        let (first, last) = (range.offset() / size, (range.end() - 1) / size);
        let begins = (range.offset() % size > 0).then_some(first);
        let ends = (range.end() % size > 0).then_some(last);
        for cluster in begins.into_iter().chain(ends.filter(|_| begins != ends)) {
            let bytes = self.bytes_of(cluster);
            ranges.extend(self.layers.needs_ahead(cluster * size, bytes));
        }
        ranges
    }

    /// True if whole clusters can be made to read as zeroes without writing them: version 2 has no word
    /// for a cluster of zeroes over a backing file.
    pub(crate) fn zeroes_clusters(&mut self) -> bool {
        self.layers.top().shape.version >= 3 || !self.layers.has_backing()
    }

    /// The clusters that lie wholly in a range; the last one of the disk may be shorter.
    pub(crate) fn whole_clusters(&mut self, range: ByteRange) -> Range<u64> {
        let size = self.cluster();
        let last = range.end() == self.layers.top().shape.size;
        let end = if last { range.end().div_ceil(size) } else { range.end() / size };
        let first = range.offset().div_ceil(size);
        first..end.max(first)
    }

    /// The disk has so many bytes from now on. The table says nothing of what was added before
    /// [`Map::show_size`].
    pub(crate) fn set_size(&mut self, bytes: u64) {
        let cluster = self.cluster();
        let last = (self.layers.top().shape.size.min(bytes) - 1) / cluster;
        self.layers.set_size(bytes);
        self.units.grow(bytes.div_ceil(cluster));
        // The last cluster has another length, and its unit may have more of them.
        self.units.unload(&self.table, last);
    }

    /// The disk has been made larger than `before` bytes, for good: queues find what was added. There is memory
    /// for the words of that.
    pub(crate) fn show_size(&mut self, before: u64) {
        let (size, cluster) = (self.layers.top().shape.size, self.cluster());
        let last = (before - 1) / cluster;
        // What its base holds behind the end of the disk is no part of that, also where the base alone had its page.
        self.table.is_here(last);
        self.table.grow(size);
        self.units.unload(&self.table, last);
    }

    /// Has the table say where a cluster is, and its neighbours.
    pub(crate) fn load(&mut self, cluster: u64) {
        match (&self.layers.base, self.table.is_below(cluster)) {
            (Some(base), true) => base.load(cluster),
            _ => self.load_unit(cluster),
        }
    }

    fn load_unit(&mut self, cluster: u64) {
        let Some(clusters) = self.units.load(&self.table, cluster) else { return };
        let metadata = self.metadata.clone();
        let metadata = metadata.lock();
        for cluster in clusters {
            let word = self.word(cluster, &metadata);
            self.table.publish(cluster, word);
        }
        // Last, as nobody may find a word of neither.
        self.table.is_here(cluster);
    }

    /// What the table is to say of a cluster.
    fn word(&mut self, cluster: u64, metadata: &HashSet<u64>) -> Word {
        let (at, len) = (cluster * self.cluster(), self.bytes_of(cluster));
        let (data, apart) = (self.layers.data, self.layers.has_data_file());
        match self.layers.piece(at, len) {
            Ok(Some(Found::Data { file, offset })) if file == data && offset % 512 == 0 => {
                let entry = self.layers.top().entry(cluster);
                // Nobody shares a data file.
                let owned = matches!(entry, Ok(Entry::Data { copied, .. }) if copied || apart)
                    // An entry that leads there is damaged, or hostile.
                    && (apart || !metadata.contains(&(offset / self.cluster())));
                Word::data(file, offset, owned && !self.read_only)
            }
            found => word(found),
        }
    }

    /// Has the table say of a cluster what it finds now, if it says anything of its neighbours. False if that
    /// is nothing that a queue could write to.
    pub(crate) fn renew(&mut self, cluster: u64) -> bool {
        let metadata = self.metadata.clone();
        let word = self.word(cluster, &metadata.lock());
        self.publish(cluster, word);
        word.is_owned()
    }

    /// The table says what became of a cluster, if it says anything of its neighbours.
    pub(crate) fn publish(&mut self, cluster: u64, word: Word) {
        if cluster >= self.table.clusters() {
            // The disk is about to grow: nobody finds it before [`Map::show_size`].
            return;
        }
        if self.table.is_below(cluster) {
            // By now the tables say it, too.
            self.load_unit(cluster);
        } else if self.units.has(cluster) {
            self.table.publish(cluster, word);
        }
    }
}
