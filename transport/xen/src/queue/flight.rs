//! A request on its way between the ring and the worker.

use crate::host::{Direction, GrantCopy};
use ringway_core::mem::PoolPages;
use ringway_ring::blkif::GrantPiece;

/// Requests taken from the ring before their data is fetched: as many as a worker takes in one turn.
pub(super) const BATCH: usize = 16;

/// Where the data of a request is.
#[derive(Debug)]
pub(super) enum DataPlace<M> {
    /// It has none, or it is not there yet.
    None,
    /// In memory of ours.
    Pages(PoolPages),
    /// In the guest's pages, mapped for this request.
    Mapped(M),
    /// In the guest's pages, which stay mapped; that many places are held.
    Held(usize),
}

/// What this process knows of a request, beside its entry in the record.
#[derive(Debug)]
pub(super) struct Flight<M> {
    pub(super) place: DataPlace<M>,
    /// Its data cannot be fetched.
    pub(super) failed: bool,
    /// Places of held pages.
    pub(super) held: Box<[u32]>,
}

/// Lists the copies between pages of ours, one piece after the other, and the guest's.
pub(super) fn list_copies(
    copies: &mut Vec<GrantCopy>,
    direction: Direction,
    pages: &PoolPages,
    pieces: &[GrantPiece],
) {
    let mut at = 0;
    for piece in pieces {
        // A piece lies in a page.
        #[allow(clippy::cast_possible_truncation)]
        let (offset, len) = (piece.offset() as u16, piece.len() as u16);
        debug_assert!(at + piece.len() <= pages.len());
        let local = pages.base().wrapping_add(at);
        copies.push(GrantCopy { direction, grant: piece.grant(), offset, len, local, done: false });
        at += piece.len();
    }
}
