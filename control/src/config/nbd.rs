//! Where NBD clients come in.

use clap::Args;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The port that is NBD's.
const PORT: u16 = 10809;

/// Where a disk is offered to NBD clients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NbdAddress {
    /// A TCP port of an address of this host.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl NbdAddress {
    /// True if other hosts may reach it.
    pub fn is_public(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }

    /// The same; a relative path starts at `folder`.
    #[must_use]
    pub fn within(self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            tcp => tcp,
        }
    }

    /// As clients name a disk that is called `export` there: `nbd://…`, or `nbds://…` with TLS.
    pub fn uri(&self, export: &str, tls: bool) -> String {
        let (export, scheme) = (in_uri(export), if tls { "nbds" } else { "nbd" });
        match self {
            Self::Tcp(address) if address.port() == PORT => {
                format!(
                    "{scheme}://{}/{export}",
                    address.to_string().trim_end_matches(&format!(":{PORT}"))
                )
            }
            Self::Tcp(address) => format!("{scheme}://{address}/{export}"),
            Self::Unix(path) => {
                format!("{scheme}+unix:///{export}?socket={}", in_uri(&path.to_string_lossy()))
            }
        }
    }
}

/// Letters that mean something in a URI are spelt out; slashes are as good in paths.
fn in_uri(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    word.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

impl FromStr for NbdAddress {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if let Some(path) = word.strip_prefix("unix:") {
            return match path {
                "" => Err("'unix:' is followed by no path: give unix:/run/disk.sock".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let local = word.strip_prefix("localhost:").unwrap_or(word);
        let address = word.parse().ok();
        let address = address.or_else(|| word.parse().ok().map(|ip: IpAddr| (ip, PORT).into()));
        let address = address.or_else(|| local.parse().ok().map(|port: u16| (here, port).into()));
        let address = address.or_else(|| (word == "localhost").then(|| (here, PORT).into()));
        address.map(Self::Tcp).ok_or_else(|| {
            format!(
                "'{word}' is no place for NBD clients: give unix:PATH, or an address of this host by \
                 numbers with a port, such as 127.0.0.1:{PORT} or [::1]:{PORT}"
            )
        })
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A disk that is offered to NBD clients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NbdPlace {
    /// Where. Several disks may be at one address.
    pub address: NbdAddress,
    /// What clients call it there.
    pub export: String,
}

impl NbdPlace {
    /// What no other disk has, in place of a socket's path.
    pub fn key(&self) -> PathBuf {
        self.address.uri(&self.export, false).into()
    }
}

/// How NBD clients and this host know that they mean each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Deserialize, Serialize)]
#[command(next_help_heading = "NBD")]
#[serde(rename_all = "kebab-case")]
pub struct NbdSecurity {
    /// Speak TLS: this is the server's certificate (PEM), with those that lead to its authority behind
    /// it. Clients need TLS at ports, and may use it at Unix sockets.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The key of that certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Only clients with a certificate that this authority (PEM) has signed may use TLS [default: all].
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
    /// Without TLS listen also where other hosts can connect, although nothing is encrypted and nobody
    /// is asked who it is: whoever reaches the port can read and write the disk.
    #[arg(long, conflicts_with = "tls_cert")]
    #[serde(default)]
    pub insecure: bool,
}

impl NbdSecurity {
    /// The words of a file.
    pub(super) const WORDS: [&str; 4] = ["tls-cert", "tls-key", "tls-ca", "insecure"];

    /// `self`, and where it says nothing `other`.
    pub fn or(self, other: &Self) -> Self {
        if self != Self::default() { self } else { other.clone() }
    }

    /// The same; relative paths start at `folder`.
    #[must_use]
    pub fn within(mut self, folder: &Path) -> Self {
        for path in [&mut self.tls_cert, &mut self.tls_key, &mut self.tls_ca].into_iter().flatten()
        {
            *path = folder.join(&*path);
        }
        self
    }

    /// Refuses words that do not go together.
    ///
    /// # Errors
    /// The message.
    pub(super) fn check(&self) -> Result<(), String> {
        match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(_), None, _) => Err("tls-cert needs tls-key, the key of the certificate".into()),
            (None, Some(_), _) => Err("tls-key needs tls-cert, the certificate of the key".into()),
            (None, None, Some(_)) => Err("tls-ca needs tls-cert and tls-key".into()),
            (Some(_), ..) if self.insecure => {
                Err("insecure does without TLS, and tls-cert asks for it: leave one out".into())
            }
            _ => Ok(()),
        }
    }

    /// Refuses an address where others could listen or come in, and a name that an `earlier` disk has.
    ///
    /// # Errors
    /// The message.
    pub(super) fn check_place(
        &self,
        place: &NbdPlace,
        earlier: &[&NbdPlace],
    ) -> Result<(), String> {
        let NbdPlace { address, export } = place;
        if address.is_public() && !self.insecure && self.tls_cert.is_none() {
            return Err(format!(
                "{address}: other hosts could connect there, nothing is encrypted, and nobody is asked \
                 who it is. Give --tls-cert and --tls-key, or listen at 127.0.0.1 or at a Unix socket; or \
                 say --insecure, if only those can reach it who may read and write the disk"
            ));
        }
        if earlier.contains(&place) {
            return Err(format!(
                "two disks are called '{export}' at {address}: give each an export of its own"
            ));
        }
        Ok(())
    }
}

/// Connections at a time, as a file says them.
pub(super) fn connections_in_file<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<u16>, D::Error> {
    match Option::<u64>::deserialize(from)? {
        None => Ok(None),
        Some(number) => match u16::try_from(number) {
            Ok(number @ 1..=256) => Ok(Some(number)),
            _ => Err(D::Error::custom(format!("a disk takes 1 to 256 connections, not {number}"))),
        },
    }
}

/// The protocol has at most 4096 bytes for a name.
///
/// # Errors
/// That it is longer.
pub(super) fn export_name(word: &str) -> Result<String, String> {
    if word.len() > 4096 {
        return Err(format!("it has {} bytes, and 4096 at most are allowed", word.len()));
    }
    Ok(word.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_told() {
        for (word, same, public) in [
            ("127.0.0.1:10810", "127.0.0.1:10810", false),
            ("127.0.0.1", "127.0.0.1:10809", false),
            ("localhost", "127.0.0.1:10809", false),
            ("localhost:7", "127.0.0.1:7", false),
            ("7", "127.0.0.1:7", false),
            ("[::1]:1", "[::1]:1", false),
            ("::", "[::]:10809", true),
            ("0.0.0.0:10809", "0.0.0.0:10809", true),
            ("unix:d.sock", "unix:d.sock", false),
        ] {
            let at: NbdAddress = word.parse().unwrap();
            assert_eq!((at.to_string().as_str(), at.is_public()), (same, public));
        }
        for word in ["", "unix:", "host", "host:7", "70000", "1.2.3", "127.0.0.1:", "/d.sock"] {
            assert!(word.parse::<NbdAddress>().unwrap_err().contains(word), "{word}");
        }
    }

    #[test]
    fn clients_are_told_a_uri() {
        for (word, export, uri) in [
            ("127.0.0.1", "", "nbd://127.0.0.1/"),
            ("[::1]:7", "a b", "nbd://[::1]:7/a%20b"),
            ("[::1]:10809", "a", "nbd://[::1]/a"),
            ("unix:/run/d&e.sock", "vm1", "nbd+unix:///vm1?socket=/run/d%26e.sock"),
        ] {
            assert_eq!(word.parse::<NbdAddress>().unwrap().uri(export, false), uri);
            let with_tls = uri.replacen("nbd", "nbds", 1);
            assert_eq!(word.parse::<NbdAddress>().unwrap().uri(export, true), with_tls);
        }
    }
}
