//! The one way to the ioctls of Xen's devices.

use std::io;
use std::os::fd::RawFd;

/// `_IOC(_IOC_NONE, kind, number, size)` on x86.
pub(super) const fn request(kind: u8, number: u8, size: usize) -> u64 {
    ((size as u64) << 16) | ((kind as u64) << 8) | number as u64
}

/// Calls a device.
///
/// # Errors
/// What the host says.
///
/// # Safety
/// `argument` is what the driver wants for `request`, and all it points to.
pub(super) unsafe fn ioctl<T>(fd: RawFd, request: u64, argument: *mut T) -> io::Result<()> {
    loop {
        // SAFETY: the caller vouches for the argument.
        if unsafe { libc::ioctl(fd, request as _, argument) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_headers() {
        // _IOC(_IOC_NONE, 'G', 0, 24) and _IOC(_IOC_NONE, 'E', 4, 4).
        assert_eq!(request(b'G', 0, 24), 0x18_4700);
        assert_eq!(request(b'E', 4, 4), 0x4_4504);
    }
}
