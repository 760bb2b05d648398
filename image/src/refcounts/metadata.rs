//! Which clusters of a file hold metadata: no data are written there, whatever an entry says, and they
//! are not given back as data.

use ringway_core::host::sync::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Those of one file, known to all of its thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metadata(Arc<Mutex<HashSet<u64>>>);

impl Metadata {
    /// The clusters, for as long as nobody else asks.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashSet<u64>> {
        // A set is whole after every change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn contains(&self, cluster: u64) -> bool {
        self.lock().contains(&cluster)
    }

    /// True if one of them holds metadata.
    pub(crate) fn any_of(&self, clusters: Range<u64>) -> bool {
        let known = self.lock();
        clusters.into_iter().any(|cluster| known.contains(&cluster))
    }

    /// These hold metadata from now on; the first one that did already.
    pub(crate) fn add(&self, clusters: impl IntoIterator<Item = u64>) -> Option<u64> {
        let mut known = self.lock();
        let mut twice = None;
        for cluster in clusters {
            if !known.insert(cluster) {
                twice = twice.or(Some(cluster));
            }
        }
        twice
    }

    /// These hold none any more: no table names them.
    pub(crate) fn remove(&self, clusters: &[u64]) {
        let mut known = self.lock();
        for cluster in clusters {
            known.remove(cluster);
        }
    }
}
