//! Which writes are durable when they complete. Files through the page cache only: the kernel tells
//! how many of their pages still wait to be written (cachestat).

use crate::scene::{Scene, done, flush, write};
use ringway_disk::{CacheMode, EngineKind};
use ringway_driver::{Options, Status};
use ringway_testkit::raw::{DATA, F_FLUSH, F_VERSION_1, RawGuest, halves, request};
use ringway_testkit::{Need, skip};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// `struct cachestat`, Linux 6.5.
#[repr(C)]
#[derive(Debug, Default)]
struct CacheStat {
    cache: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Its number, the same on all machines.
const SYS_CACHESTAT: libc::c_long = 451;

/// Pages of the image that are not on the disk yet.
fn dirty(scene: &Scene) -> Result<u64, String> {
    let file = File::open(&scene.image).expect("the image");
    let (range, mut stat) = ([0u64, 0], CacheStat::default());
    // SAFETY: both structs are ours and of the kernel's shape; a length of 0 means all of the file.
    let rc =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), &raw mut stat, 0) };
    if rc < 0 {
        return Err(format!("cachestat: {}", std::io::Error::last_os_error()));
    }
    Ok(stat.dirty + stat.writeback)
}

/// `Err` if this host would not show a write that is not durable.
fn shows_dirty_pages() -> Result<(), String> {
    let mut scene = Scene::with(1 << 20, &Options::new(), |_| {});
    let mut queue = scene.queue();
    dirty(&scene)?;
    if leaves_pages_dirty(|| left_by_a_write(&scene, &mut queue)) {
        Ok(())
    } else {
        Err("the file system does not show dirty pages".into())
    }
}

/// The most pages that one of three writes of 8 KiB left dirty: 0 if they are durable.
fn after_a_write(scene: &Scene, queue: &mut crate::scene::Queue) -> u64 {
    (0..3).map(|_| left_by_a_write(scene, queue)).max().unwrap_or(0)
}

fn left_by_a_write(scene: &Scene, queue: &mut crate::scene::Queue) -> u64 {
    let mut buffer = scene.buffer(8192, 0);
    buffer.fill(1);
    write(queue, 4096, buffer);
    dirty(scene).unwrap()
}

/// Whether a write of 8 KiB leaves its two pages dirty. The host may write them at any moment (a
/// neighbour's fsync makes ext4 commit, and that writes what others have appended), so one attempt
/// of many is enough; a write that is durable leaves none in any of them.
fn leaves_pages_dirty(mut left_by_a_write: impl FnMut() -> u64) -> bool {
    (0..200).any(|attempt| {
        std::thread::sleep(Duration::from_millis(u64::from(attempt > 2) * 20));
        left_by_a_write() == 2
    })
}

const FLUSH: u64 = 1 << 9;
const BASIC: u64 = F_VERSION_1 | F_FLUSH;
const F_CONFIG_WCE: u64 = 1 << 11;

#[test]
fn c06_writes_are_durable_when_they_have_to_be() {
    if let Err(why) = shows_dirty_pages() {
        return skip(Need::DirtyPages, why);
    }
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        if !crate::scene::works(engine, CacheMode::Writeback) {
            continue;
        }
        let scene = |cache, front: Options| Scene::new(engine, cache, 1 << 20, 1, &front);

        // Write-back: durable after a flush, not before.
        let mut s = scene(CacheMode::Writeback, Options::new());
        let mut queue = s.queue();
        assert!(s.device.info().writeback);
        assert!(leaves_pages_dirty(|| left_by_a_write(&s, &mut queue)), "{engine}: write-back");
        flush(&mut queue);
        assert_eq!(dirty(&s), Ok(0), "{engine}: a flush makes durable");
        // The guest switches the cache off, and on again.
        after_a_write(&s, &mut queue);
        s.device.set_writeback(false).unwrap();
        assert!(!s.device.info().writeback);
        assert_eq!(dirty(&s), Ok(0), "{engine}: nobody will flush what was written before");
        assert_eq!(after_a_write(&s, &mut queue), 0, "{engine}: WCE off");
        let queued = queue.write_zeroes(0, 4096, false, 0);
        assert_eq!(done(&mut queue, queued), Status::Ok);
        assert_eq!(dirty(&s), Ok(0));
        s.device.set_writeback(true).unwrap();
        assert!(s.device.info().writeback);
        assert!(leaves_pages_dirty(|| left_by_a_write(&s, &mut queue)), "{engine}: WCE on");

        // Write-through: always durable, and the guest cannot change that.
        let mut s = scene(CacheMode::Writethrough, Options::new());
        let mut queue = s.queue();
        assert!(!s.device.info().writeback);
        assert_eq!(after_a_write(&s, &mut queue), 0);
        s.device.set_writeback(true).unwrap();
        assert!(!s.device.info().writeback, "the truth");
        assert_eq!(after_a_write(&s, &mut queue), 0);

        // A guest that cannot flush: every write is durable (VIRTIO 1.2 §5.2.6.2).
        let mut s = scene(CacheMode::Writeback, Options::new().without_features(FLUSH));
        let mut queue = s.queue();
        assert_eq!(after_a_write(&s, &mut queue), 0, "{engine}: without FLUSH");

        // Unsafe: not even a flush.
        let mut s = scene(CacheMode::Unsafe, Options::new());
        let mut queue = s.queue();
        assert!(s.device.info().writeback);
        let after_a_flush = || {
            left_by_a_write(&s, &mut queue);
            flush(&mut queue);
            dirty(&s).unwrap()
        };
        assert!(leaves_pages_dirty(after_a_flush), "{engine}: unsafe does not sync");
    }
}

/// A flush over one queue covers the writes completed over another, on another worker.
#[test]
fn c05_a_flush_covers_all_queues() {
    if let Err(why) = shows_dirty_pages() {
        return skip(Need::DirtyPages, why);
    }
    let front = Options::new().queues(3);
    let mut scene = Scene::new(EngineKind::Threads, CacheMode::Writeback, 1 << 20, 3, &front);
    let mut queues: Vec<crate::scene::Queue> = scene.device.queues().unwrap();
    let (mut round, mut were_dirty) = (0, false);
    // The host may write them at any moment, as above.
    while round < 20 || (!were_dirty && round < 200) {
        std::thread::sleep(Duration::from_millis(u64::from(round >= 20) * 20));
        for (n, queue) in queues.iter_mut().enumerate() {
            write(queue, n as u64 * 65536, scene.buffer(4096, 0));
        }
        were_dirty |= dirty(&scene) == Ok(3);
        flush(&mut queues[round % 3]);
        assert_eq!(dirty(&scene), Ok(0));
        round += 1;
    }
    assert!(were_dirty, "no write of {round} rounds was left to a flush");
}

/// A guest that has switched its write cache off flushes no more. It does not learn that its
/// front-end reconnects, and QEMU does not say it again: the back-end has to remember, until the
/// device is reset and somebody new asks.
#[test]
fn c06_a_write_cache_that_is_off_stays_off_over_a_reconnect() {
    if let Err(why) = shows_dirty_pages() {
        return skip(Need::DirtyPages, why);
    }
    let mut scene = Scene::with(1 << 20, &Options::new(), |_| {});
    let mut queue = scene.queue();
    scene.device.set_writeback(false).unwrap();
    assert_eq!(after_a_write(&scene, &mut queue), 0);
    for _ in 0..3 {
        let stream = scene.rig.connect();
        scene.device.reconnect_over(stream).unwrap();
        assert!(!scene.device.info().writeback, "the truth");
        assert_eq!(after_a_write(&scene, &mut queue), 0, "forgotten by a reconnect");
    }
    // One that does not ask, as QEMU when it reconnects; and its switch is on its way back, too.
    scene.device.stop().unwrap();
    let mut guest = RawGuest::start(scene.rig.connect(), 1, 64, BASIC | F_CONFIG_WCE);
    let raw_write = |scene: &Scene, guest: &mut RawGuest| {
        assert_eq!(guest.simple(0, 1, 8, DATA, 8192).0, 0);
        dirty(scene).unwrap()
    };
    assert_eq!((0..3).map(|_| raw_write(&scene, &mut guest)).max(), Some(0));
    let mut on = halves(&[32, 1, 0]);
    on.push(1);
    assert!(guest.client.acked(request::SET_CONFIG, &on, &[]).unwrap());
    assert!(leaves_pages_dirty(|| raw_write(&scene, &mut guest)), "on again");
    on[12] = 0;
    assert!(guest.client.acked(request::SET_CONFIG, &on, &[]).unwrap());
    assert!(guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap());
    drop(guest);
    // A daemon has one after the other.
    scene.rig.join_some();
    let stream = scene.rig.connect();
    scene.device = Options::new().over(stream).unwrap();
    assert!(scene.device.info().writeback, "a reset begins anew");
    let mut queue = scene.queue();
    assert!(leaves_pages_dirty(|| left_by_a_write(&scene, &mut queue)), "after a reset");
}
