//! The socket file: that of a dead daemon is replaced, that of a living one is not.

use rustix::fs::Mode;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Why a socket could not be made: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody listens there.
    #[error("{0}: another process is listening on this socket. Choose another path, or stop it")]
    Busy(PathBuf),
    /// Something else has the name.
    #[error("{0}: there is a file of this name and it is not a socket. Choose another path")]
    NotASocket(PathBuf),
    /// The folder is missing.
    #[error("{0}: cannot make the socket, because its folder does not exist")]
    NoFolder(PathBuf),
    /// A limit of `struct sockaddr_un`.
    #[error("{0}: the path is too long for a socket (at most 107 bytes). Choose a shorter one")]
    TooLong(PathBuf),
    /// Permission.
    #[error("{0}: no permission to make a socket here. Choose another path or user")]
    Permission(PathBuf),
    /// Anything else the host says.
    #[error("{path}: cannot make the socket: {source}")]
    Host {
        /// The path.
        path: PathBuf,
        /// What the host says.
        source: io::Error,
    },
}

/// Listens on a socket file at `path`.
///
/// # Errors
/// [`BindError`]; a file that was there is untouched unless it is the socket of a dead process.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    make_room(path)?;
    UnixListener::bind(path).map_err(|e| refused(path, e))
}

/// As [`bind`], with a socket file that nobody but its owner can connect to (mode 0600), from the
/// first moment on.
///
/// # Errors
/// As [`bind`].
pub fn bind_private(path: &Path) -> Result<UnixListener, BindError> {
    make_room(path)?;
    let listen = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The file takes its mode from the socket (Linux), so that there is no moment in between.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        net::listen(&socket, 128)?;
        Ok(socket)
    };
    listen().map(UnixListener::from).map_err(|e| refused(path, e.into()))
}

/// Takes the socket of a dead process away.
fn make_room(path: &Path) -> Result<(), BindError> {
    if path.as_os_str().len() > 107 {
        return Err(BindError::TooLong(path.into()));
    }
    if let Ok(meta) = path.symlink_metadata() {
        if !meta.file_type().is_socket() {
            return Err(BindError::NotASocket(path.into()));
        }
        match UnixStream::connect(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|e| refused(path, e))?;
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(BindError::Permission(path.into()));
            }
            _ => return Err(BindError::Busy(path.into())),
        }
    }
    Ok(())
}

fn refused(path: &Path, source: io::Error) -> BindError {
    match source.kind() {
        io::ErrorKind::NotFound => BindError::NoFolder(path.into()),
        io::ErrorKind::PermissionDenied => BindError::Permission(path.into()),
        io::ErrorKind::AddrInUse => BindError::Busy(path.into()),
        _ => BindError::Host { path: path.into(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_the_dead_is_replaced_and_that_of_the_living_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let living = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(BindError::Busy(_))));
        drop(living);
        assert!(path.exists(), "a killed daemon leaves its socket file behind");
        bind(&path).unwrap();
    }

    #[test]
    fn a_private_socket_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ctl.sock");
        let _listener = bind_private(&path).unwrap();
        let mode = std::os::unix::fs::MetadataExt::mode(&path.metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert!(matches!(bind_private(&path), Err(BindError::Busy(_))));
        assert!(matches!(
            bind_private(&dir.path().join("x".repeat(200))),
            Err(BindError::TooLong(_))
        ));
    }

    #[test]
    fn other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        assert!(matches!(bind(&dir.path().join("no/v.sock")), Err(BindError::NoFolder(_))));
        assert!(matches!(bind(&dir.path().join("x".repeat(200))), Err(BindError::TooLong(_))));
    }
}
