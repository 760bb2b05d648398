//! Each operation by itself: what it does, what it leaves alone, what it refuses.

use crate::scene::{DISK, Queue, Scene, answer, done, engines_and_caches, flush, read, write};
use ringway_disk::{CacheMode, EngineKind, Source};
use ringway_driver::{Options, Piece, Refusal, Status};
use ringway_testkit::pattern;
use ringway_testkit::rig::RigOptions;
use ringway_testkit::{Need, skip};
use std::os::unix::fs::MetadataExt;

const MIB: u64 = 1 << 20;

/// Bytes that the host holds for the image.
fn allocated(scene: &Scene) -> u64 {
    scene.image.metadata().expect("the image").blocks() * 512
}

/// Writes the whole disk, so that all its blocks are there.
fn fill(scene: &Scene, queue: &mut Queue, sequence: u64) {
    for at in (0..scene.device.capacity()).step_by(1 << 20) {
        let mut buffer = scene.buffer(1 << 20, 0);
        pattern::fill(&mut buffer, DISK, at / 512, sequence);
        write(queue, at, buffer);
    }
    flush(queue);
}

/// Which of the disk's bytes are zero, given that all others are those of `sequence`.
fn zeroed(scene: &Scene, sequence: u64) -> Vec<std::ops::Range<u64>> {
    let found = scene.found();
    let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
    for (sector, bytes) in (0..).zip(found.chunks(512)) {
        if bytes.iter().all(|&byte| byte == 0) {
            match ranges.last_mut() {
                Some(last) if last.end == sector * 512 => last.end += 512,
                _ => ranges.push(sector * 512..sector * 512 + 512),
            }
        } else {
            let wrong = pattern::first_difference(bytes, DISK, sector, sequence);
            assert_eq!(wrong, None, "sector {sector} is neither zero nor as it was");
        }
    }
    ranges
}

#[test]
fn discard_frees_blocks() {
    for (engine, cache) in engines_and_caches() {
        let mut scene = Scene::new(engine, cache, 4 * MIB, 1, &Options::new());
        if scene.device.info().max_discard_sectors.is_none() {
            skip(Need::Holes, scene.image.display());
            continue;
        }
        let mut queue = scene.queue();
        fill(&scene, &mut queue, 1);
        let before = allocated(&scene);
        assert!(before >= 4 * MIB);
        let queued = queue.discard(MIB, 2 * MIB, 0);
        assert_eq!(done(&mut queue, queued), Status::Ok);
        flush(&mut queue);
        if engine == EngineKind::LinuxAio {
            // It has no such operation: a discard is a hint and may do nothing.
            assert!(zeroed(&scene, 1).len() <= 1);
            continue;
        }
        let freed = before - allocated(&scene);
        assert!(freed >= 2 * MIB - 8192, "{engine}, {cache}: {freed} bytes freed");
        assert_eq!(zeroed(&scene, 1), vec![MIB..3 * MIB], "{engine}, {cache}");
        // Smaller than a block of the host: nothing is freed, nothing else is harmed.
        let queued = queue.discard(512, 1024, 0);
        assert_eq!(done(&mut queue, queued), Status::Ok);
        assert_eq!(scene.found().len() as u64, 4 * MIB, "the file stays as long as it was");
        assert_eq!(scene.counted().erases, 2);
    }
}

#[test]
fn write_zeroes_zeroes_exactly_and_honours_unmap() {
    for (engine, cache) in engines_and_caches() {
        for unmap in [false, true] {
            let mut scene = Scene::new(engine, cache, 4 * MIB, 1, &Options::new());
            let frees =
                scene.device.info().write_zeroes_may_unmap && engine != EngineKind::LinuxAio;
            let mut queue = scene.queue();
            fill(&scene, &mut queue, 1);
            let before = allocated(&scene);
            let ranges =
                [(0, 512), (1024, 3072), (MIB - 512, 2 * MIB + 1024), (4 * MIB - 512, 512)];
            for (offset, len) in ranges {
                let queued = queue.write_zeroes(offset, len, unmap, 0);
                assert_eq!(done(&mut queue, queued), Status::Ok);
            }
            flush(&mut queue);
            let expected = ranges.map(|(offset, len)| offset..offset + len);
            assert_eq!(zeroed(&scene, 1), expected, "{engine}, {cache}, unmap {unmap}");
            let after = allocated(&scene);
            if unmap && frees {
                let freed = before - after;
                assert!(freed >= 2 * MIB - 8192, "{engine}, {cache}: {freed} bytes freed");
            } else if !unmap {
                assert!(after >= 4 * MIB, "{engine}, {cache}: {after} bytes kept");
            }
            let buffer = read(&mut queue, MIB, scene.buffer(4096, 0));
            assert!(buffer.iter().all(|&byte| byte == 0));
        }
    }
}

#[test]
fn erasing_a_whole_gibibyte_is_one_request() {
    let mut scene = Scene::with(1 << 30, &Options::new(), |_| {});
    let mut queue = scene.queue();
    let buffer = scene.buffer(4096, 0);
    write(&mut queue, (1 << 30) - 4096, buffer);
    for unmap in [true, false] {
        let queued = queue.write_zeroes(0, 1 << 30, unmap, 0);
        assert_eq!(done(&mut queue, queued), Status::Ok);
    }
    let queued = queue.discard(0, 1 << 30, 0);
    assert_eq!(done(&mut queue, queued), Status::Ok);
    assert_eq!(scene.image.metadata().unwrap().len(), 1 << 30);
}

#[test]
fn get_id() {
    for (serial, bytes) in [
        ("RW-1", b"RW-1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        ("exactly twenty bytes", b"exactly twenty bytes"),
    ] {
        let mut scene =
            Scene::with(MIB, &Options::new(), |rig| rig.disk.serial = Some(serial.into()));
        let mut queue = scene.queue();
        let mut buffer = scene.buffer(20, 3);
        buffer.fill(0xee);
        queue.get_id(buffer, 7).unwrap();
        let done = answer(&mut queue);
        assert_eq!((done.status, done.ctx, done.used_len), (Status::Ok, 7, 21));
        assert_eq!(&*done.into_buffer().unwrap(), bytes);
    }
}

#[test]
fn nothing_lies_beyond_the_end() {
    for (engine, cache) in engines_and_caches() {
        let mut scene = Scene::new(engine, cache, MIB, 1, &Options::new());
        let mut queue = scene.queue();
        let buffer = write(&mut queue, MIB - 512, scene.buffer(512, 0));
        read(&mut queue, MIB - 512, buffer);
        for (offset, len) in [(MIB, 512), (MIB - 512, 1024), (u64::MAX - 511, 512), (1 << 62, 4096)]
        {
            let mut buffer = scene.buffer(len, 0);
            buffer.fill(0xee);
            let queued = queue.write(offset, buffer, 0);
            assert_eq!(done(&mut queue, queued), Status::IoError);
            let mut buffer = scene.buffer(len, 0);
            buffer.fill(0xee);
            queue.read(offset, buffer, 0).unwrap();
            let done_read = answer(&mut queue);
            assert_eq!((done_read.status, done_read.used_len), (Status::IoError, 1));
            let buffer = done_read.into_buffer().unwrap();
            assert!(buffer.iter().all(|&byte| byte == 0xee), "a refused read writes nothing");
            let queued = queue.write_zeroes(offset, len as u64, true, 0);
            assert_eq!(done(&mut queue, queued), Status::IoError);
            let queued = queue.discard(offset, len as u64, 0);
            assert_eq!(done(&mut queue, queued), Status::IoError);
        }
        assert_eq!(scene.image.metadata().unwrap().len(), MIB, "the file has not grown");
        // Those that no 64 bits hold are refused before they get to the disk, and counted all the same.
        assert_eq!(scene.counted().errors, 16);
        let buffer = scene.buffer(512, 0);
        read(&mut queue, 0, buffer);
    }
}

const OUT: u32 = 1;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// The front-end would not ask for it, so the chains are made by hand.
#[test]
fn a_read_only_disk_refuses_to_change() {
    for null in [false, true] {
        let mut scene = Scene::with(MIB, &Options::new(), |rig| {
            if null {
                let source = Source::Null { bytes: MIB, latency_us: 0 };
                *rig = RigOptions::new(source, EngineKind::Null);
            }
            rig.disk.read_only = true;
        });
        let info = scene.device.info();
        assert!(info.read_only);
        assert_eq!((info.max_discard_sectors, info.max_write_zeroes_sectors), (None, None));
        let mut queue = scene.queue();
        assert_eq!(
            queue.discard(0, 512, 0).unwrap_err().why,
            Refusal::NotOffered("discard (DISCARD)")
        );
        for kind in [OUT, DISCARD, WRITE_ZEROES] {
            let mut page = scene.buffer(4096, 0);
            page.fill(0);
            page[..4].copy_from_slice(&kind.to_le_bytes());
            // One sector from sector 0, for the two that erase.
            page[24] = 1;
            page[4095] = 0xee;
            let at = page.guest_address();
            let len = if kind == OUT { 512 } else { 16 };
            let readable = [Piece { addr: at, len: 16 }, Piece { addr: at + 16, len }];
            let writable = [Piece { addr: at + 4095, len: 1 }];
            // SAFETY: the page is kept until the answer is here.
            unsafe { queue.raw(&readable, &writable, &raw const page[4095], 0) }.unwrap();
            let done = answer(&mut queue);
            assert_eq!((done.status, done.used_len), (Status::IoError, 1), "request {kind}");
        }
        let buffer = scene.buffer(4096, 0);
        read(&mut queue, 0, buffer);
        flush(&mut queue);
        assert_eq!(scene.found(), vec![0; 1 << 20]);
    }
}

#[test]
fn counters_tell_what_was_done() {
    let mut scene =
        Scene::with(MIB, &Options::new(), |rig| rig.disk.cache = Some(CacheMode::Writeback));
    let mut queue = scene.queue();
    let buffer = write(&mut queue, 0, scene.buffer(4096, 0));
    read(&mut queue, 0, buffer);
    let buffer = scene.buffer(1024, 0);
    read(&mut queue, 0, buffer);
    flush(&mut queue);
    let queued = queue.write_zeroes(0, 512, false, 0);
    done(&mut queue, queued);
    let c = scene.counted();
    assert_eq!((c.reads, c.writes, c.flushes, c.erases, c.errors), (2, 1, 1, 1, 0));
    assert_eq!((c.read_bytes, c.written_bytes), (5120, 4096));
}
