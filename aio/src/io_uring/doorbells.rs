//! Doorbells as multishot polls of one ring.

use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use std::os::fd::RawFd;

use super::tags::{BELL, NOBODY};
use crate::engine::BellId;

/// A doorbell that is watched, or was.
#[derive(Clone, Copy, Debug)]
struct Bell {
    bell: BellId,
    fd: RawFd,
    /// Its poll request; tells this watch from earlier ones of the same place.
    tag: u64,
    poll: Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Poll {
    Armed,
    Ended,
    Unused,
}

/// All doorbells of a ring.
#[derive(Debug)]
pub(crate) struct Doorbells {
    bells: Vec<Bell>,
    watches: u64,
}

impl Doorbells {
    /// None yet; room for `count` before it allocates.
    pub(crate) fn new(count: usize) -> Self {
        Self { bells: Vec::with_capacity(count), watches: 0 }
    }

    /// Takes a doorbell in; its poll is to be submitted.
    pub(crate) fn watch(&mut self, bell: BellId, fd: RawFd) -> squeue::Entry {
        let unused = self.bells.iter().position(|b| b.poll == Poll::Unused);
        let place = unused.unwrap_or(self.bells.len());
        self.watches += 1;
        let tag = BELL | self.watches << 16 | place as u64;
        let new = Bell { bell, fd, tag, poll: Poll::Armed };
        match self.bells.get_mut(place) {
            Some(old) => *old = new,
            None => self.bells.push(new),
        }
        entry(&new)
    }

    /// Forgets a doorbell; what removes its poll is to be submitted.
    pub(crate) fn unwatch(&mut self, bell: BellId, fd: RawFd) -> Option<squeue::Entry> {
        let known = |b: &&mut Bell| b.poll != Poll::Unused && (b.bell, b.fd) == (bell, fd);
        let found = self.bells.iter_mut().find(known)?;
        found.poll = Poll::Unused;
        Some(opcode::PollRemove::new(found.tag).build().user_data(NOBODY))
    }

    /// What rang, by a completion: its tag, its result, and whether more will come of the same poll.
    /// Nothing, if the watch is over.
    #[inline]
    pub(crate) fn rang(&mut self, tag: u64, result: i32, more: bool) -> Option<BellId> {
        let bell = self.bells.iter_mut().find(|b| b.tag == tag)?;
        if bell.poll == Poll::Unused {
            return None;
        }
        if !more {
            // A poll that failed would fail again.
            bell.poll = if result < 0 { Poll::Unused } else { Poll::Ended };
        }
        Some(bell.bell)
    }

    /// The poll of a doorbell whose last one has ended, if there is any: to be submitted.
    pub(crate) fn rearm(&mut self) -> Option<squeue::Entry> {
        let ended = self.bells.iter_mut().find(|b| b.poll == Poll::Ended)?;
        ended.poll = Poll::Armed;
        Some(entry(ended))
    }
}

/// The poll reports what arrives, as edges; nothing need be read.
fn entry(bell: &Bell) -> squeue::Entry {
    let events = u32::from(libc::POLLIN as u16);
    opcode::PollAdd::new(Fd(bell.fd), events).multi(true).build().user_data(bell.tag)
}
