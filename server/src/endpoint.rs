//! Where front-ends come in: a socket file of ours, or an inherited socket.

use super::host::{Host, SocketFile};
use anyhow::{Context, bail};
use ringway_control::config::Place;
#[cfg(feature = "xen")]
use ringway_control::config::XenDevice;
use ringway_vhost_user::Access;
#[cfg(feature = "xen")]
use ringway_xen_blkback::Address;
use rustix::net::sockopt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Takes over an inherited descriptor.
///
/// # Errors
/// That it is no Unix stream socket.
pub(crate) fn inherit(fd: i32) -> anyhow::Result<Place> {
    let socket = inherited(fd).with_context(|| format!("--fd {fd}"))?;
    let listens = sockopt::socket_acceptconn(&socket)?;
    Ok(Place::Inherited { fd: socket, listens })
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

/// Where front-ends come in.
pub(crate) enum Endpoint {
    /// They connect, one after the other.
    Listener(UnixListener, Option<SocketFile>),
    /// It is connected; nobody comes after it.
    Connected(UnixStream),
    /// Not a socket: a device of this Xen host's guest.
    #[cfg(feature = "xen")]
    Xen(Address),
}

impl Endpoint {
    /// Opens the place that was asked for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn open(place: Place, access: Access, host: &Host) -> anyhow::Result<Self> {
        match place {
            Place::Socket(path) => {
                let (listener, file) = host.listen(&path, false, access)?;
                Self::listening(listener, Some(file))
            }
            Place::Inherited { fd, listens: true } => Self::listening(fd.into(), None),
            Place::Inherited { fd, listens: false } => Ok(Self::Connected(fd.into())),
            #[cfg(feature = "xen")]
            Place::Xen(device) => Ok(Self::Xen(address(device))),
            #[cfg(not(feature = "xen"))]
            Place::Xen(_) => bail!("this build of ringway serves no guests of Xen"),
        }
    }

    fn listening(listener: UnixListener, file: Option<SocketFile>) -> anyhow::Result<Self> {
        // A front-end may be gone again before it is accepted.
        listener.set_nonblocking(true)?;
        Ok(Self::Listener(listener, file))
    }

    /// The device, if it is one of a Xen guest: its folder in xenstore.
    pub(crate) fn device(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "xen")]
            Self::Xen(address) => Some(&address.back),
            _ => None,
        }
    }

    /// The socket file, if there is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Listener(_, Some(file)) => Some(file.path()),
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
