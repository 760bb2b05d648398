//! Split queues and the decoder.

use crate::device::{Buffer, Device, Fault, Pieces, Queue, Wanted, understand, walk};
use crate::fuzz_case::{Case, Choices};
use crate::memory::Memory;
use ringway_core::mem::{Segments, Translator};
use ringway_core::{Op, Request, Status};
use ringway_ring::virtio_blk::{StatusByte, decode, status_byte};
use ringway_ring::virtqueue::{Armed, Broken, Chain, Head, SplitAddresses, SplitDevice};

/// How often each kind of thing happened: a generator that reaches nothing proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub chains: u64,
    pub malformed: u64,
    pub requests: u64,
    pub refused: u64,
    pub broken: u64,
    pub calls: u64,
    pub longest: usize,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.chains += more.chains;
        self.malformed += more.malformed;
        self.requests += more.requests;
        self.refused += more.refused;
        self.broken += more.broken;
        self.calls += more.calls;
        self.longest = self.longest.max(more.longest);
    }
}

/// Runs the case that `data` describes. Panics where the code and the oracle disagree.
pub fn check(data: &[u8]) -> Counters {
    check_with(data, |_, _, _, _| {})
}

/// As [`check`]; `third` is shown each head and what the oracle makes of it.
pub fn check_with(
    data: &[u8],
    mut third: impl FnMut(&Memory, Queue, u16, &Result<Vec<Buffer>, Vec<Fault>>),
) -> Counters {
    let Case { memory, queue, first, segments, heads, mut choices, .. } = Case::new(data);
    let mut bench = Bench::new(memory, queue, first, segments);
    let mut offers = heads.into_iter();
    // The driver and the device take turns in an order of the case's choice.
    for _ in 0..64 {
        match choices.below(8) {
            0 | 1 => bench.offer(offers.next(), &mut choices),
            2 | 3 => bench.pop(&mut third),
            4 => bench.answer(choices.below(usize::from(queue.size)), choices.byte()),
            5 => bench.publish(),
            6 => bench.arm(),
            _ => bench.disarm(),
        }
        if choices.is_empty() || bench.broken {
            break;
        }
    }
    // The rest in the usual order: all that is left is offered, taken, answered, published.
    for head in offers {
        bench.offer(Some(head), &mut choices);
    }
    for _ in 0..=queue.size {
        bench.pop(&mut third);
    }
    while !bench.pending.is_empty() {
        bench.answer(0, choices.byte());
    }
    bench.publish();
    bench.arm();
    bench.memory.assert_equal();
    bench.counters
}

/// A request in flight: as the code sees it, and as the oracle does.
struct Pending {
    head: Head,
    status: Status,
    status_at: StatusByte,
    segments: Segments,
    oracle_status_at: Option<u64>,
    wanted: Option<Wanted>,
}

struct Bench {
    memory: Memory,
    translator: Translator,
    device: SplitDevice,
    oracle: Device,
    request: Request,
    max_segments: usize,
    pending: Vec<Pending>,
    answered: Vec<u16>,
    avail: u16,
    broken: bool,
    counters: Counters,
}

impl Bench {
    fn new(memory: Memory, queue: Queue, first: u16, max_segments: usize) -> Self {
        let at = SplitAddresses {
            desc: memory.ring_host(queue.desc),
            avail: memory.ring_host(queue.avail),
            used: memory.ring_host(queue.used),
        };
        // SAFETY: the three parts lie in the first region of `memory`, which lives as long as this.
        let device =
            unsafe { SplitDevice::new(queue.size, at, first, queue.event_idx, queue.indirect) };
        Self {
            translator: memory.translator(),
            device: device.expect("a proper layout"),
            oracle: Device::new(&memory.bytes, queue, first),
            memory,
            request: Request::with_capacity(max_segments),
            max_segments,
            pending: Vec::new(),
            answered: Vec::new(),
            avail: first,
            broken: false,
            counters: Counters::default(),
        }
    }

    /// The driver makes a chain available: a new one, or one that came back. Now and then the index
    /// jumps.
    fn offer(&mut self, new: Option<u16>, choices: &mut Choices<'_>) {
        let Some(head) = new.or_else(|| self.answered.pop()) else { return };
        let entry = self.oracle.queue.avail_entry(self.avail);
        self.memory.write_number(entry, head.into(), 2);
        self.avail = self.avail.wrapping_add(1);
        let ahead = match choices.byte() {
            255 => choices.byte().into(),
            // One more than the queue holds is too much.
            253 | 254 => (self.oracle.queue.size + u16::from(choices.byte() % 4)).wrapping_sub(2),
            _ => 0,
        };
        let index = self.avail.wrapping_add(ahead);
        self.memory.write_number(self.oracle.queue.avail + 2, index.into(), 2);
    }

    fn pop(
        &mut self,
        third: &mut impl FnMut(&Memory, Queue, u16, &Result<Vec<Buffer>, Vec<Fault>>),
    ) {
        if self.broken {
            return;
        }
        let wanted = self.oracle.pop(&self.memory.bytes);
        let (head, chain) = match (self.device.pop(&mut self.translator), wanted) {
            (Ok(None), Ok(None)) => return,
            (Err(error), Err(wanted)) => return self.note_broken(error, wanted),
            (Ok(Some((head, chain))), Ok(Some(wanted))) if head.index() == wanted => (head, chain),
            (got, wanted) => panic!("popped {got:?}, the oracle says {wanted:?}"),
        };
        self.counters.chains += 1;
        let oracle_chain = walk(&self.memory.bytes, self.oracle.queue, head.index());
        third(&self.memory, self.oracle.queue, head.index(), &oracle_chain);
        let chain = match (chain, oracle_chain) {
            (Ok(chain), Ok(oracle)) => {
                assert_eq!(listed(chain), oracle, "the buffers of a chain");
                chain
            }
            (Err(error), Err(faults)) => {
                assert!(
                    faults.contains(&error.into()),
                    "the chain was refused as {error:?}, the oracle says {faults:?}"
                );
                self.counters.malformed += 1;
                self.pending.push(Pending {
                    head,
                    status: Status::IoError,
                    status_at: StatusByte::NOWHERE,
                    segments: Segments::with_capacity(0),
                    oracle_status_at: None,
                    wanted: None,
                });
                return;
            }
            (got, wanted) => panic!("walked to {got:?}, the oracle says {wanted:?}"),
        };
        let buffers = listed(chain);
        self.counters.longest = self.counters.longest.max(buffers.len());
        let decoded = decode(chain, &mut self.translator, &mut self.request);
        let (oracle_status_at, wanted) =
            understand(&self.memory.bytes, &buffers, self.max_segments);
        let request = &mut self.request;
        let status = match (decoded.verdict, &wanted) {
            (Ok(()), Ok(wanted)) => {
                let range = (request.range.offset(), request.range.len());
                assert_eq!((request.op, request.unmap), (wanted.op, wanted.unmap));
                assert_eq!(range, (wanted.offset, wanted.len), "the range of a {:?}", wanted.op);
                assert_eq!(named(&self.memory, &request.segments), wanted.data, "the data");
                if request.op.moves_data() {
                    assert_eq!(request.segments.bytes(), request.range.len());
                }
                self.counters.requests += 1;
                Status::Ok
            }
            (Err(status), Err(wanted)) if status == *wanted => {
                self.counters.refused += 1;
                status
            }
            (got, wanted) => panic!("decoded to {got:?}, the oracle says {wanted:?}"),
        };
        let mut segments = Segments::with_capacity(0);
        if status == Status::Ok {
            let room = Segments::with_capacity(self.max_segments);
            segments = std::mem::replace(&mut request.segments, room);
        }
        let status_at = decoded.status_at;
        let wanted = wanted.ok();
        self.pending.push(Pending { head, status, status_at, segments, oracle_status_at, wanted });
    }

    fn note_broken(&mut self, error: Broken, wanted: Broken) {
        assert_eq!(error, wanted);
        self.broken = true;
        self.counters.broken += 1;
    }

    /// Carries a request out, in no particular order, and returns its chain.
    fn answer(&mut self, which: usize, fill: u8) {
        if self.pending.is_empty() {
            return;
        }
        let pending = self.pending.swap_remove(which % self.pending.len());
        if let Some(wanted) = &pending.wanted {
            self.transfer(wanted, &pending.segments, fill);
        }
        // SAFETY: guest memory is mapped as long as the bench exists.
        let written = unsafe { pending.status_at.write(pending.status) };
        assert_eq!(written, u32::from(pending.oracle_status_at.is_some()));
        if let Some(addr) = pending.oracle_status_at {
            self.memory.bytes.set(addr.into(), status_byte(pending.status));
        }
        let head = pending.head.index();
        self.device.push(pending.head, written);
        self.oracle.push(&mut self.memory.bytes, head, written);
        self.answered.push(head);
    }

    /// Moves the data as a disk would: each byte where the oracle says.
    fn transfer(&mut self, wanted: &Wanted, segments: &Segments, fill: u8) {
        let len = usize::try_from(segments.bytes()).expect("less than 4 GiB");
        // Buffers may overlap and add up to far more than the guest has.
        if len > 1 << 16 {
            return;
        }
        match wanted.op {
            Op::Read | Op::GetId => {
                let data: Vec<u8> = (fill..=255).chain(0..fill).cycle().take(len).collect();
                // SAFETY: the segments are mapped (their guest addresses were checked), and `data`
                // is our own.
                assert_eq!(unsafe { segments.scatter(0, &data) }, len);
                for (addr, byte) in each_byte(&wanted.data).zip(data) {
                    self.memory.bytes.set(addr.into(), byte);
                }
            }
            Op::Write => {
                let mut data = vec![0; len];
                // SAFETY: as above.
                assert_eq!(unsafe { segments.gather(0, &mut data) }, len);
                let expected =
                    each_byte(&wanted.data).map(|addr| self.memory.bytes.get(addr.into()));
                assert!(expected.eq(data.into_iter().map(Some)), "the data of a write");
            }
            Op::Flush | Op::Discard | Op::WriteZeroes => assert_eq!(len, 0),
        }
    }

    fn publish(&mut self) {
        let (call, wanted) = (self.device.publish(), self.oracle.publish(&mut self.memory.bytes));
        assert_eq!(call, wanted, "whether the driver is called");
        self.counters.calls += u64::from(call);
    }

    fn arm(&mut self) {
        if self.broken {
            return;
        }
        match (self.device.arm(), self.oracle.arm(&mut self.memory.bytes)) {
            (Ok(armed), Ok(work)) => assert_eq!(armed == Armed::WorkArrived, work),
            (Err(error), Err(wanted)) => self.note_broken(error, wanted),
            (got, wanted) => panic!("armed: {got:?}, the oracle says {wanted:?}"),
        }
    }

    fn disarm(&mut self) {
        self.device.disarm();
        self.oracle.disarm(&mut self.memory.bytes);
    }
}

pub(crate) fn listed(chain: &Chain) -> Vec<Buffer> {
    let side = |writable| {
        let descs = if writable { chain.writable() } else { chain.readable() };
        descs.iter().map(move |desc| Buffer { addr: desc.addr, len: desc.len, writable })
    };
    side(false).chain(side(true)).collect()
}

/// The guest addresses of segments; panics if one is not guest memory.
pub(crate) fn named(memory: &Memory, segments: &Segments) -> Pieces {
    let name = |segment: &ringway_core::Segment| {
        let addr = memory.guest_of(segment.base, segment.len);
        (addr.expect("every segment lies in guest memory"), segment.len as u64)
    };
    segments.as_slice().iter().map(name).collect()
}

fn each_byte(pieces: &Pieces) -> impl Iterator<Item = u64> {
    pieces.iter().flat_map(|&(addr, len)| addr..addr + len)
}
