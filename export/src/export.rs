//! A disk, offered to guests.

use crate::command::Handle;
use crate::vhost_user::Queue;
use ringway_core::Geometry;
use ringway_disk::{CacheMode, Disk};
use ringway_ring::virtio_blk::{
    Config, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, feature_bits,
};
use std::sync::Arc;

/// The longest segment offered to guests, in bytes. Far above what a guest's own limits make.
const SIZE_MAX: u32 = 4 << 20;

/// The most data segments offered for one request: what fits a queue of 128 descriptors together
/// with header and status, so that guests without indirect descriptors can send it too.
const SEG_MAX: u32 = 126;

/// How a disk is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Number of request queues.
    pub queues: u16,
    /// The largest ring a guest may set up, in descriptors: a power of two.
    pub queue_size: u16,
}

/// A disk, how it is offered, and the workers that serve it.
pub struct Export {
    disk: Arc<Disk>,
    options: ExportOptions,
    workers: Vec<Handle<Queue>>,
    /// Where this disk's queue 0 goes; the others follow round robin.
    first_worker: usize,
}

impl Export {
    /// Offers `disk`; queue *n* is served by worker `first_worker + n`, round robin.
    ///
    /// # Panics
    /// If there is no worker.
    #[must_use]
    pub fn new(
        disk: Arc<Disk>,
        options: ExportOptions,
        workers: Vec<Handle<Queue>>,
        first_worker: usize,
    ) -> Self {
        assert!(!workers.is_empty(), "an export needs a worker");
        Self { disk, options, workers, first_worker }
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// How it is offered.
    #[must_use]
    pub fn options(&self) -> ExportOptions {
        self.options
    }

    /// The worker of queue `index`.
    pub(crate) fn worker(&self, index: usize) -> &Handle<Queue> {
        &self.workers[(self.first_worker + index) % self.workers.len()]
    }

    /// The virtio features offered, without those of the transport.
    pub(crate) fn features(&self) -> u64 {
        let geometry = self.disk.geometry();
        let mut features = feature_bits(&[
            VIRTIO_F_VERSION_1,
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
    pub(crate) fn config(&self, writeback: bool) -> Config {
        let geometry: Geometry = self.disk.geometry();
        Config {
            geometry,
            size_max: SIZE_MAX,
            seg_max: SEG_MAX.min(u32::from(self.options.queue_size).saturating_sub(2)).max(1),
            num_queues: self.options.queues,
            writeback,
        }
    }

    /// True if a guest may switch the write cache on.
    pub(crate) fn may_write_back(&self) -> bool {
        self.disk.cache() != CacheMode::Writethrough
    }
}
