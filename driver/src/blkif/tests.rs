//! The queue against a disk in memory, behind the back side of the same ring.

use super::*;
use crate::error::Refusal;
use ringway_core::Status;
use ringway_ring::blkif::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const DISK: usize = 4 << 20;

/// A disk in memory: what an honest server does with requests.
struct Ram {
    disk: Vec<u8>,
    flushes: u32,
    discards: u32,
    barriers: u32,
    longest: usize,
}

impl Ram {
    fn new() -> Self {
        Self { disk: vec![0; DISK], flushes: 0, discards: 0, barriers: 0, longest: 0 }
    }

    /// Serves what there is; true if there was something.
    fn serve(&mut self, back_end: &mut BackEnd) -> bool {
        let (ring, grants) = back_end.parts();
        let mut busy = false;
        while let Some((token, asked)) = ring.pop(grants).unwrap() {
            busy = true;
            let status = match asked {
                Err(refused) => refused.status(),
                Ok(asked) => self.carry_out(asked, grants),
            };
            ring.push(token, status);
        }
        back_end.publish();
        busy
    }

    fn carry_out(&mut self, asked: &ringway_ring::blkif::Asked, grants: &LocalGrants) -> Status {
        let range = asked.range();
        if range.end() > DISK as u64 {
            return Status::IoError;
        }
        // All pieces or none: a piece that cannot be reached fails the request.
        let pieces = asked.pieces().iter().map(|piece| grants.segment(*piece));
        let Some(segments) = pieces.collect::<Option<Vec<_>>>() else { return Status::IoError };
        self.longest = self.longest.max(segments.len());
        match asked.command() {
            Command::Flush => self.flushes += 1,
            Command::Discard { .. } => self.discards += 1,
            Command::WriteBarrier => self.barriers += 1,
            _ => {}
        }
        let mut at = usize::try_from(range.offset()).unwrap();
        for segment in segments {
            let here = &mut self.disk[at..at + segment.len];
            // SAFETY: the segment lies in a granted page, which is mapped and which the front end
            // leaves alone until the answer.
            unsafe {
                match asked.command() {
                    Command::Read => segment.base.copy_from(here.as_ptr(), here.len()),
                    _ => segment.base.copy_to(here.as_mut_ptr(), here.len()),
                }
            }
            at += segment.len;
        }
        Status::Ok
    }
}

fn rings() -> impl Iterator<Item = LocalRing> {
    let data = 6 << 20;
    [Abi::X86_64, Abi::X86_32].into_iter().flat_map(move |abi| {
        [0, 1, 4].map(|order| LocalRing { abi, order, data, ..LocalRing::default() })
    })
}

fn content(seed: usize, at: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 9).wrapping_mul(seed + 7)).to_le_bytes()[0]
}

/// Requests of every length, buffers that begin anywhere in a page, all of a ring in flight.
#[test]
fn data_arrives_where_it_should() {
    for ring in rings() {
        let (mut queue, mut back_end, pool) = ring.open::<(u64, usize)>().unwrap();
        let mut ram = Ram::new();
        let mut want = vec![0; DISK];
        let pages = [1, 2, 11, 12, 31, 255, 256];
        let lengths =
            pages.map(|pages| pages * 4096).into_iter().chain([512, 1536, 44 * 1024 + 512]);
        for (seed, len) in lengths.enumerate() {
            for shift in [0, 512, 3584] {
                if len + shift > 256 * 4096 {
                    continue;
                }
                let offset = (seed * 997 + shift / 512 * 131) % 4096 * 512;
                let mut buffer = pool.alloc(len + shift).unwrap();
                if shift > 0 {
                    buffer = buffer.split_at(shift).1;
                }
                for (at, byte) in buffer.iter_mut().enumerate() {
                    *byte = content(seed + shift, at);
                }
                want[offset..offset + len].copy_from_slice(&buffer);
                queue.write(offset as u64, buffer, (offset as u64, len)).unwrap();
                queue.submit().unwrap();
                assert!(ram.serve(&mut back_end));
                let done = queue.pop().unwrap().expect("an answer");
                assert_eq!((done.is_ok(), done.ctx), (true, (offset as u64, len)));
                let mut buffer = done.into_buffer().unwrap();
                buffer.fill(0xdd);
                queue.read(offset as u64, buffer, (offset as u64, len)).unwrap();
                queue.submit().unwrap();
                assert!(ram.serve(&mut back_end));
                let done = queue.pop().unwrap().expect("an answer");
                assert!(done.is_ok());
                assert_eq!(done.into_buffer().unwrap()[..], want[offset..offset + len]);
            }
        }
        assert!(ram.disk == want, "a write went astray");
        assert_eq!(ram.longest, 256);
        assert_eq!(pool.available(), 6 << 20);
        // A full ring of indirect requests: there is a list for each slot.
        let mut buffers: Vec<_> = (0..).map_while(|_| pool.alloc(12 * 4096)).collect();
        let mut queued = 0;
        while let Some(buffer) = buffers.pop() {
            match queue.read(4096, buffer, (0, 0)) {
                Ok(()) => queued += 1,
                Err(rejected) => {
                    assert_eq!((rejected.why, queued), (Refusal::Full, queue.size()));
                    break;
                }
            }
        }
        queue.submit().unwrap();
        assert!(ram.serve(&mut back_end));
        for done in queue.completions() {
            assert_eq!(done.into_buffer().unwrap()[..], want[4096..][..12 * 4096]);
            queued -= 1;
        }
        assert_eq!(queued, 0);
    }
}

#[test]
fn every_kind_of_request_arrives() {
    for ring in rings() {
        let (mut queue, mut back_end, pool) = ring.open::<&str>().unwrap();
        let mut ram = Ram::new();
        let mut buffers: Vec<_> = (1..=3).map(|n| pool.alloc(n * 512).unwrap()).collect();
        for (n, buffer) in (1..).zip(&mut buffers) {
            buffer.fill(n);
        }
        queue.write_vectored(1024, buffers, "vector").unwrap();
        queue.flush("flush").unwrap();
        queue.discard(1 << 20, 4096, "discard").unwrap();
        queue.write_barrier(0, pool.alloc(4096).unwrap(), "barrier").unwrap();
        queue.read(DISK as u64, pool.alloc(512).unwrap(), "beyond").unwrap();
        queue.submit().unwrap();
        assert!(ram.serve(&mut back_end));
        let mut back = Vec::new();
        for done in queue.completions() {
            back.push((done.ctx, done.status));
        }
        let ok = |name| (name, Status::Ok);
        let beyond = ("beyond", Status::IoError);
        assert_eq!(back, [ok("vector"), ok("flush"), ok("discard"), ok("barrier"), beyond]);
        assert_eq!((ram.flushes, ram.discards, ram.barriers), (1, 1, 1));
        // The barrier came after the vector and wrote zeroes over all of it.
        assert!(ram.disk.iter().all(|byte| *byte == 0));
        let stats = queue.stats();
        assert_eq!((stats.queued, stats.completed, stats.kicks), (5, 5, 1));
    }
}

#[test]
fn what_is_no_request_comes_back() {
    let (mut queue, _back_end, pool) = LocalRing::default().open::<u8>().unwrap();
    let (_, _, other) = LocalRing::default().open::<u8>().unwrap();
    let sectors = |len| pool.alloc(len).unwrap();
    let misaligned = Refusal::Misaligned { offset: 1, len: 512 };
    let rejected = queue.read(1, sectors(512), 7).unwrap_err();
    assert_eq!((rejected.why, rejected.ctx), (misaligned, 7));
    assert_eq!(rejected.data.into_buffer().unwrap().len(), 512);
    let why = |queued: Result<(), crate::Rejected<u8>>| queued.unwrap_err().why;
    let odd = Refusal::Misaligned { offset: 0, len: 513 };
    assert_eq!(why(queue.write(0, sectors(513), 0)), odd);
    let cut = sectors(1024).split_at(100).1.split_at(512).0;
    assert_eq!(why(queue.write(0, cut, 0)), Refusal::BufferMisaligned);
    let foreign = other.alloc(512).unwrap();
    assert_eq!(why(queue.read(0, foreign, 0)), Refusal::ForeignBuffer);
    assert_eq!(why(queue.read_vectored(0, Vec::new(), 0)), Refusal::Empty);
    let barrier = why(queue.write_barrier(0, sectors(12 * 4096), 0));
    assert_eq!(barrier, Refusal::TooManySegments { have: 12, max: 11 });
    let odd = Refusal::Misaligned { offset: 0, len: 100 };
    assert_eq!(why(queue.discard(0, 100, 0)), odd);
    assert_eq!(queue.in_flight(), 0);
    let plain = LocalRing { indirect_segments: 0, ..LocalRing::default() };
    let (mut queue, _back_end, pool) = plain.open::<u8>().unwrap();
    let long = pool.alloc(12 * 4096).unwrap();
    assert_eq!(why(queue.read(0, long, 0)), Refusal::TooManySegments { have: 12, max: 11 });
    for (order, indirect_segments) in [(5, 0), (u32::MAX, 0), (0, 513)] {
        let ring = LocalRing { order, indirect_segments, ..LocalRing::default() };
        assert!(ring.open::<()>().is_err());
    }
}

/// A page of data, or a page that lists others, whose grant is gone: that request fails.
#[test]
fn b13_a_grant_that_is_gone_fails_its_request_alone() {
    for ring in rings() {
        let (mut queue, mut back_end, pool) = ring.open::<u8>().unwrap();
        let granted = back_end.grants().clone();
        let mut ram = Ram::new();
        for pages in [3, 40] {
            let buffer = pool.alloc(pages * 4096).unwrap();
            let start = granted.page(0).unwrap().addr();
            let page = (buffer.as_ptr().addr() - start) / 4096;
            // The second page of the data; the last list, which is the one used next.
            let list = u32::try_from((1 << ring.order) + queue.size() as usize).unwrap();
            let lost = [grants::number(page + 1), list];
            let lost = if pages == 40 { &lost[..] } else { &lost[..1] };
            let mut buffer = Some(buffer);
            for &grant in lost {
                granted.set_granted(grant, false);
                queue.write(0, buffer.take().unwrap(), 1).unwrap();
                queue.flush(2).unwrap();
                queue.submit().unwrap();
                assert!(ram.serve(&mut back_end));
                let done = queue.pop().unwrap().unwrap();
                assert_eq!((done.ctx, done.status), (1, Status::IoError), "grant {grant}");
                buffer = done.into_buffer();
                let done = queue.pop().unwrap().unwrap();
                assert_eq!((done.ctx, done.status), (2, Status::Ok));
                granted.set_granted(grant, true);
                assert!(ram.disk.iter().all(|byte| *byte == 0), "half a request was carried out");
            }
            queue.write(0, buffer.take().unwrap(), 3).unwrap();
            queue.submit().unwrap();
            assert!(ram.serve(&mut back_end));
            assert!(queue.pop().unwrap().unwrap().is_ok());
        }
    }
}

/// Both sides sleep whenever they may; the back end in a thread of its own.
#[test]
fn nobody_sleeps_for_ever() {
    for ring in rings() {
        let (mut queue, mut back_end, pool) = ring.open::<usize>().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let link = queue.link();
        let server = std::thread::spawn(move || {
            let mut ram = Ram::new();
            while !stopped.load(Ordering::Acquire) {
                let busy = ram.serve(&mut back_end);
                if !busy && back_end.arm().unwrap() {
                    back_end.wait().unwrap();
                }
            }
        });
        let (mut sent, mut back, total) = (0, 0, 5000);
        let mut buffers: Vec<_> = (0..20).map(|_| pool.alloc(4096).unwrap()).collect();
        while back < total {
            while sent < total {
                let Some(buffer) = buffers.pop() else { break };
                queue.write((sent % 100 * 4096) as u64, buffer, sent).unwrap();
                sent += 1;
            }
            let some = u32::try_from(sent % 4 + 1).unwrap();
            assert!(queue.wait_for(some, Some(Duration::from_secs(20))).unwrap(), "asleep");
            while let Some(done) = queue.pop().unwrap() {
                assert!(done.is_ok());
                buffers.extend(done.into_buffer());
                back += 1;
            }
        }
        stop.store(true, Ordering::Release);
        link.kick();
        server.join().unwrap();
        assert!(!queue.wait(Some(Duration::from_millis(1))).unwrap(), "nothing is in flight");
        assert!(queue.stats().sleeps > 0);
    }
}
