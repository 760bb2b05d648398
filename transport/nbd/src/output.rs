//! Replies on their way to a client (hot).

use crate::reply::Head;
use crate::socket::Socket;
use ringway_core::mem::{Pool, PoolPages};
use std::collections::VecDeque;
use std::io;

/// Pieces of memory that one call sends.
const PLACES: usize = 64;

/// Turns between attempts to send to a client that had no room, while others keep the worker busy. Its
/// bell tells sooner if the worker sleeps.
const TRY_AGAIN: u32 = 8;

/// What follows the head of a reply.
#[derive(Debug)]
pub(crate) enum Body {
    Nothing,
    /// So many bytes of these pages.
    Pages(PoolPages, usize),
    /// Block status, in memory that goes round.
    Extents(Vec<u8>),
}

impl Body {
    #[inline]
    fn as_place(&self) -> (*const u8, usize) {
        match self {
            Self::Nothing => (std::ptr::null(), 0),
            Self::Pages(pages, len) => (pages.base().cast_const(), *len),
            Self::Extents(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }
}

#[derive(Debug)]
struct Reply {
    head: Head,
    body: Body,
}

impl Reply {
    #[inline]
    fn len(&self) -> usize {
        self.head.as_slice().len() + self.body.as_place().1
    }
}

/// Replies in order, the first of them perhaps sent in part.
#[derive(Debug)]
pub(crate) struct Output {
    replies: VecDeque<Reply>,
    /// Bytes of the first that were sent.
    sent: usize,
    /// The client had no room.
    blocked: bool,
    /// Turns since then.
    waited: u32,
    calls: u64,
}

impl Output {
    /// Room for so many replies. Allocates; call at start only.
    pub(crate) fn new(replies: usize) -> Self {
        let replies = VecDeque::with_capacity(replies);
        Self { replies, sent: 0, blocked: false, waited: 0, calls: 0 }
    }

    /// Replies that wait.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// How often something was sent.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    #[inline]
    pub(crate) fn push(&mut self, head: Head, body: Body) {
        debug_assert!(self.replies.len() < self.replies.capacity(), "room was made before");
        self.replies.push_back(Reply { head, body });
    }

    /// The client may have room by now.
    #[inline]
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// True if it is worth a try.
    #[inline]
    pub(crate) fn is_due(&mut self) -> bool {
        if !self.blocked {
            return true;
        }
        self.waited += 1;
        if self.waited >= TRY_AGAIN {
            (self.blocked, self.waited) = (false, 0);
        }
        !self.blocked
    }

    /// Sends what the client has room for; true if that was all. Pages and lists of extents that were
    /// sent are free again.
    pub(crate) fn send(
        &mut self,
        socket: &Socket,
        pool: &mut Pool,
        spare: &mut Vec<Vec<u8>>,
    ) -> io::Result<bool> {
        while !self.replies.is_empty() {
            let nowhere = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            let mut places = [nowhere; PLACES];
            let (count, wanted) = self.list(&mut places);
            self.calls += 1;
            // SAFETY: heads and bodies are ours, and stay where they are during the call.
            let sent = unsafe { socket.send(&mut places[..count])? }.unwrap_or(0);
            self.forget(sent, pool, spare);
            if sent < wanted {
                (self.blocked, self.waited) = (true, 0);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Lists what is to be sent: how many places, how many bytes.
    #[inline]
    fn list(&self, places: &mut [libc::iovec; PLACES]) -> (usize, usize) {
        let (mut count, mut wanted, mut skip) = (0, 0, self.sent);
        for reply in &self.replies {
            if count + 2 > PLACES {
                break;
            }
            let head = reply.head.as_slice();
            for (base, len) in [(head.as_ptr(), head.len()), reply.body.as_place()] {
                let skipped = skip.min(len);
                skip -= skipped;
                if len > skipped {
                    // SAFETY: within the piece.
                    let base = unsafe { base.add(skipped) };
                    places[count] =
                        libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len - skipped };
                    count += 1;
                    wanted += len - skipped;
                }
            }
        }
        (count, wanted)
    }

    /// So many bytes more were sent.
    #[inline]
    fn forget(&mut self, sent: usize, pool: &mut Pool, spare: &mut Vec<Vec<u8>>) {
        self.sent += sent;
        while let Some(reply) = self.replies.front().filter(|reply| self.sent >= reply.len()) {
            self.sent -= reply.len();
            match self.replies.pop_front().map(|reply| reply.body) {
                Some(Body::Pages(pages, _)) => pool.release(pages),
                Some(Body::Extents(bytes)) => spare.push(bytes),
                Some(Body::Nothing) | None => {}
            }
        }
    }

    /// Nobody is there to be told.
    #[cold]
    pub(crate) fn drop_all(&mut self, pool: &mut Pool, spare: &mut Vec<Vec<u8>>) {
        let left = self.replies.iter().map(Reply::len).sum::<usize>() - self.sent;
        self.forget(left, pool, spare);
    }
}
