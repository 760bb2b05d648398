//! What `--verify` knows: which write each unit of a job's region should hold, and how to tell.

use crate::backend::Ask;
use crate::content::{SECTOR, SectorStamp, Wrong};
use crate::record::Record;
use crate::round::VisitOrder;
use anyhow::{Result, bail, ensure};
use std::ops::Range;

/// The most units one job keeps account of: 1 GiB of memory.
const UNITS_MAX: u64 = 1 << 28;

/// A unit that a request in flight writes to, or reads.
const BUSY: u32 = 1 << 31;

/// Data is not what it should be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct WrongData(pub String);

/// What a run before this one has left of one of its jobs.
#[derive(Debug)]
pub(crate) struct Left {
    record: Record,
    order: VisitOrder,
    content: [u8; SECTOR],
}

impl Left {
    pub(crate) fn new(record: Record) -> Self {
        let mut content = [0; SECTOR];
        record.fill(&mut content);
        Self { order: record.order(), record, content }
    }

    /// What a sector of its part has to hold: the record, or a write.
    fn expects(&self, offset: u64) -> (bool, bool) {
        let record = Record::places(self.order.part()).contains(&offset);
        (record, self.order.is_behind(self.record.reached, offset))
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Judged {
    /// Sectors judged and found right.
    pub right: u64,
    /// Sectors read that no run with this seed has written.
    pub unwritten: u64,
    /// Bytes that a run which writes has written at least once.
    pub covered: u64,
    /// Bytes that it could have.
    pub whole: u64,
}

impl Judged {
    pub(crate) fn add(&mut self, other: &Self) {
        self.right += other.right;
        self.unwritten += other.unwritten;
        self.covered += other.covered;
        self.whole += other.whole;
    }
}

/// The account of one job's region.
///
/// A unit that is in flight is asked for by nobody else, so that what it holds is never in doubt.
#[derive(Debug)]
pub(crate) struct Verifier {
    /// The number in the content that tells this run's data from others'.
    disk: u64,
    start: u64,
    unit: u64,
    /// Writes so far, and [`BUSY`]. Empty if nothing is written: then any write may have been there.
    writes: Vec<u32>,
    /// What is there to be read, if nothing is written.
    left: Vec<Left>,
    judged: Judged,
}

impl Verifier {
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
        let (left, judged) = (Vec::new(), Judged::default());
        Ok(Self { disk, start: region.start, unit, writes, left, judged })
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

    fn mark(&self, offset: u64) -> SectorStamp {
        let unit = usize::try_from((offset - self.start) / self.unit).unwrap_or(usize::MAX);
        let writes = self.writes.get(unit).map_or(0, |unit| unit & !BUSY);
        SectorStamp { disk: self.disk, sector: offset / SECTOR as u64, sequence: writes.into() }
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
                mark.sequence = SectorStamp::sequence_of(sector);
            } else if mark.sequence == 0 {
                continue;
            }
            match mark.check(sector) {
                Ok(()) => self.judged.right += 1,
                Err(wrong) => self.explain(offset, ask, sector, mark, &wrong)?,
            }
        }
        Ok(())
    }

    /// What is no write of this sector may be a record, or may never have been written.
    #[cold]
    fn explain(
        &mut self,
        offset: u64,
        ask: &Ask,
        sector: &[u8],
        mark: SectorStamp,
        wrong: &Wrong,
    ) -> Result<()> {
        let any = self.writes.is_empty();
        if any {
            let left = self.left.iter().find(|left| left.order.part().contains(&offset));
            let (record, written) = left.map_or((false, false), |left| left.expects(offset));
            if record && left.is_some_and(|left| left.content == sector) {
                self.judged.right += 1;
                return Ok(());
            }
            // The place of a record that a run with other --jobs has left.
            let former = Record::of(sector).filter(|former| {
                former.seed == self.disk && Record::places(&former.part()).contains(&offset)
            });
            if former.is_some() && !(record || written) {
                self.judged.right += 1;
                return Ok(());
            }
            let claims =
                wrong.is_misplaced() || SectorStamp::claimed_by(sector) == (mark.disk, mark.sector);
            if !(record || written || claims) {
                self.judged.unwritten += 1;
                return Ok(());
            }
        }
        Err(describe(offset, ask, sector, (mark, any), &wrong.to_string()).into())
    }

    /// Learns what an earlier run has left.
    pub(crate) fn expect(&mut self, left: Vec<Left>) {
        self.left = left;
    }

    /// Bytes of a unit.
    pub(crate) fn unit(&self) -> u64 {
        self.unit
    }

    /// What was found so far.
    pub(crate) fn judged(&self) -> Judged {
        self.judged
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
    (mark, any): (SectorStamp, bool),
    wrong: &str,
) -> WrongData {
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
    WrongData(format!(
        "verify: {wrong}; the first wrong byte is at offset {} of the target, in a read of {} \
         bytes at {}",
        offset + first as u64,
        ask.len,
        ask.offset
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::Reached;

    fn write(offset: u64, len: u32) -> Ask {
        Ask { write: true, offset, len }
    }

    fn read(offset: u64, len: u32) -> Ask {
        Ask { write: false, offset, len }
    }

    #[test]
    fn what_was_written_last_is_expected_and_nothing_else() {
        let mut verifier = Verifier::new(9, &(8192..65_536), 1024, true).unwrap();
        let mut memory = vec![0; 4096];
        for _ in 0..2 {
            assert!(verifier.take(&write(9216, 2048)));
            assert!(!verifier.take(&read(10_240, 1024)), "it is being written");
            verifier.fill(&write(9216, 2048), &mut memory);
            verifier.settle(&write(9216, 2048), &memory).unwrap();
        }
        let old = memory.clone();
        assert!(verifier.take(&write(10_240, 1024)));
        verifier.fill(&write(10_240, 1024), &mut memory);
        verifier.settle(&write(10_240, 1024), &memory).unwrap();
        verifier.all_settled().unwrap();
        assert_eq!(verifier.written(8192, 1 << 20), Some(read(9216, 2048)));
        assert_eq!(verifier.written(11_264, 1 << 20), None);

        // The first half holds write 2, the second write 3: `old` has write 2 in both.
        assert!(verifier.take(&read(8192, 4096)));
        let mut found = [&[0; 1024], &old[..1024], &memory[..1024], &[0; 1024]].concat();
        verifier.settle(&read(8192, 4096), &found).unwrap();
        assert_eq!(verifier.judged().right, 4, "sectors that nobody wrote are not judged");
        found[1024..3072].copy_from_slice(&old[..2048]);
        assert!(verifier.take(&read(8192, 4096)));
        let error = verifier.settle(&read(8192, 4096), &found).unwrap_err().to_string();
        assert!(error.contains("sector 20: it should hold write 3, but holds write 2"), "{error}");
        assert!(error.contains("offset 10256 of the target"), "{error}");
    }

    #[test]
    fn a_reader_accepts_any_write_but_no_other_sector() {
        let mut verifier = Verifier::new(9, &(0..65_536), 512, false).unwrap();
        let mut sector = vec![0; 512];
        SectorStamp { disk: 9, sector: 4, sequence: 77 }.fill(&mut sector);
        verifier.settle(&read(2048, 512), &sector).unwrap();
        for (offset, wanted) in [(4096, "write 77 of sector 4"), (2048, "something else")] {
            sector[100] ^= u8::from(offset == 2048);
            let error = verifier.settle(&read(offset, 512), &sector).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        // Zeroes that nobody is known to have overwritten may have been there for ever.
        verifier.settle(&read(0, 512), &[0; 512]).unwrap();
        assert_eq!(verifier.judged(), Judged { right: 1, unwritten: 1, ..Judged::default() });

        // A run that has written four of eight blocks, and left its record in the first and the last.
        let reached = Reached { all: false, number: 4, within: 0 };
        let record = Record {
            seed: 9,
            region: 0..8192,
            stretch: 1024,
            jobs: 1,
            job: 0,
            shuffled: true,
            reached,
        };
        let order = record.order();
        let mut content = vec![0; 512];
        record.fill(&mut content);
        verifier.expect(vec![Left::new(record)]);
        for offset in (0..8192).step_by(512) {
            let place = offset == 0 || offset == 7680;
            let lost = verifier.settle(&read(offset, 512), &[0; 512]);
            assert_eq!(lost.is_err(), place || order.is_behind(reached, offset), "{offset}");
            if let Err(error) = lost {
                assert!(error.is::<WrongData>());
                let error = error.to_string();
                assert!(error.contains("with this --seed, but holds zeroes"), "{error}");
            }
            assert_eq!(
                verifier.settle(&read(offset, 512), &content).is_ok(),
                place || !order.is_behind(reached, offset)
            );
        }
    }
}
