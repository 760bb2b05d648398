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

    #[test]
    fn b52_a_goodbye_is_known_by_its_last_bytes() {
        for (magic, len) in [(REQUEST_MAGIC, 28), (EXTENDED_REQUEST_MAGIC, 32)] {
            for (word, goes) in [(command::DISC, true), (command::WRITE, false)] {
                let mut sent = vec![0; 4096];
                sent.extend_from_slice(&magic.to_be_bytes());
                sent.extend_from_slice(&[0, 0]);
                sent.extend_from_slice(&word.to_be_bytes());
                sent.resize(4096 + len, 1);
                assert_eq!(may_end_with_disconnect(&sent), goes, "{len}");
                assert!(may_end_with_disconnect(&sent[4097..]), "it may have begun before");
                sent.push(0);
                assert!(!may_end_with_disconnect(&sent), "something comes after it");
            }
        }
    }
}
