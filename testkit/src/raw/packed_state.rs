//! What a driver remembers of a packed ring.

use super::layout::Desc;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the driver of one packed queue remembers. Descriptors are counted from the start of the
/// ring on and on.
#[derive(Debug, Default)]
pub(super) struct Packed {
    chains: Mutex<HashMap<u16, Vec<Desc>>>,
    pub(super) lengths: HashMap<u16, u32>,
    pub(super) next: u32,
    pub(super) used: u32,
}

impl Packed {
    pub(super) fn chains(&self) -> MutexGuard<'_, HashMap<u16, Vec<Desc>>> {
        self.chains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put_chain(&self, id: u16, descs: Vec<Desc>) {
        self.chains().insert(id, descs);
    }

    /// Where both sides are, as SET_VRING_BASE puts it.
    pub(super) fn base(&self, size: u16) -> u32 {
        let bits = |count: u32| {
            let size = u32::from(size);
            (count % size) | u32::from((count / size) % 2 == 0) << 15
        };
        bits(self.next) | bits(self.used) << 16
    }
}
