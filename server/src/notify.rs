//! Tells systemd how the daemon is (sd_notify(3)). The socket is connected at the start: in the
//! sandbox there is no way to it any more.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where news goes, if anybody wants them.
pub(super) struct Notify(Option<OwnedFd>);

impl Notify {
    /// Connects to the socket that the environment names.
    pub(super) fn connect() -> Self {
        // Nobody may be listening; that is no failure.
        Self(std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let connected = open(name.as_bytes());
            let error = connected.as_ref().err();
            error.inspect(|error| tracing::debug!("NOTIFY_SOCKET cannot be used: {error}"));
            connected.ok()
        }))
    }

    /// Front-ends can connect.
    pub(super) fn ready(&self) {
        self.say(b"READY=1");
    }

    /// No new ones are taken.
    pub(super) fn stopping(&self) {
        self.say(b"STOPPING=1");
    }

    fn say(&self, what: &[u8]) {
        let _ = self.0.as_ref().map(|socket| rustix::io::write(socket, what));
    }
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
            let notify = Notify(Some(open(&name).unwrap()));
            notify.ready();
            notify.stopping();
            let mut buffer = [0; 64];
            let mut next = || listener.recv(&mut buffer).map(|got| buffer[..got].to_vec());
            assert_eq!(next().unwrap(), b"READY=1");
            assert_eq!(next().unwrap(), b"STOPPING=1");
        }
        assert!(open(b"/nowhere/at/all").is_err());
        Notify(None).ready();
    }
}
