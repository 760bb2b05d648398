//! The header of a qcow2 image: read once, judged, and only then believed.
//!
//! Source: the public specification, `docs/interop/qcow2` of QEMU. Bounds of tables that it does not
//! give are those of QEMU, so that no image which QEMU uses is refused for its size. Memory is never
//! taken by what a header claims: tables are bounded by the file and by these constants.

use crate::extension::{Bitmaps, Extensions};
use crate::fields::{LENGTH_V3, field, newer_fields, wide, wrong};
use crate::read_at::ReadAt;
use crate::refused::Refused;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The first four bytes.
pub(crate) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of a header of version 2.
const LENGTH_V2: usize = 72;
/// Clusters have 2^9 to 2^21 bytes.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Bytes of the largest L1 table: QEMU's limit, 2 PiB of disk with clusters of 64 KiB.
pub const L1_BYTES_MAX: u64 = 32 << 20;
/// Bytes of the largest refcount table: QEMU's limit.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// The most snapshots: QEMU's limit.
const SNAPSHOTS_MAX: u64 = 65536;
/// Bytes of the longest name of a backing file, by the specification.
pub(crate) const NAME_MAX: u32 = 1023;
/// The smallest entry of the snapshot table, in bytes.
const SNAPSHOT_MIN: u64 = 40;

/// Incompatible features: whoever does not know one may not use the image.
pub(crate) mod incompatible {
    pub(crate) const DIRTY: u64 = 1 << 0;
    pub(crate) const CORRUPT: u64 = 1 << 1;
    pub(crate) const DATA_FILE: u64 = 1 << 2;
    pub(crate) const COMPRESSION: u64 = 1 << 3;
    pub(crate) const EXTENDED_L2: u64 = 1 << 4;
    pub(crate) const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
}
/// Reference counts need not be kept while it is written: it is dirty meanwhile.
const LAZY_REFCOUNTS: u64 = 1;
/// Autoclear features: whoever does not know one clears it before writing.
pub(crate) mod autoclear {
    pub(crate) const BITMAPS: u64 = 1 << 0;
    pub(crate) const RAW_DATA: u64 = 1 << 1;
    pub(crate) const KNOWN: u64 = BITMAPS | RAW_DATA;
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Deflate, without a header.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// As `qemu-img` calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// The image that holds what is not in this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// As the header has it: relative to the image that names it.
    pub name: PathBuf,
    /// As the header has it, if it does: `raw`, `qcow2`, …
    pub format: Option<String>,
}

/// The file that holds the data of an image whose tables are elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFileName {
    /// As the header has it, if it does: relative to the image that names it.
    pub name: Option<PathBuf>,
    /// It can be read as a raw image, and has to stay so.
    pub raw: bool,
}

/// What a qcow2 image says of itself. All offsets are in bytes, aligned to clusters, and within the
/// file with all of their tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Log2 of the bytes of a cluster.
    pub cluster_bits: u32,
    /// Bytes that the guest sees.
    pub virtual_size: u64,
    /// Where the L1 table is.
    pub l1_offset: u64,
    /// Its entries: at least what the virtual size needs.
    pub l1_entries: u32,
    /// Where the refcount table is.
    pub refcount_table_offset: u64,
    /// Its clusters.
    pub refcount_table_clusters: u32,
    /// Log2 of the bits of a reference count.
    pub refcount_order: u32,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Where their table is.
    pub snapshots_offset: u64,
    /// Bytes of the header itself; extensions follow.
    pub length: u32,
    /// How clusters are compressed.
    pub compression: Compression,
    /// What holds the rest.
    pub backing: Option<BackingName>,
    /// It was based on something, and is based on nothing any more: of the backing file the format is left.
    pub is_flattened: bool,
    /// What holds the data, if not this file.
    pub data_file: Option<DataFileName>,
    /// Persistent bitmaps.
    pub bitmaps: Option<Bitmaps>,
    /// Features as the header has them: incompatible, compatible, autoclear.
    pub features: [u64; 3],
}

impl Header {
    /// Reads and judges the header of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// The outer one: what reading says. The inner one: why the image cannot be used at all.
    pub fn read<R: ReadAt + ?Sized>(
        source: &R,
        file_bytes: u64,
    ) -> io::Result<Result<Self, Refused>> {
        // The name and the extensions are within the first cluster, whose size is not known yet.
        let mut head = [0; 512];
        let read = source.read_up_to(&mut head, 0)?;
        let bits = field(&head[..read], 20, "cluster_bits").unwrap_or(0);
        if read < head.len() || !CLUSTER_BITS.contains(&bits) {
            return Ok(Self::parse(&head[..read], file_bytes));
        }
        let mut cluster = vec![0; 1 << bits];
        let read = source.read_up_to(&mut cluster, 0)?;
        Ok(Self::parse(&cluster[..read], file_bytes))
    }

    /// Judges a header: `bytes` are the image's first cluster, or what there is of it; the file has
    /// `file_bytes`.
    ///
    /// # Errors
    /// Why the image cannot be used, whatever for. [`Self::may_write`] knows the rest.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, Refused> {
        if !bytes.starts_with(&MAGIC) {
            return Err(Refused::NotQcow2);
        }
        let version = field(bytes, 4, "version")?;
        if !(2..=3).contains(&version) {
            return Err(Refused::Version(version));
        }
        let cluster_bits = field(bytes, 20, "cluster_bits")?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(wrong("cluster_bits", cluster_bits, "it has to be 9 to 21"));
        }
        let crypt = field(bytes, 32, "crypt_method")?;
        if crypt != 0 {
            return Err(Refused::Encrypted(crypt));
        }
        let (features, refcount_order, length) = match version {
            2 => ([0; 3], 4, LENGTH_V2),
            _ => newer_fields(bytes, cluster_bits)?,
        };
        let backing_offset = wide(bytes, 8, "backing_file_offset")?;
        let extensions = Extensions::parse(bytes, length, backing_offset)?;
        judge_features(features[0], &extensions)?;
        let header = Self {
            version,
            cluster_bits,
            virtual_size: wide(bytes, 24, "size")?,
            l1_offset: wide(bytes, 40, "l1_table_offset")?,
            l1_entries: field(bytes, 36, "l1_size")?,
            refcount_table_offset: wide(bytes, 48, "refcount_table_offset")?,
            refcount_table_clusters: field(bytes, 56, "refcount_table_clusters")?,
            refcount_order,
            snapshots: field(bytes, 60, "nb_snapshots")?,
            snapshots_offset: wide(bytes, 64, "snapshots_offset")?,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            compression: compression(bytes, features[0], length)?,
            backing: backing(bytes, backing_offset, cluster_bits, &extensions)?,
            is_flattened: backing_offset == 0 && extensions.backing_format.is_some(),
            data_file: data_file(features, &extensions),
            bitmaps: extensions.bitmaps.map(|found| Bitmaps {
                consistent: features[2] & autoclear::BITMAPS != 0,
                ..found
            }),
            features,
        };
        header.judge_tables(file_bytes)?;
        Ok(header)
    }

    /// Whether it may be written. Who does so first clears [`Self::unknown_autoclear`].
    ///
    /// # Errors
    /// The reason against it.
    pub fn may_write(&self) -> Result<(), Refused> {
        if self.is_corrupt() {
            return Err(Refused::Corrupt);
        }
        if self.is_dirty() {
            return Err(Refused::Dirty);
        }
        match self.bitmaps {
            // The specification would have the bit cleared, which loses them without a word.
            Some(bitmaps) if bitmaps.consistent && bitmaps.count > 0 => {
                Err(Refused::Bitmaps(bitmaps.count))
            }
            _ => Ok(()),
        }
    }

    /// Its reference counts may be too low: it was written with lazy ones and not closed.
    #[must_use]
    pub const fn is_dirty(&self) -> bool {
        self.features[0] & incompatible::DIRTY != 0
    }

    /// Somebody has found it damaged.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        self.features[0] & incompatible::CORRUPT != 0
    }

    /// Its reference counts need not be kept while it is written.
    #[must_use]
    pub const fn has_lazy_refcounts(&self) -> bool {
        self.features[1] & LAZY_REFCOUNTS != 0
    }

    /// Autoclear features that are not known here: to be cleared before the first write.
    #[must_use]
    pub const fn unknown_autoclear(&self) -> u64 {
        self.features[2] & !autoclear::KNOWN
    }

    /// Bytes of a cluster.
    #[must_use]
    pub const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table: one cluster of words of 8 bytes.
    #[must_use]
    pub const fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / 8
    }

    /// Bits of a reference count.
    #[must_use]
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// "0.10" or "1.1", as `qemu-img` calls the versions.
    #[must_use]
    pub const fn compat(&self) -> &'static str {
        if self.version == 2 { "0.10" } else { "1.1" }
    }

    /// Compares offsets and sizes of tables with the file, and the L1 table with the virtual size.
    fn judge_tables(&self, file_bytes: u64) -> Result<(), Refused> {
        let size = self.virtual_size;
        if size > i64::MAX.unsigned_abs() {
            return Err(wrong("size", size, "no file can be larger than 2^63 - 1 bytes"));
        }
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if l1_bytes > L1_BYTES_MAX {
            return Err(wrong("l1_size", self.l1_entries, "an L1 table has at most 32 MiB"));
        }
        if u64::from(self.l1_entries) < l1_entries(size, self.cluster_bits) {
            return Err(wrong("l1_size", self.l1_entries, "the virtual size needs a larger table"));
        }
        if l1_bytes > 0 {
            self.table("l1_table_offset", self.l1_offset, l1_bytes, file_bytes)?;
        }
        let clusters = self.refcount_table_clusters;
        let bytes = u64::from(clusters) << self.cluster_bits;
        if bytes == 0 || bytes > REFCOUNT_TABLE_BYTES_MAX {
            let why = "a refcount table has at least one cluster and at most 8 MiB";
            return Err(wrong("refcount_table_clusters", clusters, why));
        }
        self.table("refcount_table_offset", self.refcount_table_offset, bytes, file_bytes)?;
        let snapshots = u64::from(self.snapshots);
        if snapshots > SNAPSHOTS_MAX {
            return Err(wrong("nb_snapshots", snapshots, "there are at most 65536"));
        }
        if snapshots > 0 {
            let least = snapshots * SNAPSHOT_MIN;
            self.table("snapshots_offset", self.snapshots_offset, least, file_bytes)?;
        }
        Ok(())
    }

    fn table(&self, what: &'static str, at: u64, bytes: u64, end: u64) -> Result<(), Refused> {
        if at == 0 || at % self.cluster_bytes() != 0 {
            return Err(wrong(what, at, "it has to be a multiple of the cluster size, and not 0"));
        }
        match at.checked_add(bytes) {
            Some(last) if last <= end => Ok(()),
            _ => Err(wrong(what, at, "its table is not within the file")),
        }
    }
}

/// Entries of an L1 table for `size` bytes of disk.
pub(crate) const fn l1_entries(size: u64, cluster_bits: u32) -> u64 {
    size.div_ceil(1 << (2 * cluster_bits - 3))
}

/// Refuses features that change what the image means and are not known here, by name where the image
/// gives one.
fn judge_features(found: u64, extensions: &Extensions) -> Result<(), Refused> {
    let unknown = found & !incompatible::KNOWN;
    if unknown != 0 {
        let names: Vec<_> = (0..64)
            .filter(|bit| unknown & (1 << bit) != 0)
            .map(|bit| match extensions.incompatible_name(bit) {
                Some(name) => format!("bit {bit} ({name})"),
                None => format!("bit {bit}"),
            })
            .collect();
        return Err(Refused::UnknownFeatures(names.join(", ")));
    }
    if found & incompatible::EXTENDED_L2 != 0 { Err(Refused::ExtendedL2) } else { Ok(()) }
}

/// The byte is there in longer headers only. The feature has to be set if it is not 0, and only then.
fn compression(bytes: &[u8], features: u64, length: usize) -> Result<Compression, Refused> {
    let number = if length > LENGTH_V3 {
        *bytes.get(LENGTH_V3).ok_or(Refused::Truncated("compression_type"))?
    } else {
        0
    };
    match (features & incompatible::COMPRESSION != 0, number) {
        (false, 0) => Ok(Compression::Zlib),
        (true, 1) => Ok(Compression::Zstd),
        _ => Err(Refused::Compression(number)),
    }
}

fn backing(
    bytes: &[u8],
    offset: u64,
    cluster_bits: u32,
    extensions: &Extensions,
) -> Result<Option<BackingName>, Refused> {
    let length = field(bytes, 16, "backing_file_size")?;
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    if length > NAME_MAX {
        return Err(wrong("backing_file_size", length, "a name has at most 1023 bytes"));
    }
    let name = offset
        .checked_add(length.into())
        .filter(|end| *end <= 1 << cluster_bits)
        .and_then(|end| bytes.get(usize::try_from(offset).ok()?..usize::try_from(end).ok()?));
    let Some(name) = name else {
        let why = "the name has to be within the first cluster";
        return Err(wrong("backing_file_offset", offset, why));
    };
    let format = extensions.backing_format.clone();
    Ok(Some(BackingName { name: path(name), format }))
}

fn data_file(features: [u64; 3], extensions: &Extensions) -> Option<DataFileName> {
    (features[0] & incompatible::DATA_FILE != 0).then(|| DataFileName {
        name: extensions.data_file.as_deref().map(path),
        raw: features[2] & autoclear::RAW_DATA != 0,
    })
}

fn path(name: &[u8]) -> PathBuf {
    OsString::from_vec(name.to_vec()).into()
}

#[cfg(test)]
mod tests;
