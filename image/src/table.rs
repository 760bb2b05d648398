//! Where each cluster of a guest's disk is: one word for each, looked up without a lock.
//!
//! The words lie in one anonymous mapping, so that only those that were loaded cost memory, and pages
//! of them can be forgotten while others look: what is forgotten reads as zero, which is
//! [`Word::UNKNOWN`].

use ringway_core::ByteRange;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The most address space that a table may take, in bytes: 2 PiB of disk in clusters of 64 KiB.
const TABLE_MAX: u64 = 256 << 30;

/// A disk that is written may become so many times as large while its table is in use,
const GROWTH: u64 = 4;
/// or as large as so many bytes of words allow: 32 TiB in clusters of 64 KiB, 2 TiB in those of 4 KiB. Only address
/// space, of which a process has 128 TiB.
const ROOM_MIN: u64 = 4 << 30;

/// Where a cluster is.
///
/// ```text
/// 63 …………………………… 16 15 …… 8 7 …… 4     3      2 …… 0
/// offset in sectors  file    0   writable   kind
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    /// Not loaded: the image's thread knows.
    pub(crate) const UNKNOWN: Self = Self(0);
    /// Reads as zeroes; the image's thread writes it.
    pub(crate) const ZERO: Self = Self(2);
    /// Only the image's thread can read it: compressed, or in pieces.
    pub(crate) const ASK: Self = Self(3);
    const DATA: u64 = 1;
    const KIND: u64 = 7;
    const WRITABLE: u64 = 8;

    /// Lies in one piece, at a multiple of 512 bytes of a file.
    pub(crate) fn data(file: u8, offset: u64, writable: bool) -> Self {
        debug_assert!(offset % 512 == 0 && offset >> 57 == 0);
        let writable = if writable { Self::WRITABLE } else { 0 };
        Self(offset >> 9 << 16 | u64::from(file) << 8 | writable | Self::DATA)
    }

    /// True if a queue writes there by itself.
    pub(crate) fn is_owned(self) -> bool {
        self.0 & Self::KIND == Self::DATA && self.0 & Self::WRITABLE != 0
    }

    fn file(self) -> u8 {
        (self.0 >> 8 & 0xff) as u8
    }

    fn offset(self) -> u64 {
        self.0 >> 16 << 9
    }
}

/// Where the beginning of a range is, and how many bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file, one byte behind the other.
    Direct {
        /// Which of the image's files.
        file: u8,
        /// Where in it, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// Nowhere: it reads as zeroes. Never for writes.
    Zero {
        /// How many bytes.
        len: u64,
    },
    /// The image's thread has to do it.
    Ask {
        /// How many bytes.
        len: u64,
    },
}

/// The words of a disk.
///
/// # Invariants
/// 1. `words` are `clusters` words (rounded up to pages) at the beginning of a mapping of `room` bytes,
///    kept until the table is dropped. They only become more. Nothing but atomic operations and the
///    kernel's replacing of whole pages by zeroes changes them.
#[derive(Debug)]
pub(crate) struct Table {
    words: NonNull<AtomicU64>,
    /// Bytes of address space, for disks that grow.
    room: usize,
    clusters: AtomicU64,
    cluster_bits: u32,
    /// Bytes of words that are loaded.
    loaded: AtomicU64,
    below: Option<Below>,
}

/// The table of what an image is based on: it says where clusters are of which the image itself says
/// nothing.
#[derive(Debug)]
pub(crate) struct Below {
    table: Arc<Table>,
    /// A bit for each page of words: none of its clusters is in the image itself.
    absent: Box<[AtomicU64]>,
    page_bits: u32,
}

impl Below {
    /// For an image of so many clusters; `absent` says of a page of words whether none of its clusters
    /// is in the image.
    pub(crate) fn new(table: Arc<Table>, clusters: u64, absent: impl Fn(u64) -> bool) -> Self {
        let page_bits = (page() / 8).ilog2();
        let pages = clusters.div_ceil(1 << page_bits);
        let word = |first: u64| {
            let bits = (0..64).filter(|bit| first + bit < pages && absent(first + bit));
            AtomicU64::new(bits.fold(0, |word, bit| word | 1 << bit))
        };
        let absent = (0..pages.div_ceil(64)).map(|word64| word(64 * word64)).collect();
        Self { table, absent, page_bits }
    }

    /// The word of a page's bit, and the bit.
    fn bit(&self, cluster: u64) -> Option<(&AtomicU64, u64)> {
        let page = cluster >> self.page_bits;
        // There is none where the disk has grown.
        Some((self.absent.get(usize::try_from(page / 64).ok()?)?, 1 << (page % 64)))
    }

    fn holds(&self, cluster: u64) -> bool {
        self.bit(cluster).is_some_and(|(word, bit)| word.load(Acquire) & bit != 0)
    }

    #[inline(never)]
    fn get(&self, cluster: u64) -> Word {
        if !self.holds(cluster) {
            Word::UNKNOWN
        } else if cluster < self.table.clusters() {
            self.table.get(cluster)
        } else {
            Word::ZERO
        }
    }
}

// SAFETY: atomic words in memory that stays where it is (Table invariant 1).
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// A table for a disk of `size` bytes of which nothing is known; with room for more if it `grows`.
    ///
    /// # Errors
    /// What the host says to so much address space, or that it would be too much.
    pub(crate) fn new(size: u64, cluster_bits: u32, grows: bool) -> io::Result<Self> {
        let clusters = size.div_ceil(1 << cluster_bits);
        let bytes = clusters.max(1).saturating_mul(8);
        if bytes > TABLE_MAX {
            return Err(io::Error::other(format!(
                "its {clusters} clusters need a table of {bytes} bytes, and the most is {TABLE_MAX}"
            )));
        }
        let room = match grows {
            true => bytes.saturating_mul(GROWTH).clamp(ROOM_MIN, TABLE_MAX),
            false => bytes,
        };
        let number = |bytes: u64| usize::try_from(bytes.next_multiple_of(page() as u64));
        let room = number(room).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let words = map(None, room)?;
        let table = Self {
            words,
            room,
            clusters: AtomicU64::new(0),
            cluster_bits,
            loaded: AtomicU64::new(0),
            below: None,
        };
        table.make_room(clusters << cluster_bits)?;
        table.grow(clusters << cluster_bits);
        Ok(table)
    }

    /// Has memory for the words of a disk of `size` bytes. One thread at a time.
    ///
    /// # Errors
    /// What the host says, or that it would be too much.
    pub(crate) fn make_room(&self, size: u64) -> io::Result<()> {
        let clusters = size.div_ceil(self.cluster());
        let (from, to) = (mapped(self.clusters()), mapped(clusters));
        if to > self.room as u64 {
            return Err(too_large((self.room as u64 / 8).saturating_mul(self.cluster())));
        }
        if to > from {
            // Within `room`.
            #[allow(clippy::cast_possible_truncation)]
            let (from, bytes) = (from as usize, (to - from) as usize);
            // SAFETY: within the mapping (Table invariant 1).
            map(Some(unsafe { self.words.byte_add(from) }), bytes)?;
        }
        Ok(())
    }

    /// Has words for a disk of `size` bytes, not fewer than before, for which there is memory
    /// ([`Table::make_room`]).
    pub(crate) fn grow(&self, size: u64) {
        let clusters = size.div_ceil(self.cluster());
        debug_assert!(mapped(clusters) <= self.room as u64, "there is memory");
        self.clusters.fetch_max(clusters, Release);
    }

    /// Where to look for clusters of which this table says nothing.
    pub(crate) fn set_below(&mut self, below: Below) {
        self.below = Some(below);
    }

    /// True if only the table below says where a cluster is.
    pub(crate) fn is_below(&self, cluster: u64) -> bool {
        self.below.as_ref().is_some_and(|below| below.holds(cluster))
    }

    /// From now on this table says where the clusters are of a cluster's page.
    pub(crate) fn is_here(&self, cluster: u64) {
        if let Some((word, bit)) = self.below.as_ref().and_then(|below| below.bit(cluster)) {
            word.fetch_and(!bit, AcqRel);
        }
    }

    /// Bytes of a cluster.
    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of words that are loaded.
    pub(crate) fn loaded(&self) -> u64 {
        self.loaded.load(Relaxed)
    }

    /// So many bytes of words are loaded now.
    pub(crate) fn note_bytes(&self, bytes: u64) {
        self.loaded.store(bytes.min(mapped(self.clusters())), Relaxed);
    }

    /// How many clusters there are.
    #[inline]
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters.load(Acquire)
    }

    #[inline]
    fn word(&self, cluster: u64) -> Option<&AtomicU64> {
        // SAFETY: within the mapping (Table invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        (cluster < self.clusters()).then(|| unsafe { self.words.add(cluster as usize).as_ref() })
    }

    /// What it says. Nothing of clusters beyond its end: a disk grows behind the back of its queues.
    #[inline]
    pub(crate) fn get(&self, cluster: u64) -> Word {
        self.word(cluster).map_or(Word::UNKNOWN, |word| Word(word.load(Acquire)))
    }

    /// Where a cluster is, in the image or in what it is based on.
    #[inline]
    fn find(&self, cluster: u64) -> Word {
        let word = self.get(cluster);
        match &self.below {
            Some(below) if word == Word::UNKNOWN => below.get(cluster),
            _ => word,
        }
    }

    /// Says where a cluster is from now on.
    pub(crate) fn publish(&self, cluster: u64, word: Word) {
        debug_assert!(cluster < self.clusters(), "a cluster beyond the disk");
        if let Some(place) = self.word(cluster) {
            place.store(word.0, Release);
        }
    }

    /// Forgets `count` words from `first` on.
    pub(crate) fn forget(&self, first: u64, count: u64) {
        let clusters = self.clusters();
        let end = (first + count).min(clusters);
        // Words of clusters that there are lie within the mapping.
        #[allow(clippy::cast_possible_truncation)]
        let (from, end_at) = (8 * first as usize, 8 * end as usize);
        let to = end_at.next_multiple_of(page());
        let whole = end == clusters || end_at == to;
        if from % page() == 0 && whole {
            // SAFETY: within the mapping (Table invariant 1).
            let at = unsafe { self.words.byte_add(from) };
            if map(Some(at), to - from).is_ok() {
                return;
            }
        }
        for cluster in first..end {
            self.publish(cluster, Word::UNKNOWN);
        }
    }

    /// Where the beginning of `range` is, which lies within the disk and is not empty.
    #[inline]
    pub(crate) fn place(&self, range: ByteRange, write: bool) -> Place {
        let size = 1_u64 << self.cluster_bits;
        let (at, most) = (range.offset(), range.len());
        let mut cluster = at >> self.cluster_bits;
        let within = at & (size - 1);
        let mut len = size - within;
        let first = class(self.find(cluster), write);
        let mut expected = first.0;
        while len < most {
            cluster += 1;
            if first.1 == Class::Direct {
                expected += size >> 9 << 16;
            }
            if class(self.find(cluster), write) != (expected, first.1) {
                break;
            }
            len += size;
        }
        let len = len.min(most);
        match first.1 {
            Class::Direct => {
                let word = Word(first.0);
                Place::Direct { file: word.file(), offset: word.offset() + within, len }
            }
            Class::Zero => Place::Zero { len },
            Class::Ask => Place::Ask { len },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Direct,
    Zero,
    Ask,
}

/// What a word means to a request; with it the word, if its neighbour may continue it.
#[inline]
fn class(word: Word, write: bool) -> (u64, Class) {
    let kind = word.0 & Word::KIND;
    if kind == Word::DATA && (!write || word.0 & Word::WRITABLE != 0) {
        // Neighbours may differ in whether they can be written, unless it matters.
        (word.0 & !Word::WRITABLE, Class::Direct)
    } else if kind == Word::ZERO.0 && !write {
        (0, Class::Zero)
    } else {
        (0, Class::Ask)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours (Table invariant 1), and nobody looks any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), self.room) };
    }
}

/// Bytes of words for so many clusters, in whole pages: at least one.
fn mapped(clusters: u64) -> u64 {
    match clusters {
        0 => 0,
        some => (8 * some).next_multiple_of(page() as u64),
    }
}

/// Bytes of a page of memory.
pub(crate) fn page() -> usize {
    // SAFETY: no memory is involved.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).unwrap_or(4096)
}

/// Maps zeroes in the place of a part of a table, if `over` names one; else address space only.
fn map(over: Option<NonNull<AtomicU64>>, bytes: usize) -> io::Result<NonNull<AtomicU64>> {
    let at = over.map_or(std::ptr::null_mut(), |at| at.as_ptr().cast());
    let (fixed, access) = match over {
        Some(_) => (libc::MAP_FIXED, libc::PROT_READ | libc::PROT_WRITE),
        None => (0, libc::PROT_NONE),
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: fresh memory, or by contract of the callers a part of a table, whose words are read and
    // written atomically only: others see the old words or zeroes.
    let mapped = unsafe { libc::mmap(at, bytes, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(mapped.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// That tables have room for so many bytes and no more, in the largest unit that says it exactly.
#[cold]
fn too_large(most: u64) -> io::Error {
    let exact = |(_, shift): &(&str, u32)| most.trailing_zeros() >= *shift;
    let (unit, shift) = [("T", 40), ("G", 30)].into_iter().find(exact).unwrap_or(("M", 20));
    let number = most >> shift;
    io::Error::other(format!(
        "its tables have room for {number} {unit}iB until they are read again: make it so large first (say \
         {number}{unit}), then serve it anew, or go on if nobody serves it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(at: u64, len: u64) -> ByteRange {
        ByteRange::new(at, len).unwrap()
    }

    #[test]
    fn neighbours_in_one_file_are_one_extent() {
        let table = Table::new(10 << 16, 16, true).unwrap();
        assert_eq!(table.place(range(0, 10 << 16), false), Place::Ask { len: 10 << 16 });
        table.publish(0, Word::data(0, 5 << 16, true));
        table.publish(1, Word::data(0, 6 << 16, false));
        table.publish(2, Word::data(1, 7 << 16, true));
        table.publish(3, Word::ZERO);
        table.publish(4, Word::ZERO);
        table.publish(5, Word::ASK);
        let place = |at, len, write| table.place(range(at, len), write);
        let direct = |file, offset, len| Place::Direct { file, offset, len };
        assert_eq!(place(512, 4096, true), direct(0, (5 << 16) + 512, 4096));
        assert_eq!(place(512, 1 << 18, false), direct(0, (5 << 16) + 512, (2 << 16) - 512));
        assert_eq!(place(512, 1 << 18, true), direct(0, (5 << 16) + 512, (1 << 16) - 512));
        assert_eq!(place(2 << 16, 1 << 20, true), direct(1, 7 << 16, 1 << 16));
        assert_eq!(place(1 << 16, 512, true), Place::Ask { len: 512 });
        assert_eq!(place(3 << 16, 1 << 18, false), Place::Zero { len: 2 << 16 });
        assert_eq!(place(3 << 16, 1 << 18, true), Place::Ask { len: 4 << 16 });
    }

    #[test]
    fn what_is_forgotten_is_unknown() {
        let words = page() as u64 / 8;
        let table = Table::new((3 * words) << 9, 9, false).unwrap();
        for cluster in 0..table.clusters() {
            table.publish(cluster, Word::ZERO);
        }
        table.forget(words, words);
        table.forget(0, 7);
        let known = |cluster| table.get(cluster) == Word::ZERO;
        assert!(!known(0) && !known(6) && known(7) && known(words - 1));
        assert!(!known(words) && !known(2 * words - 1) && known(2 * words));
        table.forget(2 * words, words);
        assert!(!known(3 * words - 1));
    }

    #[test]
    fn a_table_grows_where_it_is() {
        let table = Table::new(3 << 16, 16, true).unwrap();
        table.publish(2, Word::ZERO);
        let place = |table: &Table| table.place(range(2 << 16, 8 << 16), false);
        table.make_room(1 << 36).unwrap();
        assert_eq!(table.clusters(), 3, "only room");
        table.grow(1 << 36);
        assert_eq!((table.clusters(), place(&table)), (1 << 20, Place::Zero { len: 1 << 16 }));
        assert_eq!(table.get(1 << 19), Word::UNKNOWN);
        table.publish((1 << 20) - 1, Word::ASK);
        // A smaller one stays as it is; one beyond its room is refused.
        table.make_room(1 << 16).unwrap();
        table.grow(1 << 16);
        assert_eq!(table.get((1 << 20) - 1), Word::ASK);
        assert!(table.make_room(1 << 50).unwrap_err().to_string().contains("room for"));
        for (most, words) in [(128 << 30, "128 GiB"), (3 << 40, "3 TiB"), (1 << 29, "512 MiB")] {
            let said = too_large(most).to_string();
            assert!(said.contains(&format!("have room for {words} until")), "{said}");
        }
        assert!(too_large(128 << 30).to_string().contains("(say 128G)"));
    }

    #[test]
    fn a_table_is_bounded() {
        assert!(Table::new(1 << 62, 9, false).is_err());
        // 8 TiB in clusters of 64 KiB: only address space.
        assert!(Table::new(8 << 40, 16, true).is_ok());
    }

    #[test]
    fn a_table_that_is_only_read_takes_what_its_words_need() {
        let room = |grows| Table::new(20 << 30, 16, grows).unwrap().room as u64;
        assert_eq!((room(false), room(true)), (8 * (20 << 14), ROOM_MIN));
        assert_eq!(Table::new(512, 16, false).unwrap().room, page());
    }
}
