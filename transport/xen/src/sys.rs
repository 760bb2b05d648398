//! The one door to the ioctls of Xen's devices.

use super::{evtchn, gntdev};
use std::io;
use std::os::fd::RawFd;

/// What workers ask of Xen's devices: to copy, map and forget pages, to ring a guest's bell. The
/// numbers of ioctls, of which the kernel takes 32 bits.
#[must_use]
pub fn worker_ioctls() -> Vec<u32> {
    let asked =
        [gntdev::GRANT_COPY, gntdev::MAP_GRANT_REF, gntdev::UNMAP_GRANT_REF, evtchn::NOTIFY];
    asked.map(low_bits).into()
}

/// What only sessions ask of them: to bind a bell, and to have it rung once they are gone.
#[must_use]
pub fn session_ioctls() -> Vec<u32> {
    [gntdev::SET_UNMAP_NOTIFY, evtchn::BIND_INTERDOMAIN].map(low_bits).into()
}

/// All of them fit.
#[allow(clippy::cast_possible_truncation)]
fn low_bits(request: u64) -> u32 {
    request as u32
}

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
        assert_eq!(worker_ioctls(), [0x10_4708, 0x18_4700, 0x10_4701, 0x4_4504]);
        assert_eq!(session_ioctls(), [0x10_4707, 0x8_4501]);
    }
}
