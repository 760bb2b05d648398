//! New images: complete and durable before they have their name.

use crate::open::ForeignFormat;
use ringway_image::{Format, Header, Refused};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that new images are based on.
#[derive(Debug)]
pub struct Backing {
    /// As its owner names it.
    pub path: PathBuf,
    /// What it is.
    pub format: Format,
    /// Bytes of disk.
    pub virtual_size: u64,
    /// It is in no file of this host, and its name leads there from anywhere.
    pub is_elsewhere: bool,
}

/// Why no image is based on a file.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// What the host says.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
    /// A folder, a pipe, a device.
    #[error("it is neither a file nor a block device")]
    NotADisk,
    /// It looks like another format than its name says.
    #[error(
        "it looks like {}. {}; if a guest has written what is there, say that it is raw", .0.words(), way_out(*.0)
    )]
    Foreign(ForeignFormat),
    /// What it says of itself.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// A daemon that was killed has more of it, which would change it beneath whoever is based on it.
    #[error("{}", ringway_image::NOT_WHOLE)]
    Waits,
    /// Its path has no last part.
    #[error("it names no file")]
    NoName,
}

fn way_out(found: ForeignFormat) -> &'static str {
    match found {
        ForeignFormat::Qcow2 => "Say that its format is qcow2",
        _ => "A base is raw or qcow2: `qemu-img convert -O qcow2` makes one of it",
    }
}

/// True if a name says that its file is qcow2. The owner has chosen the name; a guest can change what is
/// in a file, and not this.
#[must_use]
pub fn is_named_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|word| word.eq_ignore_ascii_case("qcow2"))
}

impl Backing {
    /// Looks at a file. Its format is what is said, else what its name says.
    ///
    /// # Errors
    /// [`BackingError`].
    pub fn inspect(path: &Path, said: Option<Format>) -> Result<Self, BackingError> {
        let host = |what| move |source| BackingError::Host { what, source };
        let mut options = OpenOptions::new();
        let opened = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let mut file = opened.map_err(host("open it"))?;
        let meta = file.metadata().map_err(host("look at it"))?;
        let kind = meta.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(BackingError::NotADisk);
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(host("tell its size"))?;
        let format = match said {
            Some(said) => said,
            None if is_named_qcow2(path) => Format::Qcow2,
            None => match ForeignFormat::of(&file, bytes).map_err(host("read it"))? {
                None => Format::Raw,
                Some(found) => return Err(BackingError::Foreign(found)),
            },
        };
        let virtual_size = match format {
            Format::Raw => bytes,
            Format::Qcow2 => {
                let header = Header::read(&file, bytes).map_err(host("read it"))??;
                if header.is_corrupt() {
                    return Err(Refused::Corrupt.into());
                }
                if header.waits_for_journal() {
                    return Err(BackingError::Waits);
                }
                header.virtual_size
            }
        };
        Ok(Self { path: path.into(), format, virtual_size, is_elsewhere: false })
    }

    /// Its name in an image of `folder`, which has no links: relative to that if its owner names it so.
    ///
    /// # Errors
    /// What the host says to its folder.
    pub fn name_in(&self, folder: &Path) -> Result<PathBuf, BackingError> {
        let path = &self.path;
        if path.is_absolute() || self.is_elsewhere {
            return Ok(path.to_owned());
        }
        let last = path.file_name().ok_or(BackingError::NoName)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let from = parent.unwrap_or(Path::new(".")).canonicalize();
        let from = from.map_err(|source| BackingError::Host { what: "find its folder", source })?;
        let both = from.components().zip(folder.components());
        let shared = both.take_while(|(a, b)| a == b).count();
        let up = folder.components().skip(shared).map(|_| Component::ParentDir);
        let mut name: PathBuf = up.chain(from.components().skip(shared)).collect();
        name.push(last);
        // To QEMU a colon is the end of a protocol, but behind a slash.
        let first = name.components().next();
        let colon = first.is_some_and(|c| c.as_os_str().as_encoded_bytes().contains(&b':'));
        Ok(if colon { Path::new(".").join(name) } else { name })
    }
}

/// A file that goes when it is dropped, until it gets its name: nobody sees it before it is complete.
#[derive(Debug)]
pub struct NewFile {
    file: NamedTempFile,
    target: PathBuf,
}

/// Names the folder in the place of a file that nobody has asked for.
fn without_name(error: io::Error, folder: &Path) -> io::Error {
    let why = match error.kind() {
        io::ErrorKind::PermissionDenied => "no permission to make files in it",
        io::ErrorKind::NotFound => "no file can be made in it",
        io::ErrorKind::ReadOnlyFilesystem => "its file system is read-only",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{}: {why}", folder.display()))
}

impl NewFile {
    /// Begins one that will be `target`, beside it.
    ///
    /// # Errors
    /// What the host says.
    pub fn begin(target: &Path, mode: u32) -> io::Result<Self> {
        let file = tempfile::Builder::new()
            .prefix(".ringway-create-")
            .permissions(Permissions::from_mode(mode))
            .tempfile_in(folder_of(target))
            .map_err(|error| without_name(error, folder_of(target)))?;
        Ok(Self { file, target: target.to_owned() })
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Where it is until then.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Makes it durable and gives it its name; with `force` in the place of what has it now.
    ///
    /// # Errors
    /// What the host says; AlreadyExists if somebody has made one meanwhile.
    pub fn finish(self, force: bool) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        let named = match force {
            true => self.file.persist(&self.target),
            false => self.file.persist_noclobber(&self.target),
        };
        named.map_err(|error| error.error)?;
        // The name is durable with its folder.
        File::open(folder_of(&self.target))?.sync_all()
    }
}

/// The folder of a file.
fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_backing_files_begin_at_the_images_folder() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (clones, bases) = (root.join("clones"), root.join("bases"));
        std::fs::create_dir_all(&clones).unwrap();
        std::fs::create_dir_all(&bases).unwrap();
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        let ups: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let from_here = |path: &Path| ups.join(path.strip_prefix("/").unwrap());
        let named = |path: &Path, folder: &Path| {
            let (path, format) = (path.into(), Format::Raw);
            let backing = Backing { path, format, virtual_size: 0, is_elsewhere: false };
            backing.name_in(folder).unwrap()
        };
        let cases = [
            (bases.join("a.raw"), &clones, "../bases/a.raw"),
            (clones.join("a.raw"), &clones, "a.raw"),
            (clones.join("nbd:a"), &clones, "./nbd:a"),
            (clones.join("a.raw"), &root, "clones/a.raw"),
        ];
        for (path, folder, name) in cases {
            assert_eq!(named(&from_here(&path), folder), Path::new(name));
            assert_eq!(named(&path, folder), path);
        }
    }
}
