//! The same chains, walked by rust-vmm's `virtio-queue`: a second opinion on the oracle.

use crate::oracle::memory::{Memory, REGIONS};
use crate::oracle::{Buffer, Queue};
use virtio_queue::{Queue as VmmQueue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Where its available and used rings are: out of reach of the case, which may have put a table
/// over its own.
const AVAIL: u64 = 0x20_0000;
const USED: u64 = AVAIL + 0x2000;

pub(crate) struct Vmm(GuestMemoryMmap);

impl Vmm {
    pub(crate) fn new() -> Self {
        let regions = REGIONS.iter().copied().chain([(AVAIL, 0x4000)]);
        let mut ranges: Vec<_> = regions.map(|(at, len)| (GuestAddress(at), len)).collect();
        ranges.sort_by_key(|(at, _)| at.0);
        Self(GuestMemoryMmap::from_ranges(&ranges).expect("a proper table of regions"))
    }

    /// The chain at `head`; it ends where virtio-queue finds a fault.
    pub(crate) fn walk(&mut self, memory: &Memory, queue: Queue, head: u16) -> Vec<Buffer> {
        for (start, bytes) in memory.bytes.regions() {
            self.0.write_slice(bytes, GuestAddress(start)).unwrap();
        }
        // flags, idx, ring[0]
        for (i, word) in (0..).zip([0, 1, head]) {
            self.0.write_slice(&word.to_le_bytes(), GuestAddress(AVAIL + 2 * i)).unwrap();
        }
        let mut vmm = VmmQueue::new(256).unwrap();
        vmm.try_set_size(queue.size).unwrap();
        vmm.try_set_desc_table_address(GuestAddress(queue.desc)).unwrap();
        vmm.try_set_avail_ring_address(GuestAddress(AVAIL)).unwrap();
        vmm.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        vmm.set_ready(true);
        let chain = vmm.pop_descriptor_chain(&self.0).expect("one chain is available");
        assert_eq!(chain.head_index(), head);
        chain
            .map(|desc| Buffer {
                addr: desc.addr().0,
                len: desc.len(),
                writable: desc.is_write_only(),
            })
            .collect()
    }
}
