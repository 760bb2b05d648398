//! From the ring to the worker: a batch of requests, and their data (hot).

use super::Queue;
use super::flight::{BATCH, DataPlace, Flight, list_copies};
use super::step::Barrier;
use crate::host::{Direction, GrantCopy, GrantMapping, Host, PAGE};
use crate::movement::Transfer;
use crate::persistent::Persistent;
use crate::record::Kept;
use ringway_core::mem::Segments;
use ringway_core::{Op, Request, Segment};
use ringway_export::Broken;
use ringway_ring::blkif::{GrantPiece, NotGranted};
use std::time::Instant;

impl<H: Host> Queue<H> {
    /// Takes a batch and fetches its data.
    pub(super) fn stage(&mut self) -> Result<(), Broken> {
        self.moved = 0;
        let begun = self.chooser.measures().then(Instant::now);
        let mut outcome = Ok(());
        while self.ready.len() < BATCH {
            let entry = match self.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                // What was taken before it is owed all the same.
                Err(broken) => {
                    outcome = Err(broken);
                    break;
                }
            };
            if !self.provide(entry) {
                self.waiting = Some(entry);
                break;
            }
            if self.record.kept(entry).0 == Kept::Barrier {
                self.barrier = Some(Barrier::new(entry));
                break;
            }
            self.ready.push_back(entry);
        }
        self.copy(Direction::FromGuest);
        if self.moved > 0 {
            if let Some(begun) = begun {
                self.chooser.cost(self.chooser.transfer(), begun.elapsed(), self.moved);
            }
            self.chooser.batch_is_over();
            self.pages.sweep();
        }
        if self.ready.is_empty() { outcome } else { Ok(()) }
    }

    /// The next request: one that waits, one that was left, one from the ring.
    fn next_entry(&mut self) -> Result<Option<u16>, Broken> {
        if let Some(entry) = self.waiting.take().or_else(|| self.left.pop_front()) {
            return Ok(Some(entry));
        }
        if self.winding_down {
            return Ok(None);
        }
        // None free: answers are waiting to be published.
        let Some(entry) = self.free.last().copied() else { return Ok(None) };
        let (host, pages) = (&mut self.host, &mut self.pages);
        let persistent = self.chooser.transfer() == Transfer::Persistent;
        let mut lists = |grant, into: &mut [u8]| read_page(host, pages, persistent, grant, into);
        let Some((token, asked)) = self.ring.pop(&mut lists).map_err(Broken::rule)? else {
            return Ok(None);
        };
        self.free.pop();
        self.record.take(entry, token.parts(), &asked);
        Ok(Some(entry))
    }

    /// Finds a place for the data of a request; false if it has to wait for one.
    fn provide(&mut self, entry: u16) -> bool {
        let (kept, range, pieces) = self.record.kept(entry);
        let flight = &mut self.flights[usize::from(entry)];
        flight.failed = false;
        flight.place = DataPlace::None;
        let from_guest = match kept {
            Kept::Read => false,
            Kept::Write | Kept::Barrier if !pieces.is_empty() => true,
            _ => return true,
        };
        match self.chooser.transfer() {
            Transfer::Persistent if hold(&mut self.host, &mut self.pages, flight, pieces) => {
                self.moved += pieces.len() as u64;
                return true;
            }
            Transfer::Map => {
                self.grants.clear();
                self.grants.extend(pieces.iter().map(|piece| piece.grant()));
                if let Ok(mapped) = self.host.map(&self.grants, !from_guest) {
                    flight.place = DataPlace::Mapped(mapped);
                    self.moved += pieces.len() as u64;
                    return true;
                }
            }
            _ => {}
        }
        // Also if mapping failed: copying tells which piece it was, and may work.
        let Ok(bytes) = usize::try_from(range.len()) else { return true };
        let Some(pages) = self.pool.acquire(bytes) else { return false };
        if from_guest {
            list_copies(&mut self.copies, Direction::FromGuest, &pages, pieces);
            self.owners.resize(self.copies.len(), entry);
        }
        self.moved += pieces.len() as u64;
        flight.place = DataPlace::Pages(pages);
        true
    }

    /// Carries out the copies that are listed; requests of which a piece fails have failed.
    pub(super) fn copy(&mut self, direction: Direction) {
        if self.copies.is_empty() {
            return;
        }
        debug_assert!(self.copies.iter().all(|copy| copy.direction == direction));
        // SAFETY: the local memory of each copy lies in pool pages of its request, which nobody else
        // uses: the worker has not got them yet, or has given them back.
        let copied = unsafe { self.host.copy(&mut self.copies) };
        for (copy, &owner) in self.copies.iter().zip(&self.owners) {
            if copied.is_err() || !copy.done {
                self.flights[usize::from(owner)].failed = true;
            }
        }
        self.copies.clear();
        self.owners.clear();
    }

    /// Writes a request to `request`.
    pub(super) fn fill(&self, entry: u16, request: &mut Request) {
        let (kept, range, pieces) = self.record.kept(entry);
        request.op = match kept {
            Kept::Read => Op::Read,
            Kept::Write | Kept::Barrier => Op::Write,
            Kept::Discard => Op::Discard,
            Kept::Flush | Kept::Refused(_) => Op::Flush,
        };
        (request.range, request.unmap) = (range, false);
        request.segments.clear();
        let flight = &self.flights[usize::from(entry)];
        let out = &mut request.segments;
        match &flight.place {
            DataPlace::None => {}
            DataPlace::Pages(pages) => {
                if let Ok(len) = usize::try_from(range.len()) {
                    let _fits = out.push(Segment { base: pages.base(), len });
                }
            }
            DataPlace::Mapped(mapped) => {
                let page = |at: usize| mapped.base().wrapping_add(at * PAGE);
                list_segments(out, pieces, page);
            }
            DataPlace::Held(_) => {
                list_segments(out, pieces, |at| self.pages.base(flight.held[at]));
            }
        }
    }
}

/// The bytes of an indirect page: from where it is mapped, or copied.
fn read_page<H: Host>(
    host: &mut H,
    pages: &mut Persistent<H::Mapped>,
    persistent: bool,
    grant: u32,
    into: &mut [u8],
) -> Result<(), NotGranted> {
    if persistent {
        if let Ok(place) = pages.hold(host, grant) {
            // SAFETY: the page is mapped while it is held, and a list is at most a page. The guest may
            // write to it meanwhile: bytes are copied once, and any bytes are judged afterwards.
            unsafe {
                std::ptr::copy_nonoverlapping(pages.base(place), into.as_mut_ptr(), into.len())
            };
            pages.release(place);
            return Ok(());
        }
    }
    let len = u16::try_from(into.len()).map_err(|_| NotGranted)?;
    let (direction, local) = (Direction::FromGuest, into.as_mut_ptr());
    let mut copies = [GrantCopy { direction, grant, offset: 0, len, local, done: false }];
    // SAFETY: the bytes are the caller's to be written.
    match unsafe { host.copy(&mut copies) } {
        Ok(()) if copies[0].done => Ok(()),
        _ => Err(NotGranted),
    }
}

/// Holds all pages of a request where they stay mapped; none if one of them cannot be.
fn hold<H: Host>(
    host: &mut H,
    pages: &mut Persistent<H::Mapped>,
    flight: &mut Flight<H::Mapped>,
    pieces: &[GrantPiece],
) -> bool {
    for (at, piece) in pieces.iter().enumerate() {
        match pages.hold(host, piece.grant()) {
            Ok(place) => flight.held[at] = place,
            Err(_) => {
                flight.held[..at].iter().for_each(|&place| pages.release(place));
                return false;
            }
        }
    }
    flight.place = DataPlace::Held(pieces.len());
    true
}

/// Lists the memory of mapped pieces; what lies end to end is one segment.
fn list_segments(out: &mut Segments, pieces: &[GrantPiece], page: impl Fn(usize) -> *mut u8) {
    let mut last: Option<Segment> = None;
    for (at, piece) in pieces.iter().enumerate() {
        let base = page(at).wrapping_add(piece.offset());
        last = match last {
            Some(Segment { base: first, len }) if first.wrapping_add(len) == base => {
                Some(Segment { base: first, len: len + piece.len() })
            }
            full => {
                if let Some(segment) = full {
                    let _fits = out.push(segment);
                }
                Some(Segment { base, len: piece.len() })
            }
        };
    }
    if let Some(segment) = last {
        let _fits = out.push(segment);
    }
}
