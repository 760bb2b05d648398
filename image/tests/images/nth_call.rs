//! Each call that the image's thread makes of its files fails, once or from there on, in each of the things that it
//! does. Afterwards the thread lives, what memory says is what the file says, what was answered is there for whoever
//! opens the image next, after a kill or an end in order, and the counts are those of the references.
//!
//! `RINGWAY_NTH_CALL=all` tries every combination; without it some are left out where there are many.

use crate::disk::{Change, TestDisk, layers, replayed_by};
use crate::power_cuts::{SECTOR, checked, content, repaired};
use crate::qemu;
use crate::record::{Calls, Failing};
use ringway_core::Op;
use ringway_image::{
    Bases, CheckOptions, Commit, Format, Header, Image, Layer, LayerFormat, NewImage, Replayed,
    Use, repair_leaks,
};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

const CLUSTER: usize = 512;
/// Bytes of a disk that one L2 table is for.
const TABLE: usize = CLUSTER / 8 * CLUSTER;
/// Bytes of the disk.
const BYTES: usize = 5 * TABLE + 3 * SECTOR;
/// What an image takes ahead, at most.
const RESERVE: u64 = 1024;

/// Which call fails, whether all behind it do, and how.
type Plan = Option<(u64, bool, Failing)>;

/// An image that is served, and what each of its sectors may hold.
struct Served {
    disk: Option<TestDisk>,
    /// Of each sector the bytes of which one fills it: several only where something was not answered well.
    may: Vec<Vec<u8>>,
}

fn write(at: usize, len: usize, byte: u8) -> Change {
    Change { op: Op::Write, at: at as u64, bytes: vec![byte; len] }
}

fn zero(op: Op, at: usize, len: usize) -> Change {
    Change { op, at: at as u64, bytes: vec![0; len] }
}

impl Served {
    fn disk(&mut self) -> &mut TestDisk {
        self.disk.as_mut().unwrap()
    }

    fn of(disk: TestDisk, content: &[u8]) -> Self {
        let may = content.chunks(SECTOR).map(|sector| vec![sector[0]]).collect();
        Self { disk: Some(disk), may }
    }

    /// Some changes at once, which do not touch each other; whether all were answered well.
    fn change(&mut self, mut changes: Vec<Change>) -> bool {
        let results = self.disk().try_change(&mut changes);
        for (change, result) in changes.iter().zip(&results) {
            let first = change.at as usize / SECTOR;
            let sectors = &mut self.may[first..first + change.bytes.len() / SECTOR];
            for may in sectors {
                // What is discarded may stay as it was.
                if *result == 0 && change.op != Op::Discard {
                    may.clear();
                }
                may.push(change.bytes[0]);
            }
        }
        results.iter().all(|result| *result == 0)
    }

    fn grow(&mut self, bytes: usize) {
        if self.disk().image.grow(bytes as u64).is_ok() {
            self.may.resize(bytes / SECTOR, vec![0]);
        }
    }

    /// As a guest's, by a queue that tells of what is lost.
    fn flush(&mut self) -> bool {
        let image = &self.disk().image;
        let flushed = image.write_deferred();
        let synced = image.files()[0].sync_data();
        if synced.is_err() {
            image.has_lost();
        }
        flushed.and(synced).is_ok()
    }

    /// Each sector is what it may be, and what it is from now on is known.
    fn settle(&mut self, what: &str) {
        let bytes = self.may.len() * SECTOR;
        assert_eq!(self.disk().image.size(), bytes as u64, "{what}");
        let found = self.disk().read(0, bytes);
        self.compare(&found, what);
        self.may = found.chunks(SECTOR).map(|sector| vec![sector[0]]).collect();
    }

    fn compare(&self, found: &[u8], what: &str) {
        assert_eq!(found.len(), self.may.len() * SECTOR, "{what}");
        for (nth, (sector, may)) in found.chunks(SECTOR).zip(&self.may).enumerate() {
            let is_one = may.contains(&sector[0]) && sector.iter().all(|byte| *byte == sector[0]);
            assert!(is_one, "{what}: sector {nth} is {:#x}, not {may:x?}", sector[0]);
        }
    }
}

/// A thing that an image does.
struct Scenario {
    /// Makes `image.qcow2` in a folder; what it holds.
    make: fn(&Path) -> Vec<u8>,
    /// What happens before.
    prepare: fn(&mut Served),
    act: fn(&mut Served),
}

/// A folder in memory, if there is one.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    tempfile::tempdir_in(if memory.is_dir() { memory } else { Path::new(".") }).unwrap()
}

fn copy(from: &Path) -> tempfile::TempDir {
    let folder = folder();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    folder
}

fn create(folder: &Path, name: &str, bytes: usize, backing: Option<(&str, Format)>) {
    let backing = backing.map(|(name, format)| (Path::new(name), format));
    let new = NewImage { virtual_size: bytes as u64, cluster_bits: 9, backing };
    new.write(&File::create_new(folder.join(name)).unwrap()).unwrap();
}

fn empty(folder: &Path) -> Vec<u8> {
    create(folder, "image.qcow2", BYTES, None);
    vec![0; BYTES]
}

/// Over a base that is longer.
fn overlay(folder: &Path) -> Vec<u8> {
    let base: Vec<u8> = (0..2 * BYTES).map(|at| (at / SECTOR) as u8 | 1).collect();
    std::fs::write(folder.join("base.raw"), &base).unwrap();
    create(folder, "image.qcow2", BYTES, Some(("base.raw", Format::Raw)));
    base[..BYTES].to_vec()
}

/// Some of its tables and clusters are those of an internal snapshot, too.
fn with_snapshot(folder: &Path) -> Vec<u8> {
    let mut content = empty(folder);
    let path = folder.join("image.qcow2");
    let mut disk = TestDisk::open(&path, false);
    disk.write(0, &vec![7; 2 * TABLE]);
    drop(disk);
    content[..2 * TABLE].fill(7);
    qemu::img(&["snapshot", "-c", "kept", path.to_str().unwrap()]);
    content
}

/// Its table of refcounts is nearly full, as each of them takes 64 bits.
fn with_wide_counts(folder: &Path) -> Vec<u8> {
    let path = folder.join("image.qcow2");
    let options = "cluster_size=512,refcount_bits=64";
    let bytes = 64 * 64 * CLUSTER;
    qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, path.to_str().unwrap(), "2M"]);
    let mut content = vec![0; bytes];
    let filled = bytes - 300 * CLUSTER;
    content[..filled].fill(3);
    TestDisk::open(&path, false).write(0, &content[..filled]);
    content
}

fn some_written(served: &mut Served) {
    let some = write(3 * TABLE, 6 * CLUSTER, 2);
    assert!(served.change(vec![write(0, TABLE + 3 * CLUSTER, 1), some]));
}

fn nothing(_: &mut Served) {}

/// Opens what is there, replaying a journal.
fn open(path: &Path, unit: u32, journalled: bool) -> TestDisk {
    match journalled {
        true => TestDisk::open_with_journal(path, unit, &path.with_file_name("journal")).0,
        false => TestDisk::open_in_units(path, false, unit),
    }
}

/// One run: how many calls there were.
fn run(scenario: &Scenario, made: (&Path, &[u8]), way: Way, plan: Plan) -> u64 {
    let Way { journalled, unit, reads } = way;
    let what = format!("{way:?} {plan:?}");
    let folder = copy(made.0);
    let path = folder.path().join("image.qcow2");
    let file = File::open(&path).unwrap();
    let mut served = Served::of(open(&path, unit, journalled), made.1);
    (scenario.prepare)(&mut served);
    let calls = Calls::of(&[&file], reads);
    if let Some((nth, for_ever, how)) = plan {
        calls.fail(nth, for_ever, how);
    }
    (scenario.act)(&mut served);
    let count = calls.mend();
    let mut is_stuck = false;
    if served.disk.is_some() {
        served.settle(&what);
        // What it answers from now on is there, wherever it thinks that it belongs.
        let step = 7 * CLUSTER;
        for at in (0..served.may.len() * SECTOR).step_by(step) {
            is_stuck |= !served.change(vec![write(at, SECTOR, 0x55)]);
        }
        served.settle(&what);
        let lost = served.disk().image.has_failed();
        assert!(!is_stuck || lost || reads, "{what}: nothing is written any more");
        // Killed now.
        let killed = copy(folder.path());
        let its = killed.path().join("image.qcow2");
        let mut again = open(&its, unit, journalled);
        if !lost {
            let found = again.read(0, again.image.size() as usize);
            served.compare(&found, &format!("{what}: after a kill"));
        }
        drop(again);
        let found = checked(&its).unwrap_or_else(|wrong| panic!("{what}: after a kill: {wrong}"));
        // The journal says what the killed process had counted, but for what a snapshot has, too.
        let file = File::open(&its).unwrap();
        let header = Header::read(&file, file.metadata().unwrap().len()).unwrap().unwrap();
        let is_known = journalled && header.snapshots == 0 && !lost && !reads;
        let most = if is_known { 0 } else { RESERVE };
        assert!(found.leaks <= most, "{what}: {} leaks after a kill", found.leaks);
        is_stuck |= lost | !served.flush();
        assert!(!is_stuck || lost || reads, "{what}: the flush fails");
        served.settle(&what);
    }
    let lost = served.disk.as_ref().is_some_and(|disk| disk.image.has_failed());
    drop(served.disk.take());
    if !lost {
        let mut again = open(&path, unit, journalled);
        let found = again.read(0, again.image.size() as usize);
        served.compare(&found, &format!("{what}: after its end"));
    }
    let found = checked(&path).unwrap_or_else(|wrong| panic!("{what}: after its end: {wrong}"));
    let most = if lost || is_stuck || reads { RESERVE } else { 0 };
    assert!(found.leaks <= most, "{what}: {} leaks after its end", found.leaks);
    count
}

/// How an image is served, and which calls are counted.
#[derive(Clone, Copy, Debug)]
struct Way {
    journalled: bool,
    unit: u32,
    reads: bool,
}

const HOW: [Failing; 3] = [Failing::With(libc::EIO), Failing::With(libc::ENOSPC), Failing::Half];

/// Calls `run` with each plan for the calls that it says there are without one.
fn each_plan(what: &str, reads: bool, run: &dyn Fn(Plan) -> u64) {
    let count = run(None);
    assert!(count > 0, "{what}: nothing is asked of a file");
    let all = std::env::var("RINGWAY_NTH_CALL").is_ok();
    // All numbers, if there are few; else those at the beginning and the end, and some between.
    let is_tried = |nth: &u64| all || *nth <= 24 || nth + 8 > count || nth % 17 == 0;
    for nth in (1..=count).filter(is_tried) {
        for for_ever in [false, true] {
            for (number, how) in HOW.into_iter().enumerate() {
                let is_turn = number as u64 == nth % 3 || number == 2;
                if (!reads || number == 0) && (all || is_turn || count < 16) {
                    run(Some((nth, for_ever, how)));
                }
            }
        }
    }
    println!("{what}: {count} calls");
}

fn each_call(scenario: &Scenario) {
    let made = folder();
    let content = (scenario.make)(made.path());
    for (journalled, unit, reads) in
        [(false, 1, false), (true, 1, false), (true, 512, false), (true, 1, true)]
    {
        let way = Way { journalled, unit, reads };
        let run = |plan| run(scenario, (made.path(), &content), way, plan);
        each_plan(&format!("{way:?}"), reads, &run);
    }
}

fn writes(served: &mut Served) {
    // New clusters in three tables, some of them in part.
    served.change(vec![
        write(TABLE - 2 * CLUSTER, 4 * CLUSTER, 0x11),
        write(2 * TABLE + SECTOR, SECTOR, 0x12),
        write(4 * TABLE + 50 * SECTOR, 3 * SECTOR, 0x13),
    ]);
    served.change(vec![write(2 * TABLE + 5 * CLUSTER, CLUSTER, 0x14)]);
}

#[test]
fn c41_first_writes() {
    each_call(&Scenario { make: empty, prepare: nothing, act: writes });
}

#[test]
fn c41_first_writes_over_a_base() {
    each_call(&Scenario { make: overlay, prepare: nothing, act: writes });
}

#[test]
fn c41_writes_beside_others() {
    each_call(&Scenario { make: overlay, prepare: some_written, act: writes });
}

#[test]
fn c41_zeroes_of_many_tables() {
    let act = |served: &mut Served| {
        served.change(vec![zero(Op::WriteZeroes, SECTOR, 4 * TABLE)]);
        served.change(vec![write(7 * CLUSTER, CLUSTER, 0x21)]);
        served.change(vec![zero(Op::WriteZeroes, 0, 2 * TABLE)]);
    };
    each_call(&Scenario { make: overlay, prepare: some_written, act });
}

#[test]
fn c41_discards_and_what_they_give_back() {
    let act = |served: &mut Served| {
        served.change(vec![zero(Op::Discard, 0, TABLE), write(TABLE + CLUSTER, SECTOR, 0x31)]);
        let _ = served.disk().image.give_back();
        served.change(vec![write(0, 9 * CLUSTER, 0x32)]);
        served.change(vec![zero(Op::Discard, 0, BYTES)]);
        let _ = served.disk().image.give_back();
    };
    each_call(&Scenario { make: empty, prepare: some_written, act });
}

#[test]
fn c41_flushes() {
    let act = |served: &mut Served| {
        served.flush();
        served.change(vec![write(3 * TABLE, 2 * CLUSTER, 0x41)]);
        let _ = served.disk().image.set_defers(false);
        let _ = served.disk().image.set_defers(true);
        served.change(vec![write(3 * TABLE + 8 * CLUSTER, 2 * CLUSTER, 0x42)]);
    };
    let prepare = |served: &mut Served| {
        some_written(served);
        writes(served);
        served.change(vec![zero(Op::WriteZeroes, 0, CLUSTER)]);
    };
    each_call(&Scenario { make: overlay, prepare, act });
}

#[test]
fn c41_tables_and_clusters_of_a_snapshot() {
    if qemu::is_here() {
        let act = |served: &mut Served| {
            served.change(vec![write(SECTOR, 3 * CLUSTER, 0x51)]);
            served.change(vec![zero(Op::WriteZeroes, TABLE, TABLE)]);
        };
        each_call(&Scenario { make: with_snapshot, prepare: nothing, act });
    }
}

#[test]
fn c41_a_longer_table_of_refcounts() {
    if qemu::is_here() {
        let act = |served: &mut Served| {
            let from = served.may.len() * SECTOR - 300 * CLUSTER;
            served.change(vec![write(from, 290 * CLUSTER, 0x61)]);
        };
        each_call(&Scenario { make: with_wide_counts, prepare: nothing, act });
    }
}

#[test]
fn c41_a_larger_disk() {
    let act = |served: &mut Served| {
        // In the L1 table's cluster, behind that of the base, and with another L1 table.
        for bytes in [8 * TABLE, 12 * TABLE + SECTOR, 70 * TABLE] {
            served.grow(bytes);
        }
    };
    each_call(&Scenario { make: overlay, prepare: some_written, act });
}

/// Its last cluster is there in part, and the base goes on behind it.
#[test]
fn c41_a_larger_disk_of_large_clusters() {
    let make = |folder: &Path| {
        let base: Vec<u8> = (0..2 * BYTES).map(|at| (at / SECTOR) as u8 | 1).collect();
        std::fs::write(folder.join("base.raw"), &base).unwrap();
        let backing = Some((Path::new("base.raw"), Format::Raw));
        let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 12, backing };
        new.write(&File::create_new(folder.join("image.qcow2")).unwrap()).unwrap();
        base[..BYTES].to_vec()
    };
    let act = |served: &mut Served| served.grow(2 * BYTES + SECTOR);
    each_call(&Scenario { make, prepare: some_written, act });
}

#[test]
fn c41_a_disk_that_is_flattened() {
    let act = |served: &mut Served| {
        let (image, mut at) = (&served.disk().image, 0);
        while at < BYTES as u64 {
            match image.pull(at, 3 * TABLE as u64) {
                Ok(pulled) => at = pulled.next,
                Err(_) => return,
            }
        }
        let _ = image.detach();
    };
    each_call(&Scenario { make: overlay, prepare: some_written, act });
}

#[test]
fn c41_an_image_that_is_handed_over() {
    let prepare = |served: &mut Served| {
        some_written(served);
        served.change(vec![zero(Op::WriteZeroes, 0, TABLE)]);
        writes(served);
    };
    let act = |served: &mut Served| {
        // Then it is another's.
        if served.disk().image.hand_over(1).is_ok() {
            served.disk = None;
        }
    };
    each_call(&Scenario { make: overlay, prepare, act });
}

/// What is left is what a kill would leave.
#[test]
fn c41_the_end() {
    let (made, ways) = (folder(), [(false, 1), (true, 1), (true, 512)]);
    let before = overlay(made.path());
    for (journalled, unit) in ways {
        each_plan(&format!("{journalled} {unit}"), false, &|plan| {
            let folder = copy(made.path());
            let path = folder.path().join("image.qcow2");
            let mut served = Served::of(open(&path, unit, journalled), &before);
            some_written(&mut served);
            writes(&mut served);
            served.change(vec![zero(Op::WriteZeroes, 0, TABLE)]);
            let calls = Calls::of(&[&File::open(&path).unwrap()], false);
            if let Some((nth, for_ever, how)) = plan {
                calls.fail(nth, for_ever, how);
            }
            drop(served.disk.take());
            let count = calls.mend();
            // A sync may have failed, which drops entries: then whoever comes next says so.
            let journal = path.with_file_name("journal");
            let (mut again, replayed) = match journalled {
                true => TestDisk::open_with_journal(&path, unit, &journal),
                false => (TestDisk::open_in_units(&path, false, unit), Replayed::Nothing),
            };
            let found = again.read(0, BYTES);
            if replayed != Replayed::Lost {
                served.compare(&found, &format!("{plan:?} {replayed:?}"));
            }
            drop(again);
            let found = checked(&path).unwrap_or_else(|wrong| panic!("{plan:?}: {wrong}"));
            assert!(found.leaks <= RESERVE, "{plan:?}: {} leaks", found.leaks);
            count
        });
    }
}

/// Begun again it gets done.
#[test]
fn c41_a_smaller_disk() {
    let made = folder();
    let mut content_before = overlay(made.path());
    let path = made.path().join("image.qcow2");
    let mut disk = TestDisk::open(&path, false);
    disk.write(0, &vec![1; 3 * TABLE + 9 * CLUSTER]);
    content_before[..3 * TABLE + 9 * CLUSTER].fill(1);
    drop(disk);
    let usage = Use { read_only: false, grows: true, barriers: true };
    let open = |path: &Path| Image::open(layers(path, false), usage).unwrap();
    let size = 2 * TABLE - 3 * CLUSTER;
    each_plan("a smaller disk", false, &|plan| {
        let folder = copy(made.path());
        let path = folder.path().join("image.qcow2");
        let image = open(&path);
        let calls = Calls::of(&[&File::open(&path).unwrap()], false);
        if let Some((nth, for_ever, how)) = plan {
            calls.fail(nth, for_ever, how);
        }
        let is_done = image.shrink(size as u64).is_ok();
        let count = calls.mend();
        let found = checked(&path).unwrap_or_else(|wrong| panic!("{plan:?}: {wrong}"));
        assert!(found.leaks <= RESERVE, "{plan:?}: {} leaks", found.leaks);
        assert!(!is_done || plan.is_some() || found.leaks == 0, "{plan:?}: {} leaks", found.leaks);
        let found = content(&path);
        assert!(found.len() == size || (!is_done && found.len() == BYTES), "{plan:?}");
        assert!(found[..size] == content_before[..size], "{plan:?}");
        if found.len() > size {
            open(&path).shrink(size as u64).unwrap();
        }
        let found = content(&path);
        assert!(found.len() == size && found == content_before[..size], "{plan:?}: again");
        repaired(&path).unwrap();
        count
    });
}

/// Begun again it gets done.
#[test]
fn c41_entries_of_a_killed_daemon() {
    let made = folder();
    let mut content = overlay(made.path());
    let path = made.path().join("image.qcow2");
    let mut disk = open(&path, 1, true);
    (0..5).for_each(|table| disk.write((table * TABLE) as u64, &[9; SECTOR]));
    disk.flush();
    for table in 0..5 {
        content[table * TABLE..table * TABLE + SECTOR].fill(9);
        disk.write((table * TABLE + 5 * CLUSTER) as u64, &[8; SECTOR]);
        content[table * TABLE + 5 * CLUSTER..table * TABLE + 5 * CLUSTER + SECTOR].fill(8);
    }
    let killed = copy(made.path());
    drop(disk);
    for unit in [1, 512] {
        each_plan(&format!("{unit}"), false, &|plan| {
            let folder = copy(killed.path());
            let path = folder.path().join("image.qcow2");
            let file = Arc::new(File::options().read(true).write(true).open(&path).unwrap());
            let journal = crate::disk::journal(&path.with_file_name("journal"));
            let calls = Calls::of(&[&file], false);
            if let Some((nth, for_ever, how)) = plan {
                calls.fail(nth, for_ever, how);
            }
            let replayed = replayed_by(&file, unit, Some(&journal));
            let count = calls.mend();
            let again = replayed_by(&file, unit, Some(&journal)).unwrap();
            let is_lost = again == Replayed::Lost;
            assert!(replayed.is_err() || again == Replayed::Nothing, "{plan:?} {replayed:?}");
            let mut disk = TestDisk::open(&path, false);
            assert!(is_lost || disk.read(0, BYTES) == content, "{plan:?} {replayed:?} {again:?}");
            drop(disk);
            checked(&path).unwrap_or_else(|wrong| panic!("{plan:?}: {wrong}"));
            count
        });
    }
}

/// Begun again it gets done.
#[test]
fn c41_leaks_that_are_repaired() {
    let made = folder();
    let content_before = empty(made.path());
    let path = made.path().join("image.qcow2");
    let mut disk = TestDisk::open(&path, false);
    disk.write(0, &[0; 40 * CLUSTER]);
    disk.write(TABLE as u64, &[0; 40 * CLUSTER]);
    // What it has taken ahead leaks.
    let killed = copy(made.path());
    drop(disk);
    assert!(checked(&killed.path().join("image.qcow2")).unwrap().leaks > 0);
    each_plan("leaks", false, &|plan| {
        let folder = copy(killed.path());
        let path = folder.path().join("image.qcow2");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let bytes = file.metadata().unwrap().len();
        let header = Header::read(&file, bytes).unwrap().unwrap();
        let calls = Calls::of(&[&file], false);
        calls.of_tools();
        if let Some((nth, for_ever, how)) = plan {
            calls.fail(nth, for_ever, how);
        }
        let repair = repair_leaks(&file, &header, bytes, CheckOptions::default());
        let count = calls.mend();
        let found = checked(&path).unwrap_or_else(|wrong| panic!("{plan:?}: {wrong}"));
        assert!(repair.is_err() || found.leaks == 0, "{plan:?}");
        repaired(&path).unwrap();
        assert!(content(&path) == content_before, "{plan:?}");
        count
    });
}

/// `top` on `middle` on `image.qcow2`; the middle one is merged into the last. Begun again it gets done.
#[test]
fn c41_an_image_that_is_merged() {
    let made = folder();
    let at = |folder: &Path, name: &str| folder.join(name);
    create(made.path(), "image.qcow2", BYTES - 2 * TABLE, None);
    create(made.path(), "middle", BYTES, Some(("image.qcow2", Format::Qcow2)));
    create(made.path(), "top", BYTES, Some(("middle", Format::Qcow2)));
    let mut content = vec![0; BYTES];
    for (name, from, len, byte) in [
        ("image.qcow2", 0, TABLE, 1),
        ("middle", TABLE / 2, TABLE, 2),
        ("middle", 4 * TABLE, 9 * CLUSTER, 3),
        ("top", TABLE, 3 * CLUSTER, 4),
    ] {
        TestDisk::open(&at(made.path(), name), false).write(from as u64, &vec![byte; len]);
        content[from..from + len].fill(byte);
    }
    let merge = |folder: &Path, disk: &TestDisk| -> std::io::Result<Commit> {
        let chain: Vec<Layer> = layers(&at(folder, "middle"), true);
        let base = layers(&at(folder, "image.qcow2"), false);
        assert!(matches!(base[0].format, LayerFormat::Qcow2 { .. }));
        let mut commit = Commit::open(chain[0].clone(), base, &Bases::default(), 1, true)?;
        let mut done = 0;
        while done < commit.size() {
            done = commit.copy(done, TABLE as u64)?.next;
        }
        commit.finish()?;
        disk.image.skip_middle()?;
        Ok(commit)
    };
    each_plan("merged", false, &|plan| {
        let folder = copy(made.path());
        let folder = folder.path();
        let mut disk = TestDisk::open(&at(folder, "top"), false);
        let names = ["image.qcow2", "top"].map(|name| File::open(at(folder, name)).unwrap());
        let calls = Calls::of(&[&names[0], &names[1]], false);
        if let Some((nth, for_ever, how)) = plan {
            calls.fail(nth, for_ever, how);
        }
        let merged = merge(folder, &disk).and_then(Commit::give_back);
        let count = calls.mend();
        assert!(disk.read(0, BYTES) == content, "{plan:?} {merged:?}");
        drop(disk);
        let mut disk = TestDisk::open(&at(folder, "top"), false);
        assert!(disk.read(0, BYTES) == content, "{plan:?} {merged:?}: opened again");
        if disk.image.layers().len() > 2 {
            let merged = merge(folder, &disk).unwrap();
            drop(disk);
            merged.give_back().unwrap();
        } else {
            drop(disk);
        }
        for name in ["image.qcow2", "top"] {
            let found =
                checked(&at(folder, name)).unwrap_or_else(|wrong| panic!("{plan:?} {wrong}"));
            assert!(found.leaks <= RESERVE, "{plan:?} {name}: {} leaks", found.leaks);
        }
        let mut disk = TestDisk::open(&at(folder, "top"), false);
        assert_eq!(disk.image.layers().len(), 2);
        assert!(disk.read(0, BYTES) == content, "{plan:?}: in the end");
        count
    });
}
