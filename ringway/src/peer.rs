//! Which process serves a socket.

use rustix::net::sockopt::socket_peercred;
use std::os::unix::net::UnixStream;

/// The process that makes sockets for a daemon in a sandbox, its parent.
const HELPER: &str = "ringway-helper";

/// The process at the other end; `None` if it cannot be seen from here.
pub(crate) fn server(stream: &UnixStream) -> Option<u32> {
    // Who has called listen, says the kernel.
    let listened = socket_peercred(stream).ok()?.pid;
    let pid = u32::try_from(listened.as_raw_nonzero().get()).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let of = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    if of("Name:") == Some(HELPER) { of("PPid:")?.parse().ok() } else { Some(pid) }
}
