//! Content that proves itself: f(disk, sector, sequence).
//!
//! A sector begins with these three numbers and goes on with what follows from them, so that data
//! that is misplaced, stale or torn is found, and often can say where it came from.

use std::fmt;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// What a sector holds: which write of which sector of which disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectorStamp {
    /// The disk.
    pub disk: u64,
    /// The sector, counted from the disk's start.
    pub sector: u64,
    /// The write, counted from 1 for each sector.
    pub sequence: u64,
}

impl SectorStamp {
    fn words(self) -> impl Iterator<Item = u64> {
        let Self { disk, sector, sequence } = self;
        let mut state = disk ^ sector.rotate_left(24) ^ sequence.rotate_left(48);
        [disk, sector, sequence].into_iter().chain(std::iter::repeat_with(move || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed ^ (mixed >> 27)
        }))
    }

    /// Makes the sector's content.
    pub fn fill(self, sector: &mut [u8]) {
        for (bytes, word) in sector.chunks_exact_mut(8).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The number of the write that a sector says it holds.
    pub fn sequence_of(sector: &[u8]) -> u64 {
        sector[16..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// The disk and the sector that a sector says it belongs to.
    pub fn claimed_by(sector: &[u8]) -> (u64, u64) {
        let word =
            |at: usize| sector[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        (word(0), word(8))
    }

    /// Checks a sector's content.
    ///
    /// # Errors
    /// What is there instead.
    pub fn check(self, sector: &[u8]) -> Result<(), Wrong> {
        let word = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        if sector.chunks_exact(8).map(word).eq(self.words().take(SECTOR / 8)) {
            return Ok(());
        }
        let found = Self {
            disk: word(&sector[0..]),
            sector: word(&sector[8..]),
            sequence: word(&sector[16..]),
        };
        // Content that is whole but somebody else's names its origin.
        let whole = sector.chunks_exact(8).map(word).eq(found.words().take(SECTOR / 8));
        let zeroes = sector.iter().all(|&byte| byte == 0);
        Err(Wrong { expected: self, found: whole.then_some(found), zeroes })
    }
}

/// A sector with the wrong content.
#[derive(Debug, thiserror::Error)]
pub struct Wrong {
    expected: SectorStamp,
    found: Option<SectorStamp>,
    zeroes: bool,
}

impl Wrong {
    /// True for a whole write of another place on the same disk.
    pub fn is_misplaced(&self) -> bool {
        self.found.is_some_and(|found| found.disk == self.expected.disk)
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SectorStamp { disk, sector, sequence } = self.expected;
        write!(f, "wrong data in sector {sector}: it should hold write {sequence}, but holds ")?;
        match self.found {
            Some(found) if found.disk != disk => f.write_str("data of another disk"),
            Some(found) if found.sector != sector => {
                write!(f, "write {} of sector {}", found.sequence, found.sector)
            }
            Some(found) => write!(f, "write {}", found.sequence),
            None if self.zeroes => f.write_str("zeroes"),
            None => f.write_str("something else"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: SectorStamp = SectorStamp { disk: 7, sector: 1000, sequence: 2 };

    fn verdict(content: &[u8]) -> String {
        MARK.check(content).unwrap_err().to_string()
    }

    #[test]
    fn data_that_is_misplaced_stale_or_torn_is_found_and_named() {
        let mut sector = [0; SECTOR];
        MARK.fill(&mut sector);
        MARK.check(&sector).unwrap();
        for (other, wanted) in [
            (SectorStamp { sequence: 1, ..MARK }, "write 2, but holds write 1"),
            (SectorStamp { sector: 77, ..MARK }, "holds write 2 of sector 77"),
            (SectorStamp { disk: 8, ..MARK }, "another disk"),
        ] {
            let mut content = [0; SECTOR];
            other.fill(&mut content);
            assert!(verdict(&content).contains(wanted), "{}", verdict(&content));
            content[..256].copy_from_slice(&sector[..256]);
            assert!(verdict(&content).contains("something else"));
        }
        assert!(verdict(&[0; SECTOR]).contains("zeroes"));
        sector[SECTOR - 1] ^= 0x80;
        assert!(verdict(&sector).starts_with("wrong data in sector 1000"));
    }
}
