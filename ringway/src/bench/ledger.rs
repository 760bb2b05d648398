//! What `--verify` knows: which write each unit of a job's region should hold, and how to tell.

use crate::bench::port::Ask;
use crate::content::{Mark, SECTOR};
use anyhow::{Result, anyhow, bail, ensure};
use std::ops::Range;

/// The most units one job keeps account of: 1 GiB of memory.
const UNITS_MAX: u64 = 1 << 28;

/// A unit that a request in flight writes to, or reads.
const BUSY: u32 = 1 << 31;

/// The account of one job's region.
///
/// A unit that is in flight is asked for by nobody else, so that what it holds is never in doubt.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// The number in the content that tells this run's data from others'.
    disk: u64,
    start: u64,
    unit: u64,
    /// Writes so far, and [`BUSY`]. Empty if nothing is written: then any write may have been there.
    writes: Vec<u32>,
    sectors: u64,
}

impl Ledger {
    /// For a job that writes to `region` in multiples of `unit` bytes, or that only reads.
    ///
    /// # Errors
    /// A region that is too large to keep account of.
    pub(crate) fn new(disk: u64, region: &Range<u64>, unit: u64, writes: bool) -> Result<Self> {
        let units = (region.end - region.start).div_ceil(unit);
        ensure!(
            !writes || units <= UNITS_MAX,
            "--verify keeps account of at most {UNITS_MAX} blocks per job, this region has \
             {units}: use a smaller --size, a larger --bs or more --jobs"
        );
        let writes = if writes { vec![0; usize::try_from(units)?] } else { Vec::new() };
        Ok(Self { disk, start: region.start, unit, writes, sectors: 0 })
    }

    fn units(&self, ask: &Ask) -> Range<usize> {
        let first = (ask.offset - self.start) / self.unit;
        let last = (ask.offset - self.start + u64::from(ask.len)).div_ceil(self.unit);
        // There are fewer units than a Vec has entries.
        #[allow(clippy::cast_possible_truncation)]
        let range = first as usize..last as usize;
        range
    }

    /// Marks the units of a request; false if one of them is in flight.
    pub(crate) fn take(&mut self, ask: &Ask) -> bool {
        if self.writes.is_empty() {
            return true;
        }
        let units = self.units(ask);
        let units = &mut self.writes[units];
        if units.iter().any(|unit| unit & BUSY != 0) {
            return false;
        }
        units.iter_mut().for_each(|unit| *unit |= BUSY);
        true
    }

    /// The content of a write whose units were taken: one write more each.
    pub(crate) fn fill(&mut self, ask: &Ask, memory: &mut [u8]) {
        let units = self.units(ask);
        self.writes[units].iter_mut().for_each(|unit| *unit = (*unit + 1) | BUSY);
        for (at, sector) in memory[..ask.len as usize].chunks_exact_mut(SECTOR).enumerate() {
            self.mark(ask.offset + (at * SECTOR) as u64).fill(sector);
        }
    }

    fn mark(&self, offset: u64) -> Mark {
        let unit = usize::try_from((offset - self.start) / self.unit).unwrap_or(usize::MAX);
        let writes = self.writes.get(unit).map_or(0, |unit| unit & !BUSY);
        Mark { disk: self.disk, sector: offset / SECTOR as u64, sequence: writes.into() }
    }

    /// Gives the units of a finished request back, and judges what a read has brought.
    ///
    /// # Errors
    /// The first sector that is wrong.
    pub(crate) fn settle(&mut self, ask: &Ask, memory: &[u8]) -> Result<()> {
        if !self.writes.is_empty() {
            let units = self.units(ask);
            self.writes[units].iter_mut().for_each(|unit| *unit &= !BUSY);
        }
        if ask.write {
            return Ok(());
        }
        for (at, sector) in memory[..ask.len as usize].chunks_exact(SECTOR).enumerate() {
            let offset = ask.offset + (at * SECTOR) as u64;
            let mut mark = self.mark(offset);
            if self.writes.is_empty() {
                // Any write of this sector will do.
                mark.sequence = Mark::sequence_of(sector);
            } else if mark.sequence == 0 {
                continue;
            }
            if let Err(wrong) = mark.check(sector) {
                let expected = (mark, self.writes.is_empty());
                return Err(describe(offset, ask, sector, expected, &wrong.to_string()));
            }
            self.sectors += 1;
        }
        Ok(())
    }

    /// Sectors judged and found right.
    pub(crate) fn sectors(&self) -> u64 {
        self.sectors
    }

    /// The next stretch of units at or behind `from` that were written, at most `most` bytes.
    pub(crate) fn written(&self, from: u64, most: u32) -> Option<Ask> {
        let first = usize::try_from((from - self.start) / self.unit).ok()?;
        let begin = first + self.writes.get(first..)?.iter().position(|unit| *unit != 0)?;
        let room = (usize::try_from(most).ok()? / usize::try_from(self.unit).ok()?).max(1);
        let run = self.writes[begin..].iter().take(room).take_while(|unit| **unit != 0).count();
        let len = u32::try_from(run as u64 * self.unit).ok()?;
        Some(Ask { write: false, offset: self.start + begin as u64 * self.unit, len })
    }

    /// Refuses to end while something is in flight: a mistake of ours.
    ///
    /// # Errors
    /// That a unit was never given back.
    pub(crate) fn all_settled(&self) -> Result<()> {
        if self.writes.iter().any(|unit| unit & BUSY != 0) {
            bail!("a request was never answered");
        }
        Ok(())
    }
}

#[cold]
fn describe(
    offset: u64,
    ask: &Ask,
    sector: &[u8],
    (mark, any): (Mark, bool),
    wrong: &str,
) -> anyhow::Error {
    let mut expected = [0; SECTOR];
    if mark.sequence != 0 {
        mark.fill(&mut expected);
    }
    let first = sector.iter().zip(&expected).position(|(a, b)| a != b).unwrap_or(0);
    let wrong = if any {
        let should = format!("it should hold write {}", mark.sequence);
        wrong.replace(&should, "it should hold what --verify writes with this --seed")
    } else {
        wrong.to_owned()
    };
    anyhow!(
        "verify: {wrong}; the first wrong byte is at offset {} of the target, in a read of {} \
         bytes at {}",
        offset + first as u64,
        ask.len,
        ask.offset
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(offset: u64, len: u32) -> Ask {
        Ask { write: true, offset, len }
    }

    fn read(offset: u64, len: u32) -> Ask {
        Ask { write: false, offset, len }
    }

    #[test]
    fn what_was_written_last_is_expected_and_nothing_else() {
        let mut ledger = Ledger::new(9, &(8192..65_536), 1024, true).unwrap();
        let mut memory = vec![0; 4096];
        for _ in 0..2 {
            assert!(ledger.take(&write(9216, 2048)));
            assert!(!ledger.take(&read(10_240, 1024)), "it is being written");
            ledger.fill(&write(9216, 2048), &mut memory);
            ledger.settle(&write(9216, 2048), &memory).unwrap();
        }
        let old = memory.clone();
        assert!(ledger.take(&write(10_240, 1024)));
        ledger.fill(&write(10_240, 1024), &mut memory);
        ledger.settle(&write(10_240, 1024), &memory).unwrap();
        ledger.all_settled().unwrap();
        assert_eq!(ledger.written(8192, 1 << 20), Some(read(9216, 2048)));
        assert_eq!(ledger.written(11_264, 1 << 20), None);

        // The first half holds write 2, the second write 3: `old` has write 2 in both.
        assert!(ledger.take(&read(8192, 4096)));
        let mut found = [&[0; 1024], &old[..1024], &memory[..1024], &[0; 1024]].concat();
        ledger.settle(&read(8192, 4096), &found).unwrap();
        assert_eq!(ledger.sectors(), 4, "sectors that nobody wrote are not judged");
        found[1024..3072].copy_from_slice(&old[..2048]);
        assert!(ledger.take(&read(8192, 4096)));
        let error = ledger.settle(&read(8192, 4096), &found).unwrap_err().to_string();
        assert!(error.contains("sector 20: it should hold write 3, but holds write 2"), "{error}");
        assert!(error.contains("offset 10256 of the target"), "{error}");
    }

    #[test]
    fn a_reader_accepts_any_write_but_no_other_sector() {
        let mut ledger = Ledger::new(9, &(0..65_536), 512, false).unwrap();
        let mut sector = vec![0; 512];
        Mark { disk: 9, sector: 4, sequence: 77 }.fill(&mut sector);
        ledger.settle(&read(2048, 512), &sector).unwrap();
        for (offset, told) in [(4096, "write 77 of sector 4"), (2048, "something else")] {
            sector[100] ^= u8::from(offset == 2048);
            let error = ledger.settle(&read(offset, 512), &sector).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let error = ledger.settle(&read(0, 512), &[0; 512]).unwrap_err().to_string();
        assert!(error.contains("with this --seed, but holds zeroes"), "{error}");
    }
}
