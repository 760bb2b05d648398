//! What went wrong on a disk, for whoever tells people of it.
//!
//! Queues write counters and the latest failure of each kind: no lock, no memory, no log line. The
//! first one since somebody looked rings a bell; so a disk that is well wakes nobody.

use ringway_core::{Op, SECTOR_BYTES};
use std::fmt;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// What is called when there is something to look at: from the thread of a queue, so it must neither
/// block nor allocate.
pub type OnIncident = Box<dyn Fn() + Send + Sync>;

/// What a request that failed was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedOp {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush.
    Flush,
    /// Discard or write zeroes.
    Erase,
}

impl FailedOp {
    const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Erase];

    pub(crate) fn of(op: Op) -> Self {
        match op {
            Op::Read | Op::GetId => Self::Read,
            Op::Write => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard | Op::WriteZeroes => Self::Erase,
        }
    }

    /// The one that is `number` as an integer.
    pub(crate) fn from_number(number: u64) -> Self {
        let is_it = |op: &Self| *op as u64 == number;
        Self::ALL.into_iter().find(is_it).unwrap_or(Self::Write)
    }

    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Erase => "erase",
        }
    }
}

/// Errors that are told apart: those of one class share a record.
const CLASSES: usize = 4;

/// Which class an error of the host belongs to; 0 is no error.
fn class(errno: i32) -> usize {
    match errno {
        0 => 0,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => 1,
        libc::EIO => 2,
        _ => 3,
    }
}

/// The records of one disk.
#[derive(Default)]
pub struct Incidents {
    records: [[Record; CLASSES]; FailedOp::ALL.len()],
    /// Requests that took a detour, and of how many, once that is worth telling: 32 bits each.
    detours: AtomicU64,
    bell: OnceLock<OnIncident>,
}

/// One kind of failure.
#[derive(Default)]
struct Record {
    all: AtomicU64,
    unreported: AtomicU64,
    /// The error of the latest one in 16 bits, its sector in 48.
    latest: AtomicU64,
}

/// Failures of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failures {
    /// What was to be done.
    pub op: FailedOp,
    /// The error of the latest one; 0 if the host told none.
    pub errno: i32,
    /// Where that was, in sectors of 512 bytes; none for flushes.
    pub sector: Option<u64>,
    /// How many.
    pub count: u64,
}

impl Failures {
    /// The error in words.
    #[must_use]
    pub fn reason(&self) -> String {
        reason(self.op, self.errno)
    }
}

/// An error in words; 0 if the host told none.
pub(crate) fn reason(op: FailedOp, errno: i32) -> String {
    match (errno, op) {
        (0, FailedOp::Flush) => "an earlier one has failed, and what it lost stays lost until the \
                                 disk is opened again"
            .into(),
        (0, _) => "the file ends there, or takes nothing".into(),
        (errno, _) => io::Error::from_raw_os_error(errno).to_string(),
    }
}

/// Requests that are copied or taken apart because the file does not take them as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detours {
    /// How many, at least within a minute.
    pub count: u64,
    /// Of how many reads and writes.
    pub requests: u64,
}

impl Incidents {
    /// Calls `bell` when there is something to report that was not there before. The first one is kept.
    pub fn on_incident(&self, bell: OnIncident) {
        // A second listener would be a mistake of ours; the first one goes on hearing.
        let kept = self.bell.set(bell).is_ok();
        debug_assert!(kept, "one listener");
    }

    /// All kinds there are, by number.
    pub const KINDS: usize = FailedOp::ALL.len() * CLASSES;

    /// All failures of one kind since the disk was opened; `None` if there was none.
    #[must_use]
    pub fn all(&self, kind: usize) -> Option<Failures> {
        self.failures(kind, |record| record.all.load(SeqCst))
    }

    /// True if failures of a kind were not taken yet.
    #[must_use]
    pub fn has_unreported(&self, kind: usize) -> bool {
        self.record(kind).unreported.load(SeqCst) > 0
    }

    /// Takes the failures of one kind since they were last taken. The next one rings.
    #[must_use]
    pub fn take(&self, kind: usize) -> Option<Failures> {
        self.failures(kind, |record| record.unreported.swap(0, SeqCst))
    }

    /// Takes what there is to report of requests that take a detour.
    #[must_use]
    pub fn take_detours(&self) -> Option<Detours> {
        let word = self.detours.swap(0, SeqCst);
        (word != 0).then_some(Detours { count: word >> 32, requests: word & u64::from(u32::MAX) })
    }

    fn record(&self, kind: usize) -> &Record {
        &self.records[kind / CLASSES][kind % CLASSES]
    }

    fn failures(&self, kind: usize, count: impl Fn(&Record) -> u64) -> Option<Failures> {
        let record = self.record(kind);
        // First the count, then what came last: it is never older than the count.
        let count = count(record);
        let latest = record.latest.load(SeqCst);
        let op = FailedOp::ALL[kind / CLASSES];
        let sector = (op != FailedOp::Flush).then_some(latest & SECTORS);
        let errno = i32::try_from(latest >> SECTOR_BITS).unwrap_or(0);
        (count > 0).then_some(Failures { op, errno, sector, count })
    }

    /// A request failed at byte `offset` of the disk, with an error of the host or with none.
    #[cold]
    pub fn failed(&self, op: Op, errno: Option<i32>, offset: u64) {
        let errno = errno.unwrap_or(0);
        let record = &self.records[FailedOp::of(op) as usize][class(errno)];
        let errno = u64::from(u16::try_from(errno).unwrap_or(u16::MAX));
        record.latest.store(errno << SECTOR_BITS | (offset / SECTOR_BYTES).min(SECTORS), SeqCst);
        record.all.fetch_add(1, SeqCst);
        if record.unreported.fetch_add(1, SeqCst) == 0 {
            self.ring();
        }
    }

    /// So many of so many requests took a detour within a minute.
    #[cold]
    pub(crate) fn detours(&self, count: u64, requests: u64) {
        let half = |n: u64| n.min(u32::MAX.into());
        if self.detours.swap(half(count) << 32 | half(requests), SeqCst) == 0 {
            self.ring();
        }
    }

    pub(crate) fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell();
        }
    }
}

const SECTOR_BITS: u32 = 48;
const SECTORS: u64 = (1 << SECTOR_BITS) - 1;

impl fmt::Debug for Incidents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = (0..Self::KINDS).filter_map(|kind| self.all(kind));
        f.debug_list().entries(all).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn e07_one_record_of_each_kind_and_one_ring() {
        let (incidents, rung) = (Incidents::default(), Arc::new(AtomicUsize::new(0)));
        let bell = Arc::clone(&rung);
        incidents.on_incident(Box::new(move || {
            bell.fetch_add(1, SeqCst);
        }));
        for sector in 0..4096u64 {
            incidents.failed(Op::Write, Some(libc::ENOSPC), sector * 512);
        }
        incidents.failed(Op::Flush, Some(libc::EIO), 0);
        incidents.failed(Op::Read, None, u64::MAX);
        assert_eq!(rung.load(SeqCst), 3, "once for each kind");
        let take =
            || -> Vec<_> { (0..Incidents::KINDS).filter_map(|k| incidents.take(k)).collect() };
        let taken = take();
        let of = |op, errno, sector, count| Failures { op, errno, sector, count };
        assert_eq!(
            taken,
            [
                of(FailedOp::Read, 0, Some(SECTORS), 1),
                of(FailedOp::Write, libc::ENOSPC, Some(4095), 4096),
                of(FailedOp::Flush, libc::EIO, None, 1),
            ]
        );
        assert!(taken[1].reason().contains("os error 28"), "{}", taken[1].reason());
        assert_eq!(take(), []);
        incidents.failed(Op::Write, Some(libc::EDQUOT), 512);
        assert_eq!(rung.load(SeqCst), 4);
        assert_eq!(take(), [of(FailedOp::Write, libc::EDQUOT, Some(1), 1)]);
        let all: Vec<_> = (0..Incidents::KINDS).filter_map(|k| incidents.all(k)).collect();
        assert_eq!(all.iter().map(|f| f.count).sum::<u64>(), 4096 + 3);
    }

    /// A full disk and a broken one are two matters, and so is what the host gives no reason for.
    #[test]
    fn errors_are_told_apart_by_what_there_is_to_be_done() {
        let incidents = Incidents::default();
        let classes: [&[Option<i32>]; 4] = [
            &[None],
            &[Some(libc::ENOSPC), Some(libc::EDQUOT), Some(libc::EFBIG)],
            &[Some(libc::EIO)],
            &[Some(libc::ENOMEM), Some(libc::EBADF)],
        ];
        for errors in classes {
            for &errno in errors {
                incidents.failed(Op::Write, errno, 0);
            }
        }
        let unreported =
            || (0..Incidents::KINDS).filter(|&kind| incidents.has_unreported(kind)).count();
        assert_eq!(unreported(), classes.len());
        let taken: Vec<_> = (0..Incidents::KINDS).filter_map(|kind| incidents.take(kind)).collect();
        let told: Vec<_> = taken.iter().map(|failures| (failures.errno, failures.count)).collect();
        assert_eq!(told, [(0, 1), (libc::EFBIG, 3), (libc::EIO, 1), (libc::EBADF, 2)]);
        assert_eq!(unreported(), 0);
    }

    #[test]
    fn failures_are_told_in_words() {
        let words = [
            (Op::Read, "read"),
            (Op::GetId, "read"),
            (Op::Write, "write"),
            (Op::Flush, "flush"),
            (Op::Discard, "erase"),
            (Op::WriteZeroes, "erase"),
        ];
        for (op, word) in words {
            assert_eq!(FailedOp::of(op).name(), word);
            assert_eq!(FailedOp::from_number(FailedOp::of(op) as u64), FailedOp::of(op));
        }
        // The host has no words for these.
        assert!(reason(FailedOp::Flush, 0).contains("an earlier one has failed"));
        assert!(reason(FailedOp::Write, 0).contains("the file ends there"));
        let incidents = Incidents::default();
        assert_eq!(format!("{incidents:?}"), "[]");
        incidents.failed(Op::Write, Some(libc::ENOSPC), 7 * 512);
        let latest =
            Failures { op: FailedOp::Write, errno: libc::ENOSPC, sector: Some(7), count: 1 };
        assert_eq!(format!("{incidents:?}"), format!("[{latest:?}]"));
    }

    #[test]
    fn detours_ring_once_until_they_are_taken() {
        let (incidents, rung) = (Incidents::default(), Arc::new(AtomicUsize::new(0)));
        let bell = Arc::clone(&rung);
        incidents.on_incident(Box::new(move || {
            bell.fetch_add(1, SeqCst);
        }));
        assert_eq!(incidents.take_detours(), None);
        incidents.detours(3, 4);
        // The latest counts, as much of them as there is room for.
        incidents.detours(u64::MAX, 5);
        assert_eq!(rung.load(SeqCst), 1);
        let most = u64::from(u32::MAX);
        assert_eq!(incidents.take_detours(), Some(Detours { count: most, requests: 5 }));
        assert_eq!(incidents.take_detours(), None);
        incidents.detours(1, u64::MAX);
        assert_eq!(rung.load(SeqCst), 2);
        assert_eq!(incidents.take_detours(), Some(Detours { count: 1, requests: most }));
    }
}
