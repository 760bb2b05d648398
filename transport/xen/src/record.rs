//! What is in flight on a block ring, recorded where it outlives this process.
//!
//! Answers share the slots of requests and come in any order, so the ring itself forgets what a
//! back-end still owes: a request whose slot holds somebody else's answer is gone. This record is the
//! place where a request lives from the moment it is taken, in a file that stays in memory (tmpfs)
//! when the process is killed. Its successor finds there what to do again.
//!
//! The order of stores is all there is to it (a killed process loses none of its stores, and does
//! them in the order of the program):
//!
//! 1. An entry is filled, then marked as taken, then `taken` counts it. A request that is not counted
//!    is still whole in the ring, because no answer overwrites a slot that was not counted.
//! 2. An answer is noted in its entry, with its number, before it is written to the ring. Which
//!    answers the guest has seen is what the ring's `rsp_prod` says, and nothing else.
//! 3. An entry is used again only after its answer was published.

pub(super) mod files;
mod kept;
mod open;
mod storage;
pub(super) mod types;

pub(super) use kept::Kept;
use ringway_core::mem::Mapping;
use ringway_core::{ByteRange, Status};
use ringway_ring::blkif::{Asked, GrantPiece, Refused};
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use storage::Storage;
pub use types::{Identity, RecordError};

/// Says what the file is, and that its head is whole.
const MAGIC: u64 = u64::from_le_bytes(*b"RWblkif1");

/// The head has a page of its own.
const HEAD_BYTES: usize = 4096;

#[repr(C)]
struct Head {
    magic: AtomicU64,
    /// Requests taken, without wrapping.
    taken: AtomicU64,
    /// The ring's counters when the record began.
    base: u32,
    pad: u32,
    identity: Identity,
}

/// One request, followed by its pieces.
#[repr(C)]
struct Entry {
    /// 1 while it holds a request.
    state: AtomicU32,
    command: u8,
    operation: u8,
    status: u8,
    pad: u8,
    id: u64,
    /// The number of the request.
    number: u64,
    /// 0, or the number of its answer plus 1.
    answer: AtomicU64,
    offset: u64,
    len: u64,
    count: u32,
    pad2: u32,
}

const _: () = assert!(size_of::<Entry>() == 56 && size_of::<Head>() <= HEAD_BYTES);

const _: () = assert!(Record::bytes(512, 256) as u64 == files::BYTES_MAX);

/// The record of one ring.
///
/// # Invariants
/// 1. The mapping holds a head and `entries` entries with room for `pieces` pieces each.
#[derive(Debug)]
pub struct Record {
    mapping: Mapping,
    entries: usize,
    pieces: usize,
    storage: Storage,
}

// SAFETY: the mapping is plain memory, used by one thread at a time.
unsafe impl Send for Record {}

impl Record {
    const fn entry_bytes(pieces: usize) -> usize {
        size_of::<Entry>() + pieces * size_of::<GrantPiece>()
    }

    const fn bytes(entries: usize, pieces: usize) -> usize {
        (HEAD_BYTES + entries * Self::entry_bytes(pieces)).next_multiple_of(4096)
    }

    /// A record in memory of this process: nobody can go on from it.
    ///
    /// # Errors
    /// What the host says.
    pub fn unkept(identity: &Identity) -> io::Result<Self> {
        let (entries, pieces) = (identity.slots as usize, identity.pieces as usize);
        let mapping = Mapping::anonymous(Self::bytes(entries, pieces))?;
        Ok(Self { mapping, entries, pieces, storage: Storage::Nowhere }.begun(identity))
    }

    fn begun(self, identity: &Identity) -> Self {
        let head = self.mapping.at(0).cast::<Head>();
        // SAFETY: the head lies in the mapping, which is new and ours.
        unsafe { (&raw mut (*head).identity).write(*identity) };
        self.head().magic.store(MAGIC, Release);
        self
    }

    fn head(&self) -> &Head {
        // SAFETY: the head lies in the mapping (invariant 1); what changes in it is atomic.
        unsafe { &*self.mapping.at(0).cast::<Head>() }
    }

    fn entry(&self, entry: u16) -> *mut Entry {
        let entry = usize::from(entry);
        assert!(entry < self.entries, "no such entry");
        self.mapping.at(HEAD_BYTES + entry * Self::entry_bytes(self.pieces)).cast()
    }

    /// True once a part of it has vanished. Nothing that was read of it since, or is read of it from now on,
    /// means anything.
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// The ring's counters were here when it began. Before anything is taken.
    pub(super) fn set_base(&mut self, base: u32) {
        debug_assert_eq!(self.taken(), 0);
        // SAFETY: the head lies in the mapping (invariant 1), and nobody has gone by its base yet.
        unsafe { (&raw mut (*self.mapping.at(0).cast::<Head>()).base).write(base) };
    }

    /// Requests taken so far.
    pub(super) fn taken(&self) -> u64 {
        self.head().taken.load(Relaxed)
    }

    /// The same, as the ring counts.
    pub(super) fn taken_of_ring(&self) -> u32 {
        // The ring counts modulo 2^32.
        #[allow(clippy::cast_possible_truncation)]
        let taken = self.taken() as u32;
        self.head().base.wrapping_add(taken)
    }

    /// Keeps a request in a free entry, and counts it.
    pub(super) fn take(&mut self, entry: u16, token: (u64, u8), asked: &Result<&Asked, Refused>) {
        let at = self.entry(entry);
        let number = self.taken();
        let (command, status) = Kept::of(asked).byte();
        let (range, pieces) = match asked {
            Ok(asked) => (asked.range(), asked.pieces()),
            Err(_) => (ByteRange::default(), &[][..]),
        };
        debug_assert!(pieces.len() <= self.pieces);
        let pieces = &pieces[..pieces.len().min(self.pieces)];
        // At most 4096.
        #[allow(clippy::cast_possible_truncation)]
        let count = pieces.len() as u32;
        // SAFETY: the entry and its pieces lie in the mapping (invariant 1) and are ours alone.
        unsafe {
            (*at).state.store(0, Release);
            (&raw mut (*at).command).write(command);
            (&raw mut (*at).status).write(status);
            (&raw mut (*at).operation).write(token.1);
            (&raw mut (*at).id).write(token.0);
            (&raw mut (*at).number).write(number);
            (&raw mut (*at).offset).write(range.offset());
            (&raw mut (*at).len).write(range.len());
            (&raw mut (*at).count).write(count);
            (*at).answer.store(0, Relaxed);
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), at.add(1).cast(), pieces.len());
            (*at).state.store(1, Release);
        }
        self.head().taken.store(number + 1, Release);
    }

    /// Notes that the request is answered by answer `number`, which is not written yet.
    pub(super) fn answer(&mut self, entry: u16, number: u64) {
        // SAFETY: the entry lies in the mapping (invariant 1).
        unsafe { (*self.entry(entry)).answer.store(number + 1, Release) };
    }

    /// What is kept of a request: what it asks for, where on the disk, where in memory.
    pub(super) fn kept(&self, entry: u16) -> (Kept, ByteRange, &[GrantPiece]) {
        let at = self.entry(entry);
        // SAFETY: the entry lies in the mapping and holds a request, which was judged when it was
        // taken or recovered: its count is in bounds, and any bytes make a piece.
        unsafe {
            let kept = Kept::from_byte((*at).command, (*at).status);
            let range = ByteRange::new((*at).offset, (*at).len);
            let pieces = std::slice::from_raw_parts(at.add(1).cast(), (*at).count as usize);
            let kept = kept.unwrap_or(Kept::Refused(Status::IoError));
            (kept, range.unwrap_or_default(), pieces)
        }
    }

    /// The token of a request, in its parts.
    pub(super) fn token(&self, entry: u16) -> (u64, u8) {
        let at = self.entry(entry);
        // SAFETY: as above.
        unsafe { ((*at).id, (*at).operation) }
    }

    /// The requests that a predecessor owes, oldest first, and how many answers it has published.
    /// `published` is the ring's `rsp_prod`.
    ///
    /// # Errors
    /// [`RecordError::Damaged`].
    pub(super) fn recover(&mut self, published: u32) -> Result<(Vec<u16>, u64), RecordError> {
        let taken = self.taken();
        let owed = self.taken_of_ring().wrapping_sub(published);
        let Some(answers) =
            taken.checked_sub(owed.into()).filter(|_| owed as usize <= self.entries)
        else {
            return Err(RecordError::Damaged("it does not fit the ring's counters"));
        };
        let mut found = Vec::new();
        for entry in 0..self.entries {
            // At most 512 slots.
            #[allow(clippy::cast_possible_truncation)]
            let entry = entry as u16;
            let at = self.entry(entry);
            // SAFETY: the entry lies in the mapping (invariant 1), and nobody else uses it.
            let (state, number, answer, count, command, status, range) = unsafe {
                let range = ByteRange::new((*at).offset, (*at).len);
                let answer = (*at).answer.load(Acquire);
                let state = (*at).state.load(Acquire);
                (state, (*at).number, answer, (*at).count, (*at).command, (*at).status, range)
            };
            let is_published = answer != 0 && answer - 1 < answers;
            if state != 1 || number >= taken || is_published {
                continue;
            }
            let (Some(range), Some(kept)) = (range, Kept::from_byte(command, status)) else {
                return Err(RecordError::Damaged("an entry holds no request"));
            };
            if count as usize > self.pieces {
                return Err(RecordError::Damaged("an entry is longer than it can be"));
            }
            let bytes: u64 = self.kept(entry).2.iter().map(|piece| piece.len() as u64).sum();
            let proper = self.kept(entry).2.iter().all(|piece| piece.is_proper());
            let moves = matches!(kept, Kept::Read | Kept::Write | Kept::Barrier);
            if !proper || (moves && bytes != range.len()) {
                return Err(RecordError::Damaged("an entry is not as long as its data"));
            }
            // SAFETY: as above. The answer, if there was one, was never seen.
            unsafe { (*at).answer.store(0, Release) };
            found.push((number, entry));
        }
        if self.is_lost() {
            return Err(RecordError::Damaged("its file was cut short, or has no room"));
        }
        if found.len() != owed as usize {
            return Err(RecordError::Damaged("it does not hold what is owed"));
        }
        found.sort_unstable();
        Ok((found.into_iter().map(|(_, entry)| entry).collect(), answers))
    }
}
