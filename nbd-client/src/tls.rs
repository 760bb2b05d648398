//! TLS to a server: whom this client trusts, and who it is.

use crate::target::Tls;
use ringway_nbd_tls::{FileError, certificates, key};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Names of the files, as those of QEMU, libvirt and libnbd are called.
const AUTHORITY: &str = "ca-cert.pem";
const CERTIFICATE: &str = "client-cert.pem";
const KEY: &str = "client-key.pem";

/// Why there is no TLS with a server.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file gives nothing.
    #[error(transparent)]
    File(#[from] FileError),
    /// What is in the files does not go together.
    #[error("{0}: {1}")]
    Unusable(PathBuf, rustls::Error),
    /// No certificate could be for such a host.
    #[error("'{0}' is no name that a certificate could have: say tls-hostname=NAME")]
    Name(String),
    /// The server is not whom it should be, or does not take this client.
    #[error("TLS: {0}")]
    Refused(String),
}

/// The client's side of a connection that begins. Files are read anew each time: new ones hold from the next
/// connection on.
///
/// # Errors
/// [`TlsError`], with the file.
pub(crate) fn begin(tls: &Tls) -> Result<ClientConnection, TlsError> {
    let name = ServerName::try_from(tls.hostname.clone());
    let name = name.map_err(|_| TlsError::Name(tls.hostname.clone()))?;
    let ca = tls.certificates.join(AUTHORITY);
    let unusable = |error| TlsError::Unusable(ca.clone(), error);
    let mut roots = RootCertStore::empty();
    for root in certificates(&ca)? {
        roots.add(root).map_err(unusable)?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_root_certificates(roots);
    let own = tls.certificates.join(CERTIFICATE);
    let mut config = match certificates(&own) {
        Ok(chain) => {
            let config = builder.with_client_auth_cert(chain, key(&tls.certificates.join(KEY))?);
            config.map_err(|error| TlsError::Unusable(own, error))?
        }
        Err(FileError::File(_, error)) if error.kind() == io::ErrorKind::NotFound => {
            builder.with_no_client_auth()
        }
        Err(error) => return Err(error.into()),
    };
    // Connections last: nothing is kept to begin another one sooner.
    config.resumption = rustls::client::Resumption::disabled();
    ClientConnection::new(Arc::new(config), name).map_err(unusable)
}

/// Shakes hands by TLS.
///
/// # Errors
/// [`TlsError::Refused`].
pub(crate) fn shake_hands(
    connection: &mut ClientConnection,
    stream: &mut (impl Read + Write),
    tls: &Tls,
) -> Result<(), TlsError> {
    while connection.is_handshaking() {
        if let Err(error) = connection.complete_io(stream) {
            return Err(TlsError::Refused(in_words(&error, tls)));
        }
    }
    Ok(())
}

/// What an error of a connection by TLS means.
pub(crate) fn in_words(error: &io::Error, tls: &Tls) -> String {
    let folder = tls.certificates.display();
    let ended = || {
        format!(
            "the server ended the connection. If it wants a certificate of its clients, put \
             {CERTIFICATE} and {KEY} into {folder}"
        )
    };
    let of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match of_tls {
        Some(rustls::Error::InvalidCertificate(why)) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the certificate of the server has expired".into()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the certificate of the server is not valid yet: is this host's clock right?".into()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                format!(
                    "the certificate of the server is not for '{}': if it is the right server, say the \
                     name that is in its certificate as tls-hostname=NAME",
                    tls.hostname
                )
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                format!(
                    "the certificate of the server is not of an authority in {folder}/{AUTHORITY}"
                )
            }
            // webpki's errors have no variants of rustls for this; its name is what there is.
            CertificateError::Other(other)
                if format!("{other:?}").contains("CaUsedAsEndEntity") =>
            {
                format!(
                    "the certificate of the server is that of an authority itself, as self-signed ones are: \
                     the server needs one of its own, signed by the authority in {folder}/{AUTHORITY}"
                )
            }
            other => format!("the certificate of the server is not good: {other}"),
        },
        Some(rustls::Error::AlertReceived(alert)) => {
            format!("the server refuses this client ({alert:?}): what {folder} has must suit it")
        }
        Some(other) => other.to_string(),
        None if error.kind() == io::ErrorKind::UnexpectedEof => ended(),
        None => match error.raw_os_error() {
            Some(libc::ECONNRESET | libc::EPIPE) => ended(),
            _ => error.to_string(),
        },
    }
}
