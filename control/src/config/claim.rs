//! What a disk takes for itself, which no other disk of the daemon may have.

use super::{DiskSpec, Place};
use ringway_disk::Source;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The image and the socket of a disk.
#[derive(Clone, Debug)]
pub struct Claim {
    origin: String,
    socket: Option<PathBuf>,
    image: Option<(PathBuf, Identity)>,
    read_only: bool,
}

impl DiskSpec {
    /// What this disk takes for itself; `locate` looks paths up.
    pub fn claim(&self, locate: impl Fn(&Path) -> Location) -> Claim {
        let socket = match &self.place {
            Place::Socket(path) | Place::Inherited { path: Some(path), .. } => {
                Some(locate(path).real)
            }
            // Others may be at the same address, under other names.
            Place::Nbd(place) => Some(locate(&place.key()).real),
            Place::Inherited { path: None, .. } | Place::Xen(_) => None,
        };
        let image = match &self.source {
            Source::Path(path) => Some((path.clone(), locate(path).identity)),
            Source::Nbd(target) => {
                let export = format!("nbd:{}:{}", target.address, target.export);
                Some((target.to_string().into(), Identity::Path(export.into())))
            }
            // One cluster after the other may have an image of such a name: who has its lock decides.
            Source::Rbd { target, access } => {
                let conf = access.conf.as_deref().unwrap_or(Path::new("")).display();
                let image = format!("{target} {conf}");
                Some((target.to_string().into(), Identity::Path(image.into())))
            }
            Source::Null { .. } | Source::Sim { .. } => None,
        };
        Claim { origin: self.origin.clone(), socket, image, read_only: self.read_only }
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
        if let Some((path, identity @ Identity::File(..))) = &mut self.image
            && let now @ Identity::File(..) = locate(path).identity
        {
            *identity = now;
        }
    }

    /// True if this is its image or its socket, whatever they are called.
    pub fn is_at(&self, place: &Location) -> bool {
        let image = self.image.as_ref().is_some_and(|(_, image)| *image == place.identity);
        image || self.socket.as_ref() == Some(&place.real)
    }

    /// Refuses a socket that `earlier` has, and an image unless both only read it.
    ///
    /// # Errors
    /// The message, with both places.
    pub fn check_apart(&self, earlier: &Self) -> Result<(), String> {
        // One that is served already has no place in what is read now.
        let served = earlier.origin.is_empty();
        let here = if self.origin.is_empty() { String::new() } else { self.origin.clone() + ": " };
        if let Some(path) = &self.socket
            && self.socket == earlier.socket
        {
            let whose = match &earlier.image {
                Some((image, _)) if served => {
                    format!("{}, which is served already", image.display())
                }
                None if served => "a disk that is served already".to_owned(),
                _ => format!("the disk at {}", earlier.origin),
            };
            return Err(format!(
                "{here}socket {} is taken by {whose}. Give each disk its own",
                path.display()
            ));
        }
        if let (Some((path, image)), Some((_, other))) = (&self.image, &earlier.image)
            && image == other
            && !(self.read_only && earlier.read_only)
        {
            let whose = match &earlier.socket {
                Some(socket) if served => format!("already, at {}", socket.display()),
                None if served => "already".to_owned(),
                _ => format!("by the disk at {} as well", earlier.origin),
            };
            return Err(format!(
                "{here}image {} is served {whose}. Serve it once, or read-only from both",
                path.display()
            ));
        }
        Ok(())
    }
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Location {
    identity: Identity,
    /// The path without links in its folder.
    #[serde(with = "bytes")]
    real: PathBuf,
}

impl Location {
    /// Looks it up.
    pub fn of(path: &Path) -> Self {
        Self { identity: identity(path), real: real(path) }
    }

    /// True if both lead to one file or device.
    pub fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// True if both are the same path, links in its folder apart.
    pub(super) fn is_at_path(&self, other: &Self) -> bool {
        self.real == other.real
    }

    /// True if it leads to what `file` is.
    pub fn leads_to(&self, file: &File) -> bool {
        // By fstat, as the standard library asks by a call that takes paths as well.
        let Ok(stat) = rustix::fs::fstat(file) else { return false };
        let here = if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            Identity::Device(stat.st_rdev)
        } else {
            Identity::File(stat.st_dev, stat.st_ino)
        };
        self.identity == here
    }

    /// Of a path that cannot be looked up.
    pub fn unknown(path: &Path) -> Self {
        Self { identity: Identity::Path(path.into()), real: path.into() }
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
enum Identity {
    /// A file: file system and inode.
    File(u64, u64),
    /// A block device, whatever its node is called.
    Device(u64),
    /// Nothing there yet; or a disk of another server, by its name.
    #[serde(with = "bytes")]
    Path(PathBuf),
}

fn identity(path: &Path) -> Identity {
    match path.metadata() {
        Ok(meta) if meta.file_type().is_block_device() => Identity::Device(meta.rdev()),
        Ok(meta) => Identity::File(meta.dev(), meta.ino()),
        Err(_) => Identity::Path(real(path)),
    }
}

/// The path without links in its folder.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    match (absolute.parent().map(Path::canonicalize), absolute.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
