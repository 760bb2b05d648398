//! The virtio-blk wire format (VIRTIO 1.2 §5.2): feature bits, configuration space, requests.
//!
//! Wire words end here: above, everything is [`ringway_core::Op`] and [`ringway_core::Status`].

mod config;
mod decode;
mod wire;

pub use config::{CONFIG_BYTES, Config, WRITEBACK_OFFSET};
pub use decode::{Decoded, StatusByte, Wire, decode};
pub use wire::*;
