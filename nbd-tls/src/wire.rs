//! A connected socket, read and written without waiting: also as the other side of TLS.

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;

/// A socket that does not block.
#[derive(Clone, Copy, Debug)]
pub struct Wire<'a>(pub BorrowedFd<'a>);

impl Read for Wire<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(self.0, &mut *bytes) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                got => return Ok(got?),
            }
        }
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            let nothing = &mut SendAncillaryBuffer::default();
            match sendmsg(self.0, &[IoSlice::new(bytes)], nothing, flags) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
