//! Clones that are made when they are to be served.

use super::OpenError;
use crate::new_image::{Backing, NewFile};
use ringway_image::{CLUSTER_BITS_DEFAULT, ChainError, CreateError, NewImage, is_based_on};
use std::io;
use std::path::Path;

/// Makes a clone of `backing` at `path`, of `size` bytes or of as many as that has. False if there is a
/// file of this name already.
pub(super) fn make_clone(
    path: &Path,
    backing: &Backing,
    size: Option<u64>,
) -> Result<bool, OpenError> {
    if !backing.is_elsewhere && is_based_on(&backing.path, backing.format, path) {
        let (name, base) = (path.to_owned(), backing.path.clone());
        return Err(ChainError::Swapped { name, base }.into());
    }
    let base = |source| OpenError::Base { base: backing.path.clone(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder =
        folder.unwrap_or(Path::new(".")).canonicalize().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OpenError::NoFolder(path.into()),
            _ => OpenError::Host { path: path.into(), what: "find its folder", source },
        })?;
    let name = backing.name_in(&folder).map_err(base)?;
    let virtual_size = size.unwrap_or_else(|| backing.virtual_size.next_multiple_of(512));
    if virtual_size < backing.virtual_size {
        tracing::warn!(
            "{}: it is made with {virtual_size} bytes (--size), and what it is based on has {}: what lies beyond \
             cannot be read through it",
            path.display(),
            backing.virtual_size
        );
    }
    let new = NewImage {
        virtual_size,
        cluster_bits: CLUSTER_BITS_DEFAULT,
        backing: Some((&*name, backing.format)),
    };
    // Nobody but its owner may read it, as with `serve --size`. Somebody may have made one meanwhile: it is
    // not overwritten.
    let make = || -> Result<(), CreateError> {
        let file = NewFile::begin(path, 0o600)?;
        new.write(file.file())?;
        Ok(file.finish(false)?)
    };
    match make() {
        Ok(()) => Ok(true),
        Err(CreateError::Host(error)) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(CreateError::Host(source)) => {
            Err(OpenError::Host { path: path.into(), what: "make it", source })
        }
        Err(error) => Err(OpenError::NoClone { path: path.into(), why: error.to_string() }),
    }
}
