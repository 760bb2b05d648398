//! The serial of a disk.

use super::error::OpenError;

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
