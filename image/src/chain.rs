//! An image and those it is based on.
//!
//! The names are in headers, and a guest that was served such an image as raw, or whoever sent it, may
//! have written these. So a name is followed within a folder that the owner of the image has chosen,
//! and a format is what a header says, never what a file looks like.

mod error;

use crate::beneath::{Identity, NotOpened, Root, identity_of, judge_kind, open_said};
use crate::format::Format;
use crate::header::{BackingName, DataFileName, Header};
use crate::printable::printable;
use crate::refused::Refused;
pub use error::{CHAIN_MAX, ChainError, LinkFault, LinkKind};
use ringway_core::host::File;
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The image that the owner has named, opened and locked.
#[derive(Debug)]
pub struct Top {
    /// Open for reading, and for writing unless `read_only`.
    pub file: File,
    /// As its owner names it; relative names in its header begin at the folder of this name.
    pub name: PathBuf,
    /// What its owner says.
    pub format: Format,
    /// Nothing of the chain will be written.
    pub read_only: bool,
}

/// Asked for each further file of a chain before its content is looked at: the file, its name, and
/// whether it is only read. Here it is locked; an error is the reason why not.
pub type Lock<'a> = &'a mut dyn FnMut(&File, &Path, bool) -> Result<(), String>;

/// One image of a chain.
#[derive(Debug)]
pub struct ImageFile {
    /// Open for reading; the first one of a chain as it was given.
    pub file: File,
    /// The first one's as it was said, others' from the root of the file system.
    pub name: PathBuf,
    /// What was said, or what the image that names it says.
    pub format: Format,
    /// Of a qcow2 image.
    pub header: Option<Header>,
    /// Bytes of disk that it stands for. Beyond them the images above read zeroes.
    pub virtual_size: u64,
    /// Where its data is, if not in its file.
    pub data_file: Option<DataFile>,
    /// Its bytes are in no file of this host: `file` only stands for it.
    pub is_elsewhere: bool,
}

/// What the owner says that an image is based on, if that is in no file of this host.
pub struct Elsewhere<'a> {
    /// True of what headers call it. A header alone leads nowhere but to files.
    pub is_called: &'a dyn Fn(&Path) -> bool,
    /// As its owner names it.
    pub name: &'a Path,
    /// Bytes of disk.
    pub bytes: u64,
}

/// The file with the data of an image whose tables are elsewhere.
#[derive(Debug)]
pub struct DataFile {
    /// Open for reading, and for writing with the first image of a chain that is written.
    pub file: File,
    /// From the root of the file system.
    pub name: PathBuf,
    /// It can be read as a raw image, and has to stay so.
    pub raw: bool,
}

/// An image, the one it is based on, and so on: at least one, at most [`CHAIN_MAX`].
#[derive(Debug)]
pub struct Chain {
    /// The image that the guest sees first.
    pub files: Vec<ImageFile>,
}

impl Chain {
    /// Opens what an image is based on. Names in headers lead to files within `root`, or without it
    /// within the folder of the first image; none but a data file of the first image is opened for
    /// writing.
    ///
    /// # Errors
    /// [`ChainError`]. Files that were opened are closed then, and their locks with them.
    pub fn open(top: Top, root: Option<&Path>, lock: Lock<'_>) -> Result<Self, ChainError> {
        Self::open_bounded(top, root, None, lock, None)
    }

    /// As [`Chain::open`], of an image whose owner says what it is based on: this file may be anywhere,
    /// and what it is based on itself is looked for within its own folder unless there is a `root`. An
    /// image that is based on nothing has been merged with it, and so has one that is based on such a snapshot.
    ///
    /// # Errors
    /// As [`Chain::open`], and that it is based on something else.
    pub fn open_clone(
        top: Top,
        root: Option<&Path>,
        base: (&Path, Format),
        lock: Lock<'_>,
    ) -> Result<Self, ChainError> {
        let fail = |fault| ChainError::Base { name: base.0.to_owned(), fault };
        let (file, identity, name) = open_said(base.0).map_err(|error| fail(fault(error)))?;
        let said = Said { file, identity, name, format: base.1 };
        Self::open_bounded(top, root, Some(said), lock, None)
    }

    /// As [`Chain::open`], of an image that is based on what is elsewhere: it, or one of those that it is based on, has
    /// to name that.
    ///
    /// # Errors
    /// As [`Chain::open`], and that it is based on something else.
    pub fn open_on(
        top: Top,
        root: Option<&Path>,
        base: &Elsewhere<'_>,
        lock: Lock<'_>,
    ) -> Result<Self, ChainError> {
        let host =
            |name: PathBuf| |source| ChainError::Host { name, what: "open it once more", source };
        let stands_for = top.file.try_clone().map_err(host(top.name.clone()))?;
        let mut chain = Self::open_bounded(top, root, None, lock, Some(base))?;
        if is_flattened(&chain.files) {
            return Ok(chain);
        }
        // The first is there.
        let [top, ..] = &chain.files[..] else { return Ok(chain) };
        let last = chain.files.last().unwrap_or(top);
        let backing = last.header.as_ref().and_then(|header| header.backing.as_ref());
        let Some(backing) = backing.filter(|backing| (base.is_called)(&backing.name)) else {
            return Err(ChainError::NotBased { name: top.name.clone(), base: base.name.into() });
        };
        let name = last.name.clone();
        let format = format_of(backing).and_then(|format| match format {
            Format::Raw => Ok(()),
            Format::Qcow2 => Err(LinkFault::OtherFormat(format, Format::Raw)),
        });
        format.map_err(|fault| link(last, LinkKind::Backing, &backing.name, fault))?;
        if chain.files.len() == CHAIN_MAX {
            return Err(ChainError::Deep(name));
        }
        chain.files.push(ImageFile {
            file: stands_for,
            name: base.name.into(),
            format: Format::Raw,
            header: None,
            virtual_size: base.bytes,
            data_file: None,
            is_elsewhere: true,
        });
        Ok(chain)
    }

    fn open_bounded(
        top: Top,
        bound: Option<&Path>,
        said: Option<Said>,
        lock: Lock<'_>,
        elsewhere: Option<&Elsewhere<'_>>,
    ) -> Result<Self, ChainError> {
        let mut folder = folder_of(&top.name)?;
        let root = open_root(bound.unwrap_or(&folder))?;
        let seen = vec![identity(&top.file, &top.name)?];
        let mut opener = Opener { root, is_bound: bound.is_some(), said, lock, seen };
        let (mut next, mut files) = (Some(top), Vec::new());
        while let Some(top) = next.take() {
            let mut image = read_image(top.file, top.name, top.format, top.read_only)?;
            if let Some(data) = image.header.as_ref().and_then(|header| header.data_file.clone()) {
                let found = opener.data_file(&image, &folder, data, top.read_only)?;
                image.data_file = Some(found);
            }
            let backing = image.header.as_ref().and_then(|header| header.backing.clone());
            let leads_on = |backing: &BackingName| {
                elsewhere.is_none_or(|elsewhere| !(elsewhere.is_called)(&backing.name))
            };
            if let Some(backing) = backing.filter(leads_on) {
                if let Some(base) = elsewhere.filter(|_| is_protocol(&backing.name)) {
                    return Err(ChainError::NotBased { name: image.name, base: base.name.into() });
                }
                if files.len() + 1 == CHAIN_MAX {
                    return Err(ChainError::Deep(image.name));
                }
                let top = opener.backing(&image, &folder, &backing)?;
                folder = folder_of(&top.name)?;
                next = Some(top);
            }
            files.push(image);
        }
        match (opener.said, &files[..]) {
            (Some(said), [top, ..]) if !is_flattened(&files) => {
                Err(ChainError::NotBased { name: top.name.clone(), base: said.name })
            }
            // Names that were swapped: it would be written beneath what is based on it.
            (Some(said), [top, ..]) if is_based_on(&said.name, said.format, &top.name) => {
                Err(ChainError::Swapped { name: top.name.clone(), base: said.name })
            }
            _ => Ok(Self { files }),
        }
    }
}

/// True of a clone that needs its base no more: one that is based on nothing, or only on its own snapshots since it was
/// flattened.
fn is_flattened(files: &[ImageFile]) -> bool {
    let header = files.last().and_then(|last| last.header.as_ref());
    header.is_some_and(|last| last.backing.is_none() && (files.len() == 1 || last.is_flattened))
}

/// The format that a header says of what its image is based on.
fn format_of(backing: &BackingName) -> Result<Format, LinkFault> {
    let word = backing.format.as_deref().ok_or(LinkFault::NoFormat)?;
    word.parse().map_err(|_| LinkFault::Format(printable(Path::new(word))))
}

fn open_root(folder: &Path) -> Result<Root, ChainError> {
    Root::new(folder).map_err(|source| ChainError::Root { folder: folder.to_owned(), source })
}

/// What the owner says that an image is based on.
struct Said {
    file: File,
    identity: Identity,
    name: PathBuf,
    format: Format,
}

/// What files are opened with.
struct Opener<'a> {
    root: Root,
    /// The owner has said the root: it is one for all.
    is_bound: bool,
    /// Until it was met.
    said: Option<Said>,
    lock: Lock<'a>,
    /// All files of the chain so far.
    seen: Vec<Identity>,
}

impl Opener<'_> {
    fn backing(
        &mut self,
        by: &ImageFile,
        folder: &Path,
        backing: &BackingName,
    ) -> Result<Top, ChainError> {
        let fail = |fault| link(by, LinkKind::Backing, &backing.name, fault);
        let format = format_of(backing).map_err(fail)?;
        let leads_to = || identity_of(&folder.join(&backing.name));
        match self.said.take_if(|said| leads_to() == Some(said.identity)) {
            Some(said) if said.format != format => {
                Err(fail(LinkFault::OtherFormat(format, said.format)))
            }
            Some(Said { file, identity, name, .. }) => {
                if !self.is_bound {
                    self.root = open_root(&folder_of(&name)?)?;
                }
                self.take(&file, identity, &name, true).map_err(fail)?;
                Ok(Top { file, name, format, read_only: true })
            }
            None => match (self.follow(folder, &backing.name, true), &self.said) {
                (Ok((file, name)), _) => Ok(Top { file, name, format, read_only: true }),
                // Rather what is wrong with it than how to have it followed.
                (Err(LinkFault::Outside(_)), Some(Said { name: base, .. })) => {
                    Err(ChainError::NotBased { name: by.name.clone(), base: base.clone() })
                }
                (Err(fault), _) => Err(fail(fault)),
            },
        }
    }

    fn data_file(
        &mut self,
        by: &ImageFile,
        folder: &Path,
        data: DataFileName,
        read_only: bool,
    ) -> Result<DataFile, ChainError> {
        let Some(said) = data.name else {
            let name = by.name.clone();
            return Err(ChainError::Refused { name, source: Refused::NoDataFileName });
        };
        let opened = self.follow(folder, &said, read_only);
        let (file, name) = opened.map_err(|fault| link(by, LinkKind::Data, &said, fault))?;
        Ok(DataFile { file, name, raw: data.raw })
    }

    /// Opens and locks the file that `name` means in an image of `folder`.
    fn follow(
        &mut self,
        folder: &Path,
        name: &Path,
        read_only: bool,
    ) -> Result<(File, PathBuf), LinkFault> {
        if is_protocol(name) {
            return Err(LinkFault::Protocol);
        }
        let outside = || LinkFault::Outside(self.root.said().to_owned());
        let relative = self.root.relative(folder, name).ok_or_else(outside)?;
        let opened = self.root.open(&relative, !read_only);
        let (file, identity) = opened.map_err(|error| match error {
            NotOpened::Outside => outside(),
            error => fault(error),
        })?;
        let full = self.root.full(&relative);
        self.take(&file, identity, &full, read_only)?;
        if !read_only && identity_of(&full) != Some(identity) {
            // The lock of one that nobody can find keeps nobody away.
            return Err(LinkFault::Replaced);
        }
        Ok((file, full))
    }

    /// Locks a file that is not in the chain yet.
    fn take(
        &mut self,
        file: &File,
        identity: Identity,
        name: &Path,
        read_only: bool,
    ) -> Result<(), LinkFault> {
        if self.seen.contains(&identity) {
            return Err(LinkFault::Loop);
        }
        self.seen.push(identity);
        (self.lock)(file, name, read_only).map_err(LinkFault::Locked)
    }
}

fn fault(error: NotOpened) -> LinkFault {
    match error {
        NotOpened::Kind(what) => LinkFault::NotADisk(what),
        NotOpened::Host(error) if error.kind() == io::ErrorKind::NotFound => LinkFault::Missing,
        NotOpened::Host(error) => LinkFault::Host(error),
        NotOpened::Outside => LinkFault::Host(io::ErrorKind::NotFound.into()),
    }
}

/// Judges one image: its header, if its format has one.
fn read_image(
    mut file: File,
    name: PathBuf,
    format: Format,
    read_only: bool,
) -> Result<ImageFile, ChainError> {
    let host = |what, name: &Path| {
        let name = name.to_owned();
        move |source| ChainError::Host { name, what, source }
    };
    let bytes = file.seek(SeekFrom::End(0)).map_err(host("tell its size", &name))?;
    let header = match format {
        Format::Raw => None,
        Format::Qcow2 => {
            let header = Header::read(&file, bytes).map_err(host("read its header", &name))?;
            let judged = header.and_then(|header| {
                if !read_only {
                    header.may_write()?;
                }
                Ok(header)
            });
            let header =
                judged.map_err(|source| ChainError::Refused { name: name.clone(), source })?;
            if header.is_corrupt() {
                tracing::warn!(
                    "{}: it is marked as corrupt: what is read of it may be wrong, or an error. Copy what is \
                     needed, and repair a copy (`qemu-img check -r all`)",
                    printable(&name)
                );
            }
            Some(header)
        }
    };
    let virtual_size = header.as_ref().map_or(bytes, |header| header.virtual_size);
    Ok(ImageFile { file, name, format, header, virtual_size, data_file: None, is_elsewhere: false })
}

fn link(by: &ImageFile, kind: LinkKind, name: &Path, fault: LinkFault) -> ChainError {
    ChainError::Link { by: by.name.clone(), kind, name: name.to_owned(), fault }
}

/// The folder that relative names in an image begin at, without links.
fn folder_of(name: &Path) -> Result<PathBuf, ChainError> {
    let parent = name.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    folder.canonicalize().map_err(|source| ChainError::Host {
        name: name.to_owned(),
        what: "find its folder",
        source,
    })
}

/// True if the image at `base`, or one that it is based on, or a data file of theirs, is what `path` leads to; or
/// if one of them names `path` while there is no such file. An image that is made at `path` on top of `base`
/// would then be based on itself, and one that is written there would change beneath those that are based on it.
///
/// Reads headers only, and goes as far as names lead, wherever that is: what is behind a name that leads nowhere
/// cannot be told.
#[must_use]
pub fn is_based_on(base: &Path, format: Format, path: &Path) -> bool {
    let (identity, at) = (identity_of(path), place(path));
    let is_it = |name: &Path| match identity_of(name) {
        Some(there) => identity == Some(there),
        None => at.is_some() && place(name) == at,
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
    Some((Header::read(&file, bytes).ok()?.ok()?, folder_of(name).ok()?))
}

/// A path without links in its folder.
fn place(path: &Path) -> Option<PathBuf> {
    Some(folder_of(path).ok()?.join(path.file_name()?))
}

fn identity(file: &File, name: &Path) -> Result<Identity, ChainError> {
    let host = |source| ChainError::Host { name: name.to_owned(), what: "look at it", source };
    judge_kind(file).map_err(|error| match error {
        NotOpened::Host(error) => host(error),
        NotOpened::Kind(what) => host(io::Error::other(format!("it is {what}"))),
        NotOpened::Outside => host(io::ErrorKind::NotFound.into()),
    })
}

/// As QEMU decides: a colon before the first slash.
fn is_protocol(name: &Path) -> bool {
    let bytes = name.as_os_str().as_encoded_bytes();
    bytes.iter().find(|byte| matches!(byte, b':' | b'/')) == Some(&b':')
}

#[cfg(test)]
mod tests;
