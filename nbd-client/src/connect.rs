//! Connections to servers, within a bound of time.

use crate::handshake::Known;
use crate::handshake::{HandshakeError, Negotiated, agree, greet, start_tls};
use crate::target::{Address, Target, Tls};
use crate::tls::{TlsError, begin, in_words, shake_hands};
use ringway_nbd_tls::Peer;
use ringway_nbd_words::offers;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, socketpair,
};
use rustls::{ClientConnection, Connection, Stream};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take at least for a connection beside the first, if nobody has asked for so many.
const SPARE: Duration = Duration::from_secs(1);

/// How long a server may take at least whose export is known from before: it is used without a connection at
/// first, too.
const KNOWN: Duration = Duration::from_secs(2);

/// Connections that are ready for requests. Their sockets do not block.
#[derive(Clone, Debug)]
pub struct Connected {
    /// The socket of the first one.
    pub socket: Arc<File>,
    /// Those of the others.
    pub others: Vec<Arc<File>>,
    /// What was agreed upon, the same for all.
    pub negotiated: Negotiated,
    /// What the server calls the export, if it tells.
    pub export: Option<String>,
    /// Why there is no connection yet, if the server is away: the sockets have ended, and all else is as it was
    /// known before.
    pub away: Option<String>,
}

/// One of them.
#[derive(Debug)]
struct One {
    socket: File,
    negotiated: Negotiated,
    export: Option<String>,
    /// Which of its host's addresses has taken it.
    at: Option<SocketAddr>,
}

impl Connected {
    /// All sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &Arc<File>> {
        std::iter::once(&self.socket).chain(&self.others)
    }

    /// What there is to know of the export while its server is away; `None` if it is away already.
    #[must_use]
    pub fn known(&self) -> Option<Known> {
        let connections = u16::try_from(self.sockets().count()).unwrap_or(u16::MAX);
        let (negotiated, export) = (self.negotiated, self.export.clone());
        self.away.is_none().then_some(Known { negotiated, export, connections })
    }

    /// An export whose server is away: connections that are lost already, as many as there were, but for those
    /// that are wanted no more.
    fn away(known: &Known, most: u16, why: String) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let lost = || {
            let (ours, _) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            io::Result::Ok(Arc::new(File::from(ours)))
        };
        let others = (1..known.connections.min(most)).map(|_| lost()).collect::<Result<_, _>>()?;
        let (negotiated, export) = (known.negotiated, known.export.clone());
        Ok(Self { socket: lost()?, others, negotiated, export, away: Some(why) })
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody listens, or what the host says.
    #[error("cannot connect to {address}: {source}. Does its server run?")]
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
/// each of both within the time that `target` gives. What the host's resolver takes to look up a name has
/// its own limits. More connections follow, as many as are wished for, if the export may have several and
/// the server takes them.
///
/// An export that is [known](Target::with_known) is used without a connection at first if there is none to be had:
/// the connected export tells why there is none.
///
/// # Errors
/// [`ConnectError`].
pub fn connect(target: &Target) -> Result<Connected, ConnectError> {
    let Some(known) = &target.known else { return connect_now(target) };
    let connect_timeout = target.connect_timeout.min(KNOWN);
    connect_now(&Target { connect_timeout, ..target.clone() }).or_else(|error| {
        let away = Connected::away(known, target.connections.most, error.to_string());
        away.map_err(|_| error)
    })
}

fn connect_now(target: &Target) -> Result<Connected, ConnectError> {
    let begun = Instant::now();
    let addresses = target.look_up().map_err(|source| ConnectError::Name {
        host: target.host().map_or("", |(host, _)| host).to_owned(),
        source,
    })?;
    let One { socket, negotiated, export, at } = connect_one(&target.at(&addresses))?;
    let (socket, others) = (Arc::new(socket), Vec::new());
    let mut connected = Connected { socket, others, negotiated, export, away: None };
    if negotiated.offers(offers::CAN_MULTI_CONN) || target.only_reads {
        // What a host's other addresses lead to may be another server.
        let target = target.at(at.as_slice());
        add_others(&mut connected, &target, begun.elapsed());
    }
    Ok(connected)
}

/// A server that has taken enough clients may let others wait: without being asked for, they are tried for
/// a moment only.
fn add_others(connected: &mut Connected, target: &Target, first: Duration) {
    let mut target = Target { block_status: false, ..target.clone() };
    if !target.connections.asked {
        target.connect_timeout = target.connect_timeout.min(SPARE.max(first * 4));
    }
    let same = Negotiated { block_status: None, ..connected.negotiated };
    for _ in 1..target.connections.most {
        match connect_one(&target) {
            Ok(one) if (one.negotiated, &one.export) == (same, &connected.export) => {
                connected.others.push(Arc::new(one.socket));
            }
            // Fewer are no failure; who needs as many as before looks at their number.
            _ => break,
        }
    }
}

fn connect_one(target: &Target) -> Result<One, ConnectError> {
    let tls = target.tls.as_ref().map(begin).transpose()?;
    let limit = target.connect_timeout;
    let failed = |source| ConnectError::Socket { address: target.address.to_string(), source };
    let (socket, at) = match &target.address {
        Address::Unix(path) => {
            let to = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
            let deadline = Deadline::to_connect(limit);
            (open(AddressFamily::UNIX, &to, deadline).map_err(failed)?, None)
        }
        Address::Tcp { .. } => {
            let addresses = target.addresses.as_deref().unwrap_or_default();
            let (socket, at) = one_of(&target.address.to_string(), addresses, limit)?;
            (socket, Some(at))
        }
    };
    let mut stream = Patient { socket: File::from(socket), deadline: Deadline::to_connect(limit) };
    greet(&mut stream)?;
    let (socket, (negotiated, export)) = match (&target.tls, tls) {
        (Some(words), Some(tls)) => within_tls(stream, tls, words, target)?,
        _ => {
            let agreed = agree(&mut stream, &target.export, target.block_status)?;
            (stream.socket, agreed)
        }
    };
    Ok(One { socket, negotiated, export, at })
}

/// The same within TLS, which from then on a thread carries that has the network's socket.
fn within_tls(
    mut stream: Patient,
    mut tls: ClientConnection,
    words: &Tls,
    target: &Target,
) -> Result<(File, (Negotiated, Option<String>)), ConnectError> {
    start_tls(&mut stream)?;
    shake_hands(&mut tls, &mut stream, words)?;
    let mut within = Stream::new(&mut tls, &mut stream);
    let agreed = match agree(&mut within, &target.export, target.block_status) {
        // A server judges its client when that thinks that TLS is agreed upon.
        Err(HandshakeError::Io(error)) => {
            return Err(TlsError::Refused(in_words(&error, words)).into());
        }
        agreed => agreed?,
    };
    let failed = |source| ConnectError::Socket { address: target.address.to_string(), source };
    let (tls, socket) = (Box::new(Connection::Client(tls)), stream.socket.into());
    let (plain, _) = ringway_nbd_tls::start(tls, socket, Peer::Server).map_err(failed)?;
    Ok((plain.into(), agreed))
}

/// Connects to the first of these addresses that takes it. Each has its share of the time.
fn one_of(
    name: &str,
    addresses: &[SocketAddr],
    limit: Duration,
) -> Result<(OwnedFd, SocketAddr), ConnectError> {
    let end = Instant::now() + limit;
    let mut error = io::Error::other("it has no address");
    for (to, left) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let share = end.saturating_duration_since(Instant::now());
        let share = share / u32::try_from(left).unwrap_or(u32::MAX);
        match tcp(to, Deadline { end: Instant::now() + share, ..Deadline::to_connect(limit) }) {
            Ok(socket) => return Ok((socket, *to)),
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

fn tcp(to: &SocketAddr, deadline: Deadline) -> io::Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = open(family, to, deadline).map_err(explained)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    // A peer that has gone without a word is found out after two minutes.
    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(15))?;
    rustix::net::sockopt::set_tcp_keepcnt(&socket, 4)?;
    // Keeping alive is not asked while something sent has not arrived.
    rustix::net::sockopt::set_tcp_user_timeout(&socket, 120_000)?;
    Ok(socket)
}

/// No server says this, but a filter of this host.
fn explained(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => io::Error::new(
            error.kind(),
            format!(
                "{error}: a filter of this host forbids it, such as IPAddressDeny= of the daemon's unit. There \
                 IPAddressAllow= lets the server's address through"
            ),
        ),
        _ => error,
    }
}

fn open(
    family: AddressFamily,
    to: &impl rustix::net::addr::SocketAddrArg,
    deadline: Deadline,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        match rustix::net::connect(&socket, to) {
            Ok(()) | Err(Errno::ISCONN) => return Ok(socket),
            Err(Errno::INPROGRESS | Errno::ALREADY) => ready(&socket, PollFlags::OUT, &deadline)?,
            // The server's queue of a Unix socket is full: nothing tells when it is not.
            Err(Errno::AGAIN) => {
                if deadline.left().is_zero() {
                    return Err(deadline.is_over());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Until when a server is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    end: Instant,
    /// How long that is, and how users call it.
    limit: Duration,
    name: &'static str,
}

impl Deadline {
    /// From now on, for so long.
    pub(crate) fn new(limit: Duration, name: &'static str) -> Self {
        Self { end: Instant::now() + limit, limit, name }
    }

    fn to_connect(limit: Duration) -> Self {
        Self::new(limit, "connect-timeout")
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    #[cold]
    fn is_over(&self) -> io::Error {
        let (limit, name) = (self.limit.as_secs_f32(), self.name);
        let why = format!("the server is silent, and the limit is over ({name}: {limit} s)");
        io::Error::new(io::ErrorKind::TimedOut, why)
    }
}

/// Waits until the socket can do this.
fn ready(socket: &impl AsFd, what: PollFlags, deadline: &Deadline) -> io::Result<()> {
    let left = deadline.left();
    if left.is_zero() {
        return Err(deadline.is_over());
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
    pub(crate) deadline: Deadline,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.socket).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready(&self.socket, PollFlags::IN, &self.deadline)?;
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
                    ready(&self.socket, PollFlags::OUT, &self.deadline)?;
                }
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until the server has closed its ends, for a few seconds at most: then it has taken all that
/// was sent. Servers that close before they have done it (QEMU's) may still do it later: where a connection
/// is given up without need, its requests are answered first.
pub(crate) fn wait_until_closed(sockets: &[Arc<File>]) {
    let deadline = Deadline::new(Duration::from_secs(5), "closing");
    for socket in sockets {
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
    }
    let mut buffer = vec![0; 64 << 10];
    for socket in sockets {
        if let Ok(socket) = socket.try_clone() {
            let mut stream = Patient { socket, deadline };
            while !deadline.left().is_zero() && stream.read(&mut buffer).is_ok_and(|got| got > 0) {}
        }
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As systemd's IPAddressDeny= has it, whose filter only root can install.
    #[test]
    fn f23_a_connection_that_a_filter_forbids_says_what_allows_it() {
        let said = |errno| explained(io::Error::from_raw_os_error(errno)).to_string();
        assert!(said(libc::EPERM).contains("IPAddressAllow="), "{}", said(libc::EPERM));
        assert!(!said(libc::ECONNREFUSED).contains("IPAddress"));
    }
}
