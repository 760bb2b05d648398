//! The region in which queues record what is in flight (vhost-user protocol, "Inflight I/O tracking").
//!
//! A back-end makes it, the front-end keeps it and gives it to each back-end, so that it outlives
//! them. The parts of all queues lie in it one after the other. Behind them, where the protocol has
//! nothing to say, this back-end notes whether the guest's write cache is on ([ADR
//! 0016](../../../docs/adr/0016-state-beside-the-rings.md)).

use super::message::Message;
use super::start::StartError;
use ringway_core::mem::{Mapping, MappingError, Quota};
use ringway_export::ExportOptions;
use ringway_ring::virtqueue::{QUEUE_SIZE_MAX, inflight_bytes, renew_inflight};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Bytes behind the parts of all queues: one word, and the rest of its cache line.
const NOTE_BYTES: u64 = 64;

// What the word says; anything else says nothing. It belongs to the front-end, as all of the region:
// who writes there harms the guest that the region is of.
const CACHE_ON: u64 = u64::from_le_bytes(*b"RWcache1");
const CACHE_OFF: u64 = u64::from_le_bytes(*b"RWcache0");

/// Why a region was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum InflightRefusal {
    #[error(
        "an inflight region for {queues} queues of {entries} descriptors cannot be: at most {most} queues of {QUEUE_SIZE_MAX}"
    )]
    Shape { queues: u16, entries: u16, most: u16 },
    #[error(
        "the inflight region has {have} bytes but {need} are needed for {queues} queues of {entries} descriptors"
    )]
    Short { have: u64, need: u64, queues: u16, entries: u16 },
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

    /// Bytes of the parts of all queues.
    fn need(&self, packed: bool) -> u64 {
        inflight_bytes(packed, self.entries) as u64 * u64::from(self.queues)
    }
}

/// A region that the front-end has given.
#[derive(Debug)]
pub(super) struct Inflight {
    mapping: Arc<Mapping>,
    queues: u16,
    entries: u16,
    /// Where the note about the write cache is, in a region that has room for one.
    note: Option<usize>,
}

impl Inflight {
    /// A new region, as the answer to GET_INFLIGHT_FD: all zeroes, which says that it is new. Its
    /// size cannot be changed any more. At most some 8 MiB for each MiB of rings, and the
    /// front-end's to pay for.
    pub(super) fn make(
        message: &Message,
        options: ExportOptions,
    ) -> Result<(Vec<u8>, OwnedFd), InflightRefusal> {
        let about = Described::read(message, options)?;
        // The format of the rings may not have been negotiated yet: packed ones need more.
        let bytes = about.need(true) + NOTE_BYTES;
        let fd = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut payload = [bytes, 0].map(u64::to_ne_bytes).concat();
        payload.extend_from_slice(&message.payload()[16..]);
        Ok((payload, fd))
    }

    /// The region of a SET_INFLIGHT_FD message. What is in it is judged when a queue starts.
    pub(super) fn take(
        message: &mut Message,
        options: ExportOptions,
        quota: &Arc<Quota>,
    ) -> Result<Self, InflightRefusal> {
        let about = Described::read(message, options)?;
        let Described { bytes: have, offset, queues, entries } = about;
        if !offset.is_multiple_of(64) {
            return Err(InflightRefusal::Unaligned(offset));
        }
        // Whether the rings are packed may be said later.
        let need = about.need(false);
        if have < need {
            return Err(InflightRefusal::Short { have, need, queues, entries });
        }
        let file = message.take_fd().map(File::from);
        let file = file.ok_or(InflightRefusal::Unaligned(offset))?;
        let len = have.min(about.need(true) + NOTE_BYTES);
        let mapping = Arc::new(Mapping::of_peer(quota, &file, offset, len)?);
        let note = usize::try_from(about.need(true)).ok();
        let note = note.filter(|_| len == about.need(true) + NOTE_BYTES);
        Ok(Self { mapping, queues, entries, note })
    }

    /// Whether the write cache of this region's guest is on, if anybody has noted that.
    pub(super) fn write_cache(&self) -> Option<bool> {
        match self.note()?.load(SeqCst) {
            CACHE_ON => Some(true),
            CACHE_OFF => Some(false),
            _ => None,
        }
    }

    /// Notes whether the guest's write cache is on, for whoever goes on from this region.
    pub(super) fn note_write_cache(&self, on: bool) {
        if let Some(note) = self.note() {
            note.store(if on { CACHE_ON } else { CACHE_OFF }, SeqCst);
        }
    }

    fn note(&self) -> Option<&AtomicU64> {
        // SAFETY: a word of the mapping, which lives as long as `self`; only touched atomically.
        // Aligned, as parts are: regions begin at a multiple of 64 bytes (`take`).
        #[allow(clippy::cast_ptr_alignment)]
        self.note.map(|at| unsafe { AtomicU64::from_ptr(self.mapping.at(at).cast()) })
    }

    /// The part of queue `at`.
    pub(super) fn part(&self, at: usize, packed: bool) -> Result<QueueInflight, StartError> {
        let bytes = inflight_bytes(packed, self.entries);
        let offset = at * bytes;
        if at >= usize::from(self.queues) || offset + bytes > self.mapping.len() {
            return Err(StartError::NoPart { queues: self.queues, entries: self.entries });
        }
        Ok(QueueInflight { mapping: Arc::clone(&self.mapping), offset, entries: self.entries })
    }
}

/// The record of one queue.
///
/// # Invariants
/// 1. From `offset` on the mapping holds [`inflight_bytes`] for `entries` entries of the format that
///    the part was asked for, aligned to 64 bytes.
#[derive(Debug)]
pub(super) struct QueueInflight {
    mapping: Arc<Mapping>,
    offset: usize,
    entries: u16,
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

    /// Marks the record as new. `packed` is what the part was asked for with.
    pub(super) fn renew(&self, packed: bool) {
        // SAFETY: mapped and aligned (invariant 1); the caller's queue does not run.
        unsafe { renew_inflight(self.at(), packed, self.entries) };
    }
}
