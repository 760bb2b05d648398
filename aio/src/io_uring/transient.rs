//! Which errors of `io_uring_enter` pass by themselves.

use std::io;

/// True if what was not taken stays queued and goes with a later call.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    let transient = [libc::ETIME, libc::EINTR, libc::EAGAIN, libc::EBUSY];
    error.raw_os_error().is_some_and(|errno| transient.contains(&errno))
}
