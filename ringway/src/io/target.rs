//! What `copy`, `io` and `info` work on: a file, a block device, a disk behind a socket, or one that is
//! elsewhere.

use clap::builder::{OsStringValueParser, TypedValueParser};
use ringway_control::config::{is_elsewhere, source};
use ringway_disk::Source;
use ringway_disk::open::is_namespace;
use ringway_image::printable;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// A disk as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
// A command has one or two of them.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Target {
    /// `PATH` or `file:PATH`: a raw image file or a block device.
    Path(PathBuf),
    /// `vhost-user:SOCKET`, or the path of a socket.
    VhostUser(PathBuf),
    /// `nbd:…`, `rbd:…`, `/dev/ng0n1`: an export of an NBD server, an image of a Ceph cluster, an NVMe
    /// namespace past the block layer. As it is said, and what that names.
    Elsewhere(PathBuf, Source),
}

impl Target {
    /// Reads a word of the command line. A path that is a socket needs no prefix.
    pub(crate) fn parse(word: &OsString) -> Result<Self, String> {
        let bytes = word.as_bytes();
        if bytes == b"-" {
            return Err("a disk is no stream: standard input and output cannot be used. A file of this name \
                        is ./-"
                .into());
        }
        let rest = |skip: usize| PathBuf::from(OsString::from_vec(bytes[skip..].to_vec()));
        let target = if bytes.starts_with(b"vhost-user:") {
            Self::VhostUser(rest(11))
        } else if bytes.starts_with(b"file:") {
            Self::Path(rest(5))
        } else {
            let path = PathBuf::from(word);
            if let Some(source) = elsewhere(&path)? {
                return Ok(Self::Elsewhere(path, source));
            }
            if is_namespace(&path) {
                return Ok(Self::Elsewhere(path.clone(), Source::Path(path)));
            }
            let kind = path.metadata().map(|meta| meta.file_type());
            if kind.is_ok_and(|kind| kind.is_socket()) {
                Self::VhostUser(path)
            } else {
                Self::Path(path)
            }
        };
        if target.path().as_os_str().is_empty() {
            return Err("no path: give PATH, or vhost-user:SOCKET".into());
        }
        Ok(target)
    }

    /// For clap.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Self> {
        OsStringValueParser::new().try_map(|word| Self::parse(&word))
    }

    /// What is elsewhere.
    pub(crate) fn source(&self) -> Option<&Source> {
        if let Self::Elsewhere(_, source) = self { Some(source) } else { None }
    }

    /// The file, the device or the socket; of what is elsewhere the name.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Path(path) | Self::VhostUser(path) | Self::Elsewhere(path, _) => path,
        }
    }
}

/// What it is that a tool serves to itself.
pub(crate) fn kind(source: &Source) -> &'static str {
    match source {
        Source::Path(_) => "NVMe namespace",
        other => other.kind(),
    }
}

/// What a word names that is neither here nor a path. Others than these schemes may be names of files.
fn elsewhere(word: &Path) -> Result<Option<Source>, String> {
    if is_elsewhere(word) { source(word).map(Some) } else { Ok(None) }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) | Self::Elsewhere(path, _) => write!(f, "{}", printable(path)),
            Self::VhostUser(path) => write!(f, "vhost-user:{}", printable(path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_told_apart() {
        let parse = |word: &str| Target::parse(&word.into());
        assert_eq!(parse("vhost-user:/run/s"), Ok(Target::VhostUser("/run/s".into())));
        assert_eq!(parse("file:vhost-user:x"), Ok(Target::Path("vhost-user:x".into())));
        assert_eq!(parse("disk.img"), Ok(Target::Path("disk.img".into())));
        assert!(parse("vhost-user:").is_err() && parse("").is_err());
        assert!(parse("-").unwrap_err().contains("./-"));
        for word in ["rbd:rbd/vm@snap", "nbd:unix:/run/n.sock:vm", "nbd://10.0.0.1/vm"] {
            let target = parse(word).unwrap();
            assert!(matches!(target, Target::Elsewhere(..)), "{word}");
            assert_eq!(target.to_string(), word);
        }
        assert_eq!(parse("./rbd:rbd/vm"), Ok(Target::Path("./rbd:rbd/vm".into())));
        assert_eq!(parse("file:rbd:x"), Ok(Target::Path("rbd:x".into())));
        assert_eq!(parse("vm:1.img"), Ok(Target::Path("vm:1.img".into())));
        assert!(parse("rbd:vm").unwrap_err().contains("rbd:POOL/IMAGE"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(parse(path.to_str().unwrap()), Ok(Target::VhostUser(path)));
    }
}
