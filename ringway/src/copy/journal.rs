//! What of an unfinished copy is on the disk: a small file beside the destination.
//!
//! Lines of JSON, each with its checksum, appended and synced one by one. The first says what is
//! copied to where; each further one up to which byte the destination is complete *and durable*. The
//! order that makes this hold:
//!
//! ```text
//! journal's first line durable → data → data durable → journal's next line durable → …
//! … → all data durable → journal removed
//! ```
//!
//! As long as the journal is there the destination is not complete.

use super::args::Prealloc;
use crate::new_file::cannot_look;
use anyhow::{Context, bail};
use ringway_image::printable;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, PersistError};

const FORMAT: &str = "ringway copy 1";

/// Bytes of a line, at most: two paths as numbers, and a little more.
const LINE_MAX: u64 = 64 << 10;

/// By what a disk is known again. A file that was written has another time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// `file`, `block device`, `vhost-user`, `NBD export` or `RBD image`.
    pub(super) kind: String,
    /// Where it was.
    #[serde(with = "any_path")]
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// Device and inode of a file, number of a block device.
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Nanoseconds; last changes of content and of attributes. Nothing but files has them.
    pub(super) changed: Option<[i64; 4]>,
    /// Of a disk behind a socket.
    pub(super) serial: Option<String>,
}

impl Identity {
    /// The same thing, though it may have been written.
    pub(super) fn is_same_place(&self, other: &Self) -> bool {
        self.kind == other.kind
            && (self.device, self.inode) == (other.device, other.inode)
            && self.serial == other.serial
            && (self.has_number() || self.path == other.path)
    }

    /// The host knows it by more than its name.
    fn has_number(&self) -> bool {
        (self.device, self.inode) != (0, 0)
    }

    /// Whether a change of it can be seen.
    pub(super) fn tells_changes(&self) -> bool {
        self.changed.is_some()
    }
}

/// Paths are text where they can be, else the bytes that they have.
mod any_path {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Said {
        Text(PathBuf),
        Bytes(Vec<u8>),
    }

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        match path.to_str() {
            Some(text) => text.serialize(to),
            None => path.as_os_str().as_bytes().serialize(to),
        }
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(match Said::deserialize(from)? {
            Said::Text(path) => path,
            Said::Bytes(bytes) => OsString::from_vec(bytes).into(),
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    source: Identity,
    destination: Identity,
    #[serde(default)]
    prealloc: Prealloc,
}

#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    done: u64,
}

/// What a journal says.
#[derive(Debug)]
pub(super) struct Story {
    pub(super) source: Identity,
    pub(super) destination: Identity,
    /// What its holes and zeroes get.
    pub(super) prealloc: Prealloc,
    /// Everything before this byte is complete and durable.
    pub(super) done: u64,
}

/// The journal of a copy under way.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Reads the journal at `path`; `None` if there is none.
    ///
    /// # Errors
    /// One that cannot be read, or is not a journal: what is there is somebody's, and stays.
    pub(super) fn read(path: &Path) -> anyhow::Result<Option<Story>> {
        let name = printable(path);
        // Of a pipe nobody waits for the other end.
        let mut options = OpenOptions::new();
        let file = match options.read(true).custom_flags(libc::O_NONBLOCK).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let what = format!("cannot read the journal {name}");
                return Err(match path.symlink_metadata() {
                    Ok(_) => anyhow::Error::new(error).context(what),
                    Err(_) => cannot_look(path, error, "look at it"),
                });
            }
        };
        let mut lines = BufReader::new(file);
        let header =
            next_line(&mut lines).with_context(|| format!("cannot read the journal {name}"))?;
        let header = header.and_then(|line| serde_json::from_str::<Header>(&line).ok());
        let Some(header) = header.filter(|header| header.format == FORMAT) else {
            bail!(
                "{name} is no journal of this program, or damaged: it is not overwritten. Remove it, or \
                 name another one with --journal"
            );
        };
        let lines = std::iter::from_fn(|| next_line(&mut lines).ok().flatten());
        // The last line that is whole; one that was cut short by a crash says nothing.
        let marks = lines.map_while(|line| serde_json::from_str::<Progress>(&line).ok());
        let done = marks.last().map_or(0, |mark| mark.done);
        let Header { source, destination, prealloc, .. } = header;
        Ok(Some(Story { source, destination, prealloc, done }))
    }

    /// Begins a journal, durable when this returns; in the place of another one only if there was one
    /// when it was read (`replace`).
    ///
    /// # Errors
    /// What the host says, or that somebody has put a file there meanwhile.
    pub(super) fn begin(
        path: &Path,
        source: &Identity,
        to: &Identity,
        prealloc: Prealloc,
        replace: bool,
    ) -> anyhow::Result<Self> {
        let make = || {
            // Not truncated in place: at every moment there is a whole one, the old or the new. Its name
            // until then is nobody's: in a folder of somebody else a name that is known may be a link.
            let mut fresh =
                tempfile::Builder::new().prefix(".ringway-copy-").tempfile_in(folder_of(path))?;
            let (source, destination) = (source.clone(), to.clone());
            let header = Header { format: FORMAT.into(), source, destination, prealloc };
            fresh.write_all(seal(&header)?.as_bytes())?;
            fresh.as_file().sync_all()?;
            let named = if replace { fresh.persist(path) } else { named_anew(fresh, path) };
            let file = named.map_err(|error| error.error)?;
            sync_folder(path)?;
            Ok::<_, io::Error>(file)
        };
        let file =
            make().with_context(|| format!("cannot write the journal {}", printable(path)))?;
        Ok(Self { path: path.into(), file })
    }

    /// Goes on with the journal at `path`, which says `story`.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn resume(path: &Path, story: &Story) -> anyhow::Result<Self> {
        // Begun anew, so that nothing follows half a line.
        let Story { source, destination, prealloc, .. } = story;
        let mut journal = Self::begin(path, source, destination, *prealloc, true)?;
        journal.note(story.done)?;
        Ok(journal)
    }

    /// Notes that everything before `done` is durable at the destination. Durable itself when this
    /// returns.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn note(&mut self, done: u64) -> anyhow::Result<()> {
        let write = || {
            self.file.write_all(seal(&Progress { done })?.as_bytes())?;
            self.file.sync_data()
        };
        let name = printable(&self.path);
        let mut write = write;
        write().with_context(|| format!("cannot write the journal {name}"))
    }

    /// Removes the journal: the destination is complete and durable. What somebody has put in its place
    /// stays.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        let remove = || {
            let (there, own) = (self.path.symlink_metadata()?, self.file.metadata()?);
            if (there.dev(), there.ino()) != (own.dev(), own.ino()) {
                return Ok(());
            }
            std::fs::remove_file(&self.path)?;
            sync_folder(&self.path)
        };
        remove().with_context(|| format!("cannot remove the journal {}", printable(&self.path)))
    }
}

/// `path` with something behind its name.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes what names `path` durable.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Gives a file a name that nobody has.
fn named_anew(fresh: NamedTempFile, path: &Path) -> Result<File, PersistError> {
    match fresh.persist_noclobber(path) {
        // A file system that cannot do so: it was not there a moment ago.
        Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => {
            error.file.persist(path)
        }
        named => named,
    }
}

/// The JSON of the next line, if that is whole.
fn next_line(lines: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    lines.take(LINE_MAX).read_until(b'\n', &mut line)?;
    let line = std::str::from_utf8(&line).ok().and_then(unseal);
    Ok(line.map(str::to_owned))
}

fn seal(line: &impl Serialize) -> io::Result<String> {
    let json = serde_json::to_string(line)?;
    Ok(format!("{:016x} {json}\n", fnv1a(json.as_bytes())))
}

/// The JSON of a whole line.
fn unseal(line: &str) -> Option<&str> {
    let (sum, json) = line.strip_suffix('\n')?.split_once(' ')?;
    let sum = u64::from_str_radix(sum, 16).ok()?;
    (sum == fnv1a(json.as_bytes())).then_some(json)
}

/// The FNV-1a hash.
pub(super) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    fn identity(bytes: u64) -> Identity {
        Identity {
            kind: "file".into(),
            path: "a b\n".into(),
            bytes,
            device: 1,
            inode: 2,
            changed: Some([1, 2, 3, 4]),
            serial: None,
        }
    }

    #[test]
    fn what_was_noted_is_read_and_half_lines_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        assert!(Journal::read(&path).unwrap().is_none());
        let mut journal =
            Journal::begin(&path, &identity(5), &identity(6), Prealloc::Falloc, false).unwrap();
        assert_eq!(Journal::read(&path).unwrap().unwrap().done, 0);
        journal.note(4096).unwrap();
        journal.note(1 << 40).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let story = Journal::read(&path).unwrap().unwrap();
        assert_eq!((story.source, story.destination), (identity(5), identity(6)));
        assert_eq!((story.done, story.prealloc), (1 << 40, Prealloc::Falloc));
        // Cut anywhere: what is left is an earlier truth, or no journal.
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            match Journal::read(&path) {
                Ok(story) => assert!([0, 4096].contains(&story.unwrap().done), "{len}"),
                Err(error) => assert!(error.to_string().contains("no journal"), "{error}"),
            }
        }
        // A changed byte ends it there.
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(Some(story)) = Journal::read(&path) {
                assert!(story.done < 1 << 40, "{at}");
            }
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let story = Journal::read(&path).unwrap().unwrap();
        let mut journal = Journal::resume(&path, &story).unwrap();
        journal.note(8192).unwrap();
        assert_eq!(Journal::read(&path).unwrap().unwrap().done, 8192);
        journal.remove().unwrap();
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    }

    #[test]
    fn a_path_that_is_no_text_is_known_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let odd = Identity {
            path: std::ffi::OsString::from_vec(b"/caf\xe9.img".to_vec()).into(),
            ..identity(5)
        };
        let begun = Journal::begin(&path, &odd, &identity(6), Prealloc::Off, false);
        drop(begun.unwrap());
        assert_eq!(Journal::read(&path).unwrap().unwrap().source, odd);
    }

    #[test]
    fn a_journal_takes_no_name_that_somebody_has() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        std::fs::write(&path, "mine").unwrap();
        let refused = Journal::begin(&path, &identity(5), &identity(6), Prealloc::Off, false);
        assert!(refused.is_err());
        std::fs::remove_file(&path).unwrap();
        let begun =
            Journal::begin(&path, &identity(5), &identity(6), Prealloc::Off, false).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        begun.remove().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }
}
