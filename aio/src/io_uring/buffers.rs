//! Memory that the kernel has pinned for the ring, so that transfers need not look its pages up.

use io_uring::Submitter;
use ringway_core::Segment;
use std::io;

use super::features::{Feature, Features};

/// The most bytes of one buffer; larger regions become several. What crosses their ends goes plain.
const BUFFER_BYTES: usize = 1 << 30;

/// The registered buffers.
///
/// # Invariants
/// 1. Buffer *i* of the ring is `buffers[i]`; there are none unless the kernel has pinned them all.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    buffers: Vec<Segment>,
    vectors: bool,
}

impl Buffers {
    /// The buffer that all of an operation's memory lies in, if there is one and the kernel takes
    /// so many segments of it.
    #[inline]
    pub(super) fn find(&self, segments: &[Segment]) -> Option<u16> {
        if self.buffers.is_empty() || (segments.len() > 1 && !self.vectors) {
            return None;
        }
        let (first, rest) = segments.split_first()?;
        let found = self.buffers.iter().position(|buffer| holds(buffer, first))?;
        if !rest.iter().all(|segment| holds(&self.buffers[found], segment)) {
            return None;
        }
        u16::try_from(found).ok()
    }

    /// Replaces the buffers.
    ///
    /// # Safety
    /// The rules of [`crate::Engine::map_memory`].
    pub(super) unsafe fn register(
        &mut self,
        ring: &Submitter<'_>,
        features: &mut Features,
        regions: &[Segment],
    ) -> io::Result<()> {
        if !self.buffers.is_empty() {
            ring.unregister_buffers()?;
            self.buffers.clear();
        }
        if features.is_off(Feature::RegisteredBuffers) || regions.is_empty() {
            return Ok(());
        }
        let buffers: Vec<_> = regions.iter().flat_map(pieces).collect();
        let iovecs: Vec<_> = buffers
            .iter()
            .map(|piece| libc::iovec { iov_base: piece.base.cast(), iov_len: piece.len })
            .collect();
        // SAFETY: the caller vouches for the memory.
        let registered = unsafe { ring.register_buffers(&iovecs) };
        features.set(Feature::RegisteredBuffers, registered.as_ref().err().map(why_not));
        registered?;
        self.buffers = buffers;
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
        let mut buffers = Buffers { buffers: vec![at(100, 50), at(150, 50)], vectors: true };
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
