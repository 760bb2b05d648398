//! Xen's block rings (`xen/include/public/io/ring.h` and `blkif.h`), back and front side, in the
//! ABIs of 64-bit and 32-bit x86 guests.
//!
//! One ring carries requests one way and answers the other way, in the same slots. Data moves in
//! pages that the guest grants to the back-end; what a grant is, and how to reach its bytes, is not
//! the ring's business: see [`Grants`].

mod asked;
mod back;
mod front;
mod layout;
#[cfg(all(test, loom))]
mod models;
mod piece;
#[cfg(test)]
mod tests;

pub use crate::virtqueue::Armed;
pub use asked::{Asked, Broken, Command, Grants, NotGranted, Offered, Refused, Token};
pub use back::Back;
pub use front::{Ask, BackFault, Front, NoRoom, Response, With};
pub use layout::{
    Abi, DIRECT_SEGMENTS_MAX, INDIRECT_PAGES_MAX, INDIRECT_SEGMENTS_MAX, LayoutError, PAGE_BYTES,
    RING_ORDER_MAX, RingAt, SEGMENTS_PER_PAGE,
};
pub use piece::{GrantPiece, pieces_to_bytes};
