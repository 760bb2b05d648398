//! Where a ring lies in our address space.

use super::start::StartError;
use ringway_core::mem::{Gathered, GuestMap, Quota};
use ringway_ring::virtqueue::Areas;
use std::sync::Arc;

/// The areas of a ring, in the order of [`Areas`].
pub(super) const AREAS: [&str; 3] = ["descriptor ring", "available ring", "used ring"];

/// Where a ring lies. Whoever uses it keeps this, and the map that it was found in.
#[derive(Debug)]
pub(super) struct RingPlace {
    pub(super) areas: Areas,
    /// Areas that lie in pieces, mapped once more so that these adjoin.
    gathered: Vec<Gathered>,
}

// SAFETY: addresses, and what keeps them mapped; whoever follows them answers for it.
unsafe impl Send for RingPlace {}
// SAFETY: as above.
unsafe impl Sync for RingPlace {}

impl RingPlace {
    /// A ring whose areas lie in one piece each.
    pub(super) fn whole(areas: Areas) -> Self {
        Self { areas, gathered: Vec::new() }
    }

    /// A ring whose areas lie in these pieces of `map`.
    pub(super) fn of_pieces(
        pieces: &[Vec<(*mut u8, u64)>; 3],
        map: &GuestMap,
        quota: &Arc<Quota>,
    ) -> Result<Self, StartError> {
        let adjoin = |pair: &[(*mut u8, u64)]| {
            (pair[0].0 as usize).checked_add(usize::try_from(pair[0].1).unwrap_or(0))
                == Some(pair[1].0 as usize)
        };
        let mut gathered = Vec::new();
        let mut at = [std::ptr::null_mut(); 3];
        for ((at, pieces), name) in at.iter_mut().zip(pieces).zip(AREAS) {
            *at = match pieces.first() {
                Some(&(first, _)) if pieces.windows(2).all(adjoin) => first,
                _ => {
                    let area = map.gather(quota, pieces);
                    let area = area.map_err(|why| StartError::Scattered(name, why))?;
                    let at = area.at();
                    gathered.push(area);
                    at
                }
            };
        }
        let [desc, driver, device] = at;
        Ok(Self { areas: Areas { desc, driver, device }, gathered })
    }

    /// Of what lies in pieces: first address here, first address in the map, and bytes.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.gathered.iter().flat_map(Gathered::pieces)
    }

    /// True if some of it has vanished, because its file was cut short.
    pub(super) fn is_lost(&self) -> bool {
        self.gathered.iter().any(Gathered::is_lost)
    }
}
