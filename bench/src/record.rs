//! What a run with `--verify` leaves for those that read later: how far it came.
//!
//! Each job writes it over the first and the last sector of its part when all else is done, so a
//! reader can tell a block that was never written from one that was lost, and one of the two may be
//! damaged.

use crate::content::SECTOR;
use crate::round::{Reached, VisitOrder, part};
use std::ops::Range;

/// `RwVerify`, and the version of what follows.
const MAGIC: u64 = u64::from_le_bytes(*b"RwVeri\0\x01");

/// How far one job of a run came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub seed: u64,
    /// All jobs together.
    pub region: Range<u64>,
    /// Bytes of a stretch of the order.
    pub stretch: u64,
    pub jobs: u64,
    pub job: u64,
    pub shuffled: bool,
    pub reached: Reached,
}

impl Record {
    /// The part of the job.
    pub(crate) fn part(&self) -> Range<u64> {
        part(&self.region, self.stretch, self.jobs, self.job)
    }

    /// The order of the job.
    pub(crate) fn order(&self) -> VisitOrder {
        order(self.part(), self.stretch, self.shuffled, self.seed)
    }

    /// Makes the sector. All of it follows from the first words, so each wrong bit shows.
    pub(crate) fn fill(&self, sector: &mut [u8]) {
        let Self { seed, region, stretch, jobs, job, shuffled, reached } = self;
        let flags = u64::from(*shuffled) | u64::from(reached.all) << 1;
        let words = [
            MAGIC,
            *seed,
            region.start,
            region.end,
            *stretch,
            *jobs,
            *job,
            flags,
            reached.number,
            reached.within,
        ];
        let mut state = words.iter().fold(0, |state: u64, word| {
            (state ^ word).rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        let rest = std::iter::repeat_with(|| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        });
        for (bytes, word) in sector.chunks_exact_mut(8).zip(words.into_iter().chain(rest)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// What a sector says; `None` if it is no record, or damaged.
    pub(crate) fn of(sector: &[u8]) -> Option<Self> {
        let word = |at: usize| sector[8 * at..].first_chunk().map(|b| u64::from_le_bytes(*b));
        if word(0)? != MAGIC {
            return None;
        }
        let flags = word(7)?;
        let record = Self {
            seed: word(1)?,
            region: word(2)?..word(3)?,
            stretch: word(4)?,
            jobs: word(5)?,
            job: word(6)?,
            shuffled: flags & 1 != 0,
            reached: Reached { all: flags & 2 != 0, number: word(8)?, within: word(9)? },
        };
        let mut same = [0; SECTOR];
        record.fill(&mut same);
        let sector_aligned = [record.region.start, record.region.end, record.stretch]
            .iter()
            .all(|bytes| bytes % (SECTOR as u64) == 0);
        let sound = sector_aligned
            && (SECTOR as u64..=1 << 30).contains(&record.stretch)
            && record.job < record.jobs
            && record.jobs <= 256
            && record.region.start < record.region.end
            && record.region.end <= 1 << 62
            && !record.part().is_empty();
        (same == sector && sound).then_some(record)
    }

    /// The sectors that hold it.
    pub(crate) fn places(part: &Range<u64>) -> [u64; 2] {
        [part.start, part.end - SECTOR as u64]
    }
}

/// The order in which a job writes its part.
pub(crate) fn order(part: Range<u64>, stretch: u64, shuffled: bool, seed: u64) -> VisitOrder {
    // Jobs go their own ways.
    let seed = shuffled.then(|| seed ^ part.start.rotate_left(32));
    VisitOrder::new(part, stretch, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_bit_of_a_record_shows() {
        let reached = Reached { all: false, number: 7, within: 512 };
        let region = 0..1 << 20;
        let record =
            Record { seed: 1, region, stretch: 4096, jobs: 3, job: 1, shuffled: true, reached };
        let mut sector = [0; SECTOR];
        record.fill(&mut sector);
        assert_eq!(Record::of(&sector), Some(record));
        for bit in 0..8 * SECTOR {
            sector[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::of(&sector), None, "bit {bit}");
            sector[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Record::of(&[0; SECTOR]), None);
    }

    #[test]
    fn a_record_that_cannot_be_is_none() {
        let good = Record {
            seed: 1,
            region: 0..1 << 20,
            stretch: 4096,
            jobs: 1,
            job: 0,
            shuffled: false,
            reached: Reached::default(),
        };
        for bad in [
            Record { stretch: 0, ..good.clone() },
            Record { stretch: 100, ..good.clone() },
            Record { jobs: 0, ..good.clone() },
            Record { job: 1, ..good.clone() },
            Record { jobs: u64::MAX, ..good.clone() },
            Record { region: 512..512, ..good.clone() },
            Record { region: 0..u64::MAX - 511, ..good },
        ] {
            let mut sector = [0; SECTOR];
            bad.fill(&mut sector);
            assert_eq!(Record::of(&sector), None, "{bad:?}");
        }
    }
}
