//! A request in the words of the wire.

use ringway_core::{ByteRange, DataOp};
use ringway_ring::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

/// What the header of a request says, and where on the disk it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WireRequest {
    /// `VIRTIO_BLK_T_…`
    pub(super) kind: u32,
    /// First byte on the disk.
    pub(super) offset: u64,
    /// Bytes of the disk.
    pub(super) len: u64,
    /// Of a discard or write-zeroes.
    pub(super) flags: Option<u32>,
}

impl WireRequest {
    /// What the header says; 0 where it means nothing (VIRTIO 1.2 §5.2.6).
    pub(super) fn sector(&self) -> u64 {
        if self.data_op().is_some() { self.offset / 512 } else { 0 }
    }

    pub(super) fn data_op(&self) -> Option<DataOp> {
        match self.kind {
            VIRTIO_BLK_T_IN => Some(DataOp::Read),
            VIRTIO_BLK_T_OUT => Some(DataOp::Write),
            _ => None,
        }
    }

    pub(super) fn range(&self) -> Option<ByteRange> {
        ByteRange::new(self.offset, self.len)
    }

    /// True if it overtakes nothing, and nothing is merged across it. For what moves no data.
    pub(super) fn is_barrier(&self) -> bool {
        self.kind != VIRTIO_BLK_T_GET_ID
    }

    /// True if the device writes to its buffers.
    pub(super) fn is_written_by_device(&self) -> bool {
        matches!(self.kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_GET_ID)
    }
}
