//! Tells systemd how the daemon is (sd_notify(3)). The socket is connected at the start: in the
//! sandbox there is no way to it any more.
//!
//! Where systemd watches (WatchdogSec=), it hears of the daemon twice in that time, unless a worker
//! loops without end ([`crate::pulse`]). A worker that the kernel holds, for a disk that does not answer, is no
//! reason to be silent: a new daemon would wait for the same disk, and all others would have lost theirs.

use super::clock::clock;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Where news goes, if anybody wants them.
pub(super) struct Notify {
    socket: Option<OwnedFd>,
    every: Option<Duration>,
}

impl Notify {
    /// Connects to the socket that the environment names.
    pub(super) fn connect() -> Self {
        // Nobody may be listening; that is no failure.
        let socket = std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let connected = open(name.as_bytes());
            let error = connected.as_ref().err();
            error.inspect(|error| tracing::debug!("NOTIFY_SOCKET cannot be used: {error}"));
            connected.ok()
        });
        let value = |name: &str| std::env::var(name).ok();
        Self { every: every(std::process::id(), &value).filter(|_| socket.is_some()), socket }
    }

    /// How often [`Notify::alive`] is wanted, if it is.
    pub(super) fn every(&self) -> Option<Duration> {
        self.every
    }

    /// The daemon does what it is there for.
    pub(super) fn alive(&self) {
        self.say(b"WATCHDOG=1");
    }

    /// Front-ends can connect.
    pub(super) fn ready(&self) {
        self.say(b"READY=1");
    }

    /// The configuration is read again; it is over with the next [`Notify::ready`].
    pub(super) fn reloading(&self) {
        let us = clock(libc::CLOCK_MONOTONIC).unwrap_or_default().as_micros();
        self.say(format!("RELOADING=1\nMONOTONIC_USEC={us}").as_bytes());
    }

    /// No new ones are taken.
    pub(super) fn stopping(&self) {
        self.say(b"STOPPING=1");
    }

    fn say(&self, what: &[u8]) {
        let _ = self.socket.as_ref().map(|socket| rustix::io::write(socket, what));
    }
}

/// Half of the time after which systemd ends a process `own` of which it has not heard.
fn every(own: u32, value: &dyn Fn(&str) -> Option<String>) -> Option<Duration> {
    let us: u64 = value("WATCHDOG_USEC")?.parse().ok()?;
    // It is inherited by the processes of disks, which are not meant.
    let own = value("WATCHDOG_PID").is_none_or(|pid| pid.parse() == Ok(own));
    (own && us > 0).then(|| Duration::from_micros(us / 2))
}

/// A path, or behind `@` an abstract name.
fn open(name: &[u8]) -> io::Result<OwnedFd> {
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_arrive_by_path_and_by_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let abstract_name = format!("ringway-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        for (listener, name) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().as_bytes().to_vec()),
            (UnixDatagram::bind_addr(&address).unwrap(), format!("@{abstract_name}").into_bytes()),
        ] {
            let notify = Notify { socket: Some(open(&name).unwrap()), every: None };
            notify.ready();
            notify.alive();
            notify.stopping();
            let mut buffer = [0; 64];
            let mut next = || listener.recv(&mut buffer).map(|got| buffer[..got].to_vec());
            assert_eq!(next().unwrap(), b"READY=1");
            assert_eq!(next().unwrap(), b"WATCHDOG=1");
            assert_eq!(next().unwrap(), b"STOPPING=1");
        }
        assert!(open(b"/nowhere/at/all").is_err());
        Notify { socket: None, every: None }.ready();
    }

    #[test]
    fn systemd_watches_one_process() {
        let of = |us: &str, pid: Option<&str>| {
            let value = |name: &str| match name {
                "WATCHDOG_USEC" => Some(us.to_owned()),
                _ => pid.map(str::to_owned),
            };
            every(77, &value)
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(of("2000000", Some("77")), second);
        assert_eq!(of("2000000", None), second);
        assert_eq!(of("2000000", Some("78")), None, "its parent");
        assert_eq!(of("0", None), None);
        assert_eq!(of("soon", None), None);
    }
}
