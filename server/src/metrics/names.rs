//! Under which names metrics may be asked for.
//!
//! A foreign site can have its own name resolve to an address of this host, and its page, in a browser
//! that reaches us, would then count as being of the same origin (DNS rebinding). It cannot do that with
//! an address, nor with `localhost`, nor with names that the user of this daemon has given. Browsers
//! always send a `Host`, and reach no Unix socket.

use std::net::{IpAddr, Ipv6Addr};

/// The names of one place.
#[derive(Default)]
pub(super) enum Names {
    /// A Unix socket: whatever name is used.
    #[default]
    Any,
    /// A port: addresses, `localhost`, and these.
    Known(Vec<String>),
}

impl Names {
    /// Whether a request with these values of `Host` is answered.
    pub(super) fn include<'a>(&self, mut hosts: impl Iterator<Item = &'a [u8]>) -> bool {
        let Self::Known(names) = self else { return true };
        hosts.all(|host| std::str::from_utf8(host).is_ok_and(|host| is_ours(host, names)))
    }
}

/// RFC 9110 §7.2: a host as in a URI, and a port or none.
fn is_ours(host: &str, names: &[String]) -> bool {
    let is_port = |rest: &str| {
        rest.is_empty()
            || rest.strip_prefix(':').is_some_and(|port| port.bytes().all(|c| c.is_ascii_digit()))
    };
    if let Some(rest) = host.strip_prefix('[') {
        let Some((address, rest)) = rest.split_once(']') else { return false };
        return address.parse::<Ipv6Addr>().is_ok() && is_port(rest);
    }
    let (name, rest) = host.split_at(host.find(':').unwrap_or(host.len()));
    let is_known = name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|known| name.eq_ignore_ascii_case(known));
    is_known && is_port(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e20_names_that_somebody_else_may_own_are_refused() {
        let names = Names::Known(vec!["host.example".into()]);
        let include = |host: &str| names.include([host.as_bytes()].into_iter());
        for host in [
            "127.0.0.1:9099",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "LocalHost:1",
            "host.example",
            "HOST.example:9099",
            "10.0.0.1",
        ] {
            assert!(include(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:9099",
            "127.0.0.1.evil.example",
            "localhost.evil.example:9099",
            "localhost@evil.example",
            "[::1].evil.example",
            "[::1",
            "[evil.example]",
            "::1",
            "evil@127.0.0.1",
            "a b",
            "127.0.0.1:9099, evil.example",
            "127.0.0.1:http",
        ] {
            assert!(!include(host), "{host}");
        }
        assert!(!names.include([&b"localhost"[..], b"evil.example"].into_iter()));
        assert!(!names.include([&b"\xff"[..]].into_iter()));
        assert!(names.include(std::iter::empty()), "HTTP/1.0, which no browser speaks");
        assert!(Names::Any.include([&b"evil.example"[..]].into_iter()));
    }
}
