//! Packed rings (VIRTIO 1.2 §2.8) written by hand, with the same calls as split ones: a chain is put
//! down under a number, offered by that number, and comes back with it.

use super::RawGuest;
use super::layout::{DATA, Desc, GUEST_BASE, RING_STRIDE};

const NEXT: u16 = 1;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

impl RawGuest {
    fn packed_desc(&self, queue: u32, count: u32) -> u64 {
        let index = u64::from(count % u32::from(self.size));
        GUEST_BASE + RING_STRIDE * u64::from(queue) + 16 * index
    }

    /// The marks of descriptor `count` once the driver has made it available, and once it is used.
    fn marks(&self, count: u32) -> (u16, u16) {
        let first_lap = (count / u32::from(self.size)) % 2 == 0;
        if first_lap { (AVAIL, AVAIL | USED) } else { (USED, 0) }
    }

    fn put_packed(&self, queue: u32, count: u32, desc: Desc, id: u16) {
        let at = self.packed_desc(queue, count);
        self.poke(at, &desc.addr.to_le_bytes());
        self.poke(at + 8, &desc.len.to_le_bytes());
        self.poke(at + 12, &id.to_le_bytes());
        self.poke(at + 14, &(desc.flags | self.marks(count).0).to_le_bytes());
    }

    /// Writes the chain `id` into the ring from descriptor `from` on, the first descriptor last.
    fn put_offer(&self, queue: u32, from: u32, id: u16) -> u32 {
        let mut chain = match self.packed[queue as usize].chains().get(&id) {
            Some(chain) => chain.clone(),
            None => vec![Desc { addr: DATA, len: 16, ..Desc::default() }],
        };
        let last = chain.len() - 1;
        for desc in &mut chain[..last] {
            desc.flags |= NEXT;
        }
        let length = u32::try_from(chain.len()).expect("a short chain");
        for (at, &desc) in (from..from + length).zip(&chain).rev() {
            self.put_packed(queue, at, desc, id);
        }
        length
    }

    pub(super) fn offer_packed(&mut self, queue: u32, id: u16) {
        let length = self.put_offer(queue, self.packed[queue as usize].next, id);
        let packed = &mut self.packed[queue as usize];
        packed.next += length;
        packed.lengths.insert(id, length);
    }

    /// Offers a chain twice at once: the second one is there when the first one appears.
    pub(super) fn offer_packed_twice(&mut self, queue: u32, id: u16) {
        let packed = &self.packed[queue as usize];
        let length = packed.chains()[&id].len();
        self.put_offer(queue, packed.next + u32::try_from(length).expect("a short chain"), id);
        self.offer_packed(queue, id);
    }

    /// Descriptors that the device has not taken are the driver's again, from `base` on.
    pub(super) fn rewind_packed(&mut self, queue: u32, base: u32) {
        let packed = &self.packed[queue as usize];
        let size = u32::from(self.size);
        let (mut next, end) = (packed.used, packed.next);
        while (next % size) | u32::from((next / size) % 2 == 0) << 15 != base & 0xffff {
            next += 1;
            assert!(next <= end, "the device names a place where it cannot be");
        }
        for count in next..end {
            // As the lap before has left it.
            let flags = if self.marks(count).1 == 0 { AVAIL | USED } else { 0 };
            self.poke(self.packed_desc(queue, count) + 14, &flags.to_le_bytes());
        }
        self.packed[queue as usize].next = next;
    }

    /// The next used descriptor: id and bytes written.
    pub(super) fn used_packed(&mut self, queue: u32) -> Option<(u32, u32)> {
        let count = self.packed[queue as usize].used;
        let bytes = self.peek(self.packed_desc(queue, count), 16);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if half(14) & (AVAIL | USED) != self.marks(count).1 {
            return None;
        }
        let packed = &mut self.packed[queue as usize];
        if packed.used == packed.next {
            return None; // A new ring looks as if the lap before had used it.
        }
        let id = half(12);
        packed.used += packed.lengths.get(&id).copied().unwrap_or(1);
        Some((id.into(), u32::from(half(8)) | u32::from(half(10)) << 16))
    }
}
