//! The handshake, decided without any I/O: bytes in, bytes out (fixed newstyle).
//!
//! ```
//! use ringway_nbd::{Handshake, Next, Offer};
//!
//! let offers = [Offer {
//!     name: "disk".into(),
//!     nameless: true,
//!     description: String::new(),
//!     bytes: 1 << 20,
//!     min_block: 512,
//!     preferred_block: 4096,
//!     read_only: false,
//!     trims: true,
//! }];
//! let mut handshake = Handshake::new(&offers);
//! let mut out = Handshake::greeting().to_vec();     // to be sent first
//! assert_eq!(handshake.needs(), 4);                 // then so many bytes are read, no more
//! assert_eq!(handshake.take(&3u32.to_be_bytes(), &mut out), Ok(Next::More));
//! assert_eq!(handshake.needs(), 16);                // the head of an option
//! ```

mod options;

use crate::offer::Offer;
use crate::protocol::{FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, NBDMAGIC};

/// The longest data of an option that is read: a name and some queries, 4096 bytes each at most.
const OPTION_MAX: u32 = 32 << 10;

/// Options that one client may ask for. Honest ones need less than ten.
const OPTIONS_MAX: u32 = 64;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// [`Handshake::needs`] more bytes of the client.
    More,
    /// Requests.
    Begin(Negotiated),
    /// TLS, from the next byte on: see [`Handshake::is_encrypted`].
    StartTls,
    /// The client has said that it goes.
    Abort,
}

/// Whether a client may, or has to, ask for TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsRule {
    /// There is none.
    #[default]
    None,
    /// It may.
    Possible,
    /// It has to, before anything else.
    Required,
    /// It has, and is behind it.
    Begun,
}

/// What a client and this server have agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The disk, by its number among those offered.
    pub export: usize,
    /// How replies look.
    pub replies: Replies,
    /// Block status may be asked for (`base:allocation`).
    pub block_status: bool,
}

/// How replies look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// As in the beginning: an error number, and data after it.
    Simple,
    /// Chunks that say what they are.
    Structured,
    /// The same, with 64 bits for each length, in requests as well.
    Extended,
}

/// Why a handshake cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Flags that were not offered.
    #[error("client flags {0:#x} are not known")]
    Flags(u32),
    /// An option that does not begin as one.
    #[error("an option begins with {0:#018x}")]
    Magic(u64),
    /// An option that is too long.
    #[error("option {0} has {1} bytes of data, more than any that is known needs")]
    TooLong(u32, u32),
    /// Too many of them.
    #[error("more options than a client needs")]
    TooMany,
    /// `NBD_OPT_EXPORT_NAME` cannot be answered with an error.
    #[error("there is no such export")]
    NoSuchExport,
    /// Nor that nobody more is taken.
    #[error("all connections that the export may have are taken")]
    NoPlace,
    /// Nor that it needs TLS.
    #[error("it asks for an export without TLS, which is required here")]
    NoTls,
}

/// What is read next.
#[derive(Clone, Copy, Debug)]
enum Reading {
    ClientFlags,
    OptionHead,
    OptionData { option: u32, len: u32 },
}

/// One handshake.
#[derive(Debug)]
pub struct Handshake<'a> {
    offers: &'a [Offer],
    reading: Reading,
    no_zeroes: bool,
    replies: Replies,
    /// The disk whose block status was asked for.
    context_of: Option<usize>,
    options: u32,
    /// What was asked for last.
    option: u32,
    tls: TlsRule,
}

impl<'a> Handshake<'a> {
    /// With a client that may choose one of these.
    #[must_use]
    pub fn new(offers: &'a [Offer]) -> Self {
        Self {
            offers,
            reading: Reading::ClientFlags,
            no_zeroes: false,
            replies: Replies::Simple,
            context_of: None,
            options: 0,
            option: 0,
            tls: TlsRule::None,
        }
    }

    /// With this rule for TLS.
    #[must_use]
    pub fn with_tls(mut self, rule: TlsRule) -> Self {
        self.tls = rule;
        self
    }

    /// The encryption that was agreed upon ([`Next::StartTls`]) has begun. Nothing that was said before
    /// holds: somebody else may have said it.
    pub fn is_encrypted(&mut self) {
        self.replies = Replies::Simple;
        self.context_of = None;
        self.tls = TlsRule::Begun;
    }

    /// What a client is sent unasked.
    #[must_use]
    pub fn greeting() -> [u8; 18] {
        let mut greeting = [0; 18];
        greeting[..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
        greeting[16..].copy_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        greeting
    }

    /// How many bytes of the client are to be read next, and not one more: requests may follow.
    #[must_use]
    pub fn needs(&self) -> usize {
        match self.reading {
            Reading::ClientFlags => 4,
            Reading::OptionHead => 16,
            Reading::OptionData { len, .. } => len as usize,
        }
    }

    /// Takes the [`Handshake::needs`] bytes that were read; the answer goes to the end of `out`. It is
    /// to be sent in any case.
    ///
    /// # Errors
    /// [`HandshakeError`]: the connection ends.
    ///
    /// # Panics
    /// If there are not as many bytes.
    pub fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Next, HandshakeError> {
        assert_eq!(bytes.len(), self.needs(), "as many as were asked for");
        match self.reading {
            Reading::ClientFlags => self.take_client_flags(u32_at(bytes, 0)),
            Reading::OptionHead => {
                let magic = u64::from(u32_at(bytes, 0)) << 32 | u64::from(u32_at(bytes, 4));
                let (option, len) = (u32_at(bytes, 8), u32_at(bytes, 12));
                if magic != IHAVEOPT {
                    return Err(HandshakeError::Magic(magic));
                }
                if len > OPTION_MAX {
                    return Err(HandshakeError::TooLong(option, len));
                }
                self.options += 1;
                if self.options > OPTIONS_MAX {
                    return Err(HandshakeError::TooMany);
                }
                self.reading = Reading::OptionData { option, len };
                if len > 0 { Ok(Next::More) } else { self.take(&[], out) }
            }
            Reading::OptionData { option, .. } => {
                self.reading = Reading::OptionHead;
                self.option = option;
                self.carry_out(option, bytes, out)
            }
        }
    }

    fn take_client_flags(&mut self, flags: u32) -> Result<Next, HandshakeError> {
        let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        if flags & !known != 0 {
            return Err(HandshakeError::Flags(flags));
        }
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.reading = Reading::OptionHead;
        Ok(Next::More)
    }
}

/// The big-endian number at `at`.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

#[cfg(test)]
mod tests;
