//! Late writes: what storage has been given and has not finished, although whoever asked for it has gone, or
//! may have gone. Who comes back on another connection may send the same again, and then something newer;
//! so requests that overlap a late write wait until that is over, and nothing else does.
//!
//! ```text
//! its queue stops, or it takes longer than a second ─► begin_late ─ … ─► its operation ends ─► end_late
//!                                                          │                                     │
//! another request ─► is_late: waits in its slot ◄──────────┘                                     └─► goes on
//! ```
//!
//! A disk has one list, whatever queues and connections it has. Requests do not look at it while it is empty:
//! `Disk::open_to`, which they compare their end with anyhow, is the capacity then, and 0 while it is not.

use crate::disk::Disk;
use crate::locks::Outliving;
use ringway_core::ByteRange;
use std::sync::atomic::Ordering::Relaxed;

/// Requests that may outlive their connections, of one disk.
const OUTLIVING_MAX: usize = 256;

/// Their bytes.
const OUTLIVING_BYTES_MAX: u64 = 64 << 20;

impl Disk {
    /// From now on requests that overlap `range` wait until [`Disk::end_late`].
    #[cold]
    pub(crate) fn begin_late(&self, range: ByteRange) {
        let mut late = self.late.lock();
        late.ranges.push(range);
        self.open_to.store(0, Relaxed);
    }

    /// A write is over that was begun to be late with this range.
    #[cold]
    pub(crate) fn end_late(&self, range: ByteRange) {
        let mut late = self.late.lock();
        match late.ranges.iter().position(|&other| other == range) {
            Some(at) => drop(late.ranges.swap_remove(at)),
            None => debug_assert!(false, "{range:?} was not late"),
        }
        if late.ranges.is_empty() {
            self.open_to.store(self.capacity.load(Relaxed), Relaxed);
        }
    }

    /// True if a request that touches `range` has to wait for a late write.
    #[cold]
    pub(crate) fn is_late(&self, range: ByteRange) -> bool {
        self.late.lock().ranges.iter().any(|late| late.overlaps(range))
    }

    /// Changes the capacity, under which requests are judged from now on.
    pub(crate) fn store_capacity(&self, bytes: u64) {
        let late = self.late.lock();
        self.capacity.store(bytes, Relaxed);
        if late.ranges.is_empty() {
            self.open_to.store(bytes, Relaxed);
        }
    }

    /// True if there is room for what another connection has in flight when it ends. Else its place is not free
    /// before that is over.
    #[must_use]
    pub fn may_outlive(&self) -> bool {
        let Outliving { requests, bytes } = self.late.lock().outliving;
        requests <= OUTLIVING_MAX && bytes <= OUTLIVING_BYTES_MAX
    }

    pub(crate) fn outlive(&self, more: Outliving) {
        let mut late = self.late.lock();
        late.outliving.requests += more.requests;
        late.outliving.bytes += more.bytes;
    }

    pub(crate) fn outlived(&self, less: Outliving) {
        let mut late = self.late.lock();
        late.outliving.requests -= less.requests;
        late.outliving.bytes -= less.bytes;
    }
}

#[cfg(test)]
mod tests {
    use crate::CustomDisk;
    use ringway_core::{ByteRange, Op, Request, Status};
    use std::sync::atomic::Ordering::Relaxed;

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange::new(offset, len).unwrap()
    }

    #[test]
    fn only_what_overlaps_is_late_and_only_while_it_lasts() {
        let disk = CustomDisk::new(65536).open(None).unwrap();
        let open_to = |disk: &crate::Disk| disk.open_to.load(Relaxed);
        assert_eq!(open_to(&disk), 65536);
        // As often as it was said, whatever the order.
        for _ in 0..2 {
            disk.begin_late(range(4096, 4096));
        }
        disk.begin_late(range(0, 4096));
        assert_eq!(open_to(&disk), 0);
        assert!(disk.is_late(range(7680, 512)), "overlaps");
        assert!(!disk.is_late(range(8192, 4096)));
        disk.end_late(range(4096, 4096));
        assert!(disk.is_late(range(4096, 512)) && disk.is_late(range(0, 512)));
        disk.set_capacity(131072);
        let mut request = Request::with_capacity(0);
        (request.op, request.range) = (Op::Write, range(65536, 512));
        assert_eq!((open_to(&disk), disk.authorise(&request)), (0, Ok(())));
        disk.end_late(range(0, 4096));
        disk.end_late(range(4096, 4096));
        assert_eq!(open_to(&disk), 131072);
        disk.set_capacity(65536);
        assert_eq!((open_to(&disk), disk.authorise(&request)), (65536, Err(Status::IoError)));
    }
}
