//! Memory shared with the server, and buffers in it.

use crate::Error;
use ringway_core::mem::{Mapping, page_size};
use ringway_ring::virtqueue::Piece;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::FromRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

/// Guest-physical address of the first shared byte. Not 0 and not our own address, so that a server
/// that mixes up the two kinds of address is found out.
const GUEST_BASE: u64 = 1 << 32;
const HUGE_PAGE: usize = 2 << 20;

/// A part of the shared memory, as it is announced to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedRegion {
    /// Guest-physical address.
    pub(crate) guest: u64,
    /// Our address.
    pub(crate) user: u64,
    /// Length in bytes.
    pub(crate) len: u64,
    /// Offset in the file, in bytes.
    pub(crate) offset: u64,
}

/// One memfd, mapped here and by the server: first the rings (`control` bytes), then buffers.
///
/// # Invariants
/// 1. `free` lists ranges of the data part that no [`Buffer`] covers; they neither overlap nor touch.
#[derive(Debug)]
pub(crate) struct Memory {
    file: File,
    mapping: Mapping,
    regions: Vec<SharedRegion>,
    free: Mutex<BTreeMap<usize, usize>>,
}

impl Memory {
    /// `control` bytes for rings and `data` bytes for buffers, rounded up to whole pages, announced
    /// as `regions` regions that adjoin (the rings always lie in the first one).
    pub(crate) fn new(
        control: usize,
        data: usize,
        huge: bool,
        regions: usize,
    ) -> Result<Arc<Self>, Error> {
        let unit = if huge { HUGE_PAGE } else { page_size() };
        let control = control.next_multiple_of(unit);
        let data = data.max(1).next_multiple_of(unit);
        let len = control + data;
        let file = sealed_memfd(len, huge)?;
        let mapping = Mapping::of_file(&file, 0, len as u64)
            .map_err(|source| Error::Memory { bytes: len, source })?;
        let step = (data / regions.max(1)).max(1).next_multiple_of(unit);
        let mut cuts = vec![0];
        cuts.extend((1..regions).map(|i| control + i * step).filter(|&cut| cut < len));
        cuts.push(len);
        let base = mapping.at(0) as u64;
        let regions = cuts
            .windows(2)
            .map(|cut| SharedRegion {
                guest: GUEST_BASE + cut[0] as u64,
                user: base + cut[0] as u64,
                len: (cut[1] - cut[0]) as u64,
                offset: cut[0] as u64,
            })
            .collect();
        let free = Mutex::new(BTreeMap::from([(control, data)]));
        Ok(Arc::new(Self { file, mapping, regions, free }))
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn regions(&self) -> &[SharedRegion] {
        &self.regions
    }

    /// Our address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.at(offset)
    }

    /// What to add, modulo 2^64, to one of our addresses to get the guest-physical one.
    pub(crate) fn guest_delta(&self) -> u64 {
        GUEST_BASE.wrapping_sub(self.mapping.at(0) as u64)
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// First fit.
    fn take(&self, len: usize, align: usize) -> Option<usize> {
        let mut free = self.free();
        let (start, size, at) = free.iter().find_map(|(&start, &size)| {
            let at = start.checked_next_multiple_of(align)?;
            (at.checked_add(len)? <= start + size).then_some((start, size, at))
        })?;
        free.remove(&start);
        if at > start {
            free.insert(start, at - start);
        }
        if at + len < start + size {
            free.insert(at + len, start + size - at - len);
        }
        Some(at)
    }

    fn give_back(&self, mut start: usize, mut len: usize) {
        let mut free = self.free();
        if let Some((&before, &size)) = free.range(..start).next_back() {
            if before + size == start {
                (start, len) = (before, size + len);
            }
        }
        if let Some(size) = free.remove(&(start + len)) {
            len += size;
        }
        free.insert(start, len);
    }
}

/// A memfd that can neither shrink nor grow: a server may map it without fear.
fn sealed_memfd(len: usize, huge: bool) -> Result<File, Error> {
    let host = |what| move |source| Error::Host { what, source };
    let flags =
        libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | if huge { libc::MFD_HUGETLB } else { 0 };
    // SAFETY: a constant C string and plain flags.
    let fd = unsafe { libc::memfd_create(c"ringway-driver".as_ptr(), flags) };
    if fd < 0 {
        return Err(Error::last_os("cannot create shared memory (memfd_create)"));
    }
    // SAFETY: the descriptor is new and nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len as u64).map_err(host(if huge {
        "cannot get huge pages: reserve some (sysctl vm.nr_hugepages) or do without"
    } else {
        "cannot size the shared memory"
    }))?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: sealing a descriptor of ours touches no memory.
    if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } < 0 {
        return Err(Error::last_os("cannot seal the shared memory"));
    }
    Ok(file)
}

/// Where buffers come from. Cheap to clone; usable from any thread.
#[derive(Clone, Debug)]
pub struct BufferPool {
    memory: Arc<Memory>,
}

impl BufferPool {
    pub(crate) fn new(memory: Arc<Memory>) -> Self {
        Self { memory }
    }

    /// A buffer of `len` bytes that begins on a page; `None` if no piece of shared memory is large
    /// enough. Its content is left from earlier use. Searches and locks: take buffers before the
    /// load begins, not for each request.
    #[must_use]
    pub fn alloc(&self, len: usize) -> Option<Buffer> {
        self.alloc_aligned(len, page_size())
    }

    /// As [`BufferPool::alloc`], beginning on a multiple of `align`.
    fn alloc_aligned(&self, len: usize, align: usize) -> Option<Buffer> {
        let capacity = u32::try_from(len).ok().filter(|&len| len > 0)?;
        let offset = self.memory.take(len, align.max(1))?;
        let host = NonNull::new(self.memory.at(offset)).expect("a mapping is not at address 0");
        let memory = Arc::clone(&self.memory);
        Some(Buffer(Box::new(Bytes { host, len: capacity, capacity, memory, lost: false })))
    }

    /// Bytes that no buffer holds.
    #[must_use]
    pub fn available(&self) -> usize {
        self.memory.free().values().sum()
    }
}

/// A piece of memory shared with the server. It is a slice of bytes while the caller has it; a
/// request takes it and its completion gives it back.
///
/// The server can write to shared memory at any time. One that keeps the protocol leaves buffers
/// alone that are not in flight; whoever talks to a server that he does not trust should copy bytes
/// out before judging them.
///
/// One word wide, so that it travels through a queue in a register.
#[derive(Debug)]
pub struct Buffer(Box<Bytes>);

/// # Invariants
/// 1. `capacity` bytes from `host` lie in `memory` and belong to this piece alone;
///    `len <= capacity`.
#[derive(Debug)]
struct Bytes {
    host: NonNull<u8>,
    len: u32,
    capacity: u32,
    memory: Arc<Memory>,
    /// The server may still write to it: never give it out again.
    lost: bool,
}

// SAFETY: a buffer is the only owner of its bytes, like a Vec (Bytes invariant 1).
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Shortens or lengthens the buffer within its capacity: requests use `len` bytes.
    ///
    /// # Panics
    /// If `len` is beyond [`Buffer::capacity`].
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes in a buffer of {}", self.0.capacity);
        // At most `capacity`, a u32.
        #[allow(clippy::cast_possible_truncation)]
        {
            self.0.len = len as u32;
        }
    }

    /// The most bytes it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity as usize
    }

    /// Cuts the buffer in two. The parts can be queued, moved and dropped separately.
    ///
    /// # Panics
    /// Unless `0 < at < capacity`.
    #[must_use]
    pub fn split_at(mut self, at: usize) -> (Self, Self) {
        assert!(at > 0 && at < self.capacity(), "cannot cut at {at}");
        // Less than `capacity`, a u32.
        #[allow(clippy::cast_possible_truncation)]
        let first = at as u32;
        let rest = self.0.capacity - first;
        // SAFETY: `at` is within the buffer (Bytes invariant 1).
        let middle = unsafe { self.0.host.add(at) };
        let memory = Arc::clone(&self.0.memory);
        (self.0.len, self.0.capacity) = (first, first);
        (
            self,
            Self(Box::new(Bytes { host: middle, len: rest, capacity: rest, memory, lost: false })),
        )
    }

    /// The guest-physical address of the first byte, for [`crate::BlkQueue::raw`].
    #[must_use]
    pub fn guest_address(&self) -> u64 {
        (self.0.host.as_ptr() as u64).wrapping_add(self.0.memory.guest_delta())
    }

    /// The buffer as the server sees it.
    #[inline]
    pub(crate) fn piece(&self, guest_delta: u64) -> Piece {
        Piece { addr: (self.host() as u64).wrapping_add(guest_delta), len: self.bytes() }
    }

    /// The same in pieces of `max` bytes each, the last one shorter.
    pub(crate) fn pieces(&self, guest_delta: u64, max: u32) -> impl Iterator<Item = Piece> {
        let Piece { addr, len } = self.piece(guest_delta);
        (0..len.div_ceil(max)).map(move |index| {
            let before = index * max;
            Piece { addr: addr.wrapping_add(before.into()), len: (len - before).min(max) }
        })
    }

    #[inline]
    pub(crate) fn host(&self) -> *mut u8 {
        self.0.host.as_ptr()
    }

    #[inline]
    pub(crate) fn bytes(&self) -> u32 {
        self.0.len
    }

    #[inline]
    pub(crate) fn is_in(&self, memory: &Arc<Memory>) -> bool {
        Arc::ptr_eq(&self.0.memory, memory)
    }

    /// Drops a buffer that the server may still write to: its bytes are never given out again.
    pub(crate) fn abandon(mut self) {
        self.0.lost = true;
    }
}

/// How many pieces of `max` bytes at most these are.
pub(crate) fn pieces_of(buffers: &[Buffer], max: u32) -> usize {
    buffers.iter().map(|buffer| buffer.bytes().div_ceil(max) as usize).sum()
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped, initialised (a memfd starts zeroed) and ours alone
        // (Bytes invariant 1).
        unsafe { std::slice::from_raw_parts(self.0.host.as_ptr(), self.0.len as usize) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` proves that no one else looks.
        unsafe { std::slice::from_raw_parts_mut(self.0.host.as_ptr(), self.0.len as usize) }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if !self.lost {
            let offset = self.host.as_ptr() as usize - self.memory.at(0) as usize;
            self.memory.give_back(offset, self.capacity as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_aligned_and_go_back_whole() {
        let pool = BufferPool::new(Memory::new(100, 64 << 10, false, 1).unwrap());
        assert_eq!(pool.available(), 64 << 10);
        let a = pool.alloc(100).unwrap();
        let b = pool.alloc(4096).unwrap();
        let odd = pool.alloc_aligned(1, 1).unwrap();
        assert_eq!(b.host() as usize % 4096, 0);
        assert_eq!(odd.host() as usize, a.host() as usize + 100, "first fit");
        assert!(pool.alloc(64 << 10).is_none());
        assert!(pool.alloc(0).is_none());
        drop((b, a, odd));
        let (mut left, right) = pool.alloc(64 << 10).expect("the pieces have merged").split_at(7);
        left.set_len(3);
        left.fill(9);
        assert_eq!((left.len(), left.capacity(), right.len()), (3, 7, 65529));
        assert_eq!(right.guest_address(), left.guest_address() + 7);
        drop(left);
        assert_eq!(pool.available(), 7);
        right.abandon();
        assert_eq!(pool.available(), 7, "an abandoned buffer never comes back");
    }

    #[test]
    fn regions_adjoin_and_hold_the_rings_in_the_first() {
        let memory = Memory::new(5000, 40 << 10, false, 4).unwrap();
        let regions = memory.regions();
        assert_eq!(regions.len(), 4);
        assert!(regions[0].len >= 8192 + 4096);
        for pair in regions.windows(2) {
            assert_eq!(pair[0].guest + pair[0].len, pair[1].guest);
            assert_eq!(pair[0].offset + pair[0].len, pair[1].offset);
        }
        assert_eq!(regions.iter().map(|r| r.len).sum::<u64>(), 8192 + (40 << 10));
        assert!(memory.file().set_len(0).is_err(), "sealed");
    }
}
