//! The decoder alone, on chains put together by hand: every header, every cut, every length.

use super::device::{Buffer, understand};
use super::fuzz_case::Choices;
use super::memory::Memory;
use crate::chain::named;
use ringway_core::{Op, Request, Status};
use ringway_ring::virtio_blk::{decode, status_byte};
use ringway_ring::virtqueue::Chain;

/// What was reached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub requests: u64,
    pub failed: u64,
    pub unsupported: u64,
    pub without_answer: u64,
}

/// Runs the case that `data` describes: one request after the other.
pub fn check(data: &[u8]) -> Counters {
    let mut choices = Choices::new(data);
    let mut memory = Memory::new();
    let mut counters = Counters::default();
    let mut chain = Chain::for_queue(1024);
    for _ in 0..16 {
        one(&mut choices, &mut memory, &mut chain, &mut counters);
        if choices.is_empty() {
            break;
        }
    }
    memory.assert_equal();
    counters
}

fn one(c: &mut Choices<'_>, memory: &mut Memory, chain: &mut Chain, counters: &mut Counters) {
    let kind = match c.below(16) {
        0..12 => [0, 1, 4, 8, 11, 13, 0, 1, 4, 8, 11, 13][c.below(12)],
        12..15 => u32::from(c.byte()),
        _ => u32::from(c.half()) << 16 | u32::from(c.half()),
    };
    let sector = if c.rarely(32) { c.word() } else { c.half().into() };
    let blocks = 512 * c.below(10);
    let (reads, writes) = match kind {
        0 => (16, blocks + 1),
        1 => (16 + blocks, 1),
        8 => (16, c.below(40)),
        11 | 13 => (32, 1),
        _ => (16 + c.below(3), 1 + c.below(3)),
    };
    let mut bend =
        |len: usize| if c.rarely(24) { (len + c.below(33)).saturating_sub(16) } else { len };
    let (reads, writes) = (bend(reads), bend(writes));
    let mut body = kind.to_le_bytes().to_vec();
    body.extend_from_slice(&c.half().to_le_bytes());
    body.extend_from_slice(&[0; 2]);
    body.extend_from_slice(&sector.to_le_bytes());
    let erased = if c.rarely(32) { c.word() } else { c.half().into() };
    body.extend_from_slice(&erased.to_le_bytes());
    let sectors = match c.below(8) {
        0 => (1 << 22) + u32::from(c.byte()) - 128,
        1 => u32::from(c.half()) << 16,
        _ => c.half().into(),
    };
    body.extend_from_slice(&sectors.to_le_bytes());
    let flags = if c.rarely(24) { c.half().into() } else { u32::from(c.byte() & 1) };
    body.extend_from_slice(&flags.to_le_bytes());

    let readable = pieces(c, reads);
    let mut skip = 0;
    for &(addr, len) in &readable {
        let len = len as usize;
        if skip < body.len() {
            memory.write(addr, &body[skip..body.len().min(skip + len)]);
        }
        skip += len;
    }
    let writable = pieces(c, writes);
    if chain.assemble(&readable, &writable).is_err() {
        return;
    }
    let most = [1026, 64, 8, 4][c.below(4)];
    judge(chain, &readable, &writable, memory, most, counters);
}

/// `bytes` bytes of guest memory in pieces that are not empty.
fn pieces(c: &mut Choices<'_>, bytes: usize) -> Vec<(u64, u32)> {
    let mut left = bytes;
    let mut list = Vec::new();
    while left > 0 {
        let len = match c.below(6) {
            0 => 1 + c.below(left),
            1 => left.min(1 + c.below(20)),
            2 => left.min(16),
            3 => (left - 1).max(1),
            _ => left,
        };
        list.push((c.spot(len), u32::try_from(len).expect("a short request")));
        left -= len;
    }
    list
}

fn judge(
    chain: &Chain,
    readable: &[(u64, u32)],
    writable: &[(u64, u32)],
    memory: &mut Memory,
    most: usize,
    counters: &mut Counters,
) {
    let side = |list: &[(u64, u32)], writable| {
        list.iter().map(move |&(addr, len)| Buffer { addr, len, writable }).collect::<Vec<_>>()
    };
    let buffers = [side(readable, false), side(writable, true)].concat();
    let (status_at, wanted) = understand(&memory.bytes, &buffers, most);
    let mut request = Request::with_capacity(most);
    let decoded = decode(chain, &mut memory.translator(), &mut request);
    let status = match (decoded.verdict, &wanted) {
        (Ok(()), Ok(wanted)) => {
            let range = (request.range.offset(), request.range.len());
            assert_eq!((request.op, request.unmap), (wanted.op, wanted.unmap));
            assert_eq!(range, (wanted.offset, wanted.len), "the range of a {:?}", wanted.op);
            assert_eq!(named(memory, &request.segments), wanted.data, "the data");
            assert!(request.op != Op::GetId || request.segments.bytes() <= 20);
            counters.requests += 1;
            Status::Ok
        }
        (Err(status), Err(wanted)) if status == *wanted => {
            *(if status == Status::Unsupported {
                &mut counters.unsupported
            } else {
                &mut counters.failed
            }) += 1;
            status
        }
        (got, wanted) => panic!("decoded to {got:?}, the oracle says {wanted:?}"),
    };
    // SAFETY: guest memory is mapped as long as `memory` exists.
    let written = unsafe { decoded.status_at.write(status) };
    assert_eq!(written, u32::from(status_at.is_some()));
    match status_at {
        Some(at) => memory.bytes.set(at.into(), status_byte(status)),
        None => counters.without_answer += 1,
    }
}
