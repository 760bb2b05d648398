//! What holds the bytes of a disk, as it is sent from the helper to the daemon.

use ringway_disk::storage::Parcel;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A [`Parcel`], but for its files.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ParcelMessage {
    kind: String,
    numbers: Vec<u64>,
    words: Vec<Option<String>>,
    files: usize,
}

impl ParcelMessage {
    /// Its files go behind those that are there.
    pub(super) fn of(parcel: Parcel, files: &mut Vec<Arc<File>>) -> Self {
        let Parcel { kind, numbers, words, files: its } = parcel;
        let message = Self { kind, numbers, words, files: its.len() };
        files.extend(its);
        message
    }

    /// How many files it has.
    pub(super) fn others(&self) -> usize {
        self.files
    }

    pub(super) fn into_parcel(self, files: Vec<OwnedFd>) -> Parcel {
        let files = files.into_iter().map(|fd| Arc::new(File::from(fd))).collect();
        Parcel { kind: self.kind, numbers: self.numbers, words: self.words, files }
    }
}
