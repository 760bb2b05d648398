//! Entries that wait for a flush: who is killed leaves them in a journal, and whoever comes next finds them, or
//! is told that they are lost.

use crate::disk::{Change, TestDisk, journal, memory, replayed_by};
use crate::power_cuts::checked;
use crate::qemu;
use crate::record::{Event, Hold, NoRoom, Record, fail_next_sync, fail_next_sync_with};
use ringway_core::{ByteRange, Op};
use ringway_image::{Format, Header, NewImage, Place, Replayed};
use ringway_testkit::Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CLUSTER: u64 = 65536;

/// An overlay of 64 clusters on a raw image, its file and where its journal is.
fn overlay() -> (tempfile::TempDir, PathBuf, File, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![0xba; 64 * CLUSTER as usize]).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    let new = NewImage { virtual_size: 64 * CLUSTER, cluster_bits: 16, backing };
    new.write(&file).unwrap();
    let journal = folder.path().join("journal");
    (folder, path, file, journal)
}

/// What a killed process leaves: its memory is gone, and nothing is put in order.
fn kill(disk: TestDisk) {
    std::mem::forget(disk);
}

fn events(record: &Record) -> (usize, usize) {
    let (mut writes, mut syncs) = (0, 0);
    for event in record.take() {
        match event {
            Event::Write { .. } => writes += 1,
            Event::Sync => syncs += 1,
            _ => {}
        }
    }
    (writes, syncs)
}

#[test]
fn a_first_write_is_one_write_until_the_guest_flushes() {
    let (_folder, path, file, journal) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 512, &journal);
    // The first of them makes the L2 table, and the second has the header say that there is a journal.
    (0..2).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    disk.flush();
    let record = Record::of(&file);
    for cluster in 2..7 {
        disk.write(cluster * CLUSTER, &[cluster as u8; 512]);
        assert_eq!(events(&record), (1, 0), "the data");
    }
    assert!(disk.image.has_deferred());
    disk.flush();
    assert!(!disk.image.has_deferred());
    assert_eq!(events(&record), (1, 2), "the data durable, all entries, all durable");
    disk.flush();
    assert_eq!(events(&record), (0, 1));
}

/// Another queue writes by the word of an entry that is not in the file, and flushes: it has to be told of that entry
/// from when it finds the word, and not once the batch is answered.
#[test]
fn c66_an_entry_is_told_of_before_anybody_goes_by_it() {
    let (_folder, path, file, journal) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &journal);
    (0..2).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    disk.flush();
    let word = |at| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    let l2 = word(word(40)) << 8 >> 8;
    let (mut old, mut new) = (vec![2; 512], vec![3; CLUSTER as usize]);
    let lists = [memory(&mut old), memory(&mut new), memory(&mut [])];
    // What follows is one batch, because the thread is at something that leaves no entry.
    let data = Hold::of(&file);
    disk.ask(0, Op::WriteZeroes, ByteRange::new(0, 512).unwrap(), &lists[0], 0);
    data.reached();
    let range = ByteRange::new(2 * CLUSTER, CLUSTER).unwrap();
    disk.ask(1, Op::Write, range, &lists[1], 0);
    disk.ask(2, Op::Flush, ByteRange::default(), &lists[2], 0);
    let tables = Hold::within(&file, l2..l2 + CLUSTER);
    drop(data);
    tables.reached();
    let place = disk.image.place(range, true);
    assert!(matches!(place, Place::Direct { file: 0, .. }), "{place:?}");
    assert!(disk.image.has_deferred(), "a flush would not ask for the entry");
    drop(tables);
    assert!((0..3).all(|_| disk.wait().result >= 0));
    assert!(!disk.image.has_deferred());
}

#[test]
fn c38_what_was_answered_is_found_by_whoever_comes_next() {
    let (_folder, path, _file, at) = overlay();
    for (round, clusters) in [(1_u8, 0..5_u64), (2, 3..9), (3, 60..64)] {
        let (mut disk, replayed) = TestDisk::open_with_journal(&path, 512, &at);
        let left = [Replayed::Nothing, Replayed::Entries(5), Replayed::Entries(4)];
        assert_eq!(replayed, left[usize::from(round) - 1]);
        for cluster in clusters.clone() {
            disk.write(cluster * CLUSTER + 512, &[round; 512]);
        }
        // And one that is given back.
        disk.change(&mut [Change { op: Op::Discard, at: 0, bytes: vec![0; CLUSTER as usize] }]);
        let last = (clusters.end - 1) * CLUSTER + 512;
        assert!(!qemu::is_here() || qemu::content(&path, None)[last as usize] == 0xba);
        kill(disk);
    }
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!(replayed, Replayed::Entries(4));
    let byte = |disk: &mut TestDisk, cluster: u64| disk.read(cluster * CLUSTER + 512, 1)[0];
    let found: Vec<u8> = (0..10).map(|cluster| byte(&mut disk, cluster)).collect();
    assert_eq!(found, [0, 1, 1, 2, 2, 2, 2, 2, 2, 0xba]);
    assert_eq!(byte(&mut disk, 63), 3);
    assert_eq!(disk.read(5 * CLUSTER, 1), [0xba], "the rest of a cluster is its base's");
    drop(disk);
    assert!(journal(&at).is_empty() && !journal(&at).is_used());
    checked(&path).unwrap();
}

/// Whoever does not know the mark in the header takes it away before anything is written.
#[test]
fn c38_entries_are_not_put_into_an_image_that_others_have_written() {
    let written_by_us = |path: &Path| TestDisk::open(path, false).write(9 * CLUSTER, &[9; 512]);
    let written_by_qemu = |path: &Path| {
        let args = ["-f", "qcow2", "-c", "write -P 9 589824 512", path.to_str().unwrap()];
        assert!(std::process::Command::new("qemu-io").args(args).status().unwrap().success());
    };
    let mut others: Vec<&dyn Fn(&Path)> = vec![&written_by_us];
    if qemu::is_here() {
        others.push(&written_by_qemu);
    }
    for write in others {
        let (_folder, path, _file, at) = overlay();
        let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
        (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
        kill(disk);
        assert!(!journal(&at).is_empty());
        write(&path);
        let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
        assert_eq!(replayed, Replayed::Lost);
        assert_eq!(disk.read(9 * CLUSTER, 1), [9]);
        assert_eq!(disk.read(2 * CLUSTER, 1), [0xba]);
        drop(disk);
        checked(&path).unwrap();
        let file = Arc::new(File::options().read(true).write(true).open(&path).unwrap());
        assert_eq!(
            replayed_by(&file, 1, Some(&journal(&at))).unwrap(),
            Replayed::Nothing,
            "said once"
        );
    }
}

/// Its folder is another one, or was cleared.
#[test]
fn c38_that_a_journal_is_missing_is_found_out() {
    let (_folder, path, file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    kill(disk);
    std::fs::remove_file(&at).unwrap();
    let file = Arc::new(file);
    assert_eq!(replayed_by(&file, 1, None).unwrap(), Replayed::Lost);
    assert_eq!(replayed_by(&file, 1, None).unwrap(), Replayed::Nothing, "said once");
    // Of one that was given before the host went down, nobody has to be told: its guests are gone, too.
    let mut features = [0; 8];
    file.read_exact_at(&mut features, 88).unwrap();
    assert_eq!(features, [0; 8]);
    file.write_all_at(&[0x80, 0, 0, 1, 0, 0, 0, 0], 88).unwrap();
    let other_boot = replayed_by(&file, 1, None).unwrap();
    file.read_exact_at(&mut features, 88).unwrap();
    assert_eq!((other_boot, features), (Replayed::Nothing, [0; 8]));
}

/// What it says may be anything, if its daemon fell into wrong hands, or its image was put back as it once was.
#[test]
fn c38_an_entry_that_cannot_be_is_dropped() {
    const COPIED: u64 = 1 << 63;
    type Word = fn(u64) -> u64;
    // Of clusters of the disk, and of the file: as far as it goes, the header and tables are there.
    let cases: [(Option<u64>, Word); 11] = [
        (Some(64), |_| 0),
        (Some(u64::MAX), |_| 0),
        (None, |end| end | COPIED),
        (None, |_| 5 * CLUSTER),
        (None, |_| (5 * CLUSTER + 512) | COPIED),
        (None, |_| (1 << 62) | (5 * CLUSTER)),
        (None, |_| u64::MAX),
        // Metadata: the table of reference counts, and the L2 table itself, which is the first of the reserve.
        (None, |_| CLUSTER | COPIED),
        (None, |_| (4 * CLUSTER) | COPIED),
        // What is free, and what another entry of the journal leads to.
        (None, |_| (12 * CLUSTER) | COPIED),
        (None, |_| (7 * CLUSTER) | COPIED),
    ];
    for (nth, (cluster, word)) in cases.into_iter().enumerate() {
        let (_folder, path, file, at) = overlay();
        let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
        (0..3).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
        kill(disk);
        // There is something behind all that is counted.
        file.set_len(13 * CLUSTER).unwrap();
        let (file, end) = (Arc::new(file), 13 * CLUSTER);
        let words = File::options().read(true).write(true).open(&at).unwrap();
        let mut right = [0; 32];
        words.read_exact_at(&mut right, 4096).unwrap();
        let entry = |nth: usize| -> [u8; 8] { right[nth * 8..][..8].try_into().unwrap() };
        assert_eq!([entry(0), entry(2)], [1_u64, 2].map(u64::to_ne_bytes));
        let hosts = [entry(1), entry(3)].map(|word| u64::from_ne_bytes(word) & !COPIED);
        assert_eq!(hosts, [6 * CLUSTER, 7 * CLUSTER]);
        let cluster = cluster.map_or(entry(0), u64::to_ne_bytes);
        let wrong = [cluster, u64::to_ne_bytes(word(end))].concat();
        words.write_all_at(&wrong, 4096).unwrap();
        let replayed = replayed_by(&file, 1, Some(&journal(&at))).unwrap();
        assert_eq!(replayed, Replayed::Lost, "case {nth}");
        let mut disk = TestDisk::open(&path, false);
        assert_eq!([0, 1, 2].map(|cluster| disk.read(cluster * CLUSTER, 1)[0]), [1, 0xba, 0xba]);
        drop(disk);
        checked(&path).unwrap();
    }
}

/// More than it holds, in one batch and in many.
#[test]
fn a_journal_that_is_full_is_written_to_the_tables() {
    let folder = tempfile::tempdir().unwrap();
    let (path, at) = (folder.path().join("small.qcow2"), folder.path().join("journal"));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let new = NewImage { virtual_size: 16 << 20, cluster_bits: 9, backing: None };
    new.write(&file).unwrap();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    let mut model = vec![0; 16 << 20];
    // 64 clusters to a table: every second write makes one.
    for (nth, at) in (0..16_u64 << 20).step_by(20 << 10).enumerate() {
        let bytes = vec![nth as u8 | 1; 10 << 10];
        let to = usize::try_from(at).unwrap();
        let bytes = &bytes[..bytes.len().min(model.len() - to)];
        disk.write(at, bytes);
        model[to..to + bytes.len()].copy_from_slice(bytes);
    }
    // Every cluster has its table by now.
    for at in (0..model.len() as u64).step_by(512) {
        let bytes = vec![0; 512];
        disk.change(&mut [Change { op: Op::Discard, at, bytes }]);
    }
    for at in (0..model.len()).step_by(1 << 20) {
        disk.write(at as u64, &model[at..at + (1 << 20)]);
    }
    assert!(disk.image.has_deferred());
    kill(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert!(matches!(replayed, Replayed::Entries(_)), "{replayed:?}");
    assert!(disk.read(0, model.len()) == model);
    drop(disk);
    checked(&path).unwrap();
}

/// Nobody knows what the host has kept of the data: the base is not given up for it.
#[test]
fn c04_entries_are_forgotten_once_a_sync_has_failed() {
    let (_folder, path, file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 512, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    fail_next_sync(&file);
    let error = disk.image.write_deferred().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert!(disk.image.has_failed());
    assert!(journal(&at).is_empty());
    kill(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 512, &at);
    assert_eq!(disk.read(2 * CLUSTER, 1), [0xba]);
    assert_eq!(replayed, Replayed::Lost);
}

/// The host tells it once, to the sync of a queue.
#[test]
fn c04_entries_are_forgotten_once_a_queue_has_heard_of_lost_data() {
    let (_folder, path, _file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    disk.image.has_lost();
    assert!(disk.image.write_deferred().is_err(), "they would be durable, and their data are not");
    assert!(journal(&at).is_empty());
    kill(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!((disk.read(2 * CLUSTER, 1), replayed), (vec![0xba], Replayed::Lost));
    // One that ends in order is noted by its disk: the header does not say it again.
    disk.write(3 * CLUSTER, &[2; 512]);
    disk.write(4 * CLUSTER, &[2; 512]);
    assert!(disk.image.has_deferred());
    disk.image.has_lost();
    drop(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!((disk.read(4 * CLUSTER, 1), replayed), (vec![0xba], Replayed::Nothing));
}

/// As the host tells it once, the second try would find nothing wrong.
#[test]
fn c04_entries_are_forgotten_if_their_data_are_lost_when_they_are_found() {
    let (_folder, path, file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    kill(disk);
    let file = Arc::new(file);
    fail_next_sync(&file);
    let error = replayed_by(&file, 1, Some(&journal(&at))).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(replayed_by(&file, 1, Some(&journal(&at))).unwrap(), Replayed::Lost);
    assert_eq!(TestDisk::open(&path, false).read(2 * CLUSTER, 1), [0xba]);
}

/// Paths of a device change, or it was interrupted: nothing is lost by that.
#[test]
fn c98_a_sync_that_could_not_be_carried_out_just_then_is_begun_again() {
    let (_folder, path, file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    kill(disk);
    let file = Arc::new(file);
    (0..3).for_each(|_| fail_next_sync_with(&file, libc::EAGAIN));
    let replayed = replayed_by(&file, 1, Some(&journal(&at))).unwrap();
    assert!(matches!(replayed, Replayed::Entries(_)), "{replayed:?}");
    assert_eq!(TestDisk::open(&path, false).read(2 * CLUSTER, 1), [1]);
}

/// For an image that is about to be another one's base: who is killed leaves nothing elsewhere.
#[test]
fn an_image_that_does_without_its_journal_has_all_in_its_file() {
    let (_folder, path, _file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    assert!(journal(&at).is_used());
    disk.image.set_defers(false).unwrap();
    assert!(!journal(&at).is_used());
    (4..8).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    assert!(!disk.image.has_deferred());
    disk.image.set_defers(true).unwrap();
    disk.write(8 * CLUSTER, &[1; 512]);
    assert!(disk.image.has_deferred());
    disk.image.leave_journal().unwrap();
    assert!(!disk.image.has_deferred() && !journal(&at).is_used());
    kill(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!(replayed, Replayed::Nothing);
    assert_eq!(disk.read(8 * CLUSTER, 1), [1]);
}

/// What a copy of the file is put back in place of what was written since, after a kill.
fn restored(copy: &[u8], path: &Path) {
    File::options().write(true).truncate(true).open(path).unwrap().write_all_at(copy, 0).unwrap();
}

fn discard(disk: &mut TestDisk, clusters: std::ops::Range<u64>) {
    let bytes = vec![0; ((clusters.end - clusters.start) * CLUSTER) as usize];
    disk.change(&mut [Change { op: Op::Discard, at: clusters.start * CLUSTER, bytes }]);
}

/// Until clusters that nothing names are free again, which others get then.
fn wait_until_given_back(disk: &mut TestDisk, file: &File) {
    let record = Record::of(file);
    let begun = std::time::Instant::now();
    while !record.take().iter().any(|event| matches!(event, Event::Punch { .. })) {
        assert!(begun.elapsed().as_secs() < 60, "nothing is given back");
        disk.look();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The rest of them: this one comes after them.
    disk.image.write_deferred().unwrap();
}

/// A copy that was made while the image was served has its mark, and what it says of clusters is older.
#[test]
fn c44_entries_are_not_put_into_older_contents() {
    type Act = fn(&mut TestDisk, &File);
    let since: [(&str, Act, bool); 6] = [
        (
            "clusters were given back and taken by others",
            |disk, file| {
                discard(disk, 0..5);
                disk.flush();
                wait_until_given_back(disk, file);
                (20..40).for_each(|cluster| disk.write(cluster * CLUSTER, &[2; 512]));
            },
            true,
        ),
        (
            "clusters were taken that nobody counted",
            |disk, _| {
                (20..40).for_each(|cluster| disk.write(cluster * CLUSTER, &[2; 512]));
            },
            true,
        ),
        (
            "what was written since was flushed",
            |disk, _| {
                disk.write(20 * CLUSTER, &[2; 512]);
                disk.flush();
                disk.write(21 * CLUSTER, &[2; 512]);
            },
            true,
        ),
        (
            "what was written since was flushed, and nothing after it",
            |disk, _| {
                disk.write(20 * CLUSTER, &[2; 512]);
                disk.flush();
            },
            true,
        ),
        (
            "what was given up since was flushed",
            |disk, _| {
                discard(disk, 2..3);
                disk.flush();
                disk.write(21 * CLUSTER, &[2; 512]);
            },
            true,
        ),
        // Nobody can tell it from the file as it was: all that was flushed is there.
        (
            "nothing was flushed since",
            |disk, _| {
                disk.write(20 * CLUSTER, &[2; 512]);
            },
            false,
        ),
    ];
    for (what, act, is_older) in since {
        for unit in [1, 512] {
            let (_folder, path, file, at) = overlay();
            let (mut disk, _) = TestDisk::open_with_journal(&path, unit, &at);
            (0..5).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
            disk.flush();
            let copy = std::fs::read(&path).unwrap();
            act(&mut disk, &file);
            kill(disk);
            restored(&copy, &path);
            let (mut disk, replayed) = TestDisk::open_with_journal(&path, unit, &at);
            assert_eq!(replayed == Replayed::Lost, is_older, "{what}: {replayed:?}");
            (0..5).for_each(|cluster| assert_eq!(disk.read(cluster * CLUSTER, 1), [1], "{what}"));
            if is_older {
                (20..40).for_each(|at| assert_eq!(disk.read(at * CLUSTER, 1), [0xba], "{what}"));
            }
            // Nothing that the copy names is anybody else's.
            (40..60).for_each(|cluster| disk.write(cluster * CLUSTER, &[3; 512]));
            (0..5).for_each(|cluster| assert_eq!(disk.read(cluster * CLUSTER, 1), [1], "{what}"));
            drop(disk);
            checked(&path).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
    }
}

/// What a process has counted and not used, or freed and not given back, is lost with no kill, and not taken from
/// whoever uses it.
#[test]
fn c47_kills_cost_no_space() {
    let (_folder, path, file, at) = overlay();
    let mut rng = Rng::for_test("kills_cost_no_space");
    let mut model = [0xba; 64];
    for round in 0..60_u8 {
        let unit = if round % 2 == 0 { 1 } else { 512 };
        let (mut disk, replayed) = TestDisk::open_with_journal(&path, unit, &at);
        assert_ne!(replayed, Replayed::Lost);
        assert_eq!(checked(&path).unwrap().leaks, 0, "round {round}: {replayed:?}");
        let mut has_freed = false;
        for _ in 0..rng.below(8) {
            let cluster = rng.below(64);
            let byte = &mut model[usize::try_from(cluster).unwrap()];
            match rng.below(8) {
                0..4 => {
                    *byte = round + 1;
                    disk.write(cluster * CLUSTER, &[*byte; CLUSTER as usize]);
                }
                4..6 => {
                    *byte = 0;
                    discard(&mut disk, cluster..cluster + 1);
                    has_freed = true;
                }
                6 => disk.flush(),
                // What was freed is given back once no queue uses it, half a second later.
                _ if has_freed => {}
                _ => disk.image.leave_journal().unwrap(),
            }
        }
        kill(disk);
    }
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    let found: Vec<u8> = (0..64).map(|cluster| disk.read(cluster * CLUSTER, 1)[0]).collect();
    assert_eq!(found, model);
    drop(disk);
    assert_eq!(checked(&path).unwrap().leaks, 0);
    // The disk, its metadata, and what one process takes ahead, and frees.
    let clusters = file.metadata().unwrap().len() / CLUSTER;
    assert!(clusters <= 64 + 5 + 32, "{clusters} clusters");
}

/// It is believed of the image alone that the header names, and of no cluster that a table names.
#[test]
fn c47_what_a_table_names_is_not_given_back() {
    let (_folder, path, _file, at) = overlay();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..3).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    disk.flush();
    kill(disk);
    // The first write makes the L2 table at 4, and has its data at 5; 8 to 11 are taken ahead.
    let list = File::options().read(true).write(true).open(&at).unwrap();
    let place = 4096 + 4096 * 16;
    let mut there = [0; 4096 * 16];
    list.read_exact_at(&mut there, place).unwrap();
    let words = there.chunks_exact(16).map(|slot| u64::from_ne_bytes(*slot.first_chunk().unwrap()));
    let mut named: Vec<u64> = words.filter(|cluster| *cluster != 0).collect();
    named.sort_unstable();
    assert_eq!(named, [8, 9, 10, 11]);
    // A table, data that an entry names, the same beyond the disk, beyond the file, what is free, and twice the same.
    let wrong =
        [(4, 0), (3, 0), (0, 0), (1, 5), (6, 2), (7, 99), (1 << 40, 0), (40, 0), (8, 0), (8, 7)];
    let slots: Vec<u8> = wrong
        .iter()
        .flat_map(|(cluster, user)| [*cluster, *user].map(u64::to_ne_bytes))
        .flatten()
        .collect();
    list.write_all_at(&slots, place + 3000 * 16).unwrap();
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!(replayed, Replayed::Nothing);
    assert_eq!(checked(&path).unwrap().leaks, 0);
    (10..30).for_each(|cluster| disk.write(cluster * CLUSTER, &[2; 512]));
    assert_eq!([0, 1, 2].map(|cluster| disk.read(cluster * CLUSTER, 1)[0]), [1; 3]);
    drop(disk);
    checked(&path).unwrap();
}

/// The header may get the mark although its write has failed, even later: it is that of the journal all the same.
#[test]
fn c75_a_first_mark_in_doubt_is_given_again() {
    let (_folder, path, file, at) = overlay();
    let mark = || {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 88).unwrap();
        bytes
    };
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    let full = NoRoom::of(&file, 88..89);
    let mut change = [Change { op: Op::Write, at: 0, bytes: vec![1; 512] }];
    assert_eq!(disk.try_change(&mut change), [-i64::from(libc::ENOSPC)]);
    drop(full);
    let words = File::open(&at).unwrap();
    let mut first = [0; 8];
    words.read_exact_at(&mut first, 0).unwrap();
    first.reverse();
    assert_eq!((mark(), first[0] & 0x80), ([0; 8], 0x80), "it is in the journal alone");
    // Killed now, whether it is in the file or not.
    for landed in [[0; 8], first] {
        file.write_all_at(&landed, 88).unwrap();
        let copy = File::create(path.with_file_name("copy")).unwrap();
        copy.write_all_at(&std::fs::read(&path).unwrap(), 0).unwrap();
        let copy = Arc::new(
            File::options().read(true).write(true).open(path.with_file_name("copy")).unwrap(),
        );
        std::fs::copy(&at, path.with_file_name("its")).unwrap();
        let its = journal(&path.with_file_name("its"));
        assert_eq!(replayed_by(&copy, 1, Some(&its)).unwrap(), Replayed::Nothing);
    }
    (0..4).for_each(|cluster| disk.write(cluster * CLUSTER, &[1; 512]));
    // By which the journal was begun.
    let mut owner = [0; 8];
    words.read_exact_at(&mut owner, 32).unwrap();
    owner.reverse();
    assert_eq!(owner, first);
    assert!(disk.image.has_deferred());
    kill(disk);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert!(matches!(replayed, Replayed::Entries(_)), "{replayed:?}");
    assert_eq!([0, 1, 2, 3].map(|cluster| disk.read(cluster * CLUSTER, 1)[0]), [1; 4]);
}

/// A kill while a disk grows, right behind the write of an L1 entry: the header has the old size, and what had been
/// taken ahead is in the list still.
#[test]
fn c71_a_table_behind_the_disk_is_not_given_back() {
    const BYTES: u64 = 64 * 512;
    let folder = tempfile::tempdir().unwrap();
    let (path, at) = (folder.path().join("top.qcow2"), folder.path().join("journal"));
    std::fs::write(folder.path().join("base.raw"), vec![0xba; 3 * BYTES as usize]).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    NewImage { virtual_size: BYTES, cluster_bits: 9, backing }.write(&file).unwrap();
    let word = |at| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    disk.write(0, &[1; 512]);
    disk.image.grow(3 * BYTES).unwrap();
    kill(disk);
    // As it was before the header had the new size.
    file.write_all_at(&BYTES.to_be_bytes(), 24).unwrap();
    let l1 = word(40);
    let tables = [1, 2].map(|index| (word(l1 + 8 * index) << 1 >> 1) / 512);
    assert!(tables.iter().all(|table| *table != 0), "the longer base is hidden by tables");
    let slots = tables.iter().flat_map(|table| [*table, 0].map(u64::to_ne_bytes)).flatten();
    let list = File::options().read(true).write(true).open(&at).unwrap();
    list.write_all_at(&slots.collect::<Vec<u8>>(), 4096 + 4096 * 16 + 3000 * 16).unwrap();
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!((replayed, disk.image.size()), (Replayed::Nothing, BYTES));
    checked(&path).unwrap();
    (1..64).for_each(|cluster| disk.write(cluster * 512, &[2; 512]));
    disk.image.grow(3 * BYTES).unwrap();
    assert_eq!(disk.read(512, BYTES as usize - 512), vec![2; BYTES as usize - 512]);
    assert_eq!(disk.read(BYTES, 2 * BYTES as usize), vec![0; 2 * BYTES as usize]);
    drop(disk);
    assert_eq!(checked(&path).unwrap().leaks, 0);
}

/// A kill behind the write of an L1 entry that led to a table which an internal snapshot has, too: that is counted for the
/// snapshot alone afterwards, and never less.
#[test]
fn c89_a_table_that_a_snapshot_has_too_is_counted_for_it_alone_after_a_kill() {
    const TABLE: u64 = 64 * 512;
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, at) = (folder.path().join("top.qcow2"), folder.path().join("journal"));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let new = NewImage { virtual_size: 8 * TABLE, cluster_bits: 9, backing: None };
    new.write(&file).unwrap();
    let mut disk = TestDisk::open(&path, false);
    (0..8).for_each(|table| disk.write(table * TABLE, &[1; 512]));
    drop(disk);
    qemu::img(&["snapshot", "-c", "one", path.to_str().unwrap()]);
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    (0..8).for_each(|table| disk.write(table * TABLE + 512, &[2; 512]));
    kill(disk);
    drop(TestDisk::open_with_journal(&path, 1, &at));
    qemu::check(&path, false);
    // A list of which the next process does not know how far the last one had got.
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    disk.write(1024, &[3; 512]);
    kill(disk);
    let word = |at| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    let l1 = word(word(64));
    let slots = (0..8).map(|table| [(word(l1 + 8 * table) & !(1 << 63)) / 512, 0]);
    let slots: Vec<u8> = slots.flatten().flat_map(u64::to_ne_bytes).collect();
    let list = File::options().write(true).open(&at).unwrap();
    list.write_all_at(&slots, 4096 + 4096 * 16 + 3000 * 16).unwrap();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!(disk.read(1024, 512), [3; 512]);
    drop(disk);
    qemu::check(&path, false);
}

/// An overlay of two L2 tables, both there: its file, and for which part of that the second one is.
fn two_tables() -> (tempfile::TempDir, PathBuf, File, std::ops::Range<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![0xba; 128 * 512]).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    NewImage { virtual_size: 128 * 512, cluster_bits: 9, backing }.write(&file).unwrap();
    let mut disk = TestDisk::open(&path, false);
    disk.write(0, &[1; 64 * 512]);
    disk.write(64 * 512, &[1; 512]);
    drop(disk);
    let bytes = file.metadata().unwrap().len();
    let l1 = Header::read(&file, bytes).unwrap().unwrap().l1_offset;
    let mut word = [0; 8];
    file.read_exact_at(&mut word, l1 + 8).unwrap();
    let table = u64::from_be_bytes(word) & !(1 << 63);
    (folder, path, file, table..table + 512)
}

/// What a guest gives back on a full host is given back, but for what an entry in the file leads to.
#[test]
fn c43_clusters_are_given_back_though_an_entry_finds_no_room() {
    let (folder, path, file, second) = two_tables();
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &folder.path().join("journal"));
    let full = NoRoom::of(&file, second);
    disk.write(64 * 512, &[2; 512]);
    disk.change(&mut [Change { op: Op::WriteZeroes, at: 64 * 512, bytes: vec![0; 512] }]);
    disk.write(70 * 512, &[3; 512]);
    disk.change(&mut [Change { op: Op::Discard, at: 0, bytes: vec![0; 64 * 512] }]);
    let said = disk.image.give_back().unwrap_err();
    assert_eq!(said.raw_os_error(), Some(libc::ENOSPC));
    let found = checked(&path).unwrap();
    // That of cluster 70, which only the journal leads to.
    assert_eq!(found.leaks, 1, "{:?}", found.problems);
    assert_eq!(disk.read(64 * 512, 512), [0; 512]);
    drop(full);
    disk.image.give_back().unwrap();
    assert_eq!(checked(&path).unwrap().leaks, 0);
    assert_eq!((disk.read(0, 512), disk.read(70 * 512, 512)), (vec![0; 512], vec![3; 512]));
}

/// A disk is served again though what its guest was answered finds no room in its tables.
#[test]
fn c43_entries_that_find_no_room_wait_on() {
    let (folder, path, file, second) = two_tables();
    let at = folder.path().join("journal");
    let (mut disk, _) = TestDisk::open_with_journal(&path, 1, &at);
    let full = NoRoom::of(&file, second);
    disk.write(70 * 512, &[3; 512]);
    disk.change(&mut [Change { op: Op::WriteZeroes, at: 512, bytes: vec![0; 512] }]);
    // It ends in order, but cannot write them all.
    drop(disk);
    let shared = Arc::new(file.try_clone().unwrap());
    let said = replayed_by(&shared, 1, Some(&journal(&at))).unwrap_err();
    assert_eq!(said.raw_os_error(), Some(libc::ENOSPC));
    for round in 4..7_u8 {
        let mut disk = TestDisk::open_beside_journal(&path, 1, &at);
        assert!(disk.image.has_deferred());
        assert_eq!(disk.read(70 * 512, 512), [if round == 4 { 3 } else { 4 }; 512]);
        assert_eq!(disk.read(512, 512), [0; 512]);
        assert!(disk.image.write_deferred().is_err());
        disk.write(70 * 512, &[4; 512]);
        disk.write(u64::from(70 + round) * 512, &[round; 512]);
        match round {
            // Whoever comes next has what it had taken ahead.
            5 => kill(disk),
            _ => drop(disk),
        }
    }
    drop(full);
    let (mut disk, replayed) = TestDisk::open_with_journal(&path, 1, &at);
    assert_eq!(replayed, Replayed::Entries(4));
    let found = [70, 74, 75, 76].map(|cluster| disk.read(cluster * 512, 1)[0]);
    assert_eq!(found, [4, 4, 5, 6]);
    drop(disk);
    assert!(!journal(&at).is_used());
    assert_eq!(checked(&path).unwrap().leaks, 0);
}
