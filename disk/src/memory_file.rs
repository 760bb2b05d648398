//! Files in memory.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

/// A new file of so many bytes that has no name.
pub(crate) fn memory_file(bytes: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the descriptor is new and nobody else's.
    let file = unsafe {
        let fd = libc::memfd_create(c"ringway-sim".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    file.set_len(bytes)?;
    Ok(file)
}
