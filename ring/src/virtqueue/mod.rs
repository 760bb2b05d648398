//! Virtqueues: split (VIRTIO 1.2 §2.7) and packed (§2.8), device and driver side.

mod chain;
mod inflight;
mod layout;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod packed;
mod packed_driver;
mod packed_layout;
mod sides;
mod split;
mod split_driver;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod types;

pub use crate::shared::prefetch;
pub use chain::{Chain, ChainError};
pub use inflight::{InflightError, Tracked, inflight_bytes, renew_inflight};
pub use layout::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, LayoutError,
    QUEUE_SIZE_MAX, SplitAddresses, USED_F_NO_NOTIFY, UsedElem, avail_bytes, check_size,
    desc_bytes, event_passed, used_bytes,
};
pub use packed::PackedDevice;
pub use packed_driver::PackedDriver;
pub use packed_layout::{
    DESC_F_AVAIL, DESC_F_USED, EVENT_BYTES, PackedAddresses, PackedBase, check_packed_size,
};
pub use sides::{Device, Driver};
pub use split::SplitDevice;
pub use split_driver::SplitDriver;
pub use types::{
    Areas, Armed, Broken, DeviceFault, Format, Head, NoRoom, Piece, Tables, Unpublished, Used,
};
