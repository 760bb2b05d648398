//! New qcow2 images with content: filled from the outside, of use once they are finished.
//!
//! Nobody else sees the file before, so nothing has to be in an order that survives anything:
//!
//! ```text
//! header │ L1 │ data and L2 tables as they come … │ refcount blocks │ refcount table
//! ```

use crate::compress::Compressor;
use crate::create::{CreateError, Fields, check_size, put_header};
use crate::file::BlockFile;
use crate::header::{Compression, l1_entries};
use crate::l2::Tables;
use crate::layout::{COMPRESSED, COPIED, OFFSET, Shape};
use ringway_core::host::sync::{Mutex, MutexGuard};
use ringway_core::host::{File, FileExt};
use std::io;
use std::sync::{Arc, PoisonError};

/// Reference counts of 16 bits.
const REFCOUNT_ORDER: u32 = 4;

/// An image that is being written, by any number of [`Filler`]s.
#[derive(Debug)]
pub struct Builder {
    file: Arc<File>,
    compression: Option<Compression>,
    map: Arc<Mutex<Map>>,
}

/// Writes into a [`Builder`]; each thread has its own.
pub struct Filler {
    file: Arc<File>,
    map: Arc<Mutex<Map>>,
    cluster: u64,
    compressor: Option<Compressor>,
    /// Compressed clusters of a piece, one after the other.
    packed: Vec<u8>,
}

/// What is where.
#[derive(Debug)]
struct Map {
    tables: Tables,
    /// The first cluster of the file that nobody has.
    end: u64,
    /// Where the next compressed cluster goes, if it fits; 0: into a new cluster.
    packed_at: u64,
    /// How often clusters are used; those behind its end once.
    counts: Vec<u16>,
}

impl Builder {
    /// Begins an image of `virtual_size` bytes in an empty file, with clusters of 2^`cluster_bits`
    /// bytes.
    ///
    /// # Errors
    /// [`CreateError`]; the file has any content then.
    pub fn new(
        file: Arc<File>,
        virtual_size: u64,
        cluster_bits: u32,
        compression: Option<Compression>,
    ) -> Result<Self, CreateError> {
        check_size(virtual_size, cluster_bits)?;
        let l1_entries = l1_entries(virtual_size, cluster_bits);
        let l1_clusters = (l1_entries * 8).div_ceil(1 << cluster_bits);
        let shape = Shape {
            version: 3,
            size: virtual_size,
            cluster_bits,
            l1_offset: 1 << cluster_bits,
            // Bounded by `check_size`.
            l1_entries: u32::try_from(l1_entries).unwrap_or(u32::MAX),
            refcount_table_offset: 0,
            refcount_table_clusters: 0,
            refcount_order: REFCOUNT_ORDER,
            zstd: compression == Some(Compression::Zstd),
            autoclear: 0,
            external_data: false,
            links: 0,
        };
        let tables = Tables::open(BlockFile::new(Arc::clone(&file), 1), shape)?;
        let map = Map { tables, end: 1 + l1_clusters, packed_at: 0, counts: Vec::new() };
        Ok(Self { file, compression, map: Arc::new(Mutex::new(map)) })
    }

    /// One who writes into it.
    #[must_use]
    pub fn filler(&self) -> Filler {
        Filler {
            file: Arc::clone(&self.file),
            map: Arc::clone(&self.map),
            cluster: lock(&self.map).tables.shape.cluster(),
            compressor: self.compression.map(Compressor::new),
            packed: Vec::new(),
        }
    }

    /// Writes the counts and the header, once all fillers are done: now it is an image. It is not
    /// durable yet. Bytes of the file.
    ///
    /// # Errors
    /// What the host says.
    pub fn finish(self) -> Result<u64, CreateError> {
        let map = lock(&self.map);
        let Shape { size: virtual_size, cluster_bits, l1_offset, l1_entries, .. } =
            map.tables.shape;
        let cluster = map.tables.shape.cluster();
        let per_block = (cluster * 8) >> REFCOUNT_ORDER;
        let (mut blocks, mut table) = (0, 0);
        // Counts take clusters that are counted, too.
        let all = loop {
            let all = map.end + blocks + table;
            let now = all.div_ceil(per_block);
            if (now, (now * 8).div_ceil(cluster)) == (blocks, table) {
                break all;
            }
            (blocks, table) = (now, (now * 8).div_ceil(cluster));
        };
        let mut bytes = Vec::new();
        for block in 0..blocks {
            bytes.clear();
            let (first, end) = (block * per_block, ((block + 1) * per_block).min(all));
            bytes.extend((first..end).flat_map(|number| map.count(number).to_be_bytes()));
            self.file.write_all_at(&bytes, (map.end + block) * cluster)?;
        }
        let offsets = (0..blocks).flat_map(|block| ((map.end + block) * cluster).to_be_bytes());
        let offsets: Vec<u8> = offsets.collect();
        let table_at = (map.end + blocks) * cluster;
        self.file.write_all_at(&offsets, table_at)?;
        self.file.set_len(all * cluster)?;
        let header = put_header(&Fields {
            virtual_size,
            cluster_bits,
            l1_at: l1_offset,
            l1_entries,
            refcount_table_at: table_at,
            refcount_table_clusters: u32::try_from(table).map_err(io::Error::other)?,
            compression: self.compression.unwrap_or_default(),
            backing: None,
        })?;
        self.file.write_all_at(&header, 0)?;
        Ok(all * cluster)
    }
}

impl Filler {
    /// Writes bytes of the disk; what was never written reads as zeroes. Of a compressed image these
    /// are whole clusters, each written once; the last one of the disk may be shorter.
    ///
    /// # Errors
    /// What the host says.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if self.compressor.is_some() {
            return self.write_packed(at, bytes);
        }
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let (host, len) = lock(&self.map).place(at + done as u64, rest.len() as u64)?;
            // At most the rest.
            #[allow(clippy::cast_possible_truncation)]
            let part = &rest[..len as usize];
            self.file.write_all_at(part, host)?;
            done += part.len();
        }
        Ok(())
    }

    fn write_packed(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let Self { file, map, cluster: size, compressor, packed } = self;
        let Some(compressor) = compressor else { return Ok(()) };
        let number = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        debug_assert!(at % *size == 0, "whole clusters");
        packed.clear();
        // Which clusters, and how many bytes of `packed` they have; those that are no smaller have
        // none, and zeroes are left out.
        let mut parts: Vec<(u64, usize)> = Vec::new();
        let mut padded = Vec::new();
        for (cluster, bytes) in (at / *size..).zip(bytes.chunks(number(*size)?)) {
            if is_zero(bytes) {
                continue;
            }
            let mut whole = bytes;
            if (bytes.len() as u64) < *size {
                padded.clear();
                padded.extend_from_slice(bytes);
                padded.resize(number(*size)?, 0);
                whole = &padded;
            }
            let before = packed.len();
            if let Some(smaller) = compressor.cluster(whole) {
                packed.extend_from_slice(smaller);
            }
            parts.push((cluster, packed.len() - before));
        }
        let hosts: io::Result<Vec<u64>> = {
            let mut map = lock(map);
            let host = |&(cluster, len): &(u64, usize)| match len {
                0 => map.place(cluster * *size, *size).map(|(host, _)| host),
                len => map.pack(cluster, len as u64),
            };
            parts.iter().map(host).collect()
        };
        let mut from = 0;
        for (&(cluster, len), host) in parts.iter().zip(hosts?) {
            if len > 0 {
                file.write_all_at(&packed[from..from + len], host)?;
                from += len;
            } else {
                let skip = number(cluster * *size - at)?;
                let end = bytes.len().min(skip + number(*size)?);
                file.write_all_at(&bytes[skip..end], host)?;
            }
        }
        Ok(())
    }
}

impl Map {
    /// Where a range begins in the file, and how many bytes of it lie there: it has clusters then.
    fn place(&mut self, at: u64, len: u64) -> io::Result<(u64, u64)> {
        let size = self.tables.shape.cluster();
        let (cluster, within) = (at / size, at % size);
        let word = self.tables.word(cluster)?;
        if word & OFFSET != 0 {
            return Ok(((word & OFFSET) + within, len.min(size - within)));
        }
        self.own_table(cluster)?;
        let last = (at + len - 1) / size;
        let mut entries = Vec::new();
        let (index, _) = self.tables.shape.split(cluster);
        for next in cluster..=last {
            let same_table = self.tables.shape.split(next).0 == index;
            if !same_table || self.tables.word(next)? != 0 {
                break;
            }
            entries.push((next, self.take()? << self.tables.shape.cluster_bits | COPIED));
        }
        self.tables.write(&entries)?;
        let host = entries.first().map_or(0, |(_, entry)| entry & OFFSET);
        Ok((host + within, len.min(entries.len() as u64 * size - within)))
    }

    /// Where a compressed cluster of `len` bytes goes, fewer than a cluster has.
    fn pack(&mut self, cluster: u64, len: u64) -> io::Result<u64> {
        let (size, bits) = (self.tables.shape.cluster(), self.tables.shape.cluster_bits);
        self.own_table(cluster)?;
        let at = self.packed_at;
        // It may go on into the next cluster if that is free, and a count has its bounds.
        let fits = len <= size - at % size || at / size + 1 == self.end;
        let counted = usize::try_from(at / size).map_err(io::Error::other)?;
        let full = self.counts.get(counted) == Some(&u16::MAX);
        let goes_on = at % size != 0 && fits && !full;
        let host = if goes_on { at } else { self.take()? << bits };
        let last = (host + len - 1) / size;
        if last == self.end {
            self.take()?;
        }
        // Every cluster has its first use by now, but those of this one alone.
        let first = host / size;
        self.counts.resize(usize::try_from(self.end).map_err(io::Error::other)?, 1);
        if goes_on {
            self.counts[usize::try_from(first).map_err(io::Error::other)?] += 1;
        }
        self.packed_at = host + len;
        let offset_bits = 62 - (bits - 8);
        if host >> offset_bits != 0 {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let sectors = (host + len - 1) / 512 - host / 512;
        self.tables.write(&[(cluster, COMPRESSED | sectors << offset_bits | host)])?;
        Ok(host)
    }

    /// There is a table for a cluster of the disk.
    fn own_table(&mut self, cluster: u64) -> io::Result<()> {
        let (index, _) = self.tables.shape.split(cluster);
        if self.tables.l1(index) == 0 {
            let host = self.take()? << self.tables.shape.cluster_bits;
            self.tables.set_l1(index, host | COPIED);
            self.tables.write_l1(index, 0).map_err(|not| not.error)?;
            self.tables.keep(index, vec![0; 1 << self.tables.shape.l2_bits()].into());
        }
        Ok(())
    }

    /// A cluster that nobody has.
    fn take(&mut self) -> io::Result<u64> {
        let taken = self.end;
        self.end += 1;
        if self.end << self.tables.shape.cluster_bits > OFFSET {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        Ok(taken)
    }

    fn count(&self, number: u64) -> u16 {
        let counted = usize::try_from(number).ok().and_then(|number| self.counts.get(number));
        counted.copied().unwrap_or(1)
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(512).all(|block| block.iter().fold(0, |sum, byte| sum | byte) == 0)
}

/// A filler that panicked has said so; the image is not finished then.
fn lock(map: &Mutex<Map>) -> MutexGuard<'_, Map> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{CheckOptions, check};
    use crate::header::Header;
    use crate::layer::{Layer, LayerFormat};
    use crate::reader::Reader;
    use ringway_testkit::Rng;

    /// Half of it noise, half of it the same word again and again, and some zeroes.
    fn piece(rng: &mut Rng, bytes: usize) -> Vec<u8> {
        let kind = rng.below(3);
        let word = rng.next_u64() | 1;
        let mut byte = |_| match kind {
            0 => rng.next_u64().to_le_bytes()[2],
            1 => word.to_le_bytes()[0],
            _ => 0,
        };
        (0..bytes).map(&mut byte).collect()
    }

    fn one_image(rng: &mut Rng, compression: Option<Compression>, bits: u32) {
        let file: File = tempfile::tempfile().unwrap();
        let file = Arc::new(file);
        let size = (1 + rng.below(2000)) * 512;
        let builder = Builder::new(Arc::clone(&file), size, bits, compression).unwrap();
        let mut model = vec![0; usize::try_from(size).unwrap()];
        // Whole clusters, in any order, each once.
        let cluster = 1_usize << bits;
        let mut all: Vec<usize> = (0..model.len()).step_by(cluster).collect();
        let mut fillers = [builder.filler(), builder.filler()];
        while !all.is_empty() {
            let at = all.swap_remove(usize::try_from(rng.below(all.len() as u64)).unwrap());
            let end = model.len().min(at + cluster);
            if rng.below(4) == 0 {
                continue;
            }
            let bytes = piece(rng, end - at);
            model[at..end].copy_from_slice(&bytes);
            let filler = &mut fillers[usize::try_from(rng.below(2)).unwrap()];
            filler.write(at as u64, &bytes).unwrap();
        }
        let file_bytes = builder.finish().unwrap();
        assert_eq!(file.metadata().unwrap().len(), file_bytes);
        let header = Header::read(&*file, file_bytes).unwrap().unwrap();
        header.may_write().unwrap();
        let options = CheckOptions { range: 64, ..CheckOptions::default() };
        let found = check(&*file, &header, file_bytes, options).unwrap().unwrap();
        let compressed = found.compressed > 0;
        assert_eq!((found.errors, found.leaks), (0, 0), "{bits} {size}: {:?}", found.problems);
        assert!(compression.is_some() || !compressed);
        let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
        let mut reader =
            Reader::open(vec![Layer { file, file_bytes, format, name: Default::default() }])
                .unwrap();
        let mut read = vec![0; model.len()];
        reader.read(0, &mut read).unwrap();
        assert!(read == model, "{bits} {size} {compression:?}");
    }

    #[test]
    fn what_is_filled_in_any_order_is_an_image_that_is_whole() {
        let mut rng = Rng::for_test("filled_in_any_order");
        for compression in [None, Some(Compression::Zlib), Some(Compression::Zstd)] {
            for bits in [9, 9, 10, 12, 12, 16, 21] {
                (0..6).for_each(|_| one_image(&mut rng, compression, bits));
            }
        }
    }
}
