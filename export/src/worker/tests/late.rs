//! Answers that no operation of the engine brings.

use super::*;
use ringway_aio::{Engine, Reaped};
use ringway_core::{ByteRange, Segment};
use ringway_disk::{Alignment, CustomDisk, DiskQueue};

/// A discard of a part of a block waits for a write of another worker to the same block, and is answered
/// without an operation when its turn comes. That may be in the very turn in which its queue, of which
/// nothing has been heard for so long, would go back to waiting for its doorbell.
#[test]
fn c08_an_answer_is_not_forgotten_with_the_queue_that_goes_to_rest() {
    let blocks = Alignment { memory: 512, offset: 4096 };
    let disk = CustomDisk { alignment: blocks, block_device: true, ..CustomDisk::new(1 << 20) };
    let disk = Arc::new(disk.open(None).unwrap());

    // The other worker's queue, by hand.
    let mut engine = Null::new(4).unwrap();
    let file = engine.attach(&disk.file()).unwrap();
    let limits = engine.limits().clone();
    let mut writer = DiskQueue::<()>::new(Arc::clone(&disk), &limits, file, 0, 4).unwrap();
    let mut data = [0u8; 512];
    let mut reaped = Reaped::default();

    let (handle, worker) = worker();
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let (asked, answered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let queue = Silent {
        op: Op::Discard,
        kick: Arc::clone(&kick),
        asked: Arc::clone(&asked),
        answered: Arc::clone(&answered),
    };
    handle.add(queue, disk, false, Box::new(|_| {})).unwrap();
    let sleeps = || handle.stats().unwrap().sleeps;
    for round in 1..=200 {
        let tag = writer.acquire().unwrap();
        let request = writer.request_mut(tag);
        request.op = Op::Write;
        request.range = ByteRange::new(512, 512).unwrap();
        request.segments.clear();
        assert!(request.segments.push(Segment { base: data.as_mut_ptr(), len: 512 }));
        // SAFETY: data outlives the write, which ends below.
        unsafe { writer.start(&mut engine, tag, ()) };

        asked.store(1, SeqCst);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        // The queue gives up after 16 of these, and asks whether it may rest.
        let enough = sleeps() + 5 + u64::from(round) % 23;
        while sleeps() < enough {
            std::thread::yield_now();
        }
        assert_eq!(answered.load(SeqCst), round - 1, "the block is being written");

        let mut written = false;
        while !written {
            engine.submit().unwrap();
            reaped.clear();
            engine.reap(&mut reaped);
            for done in &reaped.done {
                let slot = u16::try_from(done.tag).unwrap();
                written |= writer.finish(&mut engine, slot, done.result).is_some();
            }
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while answered.load(SeqCst) < round && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(answered.load(SeqCst), round, "an answer waits for a kick that need not come");
    }
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}
