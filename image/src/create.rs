//! New qcow2 images: a header, reference counts for it, and an empty L1 table.
//!
//! Nothing else is written, whatever the size of the disk: the L1 table is a hole in the file, and
//! only clusters that tables take have a count.

use crate::extension::kind;
use crate::fields::LENGTH_V3;
use crate::format::Format;
use crate::header::{CLUSTER_BITS, Compression, L1_BYTES_MAX, MAGIC, NAME_MAX, l1_entries};
use ringway_core::host::{File, FileExt};
use std::io;
use std::path::Path;

/// Bytes of the header: with the compression type, and padding.
const LENGTH: usize = LENGTH_V3 + 8;
/// Reference counts of 16 bits: refcount_order 4.
const REFCOUNT_ORDER: u32 = 4;
/// Log2 of the bytes of a cluster, unless it is said otherwise: 64 KiB, as QEMU.
pub const CLUSTER_BITS_DEFAULT: u32 = 16;

/// What a new image is to be.
#[derive(Clone, Copy, Debug)]
pub struct NewImage<'a> {
    /// Bytes of disk: a multiple of 512.
    pub virtual_size: u64,
    /// Log2 of the bytes of a cluster: 9 to 21.
    pub cluster_bits: u32,
    /// What holds the rest: its name, relative to the new image, and its format.
    pub backing: Option<(&'a Path, Format)>,
}

/// Why an image is not made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A size that is no disk's.
    #[error("a size of {0} bytes is not a multiple of 512, or more than 2^63 - 1")]
    Size(u64),
    /// Clusters that cannot be.
    #[error("a cluster has 2^9 to 2^21 bytes (512, 1K, … 2M), not 2^{0}")]
    Cluster(u32),
    /// A table would be larger than others read.
    #[error(
        "{size} bytes need an L1 table of more than 32 MiB with clusters of {cluster} bytes. Larger \
         clusters (--cluster-size) need less of it"
    )]
    Large {
        /// Bytes of disk.
        size: u64,
        /// Bytes of a cluster.
        cluster: u64,
    },
    /// A name that no header holds.
    #[error(
        "the name of the backing file has {0} bytes: at most 1023 fit, and with the header they have to \
         fit into one cluster"
    )]
    Name(usize),
    /// What the host says.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// How many clusters each part of a new image takes, in their order.
struct Layout {
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
}

impl Layout {
    /// Counts take clusters that are counted, too: they are added until nothing changes.
    fn of(l1_bytes: u64, cluster: u64) -> Self {
        let l1 = l1_bytes.div_ceil(cluster);
        let counts = (cluster * 8) >> REFCOUNT_ORDER;
        let (mut table, mut blocks) = (1, 1);
        loop {
            let needed = (1 + table + blocks + l1).div_ceil(counts);
            let now = ((needed * 8).div_ceil(cluster), needed);
            if now == (table, blocks) {
                return Self { refcount_table: table, refcount_blocks: blocks, l1 };
            }
            (table, blocks) = now;
        }
    }

    fn clusters(&self) -> u64 {
        1 + self.refcount_table + self.refcount_blocks + self.l1
    }
}

impl NewImage<'_> {
    /// Writes the image into an empty file. It is not durable yet.
    ///
    /// # Errors
    /// [`CreateError`]; the file has any content then.
    pub fn write(&self, file: &File) -> Result<(), CreateError> {
        check_size(self.virtual_size, self.cluster_bits)?;
        let cluster = 1_u64 << self.cluster_bits;
        let entries = l1_entries(self.virtual_size, self.cluster_bits);
        let l1_bytes = entries * 8;
        let layout = Layout::of(l1_bytes, cluster);
        let header = put_header(&Fields {
            virtual_size: self.virtual_size,
            cluster_bits: self.cluster_bits,
            l1_at: (1 + layout.refcount_table + layout.refcount_blocks) * cluster,
            l1_entries: u32::try_from(entries).unwrap_or(u32::MAX),
            refcount_table_at: cluster,
            // At most 8: a table of 32 MiB in clusters of 512 bytes has 257 blocks.
            refcount_table_clusters: u32::try_from(layout.refcount_table).unwrap_or(u32::MAX),
            compression: Compression::Zlib,
            backing: self.backing,
        })?;
        // First its length: the L1 table stays a hole, which reads as no cluster at all.
        file.set_len(layout.clusters() * cluster)?;
        let blocks_at = (1 + layout.refcount_table) * cluster;
        let table: Vec<u8> = (0..layout.refcount_blocks)
            .flat_map(|block| (blocks_at + block * cluster).to_be_bytes())
            .collect();
        file.write_all_at(&table, cluster)?;
        let counts: Vec<u8> = (0..layout.clusters()).flat_map(|_| 1_u16.to_be_bytes()).collect();
        file.write_all_at(&counts, blocks_at)?;
        // The magic number last: what a full disk cuts off is no image.
        file.write_all_at(&header, 0)?;
        Ok(())
    }
}

/// Refuses what no image can be.
pub(crate) fn check_size(virtual_size: u64, cluster_bits: u32) -> Result<(), CreateError> {
    if virtual_size % 512 != 0 || virtual_size > i64::MAX.unsigned_abs() {
        return Err(CreateError::Size(virtual_size));
    }
    if !CLUSTER_BITS.contains(&cluster_bits) {
        return Err(CreateError::Cluster(cluster_bits));
    }
    if l1_entries(virtual_size, cluster_bits).saturating_mul(8) > L1_BYTES_MAX {
        return Err(CreateError::Large { size: virtual_size, cluster: 1 << cluster_bits });
    }
    Ok(())
}

/// What a header of version 3 says.
pub(crate) struct Fields<'a> {
    pub(crate) virtual_size: u64,
    pub(crate) cluster_bits: u32,
    pub(crate) l1_at: u64,
    pub(crate) l1_entries: u32,
    pub(crate) refcount_table_at: u64,
    pub(crate) refcount_table_clusters: u32,
    pub(crate) compression: Compression,
    pub(crate) backing: Option<(&'a Path, Format)>,
}

/// The bytes of a header.
pub(crate) fn put_header(fields: &Fields<'_>) -> Result<Vec<u8>, CreateError> {
    /// Incompatible: whoever does not know compression types cannot read it.
    const COMPRESSION_TYPE: u64 = 1 << 3;
    let mut bytes = vec![0; LENGTH];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(4, &3_u32.to_be_bytes());
    put(20, &fields.cluster_bits.to_be_bytes());
    put(24, &fields.virtual_size.to_be_bytes());
    put(36, &fields.l1_entries.to_be_bytes());
    put(40, &fields.l1_at.to_be_bytes());
    put(48, &fields.refcount_table_at.to_be_bytes());
    put(56, &fields.refcount_table_clusters.to_be_bytes());
    if fields.compression == Compression::Zstd {
        put(72, &COMPRESSION_TYPE.to_be_bytes());
        put(104, &[1]);
    }
    put(96, &REFCOUNT_ORDER.to_be_bytes());
    put(100, &u32::try_from(LENGTH).unwrap_or(u32::MAX).to_be_bytes());
    if let Some((name, format)) = fields.backing {
        let name = name.as_os_str().as_encoded_bytes();
        push_extension(&mut bytes, kind::BACKING_FORMAT, format.name().as_bytes());
        push_extension(&mut bytes, kind::END, &[]);
        let end = (bytes.len() + name.len()) as u64;
        if name.len() > NAME_MAX as usize || end > 1 << fields.cluster_bits {
            return Err(CreateError::Name(name.len()));
        }
        let at = (bytes.len() as u64).to_be_bytes();
        bytes[8..16].copy_from_slice(&at);
        let len = u32::try_from(name.len()).unwrap_or(NAME_MAX).to_be_bytes();
        bytes[16..20].copy_from_slice(&len);
        bytes.extend_from_slice(name);
    }
    Ok(bytes)
}

fn push_extension(bytes: &mut Vec<u8>, kind: u32, data: &[u8]) {
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}
