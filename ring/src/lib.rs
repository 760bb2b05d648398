//! Shared-memory rings: virtqueues with the virtio-blk wire format, and Xen's block rings.
//!
//! Floor 1a of the house: pure memory. No file descriptor, no system call, so that all of it runs
//! under Miri. All that a peer wrote is copied once and then judged.

pub mod blkif;
mod shared;
pub mod virtio_blk;
pub mod virtqueue;
