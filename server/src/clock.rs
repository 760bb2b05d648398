//! Clocks of the kernel, by way of the C library.
//!
//! rustix has its own way to the vDSO, which ends the process where there is none to be called, as under
//! valgrind; and the look-up is a system call that the sandbox does not allow.

use std::time::Duration;

/// What this clock shows, if there is one with this number.
pub(crate) fn clock(id: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours.
    let rc = unsafe { libc::clock_gettime(id, &raw mut time) };
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    (rc == 0).then(|| Some(Duration::new(seconds.ok()?, nanos.ok()?)))?
}
