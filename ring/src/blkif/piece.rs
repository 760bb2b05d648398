//! Pieces of granted pages: where a request's data is.

/// The last sector of a page, in units of 512 bytes.
pub(super) const LAST_SECTOR: u8 = 7;

/// `struct blkif_request_segment`: sectors of a granted page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GrantPiece {
    grant: u32,
    first: u8,
    last: u8,
    /// Says nothing; zero in a piece that was judged.
    reserved: u16,
}

const _: () = assert!(size_of::<GrantPiece>() == 8 && align_of::<GrantPiece>() == 4);

impl GrantPiece {
    /// The sectors `first` to `last`, both included, of the page granted as `grant`. A back-end
    /// refuses what [`GrantPiece::is_proper`] does not.
    #[must_use]
    pub const fn new(grant: u32, first: u8, last: u8) -> Self {
        Self { grant, first, last, reserved: 0 }
    }

    /// A whole page.
    #[must_use]
    pub const fn whole(grant: u32) -> Self {
        Self::new(grant, 0, LAST_SECTOR)
    }

    pub(super) const fn from_words(words: [u32; 2]) -> Self {
        let [first, last, ..] = words[1].to_le_bytes();
        Self::new(words[0], first, last)
    }

    pub(super) const fn to_words(self) -> [u32; 2] {
        [self.grant, u32::from_le_bytes([self.first, self.last, 0, 0])]
    }

    /// The grant reference of the page.
    #[must_use]
    pub const fn grant(self) -> u32 {
        self.grant
    }

    /// First sector in the page, in units of 512 bytes.
    #[must_use]
    pub const fn first(self) -> u8 {
        self.first
    }

    /// Last sector in the page, in units of 512 bytes.
    #[must_use]
    pub const fn last(self) -> u8 {
        self.last
    }

    /// True if the sectors are in order and in the page.
    #[must_use]
    pub const fn is_proper(self) -> bool {
        self.first <= self.last && self.last <= LAST_SECTOR
    }

    /// Sectors of a proper piece: 1 to 8.
    #[must_use]
    pub const fn sectors(self) -> u32 {
        self.last as u32 - self.first as u32 + 1
    }

    /// Where a proper piece begins in its page, in bytes.
    #[must_use]
    pub const fn offset(self) -> usize {
        self.first as usize * 512
    }

    /// Length of a proper piece, in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // a proper piece has at least a sector
    pub const fn len(self) -> usize {
        self.sectors() as usize * 512
    }

    #[inline]
    pub(super) fn forget_reserved(&mut self) {
        self.reserved = 0;
    }
}

/// The bytes of an indirect page, or of a part of one, that lists these pieces.
#[must_use]
pub fn pieces_to_bytes(pieces: &[GrantPiece]) -> &[u8] {
    // SAFETY: a piece has no padding, every byte of it is initialised, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), size_of_val(pieces)) }
}

/// The same, to be filled in by a reader.
pub(super) fn pieces_as_bytes(pieces: &mut [GrantPiece]) -> &mut [u8] {
    // SAFETY: as in `pieces_to_bytes`; and any bytes make a piece.
    unsafe { std::slice::from_raw_parts_mut(pieces.as_mut_ptr().cast(), size_of_val(pieces)) }
}
