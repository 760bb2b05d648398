//! Content that proves itself: each sector says which disk, sector and write it belongs to.

/// Bytes of a sector.
const SECTOR: usize = 512;

/// Fills `bytes`, which begin at `sector` of `disk`, as write number `sequence` does.
///
/// # Panics
/// If `bytes` is not a whole number of sectors.
pub fn fill(bytes: &mut [u8], disk: u64, sector: u64, sequence: u64) {
    assert!(bytes.len() % SECTOR == 0);
    for (i, chunk) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        let mut state = mix(disk, sector + i as u64, sequence);
        for word in chunk.chunks_exact_mut(8) {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            word.copy_from_slice(&state.to_le_bytes());
        }
    }
}

/// The first sector that does not hold what write `sequence` put there.
#[must_use]
pub fn first_difference(bytes: &[u8], disk: u64, sector: u64, sequence: u64) -> Option<u64> {
    let mut expected = [0; SECTOR];
    bytes.chunks_exact(SECTOR).enumerate().find_map(|(i, chunk)| {
        let at = sector + i as u64;
        fill(&mut expected, disk, at, sequence);
        (chunk != expected).then_some(at)
    })
}

fn mix(disk: u64, sector: u64, sequence: u64) -> u64 {
    [disk, sector, sequence].iter().fold(0x9e37_79b9_7f4a_7c15, |state, word| {
        (state ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_sector_or_write_is_noticed() {
        let mut bytes = [0; 2048];
        fill(&mut bytes, 1, 8, 3);
        assert_eq!(first_difference(&bytes, 1, 8, 3), None);
        assert_eq!(first_difference(&bytes, 1, 9, 3), Some(9));
        assert_eq!(first_difference(&bytes, 2, 8, 3), Some(8));
        assert_eq!(first_difference(&bytes, 1, 8, 4), Some(8));
        bytes[1024] ^= 1;
        assert_eq!(first_difference(&bytes, 1, 8, 3), Some(10));
    }
}
