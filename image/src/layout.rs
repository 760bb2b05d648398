//! What words of qcow2 metadata mean (QEMU docs/interop/qcow2.txt).

use crate::header::{Compression, Header};
use crate::journal::MARK_BITS;
use std::io;
use std::ops::Range;

/// An L1 or L2 entry whose table or cluster has no other owner, so that it can be changed in place.
pub(crate) const COPIED: u64 = 1 << 63;
/// An L2 entry of compressed data.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// An L2 entry whose cluster reads as zeroes, since version 3.
pub(crate) const ZERO: u64 = 1;
/// Where the offset is in entries of L1, L2 and refcount tables.
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The facts of a header that mapping needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 2 or 3.
    pub version: u32,
    /// Bytes of the disk.
    pub size: u64,
    /// A cluster has 2 to the power of this bytes; 9 to 21.
    pub cluster_bits: u32,
    /// Where the active L1 table is, in bytes.
    pub l1_offset: u64,
    /// Its entries.
    pub l1_entries: u32,
    /// Where the refcount table is, in bytes.
    pub refcount_table_offset: u64,
    /// Its clusters.
    pub refcount_table_clusters: u32,
    /// A refcount has 2 to the power of this bits; 0 to 6.
    pub refcount_order: u32,
    /// Compressed with zstd, not zlib.
    pub zstd: bool,
    /// Autoclear features: cleared before anything is written.
    pub autoclear: u64,
    /// Its data are in another file, where an entry of offset 0 means a cluster.
    pub external_data: bool,
    /// A number made of the names of other files, and of their formats: another one if the header names
    /// others. 0 if it names none.
    pub links: u64,
}

impl From<&Header> for Shape {
    fn from(header: &Header) -> Self {
        Self {
            version: header.version,
            size: header.virtual_size,
            cluster_bits: header.cluster_bits,
            l1_offset: header.l1_offset,
            l1_entries: header.l1_entries,
            refcount_table_offset: header.refcount_table_offset,
            refcount_table_clusters: header.refcount_table_clusters,
            refcount_order: header.refcount_order,
            zstd: header.compression == Compression::Zstd,
            autoclear: header.features[2],
            external_data: header.data_file.is_some(),
            links: links(header),
        }
    }
}

/// FNV-1a, 64 bits, of the names that a header has.
fn links(header: &Header) -> u64 {
    let backing = header.backing.as_ref().map(|backing| {
        let format = backing.format.as_deref().unwrap_or_default().as_bytes();
        (b'b', backing.name.as_os_str().as_encoded_bytes(), format)
    });
    let data = header.data_file.as_ref().and_then(|data| data.name.as_deref());
    let data = data.map(|name| (b'd', name.as_os_str().as_encoded_bytes(), &[][..]));
    let bytes = backing
        .into_iter()
        .chain(data)
        .flat_map(|(kind, name, format)| [&[kind], name, &[0], format, &[0]].concat());
    let mut sum = None;
    for byte in bytes {
        let before = sum.unwrap_or(0xcbf2_9ce4_8422_2325_u64);
        sum = Some((before ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }
    sum.unwrap_or(0)
}

impl Shape {
    /// Its header names no journal any more ([`crate::replay()`]).
    pub fn forget_journal(&mut self) {
        self.autoclear &= !MARK_BITS;
    }

    /// Bytes of a cluster.
    pub(crate) const fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table, as a power of two.
    pub(crate) const fn l2_bits(&self) -> u32 {
        self.cluster_bits - 3
    }

    /// Which L2 table a cluster's entry is in, and where in it.
    pub(crate) fn split(&self, cluster: u64) -> (usize, usize) {
        let within = cluster & ((1 << self.l2_bits()) - 1);
        // A cluster within the disk has its L1 entry (`Map::open` checks), so both fit.
        #[allow(clippy::cast_possible_truncation)]
        ((cluster >> self.l2_bits()) as usize, within as usize)
    }

    /// What an L2 entry says.
    pub(crate) fn entry(&self, word: u64) -> io::Result<Entry> {
        if word & COMPRESSED != 0 {
            let bits = 62 - (self.cluster_bits - 8);
            let host = word & ((1 << bits) - 1);
            let sectors = (word & !(COMPRESSED | COPIED)) >> bits;
            return Ok(Entry::Compressed { host, bytes: (sectors + 1) * 512 - host % 512 });
        }
        let host = word & OFFSET;
        if host % self.cluster() != 0 {
            return Err(corrupt());
        }
        let zero = self.version >= 3 && word & ZERO != 0;
        Ok(match (zero, host) {
            (true, 0) => Entry::Zero { host: None },
            (true, host) => Entry::Zero { host: Some(host) },
            // What lies at 0 is the header, but in a data file.
            (false, 0) if !(self.external_data && word & COPIED != 0) => Entry::Unallocated,
            (false, host) => Entry::Data { host, copied: word & COPIED != 0 },
        })
    }
}

/// What an L2 entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// As the backing image has it; zeroes without one.
    Unallocated,
    /// Zeroes; a cluster may be kept for it.
    Zero { host: Option<u64> },
    /// A cluster of the file, ours alone if `copied`.
    Data { host: u64, copied: bool },
    /// Compressed, in at most so many bytes of the file.
    Compressed { host: u64, bytes: u64 },
}

impl Entry {
    /// The clusters of the file that count it, if they have so many bytes: each that it touches.
    pub(crate) fn clusters(self, size: u64) -> Range<u64> {
        match self {
            Self::Unallocated | Self::Zero { host: None } => 0..0,
            Self::Data { host, .. } | Self::Zero { host: Some(host) } => {
                host / size..host / size + 1
            }
            Self::Compressed { host, bytes } => host / size..(host + bytes - 1) / size + 1,
        }
    }
}

/// The metadata make no sense.
pub(crate) fn corrupt() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

/// Big-endian words of a table.
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        version: 3,
        size: 1 << 30,
        cluster_bits: 16,
        l1_offset: 0x30000,
        l1_entries: 2,
        refcount_table_offset: 0x10000,
        refcount_table_clusters: 1,
        refcount_order: 4,
        zstd: false,
        autoclear: 0,
        external_data: false,
        links: 0,
    };

    #[test]
    fn entries_are_read_as_the_specification_says() {
        let entry = |word| SHAPE.entry(word).unwrap();
        assert_eq!(entry(0), Entry::Unallocated);
        assert_eq!(entry(COPIED), Entry::Unallocated, "the header is no data");
        let apart = Shape { external_data: true, ..SHAPE };
        assert_eq!(apart.entry(COPIED).unwrap(), Entry::Data { host: 0, copied: true });
        assert_eq!(apart.entry(0).unwrap(), Entry::Unallocated);
        assert_eq!(entry(1), Entry::Zero { host: None });
        assert_eq!(entry(COPIED | 0x50001), Entry::Zero { host: Some(0x50000) });
        assert_eq!(entry(COPIED | 0x50000), Entry::Data { host: 0x50000, copied: true });
        assert_eq!(entry(0x50000), Entry::Data { host: 0x50000, copied: false });
        // 54 bits of offset: 62 - (16 - 8).
        let word = COMPRESSED | 3 << 54 | 0x50123;
        assert_eq!(entry(word), Entry::Compressed { host: 0x50123, bytes: 4 * 512 - 0x123 });
        assert!(SHAPE.entry(0x50200).is_err(), "not on a cluster");
        let old = Shape { version: 2, ..SHAPE };
        assert_eq!(old.entry(0x50001).unwrap(), Entry::Data { host: 0x50000, copied: false });
        assert_eq!(SHAPE.split((3 << 13) + 7), (3, 7));
    }
}
