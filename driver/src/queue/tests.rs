//! A queue against the device side of the ring, in one process: no server, no socket.

use super::*;
use crate::Error;
use ringway_core::Status;
use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use ringway_ring::virtqueue::{Areas, Desc, Device, Format, PackedBase, Tables};
use ringway_scheduler::SchedulerMode;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};

const ENTRIES: u16 = 16;

pub(super) struct Rig {
    pub(super) memory: Arc<Memory>,
    pub(super) used: usize,
    pub(super) device: Device,
    pub(super) translator: Translator,
    _socket: (UnixStream, UnixStream),
}

/// A queue and the device side of its ring, over two mappings of one memfd as with a real server.
fn rig<C>(packed: bool, size: u16, when_scarce: Option<bool>) -> (BlkQueue<C>, Rig) {
    rig_on(SchedulerMode::Bio, packed, size, when_scarce)
}

/// The same on a path.
pub(super) fn rig_on<C>(
    path: SchedulerMode,
    packed: bool,
    size: u16,
    when_scarce: Option<bool>,
) -> (BlkQueue<C>, Rig) {
    rig_in_pieces(1 << 20, path, packed, size, when_scarce)
}

/// The same with a device that takes `size_max` bytes in one piece.
fn rig_in_pieces<C>(
    size_max: u32,
    path: SchedulerMode,
    packed: bool,
    size: u16,
    when_scarce: Option<bool>,
) -> (BlkQueue<C>, Rig) {
    let format = Format { packed, size, event_idx: true, indirect: when_scarce.is_some() };
    let (desc, driver, device) = format.area_bytes();
    let avail = desc.next_multiple_of(128);
    let used = (avail + driver).next_multiple_of(128);
    let headers = (used + device).next_multiple_of(128);
    let tables = headers + Headers::bytes(size);
    let control = tables + Tables::bytes(size, ENTRIES);
    let memory = Memory::new(control, 1 << 20, false, 1).unwrap();
    let whole = memory.regions()[0];
    let theirs = Arc::new(Mapping::of_file(memory.file(), 0, whole.len).unwrap());
    let parts =
        |at: &dyn Fn(usize) -> *mut u8| Areas { desc: at(0), driver: at(avail), device: at(used) };
    let guest = |offset: usize| whole.guest + offset as u64;
    let tables = when_scarce.map(|when_scarce| Tables {
        host: memory.at(tables),
        guest: guest(tables),
        entries: ENTRIES,
        when_scarce,
    });
    let base = if packed { PackedBase::after(65500, size).0 } else { 65500 };
    // SAFETY: the parts lie in the control part of the memory, apart; queue and rig keep it alive.
    let (ring, headers, device) = unsafe {
        let at = parts(&|offset| memory.at(offset));
        let ring = Driver::new(format, at, 65500, tables).unwrap();
        let headers = Headers::new(memory.at(headers), guest(headers), size);
        let at = parts(&|offset| theirs.at(offset));
        (ring, headers, Device::new(format, at, Some(base)).unwrap())
    };
    assert_eq!((ring.base(), device.base()), (base, base));
    let seg_max = usize::from(ENTRIES.min(size)) - 2;
    let merge_max = if when_scarce.is_some() { seg_max } else { usize::from(size / 4) };
    let limits = QueueLimits {
        seg_max,
        merge_max: merge_max.min(seg_max),
        size_max,
        flush: true,
        discard_sectors: Some(8),
        write_zeroes_sectors: None,
    };
    let link = Arc::new(Link::new().unwrap());
    let (ours, peer) = UnixStream::pair().unwrap();
    link.connect(Some(&ours)).unwrap();
    let region = Region { guest: whole.guest, user: whole.user, len: whole.len, mapping: theirs };
    let translator = Translator::new(Arc::new(GuestMap::new(vec![region]).unwrap()));
    let queue = BlkQueue::new(
        ring,
        headers,
        limits,
        Arc::clone(&memory),
        link,
        Arc::new(DevicePolicy::new(path)),
    );
    (queue, Rig { memory, used, device, translator, _socket: (ours, peer) })
}

impl Rig {
    pub(super) fn pool(&self) -> crate::BufferPool {
        crate::BufferPool::new(Arc::clone(&self.memory))
    }

    /// Answers all there is with `status`; returns how many. Calls when asked to.
    #[inline]
    fn serve(&mut self, status: Option<u8>, link: Option<&Link>) -> usize {
        let mut count = 0;
        while let Some((head, chain)) = self.device.pop(&mut self.translator).unwrap() {
            let last = chain.unwrap().writable().last().copied().unwrap();
            let at = last.addr + u64::from(last.len) - 1;
            let at = self.translator.one(at, 1).unwrap().as_ptr();
            if let Some(status) = status {
                // SAFETY: a mapped byte of a chain in flight.
                unsafe { at.write_volatile(status) };
            }
            self.device.push(head, 1);
            count += 1;
        }
        if count > 0 && self.device.publish() {
            if let Some(link) = link {
                link.call.write(1).unwrap();
            }
        }
        count
    }
}

/// Both formats, with and without tables.
pub(super) fn shapes() -> impl Iterator<Item = (bool, Option<bool>)> {
    [false, true]
        .into_iter()
        .flat_map(|packed| [None, Some(false), Some(true)].map(|tables| (packed, tables)))
}

#[test]
fn statuses_and_contexts_come_back() {
    for (packed, tables) in shapes() {
        let (mut queue, mut rig) = rig::<u32>(packed, 16, tables);
        let pool = rig.pool();
        for round in 0..100u32 {
            let buffer = || pool.alloc(4096).unwrap();
            queue.read(0, buffer(), round).unwrap();
            queue.write_vectored(512, vec![buffer(), buffer()], round).unwrap();
            queue.flush(round).unwrap();
            queue.discard(0, 4096, round).unwrap();
            queue.submit().unwrap();
            let (byte, status) = match round % 4 {
                0 => (Some(0), Status::Ok),
                1 => (Some(2), Status::Unsupported),
                2 => (Some(77), Status::IoError),
                _ => (None, Status::IoError), // a device that writes no status
            };
            assert_eq!(rig.serve(byte, None), 4);
            let done: Vec<_> = queue.completions().collect();
            assert!(done.iter().all(|done| (done.ctx, done.status) == (round, status)));
            let buffers = done.into_iter().map(|done| done.data.into_buffers().len());
            assert_eq!(buffers.collect::<Vec<_>>(), [1, 2, 0, 0]);
        }
        assert_eq!(queue.stats().completed, 400);
        assert_eq!(pool.available(), 1 << 20);
    }
}

#[test]
fn a_buffer_longer_than_a_piece_may_be_goes_in_several() {
    for (path, (packed, tables)) in [SchedulerMode::Bio, SchedulerMode::Request]
        .into_iter()
        .flat_map(|path| shapes().map(move |shape| (path, shape)))
    {
        let (mut queue, mut rig) = rig_in_pieces::<u32>(4096, path, packed, 16, tables);
        let pool = rig.pool();
        let buffer = |bytes| pool.alloc(bytes).unwrap();
        let long = buffer(10_240);
        let begin = long.guest_address();
        queue.write(0, long, 1).unwrap();
        queue.read_vectored(1 << 20, vec![buffer(512), buffer(8192)], 2).unwrap();
        queue.submit().unwrap();
        let mut seen = Vec::new();
        while let Some((head, chain)) = rig.device.pop(&mut rig.translator).unwrap() {
            let chain = chain.unwrap();
            let pieces = |all: &[Desc]| all.iter().map(|piece| piece.len).collect::<Vec<_>>();
            seen.push((pieces(chain.readable()), pieces(chain.writable())));
            if let [_, first, second, _] = chain.readable() {
                assert_eq!((first.addr, second.addr), (begin, begin + 4096));
            }
            rig.device.push(head, 1);
        }
        let _ = rig.device.publish();
        seen.sort();
        let expected =
            [(vec![16], vec![512, 4096, 4096, 1]), (vec![16, 4096, 4096, 2048], vec![1])];
        assert_eq!(seen, expected, "{path:?} {packed} {tables:?}");
        let mut done: Vec<_> = queue.completions().map(|done| (done.ctx, done.data)).collect();
        done.sort_by_key(|&(ctx, _)| ctx);
        let lengths = done.into_iter().map(|(_, data)| {
            data.into_buffers().iter().map(|buffer| buffer.len()).collect::<Vec<_>>()
        });
        assert_eq!(lengths.collect::<Vec<_>>(), [vec![10_240], vec![512, 8192]]);
        // 14 is what a request may have at most here.
        let why = |rejected: Rejected<u32>| rejected.why;
        let refused = queue.read(0, buffer(14 * 4096 + 512), 3).map_err(why);
        assert_eq!(refused, Err(Refusal::TooManySegments { have: 15, max: 14 }));
        queue.read(0, buffer(14 * 4096), 4).map_err(why).unwrap();
    }
}

#[test]
fn what_was_not_negotiated_is_refused() {
    let (mut queue, rig) = rig::<&str>(false, 8, None);
    let (_other, foreign) = self::rig::<()>(false, 8, None);
    let rejected = queue.write_zeroes(0, 512, true, "z").unwrap_err();
    assert_eq!(rejected.why, Refusal::NotOffered("write zeroes (WRITE_ZEROES)"));
    let rejected = queue.read(0, foreign.pool().alloc(512).unwrap(), "f").unwrap_err();
    assert_eq!((rejected.why, rejected.ctx), (Refusal::ForeignBuffer, "f"));
    let rejected = queue.discard(0, 9 * 512, "d").unwrap_err();
    assert_eq!(rejected.why, Refusal::EraseTooLong { sectors: 9, max: 8 });
    assert_eq!(queue.discard(0, 0, "d").unwrap_err().why, Refusal::Empty);
    let mut buffer = rig.pool().alloc(512).unwrap();
    buffer.set_len(0);
    assert_eq!(queue.read(0, buffer, "e").unwrap_err().why, Refusal::Empty);
    let rejected = queue.get_id(rig.pool().alloc(21).unwrap(), "i").unwrap_err();
    assert_eq!(rejected.why, Refusal::IdBuffer(21));
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn a_hostile_device_ends_the_queue_and_nothing_else() {
    let (mut queue, rig) = rig::<u8>(false, 8, None);
    let pool = rig.pool();
    queue.read(0, pool.alloc(4096).unwrap(), 1).unwrap();
    queue.submit().unwrap();
    let idx = rig.memory.at(rig.used + 2);
    // SAFETY: the used index, aligned to 2 bytes.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        AtomicU16::from_ptr(idx.cast()).store(3, Ordering::Release);
    }
    assert!(matches!(queue.pop(), Err(Error::Device(DeviceFault::IndexJump { .. }))));
    assert!(queue.completions().next().is_none());
    assert!(matches!(queue.submit(), Err(Error::Device(_))));
    assert!(matches!(queue.wait(None), Err(Error::Device(_))));
    drop(queue);
    assert_eq!(pool.available(), (1 << 20) - 4096, "the device may still write to it");
}

#[test]
fn a_queue_given_up_hands_the_contexts_back() {
    let (mut queue, rig) = rig::<u8>(true, 8, None);
    for ctx in [4, 5] {
        queue.read(0, rig.pool().alloc(4096).unwrap(), ctx).unwrap();
    }
    assert_eq!(queue.abandon(), [4, 5]);
}

/// `cargo test --release -p ringway-driver -- --ignored --nocapture round_trips`: the front-end
/// against the device side of the ring alone, both polling on cores of their own.
#[test]
#[ignore = "a measurement"]
fn round_trips() {
    for (packed, tables) in shapes() {
        for depth in [1, 32, 128] {
            if tables.is_none() && depth > 85 {
                continue;
            }
            let (mut queue, mut rig) = rig::<()>(packed, 256, tables);
            let pool = rig.pool();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    pin(1);
                    while !stop.load(Ordering::Relaxed) {
                        if rig.serve(Some(0), None) == 0 {
                            std::hint::spin_loop();
                        }
                    }
                });
                pin(0);
                for _ in 0..depth {
                    queue.read(0, pool.alloc(4096).unwrap(), ()).unwrap();
                }
                // The best of some short runs: others may be using these CPUs.
                let (mut best, mut sector) = (0f64, 1u64);
                for _ in 0..20 {
                    let (begin, before) = (Instant::now(), queue.stats().completed);
                    while begin.elapsed() < Duration::from_millis(40) {
                        for _ in 0..500 {
                            assert!(queue.wait_polling(None).unwrap());
                            while let Some(done) = queue.pop().unwrap() {
                                sector = sector.wrapping_mul(0x5851_f42d_4c95_7f2d) >> 20;
                                let buffer = done.into_buffer().unwrap();
                                queue.read(sector << 12, buffer, ()).unwrap();
                            }
                        }
                    }
                    let count = (queue.stats().completed - before) as f64;
                    best = best.max(count / begin.elapsed().as_secs_f64());
                }
                println!("packed {packed} {tables:?} depth {depth}: {:.2} M/s", best / 1e6);
                queue.submit().unwrap();
                while queue.wait_polling(None).unwrap() {
                    queue.completions().for_each(drop);
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
}

/// `cargo test --release -p ringway-driver -- --ignored --nocapture one_thread`: both sides of the ring
/// in turn on one thread: what a request costs in code. The least of many short runs.
#[test]
#[ignore = "a measurement"]
fn one_thread() {
    for (packed, tables) in shapes() {
        for depth in [1u64, 32] {
            let (mut queue, mut rig) = rig::<u64>(packed, 256, tables);
            let pool = rig.pool();
            let mut free: Vec<_> = (0..depth).map(|_| pool.alloc(4096).unwrap()).collect();
            let mut best = f64::MAX;
            for _ in 0..400 {
                let begin = Instant::now();
                for round in 0..640 / depth {
                    while let Some(buffer) = free.pop() {
                        queue.read((round * 7919 % 1000) << 12, buffer, round).unwrap();
                    }
                    queue.submit().unwrap();
                    rig.serve(Some(0), None);
                    while let Some(done) = queue.pop().unwrap() {
                        free.push(done.into_buffer().unwrap());
                    }
                }
                best = best.min(begin.elapsed().as_nanos() as f64 / 640.0);
            }
            println!("packed {packed} {tables:?} depth {depth}: {best:.2} ns");
        }
    }
}

fn pin(cpu: usize) {
    // SAFETY: a cpu_set_t of zeroes is empty; the calls only touch it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}
