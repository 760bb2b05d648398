//! Certificates and keys in PEM files.

use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io;
use std::path::{Path, PathBuf};

/// Why a file gives nothing.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// It has something else in it.
    #[error("{0}: there is no {1} in it, in PEM: it begins with -----BEGIN {1}-----")]
    Empty(PathBuf, &'static str),
    /// It cannot be understood.
    #[error("{0}: it is no PEM file: {1}")]
    Pem(PathBuf, PemError),
}

/// All certificates of a file, of which there is at least one.
///
/// # Errors
/// [`FileError`].
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|error| pem(path, error, "CERTIFICATE"))?;
    if all.is_empty() { Err(FileError::Empty(path.into(), "CERTIFICATE")) } else { Ok(all) }
}

/// The private key of a file.
///
/// # Errors
/// [`FileError`].
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| pem(path, error, "PRIVATE KEY"))
}

fn pem(path: &Path, error: PemError, wanted: &'static str) -> FileError {
    match error {
        PemError::Io(error) => FileError::File(path.into(), error),
        PemError::NoItemsFound => FileError::Empty(path.into(), wanted),
        other => FileError::Pem(path.into(), other),
    }
}
