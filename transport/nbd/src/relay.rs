//! Between a client that speaks TLS and the worker that serves it: a thread that has the keys of the
//! connection, and a pair of sockets of which the worker has the other end.
//!
//! ```text
//! client ◀── TLS ──▶ relay ◀── plain ──▶ worker
//! ```
//!
//! Neither side is read faster than the other takes it: the relay has 64 KiB of each way.

use crate::wire::Wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustls::ServerConnection;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Plain bytes of each way.
const ROOM: usize = 64 << 10;

/// How long a client may take for its last answers.
pub(crate) const FAREWELL: Duration = Duration::from_secs(2);

/// Carries a connection whose handshakes are over. Gives the worker's end, and the thread, which ends
/// soon after that is closed.
///
/// # Errors
/// What the host says to sockets and threads.
pub(crate) fn start(
    tls: Box<ServerConnection>,
    client: OwnedFd,
) -> io::Result<(OwnedFd, JoinHandle<()>)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (worker, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let relay = Relay {
        tls,
        client,
        worker,
        room: vec![0; ROOM].into(),
        inbound: vec![0; ROOM].into(),
        waiting: 0..0,
        client_done: false,
        told_worker: false,
        worker_done: None,
    };
    let thread = std::thread::Builder::new().name("nbd-tls".into());
    Ok((theirs, thread.spawn(move || relay.run())?))
}

struct Relay {
    tls: Box<ServerConnection>,
    client: OwnedFd,
    worker: OwnedFd,
    room: Box<[u8]>,
    inbound: Box<[u8]>,
    /// What of `inbound` the worker has not taken.
    waiting: std::ops::Range<usize>,
    /// The client sends nothing any more.
    client_done: bool,
    told_worker: bool,
    /// Since when the worker sends nothing any more.
    worker_done: Option<Instant>,
}

/// The connection is over.
struct Over;

impl Relay {
    /// Until one side has gone and the other has all that there was.
    fn run(mut self) {
        while self.turn().is_ok() && self.wait().is_ok() {}
    }

    /// Moves what can be moved.
    fn turn(&mut self) -> Result<(), Over> {
        loop {
            let inward = self.feed_worker()? | self.hear_client()?;
            let outward = self.hear_worker()? | self.feed_client()?;
            if !inward && !outward {
                break;
            }
        }
        if self.client_done && self.waiting.is_empty() && !self.told_worker {
            self.told_worker = true;
            // It may have gone itself.
            let _ = shutdown(&self.worker, Shutdown::Write);
        }
        if self.worker_done.is_some() && !self.tls.wants_write() { Err(Over) } else { Ok(()) }
    }

    /// True if the worker has taken something.
    fn feed_worker(&mut self) -> Result<bool, Over> {
        let mut moved = false;
        while !self.waiting.is_empty() && self.worker_done.is_none() {
            match Wire(self.worker.as_fd()).write(&self.inbound[self.waiting.clone()]) {
                Ok(sent) => self.waiting.start += sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(moved),
                // It takes nothing more, and may have sent something before.
                Err(_) => {
                    self.client_done = true;
                    self.waiting = 0..0;
                }
            }
            moved = true;
        }
        Ok(moved)
    }

    /// True if there is something for the worker.
    fn hear_client(&mut self) -> Result<bool, Over> {
        if !self.waiting.is_empty() || self.client_done {
            return Ok(false);
        }
        match self.tls.reader().read(&mut self.inbound) {
            Ok(0) => self.client_done = true,
            Ok(got) => {
                self.waiting = 0..got;
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return self.receive();
            }
            // It has gone without a word of TLS.
            Err(_) => self.client_done = true,
        }
        Ok(true)
    }

    /// True if something came.
    fn receive(&mut self) -> Result<bool, Over> {
        match self.tls.read_tls(&mut Wire(self.client.as_fd())) {
            Ok(0) => self.client_done = true,
            Ok(_) => {
                if let Err(error) = self.tls.process_new_packets() {
                    tracing::debug!("TLS of a client makes no sense: {error}");
                    // It is told why, if it still listens.
                    let _ = self.tls.write_tls(&mut Wire(self.client.as_fd()));
                    return Err(Over);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(_) => return Err(Over),
        }
        Ok(true)
    }

    /// True if there is something for the client.
    fn hear_worker(&mut self) -> Result<bool, Over> {
        if self.tls.wants_write() || self.worker_done.is_some() {
            return Ok(false);
        }
        match Wire(self.worker.as_fd()).read(&mut self.room) {
            Ok(0) => {
                self.worker_done = Some(Instant::now());
                // What the client still sends is for nobody, and would keep this thread from its end.
                (self.client_done, self.told_worker, self.waiting) = (true, true, 0..0);
                self.tls.send_close_notify();
            }
            // All that waited has been sent, and its buffers are as large.
            Ok(got) => self.tls.writer().write_all(&self.room[..got]).map_err(|_| Over)?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(_) => return Err(Over),
        }
        Ok(true)
    }

    /// True if the client has taken something.
    fn feed_client(&mut self) -> Result<bool, Over> {
        let mut moved = false;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Wire(self.client.as_fd())) {
                Ok(_) => moved = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(Over),
            }
        }
        Ok(moved)
    }

    /// Sleeps until something can be moved.
    fn wait(&self) -> Result<(), Over> {
        let left = self.worker_done.map(|since| FAREWELL.saturating_sub(since.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Over);
        }
        let (mut client, mut worker) = (PollFlags::empty(), PollFlags::empty());
        if self.waiting.is_empty() && !self.client_done {
            client |= PollFlags::IN;
        }
        if self.tls.wants_write() {
            client |= PollFlags::OUT;
        } else if self.worker_done.is_none() {
            worker |= PollFlags::IN;
        }
        if !self.waiting.is_empty() {
            worker |= PollFlags::OUT;
        }
        // Who is not waited for is left out: that it has gone would be told again and again.
        let both = [(&self.client, client), (&self.worker, worker)];
        let asked = both.iter().filter(|(_, flags)| !flags.is_empty());
        let mut polled: Vec<_> = asked.map(|&(fd, flags)| PollFd::new(fd, flags)).collect();
        let timeout = left.map(Timespec::try_from).transpose().map_err(|_| Over)?;
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(_) => Err(Over),
        }
    }
}
