//! Paths in answers. JSON has text only: a name that is none is shown as well as can be, and keeps no answer
//! from being given.

use serde::Serializer;
use std::path::{Path, PathBuf};

pub(super) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

#[allow(clippy::ref_option, reason = "serde hands a reference to the field")]
pub(super) fn maybe<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => serializer.serialize_some(&path.to_string_lossy()),
        None => serializer.serialize_none(),
    }
}
