//! What can be wrong with a chain.

/// What is wrong with one chain. It costs the guest this chain and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// §2.7.5: an index of at least the queue size.
    #[error("descriptor index {0} is beyond the queue")]
    OutOfRange(u16),
    /// §2.7.5.1: longer than the queue; a loop looks like this.
    #[error("the chain is longer than its table, or a loop")]
    TooLong,
    /// A buffer without bytes.
    #[error("a descriptor has length zero")]
    ZeroLength,
    /// §2.7.4.2: a readable buffer after a writable one.
    #[error("a readable descriptor follows a writable one")]
    ReadableAfterWritable,
    /// §2.7.5: more than 2^32 bytes in one chain.
    #[error("the chain describes 4 GiB or more")]
    TooManyBytes,
    /// §2.7.5.3.1: an indirect table within an indirect table, with NEXT set, without bytes, of an
    /// odd length, or when INDIRECT_DESC was not negotiated.
    #[error("an indirect table is malformed")]
    BadIndirect,
    /// A table that is not in guest memory.
    #[error("an indirect table lies outside guest memory")]
    TableUnmapped,
}
