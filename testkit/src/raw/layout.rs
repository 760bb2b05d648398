//! Where things lie in the memory of a guest that a test writes by hand.

/// Where [`RawGuest`](super::RawGuest) maps its memory in guest-physical and in user address space.
pub const GUEST_BASE: u64 = 0x10_0000;
/// Where its rings lie; one per queue, this far apart.
pub(super) const RING_STRIDE: u64 = 0x1_0000;
/// Where a test may put its data.
pub const DATA: u64 = GUEST_BASE + 0x40_0000;

/// One descriptor, as a test writes it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Desc {
    /// Guest address.
    pub addr: u64,
    /// Length.
    pub len: u32,
    /// Flags.
    pub flags: u16,
    /// Next.
    pub next: u16,
}
