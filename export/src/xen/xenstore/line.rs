//! What bytes go through: the daemon's Unix socket, or the kernel's device.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// One of the two.
#[derive(Debug)]
pub(super) enum Line {
    Socket(UnixStream),
    Device(File),
}

impl Line {
    /// A daemon's socket, or a device of the kernel.
    pub(super) fn open(place: &Path) -> io::Result<Self> {
        if place.metadata()?.file_type().is_socket() {
            return Ok(Self::Socket(UnixStream::connect(place)?));
        }
        Ok(Self::Device(OpenOptions::new().read(true).write(true).open(place)?))
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.read(into),
            Self::Device(file) => file.read(into),
        }
    }

    pub(super) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Socket(stream) => stream.write_all(bytes),
            // The kernel takes a whole message at a time.
            Self::Device(file) => file.write_all(bytes),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(stream) => stream.as_fd(),
            Self::Device(file) => file.as_fd(),
        }
    }
}
