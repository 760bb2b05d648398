//! Xenstore: a small tree of texts that domains share, and watches on it.
//!
//! ```text
//! let mut store = Xenstore::open(access)?;
//! store.watch("backend/vbd3", "disks")?;
//! store.transaction(|store, tx| store.write(tx, "backend/vbd3/1/51712/state", "2"))?;
//! poll(store.fd()); let changed = store.events()?;     // each path and token once
//! ```
//!
//! Source: `xen/include/public/io/xs_wire.h` (MIT): the header of a message and its types. The same
//! bytes go through the daemon's Unix socket and through the kernel, `/dev/xen/xenbus`.

mod place;

use super::access::{Access, Named, need};
pub use place::XENSTORES;
pub(super) use place::connect;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// `XENSTORE_PAYLOAD_MAX`: a longer message ends the connection.
const PAYLOAD_MAX: usize = 4096;

/// How long the daemon may take to answer.
const ANSWER_MAX: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// How often a transaction is begun again because somebody else was faster.
const TRANSACTION_TRIES: u32 = 100;

/// Changes that are not taken yet. More are dropped, and the connection says that it is to be looked
/// at everything: a flood of watches costs no memory (hazard B14).
const EVENTS_MAX: usize = 1024;

// `enum xsd_sockmsg_type`.
const DIRECTORY: u32 = 1;
const READ: u32 = 2;
const WATCH: u32 = 4;
const TRANSACTION_START: u32 = 6;
const TRANSACTION_END: u32 = 7;
const WRITE: u32 = 11;
const RM: u32 = 13;
const WATCH_EVENT: u32 = 15;
const ERROR: u32 = 16;

/// Why something in the store cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nobody listens.
    #[error("no xenstore: {0}. Is this the control domain of a Xen host, and xenstored running?")]
    NotThere(io::Error),
    /// The connection is beyond use.
    #[error("the connection to xenstore is broken: {0}")]
    Broken(#[from] io::Error),
    /// The daemon says no.
    #[error("xenstore refuses '{path}': {name}")]
    Refused {
        /// What it is about.
        path: String,
        /// `EACCES`, `EINVAL`, …
        name: String,
    },
    /// It holds no text.
    #[error("'{0}' in xenstore is not text")]
    NotText(String),
    /// Longer than a message.
    #[error("'{0}' is too long for xenstore")]
    TooLong(String),
}

impl StoreError {
    /// True if the connection is over; otherwise it is about one key.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::NotThere(_) | Self::Broken(_))
    }

    pub(super) fn is(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { name, .. } if name == wanted)
    }
}

/// One transaction; [`Tx::NONE`] is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tx(u32);

impl Tx {
    /// Each operation by itself.
    pub const NONE: Self = Self(0);
}

/// Something changed below a watched path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What changed.
    pub path: String,
    /// The token of the watch.
    pub token: String,
}

/// What has changed since the last look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Each path and token once, in the order they came first.
    pub list: Vec<Change>,
    /// There were more than could be kept: look at everything.
    pub missed: bool,
}

/// A connection to the store. Watches end with it.
#[derive(Debug)]
pub struct Xenstore {
    /// A socket or a device: both are read and written.
    line: File,
    next_request: u32,
    events: VecDeque<Change>,
    missed: bool,
}

/// `struct xsd_sockmsg`, and what follows it.
struct Message {
    kind: u32,
    request: u32,
    body: Vec<u8>,
}

impl Xenstore {
    /// Connects to the store of this host.
    ///
    /// # Errors
    /// [`StoreError::NotThere`].
    pub fn open(access: &dyn Access) -> Result<Self, StoreError> {
        need(access, Named::Store).map(Self::over).map_err(StoreError::NotThere)
    }

    /// Over a connected socket, or the device of the kernel.
    #[must_use]
    pub fn over(line: OwnedFd) -> Self {
        Self { line: line.into(), next_request: 0, events: VecDeque::new(), missed: false }
    }

    /// Readable when something has changed.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }

    /// The text at `path`; `None` if there is none.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(&mut self, tx: Tx, path: &str) -> Result<Option<String>, StoreError> {
        match self.ask(READ, tx, path, &[path.as_bytes(), b"\0"]) {
            Ok(body) => {
                String::from_utf8(body).map(Some).map_err(|_| StoreError::NotText(path.into()))
            }
            Err(error) if error.is("ENOENT") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes `text` to `path`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write(&mut self, tx: Tx, path: &str, text: &str) -> Result<(), StoreError> {
        self.ask(WRITE, tx, path, &[path.as_bytes(), b"\0", text.as_bytes()]).map(drop)
    }

    /// Removes `path` and all below it; nothing there is as good.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn remove(&mut self, tx: Tx, path: &str) -> Result<(), StoreError> {
        match self.ask(RM, tx, path, &[path.as_bytes(), b"\0"]) {
            Err(error) if error.is("ENOENT") => Ok(()),
            done => done.map(drop),
        }
    }

    /// The names below `path`; none if it is not there.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn list(&mut self, tx: Tx, path: &str) -> Result<Vec<String>, StoreError> {
        match self.ask(DIRECTORY, tx, path, &[path.as_bytes(), b"\0"]) {
            Ok(body) => Ok(texts(&body)),
            Err(error) if error.is("ENOENT") => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Asks to be told of changes at and below `path`; the first is told at once. Watching it again
    /// changes nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let parts = [path.as_bytes(), b"\0", token.as_bytes(), b"\0"];
        match self.ask(WATCH, Tx::NONE, path, &parts) {
            Err(error) if error.is("EEXIST") => Ok(()),
            done => done.map(drop),
        }
    }

    /// Carries out `body` in one transaction, and again if somebody else changed the same: all of it
    /// happens at once, or nothing.
    ///
    /// # Errors
    /// [`StoreError`], also that others were faster a hundred times.
    pub fn transaction<T>(
        &mut self,
        mut body: impl FnMut(&mut Self, Tx) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut tries = 0;
        loop {
            let tx = self.ask(TRANSACTION_START, Tx::NONE, "transaction", &[b"\0"])?;
            let number = texts(&tx).first().and_then(|text| text.parse().ok());
            let tx = Tx(number.ok_or_else(|| broken("it begins no transaction"))?);
            let outcome = body(self, tx);
            let word: &[u8] = if outcome.is_ok() { b"T\0" } else { b"F\0" };
            let ended = self.ask(TRANSACTION_END, tx, "transaction", &[word]);
            tries += 1;
            match (outcome, ended) {
                (Ok(_), Err(error)) if error.is("EAGAIN") && tries < TRANSACTION_TRIES => {}
                (Ok(value), Ok(_)) => return Ok(value),
                // Others have been there: what `body` saw may not have been.
                (Err(error), _) if error.is("EAGAIN") && tries < TRANSACTION_TRIES => {}
                (Err(error), _) | (Ok(_), Err(error)) => return Err(error),
            }
        }
    }

    /// What has changed. Does not wait.
    ///
    /// # Errors
    /// [`StoreError::Broken`].
    pub fn events(&mut self) -> Result<Changes, StoreError> {
        while self.is_readable(&Timespec { tv_sec: 0, tv_nsec: 0 })? {
            let message = self.receive()?;
            if message.kind != WATCH_EVENT {
                return Err(broken("it answers what nobody asked").into());
            }
            self.keep(&message.body);
        }
        let list = self.events.drain(..).collect();
        Ok(Changes { list, missed: std::mem::take(&mut self.missed) })
    }

    /// True if [`Xenstore::events`] would find something that came between answers, so that its
    /// descriptor is not readable for it.
    #[must_use]
    pub fn has_events(&self) -> bool {
        self.missed || !self.events.is_empty()
    }

    /// Keeps a change, unless it is known already.
    fn keep(&mut self, body: &[u8]) {
        let mut texts = texts(body).into_iter();
        let (Some(path), Some(token)) = (texts.next(), texts.next()) else { return };
        let change = Change { path, token };
        if self.events.contains(&change) {
            return;
        }
        if self.events.len() == EVENTS_MAX {
            self.missed = true;
            return;
        }
        self.events.push_back(change);
    }

    fn ask(
        &mut self,
        kind: u32,
        tx: Tx,
        path: &str,
        parts: &[&[u8]],
    ) -> Result<Vec<u8>, StoreError> {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        if len > PAYLOAD_MAX {
            return Err(StoreError::TooLong(path.into()));
        }
        self.next_request = self.next_request.wrapping_add(1);
        let request = self.next_request;
        let mut bytes = Vec::with_capacity(16 + len);
        // At most PAYLOAD_MAX.
        #[allow(clippy::cast_possible_truncation)]
        for word in [kind, request, tx.0, len as u32] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        self.line.write_all(&bytes)?;
        loop {
            if !self.is_readable(&ANSWER_MAX)? {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            let message = self.receive()?;
            match message.kind {
                WATCH_EVENT => self.keep(&message.body),
                // The kernel answers this one by itself, and without its number.
                WATCH if kind == WATCH && message.request == 0 => return Ok(message.body),
                _ if message.request != request => {
                    return Err(broken("it answers what nobody asked").into());
                }
                ERROR => {
                    let name = texts(&message.body).into_iter().next().unwrap_or_default();
                    return Err(StoreError::Refused { path: path.into(), name });
                }
                answered if answered == kind => return Ok(message.body),
                _ => return Err(broken("it answers something else").into()),
            }
        }
    }

    fn receive(&mut self) -> io::Result<Message> {
        let mut header = [0; 16];
        self.fill(&mut header)?;
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at * 4 + byte]));
        let len = word(3) as usize;
        if len > PAYLOAD_MAX {
            return Err(broken("it sends more than a message may hold"));
        }
        let mut body = vec![0; len];
        self.fill(&mut body)?;
        Ok(Message { kind: word(0), request: word(1), body })
    }

    fn fill(&mut self, mut rest: &mut [u8]) -> io::Result<()> {
        while !rest.is_empty() {
            if !self.is_readable(&ANSWER_MAX)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.line.read(rest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => rest = &mut rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn is_readable(&self, timeout: &Timespec) -> io::Result<bool> {
        let fd = self.fd();
        loop {
            match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(timeout)) {
                Ok(count) => return Ok(count > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Texts with a zero byte between them, or behind each.
fn texts(body: &[u8]) -> Vec<String> {
    let body = body.strip_suffix(b"\0").unwrap_or(body);
    if body.is_empty() {
        return Vec::new();
    }
    body.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

#[cfg(test)]
mod tests;
