//! Files in memory.

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::fs::{fallocate, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::io;

/// A new file of so many bytes that has no name. It may grow and never becomes shorter, so that it can
/// be mapped for as long as it is open.
pub(crate) fn memory_file(bytes: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("ringway-sim", flags)?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(file)
}

/// Makes such a file `bytes` long; if it is longer, what is beyond reads as zeroes from now on.
pub(crate) fn resize_memory_file(file: &File, bytes: u64) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length <= bytes {
        return file.set_len(bytes);
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, hole, bytes, length - bytes)?)
}
