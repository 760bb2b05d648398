//! Requests of a disk whose image says where its clusters are, piece by piece: what lies in a file is
//! an operation of the engine there, zeroes are zeroes, and the image's thread is asked for the rest.
//!
//! ```text
//! read_placed ─► engine ─► finish ─► the answer
//!
//! advance ─► next_place ── in a file ──► engine ─► finish ─► advance
//!                │ ├────── zeroes ────► the next place
//!                │ └────── asked ─────► thread ─► take_answers ─► advance, or the answer
//! ```

use super::SlowPath;
use crate::queue::bounce::{beginning_of, rest_of};
use crate::queue::dispatch::Dispatch;
use crate::queue::slots::Stage;
use ringway_aio::{Engine, IoOp};
use ringway_core::{ByteRange, Op, Status};
use ringway_image::{Ask, Place, Room, ThreadLost};

/// True if the file takes a piece of a request from the request's memory.
fn fits<C, E: Engine>(d: &Dispatch<'_, C, E>, tag: u16, piece: ByteRange) -> bool {
    let slot = d.slots.get(tag);
    let block = u64::from(d.issuer.disk.alignment.offset);
    piece.is_aligned(block) && d.issuer.memory_aligned(&slot.request.segments)
}

impl SlowPath {
    /// Begins a read that is one operation: the image has all of it in one piece of a file, which takes it as
    /// it is. So are most reads of what was written. False if this one is not.
    pub(crate) fn read_placed<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
    ) -> bool {
        let (Some(image), Some(client)) = (&d.issuer.image, &mut self.client) else { return false };
        let (slot, slow) = d.slots.both(tag);
        let (op, range) = (slot.request.op, slot.request.range);
        if op != Op::Read || range.is_empty() || !d.issuer.takes_directly(&slot.request) {
            return false;
        }
        let Place::Direct { file, offset, len } = image.place(range, false) else { return false };
        if len < range.len() {
            return false;
        }
        slow.place = ByteRange::new(offset, range.len()).map(|range| (file, range));
        slow.generation = client.began();
        slot.stage = Stage::Placed;
        d.issue(tag);
        true
    }

    /// Begins the next piece of a request where the image says that it is.
    pub(super) fn next_place<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        loop {
            let Some(image) = &d.issuer.image else { return };
            let (slot, slow) = d.slots.both(tag);
            let rest = rest_of(slot.request.range, slot.done);
            if rest.is_empty() {
                if let Some(finished) = self.made(d, tag) {
                    d.slots.push_late(finished);
                }
                return;
            }
            let place = match slot.request.op {
                Op::Read => image.place(rest, false),
                Op::Write => image.place(rest, true),
                _ => Place::Ask { len: rest.len() },
            };
            match place {
                Place::Zero { len } => {
                    slow.part.clear();
                    let fits = slot.request.segments.slice_into(slot.done, len, &mut slow.part);
                    debug_assert!(fits, "a part has no more segments than the whole");
                    // SAFETY: the caller of `start` vouches for the segments.
                    unsafe { slow.part.zero_from(0) };
                    slot.done += len;
                }
                Place::Ask { len } => return self.ask(d, tag, beginning_of(rest, len)),
                // The thread has memory that the file takes.
                Place::Direct { len, .. }
                    if self.needs_blocks && !fits(d, tag, beginning_of(rest, len)) =>
                {
                    self.count_bounce(d, tag);
                    return self.ask(d, tag, beginning_of(rest, len));
                }
                Place::Direct { file, offset, len } => {
                    return self.go_there(d, tag, beginning_of(rest, len), (file, offset));
                }
            }
        }
    }

    /// Finds the place of a merged operation, which is ready in the slot: false if the image does not have
    /// all of it in one piece.
    pub(crate) fn place_run<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, first: u16) -> bool {
        let (_, slow) = d.slots.both(first);
        let (Some(image), Some(client)) = (&d.issuer.image, &mut self.client) else {
            return false;
        };
        let Place::Direct { file, offset, len } = image.place(slow.range, slow.op == IoOp::Write)
        else {
            return false;
        };
        if len < slow.range.len() {
            return false;
        }
        slow.place = ByteRange::new(offset, len).map(|range| (file, range));
        slow.generation = client.began();
        true
    }

    /// Reads or writes a piece in a file, as much of it as the engine takes at once.
    fn go_there<C, E: Engine>(
        &mut self,
        d: &mut Dispatch<'_, C, E>,
        tag: u16,
        piece: ByteRange,
        (file, offset): (u8, u64),
    ) {
        let Some(client) = &mut self.client else { return self.fail_asked(d, tag) };
        let most = piece.len().min(u64::from(d.issuer.limits.max_bytes));
        let (slot, slow) = d.slots.both(tag);
        slow.part.clear();
        let fits = slot.request.segments.slice_into(slot.done, most, &mut slow.part);
        debug_assert!(fits, "a part has no more segments than the whole");
        // Engines may take fewer segments than a request has.
        slow.part.truncate(d.issuer.limits.max_segments);
        slow.piece = slow.part.bytes();
        slow.range = beginning_of(piece, slow.piece);
        // An offset of 57 bits and a piece of at most 31.
        slow.place = ByteRange::new(offset, slow.piece).map(|range| (file, range));
        slow.generation = client.began();
        // Durable writes are followed by a sync, because their map has to be durable, too.
        slow.op = if slot.request.op == Op::Read { IoOp::Read } else { IoOp::Write };
        slot.stage = Stage::Part;
        d.issue(tag);
    }

    /// A sync begins with the file that holds an image's data, if that is another one.
    pub(super) fn sync_data_file<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let Some(image) = &d.issuer.image else { return };
        let Some((file, _)) = image.data_file() else { return };
        let (_, slow) = d.slots.both(tag);
        slow.place = Some((file, ByteRange::default()));
        slow.generation = self.client.as_mut().map_or(0, |client| client.began());
    }

    /// An operation of a slot is over: clusters may be used again for which its end was waited. True if
    /// the image's map had led to it.
    pub(crate) fn leave_place<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) -> bool {
        let (_, slow) = d.slots.both(tag);
        if slow.place.take().is_none() {
            return false;
        }
        if let Some(client) = &mut self.client {
            client.ended(slow.generation);
        }
        true
    }

    /// Has the image's thread do a piece.
    fn ask<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16, range: ByteRange) {
        let slot = d.slots.get_mut(tag);
        slot.stage = Stage::Asked;
        let request = &slot.request;
        let memory = &raw const request.segments;
        let room = match (request.unmap, request.allocate) {
            (true, _) => Room::Freed,
            (false, false) => Room::Kept,
            (false, true) => Room::Made,
        };
        let ask = Ask { tag, op: request.op, range, memory, skip: slot.done, room };
        self.send(d, ask);
    }

    /// Has the image's thread write the entries that wait for a sync, which follows.
    pub(super) fn ask_for_entries<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        d.slots.get_mut(tag).stage = Stage::Entries;
        let (range, memory) = (ByteRange::default(), std::ptr::null());
        self.send(d, Ask { tag, op: Op::Flush, range, memory, skip: 0, room: Room::Freed });
    }

    fn send<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, ask: Ask) {
        let tag = ask.tag;
        let Some(client) = &mut self.client else { return self.fail_asked(d, tag) };
        // SAFETY: the list is in the slot, which stays where it is and as it is until the answer; the
        // caller of `start` vouches for its memory until then. A queue that is dropped drops its client
        // first, which waits.
        if unsafe { client.ask(ask) }.is_err() {
            self.fail_asked(d, tag);
        }
    }

    /// Nobody is there to be asked.
    #[cold]
    fn fail_asked<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        d.note_failure(tag, None);
        self.answer(d, tag, Status::IoError);
    }

    /// Takes what the image's thread has answered.
    pub(crate) fn take_answers<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        loop {
            match self.client.as_mut().map_or(Ok(None), |client| client.take()) {
                Ok(None) => return,
                Ok(Some(answer)) => self.take_answer(d, answer.tag, answer.result),
                Err(ThreadLost) => {
                    let mut asked = d.slots.asked();
                    // What is held or waits fails when it asks again.
                    asked.retain(|tag| {
                        !self.held.parked.contains(tag) && !self.waiting.contains(tag)
                    });
                    asked.into_iter().for_each(|tag| self.fail_asked(d, tag));
                }
            }
        }
    }

    fn take_answer<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16, result: i64) {
        let slot = d.slots.get_mut(tag);
        debug_assert!(matches!(slot.stage, Stage::Asked | Stage::Entries));
        let finished = if let Ok(done) = u64::try_from(result) {
            if slot.stage == Stage::Entries {
                return self.join(d, tag);
            }
            slot.done += done;
            self.advance(d, tag);
            None
        } else {
            let disk = &d.issuer.disk;
            if d.issuer.image.as_ref().is_some_and(|image| image.has_failed()) {
                // Its thread was told of what is lost, and nobody else will be.
                disk.flush_has_failed();
            }
            let errno = i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO);
            self.failed(d, tag, errno)
        };
        if let Some(finished) = finished {
            d.slots.push_late(finished);
        }
    }
}
