//! What the device says about itself, and how clients come and go.

use crate::scene::{DISK, Queue, Scene, engines_and_caches, flush, read, write};
use ringway_disk::{CacheMode, EngineKind};
use ringway_driver::{Error, Options};
use ringway_testkit::pattern;
use ringway_testkit::raw::{RawClient, halves, request};

const MIB: u64 = 1 << 20;

#[test]
fn configuration_space_tells_the_truth() {
    for (engine, cache) in engines_and_caches() {
        let front = Options::new().queues(3);
        let scene = Scene::new(engine, cache, 100 * MIB + 512 * 8, 4, &front);
        let info = scene.device.info();
        assert_eq!(info.capacity, 100 * MIB + 4096);
        assert_eq!((info.block_size, info.num_queues, scene.device.server_queues()), (512, 4, 4));
        assert!(info.physical_block >= 512 && info.physical_block.is_power_of_two());
        assert_eq!((info.size_max, info.seg_max), (Some(4 << 20), Some(126)));
        assert!(info.flush && !info.read_only);
        assert_eq!(info.writeback, cache != CacheMode::Writethrough, "{cache}");
        assert!(info.max_write_zeroes_sectors.is_some_and(|max| max >= 1 << 20));
        assert_eq!(info.max_discard_sectors.is_some(), info.write_zeroes_may_unmap);
    }
}

#[test]
fn block_size_as_asked() {
    for block in [512, 4096] {
        let scene = Scene::with(MIB, &Options::new(), |rig| rig.disk.block_size = Some(block));
        assert_eq!(scene.device.block_size(), block);
        assert!(scene.device.info().physical_block >= block);
    }
}

/// The fields that the front-end does not look at, byte by byte (VIRTIO 1.2 §5.2.4).
#[test]
fn geometry_and_topology_on_the_wire() {
    let mut scene =
        Scene::with(100 * MIB, &Options::new().queue_size(64), |rig| rig.queue_size = 64);
    let client = RawClient::new(scene.rig.connect());
    let space = |offset: u32, size: u32| {
        let mut payload = halves(&[offset, size, 0]);
        payload.resize(12 + size as usize, 0);
        client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
        let (code, answer) = client.receive().unwrap();
        assert_eq!((code, answer.len()), (request::GET_CONFIG, 12 + size as usize));
        answer[12..].to_vec()
    };
    let all = space(0, 60);
    let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(all[at..at + 2].try_into().unwrap());
    assert_eq!(u64::from(word(0)), 100 * MIB / 512);
    assert_eq!(word(12), 62, "a chain fits the ring");
    let (cylinders, heads, sectors) = (u64::from(half(16)), u64::from(all[18]), u64::from(all[19]));
    let chs = cylinders * heads * sectors;
    assert!(heads > 0 && sectors > 0 && chs <= 204_800 && chs > 200_000, "{chs} sectors by CHS");
    assert_eq!(word(20), 512);
    assert_eq!((all[24], all[25], half(26)), (3, 0, 8), "blocks of 4096 on the host");
    assert_eq!(all[32], 1, "write-back");
    assert_eq!(half(34), 1, "queues");
    assert_eq!((word(40), word(52)), (1, 1), "one range per request");
    // Any part of it reads as the whole does.
    for (offset, size) in [(0, 8), (20, 4), (32, 1), (34, 2), (59, 1)] {
        assert_eq!(space(offset, size), all[offset as usize..(offset + size) as usize]);
    }
    assert_eq!(space(60, 100), vec![0; 100], "what is not there reads zero");
}

#[test]
fn more_queues_than_there_are() {
    let mut scene =
        Scene::with(MIB, &Options::new().queues(2), |rig| (rig.queues, rig.workers) = (2, 1));
    let error = Options::new().queues(3).over(scene.rig.connect()).unwrap_err();
    assert!(matches!(error, Error::TooManyQueues { wanted: 3, max: 2 }), "{error}");
    let error = Options::new().queue_size(2048).over(scene.rig.connect()).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "a ring larger than offered: {error}");
    let all = Options::new().queues(0).over(scene.rig.connect()).unwrap();
    assert_eq!(all.info().num_queues, 2);
}

/// Stops in the middle of the work and connects again, with indices that go on where they were.
#[test]
fn reconnect_after_a_clean_disconnect() {
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        if !crate::scene::works(engine, CacheMode::Writeback) {
            continue;
        }
        let front = Options::new().queues(2).queue_size(16).first_index(65530);
        let mut scene = Scene::new(engine, CacheMode::Writeback, MIB, 2, &front);
        let mut queues: Vec<Queue> = scene.device.queues().unwrap();
        for sequence in 1..=5 {
            for (n, queue) in queues.iter_mut().enumerate() {
                let sector = 64 * n as u64;
                let mut buffer = scene.buffer(8192, 0);
                pattern::fill(&mut buffer, DISK, sector, sequence);
                // Queued and shown, but not waited for: stopping drains it.
                queue.write(sector * 512, buffer, sequence).unwrap();
                queue.submit().unwrap();
            }
            scene.device.stop().unwrap();
            assert!(!scene.device.is_connected());
            for queue in &mut queues {
                let mut popped = Vec::new();
                while let Some(done) = queue.pop().unwrap() {
                    assert!(done.is_ok());
                    popped.push(done.ctx);
                }
                // Stopped before it was taken: it is carried out after the next start.
                assert!(popped.len() + usize::from(queue.in_flight()) == 1, "{popped:?}");
            }
            let stream = scene.rig.connect();
            scene.device.reconnect_over(stream).unwrap();
            for (n, queue) in queues.iter_mut().enumerate() {
                while queue.in_flight() > 0 {
                    assert!(queue.wait(Some(crate::scene::PATIENCE)).unwrap(), "lost");
                    assert!(queue.completions().all(|done| done.is_ok()));
                }
                let sector = 64 * n as u64;
                let buffer = read(queue, sector * 512, scene.buffer(8192, 0));
                assert_eq!(pattern::first_difference(&buffer, DISK, sector, sequence), None);
            }
        }
        flush(&mut queues[0]);
    }
}

/// What one client wrote the next one reads; a reset in between changes nothing.
#[test]
fn one_client_after_the_other() {
    let mut scene = Scene::with(MIB, &Options::new(), |_| {});
    let mut queue = scene.queue();
    let mut buffer = scene.buffer(4096, 0);
    pattern::fill(&mut buffer, DISK, 8, 1);
    write(&mut queue, 4096, buffer);
    drop(queue);
    for sequence in 1..=4 {
        let stream = scene.rig.connect();
        let next = Options::new().regions(2).first_index(9).over(stream).unwrap();
        let last = std::mem::replace(&mut scene.device, next);
        if sequence % 2 == 0 {
            last.reset().unwrap();
        } else {
            drop(last);
        }
        let mut queue = scene.queue();
        let buffer = read(&mut queue, 4096, scene.buffer(4096, 0));
        assert_eq!(pattern::first_difference(&buffer, DISK, 8, sequence), None);
        let mut buffer = buffer;
        pattern::fill(&mut buffer, DISK, 8, sequence + 1);
        write(&mut queue, 4096, buffer);
    }
}
