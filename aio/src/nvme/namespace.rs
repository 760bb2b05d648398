//! Namespaces: what has to be known of one before it can be used.

use std::fs::File;
use std::io;

/// What a namespace is, and what its device and the kernel take in one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its identifier at its controller.
    pub id: u32,
    /// A logical block has 2^this bytes.
    pub block_shift: u8,
    /// The most bytes of one transfer, whatever memory it is: a multiple of the block, and 65,536
    /// blocks at most. The kernel does not split these commands, it refuses longer ones.
    pub max_bytes: u32,
    /// The most blocks of one range to deallocate; 0 if the device has no Dataset Management.
    pub discard_blocks: u32,
    /// The most blocks of one Write Zeroes, 65,536 at most; 0 if the device has none.
    pub zero_blocks: u32,
    /// Write Zeroes may give blocks back that then read as zeroes.
    pub deallocates_zeroed: bool,
}

/// A namespace whose generic character device is open: what engines know that by.
#[derive(Debug)]
pub struct Namespace {
    /// What is known of it.
    pub facts: Facts,
    /// Its block device: whoever holds it claims it for all the host, and learns its size. Engines hold
    /// it until their last command is done, whatever becomes of the process.
    pub block: File,
}

#[cold]
pub(super) fn no_namespace() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no NVMe namespace")
}
