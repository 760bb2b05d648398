//! What the configuration space and the feature bits say about a disk.

use ringway_ring::virtio_blk::{
    CONFIG_BYTES, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    WRITEBACK_OFFSET,
};

/// A disk as its server describes it (`struct virtio_blk_config`, VIRTIO 1.2 §5.2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size in bytes.
    pub capacity: u64,
    /// The unit requests should be made of, in bytes.
    pub block_size: u32,
    /// The unit the host writes without reading first, in bytes.
    pub physical_block: u32,
    /// The least the host likes to be asked for, in bytes; 0 if it does not say.
    pub min_io: u32,
    /// What the host likes best to be asked for, in bytes; 0 if it does not say.
    pub optimal_io: u32,
    /// Cylinders, heads and sectors, for old partition tables.
    pub geometry: Option<(u16, u8, u8)>,
    /// The longest buffer of a request, in bytes.
    pub size_max: Option<u32>,
    /// The most buffers of a request.
    pub seg_max: Option<u32>,
    /// Request queues the configuration space names.
    pub num_queues: u16,
    /// Writes are refused.
    pub read_only: bool,
    /// FLUSH is understood.
    pub flush: bool,
    /// Writes may complete before they are durable. Without CONFIG_WCE this is whether FLUSH is
    /// offered.
    pub writeback: bool,
    /// The most sectors of one discard; `None` if it is not offered.
    pub max_discard_sectors: Option<u32>,
    /// The unit in which discarding frees space, in bytes.
    pub discard_alignment: u32,
    /// The most sectors of one write-zeroes; `None` if it is not offered.
    pub max_write_zeroes_sectors: Option<u32>,
    /// Write-zeroes with `unmap` may free space.
    pub write_zeroes_may_unmap: bool,
}

impl DiskInfo {
    /// Reads the configuration space; only fields whose feature is among `features` count.
    pub(crate) fn parse(bytes: &[u8; CONFIG_BYTES], features: u64) -> Self {
        let has = |bit: u32| features & (1 << bit) != 0;
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at =
            |at: usize| u32::from_le_bytes(std::array::from_fn::<_, 4, _>(|i| bytes[at + i]));
        let sectors = u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32;
        let limit = |bit: u32, at: usize| (has(bit) && u32_at(at) != 0).then(|| u32_at(at));
        let block_size =
            if has(VIRTIO_BLK_F_BLK_SIZE) { u32_at(20).clamp(512, 1 << 16) } else { 512 };
        let exponent = if has(VIRTIO_BLK_F_TOPOLOGY) { u32::from(bytes[24]).min(15) } else { 0 };
        let wce = has(VIRTIO_BLK_F_CONFIG_WCE);
        // In blocks.
        let io = |blocks: u32| {
            if has(VIRTIO_BLK_F_TOPOLOGY) { blocks.saturating_mul(block_size) } else { 0 }
        };
        Self {
            capacity: sectors.saturating_mul(512),
            block_size,
            physical_block: block_size << exponent,
            min_io: io(u16_at(26).into()),
            optimal_io: io(u32_at(28)),
            geometry: has(VIRTIO_BLK_F_GEOMETRY).then(|| (u16_at(16), bytes[18], bytes[19])),
            size_max: limit(VIRTIO_BLK_F_SIZE_MAX, 8),
            seg_max: limit(VIRTIO_BLK_F_SEG_MAX, 12),
            num_queues: if has(VIRTIO_BLK_F_MQ) { u16_at(34).max(1) } else { 1 },
            read_only: has(VIRTIO_BLK_F_RO),
            flush: has(VIRTIO_BLK_F_FLUSH),
            writeback: if wce { bytes[WRITEBACK_OFFSET] != 0 } else { has(VIRTIO_BLK_F_FLUSH) },
            max_discard_sectors: limit(VIRTIO_BLK_F_DISCARD, 36),
            discard_alignment: u32_at(44).saturating_mul(512),
            max_write_zeroes_sectors: limit(VIRTIO_BLK_F_WRITE_ZEROES, 48),
            write_zeroes_may_unmap: bytes[56] != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_core::Geometry;
    use ringway_ring::virtio_blk::{Config, ERASE_SECTORS_MAX};

    #[test]
    fn reads_what_the_device_side_wrote() {
        let config = Config {
            geometry: Geometry {
                capacity: 5 << 40,
                logical_block: 512,
                physical_block: 4096,
                optimal_io: 65536,
                read_only: false,
                discard: true,
                discard_granularity: 4096,
            },
            size_max: 1 << 20,
            seg_max: 126,
            num_queues: 4,
            writeback: true,
        };
        let info = DiskInfo::parse(&config.to_bytes(), u64::MAX);
        assert_eq!((info.capacity, info.block_size, info.physical_block), (5 << 40, 512, 4096));
        assert_eq!(info.optimal_io, 65536);
        assert!(info.geometry.is_some());
        assert_eq!((info.size_max, info.seg_max, info.num_queues), (Some(1 << 20), Some(126), 4));
        assert_eq!(info.max_discard_sectors, Some(ERASE_SECTORS_MAX));
        assert_eq!((info.discard_alignment, info.write_zeroes_may_unmap), (4096, true));
        let none = DiskInfo::parse(&config.to_bytes(), 0);
        assert_eq!((none.size_max, none.num_queues, none.writeback), (None, 1, false));
        assert_eq!((none.max_discard_sectors, none.geometry, none.optimal_io), (None, None, 0));
    }
}
