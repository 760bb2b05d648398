//! Files full of data to measure; shared with the benchmarks of `xtask`.

use anyhow::Result;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io::Write;

/// Writes the first `bytes` bytes of a file, makes them durable, and leaves none in the page cache: no
/// hole is measured, and no memory.
///
/// # Errors
/// What the host says.
pub fn fill(mut file: &File, bytes: u64) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0u8; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        // Nothing that a clever disk could compress or find twice.
        random.fill(&mut piece);
        let part = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
        file.write_all(&piece[..part])?;
        left -= part as u64;
    }
    file.sync_all()?;
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}
