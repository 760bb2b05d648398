//! Where the store is: the daemon's Unix socket, or the kernel's device.

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fcntl_setfl, openat, statat};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Where a store may be reached, best first: the daemon itself, then through the kernel.
pub const XENSTORES: [&str; 3] =
    ["/run/xenstored/socket", "/var/run/xenstored/socket", "/dev/xen/xenbus"];

/// Connects to the store at `asked`, or wherever it answers.
///
/// # Errors
/// What the host says, with the place.
pub(crate) fn connect(asked: Option<&Path>) -> io::Result<OwnedFd> {
    if let Some(place) = asked {
        return at(place).map_err(|error| with_place(place, &error));
    }
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in XENSTORES.map(Path::new) {
        match at(place) {
            Ok(line) => return Ok(line),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => last = with_place(place, &error),
        }
    }
    Err(last)
}

fn with_place(place: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", place.display()))
}

/// A daemon's socket, or a device of the kernel. Does not wait for a daemon that accepts nobody.
fn at(place: &Path) -> io::Result<OwnedFd> {
    if FileType::from_raw_mode(statat(CWD, place, AtFlags::empty())?.st_mode) != FileType::Socket {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        return Ok(openat(CWD, place, flags, Mode::empty())?);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(place)?)?;
    fcntl_setfl(&socket, OFlags::empty())?;
    Ok(socket)
}
