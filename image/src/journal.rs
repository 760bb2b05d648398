//! Entries of tables that are not in their file yet, where they outlive this process.
//!
//! ```text
//! page 0   the mark, how many entries there are, in which boot of the host they were written
//! page 1…  entries, in the order in which they were made: which cluster of the disk, its word in L2
//! ```
//!
//! What is stored in the mapping is there after SIGKILL, without a system call. It means nothing after the host
//! went down: what the entries lead to need not be durable, and no guest has been promised that it is. The mark
//! is also in the header of the image, among the features that every other program takes away when it begins to
//! write: so nobody takes entries for those of an image that was written by others since.

mod replay;

pub(crate) use replay::set_mark;
pub use replay::{Replayed, is_journal_of, replay};
use ringway_core::mem::{Mapping, MappingError};
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, OnceLock};

/// The most entries.
pub(crate) const CAPACITY: usize = 4096;

const HEAD: usize = 4096;
const ENTRY: usize = 16;

/// Words of the first page.
const MARK: usize = 0;
const COUNT: usize = 8;
const BOOT: usize = 16;

/// Features of an image that say which journal may hold entries of it, among the autoclear ones: the last
/// bit, and 31 that nobody can guess. The lower half is left to those that have a meaning.
pub(crate) const MARK_BITS: u64 = !0 << 32;
const MARKED: u64 = 1 << 63;

/// Room for entries of one image's tables, in a file that outlives the process.
pub struct Journal {
    file: Arc<File>,
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
    pub const BYTES: u64 = (HEAD + CAPACITY * ENTRY) as u64;

    /// Maps [`Journal::BYTES`] bytes of `file` from `offset` on, a multiple of 4096. The file has them, as
    /// they were left or zeroes. Nobody else writes there.
    ///
    /// # Errors
    /// What the host says.
    pub fn map(file: Arc<File>, offset: u64) -> Result<Self, MappingError> {
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
        let (from, len) = (self.offset.cast_signed(), Self::BYTES.cast_signed());
        // SAFETY: no memory is involved.
        let kept = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, from, len) } == 0;
        if !kept {
            tracing::info!("no journal: {}", io::Error::last_os_error());
        }
        kept && self.boot != 0
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.mapping.len());
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
        usize::try_from(self.word(COUNT).load(Acquire)).unwrap_or(0).min(CAPACITY)
    }

    /// The mark of the image whose entries they are; 0 if there has been none in this boot.
    pub(crate) fn mark(&self) -> u64 {
        if self.is_of_this_boot() { self.word(MARK).load(Acquire) & MARK_BITS } else { 0 }
    }

    fn is_of_this_boot(&self) -> bool {
        self.boot != 0 && self.word(BOOT).load(Acquire) == self.boot
    }

    /// Entries of an image with a mark of its own follow. Gives the mark, for its header.
    pub(crate) fn begin(&self) -> u64 {
        self.clear();
        let mark = MARKED | boot_bits(self.boot) | (u64::from(nonce()) << 32);
        self.word(BOOT).store(self.boot, Release);
        self.word(MARK).store(mark, Release);
        mark
    }

    /// What it holds is over: it is that of no image. Whoever finds an image with the mark that it had takes
    /// something for lost.
    pub fn end(&self) {
        self.clear();
        self.word(MARK).store(0, Release);
    }

    /// As [`Journal::end`], if it has this mark, which is none if it is 0.
    pub(crate) fn end_of(&self, mark: u64) {
        if mark != 0 && self.mark() == mark {
            self.end();
        }
    }

    /// Adds entries; false, if there is no room for all of them.
    pub(crate) fn append(&self, words: &[(u64, u64)]) -> bool {
        let count = self.len();
        if count + words.len() > CAPACITY {
            return false;
        }
        for (at, (cluster, word)) in (count..).zip(words) {
            let at = HEAD + at * ENTRY;
            self.word(at).store(*cluster, Relaxed);
            self.word(at + 8).store(*word, Relaxed);
        }
        // Last: a kill leaves all of them or none.
        self.word(COUNT).store((count + words.len()) as u64, Release);
        true
    }

    /// All of them are in the file.
    pub(crate) fn clear(&self) {
        self.word(COUNT).store(0, Release);
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

/// What of a mark says in which boot it was given.
fn boot_bits(boot: u64) -> u64 {
    (boot & 0x7fff) << 48
}

/// Whether a mark was given since the host came up, as far as is known.
pub(crate) fn is_of_this_boot(mark: u64) -> bool {
    let boot = learn_boot();
    mark & MARKED != 0 && boot != 0 && mark & (0x7fff << 48) == boot_bits(boot)
}

/// 16 bits that nobody can guess.
#[allow(clippy::cast_possible_truncation, reason = "any 16 bits")]
fn nonce() -> u16 {
    RandomState::new().hash_one(0) as u16
}

/// Learns in which boot of the host this process is, by a path of the system: for a process that is to be
/// confined, which cannot look it up later. 0 if nobody tells.
pub fn learn_boot() -> u64 {
    static BOOT: OnceLock<u64> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits = id.chars().filter_map(|digit| digit.to_digit(16));
        // 128 bits that are random, but for six: 64 of them say as much.
        digits.fold(0_u64, |bits, digit| bits.rotate_left(4) ^ u64::from(digit))
    })
}
