//! The shape of a disk as its users see it.

/// The unit of addresses in virtio-blk and blkif, in bytes, whatever the disk's block size.
pub const SECTOR_BYTES: u64 = 512;

/// Capacity, block sizes and limits of a disk, as offered to a guest.
///
/// The alignment that the host needs for O_DIRECT is not here: it is a matter between the disk and
/// its file, and is never shown to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of 512.
    pub capacity: u64,
    /// The smallest unit the guest should address, in bytes: 512 or 4096.
    pub logical_block: u32,
    /// The unit the host writes without reading first, in bytes; at least `logical_block`.
    pub physical_block: u32,
    /// The request size the host likes best, in bytes; 0 means no preference.
    pub optimal_io: u32,
    /// Writes, discards and write-zeroes are refused.
    pub read_only: bool,
    /// [`crate::Op::Discard`] frees space.
    pub discard: bool,
    /// The unit in which discarding frees space, in bytes.
    pub discard_granularity: u32,
}

impl Geometry {
    /// Capacity in 512-byte sectors.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.capacity / SECTOR_BYTES
    }
}
