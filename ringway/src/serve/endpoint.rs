//! Where front-ends come in: a socket file of ours, or an inherited socket.

use crate::config::Place;
use anyhow::{Context, bail};
use ringway_export::vhost_user::bind;
use rustix::net::sockopt;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Takes over an inherited descriptor.
///
/// # Errors
/// That it is no Unix stream socket.
pub(crate) fn inherit(fd: i32) -> anyhow::Result<OwnedFd> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    if !link.is_ok_and(|link| link.to_string_lossy().starts_with("socket:")) {
        bail!("--fd {fd}: it is not an open socket. Pass the number of an inherited Unix socket");
    }
    // SAFETY: it is open and a socket; this program has opened none by now, so it was inherited and
    // nothing else here owns it. Its number was given once, so it is taken over once.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if sockopt::socket_domain(&socket)? != rustix::net::AddressFamily::UNIX
        || sockopt::socket_type(&socket)? != rustix::net::SocketType::STREAM
    {
        bail!("--fd {fd}: it is not a Unix stream socket, which vhost-user needs");
    }
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    Ok(socket)
}

/// Where front-ends come in.
#[derive(Debug)]
pub(crate) enum Endpoint {
    /// They connect, one after the other.
    Listener(UnixListener, Option<SocketFile>),
    /// It is connected; nobody comes after it.
    Connected(UnixStream),
}

impl Endpoint {
    /// Opens the place that was asked for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn open(place: Place) -> anyhow::Result<Self> {
        match place {
            Place::Socket(path) => {
                let listener = bind(&path)?;
                let file = SocketFile::of(&path)?;
                Self::listening(listener, Some(file))
            }
            Place::Inherited(fd) if sockopt::socket_acceptconn(&fd)? => {
                Self::listening(fd.into(), None)
            }
            Place::Inherited(fd) => Ok(Self::Connected(fd.into())),
        }
    }

    fn listening(listener: UnixListener, file: Option<SocketFile>) -> anyhow::Result<Self> {
        // A front-end may be gone again before it is accepted.
        listener.set_nonblocking(true)?;
        Ok(Self::Listener(listener, file))
    }

    /// The socket file, if there is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Listener(_, Some(file)) => Some(&file.path),
            _ => None,
        }
    }
}

/// A socket file that this process has made and removes at the end.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// File system and inode: what has the name at the end may be somebody else's.
    identity: (u64, u64),
}

impl SocketFile {
    /// Of a socket that was just made at `path`.
    ///
    /// # Errors
    /// That it has vanished.
    pub(crate) fn of(path: &Path) -> anyhow::Result<Self> {
        // A later change of the working folder would not matter.
        let path = std::path::absolute(path)?;
        let identity = identity(&path)
            .with_context(|| format!("{}: the socket has vanished", path.display()))?;
        Ok(Self { path, identity })
    }

    /// Where it is, from the root.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            // Best effort: a file that stays is replaced by the next daemon.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    path.symlink_metadata().map(|meta| (meta.dev(), meta.ino()))
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Listener(listener, _) => listener.as_fd(),
            Self::Connected(stream) => stream.as_fd(),
        }
    }
}
