//! Where a record is stored.

use crate::access::{Access, RecordName};
use std::path::PathBuf;
use std::sync::Arc;

/// Where a record is stored.
pub(super) enum Storage {
    /// In memory of this process.
    Nowhere,
    /// In a file that this process can remove.
    File(PathBuf),
    /// In a file that somebody else removes.
    Named(Arc<dyn Access>, RecordName),
}

impl std::fmt::Debug for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nowhere => f.write_str("nowhere"),
            Self::File(path) => path.fmt(f),
            Self::Named(_, name) => name.fmt(f),
        }
    }
}
