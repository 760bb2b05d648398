//! Virtqueues: split (VIRTIO 1.2 §2.7) and packed (§2.8), device and driver side.

mod chain;
mod chain_error;
mod device;
mod driver;
mod inflight;
mod layout;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod packed;
mod packed_driver;
mod packed_layout;
mod split;
mod split_driver;
mod split_memory;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod types;

pub use crate::shared::prefetch;
pub use chain::Chain;
pub use chain_error::ChainError;
pub use device::Device;
pub use driver::Driver;
pub use inflight::{InflightError, Tracked, inflight_bytes, may_name_inflight, renew_inflight};
pub use layout::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, LayoutError,
    QUEUE_SIZE_MAX, SplitAddresses, USED_F_NO_NOTIFY, UsedElem, avail_bytes, check_size,
    desc_bytes, used_bytes,
};
pub use packed::PackedDevice;
pub use packed_driver::PackedDriver;
pub use packed_layout::{
    DESC_F_AVAIL, DESC_F_USED, EVENT_BYTES, PackedAddresses, PackedBase, check_packed_size,
};
pub use split::SplitDevice;
pub use split_driver::SplitDriver;
pub use split_memory::event_passed;
pub use types::{
    Areas, Armed, Broken, DeviceFault, Format, Head, NoRoom, Piece, Tables, Unpublished, Used,
};
