//! `struct virtio_blk_config`, VIRTIO 1.2 §5.2.4.

use super::wire::ERASE_SECTORS_MAX;
use ringway_core::Geometry;

/// Length of the configuration space up to and including write-zeroes, in bytes.
pub const CONFIG_BYTES: usize = 60;

/// Offset of `writeback`, the only field a driver may write (with CONFIG_WCE), in bytes.
pub const WRITEBACK_OFFSET: usize = 32;

/// What the configuration space says about a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Shape of the disk.
    pub geometry: Geometry,
    /// The longest segment, in bytes.
    pub size_max: u32,
    /// The most data segments of a request.
    pub seg_max: u32,
    /// Number of request queues.
    pub num_queues: u16,
    /// True while writes may complete before they are durable.
    pub writeback: bool,
}

impl Config {
    /// The bytes a driver reads, little endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        let g = &self.geometry;
        let blocks = |len: u32| len / g.logical_block.max(1);
        put(0, &g.sectors().to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        let (cylinders, heads, sectors) = chs(g.sectors());
        put(16, &cylinders.to_le_bytes());
        put(18, &[heads, sectors]);
        put(20, &g.logical_block.to_le_bytes());
        let exponent = blocks(g.physical_block).max(1).ilog2();
        put(24, &[u8::try_from(exponent).unwrap_or(0), 0]);
        put(26, &u16::try_from(blocks(g.physical_block)).unwrap_or(1).to_le_bytes());
        put(28, &blocks(g.optimal_io).to_le_bytes());
        put(WRITEBACK_OFFSET, &[u8::from(self.writeback)]);
        put(34, &self.num_queues.to_le_bytes());
        if g.discard {
            put(36, &ERASE_SECTORS_MAX.to_le_bytes());
            put(40, &1u32.to_le_bytes());
            let granularity = g.discard_granularity.max(g.logical_block) / 512;
            put(44, &granularity.to_le_bytes());
        }
        put(48, &ERASE_SECTORS_MAX.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[u8::from(g.discard)]);
        bytes
    }
}

/// Cylinders, heads and sectors for firmware that still asks: 16 heads, 63 sectors, the cylinders
/// that fit, at most 65535.
fn chs(sectors: u64) -> (u16, u8, u8) {
    (u16::try_from(sectors / (16 * 63)).unwrap_or(u16::MAX), 16, 63)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            geometry: Geometry {
                capacity: 1 << 30,
                logical_block: 512,
                physical_block: 4096,
                optimal_io: 65536,
                read_only: false,
                discard: true,
                discard_granularity: 4096,
            },
            size_max: 0x0102_0304,
            seg_max: 126,
            num_queues: 4,
            writeback: true,
        }
    }

    #[test]
    fn the_fields_lie_where_the_specification_puts_them() {
        let bytes = config().to_bytes();
        assert_eq!(bytes[..8], 2_097_152u64.to_le_bytes());
        assert_eq!(bytes[8..12], [4, 3, 2, 1]);
        assert_eq!(bytes[12..16], [126, 0, 0, 0]);
        assert_eq!(bytes[16..20], [0x20, 8, 16, 63], "2080 cylinders of 16 heads and 63 sectors");
        assert_eq!(bytes[20..24], [0, 2, 0, 0]);
        assert_eq!(bytes[24..28], [3, 0, 8, 0], "8 logical blocks in a physical one");
        assert_eq!(bytes[28..32], [128, 0, 0, 0]);
        assert_eq!(bytes[32], 1);
        assert_eq!(bytes[34..36], [4, 0]);
        assert_eq!(bytes[36..44], [0, 0, 64, 0, 1, 0, 0, 0], "discards of 2 GiB in one segment");
        assert_eq!(bytes[44..48], [8, 0, 0, 0]);
        assert_eq!(bytes[48..56], [0, 0, 64, 0, 1, 0, 0, 0], "zeroes, alike");
        assert_eq!(bytes[56..], [1, 0, 0, 0]);
    }

    #[test]
    fn what_a_disk_has_not_is_not_told() {
        let mut config = config();
        config.geometry.discard = false;
        config.writeback = false;
        let bytes = config.to_bytes();
        assert_eq!(bytes[32], 0);
        assert_eq!(bytes[36..48], [0; 12]);
        assert_eq!(bytes[48..56], [0, 0, 64, 0, 1, 0, 0, 0], "zeroes are written without discard");
        assert_eq!(bytes[56], 0);
    }

    #[test]
    fn blocks_are_told_in_logical_ones_and_discards_are_no_finer() {
        let mut config = config();
        config.geometry.logical_block = 4096;
        config.geometry.discard_granularity = 512;
        let bytes = config.to_bytes();
        assert_eq!(bytes[20..24], [0, 16, 0, 0]);
        assert_eq!(bytes[24..32], [0, 0, 1, 0, 16, 0, 0, 0]);
        assert_eq!(bytes[44..48], [8, 0, 0, 0]);
    }

    #[test]
    fn a_disk_too_large_for_cylinders_has_as_many_as_can_be_told() {
        let mut config = config();
        config.geometry.capacity = 1 << 50;
        assert_eq!(config.to_bytes()[16..20], [0xff, 0xff, 16, 63]);
    }
}
