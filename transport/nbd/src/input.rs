//! Bytes of a client that were received and not used yet (hot).

use crate::socket::Socket;
use std::io;

/// How much is received at a time: 32 writes of 4 KiB with their heads. What belongs to a longer write
/// goes straight to its place.
const ROOM: usize = 144 << 10;

/// What one turn receives at most, so that a client that keeps sending has its turn and no more.
const TURN_BYTES: usize = 1 << 20;

/// The part of a write that has not come yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Missing {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: the memory is the connection's own, on whatever thread.
unsafe impl Send for Missing {}

/// Received bytes.
///
/// # Invariants
/// 1. `start <= end <= room.len()`.
#[derive(Debug)]
pub(crate) struct Input {
    room: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last time less came than there was room for: nothing more is there for now.
    dry: bool,
    /// Received in this turn.
    turn: usize,
}

/// What receiving has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Something; so many bytes of it went to the missing part.
    Some(usize),
    /// Nothing for now.
    Nothing,
    /// The client sends nothing any more.
    End,
}

impl Input {
    /// Allocates; call at start only.
    pub(crate) fn new() -> Self {
        Self { room: vec![0; ROOM].into(), start: 0, end: 0, dry: false, turn: 0 }
    }

    /// The bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.end]
    }

    /// They were used.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.end - self.start);
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Another turn: what was dry may not be so any more.
    #[inline]
    pub(crate) fn next_turn(&mut self) {
        (self.dry, self.turn) = (false, 0);
    }

    /// What was dry may not be so any more.
    pub(crate) fn poll_again(&mut self) {
        self.dry = false;
    }

    /// True if the turn has received all that it may.
    pub(crate) fn is_used_up(&self) -> bool {
        self.turn >= TURN_BYTES
    }

    /// Receives what is there: first what is missing of a write, then what comes after it.
    ///
    /// # Safety
    /// `missing` is writable memory that nobody else uses.
    #[inline]
    pub(crate) unsafe fn receive(
        &mut self,
        socket: &Socket,
        missing: Option<Missing>,
    ) -> io::Result<Received> {
        if self.dry || self.is_used_up() {
            return Ok(Received::Nothing);
        }
        if self.start > 0 {
            self.room.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let rest = &mut self.room[self.end..];
        let rest = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let len = missing.map_or(0, |missing| missing.len);
        let mut places = [rest, rest];
        let places = match missing {
            Some(missing) => {
                debug_assert_eq!(self.end, 0, "what came before is in its place already");
                places[0] = libc::iovec { iov_base: missing.base.cast(), iov_len: missing.len };
                &mut places[..]
            }
            None => &mut places[1..],
        };
        let wanted = len + self.room.len() - self.end;
        // SAFETY: the caller vouches for what is missing; the rest is ours.
        let Some(got) = (unsafe { socket.receive(places)? }) else {
            self.dry = true;
            return Ok(Received::Nothing);
        };
        if got == 0 {
            return Ok(Received::End);
        }
        self.turn += got;
        self.dry = got < wanted;
        let placed = got.min(len);
        self.end += got - placed;
        Ok(Received::Some(placed))
    }
}
