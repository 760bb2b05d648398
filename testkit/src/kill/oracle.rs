//! What each sector has to hold, known from requests and answers only.

use crate::pattern;
use std::fmt;
use std::ops::Range;

/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// What memory holds that was given back: whoever carries a write out again writes this.
pub const SCRAMBLE: u8 = 0xee;
/// What the buffer of a read holds before: an answer without a read leaves it.
pub const UNREAD: u8 = 0x11;
/// How many writes back an old content is recognised.
const MEMORY: u64 = 4096;

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A sector holds what it held before an acknowledged write.
    Lost,
    /// A sector holds, or the server wrote, what only a request carried out once more gives.
    Replayed,
    /// A request was answered twice, unasked, or before it was done.
    Duplicate,
    /// A request was never answered.
    Missing,
    /// A request was answered with an error that was not to be, or well although it was to fail.
    Failed,
    /// A write of a guest without a write cache was not durable when it was acknowledged.
    Volatile,
    /// A flush succeeded after one had failed.
    Forgotten,
}

impl Wrong {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 7] = [
        Self::Lost,
        Self::Replayed,
        Self::Duplicate,
        Self::Missing,
        Self::Failed,
        Self::Volatile,
        Self::Forgotten,
    ];
}

/// What was found wrong: how often, and the first few in words.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    counts: [u64; Wrong::ALL.len()],
    notes: Vec<String>,
}

impl Findings {
    /// Counts `how_many` and keeps the words of the first few.
    pub fn add(&mut self, wrong: Wrong, how_many: u64, words: impl fmt::Display) {
        self.counts[wrong as usize] += how_many;
        self.note(format!("{wrong:?}: {words}"));
    }

    /// Keeps words, if they are among the first few.
    pub fn note(&mut self, words: String) {
        if self.notes.len() < 10 {
            self.notes.push(words);
        }
    }

    /// Adds what was found elsewhere.
    pub fn append(&mut self, more: Self) {
        for wrong in Wrong::ALL {
            self.counts[wrong as usize] += more.count(wrong);
        }
        more.notes.into_iter().for_each(|words| self.note(words));
    }

    pub fn count(&self, wrong: Wrong) -> u64 {
        self.counts[wrong as usize]
    }

    pub fn is_empty(&self) -> bool {
        self.counts == [0; Wrong::ALL.len()]
    }

    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// One sector: the write issued last, the write acknowledged last (0: none yet, the sector holds
/// zeroes), the reads in flight.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    issued: u64,
    acknowledged: u64,
    reads: u16,
    /// It was found wrong; the next write makes it good.
    reported: bool,
}

/// The sectors of one queue. A sector has one write in flight or any number of reads, never both,
/// so that exactly one content is right for each read.
#[derive(Debug)]
pub struct Oracle {
    disk: u64,
    first: u64,
    sectors: Vec<State>,
    sequence: u64,
}

impl Oracle {
    /// For `count` sectors from `first` on, full of zeroes; `disk` makes their content their own.
    pub fn new(disk: u64, first: u64, count: usize) -> Self {
        Self { disk, first, sectors: vec![State::default(); count], sequence: 0 }
    }

    /// The bytes on the disk where `at` begins.
    pub fn offset(&self, at: &Range<usize>) -> u64 {
        (self.first + at.start as u64) * SECTOR as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.sectors.len()
    }

    /// True if nothing in flight forbids a write there.
    pub fn is_writable(&self, at: &Range<usize>) -> bool {
        self.is_readable(at) && self.sectors[at.clone()].iter().all(|sector| sector.reads == 0)
    }

    /// True if nothing in flight forbids a read there.
    pub fn is_readable(&self, at: &Range<usize>) -> bool {
        self.sectors[at.clone()].iter().all(|sector| sector.issued == sector.acknowledged)
    }

    /// A write of `at` is issued: fills its buffer, gives its number.
    pub fn write(&mut self, at: &Range<usize>, bytes: &mut [u8]) -> u64 {
        self.sequence += 1;
        for sector in &mut self.sectors[at.clone()] {
            sector.issued = self.sequence;
        }
        pattern::fill(bytes, self.disk, self.first + at.start as u64, self.sequence);
        self.sequence
    }

    /// A write is acknowledged.
    pub fn written(&mut self, at: &Range<usize>, sequence: u64, found: &mut Findings) {
        for (number, sector) in (self.first..).zip(&mut self.sectors).skip(at.start).take(at.len())
        {
            if sector.issued != sequence || sector.acknowledged >= sequence {
                found.add(
                    Wrong::Duplicate,
                    1,
                    format_args!("write {sequence} of sector {number} was acknowledged again"),
                );
            }
            *sector = State { acknowledged: sector.issued, reported: false, ..*sector };
        }
    }

    /// A write failed: nobody knows what is there now.
    pub fn unknown(&mut self, at: &Range<usize>) {
        for sector in &mut self.sectors[at.clone()] {
            *sector = State { acknowledged: sector.issued, reported: true, ..*sector };
        }
    }

    /// A read is issued.
    pub fn read(&mut self, at: &Range<usize>) {
        for sector in &mut self.sectors[at.clone()] {
            sector.reads += 1;
        }
    }

    /// A read is answered; [`Oracle::judge`] says what its bytes are worth.
    pub fn was_read(&mut self, at: &Range<usize>) {
        for sector in &mut self.sectors[at.clone()] {
            sector.reads -= 1;
        }
    }

    /// Compares what was read from `at`, in which no write is in flight.
    pub fn judge(&mut self, at: &Range<usize>, bytes: &[u8], found: &mut Findings) {
        assert_eq!(bytes.len(), at.len() * SECTOR);
        let mut want = [0; SECTOR];
        for (index, have) in at.clone().zip(bytes.chunks_exact(SECTOR)) {
            let State { acknowledged, reported, .. } = self.sectors[index];
            if reported {
                continue;
            }
            self.fill(index, acknowledged, &mut want);
            if have == want {
                continue;
            }
            self.sectors[index].reported = true;
            let (wrong, holds) = self.classify(index, acknowledged, have);
            let number = self.first + index as u64;
            found.add(
                wrong,
                1,
                format_args!("sector {number} holds {holds}, not write {acknowledged}"),
            );
        }
    }

    fn classify(&self, index: usize, acknowledged: u64, have: &[u8]) -> (Wrong, String) {
        if have.iter().all(|&byte| byte == UNREAD) {
            return (Wrong::Duplicate, "nothing that was read".into());
        }
        if have.iter().all(|&byte| byte == SCRAMBLE) {
            return (Wrong::Replayed, "memory that had been given back".into());
        }
        let mut old = [0; SECTOR];
        let recent = (acknowledged.saturating_sub(MEMORY)..acknowledged).rev();
        for sequence in recent.chain([0]) {
            self.fill(index, sequence, &mut old);
            if have == old {
                return (Wrong::Lost, format!("write {sequence}"));
            }
        }
        (Wrong::Replayed, "what was meant for another place or never written".into())
    }

    fn fill(&self, index: usize, sequence: u64, bytes: &mut [u8]) {
        if sequence == 0 {
            bytes.fill(0);
        } else {
            pattern::fill(bytes, self.disk, self.first + index as u64, sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sectors 8 to 10: the first with two writes acknowledged, the second with none.
    fn oracle() -> (Oracle, [Vec<u8>; 2], Findings) {
        let (mut oracle, mut found) = (Oracle::new(5, 8, 2), Findings::default());
        let mut writes = [vec![0; SECTOR], vec![0; SECTOR]];
        for bytes in &mut writes {
            assert!(oracle.is_writable(&(0..1)));
            let sequence = oracle.write(&(0..1), bytes);
            assert!(!oracle.is_readable(&(0..1)) && oracle.is_writable(&(1..2)));
            oracle.written(&(0..1), sequence, &mut found);
        }
        assert!(found.is_empty());
        (oracle, writes, found)
    }

    #[test]
    fn what_was_acknowledged_is_right() {
        let (mut oracle, [_, last], mut found) = oracle();
        assert_eq!(oracle.offset(&(1..2)), 9 * 512);
        oracle.read(&(0..2));
        assert!(oracle.is_readable(&(0..1)) && !oracle.is_writable(&(0..1)));
        oracle.was_read(&(0..2));
        oracle.judge(&(0..2), &[&last[..], &[0; SECTOR]].concat(), &mut found);
        assert!(found.is_empty() && oracle.is_writable(&(0..2)), "{found:?}");
    }

    #[test]
    fn each_wrong_has_its_name() {
        let other = oracle().1[1].iter().map(|byte| !byte).collect();
        let cases: [(Vec<u8>, Wrong); 5] = [
            (oracle().1[0].clone(), Wrong::Lost),
            (vec![0; SECTOR], Wrong::Lost),
            (vec![SCRAMBLE; SECTOR], Wrong::Replayed),
            (other, Wrong::Replayed),
            (vec![UNREAD; SECTOR], Wrong::Duplicate),
        ];
        for (bytes, wrong) in cases {
            let (mut oracle, _, mut found) = oracle();
            for _ in 0..2 {
                // The second look says nothing new.
                oracle.judge(&(0..1), &bytes, &mut found);
                assert_eq!(found.counts.iter().sum::<u64>(), 1, "{found:?}");
            }
            assert_eq!(found.count(wrong), 1, "{found:?}");
        }
    }

    #[test]
    fn a_second_acknowledgement_is_noticed() {
        let (mut oracle, _, mut found) = oracle();
        oracle.written(&(0..1), 2, &mut found);
        assert_eq!(found.count(Wrong::Duplicate), 1);
    }
}
