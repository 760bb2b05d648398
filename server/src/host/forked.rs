//! Processes that are forked from the daemon before it enters its sandbox, and how they know that it is dead.

use super::wire::{Numbered, ReceiveError, SendError, receive, send};
use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

/// How long to leave the host alone that cannot take a message from a line.
const PAUSE: Duration = Duration::from_millis(10);

/// The process that another one was forked from. It is dead when its pidfd says so: all its threads have ended
/// then, and what they asked of the kernel. That a message cannot be received, or that its end of the line is
/// closed, says nothing of that.
pub(crate) struct Parent {
    pidfd: Option<OwnedFd>,
    /// No message can come any more.
    line_closed: bool,
    /// How many have come.
    heard: u64,
}

/// What a forked process has waited for.
pub(crate) enum Event<T> {
    /// Its parent asks something.
    Request(T, Option<OwnedFd>),
    /// Its parent has sent something else, and waits for an answer all the same.
    Unreadable(ReceiveError),
    /// The other descriptor is readable.
    Other,
    /// Its parent is dead.
    Dead,
}

impl Parent {
    /// This process, as those see it that are forked from it. Where the host has no pidfds (before Linux 5.3, or
    /// forbidden), they take the end of their line for its death.
    pub(crate) fn this() -> Self {
        Self { pidfd: pidfd_open(getpid(), PidfdFlags::empty()).ok(), line_closed: false, heard: 0 }
    }

    /// What [`settle`] has to leave open for it.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.pidfd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Waits for a request on the line, for `other` to be readable, or for the parent's death.
    pub(crate) fn next<T: DeserializeOwned>(
        &mut self,
        line: &OwnedFd,
        other: Option<BorrowedFd<'_>>,
    ) -> Event<T> {
        loop {
            if self.pidfd.is_none() && self.line_closed {
                return Event::Dead;
            }
            let line_fd = Some(line.as_fd()).filter(|_| !self.line_closed);
            let fds = [self.pidfd.as_ref().map(AsFd::as_fd), line_fd, other];
            let [dead, asks, rings] = match readable(fds) {
                Ok(ready) => ready,
                Err(Errno::INTR) => continue,
                Err(_) => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            if dead {
                return Event::Dead;
            }
            if asks {
                match receive(line) {
                    Ok((request, fd)) => {
                        self.heard += 1;
                        return Event::Request(request, fd);
                    }
                    Err(error @ ReceiveError::Message(_)) => {
                        self.heard += 1;
                        return Event::Unreadable(error);
                    }
                    Err(ReceiveError::Ended) => self.line_closed = true,
                    // For want of memory, say. It is on the line still.
                    Err(ReceiveError::Host(_)) => std::thread::sleep(PAUSE),
                }
            } else if rings {
                return Event::Other;
            }
        }
    }
}

impl Parent {
    /// Answers what has come last.
    ///
    /// # Errors
    /// [`SendError`].
    pub(crate) fn answer(
        &self,
        line: &OwnedFd,
        answer: &impl Serialize,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), SendError> {
        send(line, &Numbered { request: self.heard, answer }, fd)
    }
}

/// Waits until one of them is readable, or hangs up: which are.
fn readable(fds: [Option<BorrowedFd<'_>>; 3]) -> Result<[bool; 3], Errno> {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().flatten().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    poll(&mut polled, None)?;
    let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
    Ok(fds.map(|fd| fd.is_some() && ready.next() == Some(true)))
}

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
        unsafe { libc::syscall(libc::SYS_close_range, first as u32, last as u32, 0u32) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn parent(pidfd: OwnedFd) -> Parent {
        Parent { pidfd: Some(pidfd), line_closed: false, heard: 0 }
    }

    fn raw(line: &OwnedFd, bytes: &[u8]) {
        assert_eq!(
            rustix::net::send(line, bytes, rustix::net::SendFlags::empty()),
            Ok(bytes.len())
        );
    }

    /// Whatever comes, or cannot be received: the one that has sent it lives.
    #[test]
    fn c39_no_error_on_a_line_is_taken_for_the_death_of_who_has_it() {
        let (ours, its) = line().unwrap();
        let mut lives = parent(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
        for _ in 0..3 {
            raw(&ours, &vec![b'1'; 70 << 10]);
            assert!(matches!(lives.next::<u32>(&its, None), Event::Unreadable(_)));
            raw(&ours, b"nonsense");
            assert!(matches!(lives.next::<u32>(&its, None), Event::Unreadable(_)));
            send(&ours, &7_u32, None).unwrap();
            assert!(matches!(lives.next(&its, None), Event::Request(7_u32, None)));
        }
        // A line that is closed brings nothing more; the other descriptor does.
        drop(ours);
        let (rings, there) = line().unwrap();
        send(&there, &0_u32, None).unwrap();
        assert!(matches!(lives.next::<u32>(&its, Some(rings.as_fd())), Event::Other));
    }

    #[test]
    fn c39_the_dead_are_known_though_their_line_is_open() {
        let (ours, its) = line().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let mut dies = parent(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        send(&ours, &7_u32, None).unwrap();
        assert!(matches!(dies.next(&its, None), Event::Request(7_u32, None)));
        child.kill().unwrap();
        child.wait().unwrap();
        // What it has asked last nobody waits for.
        send(&ours, &8_u32, None).unwrap();
        assert!(matches!(dies.next::<u32>(&its, None), Event::Dead));
    }
}
