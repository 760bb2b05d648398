//! Where the page is served, and under which names it may be asked for.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// `127.0.0.1:9097`, `[::1]:9097`, `localhost:9097`
    Tcp(SocketAddr),
    /// `unix:PATH`
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if let Some(path) = word.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: has no path behind it: give unix:/run/ringway-top.sock".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let wrong = || {
            format!(
                "'{word}' is no address to listen at: give 127.0.0.1:PORT, [::1]:PORT or unix:PATH"
            )
        };
        let (host, port) = word.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let host = match host {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            // An IPv6 address ends in digits too.
            host if host.contains(':') && !host.starts_with('[') => return Err(wrong()),
            host => {
                host.trim_start_matches('[').trim_end_matches(']').parse().map_err(|_| wrong())?
            }
        };
        Ok(Self::Tcp(SocketAddr::new(host, port)))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Other machines can connect to it.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }
}

/// Whether a page may be asked for under this name: the value of a `Host` header.
///
/// A foreign site can have its own name resolve to an address of ours, and its page would then count as
/// being of the same origin as this one (DNS rebinding). It cannot do that with an address, nor with
/// `localhost`, nor with names that the user of this page has given.
pub(super) fn is_ours(host: &str, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<hyper::http::uri::Authority>() else { return false };
    let name = authority.host();
    // An authority's host ends with its bracket, whatever comes after that.
    let port = host.strip_prefix(name).map(|rest| rest.strip_prefix(':').unwrap_or(rest));
    if host.contains('@') || !port.is_some_and(|port| port.bytes().all(|c| c.is_ascii_digit())) {
        return false;
    }
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|ours| name.eq_ignore_ascii_case(ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for word in ["127.0.0.1:9097", "[::1]:9097", "0.0.0.0:80", "unix:/run/top.sock"] {
            assert_eq!(word.parse::<Address>().unwrap().to_string(), word);
        }
        let localhost: Address = "localhost:1".parse().unwrap();
        assert_eq!(localhost.to_string(), "127.0.0.1:1");
        for word in ["", "9097", ":9097", "127.0.0.1", "127.0.0.1:65536", "::1:80", "host:80"] {
            assert!(word.parse::<Address>().unwrap_err().contains("127.0.0.1:PORT"), "{word}");
        }
        assert!("unix:".parse::<Address>().is_err());
    }

    #[test]
    fn only_what_is_not_of_this_host_is_remote() {
        let remote = |word: &str| word.parse::<Address>().unwrap().is_remote();
        assert!(remote("0.0.0.0:1") && remote("[::]:1") && remote("192.0.2.1:1"));
        assert!(!remote("127.3.2.1:1") && !remote("[::1]:1") && !remote("unix:x"));
    }

    #[test]
    fn names_that_somebody_else_may_own_are_refused() {
        let names = ["host.example".to_owned()];
        for host in
            ["127.0.0.1:9097", "127.0.0.1", "[::1]:80", "LocalHost:1", "host.example", "10.0.0.1"]
        {
            assert!(is_ours(host, &names), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:9097",
            "localhost@evil.example",
            "[::1].evil.example",
            "[::1].evil.example:9097",
            "evil@127.0.0.1",
            "a b",
            "127.0.0.1:9097, evil.example",
        ] {
            assert!(!is_ours(host, &names), "{host}");
        }
    }
}
