//! Which process serves a socket, and whether it serves somebody else.

use anyhow::{Context, bail};
use ringway_driver::Options;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// How long a server may take to answer that has another connection: an idle one needs microseconds,
/// but that other front-end may be leaving just now.
const MOMENT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The process that makes sockets for a daemon in a sandbox, its parent.
const HELPER: &str = "ringway-helper";

/// The process at the other end; `None` if it cannot be seen from here.
pub fn server(stream: &UnixStream) -> Option<u32> {
    // Who has called listen, says the kernel.
    let listened = socket_peercred(stream).ok()?.pid;
    let pid = u32::try_from(listened.as_raw_nonzero().get()).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let of = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    if of("Name:") == Some(HELPER) { of("PPid:")?.parse().ok() } else { Some(pid) }
}

/// Connects to the server of a disk. One that serves another front-end is told of at once: it would
/// answer when that has gone.
///
/// # Errors
/// No server, or a busy one, in words for the user.
pub fn connect(socket: &Path) -> anyhow::Result<UnixStream> {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        // The driver fails as well, and knows what to say.
        let error = Options::new().connect(socket).err().context("cannot connect")?;
        return Err(error.into());
    };
    if has_others(&stream) && !answers(&mut stream)? {
        let who = server(&stream).and_then(named).unwrap_or("its server".into());
        bail!(
            "{}: busy: {who} serves it to another front-end, and to one at a time. Try again when \
             that has gone",
            socket.display()
        );
    }
    Ok(stream)
}

fn named(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("process {pid} ({})", name.trim()))
}

/// True if the socket seems to have other connections than this one. Sockets of other folders can have
/// the same name, so it is no proof.
fn has_others(stream: &UnixStream) -> bool {
    let Ok(peer) = stream.peer_addr() else { return false };
    let Some(path) = peer.as_pathname() else { return false };
    std::fs::read("/proc/net/unix").is_ok_and(|table| connections(&table, path) > 1)
}

/// Connections to a listening socket, by the kernel's table: `Num RefCount Protocol Flags Type St Inode
/// Path`. The server's ends have its path; they wait to be accepted (02) or are (03).
fn connections(table: &[u8], path: &Path) -> usize {
    let lines = table.split(|&byte| byte == b'\n').filter_map(state_and_path);
    let path = path.as_os_str().as_bytes();
    lines.filter(|(state, found)| [b"02", b"03"].contains(state) && *found == path).count()
}

fn state_and_path(line: &[u8]) -> Option<(&[u8; 2], &[u8])> {
    let (mut rest, mut state) = (line, b"  ");
    for field in 0..7 {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|&byte| byte == b' ')?;
        if field == 5 {
            state = rest[..end].first_chunk()?;
        }
        rest = &rest[end..];
    }
    // One blank; the path may begin with others.
    Some((state, &rest[1..]))
}

/// Asks for the features, as the driver will do once more: every server answers that first of all.
fn answers(stream: &mut UnixStream) -> anyhow::Result<bool> {
    /// Request, flags (version 1), size: vhost-user, "Header".
    const GET_FEATURES: [u32; 3] = [1, 1, 0];
    let message = GET_FEATURES.map(u32::to_ne_bytes).concat();
    stream.write_all(&message).context("cannot ask the server")?;
    let mut polled = [PollFd::new(&*stream, PollFlags::IN)];
    if poll(&mut polled, Some(&MOMENT))? == 0 {
        return Ok(false);
    }
    // What a server that closes the connection or says something else means, the driver finds out.
    let mut answer = [0; 20];
    stream.set_read_timeout(Some(std::time::Duration::from_secs(1)))?;
    let whole = stream.read_exact(&mut answer);
    stream.set_read_timeout(None)?;
    whole.context("the server gave no answer that is one of vhost-user")?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_by_path() {
        let table = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            000000001ef08213: 00000002 00000000 00010000 0001 01 120760 /run/a b\n\
            000000001ef08214: 00000003 00000000 00000000 0001 02   762 /run/a b\n\
            000000001ef08215: 00000003 00000000 00000000 0001 03 120763 /run/a b\n\
            000000001ef08216: 00000003 00000000 00000000 0001 03 120764\n\
            000000001ef08217: 00000003 00000000 00000000 0001 03 120765 b\n";
        assert_eq!(connections(table, Path::new("/run/a b")), 2);
        assert_eq!(connections(table, Path::new("b")), 1);
        assert_eq!(connections(table, Path::new("/run/a")), 0);
    }
}
