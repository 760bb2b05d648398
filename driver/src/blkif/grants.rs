//! Pages that one end of a ring lets the other one reach.

use crate::memory::Memory;
use ringway_core::Segment;
use ringway_ring::blkif::{GrantPiece, Grants, NotGranted, PAGE_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A grant table that is an array of pages in this process: the reference of a grant is the number of
/// the page. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LocalGrants {
    memory: Arc<Memory>,
    /// For each page.
    revoked: Arc<[AtomicBool]>,
}

/// The grant of a page.
pub(super) fn number(page: usize) -> u32 {
    u32::try_from(page).expect("16 TiB of pages are not mapped in one piece")
}

impl LocalGrants {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        let bytes: u64 = memory.regions().iter().map(|region| region.len).sum();
        let pages = (0..bytes / PAGE_BYTES as u64).map(|_| AtomicBool::new(false));
        Self { revoked: pages.collect(), memory }
    }

    /// How many pages there are.
    #[must_use]
    pub fn pages(&self) -> u32 {
        number(self.revoked.len())
    }

    /// Takes the grant of a page away, or gives it back: [`LocalGrants::page`] then fails as a mapping
    /// would. What was handed out before is not affected. Nothing happens to pages that do not exist.
    pub fn set_granted(&self, grant: u32, granted: bool) {
        if let Some(revoked) = self.revoked.get(grant as usize) {
            revoked.store(!granted, Relaxed);
        }
    }

    /// The page of a grant, 4096 bytes long; `None` if there is none.
    #[inline]
    #[must_use]
    pub fn page(&self, grant: u32) -> Option<*mut u8> {
        let granted = !self.revoked.get(grant as usize)?.load(Relaxed);
        granted.then(|| self.memory.at(grant as usize * PAGE_BYTES))
    }

    /// The memory of a piece that a ring has judged; `None` if its page is not granted.
    #[inline]
    #[must_use]
    pub fn segment(&self, piece: GrantPiece) -> Option<Segment> {
        debug_assert!(piece.is_proper());
        let base = self.page(piece.grant())?.wrapping_add(piece.offset());
        Some(Segment { base, len: piece.len() })
    }
}

impl Grants for LocalGrants {
    fn read(&mut self, grant: u32, into: &mut [u8]) -> Result<(), NotGranted> {
        assert!(into.len() <= PAGE_BYTES, "more than a page");
        let page = self.page(grant).ok_or(NotGranted)?;
        // SAFETY: the page is mapped as long as `memory`, and at least as long as `into`, which is
        // memory of our own. The front end does not write to it before the answer.
        unsafe { std::ptr::copy_nonoverlapping(page, into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}
