//! A verified guest of a disk that an NBD server has in `disk.img`, and words of servers.

use super::PATIENCE;
use super::guest::wait_for as until;
use ringway_driver::{BlkQueue, BufferPool, Device, Options};
use ringway_testkit::pattern;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BYTES: u64 = 8 * MIB;
/// Of a request of the verified guest.
pub(crate) const LEN: u64 = 32 << 10;
pub(crate) const REQUESTS: u64 = BYTES / LEN;
pub(crate) const DEPTH: u16 = 24;

pub(crate) fn image(dir: &Path) {
    std::fs::write(dir.join("disk.img"), vec![0; usize::try_from(BYTES).unwrap()]).unwrap();
}

pub(crate) fn connect(dir: &Path, queues: u16) -> Device {
    let options = Options::new().queues(queues).patience(PATIENCE).reconnect(PATIENCE);
    options.memory(8 << 20).connect(dir.join("s")).unwrap()
}

/// Writes a part of the disk, that of these requests, each with its own content, several at a time; then reads
/// it. `answered` counts. Every one has to succeed.
pub(crate) fn guest_of_part(
    (pool, queue): (&BufferPool, &mut BlkQueue<u64>),
    part: Range<u64>,
    sequence: u64,
    answered: &AtomicU64,
) {
    let len = usize::try_from(LEN).unwrap();
    for reads in [false, true] {
        let (mut next, mut done) = (part.start, part.start);
        while done < part.end {
            while next < part.end && queue.in_flight() < DEPTH {
                let Some(mut buffer) = pool.alloc(len) else { break };
                let queued = if reads {
                    queue.read(next * LEN, buffer, next)
                } else {
                    pattern::fill(&mut buffer, 1, next * LEN / 512, sequence);
                    queue.write(next * LEN, buffer, next)
                };
                queued.unwrap();
                next += 1;
            }
            assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer after {done} requests");
            while let Some(answer) = queue.pop().unwrap() {
                assert!(answer.is_ok(), "request {} failed: {:?}", answer.ctx, answer.status);
                if reads {
                    let mut expected = vec![0; len];
                    pattern::fill(&mut expected, 1, answer.ctx * LEN / 512, sequence);
                    let ctx = answer.ctx;
                    let found = answer.into_buffer().expect("what was read");
                    assert!(found[..] == expected[..], "request {ctx} reads something else");
                }
                done += 1;
                answered.fetch_add(1, SeqCst);
            }
        }
    }
}

pub(crate) fn is_flushed(queue: &mut BlkQueue<u64>) -> bool {
    queue.flush(0).unwrap();
    assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer to a flush");
    queue.pop().unwrap().unwrap().is_ok()
}

/// What the guest has written, at the server.
pub(crate) fn assert_written(dir: &Path, sequence: u64) {
    let bytes = std::fs::read(dir.join("disk.img")).unwrap();
    let mut expected = vec![0; bytes.len()];
    pattern::fill(&mut expected, 1, 0, sequence);
    assert!(bytes == expected, "the image is what the guest wrote");
}

/// A guest of so many queues, each with its part of the disk, for `rounds` at least and until `stop` is set;
/// whether flushes succeed then.
pub(crate) fn guest_of_queues(
    dir: &Path,
    queues: u16,
    (rounds, stop): (u64, &AtomicBool),
    answered: &AtomicU64,
) -> bool {
    let mut device = connect(dir, queues);
    let mut all = device.queues().unwrap();
    let pool = device.pool();
    let len = REQUESTS / u64::from(queues);
    let mut sequence = 0;
    while sequence < rounds || !stop.load(SeqCst) {
        sequence += 1;
        std::thread::scope(|scope| {
            for (at, queue) in (0..).zip(&mut all) {
                let pool = &pool;
                let part = at * len..(at + 1) * len;
                scope.spawn(move || guest_of_part((pool, queue), part, sequence, answered));
            }
        });
    }
    let flushed: Vec<bool> = all.iter_mut().map(is_flushed).collect();
    drop((all, device));
    assert_written(dir, sequence);
    assert!(flushed.iter().all(|one| *one == flushed[0]), "{flushed:?}");
    flushed[0]
}

pub(crate) fn goes_on(answered: &AtomicU64, by: u64) {
    let before = answered.load(SeqCst);
    until("the guest goes on", || answered.load(SeqCst) >= before + by);
}

pub(crate) const STORAGE: &str = "driver=file,node-name=d,filename=disk.img";
pub(crate) const LISTEN: &str = "addr.type=unix,addr.path=n.sock";
pub(crate) const EXPORT: &str = "type=nbd,id=e,node-name=d,name=d,writable=on";
