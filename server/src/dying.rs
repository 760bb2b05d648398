//! The control socket of a daemon that was killed.
//!
//! It listens until the last write that it had begun has landed. And if it was killed while it started,
//! its helper, which has made the socket, has it until it notices. Either is over by itself.

use ringway_disk::open::{ENDING, is_dying, parent};
use ringway_vhost_user::connect_at_once;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// As long as an image's lock is waited for.
const DYING_MAX: Duration = Duration::from_secs(30);
/// A helper without a daemon ends at once, but this host may be busy.
const ORPHAN_MAX: Duration = Duration::from_secs(5);
/// How often it is looked who that is, before it is taken for a living daemon.
const CHECKS: u32 = 4;

/// Waits for whoever listens at `path`, if it was killed. Before there is a sandbox, as /proc says it.
pub(crate) fn wait_for(path: &Path) {
    let is_socket = path.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket());
    let Some(stream) = is_socket.then(|| connect_at_once(path).ok()).flatten() else { return };
    let Ok(listened) = socket_peercred(&stream) else { return };
    let Ok(pid) = u32::try_from(listened.pid.as_raw_nonzero().get()) else { return };
    for _ in 0..CHECKS {
        if wait_for_owner(path, &stream, pid) {
            return;
        }
        // A process that was killed is seen to be so a moment later.
        let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        if poll(&mut [PollFd::new(&stream, PollFlags::empty())], Some(&moment)) != Ok(0) {
            return;
        }
    }
}

/// False if who listens seems to live.
fn wait_for_owner(path: &Path, stream: &UnixStream, pid: u32) -> bool {
    let daemon = parent(pid);
    if is_dying(pid) || daemon.is_some_and(is_dying) {
        let (path, seconds) = (path.display(), DYING_MAX.as_secs());
        tracing::info!(
            "{path}: waiting up to {seconds} s for it: who listens there was killed, and its last \
             writes have not landed yet"
        );
        // Nobody accepts this connection any more, so it ends with the socket.
        let most = Timespec { tv_sec: DYING_MAX.as_secs() as i64, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(stream, PollFlags::empty())], Some(&most));
    } else if !is_helper(pid) || daemon.is_some_and(is_like_this) {
        return false;
    }
    if is_helper(pid) {
        wait_for_helper(pid);
    }
    true
}

/// A helper without a daemon ends, and removes the socket files that it has made: not before that is
/// there to be a new one.
fn wait_for_helper(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(process) = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
        return;
    };
    let most = Timespec { tv_sec: ORPHAN_MAX.as_secs() as i64, tv_nsec: 0 };
    let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&most));
}

fn name(pid: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()
}

fn is_helper(pid: u32) -> bool {
    name(&pid.to_string()).is_some_and(|name| ["ringway-helper", ENDING].contains(&name.trim()))
}

/// True if it runs the same program as this process, by name.
fn is_like_this(pid: u32) -> bool {
    let name_of = name(&pid.to_string());
    name_of.is_some() && name_of == name("self")
}
