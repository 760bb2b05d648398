//! Which signals ask a command to end.

use libc::{SIGHUP, SIGINT, SIGTERM, c_int};

/// The signals that ask a command to end: SIGINT, SIGTERM and SIGHUP, but for those that were ignored when it
/// was started. Whoever starts it under nohup(1), or in the background of a script, does not want it to
/// hear them. To be asked before a handler is installed.
pub fn that_end() -> impl Iterator<Item = c_int> {
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&number| !is_ignored(number))
}

fn is_ignored(number: c_int) -> bool {
    // SAFETY: a plain C struct for which zeroes are valid; the kernel writes it and changes nothing.
    let (failed, old) = unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(number, std::ptr::null(), &raw mut old), old)
    };
    failed == 0 && old.sa_sigaction == libc::SIG_IGN
}
