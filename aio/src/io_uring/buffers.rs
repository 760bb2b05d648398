//! Memory that the kernel has pinned for the ring, so that transfers need not look its pages up, and
//! buffers that have a number.

use io_uring::Submitter;
use ringway_core::Segment;
use std::io;

use super::features::{Feature, Features};

/// The most bytes of one buffer; larger regions become several. What crosses their ends goes plain.
const BUFFER_BYTES: usize = 1 << 30;

/// The registered buffers: the pieces of the memory that was named, or those with numbers of our
/// caller's. A ring has one table, so it has the ones or the others.
///
/// # Invariants
/// 1. Buffer *i* of the ring is `pieces[i]`; there are none unless the kernel has pinned them all. Or
///    `pieces` is empty, and the ring's table has as many places as `numbered`.
/// 2. `in_use` is false exactly if both are empty.
/// 3. `pinned` is true while the ring has a table of pieces, which may have been forgotten here.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    in_use: bool,
    vectors: bool,
    pinned: bool,
    pieces: Vec<Segment>,
    /// Where each buffer with a number is in our address space: what its offsets are counted from.
    /// 0 for those that a driver of the kernel puts there, which are nowhere in it.
    numbered: Box<[u64]>,
}

impl Buffers {
    /// A table with places for `count` numbers, which the ring has already.
    pub(super) fn new(count: u16) -> Self {
        let numbered = vec![0; count.into()].into_boxed_slice();
        Self { in_use: count > 0, numbered, ..Self::default() }
    }

    /// False if every operation goes plain.
    #[inline]
    pub(super) fn in_use(&self) -> bool {
        self.in_use
    }

    /// The buffer that all of an operation's memory lies in, if there is one and the kernel takes
    /// so many segments of it.
    #[inline]
    pub(super) fn find(&self, segments: &[Segment]) -> Option<u16> {
        if self.pieces.is_empty() || (segments.len() > 1 && !self.vectors) {
            return None;
        }
        let (first, rest) = segments.split_first()?;
        let found = self.pieces.iter().position(|buffer| holds(buffer, first))?;
        if !rest.iter().all(|segment| holds(&self.pieces[found], segment)) {
            return None;
        }
        u16::try_from(found).ok()
    }

    /// The address of a byte of a buffer with a number, as the kernel counts it.
    #[inline]
    pub(super) fn address(&self, number: u16, offset: u32) -> u64 {
        self.numbered[usize::from(number)].wrapping_add(offset.into())
    }

    /// Gives a buffer a number, or takes it away.
    ///
    /// # Safety
    /// The rules of [`crate::Engine::set_buffer`].
    pub(super) unsafe fn set(
        &mut self,
        ring: &Submitter<'_>,
        number: u16,
        buffer: Option<Segment>,
    ) -> io::Result<()> {
        let Some(address) = self.numbered.get_mut(usize::from(number)) else {
            let kind = if self.numbered.is_empty() {
                io::ErrorKind::Unsupported
            } else {
                io::ErrorKind::InvalidInput
            };
            return Err(io::Error::new(kind, "no registered buffer has this number"));
        };
        let Segment { base, len } = buffer.unwrap_or(Segment::EMPTY);
        let iov_base = if buffer.is_some() { base.cast() } else { std::ptr::null_mut() };
        let iovec = libc::iovec { iov_base, iov_len: len };
        // SAFETY: the caller vouches for the memory.
        unsafe { ring.register_buffers_update(number.into(), &[iovec], None) }?;
        *address = iov_base.expose_provenance() as u64;
        Ok(())
    }

    /// Names no memory any more. The kernel keeps the pages of it for operations that were queued.
    pub(super) fn forget(&mut self) {
        self.pieces.clear();
        self.in_use = !self.numbered.is_empty();
    }

    /// Replaces the pieces of memory. After an error there are none. Nothing is queued that the kernel
    /// has not got.
    ///
    /// # Safety
    /// The rules of [`crate::Engine::map_memory`].
    pub(super) unsafe fn register(
        &mut self,
        ring: &Submitter<'_>,
        features: &mut Features,
        regions: &[Segment],
    ) -> io::Result<()> {
        if !self.numbered.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the ring's buffers have numbers, which leave no room for others",
            ));
        }
        self.forget();
        if self.pinned {
            ring.unregister_buffers()?;
            self.pinned = false;
        }
        if features.is_off(Feature::RegisteredBuffers) || regions.is_empty() {
            return Ok(());
        }
        let pieces: Vec<_> = regions.iter().flat_map(pieces).collect();
        let iovecs: Vec<_> = pieces
            .iter()
            .map(|piece| libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len })
            .collect();
        // SAFETY: the caller vouches for the memory.
        let registered = unsafe { ring.register_buffers(&iovecs) };
        features.set(Feature::RegisteredBuffers, registered.as_ref().err().map(why_not));
        registered?;
        self.pinned = true;
        self.in_use = !pieces.is_empty();
        self.pieces = pieces;
        self.vectors = features.has(Feature::VectoredBuffers);
        Ok(())
    }
}

fn holds(buffer: &Segment, segment: &Segment) -> bool {
    let start = segment.base.addr().wrapping_sub(buffer.base.addr());
    start <= buffer.len && segment.len <= buffer.len - start
}

fn pieces(region: &Segment) -> impl Iterator<Item = Segment> + use<> {
    let Segment { base, len } = *region;
    (0..len)
        .step_by(BUFFER_BYTES)
        .map(move |at| Segment { base: base.wrapping_add(at), len: (len - at).min(BUFFER_BYTES) })
}

fn why_not(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => "not enough lockable memory (ulimit -l)".into(),
        Some(libc::EOPNOTSUPP) => "the kernel pins no memory of this kind of file".into(),
        _ => format!("the kernel refuses: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(base: usize, len: usize) -> Segment {
        Segment { base: std::ptr::without_provenance_mut(base), len }
    }

    #[test]
    fn finds_what_lies_wholly_in_one_buffer() {
        let pieces = vec![at(100, 50), at(150, 50)];
        let mut buffers = Buffers { vectors: true, pieces, ..Buffers::default() };
        assert_eq!(buffers.find(&[at(100, 50)]), Some(0));
        assert_eq!(buffers.find(&[at(150, 1), at(199, 1)]), Some(1));
        assert_eq!(buffers.find(&[at(140, 20)]), None, "crosses an end");
        assert_eq!(buffers.find(&[at(110, 1), at(160, 1)]), None, "in two buffers");
        assert_eq!(buffers.find(&[at(99, 1)]), None);
        assert_eq!(buffers.find(&[at(200, usize::MAX)]), None);
        assert_eq!(buffers.find(&[]), None);
        buffers.vectors = false;
        assert_eq!(buffers.find(&[at(150, 1), at(199, 1)]), None);
    }

    #[test]
    fn large_regions_are_split() {
        let lens: Vec<_> = pieces(&at(4096, (5 << 29) + 1)).map(|p| p.len).collect();
        assert_eq!(lens, [1 << 30, 1 << 30, (1 << 29) + 1]);
    }
}
