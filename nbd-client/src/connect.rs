//! Connections to servers, within a bound of time.

use crate::handshake::{HandshakeError, Negotiated, handshake};
use crate::target::{Address, Target};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take to accept and to shake hands, or to answer one question.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A connection that is ready for requests. Its socket does not block.
#[derive(Clone, Debug)]
pub struct Connected {
    /// The socket.
    pub socket: Arc<File>,
    /// What was agreed upon.
    pub negotiated: Negotiated,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody listens, or what the host says.
    #[error("cannot connect to {address}: {source}")]
    Socket {
        /// Where.
        address: String,
        /// What the host says.
        source: io::Error,
    },
    /// A name, where only addresses can be used.
    #[error("'{0}' is no address: names of hosts are not looked up. Give its IP address")]
    Name(String),
    /// The server does not give the export.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Connects to a server and agrees upon the export, within ten seconds.
///
/// # Errors
/// [`ConnectError`].
pub fn connect(target: &Target) -> Result<Connected, ConnectError> {
    let deadline = Instant::now() + PATIENCE;
    let failed = |source| ConnectError::Socket { address: target.address.to_string(), source };
    let socket = match &target.address {
        Address::Unix(path) => {
            let to = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
            open(AddressFamily::UNIX, &to, deadline)
        }
        Address::Tcp { host, port } => {
            let host = if host == "localhost" { "127.0.0.1" } else { host };
            let ip: IpAddr = host.parse().map_err(|_| ConnectError::Name(host.to_owned()))?;
            let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            open(family, &SocketAddr::new(ip, *port), deadline).and_then(|socket| {
                rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
                // A peer that has gone without a word is found out after two minutes.
                rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
                rustix::net::sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
                rustix::net::sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(15))?;
                rustix::net::sockopt::set_tcp_keepcnt(&socket, 4)?;
                Ok(socket)
            })
        }
    };
    let socket = socket.map_err(failed)?;
    let mut stream = Patient { socket: File::from(socket), deadline };
    let negotiated = handshake(&mut stream, &target.export, target.block_status)?;
    Ok(Connected { socket: Arc::new(stream.socket), negotiated })
}

fn open(
    family: AddressFamily,
    to: &impl rustix::net::addr::SocketAddrArg,
    deadline: Instant,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        match rustix::net::connect(&socket, to) {
            Ok(()) | Err(Errno::ISCONN) => return Ok(socket),
            Err(Errno::INPROGRESS | Errno::ALREADY) => ready(&socket, PollFlags::OUT, deadline)?,
            // The server's queue of a Unix socket is full: nothing tells when it is not.
            Err(Errno::AGAIN) => {
                if Instant::now() > deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits until the socket can do this.
fn ready(socket: &impl AsFd, what: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the server is silent"));
    }
    let left = left.try_into().map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, what)], Some(&left)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Reads and writes a socket that does not block, for so long.
#[derive(Debug)]
pub(crate) struct Patient {
    pub(crate) socket: File,
    pub(crate) deadline: Instant,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.socket).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready(&self.socket, PollFlags::IN, self.deadline)?;
                }
                done => return done,
            }
        }
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.socket).write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready(&self.socket, PollFlags::OUT, self.deadline)?;
                }
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until the server has closed its end, for a few seconds at most: then it has taken all that
/// was sent, and nothing of it comes later.
pub(crate) fn wait_until_closed(socket: &File) {
    let deadline = Instant::now() + Duration::from_secs(5);
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
    let mut stream = Patient {
        socket: match socket.try_clone() {
            Ok(socket) => socket,
            Err(_) => return,
        },
        deadline,
    };
    let mut buffer = vec![0; 64 << 10];
    while Instant::now() < deadline && stream.read(&mut buffer).is_ok_and(|got| got > 0) {}
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}
