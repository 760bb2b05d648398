//! Connections to servers, within a bound of time.

use crate::handshake::{HandshakeError, Negotiated, agree, greet, start_tls};
use crate::target::{Address, Target, Tls};
use crate::tls::{TlsError, begin, in_words, shake_hands};
use ringway_nbd_tls::Peer;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustls::{ClientConnection, Connection, Stream};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take to accept and to shake hands, or to answer one question.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

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
    /// A host that is not known.
    #[error(
        "cannot look up the host '{host}': {source}. Give its IP address, or have the name known"
    )]
    Name {
        /// Its name.
        host: String,
        /// What the resolver says.
        source: io::Error,
    },
    /// There is no TLS with it.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server does not give the export.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Connects to a server, at the first of its host's addresses where that works, and agrees upon the export:
/// ten seconds for each of both. What the host's resolver takes to look up a name has its own limits.
///
/// # Errors
/// [`ConnectError`].
pub fn connect(target: &Target) -> Result<Connected, ConnectError> {
    let tls = target.tls.as_ref().map(begin).transpose()?;
    let deadline = Instant::now() + TIMEOUT;
    let failed = |source| ConnectError::Socket { address: target.address.to_string(), source };
    let socket = match &target.address {
        Address::Unix(path) => {
            let to = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
            open(AddressFamily::UNIX, &to, deadline).map_err(failed)?
        }
        Address::Tcp { host, .. } => {
            let unknown = |source| ConnectError::Name { host: host.clone(), source };
            let addresses = target.look_up().map_err(unknown)?;
            one_of(&target.address.to_string(), &addresses)?
        }
    };
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = Patient { socket: File::from(socket), deadline };
    greet(&mut stream)?;
    let (socket, negotiated) = match (&target.tls, tls) {
        (Some(words), Some(tls)) => within_tls(stream, tls, words, target)?,
        _ => {
            let negotiated = agree(&mut stream, &target.export, target.block_status)?;
            (stream.socket, negotiated)
        }
    };
    Ok(Connected { socket: Arc::new(socket), negotiated })
}

/// The same within TLS, which from then on a thread carries that has the network's socket.
fn within_tls(
    mut stream: Patient,
    mut tls: ClientConnection,
    words: &Tls,
    target: &Target,
) -> Result<(File, Negotiated), ConnectError> {
    start_tls(&mut stream)?;
    shake_hands(&mut tls, &mut stream, words)?;
    let mut within = Stream::new(&mut tls, &mut stream);
    let negotiated = match agree(&mut within, &target.export, target.block_status) {
        // A server judges its client when that thinks that TLS is agreed upon.
        Err(HandshakeError::Io(error)) => {
            return Err(TlsError::Refused(in_words(&error, words)).into());
        }
        agreed => agreed?,
    };
    let failed = |source| ConnectError::Socket { address: target.address.to_string(), source };
    let (tls, socket) = (Box::new(Connection::Client(tls)), stream.socket.into());
    let (plain, _) = ringway_nbd_tls::start(tls, socket, Peer::Server).map_err(failed)?;
    Ok((plain.into(), negotiated))
}

/// Connects to the first of these addresses that takes it. Each has its share of the time.
fn one_of(name: &str, addresses: &[SocketAddr]) -> Result<OwnedFd, ConnectError> {
    let end = Instant::now() + TIMEOUT;
    let mut error = io::Error::other("it has no address");
    for (to, left) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let share = end.saturating_duration_since(Instant::now());
        let share = share / u32::try_from(left).unwrap_or(u32::MAX);
        match tcp(to, Instant::now() + share) {
            Ok(socket) => return Ok(socket),
            Err(refused) => error = refused,
        }
    }
    let tried = addresses.iter().map(|to| to.ip().to_string()).collect::<Vec<_>>().join(", ");
    let address = if name == addresses.first().map(ToString::to_string).unwrap_or_default() {
        name.to_owned()
    } else {
        format!("{name} (tried: {tried})")
    };
    Err(ConnectError::Socket { address, source: error })
}

fn tcp(to: &SocketAddr, deadline: Instant) -> io::Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = open(family, to, deadline)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    // A peer that has gone without a word is found out after two minutes.
    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(15))?;
    rustix::net::sockopt::set_tcp_keepcnt(&socket, 4)?;
    Ok(socket)
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
