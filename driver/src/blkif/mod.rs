//! The front side of Xen's block rings in one process, for tests and benchmarks.
//!
//! No Xen is needed and none is used: the "grant table" is an array of pages ([`LocalGrants`]), the
//! "event channel" a pair of eventfds, and there is no xenstore. The ring, its requests and its
//! notifications are those that a guest would use.
//!
//! ```
//! use ringway_driver::blkif::LocalRing;
//!
//! let (mut queue, mut back_end, pool) = LocalRing::default().open::<&str>()?;
//! let buffer = pool.alloc(4096).ok_or("out of memory")?;
//! queue.write(8192, buffer, "the write")?;
//! queue.submit()?;
//! back_end.answer_all()?; // a null device: says yes to everything
//! for done in queue.completions() {
//!     assert!(done.is_ok(), "{} failed", done.ctx);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod back_end;
mod cut;
mod grants;
mod queue;
#[cfg(test)]
mod tests;

pub use back_end::BackEnd;
pub use grants::LocalGrants;
pub use queue::BlkifQueue;
pub use ringway_ring::blkif::Abi;

use crate::Error;
use crate::link::Link;
use crate::memory::{BufferPool, Memory};
use ringway_ring::blkif::{
    Back, Front, INDIRECT_SEGMENTS_MAX, Offered, PAGE_BYTES, RingAt, SEGMENTS_PER_PAGE,
};
use std::sync::Arc;

/// What a ring in one process is to be like.
#[derive(Clone, Copy, Debug)]
pub struct LocalRing {
    /// The layout of its slots.
    pub abi: Abi,
    /// Binary logarithm of its pages, at most 4: it has 32 slots for each page.
    pub order: u32,
    /// The longest request in pages of data, at most 512; beyond 11 it is indirect. 0: no indirect
    /// requests.
    pub indirect_segments: u16,
    /// Bytes for buffers.
    pub data: usize,
}

impl Default for LocalRing {
    fn default() -> Self {
        Self { abi: Abi::X86_64, order: 0, indirect_segments: 256, data: 1 << 20 }
    }
}

impl LocalRing {
    /// Makes the ring and both its ends. Its memory belongs to it alone: rings share no cache line.
    ///
    /// # Errors
    /// [`Error::Blkif`] for a ring that cannot be, [`Error::Options`] for too many segments, and what
    /// the host says to memory and eventfds.
    pub fn open<C>(self) -> Result<(BlkifQueue<C>, BackEnd, BufferPool), Error> {
        let Self { abi, order, indirect_segments, data } = self;
        if usize::from(indirect_segments) > SEGMENTS_PER_PAGE {
            return Err(Error::Options(format!(
                "{indirect_segments} indirect segments: a queue in one process lists them in one \
                 page, {SEGMENTS_PER_PAGE} at most"
            )));
        }
        const { assert!(SEGMENTS_PER_PAGE <= INDIRECT_SEGMENTS_MAX as usize) };
        let size = RingAt { base: std::ptr::null_mut(), order, abi }.slots()?;
        let ring_pages = 1usize << order;
        let lists = if indirect_segments > 0 { size as usize } else { 0 };
        // A page apart, so that the hardware does not fetch the ring along with the lists.
        let control = (ring_pages + 1 + lists) * PAGE_BYTES;
        let memory = Memory::new(control, data, false, 1)?;
        let grants = LocalGrants::new(Arc::clone(&memory));
        let link = Arc::new(Link::new()?);
        link.connect(None::<&std::fs::File>)?;
        let at = RingAt { base: memory.at(0), order, abi };
        // SAFETY: the pages lie in `memory`, which both ends keep; nobody uses them yet.
        let front = unsafe { Front::new(at, 0)? };
        let offered = Offered { flush: true, barrier: true, discard: true, indirect_segments };
        // SAFETY: likewise; this is the only back side.
        let back = unsafe { Back::new(at, offered)? };
        let first_list = ring_pages + 1;
        let lists = (first_list..first_list + lists).map(grants::number).collect();
        let pool = BufferPool::new(Arc::clone(&memory));
        let back_end = BackEnd::new(back, grants.clone(), Arc::clone(&link));
        let queue = BlkifQueue::new(front, memory, lists, indirect_segments, link);
        Ok((queue, back_end, pool))
    }
}
