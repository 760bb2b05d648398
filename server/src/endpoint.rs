//! Where front-ends come in: a socket file of ours, or an inherited socket.

use super::host::{Host, SocketFile};
use super::nbd_clients::{NbdClients, Portals};
use anyhow::{Context, bail};
#[cfg(feature = "xen")]
use ringway_control::config::XenDevice;
use ringway_control::config::{NbdAddress, Place};
use ringway_vhost_user::Access;
#[cfg(feature = "xen")]
use ringway_xen_blkback::Address;
use rustix::net::sockopt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Takes over an inherited descriptor.
///
/// # Errors
/// That it is no Unix stream socket.
pub(crate) fn inherit(fd: i32) -> anyhow::Result<Place> {
    let socket = inherited(fd).with_context(|| format!("--fd {fd}"))?;
    let listens = sockopt::socket_acceptconn(&socket)?;
    let bound = UnixListener::from(socket.try_clone()?).local_addr()?;
    let path = bound.as_pathname().filter(|path| path.is_absolute()).map(Path::to_path_buf);
    Ok(Place::Inherited { fd: socket, listens, path })
}

/// Takes over an inherited socket.
///
/// # Errors
/// That it is no Unix stream socket.
pub(crate) fn inherited(fd: i32) -> anyhow::Result<OwnedFd> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    if !link.is_ok_and(|link| link.to_string_lossy().starts_with("socket:")) {
        bail!("it is not an open socket. Pass the number of an inherited Unix socket");
    }
    // SAFETY: it is open and a socket; this program has opened none by now, so it was inherited and
    // nothing else here owns it. Its number was given once, so it is taken over once.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if sockopt::socket_domain(&socket)? != rustix::net::AddressFamily::UNIX
        || sockopt::socket_type(&socket)? != rustix::net::SocketType::STREAM
    {
        bail!("it is not a Unix stream socket, which vhost-user needs");
    }
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    Ok(socket)
}

/// Where a listening socket is.
pub(crate) enum At {
    /// At a file of ours, which goes with it.
    Own(SocketFile),
    /// Wherever somebody else has bound it, who also removes it.
    Others(Option<PathBuf>),
}

/// unix(7): to connect takes the right to write.
fn warn_of_access(path: &Path, access: Access) {
    if access.mode & 0o002 != 0 {
        tracing::warn!(
            "socket-mode {:04o}: every user of this host who can reach its folder can connect to {}, \
             and so read and write the disk",
            access.mode,
            path.display()
        );
    }
}

/// Where front-ends come in.
pub(crate) enum Endpoint {
    /// They connect, one after the other.
    Listener(UnixListener, At),
    /// It is connected; nobody comes after it.
    Connected(UnixStream),
    /// NBD clients connect, several at a time.
    Nbd(NbdClients),
    /// Not a socket: a device of this Xen host's guest.
    #[cfg(feature = "xen")]
    Xen(Address),
}

impl Endpoint {
    /// Opens the place that was asked for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn open(
        place: Place,
        access: Access,
        (portals, host): (&Portals, &Host),
    ) -> anyhow::Result<Self> {
        match place {
            Place::Socket(path) => {
                warn_of_access(&path, access);
                let (listener, file) = host.listen(&path, false, access)?;
                Self::listening(listener, At::Own(file))
            }
            Place::Inherited { fd, listens: true, path } => {
                Self::listening(fd.into(), At::Others(path))
            }
            Place::Inherited { fd, listens: false, .. } => Ok(Self::Connected(fd.into())),
            Place::Nbd(place) => {
                if let NbdAddress::Unix(path) = &place.address {
                    warn_of_access(path, access);
                }
                Ok(Self::Nbd(NbdClients::listen(&place, access, (portals, host))?))
            }
            #[cfg(feature = "xen")]
            Place::Xen(device) => Ok(Self::Xen(address(device))),
            #[cfg(not(feature = "xen"))]
            Place::Xen(_) => bail!("this build of ringway serves no guests of Xen"),
        }
    }

    fn listening(listener: UnixListener, at: At) -> anyhow::Result<Self> {
        // A front-end may be gone again before it is accepted.
        listener.set_nonblocking(true)?;
        Ok(Self::Listener(listener, at))
    }

    /// The device, if it is one of a Xen guest: its folder in xenstore.
    pub(crate) fn device(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "xen")]
            Self::Xen(address) => Some(&address.back),
            _ => None,
        }
    }

    /// Where the socket is, if it has a name.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Listener(_, At::Own(file)) => Some(file.path()),
            Self::Listener(_, At::Others(path)) => path.as_deref(),
            Self::Nbd(clients) => Some(clients.place()),
            _ => None,
        }
    }
}

/// A device as a session finds it.
#[cfg(feature = "xen")]
fn address(device: XenDevice) -> Address {
    let XenDevice { back, front, domid, devid, params, read_only } = device;
    Address { back, front, domid, devid, params, read_only }
}
