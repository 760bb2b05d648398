//! The region in which queues record what is in flight (vhost-user protocol, "Inflight I/O tracking").
//!
//! A back-end makes it, the front-end keeps it and gives it to each back-end, so that it outlives
//! them. Its layout is the back-end's:
//!
//! ```text
//! parts of all queues, for rings of as many entries as the front-end has asked for
//! 64 bytes: whether the guest's write cache is on (ADR 0016)
//! parts of all queues, for the largest rings that this back-end accepts, if those are larger
//! 64 bytes: for how many entries both were made
//! ```
//!
//! The first two are what earlier versions make, and read. What follows is for front-ends that ask for
//! less than their rings have: QEMU 10 asks with the property `queue-size` and offers rings of 1024
//! ([ADR 0012](../../../docs/adr/0012-inflight.md)).

use super::message::Message;
use ringway_core::mem::{Mapping, MappingError, Quota};
use ringway_export::ExportOptions;
use ringway_ring::virtqueue::{
    Format, QUEUE_SIZE_MAX, inflight_bytes, may_name_inflight, renew_inflight,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Bytes of a word behind parts, and the rest of its cache line.
const WORD_BYTES: u64 = 64;

// What the word says; anything else says nothing. It belongs to the front-end, as all of the region:
// who writes there harms the guest that the region is of.
const CACHE_ON: u64 = u64::from_le_bytes(*b"RWcache1");
const CACHE_OFF: u64 = u64::from_le_bytes(*b"RWcache0");

/// The last word of a region with larger parts: this, the entries of the first parts, and those of the
/// larger ones, of 16 bits each.
const TWO_SIZES: u64 = 0x5752 << 32;

/// Why a region was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum InflightRefusal {
    #[error(
        "an inflight region for {queues} queues of {entries} descriptors cannot be: at most {most} queues of {QUEUE_SIZE_MAX}"
    )]
    Shape { queues: u16, entries: u16, most: u16 },
    #[error("the inflight region begins at {0}, not at a multiple of 64 bytes")]
    Unaligned(u64),
    #[error("the inflight region: {0}")]
    Mapping(#[from] MappingError),
    #[error("no memory for an inflight region: {0}")]
    Host(#[from] Errno),
}

/// The payload of both messages: `struct VhostUserInflight`.
struct Described {
    bytes: u64,
    offset: u64,
    queues: u16,
    entries: u16,
}

impl Described {
    fn read(message: &Message, options: ExportOptions) -> Result<Self, InflightRefusal> {
        let about = Self {
            bytes: message.u64(0),
            offset: message.u64(8),
            queues: message.u16(16),
            entries: message.u16(18),
        };
        let Self { queues, entries, .. } = about;
        let most = options.queues;
        if queues == 0 || queues > most || entries == 0 || entries > QUEUE_SIZE_MAX {
            return Err(InflightRefusal::Shape { queues, entries, most });
        }
        Ok(about)
    }
}

/// Where the parts of all queues lie, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    /// Bytes from the beginning of the region.
    at: u64,
    entries: u16,
}

impl Parts {
    /// Where those of so many queues end. The format of the rings may not have been negotiated yet: packed
    /// ones need more.
    fn end(self, queues: u16) -> u64 {
        self.at + inflight_bytes(true, self.entries) as u64 * u64::from(queues)
    }
}

/// Where all things lie in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    queues: u16,
    first: Parts,
    /// For larger rings.
    larger: Option<Parts>,
}

impl Layout {
    /// For rings of `asked` entries, and beside them of `largest`, if that is more.
    fn new(queues: u16, asked: u16, largest: u16) -> Self {
        let first = Parts { at: 0, entries: asked };
        let at = first.end(queues) + WORD_BYTES;
        let larger = (largest > asked).then_some(Parts { at, entries: largest });
        Self { queues, first, larger }
    }

    /// What the last word of a region of these `bytes` says.
    fn read(word: u64, queues: u16, bytes: u64) -> Option<Self> {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        let (asked, largest) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let magic = u64::from_le_bytes([0, 0, 0, 0, e, f, g, h]);
        let sizes = asked > 0 && asked < largest && largest <= QUEUE_SIZE_MAX;
        let layout = (magic == TWO_SIZES && sizes).then(|| Self::new(queues, asked, largest))?;
        (layout.bytes() == bytes).then_some(layout)
    }

    /// The last word, which [`Layout::read`] knows again.
    fn last_word(self) -> Option<u64> {
        self.larger.map(|larger| {
            TWO_SIZES | u64::from(larger.entries) << 16 | u64::from(self.first.entries)
        })
    }

    /// Where the word about the write cache is.
    fn note_at(self) -> u64 {
        self.first.end(self.queues)
    }

    fn bytes(self) -> u64 {
        self.larger.map_or(self.note_at(), |larger| larger.end(self.queues)) + WORD_BYTES
    }
}

/// A region that the front-end has given.
#[derive(Debug)]
pub(super) struct Inflight {
    mapping: Arc<Mapping>,
    layout: Layout,
    /// It was too small for a queue, and the log says so.
    pub(super) said_small: bool,
}

impl Inflight {
    /// A new region, as the answer to GET_INFLIGHT_FD: parts of zeroes, which says that they are new. Its
    /// size cannot be changed any more. At most some 8 MiB for each MiB of rings, and the
    /// front-end's to pay for.
    pub(super) fn make(
        message: &Message,
        options: ExportOptions,
    ) -> Result<(Vec<u8>, OwnedFd), InflightRefusal> {
        let Described { queues, entries, .. } = Described::read(message, options)?;
        let layout = Layout::new(queues, entries, options.queue_size);
        let bytes = layout.bytes();
        let fd = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let file = File::from(fd);
        if let Some(word) = layout.last_word() {
            let mapping = Arc::new(Mapping::of_file(&file, bytes - WORD_BYTES, WORD_BYTES)?);
            if let Some(last) = (Self { mapping, layout, said_small: false }).word(0) {
                last.store(word, SeqCst);
            }
        }
        let mut payload = [bytes, 0].map(u64::to_ne_bytes).concat();
        payload.extend_from_slice(&message.payload()[16..]);
        Ok((payload, file.into()))
    }

    /// The region of a SET_INFLIGHT_FD message. Whether it is large enough for a queue, and what is in it,
    /// is judged when that starts.
    pub(super) fn take(
        message: &mut Message,
        options: ExportOptions,
        quota: &Arc<Quota>,
    ) -> Result<Self, InflightRefusal> {
        let Described { bytes, offset, queues, entries } = Described::read(message, options)?;
        if offset % 64 != 0 {
            return Err(InflightRefusal::Unaligned(offset));
        }
        let file = message.take_fd().map(File::from);
        let file = file.ok_or(InflightRefusal::Unaligned(offset))?;
        // No region of ours is longer, and of another one no more is used.
        let most = Layout::new(queues, QUEUE_SIZE_MAX - 1, QUEUE_SIZE_MAX).bytes();
        let of_asked = Layout::new(queues, entries, 0);
        let len = if bytes > most { bytes.min(of_asked.bytes()) } else { bytes };
        let mapping = Arc::new(Mapping::of_peer(quota, &file, offset, len)?);
        let mut region = Self { mapping, layout: of_asked, said_small: false };
        let last = len.checked_sub(WORD_BYTES).and_then(|at| region.word(at));
        let said = last.and_then(|word| Layout::read(word.load(SeqCst), queues, len));
        region.layout = said.unwrap_or(of_asked);
        Ok(region)
    }

    /// Whether the write cache of this region's guest is on, if anybody has noted that.
    pub(super) fn write_cache(&self) -> Option<bool> {
        match self.word(self.layout.note_at())?.load(SeqCst) {
            CACHE_ON => Some(true),
            CACHE_OFF => Some(false),
            _ => None,
        }
    }

    /// Notes whether the guest's write cache is on, for whoever goes on from this region.
    pub(super) fn note_write_cache(&self, on: bool) {
        if let Some(note) = self.word(self.layout.note_at()) {
            note.store(if on { CACHE_ON } else { CACHE_OFF }, SeqCst);
        }
    }

    /// The word at `at`, if the region has that and the rest of its cache line.
    fn word(&self, at: u64) -> Option<&AtomicU64> {
        let end = at.checked_add(WORD_BYTES)?;
        let at = usize::try_from(at).ok()?;
        // SAFETY: a word of the mapping, which lives as long as `self`; only touched atomically.
        // Aligned: regions begin at a multiple of 64 bytes (`take`).
        #[allow(clippy::cast_ptr_alignment)]
        (at % 8 == 0 && end <= self.mapping.len() as u64)
            .then(|| unsafe { AtomicU64::from_ptr(self.mapping.at(at).cast()) })
    }

    /// The part of queue `at`. `None` if the region has none that is large enough.
    pub(super) fn part(&self, at: usize, format: Format) -> Option<QueueInflight> {
        let Layout { queues, first, larger } = self.layout;
        let parts = if format.size <= first.entries { first } else { larger? };
        let bytes = inflight_bytes(format.packed, parts.entries);
        let offset = usize::try_from(parts.at).ok()? + at * bytes;
        let fits = format.size <= parts.entries
            && at < usize::from(queues)
            && offset + bytes <= self.mapping.len();
        let mapping = Arc::clone(&self.mapping);
        let (entries, packed) = (parts.entries, format.packed);
        fits.then_some(QueueInflight { mapping, offset, entries, packed })
    }
}

/// The record of one queue.
///
/// # Invariants
/// 1. From `offset` on the mapping holds [`inflight_bytes`] for `entries` entries of its format, aligned
///    to 64 bytes.
#[derive(Debug)]
pub(super) struct QueueInflight {
    mapping: Arc<Mapping>,
    offset: usize,
    entries: u16,
    packed: bool,
}

impl QueueInflight {
    pub(super) fn at(&self) -> *mut u8 {
        self.mapping.at(self.offset)
    }

    pub(super) fn entries(&self) -> u16 {
        self.entries
    }

    /// True if the memory has vanished, because its file was cut short.
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// True if it may name requests that nobody has answered.
    pub(super) fn may_name_requests(&self) -> bool {
        // SAFETY: mapped and aligned (invariant 1).
        unsafe { may_name_inflight(self.at(), self.packed, self.entries) }
    }

    /// Marks the record as new. Its queue does not run.
    pub(super) fn renew(&self) {
        // SAFETY: mapped and aligned (invariant 1); the caller's queue does not run.
        unsafe { renew_inflight(self.at(), self.packed, self.entries) };
    }
}
