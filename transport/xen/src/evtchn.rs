//! The event channel device, `/dev/xen/evtchn`: a bell between two domains.
//!
//! Source: `include/sys/evtchn.h` of Xen (MIT): numbers and layouts. A port that has rung stays
//! silent until its number was read from the device and written back.

use super::access::{Access, Named, need};
use super::sys::{ioctl, request};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
struct Bind {
    domain: u32,
    port: u32,
}

pub(super) const BIND_INTERDOMAIN: u64 = request(b'E', 1, size_of::<Bind>());
pub(super) const NOTIFY: u64 = request(b'E', 4, 4);

/// One event channel. Closing the device unbinds it.
#[derive(Debug)]
pub(super) struct EventChannel {
    file: File,
    port: u32,
}

impl EventChannel {
    /// Binds what domain `domid` offers as `remote`.
    ///
    /// # Errors
    /// What the host says to the device or the port.
    pub(super) fn bind(access: &dyn Access, domid: u16, remote: u32) -> io::Result<Self> {
        let file = File::from(need(access, Named::Events)?);
        let mut bind = Bind { domain: domid.into(), port: remote };
        let fd = file.as_raw_fd();
        // SAFETY: the structure is as the driver wants it. The result is the local port.
        let port = unsafe { libc::ioctl(fd, BIND_INTERDOMAIN as _, &raw mut bind) };
        match u32::try_from(port) {
            Ok(port) => Ok(Self { file, port }),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    /// Our number of the channel.
    #[must_use]
    pub(super) fn port(&self) -> u32 {
        self.port
    }

    /// Rings at the other side.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn notify(&self) -> io::Result<()> {
        let mut port = self.port;
        // SAFETY: the argument is the number of a port.
        unsafe { ioctl(self.file.as_raw_fd(), NOTIFY, &raw mut port) }
    }

    /// Readable once the other side has rung.
    #[must_use]
    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Takes what rang and lets it ring again. Without a ring it does nothing.
    pub(super) fn hush(&mut self) {
        let mut port = [0; 4];
        // One port is bound, and it rings once before it is written back.
        if let Ok(4) = self.file.read(&mut port) {
            // A refusal is as good as a silent guest: the port was ours a moment ago.
            let _ = self.file.write(&port);
        }
    }
}
