//! The heads of replies, judged without any I/O.

use ringway_nbd_words::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// The longest head: that of a structured chunk, with the longest error that is read.
const ERROR_MAX: u32 = 6 + 4096 + 8;

/// What a server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// A request is done, or its data follows if it is a read that was answered simply.
    Done {
        /// Whose.
        cookie: u64,
        /// As the protocol has it; 0 is success.
        error: u32,
        /// In a simple reply.
        simple: bool,
    },
    /// Data of a read follows.
    Data {
        /// Whose.
        cookie: u64,
        /// Where on the disk.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The reply ends with it.
        last: bool,
    },
    /// This much of a read is zeroes.
    Hole {
        /// Whose.
        cookie: u64,
        /// Where on the disk.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The reply ends with it.
        last: bool,
    },
    /// It has failed, and more follows.
    Failed {
        /// Whose.
        cookie: u64,
        /// As the protocol has it.
        error: u32,
    },
}

/// A reply and how many bytes its head has; `None` if there are too few yet.
///
/// # Errors
/// What makes no sense: where the next reply begins is not known then.
pub(crate) fn parse(
    bytes: &[u8],
    structured: bool,
) -> Result<Option<(Reply, usize)>, &'static str> {
    let Some(magic) = number(bytes, 0, 4) else { return Ok(None) };
    if magic == u64::from(SIMPLE_REPLY_MAGIC) {
        let (Some(error), Some(cookie)) = (number(bytes, 4, 4), number(bytes, 8, 8)) else {
            return Ok(None);
        };
        return Ok(Some((Reply::Done { cookie, error: narrow(error), simple: true }, 16)));
    }
    if magic != u64::from(STRUCTURED_REPLY_MAGIC) || !structured {
        return Err("a reply does not begin as one");
    }
    let (Some(flags), Some(kind), Some(cookie), Some(len)) =
        (number(bytes, 4, 2), number(bytes, 6, 2), number(bytes, 8, 8), number(bytes, 16, 4))
    else {
        return Ok(None);
    };
    let (last, len) = (flags & u64::from(chunk::FLAG_DONE) != 0, narrow(len));
    let kind = u16::try_from(kind).unwrap_or(0);
    match kind {
        chunk::NONE if last && len == 0 => {
            Ok(Some((Reply::Done { cookie, error: 0, simple: false }, 20)))
        }
        chunk::NONE => Err("an empty chunk that has data, or does not end its reply"),
        chunk::OFFSET_DATA if len > 8 => Ok(number(bytes, 20, 8)
            .map(|offset| (Reply::Data { cookie, offset, len: u64::from(len) - 8, last }, 28))),
        chunk::OFFSET_HOLE if len == 12 => {
            let place = number(bytes, 20, 8).zip(number(bytes, 28, 4));
            Ok(place.map(|(offset, len)| (Reply::Hole { cookie, offset, len, last }, 32)))
        }
        kind if kind & chunk::IS_ERROR != 0 && (6..=ERROR_MAX).contains(&len) => {
            let whole = 20 + len as usize;
            if bytes.len() < whole {
                return Ok(None);
            }
            let error = match narrow(number(bytes, 20, 4).unwrap_or(0)) {
                0 => return Err("an error that is none"),
                error => error,
            };
            let reply = match last {
                true => Reply::Done { cookie, error, simple: false },
                false => Reply::Failed { cookie, error },
            };
            Ok(Some((reply, whole)))
        }
        _ => Err("a chunk of a kind or length that it cannot have"),
    }
}

/// An error of the protocol, as the host's kernel would say it.
pub(crate) fn errno(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

/// The big-endian number of `len` bytes at `at`, if there are so many.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + len)?;
    Some(bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
