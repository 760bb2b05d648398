//! Guest memory that the engine keeps pinned, where the user has asked for it.
//!
//! A pinned page stays with the kernel for good: if the guest gives it back (a balloon, free page
//! reporting), the guest and the kernel no longer mean the same page. So nobody gets this unasked.

use crate::limit::WarningLimit;
use ringway_aio::Engine;
use ringway_core::Segment;
use ringway_core::mem::GuestMap;
use std::sync::{Arc, LazyLock};

/// The maps whose memory the engine has been told of.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    maps: Vec<Arc<GuestMap>>,
    refused: bool,
}

impl Pinned {
    /// Tells the engine of `maps`, the memory of all present queues, if that is a change.
    pub(crate) fn update<'a, E: Engine>(
        &mut self,
        engine: &mut E,
        maps: impl Iterator<Item = &'a Arc<GuestMap>>,
    ) {
        let mut now: Vec<Arc<GuestMap>> = Vec::new();
        for map in maps {
            if !now.iter().any(|known| Arc::ptr_eq(known, map)) {
                now.push(Arc::clone(map));
            }
        }
        let same = now.len() == self.maps.len()
            && now.iter().all(|map| self.maps.iter().any(|known| Arc::ptr_eq(known, map)));
        if same {
            return;
        }
        let segments: Vec<Segment> = now
            .iter()
            .flat_map(|map| map.regions())
            .map(|region| Segment { base: region.mapping.at(0), len: region.mapping.len() })
            .collect();
        // SAFETY: the memory stays mapped while `self.maps` names it, which is after the next call only
        // that other maps take its place there. That its owner gives no page back is what the user
        // vouched for by asking.
        let named = unsafe { engine.map_memory(&segments) };
        match named {
            Ok(()) => self.refused = false,
            // A client can change its memory to and fro.
            Err(error) if !std::mem::replace(&mut self.refused, true) => {
                static WARNINGS: LazyLock<WarningLimit> = LazyLock::new(|| {
                    WarningLimit::warnings(None, "guest memory that is not pinned")
                });
                let Some(pass) = WARNINGS.pass() else { return self.maps = now };
                tracing::warn!(
                    suppressed = pass.suppressed,
                    "guest memory is not pinned, requests go the plain way: {error}. Raise the \
                     memlock limit (ulimit -l), or leave --pin-memory out"
                );
            }
            Err(_) => {}
        }
        self.maps = now;
    }
}
