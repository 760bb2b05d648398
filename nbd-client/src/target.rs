//! Names of exports: which server, which of its disks.
//!
//! The words are those of the NBD project
//! (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/uri.md>), and `nbd:unix:PATH[:EXPORT]`,
//! which is shorter.

use crate::handshake::Known;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The port that the protocol has (IANA).
const PORT: u16 = 10809;

/// The longest name of an export (protocol: "Strings").
const EXPORT_MAX: usize = 4096;

/// The longest path of a socket: `sun_path` with the zero at its end.
const SOCKET_MAX: usize = 107;

/// Addresses of a host that are tried.
const ADDRESSES_MAX: usize = 16;

/// How long a server may take to accept, and to shake hands, if nobody says something else.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The most connections that a disk has without being asked.
const CONNECTIONS: u16 = 4;

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where the server listens.
    pub address: Address,
    /// Which of its disks; empty for the one it gives to those who name none.
    pub export: String,
    /// How to speak TLS, if it is to be spoken.
    pub tls: Option<Tls>,
    /// Whether to agree upon block status.
    pub(crate) block_status: bool,
    /// Where the host is, if that was looked up before.
    pub(crate) addresses: Option<Vec<SocketAddr>>,
    /// How many connections to have.
    pub(crate) connections: Connections,
    /// How long a server may take to accept, and to shake hands.
    pub(crate) connect_timeout: Duration,
    /// Nothing is written to it, so that several connections are one disk in any case.
    pub(crate) only_reads: bool,
    /// What was agreed upon before, if its server may be away.
    pub(crate) known: Option<Known>,
    pub(crate) said: String,
}

/// How many connections to have to an export that may have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// So many, if the server takes them.
    pub most: u16,
    /// Somebody has asked for this number: each has the full time that the first one has.
    pub asked: bool,
}

impl Connections {
    /// Without being asked: one for each queue, four at most. Servers have a thread, or many, for each.
    #[must_use]
    pub fn of_queues(queues: u16) -> Self {
        Self { most: queues.clamp(1, CONNECTIONS), asked: false }
    }

    /// So many, as somebody wants it.
    #[must_use]
    pub fn asked(most: u16) -> Self {
        Self { most, asked: true }
    }
}

impl Default for Connections {
    fn default() -> Self {
        Self { most: 1, asked: false }
    }
}

/// TLS to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The folder with the certificate of the authority, and this client's own with its key if it has one.
    pub certificates: PathBuf,
    /// The name, or address, that the server's certificate has to be for.
    pub hostname: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket, from the root.
    Unix(PathBuf),
    /// A port of a host, which is a name or an address.
    Tcp {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Why a word names no export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It is none.
    #[error(
        "{word}: {why}. Say nbd:unix:/PATH[:EXPORT], nbd://HOST[:PORT]/EXPORT, \
             nbd+unix:///EXPORT?socket=/PATH, or for TLS nbds://HOST[:PORT]/EXPORT?tls-certificates=/DIR"
    )]
    Malformed {
        /// What was said.
        word: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl Target {
    /// The schemes of names of exports.
    pub const SCHEMES: [&str; 4] = ["nbd", "nbd+unix", "nbds", "nbds+unix"];

    /// The same export, of which is asked where it has data
    /// ([`Remote::allocation`](crate::Remote::allocation)) before it is used.
    #[must_use]
    pub fn with_block_status(&self) -> Self {
        Self { block_status: true, ..self.clone() }
    }

    /// The same export, with several connections.
    #[must_use]
    pub fn with_connections(&self, connections: Connections) -> Self {
        Self { connections, ..self.clone() }
    }

    /// The same export, to which nobody writes: it may have several connections, whatever its server says of that.
    #[must_use]
    pub fn to_be_read(&self) -> Self {
        Self { only_reads: true, ..self.clone() }
    }

    /// True if nobody writes to it.
    #[must_use]
    pub fn only_reads(&self) -> bool {
        self.only_reads
    }

    /// What it is called in the header of an image that is based on it: as QEMU does, but for TLS.
    #[must_use]
    pub fn uri(&self) -> String {
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        let export = encode(self.export.as_bytes());
        match &self.address {
            Address::Unix(path) => {
                let path = encode(path.as_os_str().as_bytes());
                format!("{scheme}+unix:///{export}?socket={path}")
            }
            Address::Tcp { .. } => format!("{scheme}://{}/{export}", self.address),
        }
    }

    /// True if this is what the header of an image calls it.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let is_same = |other: Self| {
            (other.address, other.export) == (self.address.clone(), self.export.clone())
        };
        name == self.uri() || name.parse().is_ok_and(is_same)
    }

    /// How many connections to have.
    #[must_use]
    pub fn connections(&self) -> Connections {
        self.connections
    }

    /// The same export, whose server may take so long to accept, and to shake hands.
    #[must_use]
    pub fn with_connect_timeout(&self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self.clone() }
    }

    /// How long its server may take to accept, and to shake hands: ten seconds unless somebody says
    /// something else.
    #[must_use]
    pub fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The same export, which [`connect`](crate::connect()) takes to be as it was known before if its server is
    /// away.
    #[must_use]
    pub fn with_known(&self, known: Option<Known>) -> Self {
        Self { known, ..self.clone() }
    }

    /// True if it takes no more than a socket of this host to reach the server.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self.address, Address::Unix(_)) && self.tls.is_none()
    }

    /// What the export is, however it was said: the same word for all names that lead to one disk without a server being
    /// asked. `locate` says where the path of a socket leads. TLS is a way to it.
    #[must_use]
    pub fn identity(&self, locate: impl FnOnce(&Path) -> PathBuf) -> String {
        let server = match &self.address {
            Address::Unix(path) => {
                let path = locate(path).components().collect::<PathBuf>();
                // Else its end could be taken for the beginning of an export: no path has two of them.
                format!("unix:{}", path.display()).replace("/:", "//:")
            }
            Address::Tcp { host, port } => {
                let host = host.to_ascii_lowercase();
                // The root of all names may end one.
                let host = host.strip_suffix('.').unwrap_or(&host);
                match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
                    Ok(ip) if ip == Ipv4Addr::LOCALHOST || ip == Ipv6Addr::LOCALHOST => {
                        format!("localhost:{port}")
                    }
                    Ok(ip) => SocketAddr::new(ip, *port).to_string(),
                    Err(_) => format!("{host}:{port}"),
                }
            }
        };
        format!("nbd:{server}/:{}", self.export)
    }

    /// The same export, at the place where its socket is: `locate` says that, and no link is followed again when it is
    /// connected to. A place that is too long for a socket's name is left as it was said.
    #[must_use]
    pub fn located(&self, locate: impl FnOnce(&Path) -> PathBuf) -> Self {
        let Address::Unix(path) = &self.address else { return self.clone() };
        let real = Some(locate(path)).filter(|real| real.as_os_str().len() <= SOCKET_MAX);
        let address = Address::Unix(real.unwrap_or_else(|| path.clone()));
        Self { address, ..self.clone() }
    }

    /// The name and the port of a host that has to be looked up.
    #[must_use]
    pub fn host(&self) -> Option<(&str, u16)> {
        match &self.address {
            Address::Tcp { host, port } if fixed(host, *port).is_none() => Some((host, *port)),
            _ => None,
        }
    }

    /// The same export, of a host that is at these addresses: it is not looked up.
    #[must_use]
    pub fn at(&self, addresses: &[SocketAddr]) -> Self {
        Self { addresses: Some(addresses.to_vec()), ..self.clone() }
    }

    /// All addresses of the server's host, in the order in which they are to be tried.
    ///
    /// # Errors
    /// What the host's resolver says of the name.
    pub fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        match &self.address {
            Address::Unix(_) => Ok(Vec::new()),
            Address::Tcp { host, port } => match (&self.addresses, fixed(host, *port)) {
                (Some(known), _) => Ok(known.clone()),
                (None, Some(fixed)) => Ok(fixed),
                (None, None) => {
                    let mut all: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                    all.truncate(ADDRESSES_MAX);
                    Ok(all)
                }
            },
        }
    }
}

/// Where a host is that nobody has to be asked for.
fn fixed(host: &str, port: u16) -> Option<Vec<SocketAddr>> {
    if host == "localhost" {
        let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
        return Some(both.map(|ip| SocketAddr::new(ip, port)).into());
    }
    host.parse().ok().map(|ip| vec![SocketAddr::new(ip, port)])
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(word: &str) -> Result<Self, TargetError> {
        let (scheme, rest) = word.split_once(':').unwrap_or(("", word));
        let (rest, query) = match rest.split_once('?').filter(|_| rest.starts_with("//")) {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let malformed = |why| TargetError::Malformed { word: word.to_owned(), why };
        let query = Query::parse(query, scheme).map_err(malformed)?;
        let parsed = match (scheme, rest.strip_prefix("//")) {
            ("nbd" | "nbds", Some(rest)) => tcp(rest),
            ("nbd+unix" | "nbds+unix", Some(rest)) => unix_uri(rest, query.socket.as_deref()),
            ("nbd", None) => match rest.strip_prefix("unix:") {
                Some(rest) => unix_words(rest),
                None => Err("neither unix: nor // follows nbd:"),
            },
            ("nbds" | "nbds+unix", None) => Err("// follows nbds: and nbds+unix:"),
            _ => Err("it is no name of an export"),
        };
        let (address, export) = parsed.map_err(malformed)?;
        let tls = query.certificates.map(|certificates| Tls {
            certificates,
            hostname: query.hostname.unwrap_or_else(|| match &address {
                Address::Tcp { host, .. } => host.clone(),
                Address::Unix(_) => "localhost".to_owned(),
            }),
        });
        if export.len() > EXPORT_MAX {
            return Err(malformed("a name of an export has 4096 bytes at most"));
        }
        if let Address::Unix(path) = &address {
            if !path.is_absolute() {
                return Err(malformed("the path of the socket has to begin with /"));
            }
            if path.as_os_str().len() > SOCKET_MAX {
                return Err(malformed("the path of a socket has 107 bytes at most"));
            }
        }
        let said = word.to_owned();
        Ok(Self {
            address,
            export,
            tls,
            block_status: false,
            addresses: None,
            connections: Connections::default(),
            connect_timeout: CONNECT_TIMEOUT,
            only_reads: false,
            known: None,
            said,
        })
    }
}

/// What follows the `?` of a URI.
#[derive(Default)]
struct Query {
    socket: Option<PathBuf>,
    certificates: Option<PathBuf>,
    hostname: Option<String>,
}

impl Query {
    fn parse(query: Option<&str>, scheme: &str) -> Result<Self, &'static str> {
        let (unix, tls) = (scheme.ends_with("+unix"), scheme.starts_with("nbds"));
        let mut found = Self::default();
        for part in query.into_iter().flat_map(|query| query.split('&')) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let path = || decode_bytes(value).map(|path| PathBuf::from(OsString::from_vec(path)));
            match name {
                "socket" if unix => found.socket = Some(path()?),
                "tls-certificates" if tls => found.certificates = Some(path()?),
                "tls-hostname" if tls => found.hostname = Some(decode(value)?),
                _ if tls => {
                    return Err(
                        "tls-certificates, tls-hostname and, of nbds+unix, socket follow the ?",
                    );
                }
                _ if unix => return Err("nothing but a socket can be said behind the ?"),
                _ => return Err("a name of an export has no ?: write %3F"),
            }
        }
        if tls && found.certificates.as_ref().is_some_and(|path| path.is_relative()) {
            return Err("?tls-certificates=/DIR begins with /: daemons run in another folder");
        }
        if tls && !found.certificates.as_ref().is_some_and(|path| path.is_absolute()) {
            return Err(
                "?tls-certificates=/DIR is missing: the folder, from the root, that has ca-cert.pem, and \
                 client-cert.pem and client-key.pem if the server wants a certificate of its clients",
            );
        }
        Ok(found)
    }
}

/// `HOST[:PORT][/EXPORT]`
fn tcp(rest: &str) -> Result<(Address, String), &'static str> {
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    if export.contains('#') {
        return Err("a name of an export has no #: write %23");
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a [ has no ]")?;
            (host, port.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() || host.contains(['@', '?', '#']) {
        return Err("no host is named");
    }
    let port = port.filter(|port| !port.is_empty()).map_or(Ok(PORT), |port| {
        port.parse().ok().filter(|&port| port != 0).ok_or("the port is none from 1 to 65535")
    })?;
    Ok((Address::Tcp { host: host.to_owned(), port }, decode(export)?))
}

/// `/EXPORT`, with `?socket=PATH`.
fn unix_uri(rest: &str, socket: Option<&Path>) -> Result<(Address, String), &'static str> {
    let rest = rest.strip_prefix('/').ok_or("a third / has to follow the two")?;
    let path = socket.ok_or("?socket=/PATH is missing")?;
    Ok((Address::Unix(path.into()), decode(rest)?))
}

/// `PATH[:EXPORT]`, and as QEMU has it `PATH[:exportname=EXPORT]`.
fn unix_words(rest: &str) -> Result<(Address, String), &'static str> {
    let (path, export) = rest.split_once(':').unwrap_or((rest, ""));
    let export = export.strip_prefix("exportname=").unwrap_or(export);
    Ok((Address::Unix(path.into()), export.to_owned()))
}

fn decode(text: &str) -> Result<String, &'static str> {
    String::from_utf8(decode_bytes(text)?).map_err(|_| "a name of an export is UTF-8")
}

/// What a URI cannot have becomes `%2F` and the like.
fn encode(bytes: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
    let one = |byte: &u8| match is_plain(byte) {
        true => char::from(*byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    bytes.iter().map(one).collect()
}

/// `%2F` becomes `/`.
fn decode_bytes(text: &str) -> Result<Vec<u8>, &'static str> {
    let mut parts = text.as_bytes().split(|&byte| byte == b'%');
    let mut bytes = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        let code = part.get(..2).filter(|code| code.iter().all(u8::is_ascii_hexdigit));
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        let code = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        bytes.push(code.ok_or("two hexadecimal digits have to follow a %")?);
        bytes.extend_from_slice(&part[2..]);
    }
    if bytes.contains(&0) { Err("a name has no zero byte") } else { Ok(bytes) }
}

/// As it was said.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.said)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ways_to_name_an_export_are_understood() {
        let unix = |path: &str| Address::Unix(path.into());
        let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
        for (word, address, export) in [
            ("nbd:unix:/run/x.sock", unix("/run/x.sock"), ""),
            ("nbd:unix:/run/x.sock:disk", unix("/run/x.sock"), "disk"),
            ("nbd:unix:/run/x.sock:exportname=disk", unix("/run/x.sock"), "disk"),
            ("nbd:unix:/x:a:b", unix("/x"), "a:b"),
            ("nbd+unix:///?socket=/run/x.sock", unix("/run/x.sock"), ""),
            ("nbd+unix:///a%20b/c?socket=/r%3ax", unix("/r:x"), "a b/c"),
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://host/disk", tcp("host", 10809), "disk"),
            ("nbd://10.0.0.1:99/", tcp("10.0.0.1", 99), ""),
            ("nbd://[::1]:99/d", tcp("::1", 99), "d"),
            ("nbd://[::1]//d", tcp("::1", 10809), "/d"),
        ] {
            let target: Target = word.parse().unwrap();
            assert_eq!((&target.address, target.export.as_str()), (&address, export), "{word}");
            assert_eq!(target.to_string(), word);
        }
    }

    #[test]
    fn c99_an_image_calls_an_export_by_a_uri_that_leads_there() {
        for (word, uri) in [
            ("nbd:unix:/run/x.sock", "nbd+unix:///?socket=/run/x.sock"),
            ("nbd:unix:/run/a b&.sock:d?k", "nbd+unix:///d%3Fk?socket=/run/a%20b%26.sock"),
            ("nbd://host/disk", "nbd://host:10809/disk"),
            ("nbd://[::1]:99/d", "nbd://[::1]:99/d"),
        ] {
            let target: Target = word.parse().unwrap();
            assert_eq!(target.uri(), uri);
            assert!(target.is_called(uri) && target.is_called(word));
            assert!(uri.parse::<Target>().unwrap().is_called(word));
            assert!(!target.is_called("nbd://host:10809/other") && !target.is_called("disk"));
        }
        let tls: Target = "nbds://h/d?tls-certificates=/pki".parse().unwrap();
        assert!(tls.is_called("nbds://h:10809/d"), "where certificates are is nobody else's");
    }

    #[test]
    fn tls_has_a_folder_of_certificates_and_a_name() {
        for (word, folder, name) in [
            ("nbds://h.example/d?tls-certificates=/pki", "/pki", "h.example"),
            ("nbds://[::1]:9/d?tls-certificates=/a%20b", "/a b", "::1"),
            ("nbds://10.0.0.1/?tls-hostname=vm&tls-certificates=/pki", "/pki", "vm"),
            ("nbds+unix:///d?socket=/x.sock&tls-certificates=/pki", "/pki", "localhost"),
        ] {
            let tls = word.parse::<Target>().unwrap().tls.unwrap();
            assert_eq!(
                (tls.certificates.as_path(), tls.hostname.as_str()),
                (Path::new(folder), name)
            );
        }
        assert_eq!("nbd://h/d".parse::<Target>().unwrap().tls, None);
    }

    #[test]
    fn addresses_and_this_host_are_not_looked_up() {
        let target = |word: &str| word.parse::<Target>().unwrap();
        for (word, addresses) in [
            ("nbd://10.0.0.1:99/", &["10.0.0.1:99"][..]),
            ("nbd://[::1]/", &["[::1]:10809"]),
            ("nbd://localhost/", &["127.0.0.1:10809", "[::1]:10809"]),
        ] {
            let found = target(word).look_up().unwrap();
            assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), addresses);
            assert_eq!(target(word).host(), None);
        }
        let named = target("nbd://some.host:99/");
        assert_eq!(named.host(), Some(("some.host", 99)));
        let known: SocketAddr = "10.0.0.1:99".parse().unwrap();
        assert_eq!(named.at(&[known]).look_up().unwrap(), [known]);
    }

    #[test]
    fn c93_one_export_is_the_same_however_it_is_said() {
        let same: [&[&str]; 5] = [
            &[
                "nbd://Host.Example/a%20b",
                "nbd://host.example:10809/a b",
                "nbd://host.example.:/%61 b",
                "nbds://HOST.example/a%20b?tls-certificates=/pki",
                "nbds://host.example/a b?tls-certificates=/other&tls-hostname=x",
            ],
            &["nbd://host.example:10810/a b"],
            &[
                "nbd://[2001:db8::1]/d",
                "nbd://[2001:DB8:0:0::1]:10809/d",
                "nbd://[2001:db8::0.0.0.1]/d",
            ],
            &[
                "nbd://127.0.0.1/d",
                "nbd://localhost/d",
                "nbd://[::1]/d",
                "nbd://[::ffff:127.0.0.1]/d",
            ],
            &[
                "nbd:unix:/run/x.sock:d",
                "nbd:unix:/run//./x.sock:exportname=d",
                "nbd:unix:/var/run/x.sock:d",
                "nbd+unix:///d?socket=/run/x%2esock",
                "nbds+unix:///d?socket=/run/x.sock&tls-certificates=/pki",
            ],
        ];
        let identity = |word: &&str| {
            let locate = |path: &Path| match path.strip_prefix("/var/run") {
                Ok(within) => Path::new("/run").join(within),
                Err(_) => path.into(),
            };
            word.parse::<Target>().unwrap().identity(locate)
        };
        let all: Vec<Vec<String>> =
            same.iter().map(|words| words.iter().map(identity).collect()).collect();
        for (nth, one) in all.iter().enumerate() {
            assert!(one.iter().all(|is| *is == one[0]), "{one:?}");
            assert!(all[..nth].iter().all(|other| other[0] != one[0]), "{one:?}");
        }
        let others = [
            "nbd:unix:/x:a:b",
            "nbd:unix:/x:a",
            "nbd:unix:/x",
            "nbd://h/D",
            "nbd://h/d",
            "nbd+unix:///b?socket=/x/%3Aa",
            "nbd+unix:///a/%3Ab?socket=/x",
            "nbd+unix:///%3Aa/%3Ab?socket=/x",
        ];
        let found: std::collections::HashSet<_> = others.iter().map(identity).collect();
        assert_eq!(found.len(), others.len(), "{found:?}");
    }

    #[test]
    fn what_names_no_export_is_refused_with_the_reason() {
        let long = format!("nbd:unix:/{}", "x".repeat(107));
        for (word, why) in [
            ("nbd:x", "neither unix: nor //"),
            ("nbd:unix:", "has to begin with /"),
            ("nbd:unix:x.sock", "has to begin with /"),
            (long.as_str(), "107 bytes"),
            ("nbd://", "no host"),
            ("nbd://:99/x", "no host"),
            ("nbd://h:0/x", "from 1 to 65535"),
            ("nbd://h:99999/x", "from 1 to 65535"),
            ("nbd://[::1/x", "has no ]"),
            ("nbd://h/x?y", "write %3F"),
            ("nbd+unix://x?socket=/y", "a third /"),
            ("nbd+unix:///x", "?socket=/PATH is missing"),
            ("nbd+unix:///x?socket=/y&tls=1", "nothing but a socket"),
            ("nbd+unix:///%4?socket=/y", "two hexadecimal digits"),
            ("nbd+unix:///%+1?socket=/y", "two hexadecimal digits"),
            ("nbd+unix:///%00?socket=/y", "no zero byte"),
            ("nbd+unix:///%ff?socket=/y", "is UTF-8"),
            ("nbds://host/x", "?tls-certificates=/DIR is missing"),
            ("nbds://host/x?tls-certificates=pki", "begins with /"),
            ("nbds://host/x?tls-verify-peer=0", "tls-certificates, tls-hostname"),
            ("nbds+unix:///x?socket=/y", "?tls-certificates=/DIR is missing"),
            ("nbds+unix:///x?tls-certificates=/y", "?socket=/PATH is missing"),
            ("nbds:unix:/x", "tls-certificates=/DIR is missing"),
            ("nbd://host/x?tls-certificates=/y", "write %3F"),
        ] {
            let error = word.parse::<Target>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{word}: ")) && error.contains(why), "{error}");
        }
    }
}
