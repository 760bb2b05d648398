//! Numbers of the NBD protocol, by the names that its text gives them
//! (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>). All are big-endian on the wire.
//!
//! A request to write, as a client sends it, and the answer that it waits for:
//!
//! ```
//! use ringway_nbd_words::{REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command, flag};
//!
//! let (cookie, offset, data) = (7u64, 4096u64, [1; 512]);
//! let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
//! request.extend(flag::FUA.to_be_bytes());
//! request.extend(command::WRITE.to_be_bytes());
//! request.extend(cookie.to_be_bytes());
//! request.extend(offset.to_be_bytes());
//! request.extend((data.len() as u32).to_be_bytes());
//! assert_eq!(request[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
//! request.extend(data);
//! assert_eq!(request.len(), 28 + 512);
//!
//! let mut reply = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
//! reply.extend(0u32.to_be_bytes()); // no error
//! reply.extend(cookie.to_be_bytes());
//! assert_eq!(reply, *b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x07");
//! ```

#![allow(missing_docs, reason = "the protocol's text says what each of them is")]

pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// What servers of old send where others say [`IHAVEOPT`].
pub const OLDSTYLE: u64 = 0x0000_4202_8186_1253;
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags, of server and client alike.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// `NBD_OPT_*`
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// `NBD_REP_*`
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub const ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;
}

/// `NBD_INFO_*`
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags, `NBD_FLAG_*`: what an export offers.
pub mod offers {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// `NBD_CMD_*`
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// `NBD_CMD_FLAG_*`
pub mod flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Structured replies.
pub mod chunk {
    pub const FLAG_DONE: u16 = 1 << 0;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// All kinds with it are of errors.
    pub const IS_ERROR: u16 = 1 << 15;
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// What `base:allocation` says of a range.
pub mod state {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
}

/// The one metadata context there is.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Its number in block status replies.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// The most bytes that a read or a write can have, told as the maximum block size.
pub const PAYLOAD_MAX: u32 = 32 << 20;

/// Offsets and lengths are multiples of this, told as the minimum block size.
pub const BLOCK_MIN: u32 = 512;
