//! Entries of tables that are not in their file yet, where they outlive this process.
//!
//! ```text
//! page 0   the mark, how many entries there are, in which boot of the host they were written, an entry
//!          that the file has
//! page 1…  entries, in the order in which they were made: which cluster of the disk, its word in L2
//! behind   clusters that are counted and that no table names (`loose.rs`)
//! ```
//!
//! What is stored in the mapping is there after SIGKILL, without a system call. It means nothing after the host
//! went down: what the entries lead to need not be durable, and no guest has been promised that it is. The mark
//! is also in the header of the image, among the features that every other program takes away when it begins to
//! write: so nobody takes entries for those of an image that was written by others since.
//!
//! Nor are they taken for those of older contents: a copy that was made while the image was served has its mark,
//! too, and may be put back in place. So the mark is another one whenever reference counts change, and an entry of
//! the last write to the tables is remembered: tables that do not have it are older.

mod loose;
mod replay;

pub(crate) use loose::LooseClusters;
pub use replay::{Replayed, leave_unwritten, replay, write_tables_again};
pub(crate) use replay::{set_mark, unused};
use ringway_core::host::{self, StateFile};
use ringway_core::mem::{Mapping, MappingError};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The most entries.
pub(crate) const CAPACITY: usize = 4096;

/// The most clusters that no table names. Those for which there is no room are lost with a kill.
const LOOSE: usize = 4096;

const HEAD: usize = 4096;
const ENTRY: usize = 16;
const LOOSE_AT: usize = HEAD + CAPACITY * ENTRY;

/// Words of the first page.
const MARK: usize = 0;
const COUNT: usize = 8;
const BOOT: usize = 16;
/// The mark that is being written to the header, in the place of the other; 0 if none is.
const NEXT_MARK: usize = 24;
/// The first mark, by which whoever began knows its journal.
const OWNER: usize = 32;
/// Two entries, of which the upper half of the word that counts says which one the file has: 1, 2, or neither.
const LAST_WRITTEN: usize = 40;

/// How many entries there are, in the word that counts.
const COUNT_BITS: u64 = !0 >> 32;

/// Features of an image that say which journal may hold entries of it, among the autoclear ones: the last
/// bit, 15 that say in which boot of the host, and a number. The lower ones are left to those that have a meaning.
pub(crate) const MARK_BITS: u64 = !0 << 16;
const MARKED: u64 = 1 << 63;
const NUMBER: u64 = 0xffff_ffff << 16;
const FIRST_NUMBER: u64 = 1 << 16;

/// Room for entries of one image's tables, in a file that outlives the process.
pub struct Journal {
    file: Arc<StateFile>,
    offset: u64,
    mapping: Mapping,
    /// In which boot of the host this is; 0 if nobody tells.
    boot: u64,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Journal({:#x}, {} entries)", self.mark(), self.len())
    }
}

impl Journal {
    /// Bytes of the file that it takes.
    pub const BYTES: u64 = (LOOSE_AT + LOOSE * ENTRY) as u64;

    /// Maps [`Journal::BYTES`] bytes of `file` from `offset` on, a multiple of 4096. The file has them, as
    /// they were left or zeroes. Nobody else writes there.
    ///
    /// # Errors
    /// What the host says.
    pub fn map(file: Arc<StateFile>, offset: u64) -> Result<Self, MappingError> {
        let mapping = Mapping::of_file(&file, offset, Self::BYTES)?;
        Ok(Self { file, offset, mapping, boot: learn_boot() })
    }

    /// Whether there are no entries in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether an image had begun to use it, in this boot of the host, and did not end.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.mark() != 0
    }

    /// Whether it can be used: the host keeps room for all of it, so that storing cannot fail later, and tells
    /// in which boot it is.
    pub(crate) fn is_of_use(&self) -> bool {
        let (from, len) = (self.offset as i64, Self::BYTES as i64);
        // SAFETY: no memory is involved.
        let kept = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, from, len) } == 0;
        if !kept {
            tracing::info!("no journal: {}", io::Error::last_os_error());
        }
        kept && self.boot != 0
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset < self.mapping.len());
        // SAFETY: within the mapping, as was just asserted, and aligned, because that begins with a page;
        // it lives as long as `self` and is only touched atomically.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr(self.mapping.at(offset).cast())
        }
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        // More than there is room for it never says, unless others have written it.
        let count = self.word(COUNT).load(Acquire) & COUNT_BITS;
        usize::try_from(count).unwrap_or(0).min(CAPACITY)
    }

    /// The mark of the image whose entries they are; 0 if there has been none in this boot.
    pub(crate) fn mark(&self) -> u64 {
        if self.is_of_this_boot() { self.word(MARK).load(Acquire) & MARK_BITS } else { 0 }
    }

    /// Whether an image with this mark may be the one whose entries they are. 0 is no mark.
    pub(crate) fn has_mark(&self, mark: u64) -> bool {
        let is_next = || self.word(NEXT_MARK).load(Acquire) & MARK_BITS == mark;
        mark != 0 && self.mark() != 0 && (self.mark() == mark || is_next())
    }

    fn is_of_this_boot(&self) -> bool {
        self.boot != 0 && self.word(BOOT).load(Acquire) == self.boot
    }

    /// Entries of an image with a mark of its own follow. Gives the mark, for its header, which is also what
    /// [`Journal::end_of`] knows it by.
    pub(crate) fn begin(&self) -> u64 {
        self.clear();
        self.forget_loose();
        let mark = MARKED | boot_bits(self.boot) | host::random() & NUMBER;
        self.word(BOOT).store(self.boot, Release);
        self.word(NEXT_MARK).store(0, Release);
        self.word(OWNER).store(mark, Release);
        self.word(MARK).store(mark, Release);
        mark
    }

    /// What it holds is over: it is that of no image. Whoever finds an image with the mark that it had takes
    /// something for lost.
    pub fn end(&self) {
        self.clear();
        self.word(MARK).store(0, Release);
        self.word(OWNER).store(0, Release);
        self.word(NEXT_MARK).store(0, Release);
    }

    /// As [`Journal::end`], if it was begun with this mark, which is none if it is 0.
    pub(crate) fn end_of(&self, first: u64) {
        if first != 0 && self.is_of_this_boot() && self.word(OWNER).load(Acquire) == first {
            self.end();
        }
    }

    /// The mark that the header is about to have in the place of `before`. Until [`Journal::marked`] it may have
    /// either. If it could not be written it may, too, and this gives the same again.
    pub(crate) fn next_mark(&self, before: u64) -> u64 {
        let next = self.word(NEXT_MARK).load(Acquire);
        if next != 0 {
            return next;
        }
        let next = before & !NUMBER | before.wrapping_add(FIRST_NUMBER) & NUMBER;
        self.word(NEXT_MARK).store(next, Release);
        next
    }

    /// The header had the mark `before`, and has the one that [`Journal::next_mark`] gave.
    pub(crate) fn marked(&self, before: u64) {
        let next = self.word(NEXT_MARK).load(Acquire);
        // Somebody may have ended it meanwhile.
        let _ = self.word(MARK).compare_exchange(before, next, AcqRel, Acquire);
        self.word(NEXT_MARK).store(0, Release);
    }

    /// An image whose header has this mark, one of both, goes on with what is left in it. Gives the first mark, which
    /// [`Journal::end_of`] knows it by.
    pub(crate) fn go_on(&self, mark: u64) -> u64 {
        self.word(MARK).store(mark, Release);
        self.word(NEXT_MARK).store(0, Release);
        self.word(OWNER).load(Acquire)
    }

    /// Adds entries; false, if there is no room for all of them.
    pub(crate) fn append(&self, words: &[(u64, u64)]) -> bool {
        let (count, last) = (self.len(), self.word(COUNT).load(Acquire) & !COUNT_BITS);
        if count + words.len() > CAPACITY {
            return false;
        }
        for (at, (cluster, word)) in (count..).zip(words) {
            let at = HEAD + at * ENTRY;
            self.word(at).store(*cluster, Relaxed);
            self.word(at + 8).store(*word, Relaxed);
        }
        // Last: a kill leaves all of them or none.
        self.word(COUNT).store(last | (count + words.len()) as u64, Release);
        true
    }

    /// The entries of all other clusters are in the file, and so is `last`, if it is said. A kill on the way leaves some
    /// of these, too, which say what the file does.
    pub(crate) fn keep(&self, last: Option<(u64, u64)>, is_kept: impl Fn(u64) -> bool) {
        let entries = self.entries();
        let latest = latest(&entries, is_kept);
        // The one that counted until now may be older than an entry that is about to go.
        let last = self.set_last_written(last);
        self.word(COUNT).store(last | entries.len() as u64, Release);
        for (to, (cluster, word)) in latest.iter().enumerate() {
            let to = HEAD + to * ENTRY;
            // One behind the other, as the order matters.
            self.word(to).store(*cluster, Release);
            self.word(to + 8).store(*word, Release);
        }
        self.word(COUNT).store(last | latest.len() as u64, Release);
    }

    /// There are none, and nothing is known of the file.
    pub(crate) fn clear(&self) {
        self.word(COUNT).store(0, Release);
    }

    /// All of them are in the file, and so is this one, if it is said.
    pub(crate) fn written(&self, last: Option<(u64, u64)>) {
        let last = self.set_last_written(last);
        self.word(COUNT).store(last, Release);
    }

    /// Puts an entry that the file has where none stands that counts; gives what the word that counts has to say of it.
    fn set_last_written(&self, last: Option<(u64, u64)>) -> u64 {
        let Some((cluster, word)) = last else { return 0 };
        let place = if self.word(COUNT).load(Acquire) >> 32 == 1 { 2 } else { 1 };
        let at = LAST_WRITTEN + (place - 1) * ENTRY;
        self.word(at).store(cluster, Relaxed);
        self.word(at + 8).store(word, Relaxed);
        (place as u64) << 32
    }

    /// Others than those that it holds are about to be in the file: the one that was written last may go.
    pub(crate) fn forget_last_written(&self) {
        self.word(COUNT).store(self.len() as u64, Release);
    }

    /// An entry that the file has, unless a later one of its cluster is in the journal.
    pub(crate) fn last_written(&self) -> Option<(u64, u64)> {
        let at = match self.word(COUNT).load(Acquire) >> 32 {
            1 => LAST_WRITTEN,
            2 => LAST_WRITTEN + ENTRY,
            _ => return None,
        };
        Some((self.word(at).load(Relaxed), self.word(at + 8).load(Relaxed)))
    }

    /// Puts a cluster into the list of those that no table names; `user` is the cluster of the disk whose entry may
    /// lead there.
    fn set_loose(&self, place: usize, cluster: u64, user: Option<u64>) {
        let at = LOOSE_AT + place * ENTRY;
        // First: without its user, it would seem that no entry may.
        self.word(at + 8).store(user.map_or(0, |user| user + 1), Release);
        self.word(at).store(cluster, Release);
    }

    /// Takes one off that list.
    fn clear_loose(&self, place: usize) {
        self.word(LOOSE_AT + place * ENTRY).store(0, Release);
    }

    /// What is at a place of that list, if anything is.
    fn loose_at(&self, place: usize) -> Option<(u64, Option<u64>)> {
        let at = LOOSE_AT + place * ENTRY;
        let user = self.word(at + 8).load(Acquire);
        let cluster = self.word(at).load(Acquire);
        (cluster != 0).then_some((cluster, user.checked_sub(1)))
    }

    /// Clusters of the file that may be counted though no table names them, each with the cluster of the disk whose
    /// entry may lead there.
    pub(crate) fn loose(&self) -> Vec<(u64, Option<u64>)> {
        (0..LOOSE).filter_map(|place| self.loose_at(place)).collect()
    }

    /// It knows of no such clusters.
    fn forget_loose(&self) {
        (0..LOOSE).for_each(|place| self.clear_loose(place));
    }

    /// What it holds, in the order in which it was made.
    pub(crate) fn entries(&self) -> Vec<(u64, u64)> {
        let entry = |at| {
            let at = HEAD + at * ENTRY;
            (self.word(at).load(Relaxed), self.word(at + 8).load(Relaxed))
        };
        (0..self.len()).map(entry).collect()
    }
}

/// The latest entry of each cluster that is kept, in their order. None is behind its place among all, so that what is
/// overwritten by them, one after the other, is older, or has its place already.
fn latest(entries: &[(u64, u64)], is_kept: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
    let places: HashMap<u64, usize> =
        entries.iter().enumerate().map(|(at, (cluster, _))| (*cluster, at)).collect();
    let entries = entries.iter().enumerate();
    let is_latest =
        |(at, entry): &(usize, &(u64, u64))| places[&entry.0] == *at && is_kept(entry.0);
    entries.filter(is_latest).map(|(_, entry)| *entry).collect()
}

/// What of a mark says in which boot it was given.
fn boot_bits(boot: u64) -> u64 {
    (boot & 0x7fff) << 48
}

/// Whether a mark was given since the host came up, as far as is known.
pub(crate) fn is_of_this_boot(mark: u64) -> bool {
    let boot = learn_boot();
    mark & MARKED != 0 && boot != 0 && mark & (0x7fff << 48) == boot_bits(boot)
}

/// Learns in which boot of the host this process is, by a path of the system: for a process that is to be
/// confined, which cannot look it up later. 0 if nobody tells.
pub fn learn_boot() -> u64 {
    host::boot()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::Rng;

    fn journal() -> Journal {
        let file = tempfile::tempfile().unwrap();
        file.set_len(Journal::BYTES).unwrap();
        Journal::map(Arc::new(file), 0).unwrap()
    }

    #[test]
    fn c44_while_a_mark_is_written_either_is_that_of_the_image() {
        let journal = journal();
        let first = journal.begin();
        assert!(journal.has_mark(first) && !journal.has_mark(0));
        let next = journal.next_mark(first);
        assert!(next != first && is_of_this_boot(next));
        assert!(journal.has_mark(first) && journal.has_mark(next));
        assert_eq!(journal.next_mark(first), next, "it may be in the file");
        journal.marked(first);
        assert!(!journal.has_mark(first) && journal.has_mark(next));
        journal.append(&[(1, 2)]);
        // It is known by its first mark, whichever it has.
        journal.end_of(next);
        assert!(journal.is_used() && !journal.is_empty());
        let other = journal.next_mark(next);
        journal.end_of(first);
        journal.marked(next);
        assert!(journal.is_empty() && !journal.is_used());
        assert!(![first, next, other].into_iter().any(|mark| journal.has_mark(mark)));
    }

    #[test]
    fn c44_an_entry_of_the_file_is_remembered_until_there_is_another() {
        let journal = journal();
        journal.begin();
        assert_eq!(journal.last_written(), None);
        for round in 1..5 {
            assert!(journal.append(&[(round, 7), (round + 1, 7)]));
            let before = (round > 1).then_some((round - 1, 7));
            assert_eq!((journal.last_written(), journal.len()), (before, 2));
            journal.written(Some((round, 7)));
            assert_eq!((journal.last_written(), journal.len()), (Some((round, 7)), 0));
        }
        assert!(journal.append(&[(9, 7), (8, 7), (9, 6)]));
        journal.keep(Some((8, 7)), |cluster| cluster == 9);
        assert_eq!((journal.last_written(), journal.entries()), (Some((8, 7)), vec![(9, 6)]));
        journal.forget_last_written();
        assert_eq!((journal.last_written(), journal.len()), (None, 1));
        journal.keep(None, |_| false);
        assert_eq!((journal.last_written(), journal.len()), (None, 0));
    }

    #[test]
    fn c43_whoever_finds_either_mark_goes_on() {
        for finds_next in [false, true] {
            let journal = journal();
            let first = journal.begin();
            let next = journal.next_mark(first);
            let found = if finds_next { next } else { first };
            assert_eq!(journal.go_on(found), first);
            assert!(journal.has_mark(found));
            let renewed = journal.next_mark(found);
            journal.marked(found);
            assert!(renewed != found && journal.has_mark(renewed) && !journal.has_mark(found));
        }
    }

    /// Of what is kept the latest is there whenever it ends, and of the rest the latest or nothing.
    #[test]
    fn c41_a_kill_while_entries_are_taken_away_leaves_the_latest() {
        let mut rng = Rng::for_test("entries_are_taken_away");
        for _ in 0..300 {
            let count = 1 + rng.below(20);
            let entries: Vec<(u64, u64)> = (0..count).map(|at| (rng.below(8), at)).collect();
            let before: HashMap<u64, u64> = entries.iter().copied().collect();
            let kept = rng.next_u64();
            let is_kept = |cluster: u64| kept >> cluster & 1 == 1;
            let latest = latest(&entries, is_kept);
            for stores in 0..=2 * latest.len() {
                let mut now = entries.clone();
                for store in 0..stores {
                    let (from, to) = (latest[store / 2], &mut now[store / 2]);
                    if store % 2 == 0 { to.0 = from.0 } else { to.1 = from.1 }
                }
                let now: HashMap<u64, u64> = now.into_iter().collect();
                for cluster in 0..8 {
                    let (was, is) = (before.get(&cluster), now.get(&cluster));
                    let may = is == was || (is.is_none() && !is_kept(cluster));
                    assert!(may, "{entries:?}, {latest:?}, {stores}: cluster {cluster}");
                }
            }
        }
    }
}
