//! The same script through two drivers: the `virtio-driver` crate's, which knows nothing of ours, and
//! our own. Both formats, with and without EVENT_IDX, polling and sleeping: every read and the disk
//! at the end must be the same.

use ringway_core::mem::Mapping;
use ringway_disk::EngineKind;
use ringway_driver::{BlkQueue, BufferPool, Data, Options};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Rng, pattern};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkQueue, VirtioBlkReqBuf, VirtioFeatureFlags as Feature,
    VirtioTransport, iovec,
};

const CAPACITY: u64 = 4 << 20;
/// The disk in parts: requests in flight together never touch the same one.
const PART: usize = 32 << 10;
const PARTS: u64 = CAPACITY / PART as u64;
/// Five descriptors each at most: they fit in the smaller ring.
const DEPTH: usize = 6;

#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    event_idx: bool,
    size: u16,
    sleep: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write(u64),
    Zero,
    Flush,
}

/// One request: what, where, and its buffers' lengths.
#[derive(Clone, Debug)]
struct Op {
    kind: Kind,
    offset: u64,
    lens: Vec<usize>,
}

impl Op {
    fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    /// What a write writes.
    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.len()];
        if let Kind::Write(sequence) = self.kind {
            pattern::fill(&mut content, 7, self.offset / 512, sequence);
        }
        content
    }
}

/// Batches of requests that do not touch each other.
fn script(rng: &mut Rng) -> Vec<Vec<Op>> {
    let mut sequence = 0;
    let mut op = |part: u64| {
        sequence += 1;
        let kind = match rng.below(8) {
            0..=2 => Kind::Write(sequence),
            3 => Kind::Zero,
            4 => Kind::Flush,
            _ => Kind::Read,
        };
        let pieces = rng.below(3) + 1;
        let lens = (0..pieces).map(|_| 512 * usize::try_from(rng.below(16) + 1).unwrap()).collect();
        Op { kind, offset: part * PART as u64 + 512 * rng.below(16), lens }
    };
    let mut batch =
        |n: u64| (0..1 + n % DEPTH as u64).map(|i| op((n * 7 + i * 11) % PARTS)).collect();
    (0..200).map(&mut batch).collect()
}

/// What came of a script: what each read read.
type Reads = Vec<Vec<u8>>;

fn rig(folder: &Path, shape: Shape) -> Rig {
    let path = image(folder, CAPACITY);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.queue_size = shape.size.max(64);
    let mut rig = Rig::start(&options);
    rig.listen(&folder.join("v.sock"));
    rig
}

/// Their driver.
fn theirs(folder: &Path, script: &[Vec<Op>], shape: Shape) -> Reads {
    let mut rig = rig(folder, shape);
    let mut features = Feature::VERSION_1;
    features.set(Feature::RING_PACKED, shape.packed);
    features.set(Feature::RING_EVENT_IDX, shape.event_idx);
    let socket = folder.join("v.sock");
    // FLUSH and WRITE_ZEROES.
    let wanted = features.bits() | 1 << 9 | 1 << 14;
    let mut transport: VhostUser<VirtioBlkConfig, VirtioBlkReqBuf> =
        VhostUser::new(socket.to_str().unwrap(), wanted).unwrap();
    let got = Feature::from_bits_truncate(transport.get_features());
    assert_eq!(got.contains(Feature::RING_PACKED), shape.packed, "what was asked for is offered");
    let mut queue = VirtioBlkQueue::setup_queues(&mut transport, 1, shape.size).unwrap().remove(0);
    let memory = File::from(memfd_create("buffers", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&memory, (DEPTH * PART) as u64).unwrap();
    let buffers = Mapping::of_file(&memory, 0, (DEPTH * PART) as u64).unwrap();
    let at = buffers.at(0) as usize;
    transport.map_mem_region(at, buffers.len(), memory.as_raw_fd(), 0).unwrap();
    let kick = transport.get_submission_notifier(0);
    let call = transport.get_completion_fd(0);

    let mut reads = Vec::new();
    for batch in script {
        for (slot, op) in batch.iter().enumerate() {
            let base = buffers.at(slot * PART);
            let content = op.content();
            // SAFETY: a slot holds the longest request, and nothing is in flight in it.
            unsafe { base.copy_from_nonoverlapping(content.as_ptr(), content.len()) };
            let mut at = 0;
            let pieces: Vec<iovec> = op
                .lens
                .iter()
                .map(|&len| {
                    at += len;
                    iovec { iov_base: base.wrapping_add(at - len).cast(), iov_len: len }
                })
                .collect();
            let (pieces, count) = (pieces.as_ptr(), pieces.len());
            // SAFETY: the pieces lie in the slot, which belongs to this request.
            let queued = unsafe {
                match op.kind {
                    Kind::Read => queue.readv(op.offset, pieces, count, slot),
                    Kind::Write(_) => queue.writev(op.offset, pieces, count, slot),
                    Kind::Zero => queue.write_zeroes(op.offset, op.len() as u64, true, slot),
                    Kind::Flush => queue.flush(slot),
                }
            };
            queued.unwrap();
        }
        if queue.avail_notif_needed() {
            kick.notify().unwrap();
        }
        let mut left = batch.len();
        while left > 0 {
            queue.set_used_notif_enabled(shape.sleep);
            // Their split ring without EVENT_IDX leaves it to the caller.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            if shape.sleep && !queue.completions().has_next() {
                // SAFETY: the transport keeps it open.
                let call = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
                let mut fds = [PollFd::new(&call, PollFlags::IN)];
                let woken =
                    poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 }));
                assert_eq!(woken, Ok(1), "a lost call");
                let _ = rustix::io::read(call, &mut [0; 8]);
            }
            for done in queue.completions() {
                assert_eq!(done.ret, 0, "{:?}", batch[done.context]);
                left -= 1;
            }
        }
        for (slot, op) in batch.iter().enumerate() {
            if matches!(op.kind, Kind::Read) {
                let mut read = vec![0; op.len()];
                // SAFETY: as above; the request is done.
                unsafe {
                    buffers.at(slot * PART).copy_to_nonoverlapping(read.as_mut_ptr(), read.len())
                };
                reads.push(read);
            }
        }
    }
    drop((queue, transport));
    rig.join_sessions();
    reads
}

fn queue_one(queue: &mut BlkQueue<usize>, pool: &BufferPool, op: &Op, slot: usize) {
    let content = op.content();
    let mut at = 0;
    let buffers = op.lens.iter().map(|&len| {
        let mut buffer = pool.alloc(len).unwrap();
        buffer.copy_from_slice(&content[at..at + len]);
        at += len;
        buffer
    });
    let queued = match op.kind {
        Kind::Read => queue.read_vectored(op.offset, buffers.collect(), slot),
        Kind::Write(_) => queue.write_vectored(op.offset, buffers.collect(), slot),
        Kind::Zero => queue.write_zeroes(op.offset, op.len() as u64, true, slot),
        Kind::Flush => queue.flush(slot),
    };
    queued.map_err(|e| e.why).unwrap();
}

/// Our driver.
fn ours(folder: &Path, script: &[Vec<Op>], shape: Shape) -> Reads {
    let mut rig = rig(folder, shape);
    let mut device = Options::new()
        .packed(shape.packed)
        .event_idx(shape.event_idx)
        .queue_size(shape.size)
        .first_index(65530)
        .connect(folder.join("v.sock"))
        .unwrap();
    let mut queue = device.queue::<usize>().unwrap();
    let pool = device.pool();
    let mut reads = Vec::new();
    for batch in script {
        for (slot, op) in batch.iter().enumerate() {
            queue_one(&mut queue, &pool, op, slot);
        }
        let mut got: Vec<_> = batch.iter().map(|_| Data::None).collect();
        let mut left = batch.len();
        while left > 0 {
            let woken = if shape.sleep { queue.wait(None) } else { queue.wait_polling(None) };
            assert!(woken.unwrap());
            for done in queue.completions() {
                assert!(done.is_ok(), "{:?}", batch[done.ctx]);
                got[done.ctx] = done.data;
                left -= 1;
            }
        }
        for (op, data) in batch.iter().zip(got) {
            if matches!(op.kind, Kind::Read) {
                let buffers = data.into_buffers();
                reads.push(buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect());
            }
        }
    }
    drop((queue, device));
    rig.join_sessions();
    reads
}

#[test]
fn two_drivers_see_the_same_disk() {
    let mut rng = Rng::for_test("two_drivers_see_the_same_disk");
    for packed in [false, true] {
        for (event_idx, sleep) in [(false, false), (false, true), (true, false), (true, true)] {
            for size in if packed { [32, 61] } else { [32, 64] } {
                let shape = Shape { packed, event_idx, size, sleep };
                println!("{shape:?}");
                let script = script(&mut rng);
                let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
                let one = theirs(folders[0].path(), &script, shape);
                let other = ours(folders[1].path(), &script, shape);
                assert_eq!(one.len(), other.len());
                let difference = one.iter().zip(&other).position(|(a, b)| a != b);
                assert_eq!(difference, None, "a read differs, {shape:?}");
                let disks =
                    folders.each_ref().map(|folder| std::fs::read(folder.path().join("disk.img")));
                let [a, b] = disks.map(Result::unwrap);
                assert!(a == b, "the disks differ, {shape:?}");
                assert!(a.iter().any(|&byte| byte != 0));
            }
        }
    }
}

/// Where a stopped queue goes on is a word of 32 bits on packed rings: both indices, both counters.
#[test]
fn a_queue_goes_on_where_it_stopped() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path(), CAPACITY);
        let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
        let options = Options::new().packed(packed).queue_size(16).first_index(65530);
        let mut device = options.over(rig.connect()).unwrap();
        let mut queue = device.queue::<u64>().unwrap();
        for round in 1..40u64 {
            let offset = round % 8 * 512;
            let mut buffer = device.pool().alloc(512).unwrap();
            buffer.fill(u8::try_from(round).unwrap());
            queue.write(offset, buffer, round).map_err(|e| e.why).unwrap();
            // What is in flight when the queue stops can still be popped.
            queue.submit().unwrap();
            device.stop().unwrap();
            let left: Vec<_> = queue.completions().map(|done| (done.ctx, done.is_ok())).collect();
            device.reconnect_over(rig.connect()).unwrap();
            if left.is_empty() {
                assert!(queue.wait(None).unwrap());
                assert!(queue.pop().unwrap().unwrap().is_ok());
            } else {
                assert_eq!(left, [(round, true)]);
            }
            let buffer = device.pool().alloc(512).unwrap();
            queue.read(offset, buffer, 0).map_err(|e| e.why).unwrap();
            assert!(queue.wait(None).unwrap());
            let read = queue.pop().unwrap().unwrap().into_buffer().unwrap();
            assert!(read.iter().all(|&byte| u64::from(byte) == round), "packed {packed}");
        }
    }
}
