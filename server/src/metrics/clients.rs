//! Clients that read metrics: few at a time, each with one request, a bounded one, and little time.

use super::http::{REQUEST_MAX, Response, answer, judge};
use super::names::Names;
use super::text::Format;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Clients at a time. One more takes the place of one that has not asked yet, or of the oldest.
const CLIENTS_MAX: usize = 16;
/// How long a client may take to ask and to read its answer.
const TIME: Duration = Duration::from_secs(10);

struct Client {
    stream: OwnedFd,
    begun: Instant,
    asked: Vec<u8>,
    /// The answer, and how much of it was sent.
    answer: Option<(Response, usize)>,
}

/// What becomes of a client.
#[derive(PartialEq, Eq)]
enum Then {
    Stays,
    Goes,
}

/// All that are there, and the names they may use.
#[derive(Default)]
pub(super) struct Clients(Vec<Client>, Names);

impl Clients {
    /// None yet.
    pub(super) fn new(names: Names) -> Self {
        Self(Vec::new(), names)
    }

    /// Takes one more.
    pub(super) fn add(&mut self, stream: OwnedFd) {
        if self.0.len() >= CLIENTS_MAX {
            // In the order they came.
            let at = self.0.iter().position(|client| client.answer.is_none());
            self.0.remove(at.unwrap_or(0));
        }
        let asked = Vec::new();
        self.0.push(Client { stream, begun: Instant::now(), asked, answer: None });
    }

    /// Waits until one of them can go on. Whether `stop` rings, and whether another one comes.
    pub(super) fn wait(
        &self,
        stop: BorrowedFd<'_>,
        listener: Option<BorrowedFd<'_>>,
    ) -> (bool, bool) {
        let mut polled = vec![PollFd::new(&stop, PollFlags::IN)];
        polled.extend(self.0.iter().map(|client| {
            let flags = match client.answer {
                Some(_) => PollFlags::OUT,
                None => PollFlags::IN,
            };
            PollFd::new(&client.stream, flags)
        }));
        polled.extend(listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        let left = self.0.iter().map(|client| TIME.saturating_sub(client.begun.elapsed())).min();
        // One that is out of breath looks again soon.
        let breath = listener.is_none().then_some(Duration::from_millis(100));
        let timeout = left.into_iter().chain(breath).min();
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        // Interrupted is as good as woken: who is not ready says so.
        let _ = poll(&mut polled, timeout.as_ref());
        let rings = |at: usize| polled.get(at).is_some_and(|fd| !fd.revents().is_empty());
        (rings(0), rings(1 + self.0.len()))
    }

    /// Goes on with each that can, and lets those go that are done, have gone or took too long.
    pub(super) fn attend(&mut self, metrics: &mut dyn FnMut(Format) -> Arc<String>) {
        let Self(clients, names) = self;
        clients.retain_mut(|client| {
            client.begun.elapsed() < TIME && client.attend(names, metrics) == Then::Stays
        });
    }
}

impl Client {
    fn attend(&mut self, names: &Names, metrics: &mut dyn FnMut(Format) -> Arc<String>) -> Then {
        if self.answer.is_none() && self.read(names, metrics) == Then::Goes {
            return Then::Goes;
        }
        self.write()
    }

    fn read(&mut self, names: &Names, metrics: &mut dyn FnMut(Format) -> Arc<String>) -> Then {
        let mut buffer = [0; 2048];
        let room = (REQUEST_MAX - self.asked.len()).min(buffer.len());
        match rustix::io::read(self.stream.as_fd(), &mut buffer[..room]) {
            Ok(0) => return Then::Goes,
            Ok(got) => self.asked.extend_from_slice(&buffer[..got]),
            Err(Errno::AGAIN | Errno::INTR) => return Then::Stays,
            Err(_) => return Then::Goes,
        }
        self.answer = answer(judge(&self.asked, names), metrics).map(|answer| (answer, 0));
        Then::Stays
    }

    fn write(&mut self) -> Then {
        let Some((Response { head, body }, sent)) = &mut self.answer else { return Then::Stays };
        loop {
            let rest = match sent.checked_sub(head.len()) {
                None => &head[*sent..],
                Some(at) => &body.as_bytes()[at..],
            };
            if rest.is_empty() {
                return Then::Goes;
            }
            match rustix::io::write(self.stream.as_fd(), rest) {
                Ok(0) => return Then::Goes,
                Ok(written) => *sent += written,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Then::Stays,
                Err(_) => return Then::Goes,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    const ASK: &[u8] = b"GET /metrics HTTP/1.1\r\n\r\n";

    fn client(clients: &mut Clients) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        clients.add(ours.into());
        theirs
    }

    fn attend(clients: &mut Clients, text: &str) {
        clients.attend(&mut |_| Arc::new(text.into()));
    }

    #[test]
    fn a_request_in_pieces_is_answered_once_it_is_whole() {
        let mut clients = Clients::default();
        let mut one = client(&mut clients);
        for byte in ASK {
            attend(&mut clients, "soon");
            one.write_all(&[*byte]).unwrap();
        }
        attend(&mut clients, "here");
        let mut text = String::new();
        one.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("\r\n\r\nhere") && clients.0.is_empty(), "{text}");
    }

    #[test]
    fn those_who_only_connect_make_room_and_not_those_who_read() {
        let mut clients = Clients::default();
        let mut reader = client(&mut clients);
        reader.write_all(ASK).unwrap();
        // More than the socket takes at once.
        let long = "x".repeat(4 << 20);
        attend(&mut clients, &long);
        let mut idle: Vec<_> = (0..100).map(|_| client(&mut clients)).collect();
        attend(&mut clients, "");
        assert_eq!(clients.0.len(), CLIENTS_MAX);
        let mut all = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while all.len() < long.len() {
            let got = reader.read(&mut buffer).unwrap();
            assert!(got > 0, "given up after {} bytes", all.len());
            all.extend_from_slice(&buffer[..got]);
            attend(&mut clients, "");
        }
        assert_eq!(idle[0].read(&mut buffer).unwrap(), 0, "the oldest has made room");
        // One that took too long goes.
        clients.0.iter_mut().for_each(|client| client.begun -= TIME);
        attend(&mut clients, "");
        assert_eq!(clients.0.len(), 0);
        assert_eq!(idle[99].read(&mut buffer).unwrap(), 0);
    }
}
