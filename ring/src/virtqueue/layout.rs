//! How a split virtqueue lies in memory (VIRTIO 1.2 §2.7) and what both sides check about that.

/// The largest queue the specification allows.
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// The chain goes on at `next` (§2.7.5).
pub const DESC_F_NEXT: u16 = 1;
/// The device writes to the buffer (§2.7.5).
pub const DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors (§2.7.5.3).
pub const DESC_F_INDIRECT: u16 = 4;

/// The driver asks for no interrupts (§2.7.6).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// The device asks for no kicks (§2.7.8).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// `struct virtq_desc`, §2.7.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Desc {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// Index of the next descriptor, with [`DESC_F_NEXT`].
    pub next: u16,
}

/// `struct virtq_used_elem`, §2.7.8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct UsedElem {
    /// Index of the head of the chain.
    pub id: u32,
    /// Bytes written to the chain's writable part.
    pub len: u32,
}

const _: () = assert!(size_of::<Desc>() == 16);
const _: () = assert!(size_of::<UsedElem>() == 8);

/// Why a queue cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// §2.7: a power of two of at most 32768.
    #[error("queue size {0} is not a power of two between 1 and {QUEUE_SIZE_MAX}")]
    Size(u32),
    /// §2.8: at least 1 and at most 32768.
    #[error("packed queue size {0} is not between 1 and {QUEUE_SIZE_MAX}")]
    PackedSize(u32),
    /// The indices of a packed queue are not in the ring, or lie apart by more than it holds.
    #[error("the indices {0:#010x} are not those of a packed queue of this size")]
    PackedBase(u32),
    /// The indices of a split queue are 16 bits wide.
    #[error("ring index {0} does not fit in 16 bits")]
    SplitBase(u32),
    /// §2.7: alignments of 16, 2 and 4 bytes; §2.8.10.1: of 16, 4 and 4.
    #[error("the {0} ring is not aligned to {1} bytes")]
    Unaligned(&'static str, usize),
}

/// Checks a queue size as it comes from the peer.
///
/// # Errors
/// [`LayoutError::Size`] unless it is a power of two of at most [`QUEUE_SIZE_MAX`].
pub fn check_size(size: u32) -> Result<u16, LayoutError> {
    match u16::try_from(size) {
        Ok(n) if n.is_power_of_two() && n <= QUEUE_SIZE_MAX => Ok(n),
        _ => Err(LayoutError::Size(size)),
    }
}

/// Bytes of the descriptor table for `size` entries.
#[must_use]
pub const fn desc_bytes(size: u16) -> usize {
    size as usize * size_of::<Desc>()
}

/// Bytes of the available ring: flags, idx, `size` entries, used_event (§2.7.6).
#[must_use]
pub const fn avail_bytes(size: u16) -> usize {
    6 + 2 * size as usize
}

/// Bytes of the used ring: flags, idx, `size` entries, avail_event (§2.7.8).
#[must_use]
pub const fn used_bytes(size: u16) -> usize {
    6 + size_of::<UsedElem>() * size as usize
}

/// Where the three parts of a split virtqueue are, in our address space.
#[derive(Clone, Copy, Debug)]
pub struct SplitAddresses {
    /// Descriptor table, [`desc_bytes`] long.
    pub desc: *mut u8,
    /// Available ring, [`avail_bytes`] long.
    pub avail: *mut u8,
    /// Used ring, [`used_bytes`] long.
    pub used: *mut u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a08_every_queue_size_is_judged() {
        let good: Vec<u32> = (0..16).map(|n| 1 << n).collect();
        // All sizes around the legal ones, and every power of two, as u32.
        let all = if cfg!(miri) { 300 } else { 70_000 };
        for size in (0..=all).chain((0..32).map(|n| 1u32 << n)).chain([u32::MAX, 65_536 + 128]) {
            assert_eq!(check_size(size).is_ok(), good.contains(&size), "size {size}");
        }
    }
}
