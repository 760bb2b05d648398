//! The serial of a disk.

use super::error::OpenError;
use std::path::Path;

/// By what an image is known unless it has a serial: where it is, from the root, however that was said. Its own name may
/// be a link that leads elsewhere tomorrow, as those of devices do, and is taken as it is.
pub(crate) fn place(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    let real = folder.zip(path.file_name()).map(|(folder, name)| folder.join(name));
    real.unwrap_or(path).to_string_lossy().into_owned()
}

/// The serial as the guest reads it; without one a word that is the same for the same path.
pub(crate) fn serial_bytes(serial: Option<&str>, name: &str) -> Result<[u8; 20], OpenError> {
    let word = match serial {
        Some(word) => word.to_owned(),
        None => format!("rw-{:016x}", fnv1a(name.as_bytes())),
    };
    if word.len() > 20
        || word.is_empty()
        || !word.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
    {
        return Err(OpenError::Serial(word));
    }
    let mut bytes = [0; 20];
    bytes[..word.len()].copy_from_slice(word.as_bytes());
    Ok(bytes)
}

/// The FNV-1a hash: short, and the same in every release.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
