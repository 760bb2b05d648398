//! What fails: clusters of one batch, which are written by several threads where direct I/O is used, and syncs.

use crate::disk::{Change, TestDisk, layers};
use crate::matrix::{checked, same};
use crate::qemu;
use crate::record::{Event, Fault, NO_THREAD, Record, fail_next_sync};
use ringway_core::Op;
use ringway_image::{Format, Image, NewImage, Use, write_tables_again};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const CLUSTER: usize = 65536;
const BYTES: usize = 64 * CLUSTER;

/// What cannot be written has this byte.
const BAD: u8 = 0xee;

fn write(at: usize, byte: u8) -> Change {
    Change { op: Op::Write, at: at as u64, bytes: vec![byte; 512] }
}

/// What cannot be written fails the requests of its cluster, and those alone. Its cluster holds what it did,
/// and can be written later.
#[test]
fn c03_a_cluster_that_cannot_be_written_fails_its_requests_alone() {
    for (unit, backed) in [(1, false), (1, true), (512, false), (512, true)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.qcow2");
        let mut model = vec![0; BYTES];
        if backed {
            model.fill(0x5a);
            std::fs::write(folder.path().join("base.raw"), &model).unwrap();
        }
        let backing = backed.then_some((Path::new("base.raw"), Format::Raw));
        let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing };
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        new.write(&file).unwrap();
        let mut disk = TestDisk::open_in_units(&path, false, unit);
        let fault = Fault::of(&file, BAD);
        // Two for each of sixteen clusters; one of those of the fifth cannot be written.
        let mut changes: Vec<_> = (0..32_u8)
            .map(|nth| {
                let at = usize::from(nth % 16) * CLUSTER + 1024 * usize::from(nth / 16);
                write(at, if nth == 5 { BAD } else { nth + 1 })
            })
            .collect();
        let results = disk.try_change(&mut changes);
        for (nth, (change, result)) in changes.iter().zip(&results).enumerate() {
            let (at, is_bad) = (usize::try_from(change.at).unwrap(), nth == 5);
            assert!(!is_bad || *result == -i64::from(libc::EIO), "{unit} {backed}: {result}");
            // What came with it may have failed with it.
            assert!(nth == 5 || nth == 21 || *result == 0, "{unit} {backed} {nth}: {result}");
            if *result == 0 {
                model[at..at + 512].copy_from_slice(&change.bytes);
            }
        }
        same(&disk.read(0, BYTES), &model, 0);
        drop(fault);
        disk.change(&mut [write(5 * CLUSTER, BAD)]);
        model[5 * CLUSTER..5 * CLUSTER + 512].fill(BAD);
        same(&disk.read(0, BYTES), &model, 0);
        drop(disk);
        checked(&path);
        if qemu::is_here() {
            qemu::check(&path, false);
            same(&qemu::content(&path, None), &model, 0);
        }
    }
}

/// The host tells of a lost write once. If it tells the image's thread, guests have to learn of it by their next
/// flush, and the image is not given away.
#[test]
fn c04_a_sync_of_the_images_thread_that_fails_is_not_forgotten() {
    // The first write needs a reserve of clusters; a discard gives some back half a second later.
    for gives_back in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.qcow2");
        let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing: None };
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        new.write(&file).unwrap();
        let mut disk = TestDisk::open(&path, false);
        if gives_back {
            disk.change(&mut [write(0, 1), write(CLUSTER, 2)]);
            fail_next_sync(&file);
            disk.change(&mut [Change { op: Op::Discard, at: 0, bytes: vec![0; CLUSTER] }]);
        } else {
            fail_next_sync(&file);
            assert_eq!(disk.try_change(&mut [write(0, 1)]), [-i64::from(libc::EIO)]);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !disk.image.has_failed() {
            assert!(Instant::now() < deadline, "nobody is told: {gives_back}");
            disk.look();
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_ne!(disk.try_change(&mut [write(5 * CLUSTER, 1)]), [0]);
        for _ in 0..2 {
            disk.image.hand_over(1).unwrap_err();
        }
    }
}

/// The host has no thread just then, which keeps nobody from it for ever.
#[test]
fn c101_a_thread_that_could_not_be_started_is_started_for_the_next_queue() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing: None };
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    new.write(&file).unwrap();
    let usage = Use { read_only: false, grows: true, barriers: true };
    let image = Image::open(layers(&path, false), usage).unwrap();
    for _ in 0..2 {
        NO_THREAD.set(true);
        let error = image.client(4).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
        assert!(image.write_deferred().is_ok(), "what is asked of it meanwhile is done here");
    }
    image.client(4).unwrap();
}

/// As they are read; so whatever the host has in its memory alone is on its way to storage again.
#[test]
fn c103_tables_that_are_written_again_are_all_of_them_and_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let new = NewImage { virtual_size: 1 << 30, cluster_bits: 9, backing: None };
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    new.write(&file).unwrap();
    let mut disk = TestDisk::open(&path, false);
    let mut changes: Vec<_> = (0..40).map(|nth| write(nth * (25 << 20), 1)).collect();
    disk.change(&mut changes);
    drop(disk);
    let before = std::fs::read(&path).unwrap();
    let record = Record::of(&file);
    let file = Arc::new(file);
    write_tables_again(&file, before.len() as u64, 1).unwrap();
    let events = record.take();
    let mut written = vec![false; before.len()];
    for event in &events[..events.len() - 1] {
        let Event::Write { at, bytes } = event else { panic!("{event:?}") };
        let at = usize::try_from(*at).unwrap();
        assert_eq!(before[at..at + bytes.len()], bytes[..]);
        written[at..at + bytes.len()].fill(true);
    }
    assert_eq!(events.last(), Some(&Event::Sync));
    // What the header says of tables, and what these say.
    let word = |at: usize| u64::from_be_bytes(*before[at..].first_chunk().unwrap()) << 8 >> 8;
    let half = |at: usize| u32::from_be_bytes(*before[at..].first_chunk().unwrap()) as usize;
    let (l1, counts) = ((word(40) as usize, 8 * half(36)), (word(48) as usize, 512 * half(56)));
    let mut tables = vec![(0, 512), l1, counts];
    for (at, len) in [l1, counts] {
        let entries = (at..at + len).step_by(8).map(|at| word(at) as usize);
        tables.extend(entries.filter(|at| *at != 0).map(|at| (at, 512)));
    }
    assert!(tables.len() > 44, "{tables:?}");
    for (at, len) in tables {
        let end = (at + len).min(written.len());
        assert!(written[at..end].iter().all(|written| *written), "{at:#x}");
    }
}
