//! What a disk takes for itself, which no other disk of the daemon may have.

use super::{DiskSpec, NbdAddress, NbdPlace, Place};
use ringway_core::file::NO_PATH;
use ringway_disk::Source;
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The image and the socket of a disk, known by what they are and not by what they are called.
#[derive(Clone, Debug)]
pub struct Claim {
    origin: String,
    place: Option<ClaimedPlace>,
    image: Option<(PathBuf, FileIdentity)>,
    read_only: bool,
}

/// Where the front-ends of a disk connect.
#[derive(Clone, Debug)]
struct ClaimedPlace {
    /// A socket file; or a port, which has no file.
    location: Location,
    /// Of NBD clients: others may be at the same address, under other names.
    export: Option<String>,
    /// For messages.
    shown: PathBuf,
}

impl ClaimedPlace {
    fn of(place: &Place, locate: impl Fn(&Path) -> Location) -> Option<Self> {
        let (location, export) = match place {
            Place::Socket(path) | Place::Inherited { path: Some(path), .. } => (locate(path), None),
            Place::Nbd(NbdPlace { address, export }) => {
                let location = match address {
                    NbdAddress::Unix(path) => locate(path),
                    NbdAddress::Tcp(port) => Location::unknown(Path::new(&port.to_string())),
                };
                (location, Some(export.clone()))
            }
            Place::Inherited { path: None, .. } | Place::Xen(_) => return None,
        };
        let shown = match place {
            Place::Nbd(place) => place.key(),
            _ => location.real.clone(),
        };
        Some(Self { location, export, shown })
    }

    fn is_same(&self, other: &Self) -> bool {
        let apart = self.export.is_some() && other.export.is_some() && self.export != other.export;
        self.location.is_same_place(&other.location) && !apart
    }
}

impl DiskSpec {
    /// What this disk takes for itself; `locate` looks paths up.
    pub fn claim(&self, locate: impl Fn(&Path) -> Location) -> Claim {
        let image = match &self.source {
            Source::Path(path) => Some((path.clone(), locate(path).identity)),
            other => {
                let known = other.identity(|path| locate(path).real);
                known.map(|(name, identity)| (name.into(), FileIdentity::Path(identity.into())))
            }
        };
        let place = ClaimedPlace::of(&self.place, locate);
        Claim { origin: self.origin.clone(), place, image, read_only: self.read_only }
    }
}

impl Claim {
    /// The path of its image, as it was given.
    pub fn image(&self) -> Option<&Path> {
        self.image.as_ref().map(|(path, _)| path.as_path())
    }

    /// Another file may have the name of its image by now, and is its image then. What is elsewhere keeps
    /// its name, and so does what cannot be found.
    pub fn follow(&mut self, locate: impl Fn(&Path) -> Location) {
        if let Some((path, identity @ FileIdentity::File(..))) = &mut self.image {
            if let now @ FileIdentity::File(..) = locate(path).identity {
                *identity = now;
            }
        }
    }

    /// Its socket file was made just now: from now on it is known by its number, too.
    pub fn listens(&mut self, locate: impl Fn(&Path) -> Location) {
        if let Some(place) = &mut self.place {
            if place.location.folder_found {
                place.location = locate(&place.location.real);
            }
        }
    }

    /// True if this is its image or its socket, whatever they are called.
    pub fn is_at(&self, place: &Location) -> bool {
        let image = self.image.as_ref().is_some_and(|(_, image)| *image == place.identity);
        let is_there = |its: &ClaimedPlace| {
            its.export.as_deref().unwrap_or_default().is_empty()
                && its.location.is_same_place(place)
        };
        image || self.place.as_ref().is_some_and(is_there)
    }

    /// True if front-ends of both connect to one place, however that is spelled.
    pub fn is_same_place(&self, other: &Self) -> bool {
        let both = self.place.as_ref().zip(other.place.as_ref());
        both.is_some_and(|(one, other)| one.is_same(other))
    }

    /// True if both have one image, however that is spelled.
    pub fn is_same_image(&self, other: &Self) -> bool {
        let both = self.image.as_ref().zip(other.image.as_ref());
        both.is_some_and(|((_, one), (_, other))| one == other)
    }

    /// Refuses a socket in a folder that cannot be looked up: it may be the one of a disk that is served, by
    /// another name.
    ///
    /// # Errors
    /// The message, with both places.
    pub fn check_folder(&self) -> Result<(), String> {
        match &self.place {
            Some(ClaimedPlace { location, shown, .. })
                if !location.folder_found && location.real.is_absolute() =>
            {
                let lead = if self.origin.is_empty() { "" } else { ": " };
                Err(format!(
                    "{}{lead}socket {}: its folder cannot be looked up: make it, or let the daemon's user \
                     search it and those above it",
                    self.origin,
                    shown.display()
                ))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a socket that `earlier` has, and an image unless both only read it.
    ///
    /// # Errors
    /// The message, with both places.
    pub fn check_apart(&self, earlier: &Self) -> Result<(), String> {
        // One that is served already has no place in what is read now.
        let served = earlier.origin.is_empty();
        let here = if self.origin.is_empty() { String::new() } else { self.origin.clone() + ": " };
        if let Some(place) = &self.place {
            if self.is_same_place(earlier) {
                let whose = match &earlier.image {
                    Some((image, _)) if served => {
                        format!("{}, which is served already", image.display())
                    }
                    None if served => "a disk that is served already".to_owned(),
                    _ => format!("the disk at {}", earlier.origin),
                };
                return Err(format!(
                    "{here}socket {} is taken by {whose}. Give each disk its own",
                    place.shown.display()
                ));
            }
        }
        if let Some((path, _)) = &self.image {
            if self.is_same_image(earlier) && !(self.read_only && earlier.read_only) {
                let whose = match &earlier.place {
                    Some(place) if served => format!("already, at {}", place.shown.display()),
                    None if served => "already".to_owned(),
                    _ => format!("by the disk at {} as well", earlier.origin),
                };
                return Err(format!(
                    "{here}image {} is served {whose}. Serve it once, or read-only from both",
                    path.display()
                ));
            }
        }
        Ok(())
    }
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Location {
    identity: FileIdentity,
    /// The path without links in its folder.
    #[serde(with = "bytes")]
    real: PathBuf,
    /// Whether that folder could be looked up.
    folder_found: bool,
}

impl Location {
    /// Looks it up.
    pub fn of(path: &Path) -> Self {
        let (real, folder_found) = real(path);
        Self { identity: identity(path, &real), real, folder_found }
    }

    /// True if both lead to one file or device.
    pub fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// True if both are one file, or one path at which there may be none yet.
    pub fn is_same_place(&self, other: &Self) -> bool {
        self.is_same(other) || self.real == other.real
    }

    /// True if it leads to what `file` is.
    pub fn leads_to(&self, file: &File) -> bool {
        FileIdentity::of(file).is_ok_and(|here| self.identity == here)
    }

    /// The path without links in its folder, from the root.
    pub fn real(&self) -> &Path {
        &self.real
    }

    /// What it leads to.
    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// Of a path that cannot be looked up.
    pub fn unknown(path: &Path) -> Self {
        Self { identity: FileIdentity::Path(path.into()), real: path.into(), folder_found: false }
    }
}

/// Paths need not be text.
mod bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(from)?).into())
    }
}

/// What makes two images the same one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum FileIdentity {
    /// A file: file system, inode, and when it was made, in nanoseconds, where the file system tells. Numbers of files
    /// that are deleted are given again.
    File(u64, u64, Option<i64>),
    /// A block device, whatever its node is called.
    Device(u64),
    /// A character device.
    CharacterDevice(u64),
    /// Nothing there yet; or a disk of another server, by its name.
    #[serde(with = "bytes")]
    Path(PathBuf),
}

impl FileIdentity {
    /// Of a file that is open, whatever has its name by now.
    ///
    /// # Errors
    /// What the host says.
    pub fn of(file: &File) -> std::io::Result<Self> {
        // By fstat, as the standard library asks by a call that takes paths as well.
        let stat = rustix::fs::fstat(file)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => Self::Device(stat.st_rdev),
            FileType::CharacterDevice => Self::CharacterDevice(stat.st_rdev),
            _ => Self::File(stat.st_dev, stat.st_ino, born(file)),
        })
    }
}

/// When a file was made; `None` if its file system does not tell.
fn born(file: &File) -> Option<i64> {
    let stat = statx(file, NO_PATH, AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let told = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let nanoseconds = i64::from(stat.stx_btime.tv_nsec);
    let seconds = told.then(|| stat.stx_btime.tv_sec.checked_mul(1_000_000_000))??;
    seconds.checked_add(nanoseconds)
}

/// The same of what a path leads to.
fn made(meta: &Metadata) -> Option<i64> {
    let made = meta.created().ok()?;
    let nanoseconds = match made.duration_since(UNIX_EPOCH) {
        Ok(since) => i128::try_from(since.as_nanos()).ok()?,
        Err(before) => -i128::try_from(before.duration().as_nanos()).ok()?,
    };
    i64::try_from(nanoseconds).ok()
}

fn identity(path: &Path, real: &Path) -> FileIdentity {
    match path.metadata() {
        Ok(meta) if meta.file_type().is_block_device() => FileIdentity::Device(meta.rdev()),
        Ok(meta) if meta.file_type().is_char_device() => FileIdentity::CharacterDevice(meta.rdev()),
        Ok(meta) => FileIdentity::File(meta.dev(), meta.ino(), made(&meta)),
        Err(_) => FileIdentity::Path(real.into()),
    }
}

/// The path without links in its folder, and whether that could be looked up.
fn real(path: &Path) -> (PathBuf, bool) {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    match (absolute.parent().map(Path::canonicalize), absolute.file_name()) {
        (Some(Ok(folder)), Some(name)) => (folder.join(name), true),
        _ => (absolute, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::Mounted;

    #[test]
    fn a_path_leads_to_a_file_until_another_one_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        assert!(Location::of(&path).leads_to(&file));
        std::os::unix::fs::symlink("a", folder.path().join("link")).unwrap();
        assert!(Location::of(&folder.path().join("link")).leads_to(&file));
        std::fs::write(folder.path().join("b"), "").unwrap();
        std::fs::rename(folder.path().join("b"), &path).unwrap();
        assert!(!Location::of(&path).leads_to(&file));
        std::fs::remove_file(&path).unwrap();
        assert!(!Location::of(&path).leads_to(&file));
    }

    /// Numbers of files are given again, at once on most file systems.
    #[test]
    fn c64_a_file_that_has_got_the_number_of_another_one_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("small");
        let small = match Mounted::on_file(at, "ext4", &["-q", "-I", "256"], 16 << 20) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let path = small.path().join("image");
        let before = {
            let file = File::create(&path).unwrap();
            let before = FileIdentity::of(&file).unwrap();
            assert_eq!(Location::of(&path).identity(), &before, "by path or open: the same");
            before
        };
        std::fs::remove_file(&path).unwrap();
        let number = |identity: &FileIdentity| match identity {
            FileIdentity::File(device, inode, born) => (*device, *inode, born.is_some()),
            _ => panic!("it is a file"),
        };
        let again = (0..64).any(|at| {
            let other = small.path().join(format!("other-{at}"));
            let file = File::create(&other).unwrap();
            let now = FileIdentity::of(&file).unwrap();
            let same = number(&now) == number(&before);
            assert!(number(&now).2, "this file system tells when files were made");
            assert_ne!(now, before);
            assert!(!same || Location::of(&other).identity() != &before);
            same
        });
        assert!(again, "no number was given again");
    }
}
