//! The shared memory that belongs to the head of a chain: request header and status byte.

use ringway_ring::virtio_blk::Wire;
use ringway_ring::virtqueue::Piece;
use std::mem::offset_of;

/// `struct virtio_blk_discard_write_zeroes`, VIRTIO 1.2 §5.2.6.
#[derive(Clone, Copy)]
#[repr(C)]
struct Erase {
    sector: u64,
    sectors: u32,
    flags: u32,
}

/// All that a request needs beside its data, in one cache line.
#[repr(C, align(64))]
struct HeaderSlot {
    header: Wire,
    erase: Erase,
    unused: [u8; 31],
    status: u8,
}

const _: () = assert!(size_of::<HeaderSlot>() == 64);
const _: () = assert!(size_of::<Erase>() == 16);

/// A status byte that no device writes, so that one that writes nothing has failed.
const NO_STATUS: u8 = 0xff;

/// One slot for each descriptor of a queue; a chain uses the slot of its head.
///
/// # Invariants
/// 1. `host` points to `count` slots, mapped and aligned, for as long as this exists; `guest` is the
///    guest-physical address of the first.
/// 2. A slot is only touched through this and by the device.
#[derive(Debug)]
pub(crate) struct Headers {
    host: *mut HeaderSlot,
    guest: u64,
    count: u16,
}

impl Headers {
    /// Bytes for the slots of a queue of `size`.
    pub(crate) const fn bytes(size: u16) -> usize {
        size as usize * size_of::<HeaderSlot>()
    }

    /// # Safety
    /// `host` names [`Headers::bytes`] of mapped memory that nothing else uses, at the guest-physical
    /// address `guest`, for as long as the result exists.
    ///
    /// # Panics
    /// If `host` is not aligned to 64 bytes.
    pub(crate) unsafe fn new(host: *mut u8, guest: u64, count: u16) -> Self {
        assert!((host as usize) % align_of::<HeaderSlot>() == 0, "slots are unaligned");
        // Just checked.
        #[allow(clippy::cast_ptr_alignment)]
        let host = host.cast();
        Self { host, guest, count }
    }

    #[inline]
    fn slot(&self, head: u16) -> *mut HeaderSlot {
        debug_assert!(head < self.count);
        self.host.wrapping_add(usize::from(head))
    }

    #[inline]
    fn piece(&self, head: u16, offset: usize, len: u32) -> Piece {
        let at = usize::from(head) * size_of::<HeaderSlot>() + offset;
        Piece { addr: self.guest.wrapping_add(at as u64), len }
    }

    /// Fills in the header of a request. Returns header and status byte as the device sees them.
    #[inline]
    pub(crate) fn fill(&mut self, head: u16, kind: u32, sector: u64) -> (Piece, Piece) {
        let slot = self.slot(head);
        // SAFETY: `head` is below `count`, so the slot is ours to write (invariants 1 and 2).
        // Volatile, because the device reads it.
        unsafe {
            (&raw mut (*slot).header).write_volatile(Wire { kind, reserved: 0, sector });
            (&raw mut (*slot).status).write_volatile(NO_STATUS);
        }
        let header = self.piece(head, offset_of!(HeaderSlot, header), 16);
        (header, self.piece(head, offset_of!(HeaderSlot, status), 1))
    }

    /// Fills in the range of a discard or write-zeroes.
    pub(crate) fn fill_erase(&mut self, head: u16, sector: u64, sectors: u32, flags: u32) -> Piece {
        let slot = self.slot(head);
        // SAFETY: as in `fill`.
        unsafe { (&raw mut (*slot).erase).write_volatile(Erase { sector, sectors, flags }) };
        self.piece(head, offset_of!(HeaderSlot, erase), 16)
    }

    /// Where the status byte of a chain is.
    #[inline]
    pub(crate) fn status_at(&self, head: u16) -> *const u8 {
        // SAFETY: the slot is mapped (invariant 1); only its address is taken.
        unsafe { &raw const (*self.slot(head)).status }
    }
}
