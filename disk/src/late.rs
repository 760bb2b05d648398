//! Late writes: what storage has been given and has not finished, although whoever asked for it has gone, or
//! may have gone; and writes that go there later: they wait for such a write, or the disk has failed them, they are held, and
//! whoever asked may go unseen. Who comes back on another connection may send the same again, and then
//! something newer; so requests wait for the late writes that they overlap, and nothing else does.
//!
//! ```text
//! its queue stops, or it takes longer than a second ─► begin_late ─┐
//! the disk has failed it, and it is held ────────────► take_turn ──┼─► … ─► it is over ─► end_late
//!                                                                  ▼                         │
//! another request ─► await_turn: waits in its slot, and others for it ─► its turn ◄──────────┘
//! ```
//!
//! Each has a number, and waits for lower ones only: a write that waits is not overtaken by what was asked for later, and
//! none waits for itself.
//!
//! A disk has one list, whatever queues and connections it has. Requests do not look at it while it is empty:
//! `Disk::open_to`, which they compare their end with anyhow, is the capacity then, and 0 while it is not.

use crate::disk::Disk;
use crate::locks::{Late, Outliving, Turn};
use ringway_core::ByteRange;
use std::sync::atomic::Ordering::Relaxed;

/// Requests that may outlive their connections, of one disk.
const OUTLIVING_MAX: usize = 256;

/// Their bytes.
const OUTLIVING_BYTES_MAX: u64 = 64 << 20;

impl Late {
    fn next(&mut self, range: ByteRange, writes: bool) -> Turn {
        self.last += 1;
        Turn { number: self.last, range, writes }
    }
}

impl Disk {
    /// A write that storage has is late: from now on requests that overlap `range` wait for it.
    #[cold]
    pub(crate) fn begin_late(&self, range: ByteRange) -> Turn {
        let turn = Turn { number: 0, range, writes: true };
        self.enter_late(&mut self.late.lock(), turn)
    }

    /// A write is not with storage any more, or not yet, and goes there later.
    #[cold]
    pub(crate) fn take_turn(&self, range: ByteRange) -> Turn {
        let mut late = self.late.lock();
        let turn = late.next(range, true);
        self.enter_late(&mut late, turn)
    }

    /// The turn of a request that has to wait; `None` if it need not.
    #[cold]
    pub(crate) fn await_turn(&self, range: ByteRange, writes: bool) -> Option<Turn> {
        let mut late = self.late.lock();
        let waits = !range.is_empty() && late.turns.iter().any(|turn| turn.range.overlaps(range));
        waits.then(|| {
            let turn = late.next(range, writes);
            self.enter_late(&mut late, turn)
        })
    }

    /// True if a request has to wait still.
    #[cold]
    pub(crate) fn has_to_wait(&self, turn: &Turn) -> bool {
        self.late.lock().turns.iter().any(|other| turn.is_behind(other))
    }

    /// What a late write may touch is another range now.
    #[cold]
    pub(crate) fn change_late(&self, turn: &mut Turn, range: ByteRange) {
        let changed = Turn { range, ..*turn };
        let before = std::mem::replace(turn, changed);
        if before == changed {
            return;
        }
        let mut late = self.late.lock();
        late.turns.iter_mut().filter(|it| **it == before).take(1).for_each(|it| *it = changed);
        drop(late);
        if range.len() < before.range.len() {
            self.late.changed();
        }
    }

    /// A request is over.
    #[cold]
    pub(crate) fn end_late(&self, turn: &Turn) {
        if !turn.writes {
            return;
        }
        let mut late = self.late.lock();
        match late.turns.iter().position(|other| other == turn) {
            Some(at) => drop(late.turns.swap_remove(at)),
            None => debug_assert!(false, "{turn:?} was not late"),
        }
        if late.turns.is_empty() {
            self.open_to.store(self.capacity.load(Relaxed), Relaxed);
        }
        drop(late);
        self.late.changed();
    }

    fn enter_late(&self, late: &mut Late, turn: Turn) -> Turn {
        if turn.writes {
            late.turns.push(turn);
            self.open_to.store(0, Relaxed);
        }
        turn
    }

    /// Changes the capacity, under which requests are judged from now on.
    pub(crate) fn store_capacity(&self, bytes: u64) {
        let late = self.late.lock();
        self.capacity.store(bytes, Relaxed);
        if late.turns.is_empty() {
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
    use super::Turn;
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
        let twice = [0, 1].map(|_| disk.begin_late(range(4096, 4096)));
        let third = disk.begin_late(range(0, 4096));
        assert_eq!(open_to(&disk), 0);
        let read = disk.await_turn(range(7680, 512), false).expect("it overlaps");
        assert_eq!(disk.await_turn(range(8192, 4096), true), None);
        disk.end_late(&twice[0]);
        assert!(disk.has_to_wait(&read), "the other one is there");
        disk.set_capacity(131072);
        let mut request = Request::with_capacity(0);
        (request.op, request.range) = (Op::Write, range(65536, 512));
        assert_eq!((open_to(&disk), disk.authorise(&request)), (0, Ok(())));
        disk.end_late(&third);
        disk.end_late(&twice[1]);
        assert!(!disk.has_to_wait(&read));
        assert_eq!(open_to(&disk), 131072);
        disk.end_late(&read);
        disk.set_capacity(65536);
        assert_eq!((open_to(&disk), disk.authorise(&request)), (65536, Err(Status::IoError)));
    }

    #[test]
    fn nobody_waits_for_what_came_later() {
        let disk = CustomDisk::new(65536).open(None).unwrap();
        let first = disk.take_turn(range(0, 4096));
        let second = disk.await_turn(range(2048, 4096), true).unwrap();
        // Only the second one is in the way of this one, and reads are in nobody's.
        let third = disk.await_turn(range(4096, 512), true).unwrap();
        let read = disk.await_turn(range(0, 65536), false).unwrap();
        assert_eq!(disk.await_turn(range(8192, 512), true), None);
        let waits =
            |turns: &[Turn]| turns.iter().map(|turn| disk.has_to_wait(turn)).collect::<Vec<_>>();
        assert_eq!(waits(&[first, second, third, read]), [false, true, true, true]);
        // Storage has had this one for long: all wait for it.
        let mut old = disk.begin_late(range(512, 512));
        assert_eq!(waits(&[old, first, second, third]), [false, true, true, true]);
        disk.change_late(&mut old, range(32768, 512));
        assert_eq!(waits(&[first, second]), [false, true]);
        disk.end_late(&first);
        assert_eq!(waits(&[second, third, read]), [false, true, true]);
        disk.end_late(&second);
        disk.end_late(&third);
        assert_eq!(waits(&[third, read]), [false, true]);
        disk.end_late(&old);
        assert!(!disk.has_to_wait(&read));
    }
}
