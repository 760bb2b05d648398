//! What may go wrong with memory of others.

use std::io;

/// Why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The file ends before the memory it is said to hold.
    #[error("the file holds {have} bytes but {need} are claimed to be in it")]
    FileTooShort {
        /// Size of the file in bytes.
        have: u64,
        /// Size it would have to have.
        need: u64,
    },
    /// Offsets or lengths that no file can have.
    #[error("offset {offset} and length {len} do not describe a part of a file")]
    BadRange {
        /// Offset in the file, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A peer has mapped, or would have, more than its part of this process's address space.
    #[error(
        "{asked} bytes of address space are too much for a peer that has {have} mapped already: it \
         may have {room} more, because as much must be left for all others as it has then"
    )]
    Quota {
        /// Bytes it would have taken.
        asked: u64,
        /// Bytes that the peer has mapped.
        have: u64,
        /// Bytes it may have in addition.
        room: u64,
    },
    /// A peer has, or would have, more than its part of the mappings that the kernel lets this process have.
    #[error(
        "{asked} pieces are too many for a peer that has {have} mapped already: it may have {room} more, \
         because as many must be left for all others as it has then"
    )]
    Pieces {
        /// Pieces it would have taken.
        asked: u64,
        /// Pieces that the peer has mapped.
        have: u64,
        /// Pieces it may have in addition.
        room: u64,
    },
    /// Pieces that are to adjoin, and a page that is in two of them.
    #[error("it lies in pieces that are not whole pages of this host, {page} bytes")]
    NotPages {
        /// Bytes of a page.
        page: usize,
    },
    /// Pieces that are to adjoin, of memory in huge pages.
    #[error(
        "it lies in huge pages of {page} bytes, and nothing smaller can be mapped of them. Guest memory in \
         ordinary pages can (QEMU: memory-backend-memfd without hugetlb=on; libvirt: no <hugepages/>)"
    )]
    HugePages {
        /// Bytes of such a page.
        page: usize,
    },
    /// The kernel refused.
    #[error("cannot map the memory: {0}")]
    Host(#[from] io::Error),
}
