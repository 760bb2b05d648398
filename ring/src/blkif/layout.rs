//! How a Xen block ring lies in memory (`ring.h`, `blkif.h`), and what both sides check about it.
//!
//! A ring is 1 to 16 pages that follow each other: four indices at the beginning, the slots from
//! byte 64 on. 32-bit guests align 64-bit fields to 4 bytes, so that their slots are shorter and
//! nearly every field lies elsewhere ([`Abi`]). All numbers are little-endian.

use super::piece::GrantPiece;
use crate::shared::{AtomicU32, u32_at};

/// Bytes of a page, of a ring as of data. Fixed by the protocol.
pub const PAGE_BYTES: usize = 4096;
/// A ring has at most 2^4 pages.
pub const RING_ORDER_MAX: u32 = 4;
/// `BLKIF_MAX_SEGMENTS_PER_REQUEST`: what fits in a slot.
pub const DIRECT_SEGMENTS_MAX: usize = 11;
/// `BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST`.
pub const INDIRECT_PAGES_MAX: usize = 8;
/// Segments that an indirect page has room for.
pub const SEGMENTS_PER_PAGE: usize = PAGE_BYTES / size_of::<GrantPiece>();
/// The most segments the protocol has room for. Linux offers 256.
#[allow(clippy::cast_possible_truncation)] // 4096
pub const INDIRECT_SEGMENTS_MAX: u16 = (INDIRECT_PAGES_MAX * SEGMENTS_PER_PAGE) as u16;

pub(super) const OP_READ: u8 = 0;
pub(super) const OP_WRITE: u8 = 1;
pub(super) const OP_WRITE_BARRIER: u8 = 2;
pub(super) const OP_FLUSH_DISKCACHE: u8 = 3;
pub(super) const OP_DISCARD: u8 = 5;
pub(super) const OP_INDIRECT: u8 = 6;
pub(super) const DISCARD_SECURE: u8 = 1;

pub(super) const RSP_OKAY: i16 = 0;
pub(super) const RSP_ERROR: i16 = -1;
pub(super) const RSP_EOPNOTSUPP: i16 = -2;

/// Bytes before the first slot.
const HEADER_BYTES: usize = 64;
/// Slots of a ring of one page, in both ABIs: as many as fit, rounded down to a power of two.
const SLOTS_PER_PAGE: u32 = 32;
/// 32-bit words of the longest slot.
pub(super) const SLOT_WORDS: usize = 28;

/// The layout of a slot: the key `protocol` of a front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// `x86_64-abi`: 64-bit fields are aligned to 8 bytes. Also that of ARM.
    X86_64,
    /// `x86_32-abi`: 64-bit fields are aligned to 4 bytes.
    X86_32,
}

impl Abi {
    /// The ABI with this name in xenstore, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::X86_64, Self::X86_32].into_iter().find(|abi| abi.name() == name)
    }

    /// Its name in xenstore.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-abi",
            Self::X86_32 => "x86_32-abi",
        }
    }

    /// Bytes from slot to slot: `sizeof(struct blkif_request)`.
    #[must_use]
    pub const fn slot_bytes(self) -> usize {
        match self {
            Self::X86_64 => 112,
            Self::X86_32 => 108,
        }
    }

    /// `sizeof(struct blkif_response)`.
    #[must_use]
    pub const fn response_bytes(self) -> usize {
        match self {
            Self::X86_64 => 16,
            Self::X86_32 => 12,
        }
    }

    /// `offsetof(id)`, in words, of every kind of request.
    pub(super) const fn id_at(self) -> usize {
        match self {
            Self::X86_64 => 2,
            Self::X86_32 => 1,
        }
    }

    /// `offsetof(sector_number)`, in words, of every kind of request that has one.
    pub(super) const fn sector_at(self) -> usize {
        self.id_at() + 2
    }

    /// `offsetof(seg)`, in words, of a direct request; `offsetof(nr_sectors)` of a discard.
    pub(super) const fn rest_at(self) -> usize {
        self.id_at() + 4
    }

    /// `offsetof(indirect_grefs)`, in words: behind the handle.
    pub(super) const fn pages_at(self) -> usize {
        self.id_at() + 5
    }
}

/// Why there is no ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A ring has 1, 2, 4, 8 or 16 pages.
    #[error("a ring of 2^{0} pages; it may have 2^{RING_ORDER_MAX} at most")]
    Order(u32),
    /// A ring begins with a page.
    #[error("the ring does not begin at a multiple of {PAGE_BYTES} bytes")]
    Unaligned,
    /// More segments are offered than a request has room for.
    #[error("{0} indirect segments; a request has room for {INDIRECT_SEGMENTS_MAX}")]
    IndirectSegments(u16),
    /// The indices of the ring cannot be: nobody uses it properly.
    #[error("the ring holds {answered} answers and {asked} requests, with {size} slots")]
    Indices {
        /// `rsp_prod`.
        answered: u32,
        /// `req_prod`.
        asked: u32,
        /// Slots.
        size: u32,
    },
}

/// Where a ring is, in our address space, and of what kind.
#[derive(Clone, Copy, Debug)]
pub struct RingAt {
    /// First byte, of `PAGE_BYTES << order` that are mapped without a gap.
    pub base: *mut u8,
    /// Binary logarithm of the number of pages: the key `ring-page-order`.
    pub order: u32,
    /// The layout of a slot.
    pub abi: Abi,
}

impl RingAt {
    /// Slots of the ring: the most requests that can be in flight.
    ///
    /// # Errors
    /// [`LayoutError::Order`].
    pub const fn slots(&self) -> Result<u32, LayoutError> {
        if self.order > RING_ORDER_MAX {
            return Err(LayoutError::Order(self.order));
        }
        Ok(SLOTS_PER_PAGE << self.order)
    }
}

const _: () = assert!(HEADER_BYTES + SLOTS_PER_PAGE as usize * 112 <= PAGE_BYTES);

/// A private copy of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingSlot(pub(super) [u32; SLOT_WORDS]);

impl RingSlot {
    /// The first four bytes: operation, number of segments or flags or the inner operation, …
    #[inline]
    pub(super) const fn head(&self) -> [u8; 4] {
        self.0[0].to_le_bytes()
    }

    #[inline]
    pub(super) fn long(&self, word: usize) -> u64 {
        u64::from(self.0[word]) | u64::from(self.0[word + 1]) << 32
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // it is cut in two
    pub(super) fn set_long(&mut self, word: usize, value: u64) {
        self.0[word] = value as u32;
        self.0[word + 1] = (value >> 32) as u32;
    }
}

/// Typed pointers into a ring, shared by its front and its back side.
///
/// # Invariants
/// 1. `PAGE_BYTES << order` bytes from `base` are mapped and aligned to a page while this exists.
/// 2. `size` is the number of slots, a power of two; all of them lie in these bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingMemory {
    base: *mut u8,
    size: u32,
    abi: Abi,
}

impl RingMemory {
    /// # Safety
    /// `at` names mapped memory, for as long as the returned value or a copy of it is in use.
    pub(super) unsafe fn new(at: RingAt) -> Result<Self, LayoutError> {
        let size = at.slots()?;
        if (at.base as usize) % PAGE_BYTES != 0 {
            return Err(LayoutError::Unaligned);
        }
        Ok(Self { base: at.base, size, abi: at.abi })
    }

    #[inline]
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    #[inline]
    pub(super) fn abi(&self) -> Abi {
        self.abi
    }

    #[inline]
    fn index(&self, number: usize) -> &AtomicU32 {
        // The cast keeps the alignment: that of a page and a multiple of 4.
        #[allow(clippy::cast_ptr_alignment)]
        // SAFETY: the word lies in the header, which is mapped and aligned (invariant 1); both sides
        // only touch it atomically.
        unsafe {
            u32_at(self.base.cast::<u32>().add(number))
        }
    }

    /// Requests made visible so far, modulo 2^32. Written by the front-end.
    #[inline]
    pub(super) fn req_prod(&self) -> &AtomicU32 {
        self.index(0)
    }

    /// The value of `req_prod` that the back-end wants to hear of.
    #[inline]
    pub(super) fn req_event(&self) -> &AtomicU32 {
        self.index(1)
    }

    /// Answers made visible so far, modulo 2^32. Written by the back-end.
    #[inline]
    pub(super) fn rsp_prod(&self) -> &AtomicU32 {
        self.index(2)
    }

    /// The value of `rsp_prod` that the front-end wants to hear of.
    #[inline]
    pub(super) fn rsp_event(&self) -> &AtomicU32 {
        self.index(3)
    }

    /// Where slot `counter`, which counts without end, begins.
    #[inline]
    pub(super) fn slot(&self, counter: u32) -> *mut u32 {
        let index = (counter & (self.size - 1)) as usize;
        // Slots are multiples of 4 bytes long.
        #[allow(clippy::cast_ptr_alignment)]
        self.base.wrapping_add(HEADER_BYTES + index * self.abi.slot_bytes()).cast()
    }

    /// Copies a slot: each byte of it is read once.
    #[inline]
    pub(super) fn read(&self, counter: u32) -> RingSlot {
        let at = self.slot(counter);
        let mut words = [0; SLOT_WORDS];
        match self.abi {
            // SAFETY: the slot is 28 words long (invariant 2). Volatile: the other side may write at
            // any time; only this copy is judged.
            Abi::X86_64 => words = unsafe { at.cast::<[u32; SLOT_WORDS]>().read_volatile() },
            Abi::X86_32 => {
                // SAFETY: likewise; here it is one word shorter.
                let short = unsafe { at.cast::<[u32; SLOT_WORDS - 1]>().read_volatile() };
                words[..SLOT_WORDS - 1].copy_from_slice(&short);
            }
        }
        RingSlot(words)
    }

    /// Writes the first `count` words of a slot, at most as many as it has.
    #[inline]
    pub(super) fn write(&self, counter: u32, slot: &RingSlot, count: usize) {
        debug_assert!(4 * count <= self.abi.slot_bytes());
        let at = self.slot(counter);
        for (word, value) in slot.0.iter().take(count).enumerate() {
            // SAFETY: `word` lies in the slot (invariant 2).
            unsafe { at.add(word).write_volatile(*value) };
        }
    }

    /// Writes an answer over the beginning of a slot, all of `struct blkif_response`: also the bytes
    /// that say nothing, so that none of ours go to the guest.
    #[inline]
    pub(super) fn write_response(&self, counter: u32, id: u64, operation: u8, status: i16) {
        let at = self.slot(counter);
        let [low, high] = status.to_le_bytes();
        let mut slot = RingSlot([0; SLOT_WORDS]);
        slot.set_long(0, id);
        let [a, b, c, d] = [slot.0[0], slot.0[1], u32::from_le_bytes([operation, 0, low, high]), 0];
        match self.abi {
            // SAFETY: a slot is longer than a response (invariant 2).
            Abi::X86_64 => unsafe { at.cast::<[u32; 4]>().write_volatile([a, b, c, d]) },
            // SAFETY: likewise; here a response has no padding at its end.
            Abi::X86_32 => unsafe { at.cast::<[u32; 3]>().write_volatile([a, b, c]) },
        }
    }

    /// Copies the response in a slot: id, operation, status.
    #[inline]
    pub(super) fn read_response(&self, counter: u32) -> (u64, u8, i16) {
        // SAFETY: as in `read`; both ABIs have the three fields in the same three words.
        let words = unsafe { self.slot(counter).cast::<[u32; 3]>().read_volatile() };
        let [operation, _, low, high] = words[2].to_le_bytes();
        let id = u64::from(words[0]) | u64::from(words[1]) << 32;
        (id, operation, i16::from_le_bytes([low, high]))
    }
}

/// The test of `RING_PUSH_*_AND_CHECK_NOTIFY`: does moving an index from `old` to `new` reach
/// `event`?
#[inline]
pub(super) const fn event_reached(event: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}
