//! The numbers of the protocol, which servers and clients share.

pub(crate) use ringway_nbd_words::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC,
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, answer, chunk, command, flag, info, offers, option,
    state,
};
pub use ringway_nbd_words::{BLOCK_MIN, PAYLOAD_MAX};
