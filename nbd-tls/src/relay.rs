//! Between a peer that speaks TLS and the worker that has a connection to it: a thread that has the keys
//! of the connection, and a pair of sockets of which the worker has the other end.
//!
//! ```text
//! peer ◀── TLS ──▶ relay ◀── plain ──▶ worker
//! ```
//!
//! Neither side is read faster than the other takes it: the relay has 64 KiB of each way.

use crate::wire::Wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustls::Connection;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Plain bytes of each way.
const ROOM: usize = 64 << 10;

/// How long a client may take for its last answers.
pub const FAREWELL: Duration = Duration::from_secs(2);

/// How long a server may take to read what was sent, and to close its end.
const LAST_REQUESTS: Duration = Duration::from_secs(5);

/// The most of a client that has gone that is looked at: more than sockets keep.
const REST_MAX: usize = 64 << 20;

/// Who is at the other end of TLS.
#[derive(Clone, Copy, Debug)]
pub enum Peer {
    /// It gets what the worker has sent, for [`FAREWELL`] at most. Then the connection is closed. Of one that has gone
    /// while the worker takes nothing, what the worker has not got is dropped, unless this says that it may end with
    /// the client's word that it goes: so the worker's side hears of the end at once, as of that of a plain socket.
    Client(fn(&[u8]) -> bool),
    /// The worker's end is closed once the server has closed its own, a few seconds later at most: so who
    /// waits for that knows that the server has taken all that was sent, and does nothing of it later.
    Server,
}

/// Carries a connection whose handshakes are over. Gives the worker's end, and the thread, which ends
/// soon after that is closed.
///
/// # Errors
/// What the host says to sockets and threads.
pub fn start(
    tls: Box<Connection>,
    peer: OwnedFd,
    who: Peer,
) -> io::Result<(OwnedFd, JoinHandle<()>)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (worker, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let relay = Relay {
        tls,
        peer,
        worker,
        who,
        peer_shut: false,
        room: vec![0; ROOM].into(),
        inbound: vec![0; ROOM].into(),
        waiting: 0..0,
        peer_done: false,
        worker_shut: false,
        worker_done: None,
    };
    let thread = std::thread::Builder::new().name("nbd-tls".into());
    Ok((theirs, thread.spawn(move || relay.run())?))
}

struct Relay {
    tls: Box<Connection>,
    peer: OwnedFd,
    worker: OwnedFd,
    who: Peer,
    /// A server knows that nothing more comes.
    peer_shut: bool,
    room: Box<[u8]>,
    inbound: Box<[u8]>,
    /// What of `inbound` the worker has not taken.
    waiting: std::ops::Range<usize>,
    /// The peer sends nothing any more.
    peer_done: bool,
    worker_shut: bool,
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
            let inward = self.feed_worker()? | self.hear_peer()?;
            let outward = self.hear_worker()? | self.feed_peer()?;
            if !inward && !outward {
                break;
            }
        }
        if self.peer_done && self.waiting.is_empty() && !self.worker_shut {
            self.worker_shut = true;
            // It may have gone itself.
            let _ = shutdown(&self.worker, Shutdown::Write);
        }
        match self.worker_done {
            Some(_) if !self.tls.wants_write() => self.see_off(),
            _ => Ok(()),
        }
    }

    /// All that the worker has sent is on its way.
    fn see_off(&mut self) -> Result<(), Over> {
        if let Peer::Client(_) = self.who {
            return Err(Over);
        }
        if !std::mem::replace(&mut self.peer_shut, true) {
            let _ = shutdown(&self.peer, Shutdown::Write);
        }
        loop {
            match Wire(self.peer.as_fd()).read(&mut self.room) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Ok(1..) => {}
                _ => return Err(Over),
            }
        }
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
                    self.peer_done = true;
                    self.waiting = 0..0;
                }
            }
            moved = true;
        }
        Ok(moved)
    }

    /// True if there is something for the worker.
    fn hear_peer(&mut self) -> Result<bool, Over> {
        if !self.waiting.is_empty() || self.peer_done {
            return Ok(false);
        }
        match self.tls.reader().read(&mut self.inbound) {
            Ok(0) => self.peer_done = true,
            Ok(got) => {
                self.waiting = 0..got;
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return self.receive();
            }
            // It has gone without a word of TLS.
            Err(_) => self.peer_done = true,
        }
        Ok(true)
    }

    /// True if something came.
    fn receive(&mut self) -> Result<bool, Over> {
        match self.tls.read_tls(&mut Wire(self.peer.as_fd())) {
            Ok(0) => self.peer_done = true,
            Ok(_) => {
                if let Err(error) = self.tls.process_new_packets() {
                    tracing::debug!("TLS of a peer makes no sense: {error}");
                    // It is told why, if it still listens.
                    let _ = self.tls.write_tls(&mut Wire(self.peer.as_fd()));
                    return Err(Over);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(_) => return Err(Over),
        }
        Ok(true)
    }

    /// True if there is something for the peer.
    fn hear_worker(&mut self) -> Result<bool, Over> {
        if self.tls.wants_write() || self.worker_done.is_some() {
            return Ok(false);
        }
        match Wire(self.worker.as_fd()).read(&mut self.room) {
            Ok(0) => {
                self.worker_done = Some(Instant::now());
                // What the peer still sends is for nobody, and would keep this thread from its end.
                (self.peer_done, self.worker_shut, self.waiting) = (true, true, 0..0);
                self.tls.send_close_notify();
            }
            // All that waited has been sent, and its buffers are as large.
            Ok(got) => self.tls.writer().write_all(&self.room[..got]).map_err(|_| Over)?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(_) => return Err(Over),
        }
        Ok(true)
    }

    /// True if the peer has taken something.
    fn feed_peer(&mut self) -> Result<bool, Over> {
        let mut moved = false;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Wire(self.peer.as_fd())) {
                Ok(_) => moved = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(Over),
            }
        }
        Ok(moved)
    }

    /// Sleeps until something can be moved.
    fn wait(&mut self) -> Result<(), Over> {
        let limit = match self.who {
            Peer::Client(_) => FAREWELL,
            Peer::Server => LAST_REQUESTS,
        };
        let left = self.worker_done.map(|since| limit.saturating_sub(since.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Over);
        }
        let (mut peer, mut worker) = (PollFlags::empty(), PollFlags::empty());
        if self.peer_shut || self.waiting.is_empty() && !self.peer_done {
            peer |= PollFlags::IN;
        }
        let says_goodbye = match self.who {
            Peer::Client(says_goodbye) if !self.waiting.is_empty() && !self.peer_done => {
                peer |= PollFlags::RDHUP;
                Some(says_goodbye)
            }
            _ => None,
        };
        if self.tls.wants_write() {
            peer |= PollFlags::OUT;
        } else if self.worker_done.is_none() {
            worker |= PollFlags::IN;
        }
        if !self.waiting.is_empty() {
            worker |= PollFlags::OUT;
        }
        // Who is not waited for is left out: that it has gone would be told again and again.
        let both = [(&self.peer, peer), (&self.worker, worker)];
        let asked = both.iter().filter(|(_, flags)| !flags.is_empty());
        let mut polled: Vec<_> = asked.map(|&(fd, flags)| PollFd::new(fd, flags)).collect();
        let timeout = left.map(Timespec::try_from).transpose().map_err(|_| Over)?;
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return Err(Over),
        }
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        // It is the first, as it is waited for.
        let has_gone = polled.first().is_some_and(|peer| peer.revents().intersects(ends));
        if let Some(says_goodbye) = says_goodbye.filter(|_| has_gone) {
            self.hear_rest(says_goodbye);
        }
        Ok(())
    }

    /// The client has gone, and the worker takes nothing.
    fn hear_rest(&mut self, says_goodbye: fn(&[u8]) -> bool) {
        let mut rest = self.inbound[self.waiting.clone()].to_vec();
        while rest.len() < REST_MAX {
            match self.tls.reader().read(&mut self.room) {
                Ok(got @ 1..) => rest.extend_from_slice(&self.room[..got]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let got = self.tls.read_tls(&mut Wire(self.peer.as_fd()));
                    if !matches!(got, Ok(1..)) || self.tls.process_new_packets().is_err() {
                        break;
                    }
                }
                _ => break,
            }
        }
        self.peer_done = true;
        self.waiting = if says_goodbye(&rest) { 0..rest.len() } else { 0..0 };
        self.inbound = rest.into();
    }
}
