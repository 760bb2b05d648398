//! What is left of a disk that is served no more.

use super::served::Served;
use serde::{Deserialize, Serialize};

/// How a disk has gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Departure {
    /// Nothing of it can still land.
    pub(crate) clear: bool,
    /// Requests that were held, and that it has left unanswered.
    pub(crate) held: u64,
    /// What its guest was answered is not all in its image.
    #[serde(default)]
    pub(crate) unsaved: bool,
}

/// Counts what disks leave unanswered from now on.
pub(crate) struct Watch(u64);

impl Watch {
    pub(crate) fn begin<'a>(disks: impl IntoIterator<Item = &'a Served>) -> Self {
        Self(left(disks))
    }

    /// Of the same disks, which are served no more.
    pub(crate) fn end<'a>(self, disks: impl IntoIterator<Item = &'a Served> + Clone) -> Departure {
        let clear = disks.clone().into_iter().all(|served| served.is_clear());
        Departure { clear, held: left(disks) - self.0, unsaved: false }
    }
}

fn left<'a>(disks: impl IntoIterator<Item = &'a Served>) -> u64 {
    disks.into_iter().map(|served| served.export.disk().held_and_left()).sum()
}
