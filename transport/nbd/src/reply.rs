//! What goes before the data of a reply.

use crate::handshake::Replies;
use crate::protocol::{EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};
use crate::request::NbdError;

/// The longest: an extended chunk with an offset.
const HEAD_MAX: usize = 40;

/// The head of a reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    bytes: [u8; HEAD_MAX],
    len: u8,
}

impl Head {
    fn new() -> Self {
        Self { bytes: [0; HEAD_MAX], len: 0 }
    }

    #[inline]
    fn with(mut self, bytes: &[u8]) -> Self {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        // At most HEAD_MAX.
        #[allow(clippy::cast_possible_truncation)]
        {
            self.len += bytes.len() as u8;
        }
        self
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    #[inline]
    fn simple(error: u32, cookie: u64) -> Self {
        Self::new()
            .with(&SIMPLE_REPLY_MAGIC.to_be_bytes())
            .with(&error.to_be_bytes())
            .with(&cookie.to_be_bytes())
    }

    /// The only chunk of a reply; `len` bytes follow what is common to all.
    #[inline]
    fn chunk(replies: Replies, kind: u16, cookie: u64, offset: u64, len: u32) -> Self {
        let extended = replies == Replies::Extended;
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let head = Self::new()
            .with(&magic.to_be_bytes())
            .with(&chunk::FLAG_DONE.to_be_bytes())
            .with(&kind.to_be_bytes())
            .with(&cookie.to_be_bytes());
        if extended {
            head.with(&offset.to_be_bytes()).with(&u64::from(len).to_be_bytes())
        } else {
            head.with(&len.to_be_bytes())
        }
    }

    /// Of a request that is done and gives nothing back.
    #[inline]
    pub(crate) fn done(replies: Replies, cookie: u64, offset: u64) -> Self {
        match replies {
            // Who has agreed upon structured replies takes simple ones for all but reads.
            Replies::Simple | Replies::Structured => Self::simple(0, cookie),
            Replies::Extended => Self::chunk(replies, chunk::NONE, cookie, offset, 0),
        }
    }

    /// Of a read of nothing.
    pub(crate) fn nothing_read(replies: Replies, cookie: u64, offset: u64) -> Self {
        match replies {
            Replies::Simple => Self::simple(0, cookie),
            _ => Self::chunk(replies, chunk::NONE, cookie, offset, 0),
        }
    }

    /// Of a read, whose `len` bytes follow.
    #[inline]
    pub(crate) fn data(replies: Replies, cookie: u64, offset: u64, len: u32) -> Self {
        match replies {
            Replies::Simple => Self::simple(0, cookie),
            _ => Self::chunk(replies, chunk::OFFSET_DATA, cookie, offset, len + 8)
                .with(&offset.to_be_bytes()),
        }
    }

    /// Of block status, whose `len` bytes of payload follow.
    pub(crate) fn extents(replies: Replies, cookie: u64, offset: u64, len: u32) -> Self {
        let extended = replies == Replies::Extended;
        let kind = if extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
        Self::chunk(replies, kind, cookie, offset, len)
    }

    /// Of a request that has failed.
    pub(crate) fn failed(replies: Replies, cookie: u64, offset: u64, error: NbdError) -> Self {
        match replies {
            Replies::Simple => Self::simple(error as u32, cookie),
            // The number, and the length of a message that is not there.
            _ => Self::chunk(replies, chunk::ERROR, cookie, offset, 6)
                .with(&(error as u32).to_be_bytes())
                .with(&0u16.to_be_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_laid_out_as_the_protocol_says() {
        let cookie = 0x0102_0304_0506_0708;
        let simple = Head::data(Replies::Simple, cookie, 512, 4096);
        assert_eq!(simple.as_slice(), b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
        let chunk = Head::data(Replies::Structured, cookie, 512, 4096);
        assert_eq!(
            chunk.as_slice(),
            b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\x10\x08\0\0\0\0\0\0\x02\0"
        );
        let extended = Head::data(Replies::Extended, cookie, 512, 4096);
        assert_eq!(extended.as_slice().len(), 40);
        assert_eq!(&extended.as_slice()[16..32], b"\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x10\x08");
        let failed = Head::failed(Replies::Extended, cookie, 512, NbdError::Overflow);
        assert_eq!(&failed.as_slice()[4..8], b"\0\x01\x80\x01");
        assert_eq!(&failed.as_slice()[32..], b"\0\0\0\x4b\0\0");
        assert_eq!(Head::done(Replies::Structured, cookie, 0).as_slice(), simple.as_slice());
    }
}
