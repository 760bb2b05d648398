//! Where metrics are served.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where programs that collect metrics connect.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum MetricsAt {
    /// A TCP port of an address of this host.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl MetricsAt {
    /// With its path, if it is a relative one, from `folder` on.
    #[must_use]
    pub fn within(self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            tcp => tcp,
        }
    }

    /// True if other hosts may reach it.
    pub fn is_public(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }
}

impl FromStr for MetricsAt {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if let Some(path) = word.strip_prefix("unix:") {
            return match path {
                "" => Err("'unix:' is followed by no path: give unix:/run/metrics.sock".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let here = |port: &str| Some((IpAddr::V4(Ipv4Addr::LOCALHOST), port.parse().ok()?).into());
        let local = word.strip_prefix("localhost:").or(word.strip_prefix(':')).unwrap_or(word);
        match word.parse().ok().or_else(|| here(local)) {
            Some(address) => Ok(Self::Tcp(address)),
            None => Err(format!(
                "'{word}' is no place for metrics: give 127.0.0.1:9099, [::1]:9099, 9099 (a port of \
                 this host alone), or unix:PATH"
            )),
        }
    }
}

impl TryFrom<String> for MetricsAt {
    type Error = String;

    fn try_from(word: String) -> Result<Self, String> {
        word.parse()
    }
}

impl From<MetricsAt> for String {
    fn from(at: MetricsAt) -> Self {
        at.to_string()
    }
}

impl fmt::Display for MetricsAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_host_alone() {
        for (word, same, public) in [
            ("127.0.0.1:9099", "127.0.0.1:9099", false),
            ("9099", "127.0.0.1:9099", false),
            (":9099", "127.0.0.1:9099", false),
            ("localhost:9099", "127.0.0.1:9099", false),
            ("[::1]:1", "[::1]:1", false),
            ("0.0.0.0:9099", "0.0.0.0:9099", true),
            ("[::]:9099", "[::]:9099", true),
            ("unix:m.sock", "unix:m.sock", false),
        ] {
            let at: MetricsAt = word.parse().unwrap();
            assert_eq!((at.to_string().as_str(), at.is_public()), (same, public));
        }
        let within = "unix:m.sock".parse::<MetricsAt>().unwrap().within(Path::new("/run"));
        assert_eq!(within.to_string(), "unix:/run/m.sock");
        for word in ["", "unix:", "host:9099", "70000", "1.2.3.4", "127.0.0.1:", "/run/m.sock"] {
            assert!(word.parse::<MetricsAt>().unwrap_err().contains(word), "{word}");
        }
    }
}
