//! The line to one client, or to another process: reading can be ended from outside, writing has an end.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connected socket.
pub(crate) struct Connection {
    stream: UnixStream,
    /// Readable once the client is given up.
    leave: Arc<OwnedFd>,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, leave: Arc<OwnedFd>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, leave })
    }

    /// Writes all of it, or gives up: also a client that reads a byte now and then.
    pub(crate) fn write_within(&self, bytes: &[u8], timeout: Duration) -> io::Result<()> {
        let begun = Instant::now();
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::write(&self.stream, rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = timeout.saturating_sub(begun.elapsed());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    self.wait(PollFlags::OUT, Some(left))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until `bell` rings; fails if the client has gone or is given up.
    pub(crate) fn wait_for(&self, bell: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let leave = PollFd::new(&*self.leave, PollFlags::IN);
            // What the client says is not read; that it has gone is told unasked.
            let stream = PollFd::new(&self.stream, PollFlags::empty());
            let mut polled = [leave, stream, PollFd::new(&bell, PollFlags::IN)];
            match poll(&mut polled, None) {
                Ok(_) if !polled[0].revents().is_empty() || !polled[1].revents().is_empty() => {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                Ok(_) if !polled[2].revents().is_empty() => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until the stream is ready or the time is over; fails if the client is given up.
    fn wait(&self, ready: PollFlags, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        let leave = PollFd::new(&*self.leave, PollFlags::IN);
        let mut polled = [leave, PollFd::new(&self.stream, ready)];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) if polled[0].revents().is_empty() => Ok(()),
            Ok(_) => Err(io::ErrorKind::ConnectionAborted.into()),
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for &Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.wait(PollFlags::IN, None)?;
            match rustix::io::read(&self.stream, &mut *buffer) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                got => return Ok(got?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn line() -> (Connection, UnixStream, Arc<OwnedFd>) {
        let (ours, its) = UnixStream::pair().unwrap();
        let leave = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        (Connection::new(ours, Arc::clone(&leave)).unwrap(), its, leave)
    }

    #[test]
    fn one_who_does_not_read_is_given_up() {
        let (line, _its, _leave) = line();
        let begun = Instant::now();
        let error = line.write_within(&vec![0; 16 << 20], Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn reading_ends_when_told() {
        let (line, its, leave) = line();
        rustix::io::write(&its, b"abc").unwrap();
        let mut buffer = [0; 8];
        assert_eq!((&line).read(&mut buffer).unwrap(), 3);
        let reader = std::thread::spawn(move || (&line).read(&mut buffer).map_err(|e| e.kind()));
        rustix::io::write(&*leave, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(reader.join().unwrap(), Err(io::ErrorKind::ConnectionAborted));
    }
}
