//! Where an export has data: what a server says of `base:allocation`, asked and judged before the export
//! is used.

use crate::connect::{Deadline, Patient};
use crate::handshake::Negotiated;
use ringway_nbd_words::{
    REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command, state,
};
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What one question is about, at most.
const WINDOW: u64 = 1 << 30;

/// The longest chunk that is read: 128 Ki extents, as many as QEMU tells at once, are 1 MiB.
const CHUNK_MAX: u32 = 16 << 20;

/// Chunks of one reply. Honest servers send one, and an error.
const CHUNKS_MAX: u32 = 16;

/// Ranges of data that are kept, 16 MiB of them: what lies behind the last one counts as data.
const RANGES_MAX: usize = 1 << 20;

/// How long a server may take to answer one question.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long all questions may take: what was not told by then counts as data.
const LIMIT: Duration = Duration::from_secs(60);

/// Which parts of an export may hold something else than zeroes.
///
/// # Invariants
/// Ranges are ascending, none is empty, and no two of them touch. What lies behind `known` is in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    data: Vec<Range<u64>>,
    known: u64,
    bytes: u64,
}

/// Why it is not known where an export has data. The connection is of no use then.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// What the host says.
    #[error("the server does not say where it has data: {0}")]
    Io(#[from] io::Error),
    /// The server breaks the rules.
    #[error("the server does not keep to the protocol where it says where it has data: {0}")]
    Malformed(&'static str),
}

use AllocationError::Malformed;

impl Allocation {
    /// Asks for all of the export by a connection that nothing else is asked of.
    pub(crate) fn ask(socket: &File, facts: &Negotiated) -> Result<Self, AllocationError> {
        Self::ask_within(socket, facts, (TIMEOUT, LIMIT))
    }

    /// The same with times for one answer, and for all.
    fn ask_within(
        socket: &File,
        facts: &Negotiated,
        (each, all): (Duration, Duration),
    ) -> Result<Self, AllocationError> {
        let deadline = Deadline::new(each, "for an answer");
        let mut stream = Patient { socket: socket.try_clone()?, deadline };
        let mut found = Self { data: Vec::new(), known: 0, bytes: facts.bytes };
        let (begun, mut cookie) = (Instant::now(), 0);
        let context = facts.block_status.unwrap_or(0);
        while found.known < found.bytes && found.data.len() < RANGES_MAX && begun.elapsed() < all {
            cookie += 1;
            stream.deadline = Deadline::new(each, "for an answer");
            let asked = found.known..found.bytes.min(found.known + WINDOW);
            question(&mut stream, cookie, &asked)?;
            let Some(extents) = answer(&mut stream, cookie, context)? else { break };
            found.take(&extents, asked.end)?;
        }
        let unknown = found.known..found.bytes;
        found.extend(unknown);
        Ok(found)
    }

    /// Takes what a server says of what begins at `known`, asked for as far as `end`.
    fn take(&mut self, extents: &[(u32, u32)], end: u64) -> Result<(), AllocationError> {
        for &(len, flags) in extents {
            if len == 0 {
                return Err(Malformed("an extent without length"));
            }
            if self.known >= end {
                return Err(Malformed("extents behind what was asked for"));
            }
            let extent = self.known..self.known + u64::from(len);
            if extent.end > self.bytes {
                return Err(Malformed("an extent that goes beyond the end"));
            }
            self.known = extent.end;
            // A hole need not read as zeroes.
            if flags & state::ZERO == 0 {
                self.extend(extent);
            }
        }
        Ok(())
    }

    /// Adds data that lies behind all that is known.
    fn extend(&mut self, data: Range<u64>) {
        match self.data.last_mut() {
            _ if data.is_empty() => {}
            Some(last) if last.end == data.start => last.end = data.end,
            _ => self.data.push(data),
        }
    }

    /// Where the first data at or behind `at` begins.
    #[must_use]
    pub fn next_data(&self, at: u64) -> Option<u64> {
        let next = self.data.get(self.data.partition_point(|data| data.end <= at))?;
        Some(next.start.max(at))
    }

    /// Where the first zeroes at or behind `at` begin; the end of the export if none do.
    #[must_use]
    pub fn next_hole(&self, at: u64) -> u64 {
        let next = self.data.get(self.data.partition_point(|data| data.end <= at));
        next.filter(|data| data.start <= at).map_or(at, |data| data.end).min(self.bytes)
    }

    /// How much data there is; `None` if the server has not told of all.
    #[must_use]
    pub fn data_bytes(&self) -> Option<u64> {
        let all = self.data.iter().map(|data| data.end - data.start).sum();
        (self.known == self.bytes).then_some(all)
    }
}

fn question(stream: &mut Patient, cookie: u64, asked: &Range<u64>) -> Result<(), AllocationError> {
    let mut head = REQUEST_MAGIC.to_be_bytes().to_vec();
    head.extend(0u16.to_be_bytes());
    head.extend(command::BLOCK_STATUS.to_be_bytes());
    head.extend(cookie.to_be_bytes());
    head.extend(asked.start.to_be_bytes());
    let len = u32::try_from(asked.end - asked.start);
    head.extend(len.map_err(|_| Malformed("too long a question"))?.to_be_bytes());
    Ok(stream.write_all(&head)?)
}

/// Lengths and flags of extents; `None` if the server fails the request.
fn answer(
    stream: &mut Patient,
    cookie: u64,
    context: u32,
) -> Result<Option<Vec<(u32, u32)>>, AllocationError> {
    let (mut extents, mut failed) = (None, false);
    for _ in 0..CHUNKS_MAX {
        let magic = u32::from_be_bytes(take(stream)?);
        if magic == SIMPLE_REPLY_MAGIC {
            let error = u32::from_be_bytes(take(stream)?);
            return match u64::from_be_bytes(take(stream)?) == cookie {
                true if error != 0 => Ok(None),
                true => Err(Malformed("a success without extents")),
                false => Err(Malformed("it answers what was not asked")),
            };
        }
        if magic != STRUCTURED_REPLY_MAGIC {
            return Err(Malformed("a reply does not begin as one"));
        }
        let (flags, kind) = (u16::from_be_bytes(take(stream)?), u16::from_be_bytes(take(stream)?));
        if u64::from_be_bytes(take(stream)?) != cookie {
            return Err(Malformed("it answers what was not asked"));
        }
        let len = u32::from_be_bytes(take(stream)?);
        if len > CHUNK_MAX {
            return Err(Malformed("too many extents"));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match kind {
            chunk::NONE if data.is_empty() => {}
            chunk::BLOCK_STATUS if extents.is_none() => extents = Some(judge(&data, context)?),
            chunk::BLOCK_STATUS => return Err(Malformed("extents twice")),
            kind if kind & chunk::IS_ERROR != 0 => failed = true,
            _ => return Err(Malformed("a chunk of a kind that was not asked for")),
        }
        if flags & chunk::FLAG_DONE != 0 {
            return match extents {
                _ if failed => Ok(None),
                None => Err(Malformed("a success without extents")),
                extents => Ok(extents),
            };
        }
    }
    Err(Malformed("its reply has no end"))
}

/// The extents of one chunk.
fn judge(data: &[u8], context: u32) -> Result<Vec<(u32, u32)>, AllocationError> {
    let words = data.chunks_exact(4);
    let rest = words.remainder();
    let mut words = words.map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    if words.next() != Some(context) {
        return Err(Malformed("another metadata context"));
    }
    if !rest.is_empty() || words.len() == 0 || words.len() % 2 != 0 {
        return Err(Malformed("half an extent, or none"));
    }
    let mut extents = Vec::with_capacity(words.len() / 2);
    while let Some((len, flags)) = words.next().zip(words.next()) {
        extents.push((len, flags));
    }
    Ok(extents)
}

fn take<const N: usize>(stream: &mut Patient) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_and_holes_follow_each_other() {
        let mut map = Allocation { data: Vec::new(), known: 0, bytes: 100 };
        let (hole, zero, data) = (state::HOLE, state::ZERO, 0);
        map.take(&[(10, zero), (10, data), (5, hole), (15, hole | zero)], 40).unwrap();
        // The last extent may go on behind what was asked for.
        map.take(&[(60, data)], 50).unwrap();
        assert_eq!(map.data, [10..25, 40..100]);
        let next: Vec<_> =
            [0, 10, 24, 25, 40, 99].map(|at| map.next_data(at).unwrap_or(100)).into();
        assert_eq!(next, [10, 10, 24, 40, 40, 99]);
        assert_eq!([0, 10, 24, 25, 40, 99].map(|at| map.next_hole(at)), [0, 25, 25, 25, 100, 100]);
        assert_eq!(map.next_data(100), None);
        assert_eq!(map.data_bytes(), Some(75));
    }
    /// A server that is asked, and a socket to it.
    fn asked() -> (std::os::unix::net::UnixStream, File, Negotiated) {
        let (server, client) = std::os::unix::net::UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let facts = Negotiated {
            bytes: 1 << 20,
            flags: 1,
            min_block: 1,
            preferred_block: 4096,
            max_block: 1 << 20,
            structured: true,
            block_status: Some(7),
        };
        (server, File::from(std::os::fd::OwnedFd::from(client)), facts)
    }

    #[test]
    fn f12_a_server_that_is_long_about_its_holes_is_not_waited_for() {
        let (_server, socket, facts) = asked();
        let moment = Duration::from_millis(100);
        let silent = Allocation::ask_within(&socket, &facts, (moment, LIMIT)).unwrap_err();
        assert!(silent.to_string().contains("limit is over (for an answer: 0.1 s)"), "{silent}");
    }

    #[test]
    fn f12_what_is_not_told_when_all_of_the_time_is_over_is_data() {
        let (server, socket, facts) = asked();
        server.set_nonblocking(true).unwrap();
        let map = Allocation::ask_within(&socket, &facts, (TIMEOUT, Duration::ZERO)).unwrap();
        assert_eq!((map.next_data(0), map.next_hole(0)), (Some(0), 1 << 20));
        assert_eq!(map.data_bytes(), None);
        assert!((&server).read(&mut [0]).is_err(), "nothing is asked any more");
    }
}
