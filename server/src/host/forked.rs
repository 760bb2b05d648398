//! Processes that are forked from the daemon before it enters its sandbox.

use nix::sys::signal::{SigSet, Signal};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{OwnedFd, RawFd};

/// Two ends of a line for messages.
pub(super) fn line() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Nobody asks how a child of this process ended: so that the kernel keeps no record of it (a zombie).
pub(crate) fn leave_no_zombie() {
    // SAFETY: there is no handler to be run.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Lets go of what the daemon has, but for a few descriptors; `prints` is for one whose processes
/// print.
pub(crate) fn settle(kept: &[Option<RawFd>], prints: bool) {
    // All best effort: none of it is needed to serve.
    // Signals from a terminal or a service manager are for the daemon: it tells when it is over.
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1, Signal::SIGHUP];
    let _ = signals.into_iter().collect::<SigSet>().thread_block();
    // SAFETY: there is no handler to be run.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        if !prints {
            let _ = rustix::stdio::dup2_stdout(&null);
        }
    }
    let mut kept: Vec<RawFd> = kept.iter().flatten().copied().collect();
    kept.sort_unstable();
    let mut next = 3;
    for fd in kept {
        close_between(next, fd - 1);
        next = fd + 1;
    }
    close_between(next, RawFd::MAX);
    let _ = rustix::thread::set_no_new_privs(true);
}

fn close_between(first: RawFd, last: RawFd) {
    if first <= last {
        // SAFETY: in this process nothing uses these descriptors; their owners are never dropped.
        unsafe {
            libc::syscall(libc::SYS_close_range, first.cast_unsigned(), last.cast_unsigned(), 0u32)
        };
    }
}
