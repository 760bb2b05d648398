//! What clients ask: the head of a request, judged without any I/O.

use crate::handshake::Replies;
use crate::protocol::{
    BLOCK_MIN, EXTENDED_REQUEST_MAGIC, PAYLOAD_MAX, REQUEST_MAGIC, command, flag,
};
use ringway_core::ByteRange;

/// Errors, as clients are told them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// It is not allowed.
    Perm = 1,
    /// The disk has failed.
    Io = 5,
    /// It makes no sense.
    Invalid = 22,
    /// It lies beyond the end of the disk, or its host is full.
    NoSpace = 28,
    /// More than a reply can hold.
    Overflow = 75,
    /// The disk does not do this, or not fast.
    Unsupported = 95,
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// What does not begin as a request.
    #[error("a request begins with {0:#010x}")]
    Magic(u32),
    /// To read past it would take too long.
    #[error("a request comes with {0} bytes of data, {PAYLOAD_MAX} at most are taken")]
    Payload(u64),
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Bytes of the disk.
    Read,
    /// Bytes for the disk, which follow.
    Write {
        /// Durable before it is answered.
        fua: bool,
    },
    /// All that was answered becomes durable.
    Flush,
    /// The client no longer needs the range.
    Trim {
        /// Durable before it is answered.
        fua: bool,
    },
    /// The range is to read as zeroes.
    WriteZeroes {
        /// Durable before it is answered.
        fua: bool,
        /// The space may be given back.
        unmap: bool,
    },
    /// What is allocated.
    BlockStatus {
        /// One extent only.
        one: bool,
    },
    /// Nothing to be done; answered at once.
    Nothing,
    /// The client goes once all is answered.
    Disconnect,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Comes back with the reply.
    pub cookie: u64,
    /// Where on the disk. Empty for what has no place, and for what is refused.
    pub range: ByteRange,
    /// Bytes of data that follow.
    pub payload: u32,
    /// What is to be done, or the answer.
    pub action: Result<Action, NbdError>,
    /// It is a read, whose reply looks different even if it fails.
    pub is_read: bool,
}

/// What requests of a connection may ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How its heads look.
    pub replies: Replies,
    /// Block status was agreed upon.
    pub block_status: bool,
    /// Nothing changes the disk.
    pub read_only: bool,
    /// The disk gives space back.
    pub trims: bool,
    /// It does so at once, in pieces of so many bytes.
    pub fast_zero: Option<u64>,
}

impl Rules {
    /// The length of a head.
    #[must_use]
    pub fn head_len(&self) -> usize {
        if self.replies == Replies::Extended { 32 } else { 28 }
    }

    /// Understands the head of a request for a disk of `capacity` bytes.
    ///
    /// # Errors
    /// [`ProtocolError`]: it is not known where the next one begins, or that is too far away.
    ///
    /// # Panics
    /// If there are fewer bytes than [`Rules::head_len`].
    pub fn parse(&self, head: &[u8], capacity: u64) -> Result<Asked, ProtocolError> {
        let extended = self.replies == Replies::Extended;
        let expected = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        // Each is short enough for its type.
        #[allow(clippy::cast_possible_truncation)]
        let (magic, flags, kind) =
            (number(head, 0, 4) as u32, number(head, 4, 2) as u16, number(head, 6, 2) as u16);
        if magic != expected {
            return Err(ProtocolError::Magic(magic));
        }
        let (cookie, offset) = (number(head, 8, 8), number(head, 16, 8));
        let len = number(head, 24, if extended { 8 } else { 4 });
        // With extended headers the flag says what the length is of. Clients must set it for writes, and
        // QEMU's (since 8.2) does not: a write brings its data all the same.
        let brings = kind == command::WRITE || (extended && flags & flag::PAYLOAD_LEN != 0);
        let payload = if brings { len } else { 0 };
        let payload = u32::try_from(payload).ok().filter(|&len| len <= PAYLOAD_MAX);
        let payload = payload.ok_or(ProtocolError::Payload(len))?;
        let action = self.judge(kind, flags, offset, len, capacity);
        let (range, action) = match action {
            Ok((range, action)) => (range, Ok(action)),
            Err(error) => (ByteRange::default(), Err(error)),
        };
        Ok(Asked { cookie, range, payload, action, is_read: kind == command::READ })
    }

    fn judge(
        &self,
        kind: u16,
        flags: u16,
        offset: u64,
        len: u64,
        capacity: u64,
    ) -> Result<(ByteRange, Action), NbdError> {
        let extended = self.replies == Replies::Extended;
        let allowed = match kind {
            command::READ => flag::DF,
            command::WRITE if extended => flag::FUA | flag::PAYLOAD_LEN,
            command::WRITE | command::TRIM | command::FLUSH | command::CACHE => flag::FUA,
            command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQ_ONE | flag::FUA,
            _ => 0,
        };
        let plain = ByteRange::default();
        match kind {
            command::DISC => return Ok((plain, Action::Disconnect)),
            command::FLUSH if flags & !allowed == 0 => return Ok((plain, Action::Flush)),
            _ if flags & !allowed != 0 => return Err(NbdError::Invalid),
            _ => {}
        }
        let unknown =
            kind > command::BLOCK_STATUS || (kind == command::BLOCK_STATUS && !self.block_status);
        if unknown {
            return Err(NbdError::Invalid);
        }
        let writes = matches!(kind, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if writes && self.read_only {
            return Err(NbdError::Perm);
        }
        let beyond = if writes { NbdError::NoSpace } else { NbdError::Invalid };
        let range = ByteRange::new(offset, len).ok_or(beyond)?;
        if range.end() > capacity {
            return Err(beyond);
        }
        if kind == command::READ && len > PAYLOAD_MAX.into() {
            return Err(NbdError::Overflow);
        }
        if !range.is_aligned(BLOCK_MIN.into()) {
            return Err(NbdError::Invalid);
        }
        self.action(kind, flags, range).map(|action| (range, action))
    }

    fn action(&self, kind: u16, flags: u16, range: ByteRange) -> Result<Action, NbdError> {
        let fua = flags & flag::FUA != 0;
        Ok(match kind {
            command::BLOCK_STATUS if range.is_empty() => return Err(NbdError::Invalid),
            _ if range.is_empty() => Action::Nothing,
            command::READ => Action::Read,
            command::WRITE => Action::Write { fua },
            command::TRIM if !self.trims => return Err(NbdError::Unsupported),
            command::TRIM => Action::Trim { fua },
            command::WRITE_ZEROES => {
                let unmap = flags & flag::NO_HOLE == 0;
                let fast = flags & flag::FAST_ZERO != 0;
                let is_fast = self.fast_zero.is_some_and(|unit| range.is_aligned(unit)) && unmap;
                if fast && !is_fast {
                    return Err(NbdError::Unsupported);
                }
                Action::WriteZeroes { fua, unmap }
            }
            command::BLOCK_STATUS => Action::BlockStatus { one: flags & flag::REQ_ONE != 0 },
            // A hint; what is read soon after is in the host's cache as well.
            _ => Action::Nothing,
        })
    }
}

/// The big-endian number of `len` bytes at `at`.
fn number(head: &[u8], at: usize, len: usize) -> u64 {
    head[at..at + len].iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests;
