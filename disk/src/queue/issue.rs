//! The way of operations to the engine (hot): what a guest may do, what the file takes, which file it is,
//! and what waits while the engine is full. How it begins: `issue/setup.rs`.

mod setup;

use super::slots::{Slots, Stage};
use crate::disk::Disk;
use crate::places::Share;
use ringway_aio::{Engine, FileId, Full, Io, IoMemory, IoOp, Limits};
use ringway_core::mem::{Segment, Segments};
use ringway_core::{ByteRange, DataOp, Op, Request, Status};
use ringway_image::Image;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Disk {
    /// The one place that says whether a request may be carried out: bounds and read-only, for
    /// every operation.
    ///
    /// # Errors
    /// The answer for the guest.
    #[inline]
    pub fn authorise(&self, request: &Request) -> Result<(), Status> {
        self.judge(request, self.capacity.load(Relaxed))
    }

    /// As [`Disk::authorise`], for a disk that ends at `end`.
    #[inline]
    pub(crate) fn judge(&self, request: &Request, end: u64) -> Result<(), Status> {
        if self.geometry.read_only && request.op.changes_disk() {
            return Err(Status::IoError);
        }
        if request.range.end() > end {
            return Err(Status::IoError);
        }
        if request.op == Op::Discard && !self.geometry.discard {
            return Err(Status::Unsupported);
        }
        Ok(())
    }
}

/// What is to be done for a slot now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation<'a> {
    pub(crate) op: IoOp,
    /// Which of the disk's files.
    pub(crate) file: u8,
    /// Where on the disk, or in the file if the disk is an image with a map; empty for syncs.
    pub(crate) range: ByteRange,
    pub(crate) segments: &'a [Segment],
}

/// Hands the operations of a queue to its engine.
///
/// # Invariants
/// 1. `backlog` holds tags of slots in flight whose present operation the engine has not taken.
#[derive(Debug)]
pub(crate) struct Issuer {
    /// Where the disk's clusters are, if it is no raw image, for as long as this queue lives; before the disk,
    /// whose state outlives it.
    pub(crate) image: Option<Arc<Image>>,
    pub(crate) disk: Arc<Disk>,
    /// Those of the engine, and not more bytes than this disk takes at once.
    pub(crate) limits: Limits,
    /// The disk's first file, as the engine knows it.
    file: FileId,
    /// Those below it.
    pub(crate) others: Vec<FileId>,
    tag_base: u64,
    /// The disk's part in the places of the engine, if others share it.
    share: Option<Arc<Share>>,
    backlog: VecDeque<u16>,
    pub(crate) durable_writes: bool,
    /// The host tells of what it has lost of the file once, to whoever syncs it first: durable writes share the disk's
    /// syncs, as flushes do.
    pub(super) through_cache: bool,
    /// Bytes of durable writes.
    pub(crate) durable_bytes: u64,
}

impl Issuer {
    /// An operation is to be begun again: perhaps because its device has no queues to poll.
    pub(crate) fn note_polling<E: Engine>(&self, engine: &E) {
        if std::iter::once(&self.file).chain(&self.others).any(|&file| engine.cannot_poll(file)) {
            self.disk.not_polled.store(true, Relaxed);
        }
    }

    /// True if the file takes this request as it is, in one operation.
    #[inline]
    pub(crate) fn takes_directly(&self, request: &Request) -> bool {
        let segments = &request.segments;
        segments.len() <= self.limits.max_segments
            && segments.bytes() <= u64::from(self.limits.max_bytes)
            && request.range.is_aligned(u64::from(self.disk.alignment.offset))
            && self.memory_aligned(segments)
    }

    /// True if the file takes this memory without a bounce buffer.
    #[inline]
    pub(crate) fn memory_aligned(&self, segments: &Segments) -> bool {
        let (memory, offset) = (self.disk.alignment.memory, self.disk.alignment.offset);
        let (memory, offset) = (memory as usize - 1, offset as usize - 1);
        segments.as_slice().iter().all(|s| s.base as usize & memory == 0 && s.len & offset == 0)
    }

    /// What an operation for `range` may touch: whole blocks through bounce pages, whole clusters by the thread of
    /// an image.
    pub(crate) fn touched(&self, range: ByteRange) -> ByteRange {
        let cluster = self.image.as_ref().map_or(0, |image| image.cluster());
        let unit = cluster.max(self.disk.alignment.offset.into());
        range.widened(unit).unwrap_or(range)
    }

    /// True if a change is durable only once the disk was synced after it. What an image's map says is part of it.
    pub(crate) fn syncs_changes(&self) -> bool {
        self.durable_writes && (self.through_cache || self.image.is_some())
    }

    /// Read or write, the latter durable if it has to be.
    #[inline]
    pub(crate) fn data_op(&self, op: Op) -> DataOp {
        match op {
            Op::Read => DataOp::Read,
            _ if self.durable_writes && !self.through_cache => DataOp::WriteDurable,
            _ => DataOp::Write,
        }
    }

    /// The operation that a request is, if it is one plain operation.
    #[inline(always)]
    fn whole<'a>(&self, request: &'a Request) -> Operation<'a> {
        let op = self.data_op(request.op).into();
        Operation { op, file: 0, range: request.range, segments: request.segments.as_slice() }
    }

    /// What a slot is doing now.
    #[inline(always)]
    pub(crate) fn operation<'a, C>(&self, slots: &'a Slots<C>, tag: u16) -> Operation<'a> {
        let slot = slots.get(tag);
        let slow = slots.slow(tag);
        if slot.stage.is_request() {
            let whole = self.whole(&slot.request);
            return match slow.place {
                Some((file, range)) if slot.stage == Stage::Placed => {
                    Operation { file, range, ..whole }
                }
                _ => whole,
            };
        }
        let (file, range) = slow.place.unwrap_or((0, slow.range));
        Operation { op: slow.op, file, range, segments: slow.part.as_slice() }
    }

    /// Hands a request that is one plain operation to the engine, or to the backlog if it is full.
    #[inline(always)]
    pub(crate) fn issue_whole<E: Engine>(&mut self, engine: &mut E, tag: u16, request: &Request) {
        if self.try_issue(engine, tag, &self.whole(request)).is_err() {
            self.backlog.push_back(tag);
        }
    }

    /// Hands what a slot is to do now to the engine, or to the backlog if it is full.
    #[inline(never)]
    pub(crate) fn issue<C, E: Engine>(&mut self, engine: &mut E, slots: &Slots<C>, tag: u16) {
        if self.try_issue(engine, tag, &self.operation(slots, tag)).is_err() {
            self.backlog.push_back(tag);
        }
    }

    #[inline(always)]
    fn try_issue<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        operation: &Operation<'_>,
    ) -> Result<(), Full> {
        let Operation { op, file, range, segments } = *operation;
        if self.share.as_ref().is_some_and(|share| !share.take()) {
            return Err(Full);
        }
        let file = match file {
            0 => self.file,
            other => self.others[usize::from(other) - 1],
        };
        let io = Io {
            tag: self.tag_base | u64::from(tag),
            op,
            file,
            offset: range.offset(),
            len: range.len(),
            memory: IoMemory::Segments(segments),
        };
        // SAFETY: the slot owns the list of segments, and by the contract of `start` their memory,
        // until the operation's result came back (Slot invariant 1); bounce pages are kept in the
        // slot likewise. The file is attached as long as this queue exists.
        let queued = unsafe { engine.queue(&io) };
        if queued.is_err() {
            self.give_back();
        }
        if self.durable_writes && queued.is_ok() && op == IoOp::WriteDurable {
            self.durable_bytes += range.len();
        }
        queued
    }

    /// An operation is over, or the engine has not taken it: its place is free.
    #[inline(always)]
    pub(crate) fn give_back(&self) {
        if let Some(share) = &self.share {
            share.give_back();
        }
    }

    /// True if operations wait for room in the engine.
    #[inline]
    pub(crate) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CustomDisk;

    #[test]
    fn only_discards_are_not_known_to_a_disk_without_discard() {
        let mut disk = CustomDisk::new(8192).open(None).unwrap();
        let ops = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes, Op::GetId];
        for discard in [true, false] {
            disk.geometry.discard = discard;
            for op in ops {
                let mut request = Request::with_capacity(1);
                request.op = op;
                let known = discard || op != Op::Discard;
                let right = if known { Ok(()) } else { Err(Status::Unsupported) };
                assert_eq!(disk.authorise(&request), right, "{op:?}");
            }
        }
    }
}
