//! The driver side of a packed virtqueue (VIRTIO 1.2 §2.8), with the verbs of the split one.
//!
//! ```text
//! let id = queue.add(readable, writable)?;                // descriptors; not yet visible
//! if queue.publish() { kick() }                           // one release store per batch
//! while let Some(used) = queue.pop_used()? { … }          // one load of a descriptor per chain
//! match queue.arm(1)? { Quiet => sleep, WorkArrived => go on }
//! ```
//!
//! The device looks for available descriptors in ring order (§2.8.2), so a batch stays invisible
//! until its first descriptor is marked: that one is written last.

#[cfg(test)]
mod tests;

use super::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, LayoutError};
use super::packed_layout::{Event, PackedAddresses, PackedBase, PackedMemory, Position, Word};
use super::types::{Armed, DIRECT_MAX, DeviceFault, NoRoom, Piece, Tables, Used};
use crate::shared::fence;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// What the driver remembers about one buffer id.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// The next free id.
    next: u16,
    /// For the id of a chain in flight: descriptors of the chain. Otherwise 0.
    descs: u16,
}

/// One packed virtqueue, seen from the driver.
///
/// # Invariants
/// 1. `own[id].descs != 0` exactly for the chains added and not popped, of which there are
///    `in_flight`, the last `added` of them not published; following `next` from `free_id` visits
///    the other ids, all below the queue size.
/// 2. `free` and the descriptors of the chains in flight add up to the queue size.
/// 3. While `pending` is not 0, `first` holds what belongs into the descriptor `first_at`, the first
///    of the batch that is not visible yet.
/// 4. Nothing that decides where memory is accessed is ever read back from shared memory, but for
///    ids, which are judged.
#[derive(Debug)]
pub struct PackedDriver {
    ring: PackedMemory,
    /// The next descriptor to make available.
    next: Position,
    /// The next descriptor that the device will use.
    used: Position,
    free: u16,
    free_id: u16,
    in_flight: u16,
    /// Chains added since the last publication, and their descriptors.
    added: u16,
    pending: u32,
    first_at: u16,
    first: Word,
    /// No chain in flight has fewer descriptors.
    shortest: u16,
    event_idx: bool,
    armed: bool,
    tables: Option<Tables>,
    own: Box<[Own]>,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for PackedDriver {}

impl PackedDriver {
    /// A queue of `size` descriptors at `at`, empty, with interrupts disarmed. Both sides start
    /// `first` descriptors after the start, which the device must be told: [`PackedDriver::base`].
    ///
    /// # Errors
    /// [`LayoutError`] if size or alignment break §2.8.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, and `tables` mapped
    /// memory of [`Tables::bytes`], for as long as the queue exists. No device uses them yet.
    pub unsafe fn new(
        size: u16,
        at: PackedAddresses,
        first: u16,
        event_idx: bool,
        tables: Option<Tables>,
    ) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { PackedMemory::new(size, at)? };
        if tables.is_some_and(|t| (t.host as usize) % align_of::<Desc>() != 0) {
            return Err(LayoutError::Unaligned("indirect table", align_of::<Desc>()));
        }
        let (next, used, _) = PackedBase::after(first, size).positions(size)?;
        for index in 0..size {
            // As if all before had been used in this lap, and all others in the last one.
            let lap = Position::new(index, next.wrap() == (index < next.index()));
            // SAFETY: `index` is in the ring (PackedMemory invariant 1).
            unsafe { ring.addr(index).write_volatile(0) };
            ring.word(index).store(Word::new(0, 0, lap.used()).0, Relaxed);
        }
        ring.driver_event().store(Event::NONE.0, Relaxed);
        ring.device_event().store(Event::ALL.0, Relaxed);
        Ok(Self {
            ring,
            next,
            used,
            free: size,
            free_id: 0,
            in_flight: 0,
            added: 0,
            pending: 0,
            first_at: 0,
            first: Word(0),
            shortest: u16::MAX,
            event_idx,
            armed: false,
            tables: tables.filter(|t| t.entries > 0),
            own: (0..size).map(|id| Own { next: (id + 1) % size, descs: 0 }).collect(),
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
        self.in_flight
    }

    /// Where the device begins, for SET_VRING_BASE of an idle queue.
    #[must_use]
    pub fn base(&self) -> PackedBase {
        PackedBase::new(self.used, self.used)
    }

    /// The most pieces a chain may have in this queue.
    #[must_use]
    pub fn max_pieces(&self) -> usize {
        self.tables.map_or(0, |t| usize::from(t.entries)).max(usize::from(self.ring.size()))
    }

    /// The id that the next [`PackedDriver::add`] will use, so that what belongs to it can be filled
    /// in first.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        (self.free != 0).then_some(self.free_id)
    }

    /// Adds a chain: what the device reads, then what it writes. It becomes visible to the device
    /// with [`PackedDriver::publish`]. Returns its id.
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
                    && usize::from(self.free) > usize::from(self.ring.size() / 2) + pieces)
            {
                return self.add_indirect(&tables, readable, writable);
            }
        }
        if pieces > usize::from(self.free) || pieces == 0 {
            return Err(self.no_room(pieces));
        }
        let size = self.ring.size();
        let (mut at, mut left, mut first) = (self.next, pieces, Word(0));
        for (part, flags) in [(readable, 0), (writable, DESC_F_WRITE)] {
            for &piece in part {
                left -= 1;
                let flags = flags | if left > 0 { DESC_F_NEXT } else { 0 };
                let word = self.put(at, piece, flags);
                if left + 1 == pieces {
                    first = word;
                } else {
                    self.ring.word(at.index()).store(word.0, Relaxed);
                }
                at.advance(1, size);
            }
        }
        // At most `free`, a u16.
        #[allow(clippy::cast_possible_truncation)]
        let descs = pieces as u16;
        Ok(self.take(first, at, descs))
    }

    #[inline(never)]
    fn add_indirect(
        &mut self,
        tables: &Tables,
        readable: &[Piece],
        writable: &[Piece],
    ) -> Result<u16, NoRoom> {
        if self.free == 0 {
            return Err(NoRoom::Full);
        }
        let offset = Tables::bytes(self.free_id, tables.entries);
        // The cast keeps the alignment, which `new` checked.
        #[allow(clippy::cast_ptr_alignment)]
        let table = tables.host.wrapping_add(offset).cast::<u64>();
        let parts = [(readable, 0), (writable, DESC_F_WRITE)];
        let pieces =
            parts.into_iter().flat_map(|(part, flags)| part.iter().map(move |p| (p, flags)));
        let mut entries = 0;
        for (piece, flags) in pieces {
            debug_assert!(piece.len != 0, "a piece without bytes");
            // SAFETY: there are at most `tables.entries` pieces (`add`) and the id is below the size:
            // the entry lies in the tables, which are mapped (`new`). The device reads it after
            // `publish` at the earliest.
            unsafe {
                table.add(2 * entries).write_volatile(piece.addr);
                table.add(2 * entries + 1).write_volatile(Word::new(piece.len, 0, flags).0);
            }
            entries += 1;
        }
        // At most 65535 entries of 16 bytes.
        #[allow(clippy::cast_possible_truncation)]
        let len = (entries * size_of::<Desc>()) as u32;
        let table = Piece { addr: tables.guest.wrapping_add(offset as u64), len };
        let mut at = self.next;
        let word = self.put(at, table, DESC_F_INDIRECT);
        at.advance(1, self.ring.size());
        Ok(self.take(word, at, 1))
    }

    /// Writes the address of a descriptor of the chain that is being added; returns the rest of it.
    #[inline(always)]
    fn put(&self, at: Position, piece: Piece, flags: u16) -> Word {
        debug_assert!(piece.len != 0, "a piece without bytes");
        // SAFETY: the descriptor is in the ring (PackedMemory invariant 1) and free (invariant 2), so
        // a device that keeps the rules does not read it now.
        unsafe { self.ring.addr(at.index()).write_volatile(piece.addr) };
        Word::new(piece.len, self.free_id, flags | at.available())
    }

    /// Takes the first free id for a chain of `descs` descriptors from `next` to `end`. All but the
    /// first are written; it follows now, or as the last of the whole batch.
    #[inline(always)]
    fn take(&mut self, first: Word, end: Position, descs: u16) -> u16 {
        if self.pending == 0 {
            (self.first_at, self.first) = (self.next.index(), first);
        } else {
            self.ring.word(self.next.index()).store(first.0, Relaxed);
        }
        self.next = end;
        self.pending += u32::from(descs);
        let id = self.free_id;
        let own = &mut self.own[usize::from(id)];
        own.descs = descs;
        self.free_id = own.next;
        self.free -= descs;
        self.shortest = if self.in_flight == 0 { descs } else { self.shortest.min(descs) };
        self.in_flight += 1;
        self.added += 1;
        id
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

    /// Makes the added chains visible; true if the device wants to be kicked (§2.8.21.2).
    #[inline]
    #[must_use = "true means the device waits for a kick"]
    pub fn publish(&mut self) -> bool {
        if self.added == 0 {
            return false;
        }
        let moved = std::mem::take(&mut self.pending);
        self.added = 0;
        // Release: data, tables and the other descriptors of the batch are visible before this one.
        self.ring.word(self.first_at).store(self.first.0, Release);
        // The mark must be visible before the device's wish is read: otherwise both sides could
        // decide that the other one will look again. Pairs with the fence in PackedDevice::arm.
        fence(SeqCst);
        let event = Event(self.ring.device_event().load(Relaxed));
        event.is_passed(self.next, moved, self.ring.size(), self.event_idx)
    }

    /// Takes back the next chain the device is done with, if there is one.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue: it would be reported again and again.
    #[inline(always)]
    pub fn pop_used(&mut self) -> Result<Option<Used>, DeviceFault> {
        let Some(word) = self.used_at(self.used) else { return Ok(None) };
        let (head, descs) = self.judge(word)?;
        let own = &mut self.own[usize::from(head)];
        *own = Own { next: self.free_id, descs: 0 };
        self.free_id = head;
        self.free += descs;
        self.in_flight -= 1;
        self.used.advance(descs, self.ring.size());
        Ok(Some(Used { head, len: word.len() }))
    }

    /// The descriptor at `at`, if the device has used it.
    #[inline]
    fn used_at(&self, at: Position) -> Option<Word> {
        // A device that uses what it was not shown would let us free what is not visible yet.
        if self.in_flight == self.added {
            return None;
        }
        // Acquire: what the device wrote before it marked the descriptor is visible after this load.
        let word = Word(self.ring.word(at.index()).load(Acquire));
        at.is_used(word.flags()).then_some(word)
    }

    /// The id in a used descriptor, and how many descriptors its chain has.
    #[inline]
    fn judge(&self, word: Word) -> Result<(u16, u16), DeviceFault> {
        match self.own.get(usize::from(word.id())) {
            None => Err(DeviceFault::IdOutOfRange(word.id().into())),
            Some(own) if own.descs == 0 => Err(DeviceFault::NotInFlight(word.id())),
            Some(own) => Ok((word.id(), own.descs)),
        }
    }

    /// True if at least `count` chains came back and were not popped yet; `count` is brought into the
    /// range from 1 to the number of chains in flight.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    #[inline]
    pub fn has_used(&mut self, count: u16) -> Result<bool, DeviceFault> {
        let mut at = self.used;
        for left in (0..count.clamp(1, self.in_flight.max(1))).rev() {
            let Some(word) = self.used_at(at) else { return Ok(false) };
            if left > 0 {
                at.advance(self.judge(word)?.1, self.ring.size());
            }
        }
        Ok(true)
    }

    /// Asks the device for an interrupt once `after` of the chains in flight came back, then looks once
    /// more: `WorkArrived` if they are here already. It may come earlier: without EVENT_IDX with the
    /// first chain, with it where short chains share the ring with long ones. Chains added later do not
    /// count: shorter ones leave the place where the device calls where it is. `after` is brought into
    /// the range from 1 to the number of chains in flight.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    pub fn arm(&mut self, after: u16) -> Result<Armed, DeviceFault> {
        let after = if self.event_idx { after.clamp(1, self.in_flight.max(1)) } else { 1 };
        self.armed = true;
        let (mut at, mut left) = (self.used, after);
        loop {
            // Those that came back are as long as they are: a place that the device has passed
            // already would never be passed again.
            while let Some(word) = self.used_at(at) {
                left -= 1;
                if left == 0 {
                    return Ok(Armed::WorkArrived);
                }
                at.advance(self.judge(word)?.1, self.ring.size());
            }
            let event = if self.event_idx {
                // Which come back next is not known, but none is shorter than the shortest.
                let skip = u32::from(left - 1) * u32::from(self.shortest);
                let mut event = at;
                event
                    .advance(u16::try_from(skip).unwrap_or(0) % self.ring.size(), self.ring.size());
                Event::at(event)
            } else {
                Event::ALL
            };
            self.ring.driver_event().store(event.0, Relaxed);
            // The wish must be visible before the descriptor is read again; pairs with the fence in
            // PackedDevice::publish.
            fence(SeqCst);
            if self.used_at(at).is_none() {
                return Ok(Armed::Quiet);
            }
        }
    }

    /// Asks the device for no interrupts: the driver is polling.
    #[inline]
    pub fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.ring.driver_event().store(Event::NONE.0, Relaxed);
        }
    }
}
