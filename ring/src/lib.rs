//! Shared-memory rings: virtqueues and the virtio-blk wire format.
//!
//! Floor 1a of the house: pure memory. No file descriptor, no system call, so that all of it runs
//! under Miri. All that a peer wrote is copied once and then judged.

mod shared;
pub mod virtio_blk;
pub mod virtqueue;
