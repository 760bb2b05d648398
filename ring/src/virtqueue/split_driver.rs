//! The driver side of a split virtqueue (VIRTIO 1.2 §2.7).
//!
//! ```text
//! let head = queue.add(readable, writable)?;              // descriptors; not yet visible
//! if queue.publish() { kick() }                           // one store of avail.idx per batch
//! while let Some(used) = queue.pop_used()? { … }          // one load of used.idx per batch
//! match queue.arm(1)? { Quiet => sleep, WorkArrived => go on }
//! ```

#[cfg(test)]
mod tests;

use super::layout::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, LayoutError,
    SplitAddresses, USED_F_NO_NOTIFY, UsedElem,
};
use super::split_memory::{SplitMemory, event_passed};
use super::types::{Armed, DIRECT_MAX, DeviceFault, NoRoom, Piece, Tables, Used};
use crate::shared::fence;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// What the driver remembers about one descriptor.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// What the table holds there, so that a descriptor that stays the same is not written again:
    /// its cache line stays shared between both sides.
    desc: Desc,
    /// The next free descriptor, or the next of the chain.
    next: u16,
    /// For the head of a chain in flight: its last descriptor.
    tail: u16,
    /// For the head of a chain in flight: descriptors of the chain. Otherwise 0.
    descs: u16,
    /// What the available ring holds in the entry of this number, likewise.
    listed: u16,
}

/// One split virtqueue, seen from the driver.
///
/// # Invariants
/// 1. `own.len()` is the queue size; following `next` from `free_head` visits `free_count`
///    descriptors, none of which belongs to a chain in flight. All links are below the queue size.
/// 2. `own[i].descs != 0` exactly for the heads of the chains added and not popped, of which there
///    are `avail_next - next_used`, at most the queue size.
/// 3. `used_seen - next_used <= avail_next - next_used`.
/// 4. Nothing that decides where memory is accessed is ever read back from shared memory.
#[derive(Debug)]
pub struct SplitDriver {
    ring: SplitMemory,
    /// The next entry of the available ring to write.
    avail_next: u16,
    /// The available index as last published.
    avail_published: u16,
    /// The next entry of the used ring to read.
    next_used: u16,
    /// The used index as last read.
    used_seen: u16,
    free_head: u16,
    /// Wider than it needs to be: next to counters of its own width the compiler would update two at
    /// once in a vector register, and a load that spans two recent stores waits for both.
    free_count: u32,
    event_idx: bool,
    armed: bool,
    tables: Option<Tables>,
    own: Box<[Own]>,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for SplitDriver {}

impl SplitDriver {
    /// A queue of `size` descriptors at `at`, empty, with interrupts disarmed. Both indices start at
    /// `first`, which the device must be told (vhost-user SET_VRING_BASE).
    ///
    /// # Errors
    /// [`LayoutError`] if size or alignment break §2.7.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, and `tables` mapped
    /// memory of [`Tables::bytes`], for as long as the queue exists. No device uses them yet.
    pub unsafe fn new(
        size: u16,
        at: SplitAddresses,
        first: u16,
        event_idx: bool,
        tables: Option<Tables>,
    ) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { SplitMemory::new(size, at)? };
        if tables.is_some_and(|t| (t.host as usize) % align_of::<Desc>() != 0) {
            return Err(LayoutError::Unaligned("indirect table", align_of::<Desc>()));
        }
        let empty = |index: u16| Own {
            desc: Desc::default(),
            next: (index + 1) & (size - 1),
            tail: 0,
            descs: 0,
            listed: 0,
        };
        for index in 0..size {
            // SAFETY: `index` is in the table (SplitMemory invariant 1).
            unsafe { ring.desc(index).write_volatile(Desc::default()) };
            ring.avail_ring(index).store(0, Relaxed);
        }
        ring.avail_idx().store(first, Relaxed);
        ring.used_idx().store(first, Relaxed);
        ring.used_flags().store(0, Relaxed);
        ring.avail_event().store(first, Relaxed);
        ring.used_event().store(first.wrapping_sub(1), Relaxed);
        ring.avail_flags().store(if event_idx { 0 } else { AVAIL_F_NO_INTERRUPT }, Relaxed);
        Ok(Self {
            ring,
            avail_next: first,
            avail_published: first,
            next_used: first,
            used_seen: first,
            free_head: 0,
            free_count: u32::from(size),
            event_idx,
            armed: false,
            tables: tables.filter(|t| t.entries > 0),
            own: (0..size).map(empty).collect(),
        })
    }

    /// Queue size, in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Chains added and not popped yet.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.avail_next.wrapping_sub(self.next_used)
    }

    /// The index of the next chain to become available, for SET_VRING_BASE of an idle queue.
    #[must_use]
    pub fn avail_index(&self) -> u16 {
        self.avail_published
    }

    /// The most pieces a chain may have in this queue.
    #[must_use]
    pub fn max_pieces(&self) -> usize {
        self.tables.map_or(0, |t| usize::from(t.entries)).max(usize::from(self.ring.size()))
    }

    /// The head that the next [`SplitDriver::add`] will use, so that what belongs to the head can be
    /// filled in first.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        (self.free_count != 0).then_some(self.free_head)
    }

    /// Adds a chain: what the device reads, then what it writes. It becomes visible to the device
    /// with [`SplitDriver::publish`]. Returns its head.
    ///
    /// # Errors
    /// [`NoRoom`]; nothing has changed.
    #[inline(always)]
    pub fn add(&mut self, readable: &[Piece], writable: &[Piece]) -> Result<u16, NoRoom> {
        let pieces = readable.len() + writable.len();
        if let Some(tables) = self.tables {
            if pieces > 1
                && pieces <= usize::from(tables.entries)
                && !(tables.when_scarce
                    && pieces <= DIRECT_MAX
                    && self.free_count as usize > usize::from(self.ring.size() / 2) + pieces)
            {
                return self.add_indirect(&tables, readable, writable);
            }
        }
        if pieces > self.free_count as usize || pieces == 0 {
            return Err(self.no_room(pieces));
        }
        let head = self.free_head;
        let (mut index, mut tail, mut left) = (head, head, pieces);
        for (part, flags) in [(readable, 0), (writable, DESC_F_WRITE)] {
            for piece in part {
                debug_assert!(piece.len != 0, "a piece without bytes");
                left -= 1;
                let next = self.own[usize::from(index)].next;
                let link = if left > 0 { (DESC_F_NEXT, next) } else { (0, 0) };
                let desc =
                    Desc { addr: piece.addr, len: piece.len, flags: flags | link.0, next: link.1 };
                self.put(index, desc);
                (tail, index) = (index, next);
            }
        }
        // At most `free_count`, which is at most the queue size, a u16.
        #[allow(clippy::cast_possible_truncation)]
        let descs = pieces as u16;
        self.take(head, tail, index, descs);
        Ok(head)
    }

    #[inline(never)]
    fn add_indirect(
        &mut self,
        tables: &Tables,
        readable: &[Piece],
        writable: &[Piece],
    ) -> Result<u16, NoRoom> {
        if self.free_count == 0 {
            return Err(NoRoom::Full);
        }
        let head = self.free_head;
        let offset = Tables::bytes(head, tables.entries);
        // The cast keeps the alignment, which `new` checked.
        #[allow(clippy::cast_ptr_alignment)]
        let table = tables.host.wrapping_add(offset).cast::<Desc>();
        let pieces = readable.len() + writable.len();
        let mut at = 0;
        for (part, flags) in [(readable, 0), (writable, DESC_F_WRITE)] {
            for piece in part {
                debug_assert!(piece.len != 0, "a piece without bytes");
                let last = at + 1 == pieces;
                // At most `entries`, a u16.
                #[allow(clippy::cast_possible_truncation)]
                let link = if last { (0, 0) } else { (DESC_F_NEXT, at as u16 + 1) };
                let desc =
                    Desc { addr: piece.addr, len: piece.len, flags: flags | link.0, next: link.1 };
                // SAFETY: `at < pieces <= entries` and `head < size`: the entry lies in the tables,
                // which are mapped (`new`). The device reads it after `publish` at the earliest.
                unsafe { table.add(at).write_volatile(desc) };
                at += 1;
            }
        }
        // At most 65535 entries of 16 bytes.
        #[allow(clippy::cast_possible_truncation)]
        let len = (pieces * size_of::<Desc>()) as u32;
        let addr = tables.guest.wrapping_add(offset as u64);
        self.put(head, Desc { addr, len, flags: DESC_F_INDIRECT, next: 0 });
        let next = self.own[usize::from(head)].next;
        self.take(head, head, next, 1);
        Ok(head)
    }

    /// Writes a descriptor, unless it is there already.
    #[inline]
    fn put(&mut self, index: u16, desc: Desc) {
        let own = &mut self.own[usize::from(index)];
        if own.desc != desc {
            own.desc = desc;
            // SAFETY: `index` is in the table (invariant 1; SplitMemory invariant 1). The
            // descriptor is free, so a device that keeps the rules does not read it now.
            unsafe { self.ring.desc(index).write_volatile(desc) };
        }
    }

    /// Takes a chain off the free list and lists it in the available ring.
    #[inline]
    fn take(&mut self, head: u16, tail: u16, next_free: u16, descs: u16) {
        self.free_head = next_free;
        self.free_count -= u32::from(descs);
        let own = &mut self.own[usize::from(head)];
        (own.tail, own.descs) = (tail, descs);
        let entry = &mut self.own[usize::from(self.avail_next & (self.ring.size() - 1))];
        if entry.listed != head {
            entry.listed = head;
            self.ring.avail_ring(self.avail_next).store(head, Relaxed);
        }
        self.avail_next = self.avail_next.wrapping_add(1);
    }

    #[cold]
    fn no_room(&self, pieces: usize) -> NoRoom {
        let max = self.max_pieces();
        match pieces {
            0 => NoRoom::NoPieces,
            _ if pieces > max => NoRoom::TooLong { pieces, max },
            _ => NoRoom::Full,
        }
    }

    /// Makes the added chains visible; true if the device wants to be kicked (§2.7.13.3).
    #[inline]
    #[must_use = "true means the device waits for a kick"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.avail_published, self.avail_next);
        if old == new {
            return false;
        }
        // Release: descriptors, tables and data are visible before the index.
        self.ring.avail_idx().store(new, Release);
        self.avail_published = new;
        self.needs_kick(new, old)
    }

    /// Does the device want to hear that the index moved from `old` to `new`?
    #[inline]
    fn needs_kick(&self, new: u16, old: u16) -> bool {
        // The index must be visible before the device's wish is read: otherwise both sides could
        // decide that the other one will look again. Pairs with the fence in SplitDevice::arm.
        fence(SeqCst);
        if self.event_idx {
            event_passed(self.ring.avail_event().load(Relaxed), new, old)
        } else {
            self.ring.used_flags().load(Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    /// Takes back the next chain the device is done with, if there is one.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue: it would be reported again and again.
    #[inline(always)]
    pub fn pop_used(&mut self) -> Result<Option<Used>, DeviceFault> {
        if self.next_used == self.used_seen && !self.read_used_index()? {
            return Ok(None);
        }
        // SAFETY: the entry lies in the used ring (SplitMemory invariant 1). Volatile: a device may
        // write at any time; only this copy is judged.
        let UsedElem { id, len } = unsafe { self.ring.used_ring(self.next_used).read_volatile() };
        let head = match u16::try_from(id) {
            Ok(head) if head < self.ring.size() => head,
            _ => return Err(DeviceFault::IdOutOfRange(id)),
        };
        let own = &mut self.own[usize::from(head)];
        if own.descs == 0 {
            return Err(DeviceFault::NotInFlight(head));
        }
        self.free_count += u32::from(std::mem::take(&mut own.descs));
        // The chain goes back in one piece and in order, so that the next one like it finds its
        // descriptors as they are.
        let tail = own.tail;
        self.own[usize::from(tail)].next = self.free_head;
        self.free_head = head;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(Used { head, len }))
    }

    /// Reads the used index; true if chains came back.
    #[inline]
    fn read_used_index(&mut self) -> Result<bool, DeviceFault> {
        // Acquire: what the device wrote before the index is visible after this load.
        let idx = self.ring.used_idx().load(Acquire);
        let new = idx.wrapping_sub(self.next_used);
        let in_flight = self.in_flight();
        if new > in_flight {
            return Err(DeviceFault::IndexJump { from: self.next_used, to: idx, in_flight });
        }
        self.used_seen = idx;
        Ok(new != 0)
    }

    /// Chains that came back and were not popped yet.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    #[inline]
    pub fn ready(&mut self) -> Result<u16, DeviceFault> {
        self.read_used_index()?;
        Ok(self.used_seen.wrapping_sub(self.next_used))
    }

    /// True if at least `count` chains (1 to all that are in flight) came back and were not popped
    /// yet.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    #[inline]
    pub fn has_used(&mut self, count: u16) -> Result<bool, DeviceFault> {
        let count = count.clamp(1, self.in_flight().max(1));
        Ok(self.ready()? >= count)
    }

    /// Asks the device for an interrupt once `after` more chains came back (with EVENT_IDX; once any
    /// came back without), then looks once more: `WorkArrived` if they are here already. `after` is
    /// brought into the range from 1 to the number of chains in flight.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    pub fn arm(&mut self, after: u16) -> Result<Armed, DeviceFault> {
        let wanted = if self.event_idx { after.clamp(1, self.in_flight().max(1)) } else { 1 };
        self.armed = true;
        if self.event_idx {
            let event = self.next_used.wrapping_add(wanted - 1);
            self.ring.used_event().store(event, Relaxed);
        } else {
            self.ring.avail_flags().store(0, Relaxed);
        }
        // The wish must be visible before the index is read again; pairs with the fence in
        // SplitDevice::publish.
        fence(SeqCst);
        let arrived = self.ready()? >= wanted;
        Ok(if arrived { Armed::WorkArrived } else { Armed::Quiet })
    }

    /// Asks the device for no interrupts: the driver is polling. With EVENT_IDX the device may still
    /// send one in 65536 completions.
    #[inline]
    pub fn disarm(&mut self) {
        if !self.armed {
            return;
        }
        self.armed = false;
        if self.event_idx {
            self.ring.used_event().store(self.next_used.wrapping_sub(1), Relaxed);
        } else {
            self.ring.avail_flags().store(AVAIL_F_NO_INTERRUPT, Relaxed);
        }
    }
}
