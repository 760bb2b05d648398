//! Virtqueues: split (VIRTIO 1.2 §2.7), device and driver side.

mod chain;
mod layout;
mod split;
mod split_driver;

pub use chain::{Chain, ChainError};
pub use layout::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, LayoutError,
    QUEUE_SIZE_MAX, SplitAddresses, USED_F_NO_NOTIFY, UsedElem, avail_bytes, check_size,
    desc_bytes, event_passed, used_bytes,
};
pub use split::{Armed, Broken, Head, SplitDevice};
pub use split_driver::{DeviceFault, NoRoom, Piece, SplitDriver, Tables, Used};
