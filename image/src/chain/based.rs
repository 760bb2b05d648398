//! Whether an image is based on another one, by whatever names.

use super::{CHAIN_MAX, is_protocol};
use crate::beneath::{identity_of, open_said};
use crate::format::Format;
use crate::header::Header;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// True if the image at `base`, or one that it is based on, or a data file of theirs, is what `path` leads to; or
/// if one of them names `path` while there is no such file. An image that is made at `path` on top of `base`
/// would then be based on itself, and one that is written there would change beneath those that are based on it.
///
/// Reads headers only, and goes as far as names lead, wherever that is: what is behind a name that leads nowhere
/// cannot be told.
#[must_use]
pub fn is_based_on(base: &Path, format: Format, path: &Path) -> bool {
    let (identity, place) = (identity_of(path), place(path));
    let is_it = |name: &Path| match identity_of(name) {
        Some(there) => identity == Some(there),
        None => place.is_some() && self::place(name) == place,
    };
    let mut next = Some((base.to_owned(), format));
    for _ in 0..=CHAIN_MAX {
        let Some((name, format)) = next.take() else { return false };
        if is_it(&name) {
            return true;
        }
        let Some((header, folder)) = header(&name, format) else { return false };
        let data = header.data_file.and_then(|data| data.name);
        if data.is_some_and(|data| is_it(&folder.join(data))) {
            return true;
        }
        // Without a format it is opened by nobody.
        let backing = header.backing.filter(|backing| !is_protocol(&backing.name));
        next = backing.and_then(|backing| {
            let format = backing.format.as_deref()?.parse().ok()?;
            Some((folder.join(backing.name), format))
        });
    }
    false
}

/// What an image says of itself, and the folder at which its names begin.
fn header(name: &Path, format: Format) -> Option<(Header, PathBuf)> {
    if format == Format::Raw {
        return None;
    }
    let (mut file, ..) = open_said(name).ok()?;
    let bytes = file.seek(SeekFrom::End(0)).ok()?;
    Some((Header::read(&file, bytes).ok()?.ok()?, super::folder_of(name).ok()?))
}

/// A path without links in its folder.
fn place(path: &Path) -> Option<PathBuf> {
    Some(super::folder_of(path).ok()?.join(path.file_name()?))
}
