//! Paths in messages between daemon and helper.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A path, whatever its letters are.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Name(pub(super) Vec<u8>);

impl From<&Path> for Name {
    fn from(path: &Path) -> Self {
        Self(path.as_os_str().as_bytes().into())
    }
}

impl From<Name> for PathBuf {
    fn from(name: Name) -> Self {
        OsString::from_vec(name.0).into()
    }
}
