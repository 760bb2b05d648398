//! The virtio-blk device that a guest sees: features and configuration space.

use ringway_disk::Disk;
use ringway_export::ExportOptions;
use ringway_ring::virtio_blk::{
    Config, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_F_NOTIFICATION_DATA, VIRTIO_F_RING_PACKED, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, feature_bits,
};

/// The longest segment offered to guests, in bytes. Far above what a guest's own limits make.
const SIZE_MAX: u32 = 4 << 20;

/// The most data segments offered for one request: what fits a queue of 128 descriptors together
/// with header and status, so that guests without indirect descriptors can send it too.
const SEG_MAX: u32 = 126;

/// The virtio features offered, without those of the transport.
///
/// RING_RESET and NOTIFICATION_DATA cost nothing: the front-end turns the reset of a queue into
/// stopping and starting it, and the data of a notification does not pass an eventfd.
///
/// Not IN_ORDER: it lets a driver assume that requests come back in the order they were made
/// (VIRTIO 1.2 §2.7.11). Disks do not keep an order, so every answer would have to wait for the
/// slowest one before it, and all it would save is a lookup in the driver.
pub(crate) fn features(disk: &Disk) -> u64 {
    let geometry = disk.geometry();
    let mut features = feature_bits(&[
        VIRTIO_F_VERSION_1,
        VIRTIO_F_RING_PACKED,
        VIRTIO_F_RING_RESET,
        VIRTIO_F_NOTIFICATION_DATA,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_CONFIG_WCE,
    ]);
    if geometry.read_only {
        features |= feature_bits(&[VIRTIO_BLK_F_RO]);
    } else {
        features |= feature_bits(&[VIRTIO_BLK_F_WRITE_ZEROES]);
        if geometry.discard {
            features |= feature_bits(&[VIRTIO_BLK_F_DISCARD]);
        }
    }
    features
}

/// What the configuration space says.
pub(crate) fn config(disk: &Disk, options: ExportOptions, writeback: bool) -> Config {
    Config {
        geometry: disk.geometry(),
        size_max: SIZE_MAX,
        seg_max: SEG_MAX.min(u32::from(options.queue_size).saturating_sub(2)).max(1),
        num_queues: options.queues,
        writeback,
    }
}
