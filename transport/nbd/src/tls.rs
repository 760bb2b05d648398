//! TLS: who this server is, and whom it lets in.

use ringway_nbd_tls::{FileError, certificates};
use ringway_nbd_words::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, command};
use rustls::crypto::ring::default_provider;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why TLS cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file gives nothing.
    #[error(transparent)]
    File(#[from] FileError),
    /// What is in them does not go together.
    #[error("{0}: {1}")]
    Unusable(PathBuf, rustls::Error),
    /// Certificates of clients could not be judged.
    #[error("{0}: {1}")]
    Clients(PathBuf, String),
}

/// The server's certificate and key, and whose certificates clients need.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

impl Tls {
    /// Reads PEM files: the certificate, with those that lead to its authority behind it; its key; and
    /// the authority that clients need a certificate of, if they need one.
    ///
    /// # Errors
    /// [`TlsError`], with the file.
    pub fn load(cert: &Path, key: &Path, clients: Option<&Path>) -> Result<Self, TlsError> {
        let chain = certificates(cert)?;
        let secret = ringway_nbd_tls::key(key)?;
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Unusable(cert.into(), error))?;
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(path)? {
                    let added = roots.add(root);
                    added.map_err(|error| TlsError::Unusable(path.into(), error))?;
                }
                let judge = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let judge = judge.build();
                let judge =
                    judge.map_err(|error| TlsError::Clients(path.into(), error.to_string()))?;
                builder.with_client_cert_verifier(judge)
            }
        };
        let config = builder.with_single_cert(chain, secret);
        let mut config = config.map_err(|error| TlsError::Unusable(key.into(), error))?;
        // Connections last: nothing is kept to begin another one sooner.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(Arc::new(config)))
    }

    /// The server's side of a connection that begins.
    pub(crate) fn begin(&self) -> Result<Box<ServerConnection>, rustls::Error> {
        ServerConnection::new(Arc::clone(&self.0)).map(Box::new)
    }
}

/// Whether what a client has sent last may be that it goes: of what came before nothing is known.
pub(crate) fn may_end_with_disconnect(sent: &[u8]) -> bool {
    let heads = [(EXTENDED_REQUEST_MAGIC, 32), (REQUEST_MAGIC, 28)];
    heads.into_iter().any(|(magic, len)| {
        let last = sent.len().checked_sub(len).map(|at| &sent[at..]);
        // The worker may have received the beginning of it.
        last.is_none_or(|last| {
            last.starts_with(&magic.to_be_bytes()) && last[6..8] == command::DISC.to_be_bytes()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_nbd_tls::{Peer, start};
    use ringway_testkit::{Need, skip};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::sockopt::{set_socket_send_buffer_size, socket_send_buffer_size};
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, Connection};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    /// The head of a request.
    fn head(magic: u32, command: u16, len: usize) -> Vec<u8> {
        let mut head = [&magic.to_be_bytes()[..], &[0, 0], &command.to_be_bytes()].concat();
        head.resize(len, 1);
        head
    }

    #[test]
    fn b52_a_goodbye_is_known_by_its_last_bytes() {
        for (magic, len) in [(REQUEST_MAGIC, 28), (EXTENDED_REQUEST_MAGIC, 32)] {
            for (word, goes) in [(command::DISC, true), (command::WRITE, false)] {
                let mut sent = [vec![0; 4096], head(magic, word, len)].concat();
                assert_eq!(may_end_with_disconnect(&sent), goes, "{len}");
                assert!(may_end_with_disconnect(&sent[4097..]), "it may have begun before");
                sent.push(0);
                assert!(!may_end_with_disconnect(&sent), "something comes after it");
            }
        }
    }

    const CERTIFICATE: &str = "[req]\ndistinguished_name=name\nx509_extensions=its\n[name]\n[its]\n\
        subjectAltName=DNS:localhost\nbasicConstraints=critical,CA:FALSE\n";

    /// Both sides of a connection whose handshake is over; `None` if there is no program to make certificates.
    fn connection() -> Option<(ClientConnection, Box<ServerConnection>)> {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("config"), CERTIFICATE).unwrap();
        let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost \
            -config config -keyout key -out certificate";
        let made = Command::new("openssl").args(args.split(' ')).current_dir(dir.path()).output();
        let Ok(made) = made else {
            skip(Need::Nbd, "openssl");
            return None;
        };
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut server = Tls::load(&at("certificate"), &at("key"), None).unwrap().begin().unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificates(&at("certificate")).unwrap().remove(0)).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let config = builder.with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        while client.wants_write() || server.wants_write() || server.is_handshaking() {
            let (mut asked, mut answered) = (Vec::new(), Vec::new());
            while client.wants_write() {
                client.write_tls(&mut asked).unwrap();
            }
            let mut asked = &asked[..];
            while !asked.is_empty() {
                server.read_tls(&mut asked).unwrap();
                server.process_new_packets().unwrap();
            }
            while server.wants_write() {
                server.write_tls(&mut answered).unwrap();
            }
            let mut answered = &answered[..];
            while !answered.is_empty() {
                client.read_tls(&mut answered).unwrap();
                client.process_new_packets().unwrap();
            }
        }
        Some((client, server))
    }

    /// A client sends more than the worker's socket takes, which reads nothing, and is killed. Its own socket holds the
    /// rest: the window of TCP would be another matter, as no end arrives behind one that is full.
    #[test]
    fn b52_a_client_over_tls_that_has_gone_takes_what_it_asked_for_with_it() {
        for goes in [false, true] {
            let Some((mut client, server)) = connection() else { return };
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            // What a socket takes is counted with what it costs: half of it is taken at least, and not all.
            let takes = socket_send_buffer_size(&ours).unwrap();
            set_socket_send_buffer_size(&ours, takes).unwrap();
            let client_is = Peer::Client(may_end_with_disconnect);
            let connection = Box::new(Connection::from(*server));
            let (worker, relay) = start(connection, theirs.into(), client_is).unwrap();
            let last = head(REQUEST_MAGIC, if goes { command::DISC } else { command::WRITE }, 28);
            let sent = [vec![0; takes + (32 << 10)], last].concat();
            for piece in sent.chunks(16 << 10) {
                client.writer().write_all(piece).unwrap();
                while client.wants_write() {
                    client.write_tls(&mut ours).unwrap();
                }
            }
            drop(ours);
            if !goes {
                let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
                let heard = poll(&mut [PollFd::new(&worker, PollFlags::RDHUP)], Some(&timeout));
                assert_eq!(heard, Ok(1), "nobody hears that it has gone");
            }
            let mut worker = UnixStream::from(worker);
            worker.set_nonblocking(false).unwrap();
            let mut got = Vec::new();
            worker.read_to_end(&mut got).unwrap();
            assert_eq!(got.len() == sent.len(), goes, "{} of {}", got.len(), sent.len());
            assert!(got[..] == sent[..got.len()]);
            drop(worker);
            relay.join().unwrap();
        }
    }
}
