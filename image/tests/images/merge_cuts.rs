//! Power cuts while a chain of images changes: a snapshot is taken, merged into its base, or the image
//! takes in all that it is based on. Of what each of the files was asked and had not been synced, any part
//! may be lost, by itself; names are those from before or from after. The disk is whole whatever is left,
//! what was flushed is there, and the snapshot on its base holds what it did until nobody needs it.
//!
//! `RINGWAY_POWER_CUTS` makes so many cuts, `RINGWAY_SEED` repeats a run.

use crate::disk::{TestDisk, layers};
use crate::flatten::pull;
use crate::matrix::random_changes;
use crate::power_cuts::{
    CUTS, Lie, QEMU, SECTOR, Versions, after_cut, begins, checked, compare, flushed, push, reached,
};
use crate::qemu;
use crate::record::{Event, Record};
use ringway_image::{Bases, Commit, Format, Header, Layer, LayerFormat, NewImage, Reader};
use ringway_testkit::Rng;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files, by the order in which they are recorded.
const BASE: usize = 0;
const OLD: usize = 1;
const NEW: usize = 2;

/// How far the names and the chain are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// `disk` is the old image.
    Before,
    /// It may be either.
    Naming,
    /// It is the new one, and the old one is `snap`.
    Named,
    /// What was merged is needed no more.
    Merged,
}

/// What happened to the files of a disk.
struct History {
    folder: tempfile::TempDir,
    raw: bool,
    flattened: bool,
    /// Each file before it was recorded.
    before: Vec<Vec<u8>>,
    events: Vec<(usize, Event)>,
    /// From which event on.
    stages: Vec<(usize, Stage)>,
    /// What the disk held before, and everything that was written.
    content: Vec<u8>,
    versions: Versions,
    /// What the snapshot holds.
    taken: Vec<u8>,
}

/// A history that is being made.
struct Making<'a> {
    rng: &'a mut Rng,
    record: Record,
    model: Vec<u8>,
    versions: Versions,
    number: u64,
    events: Vec<(usize, Event)>,
    stages: Vec<(usize, Stage)>,
}

impl Making<'_> {
    /// A guest writes a while, and flushes now and then.
    fn writes(&mut self, disk: &mut TestDisk, most: u64) {
        for _ in 0..self.rng.below(most) {
            self.number += 1;
            self.record.note(begins(self.number));
            let mut changes = random_changes(self.rng, &mut self.model);
            for change in &changes {
                let sector = usize::try_from(change.at).unwrap() / SECTOR;
                push(&mut self.versions, self.number, sector, &change.bytes);
            }
            disk.change(&mut changes);
            if self.rng.below(3) == 0 {
                self.flush(disk);
            }
        }
    }

    /// As the engines do for a guest.
    fn flush(&mut self, disk: &TestDisk) {
        disk.image.files()[0].sync_data().unwrap();
        self.record.note(flushed(self.number));
    }

    fn reaches(&mut self, stage: Stage) {
        self.events.extend(self.record.take_all());
        self.stages.push((self.events.len(), stage));
    }

    /// As `ctl snapshot`: the old image gets another name, the new one its own; then it is on top.
    fn snapshot(&mut self, at: &dyn Fn(&str) -> PathBuf, mut old: TestDisk, bits: u32) -> TestDisk {
        let backing = Some((Path::new("snap"), Format::Qcow2));
        let new = NewImage { virtual_size: self.model.len() as u64, cluster_bits: bits, backing };
        let file = File::options().read(true).write(true).create_new(true).open(at("new")).unwrap();
        new.write(&file).unwrap();
        old.image.files()[0].sync_data().unwrap();
        self.record.add(&file);
        self.reaches(Stage::Naming);
        std::fs::hard_link(at("disk"), at("snap")).unwrap();
        self.writes(&mut old, 3);
        std::fs::rename(at("new"), at("disk")).unwrap();
        self.writes(&mut old, 3);
        self.reaches(Stage::Named);
        self.writes(&mut old, 3);
        // Nothing is in flight, and what was written is durable.
        self.flush(&old);
        let disk = TestDisk::open(&at("disk"), false);
        // What it had taken ahead is given back.
        drop(old);
        disk
    }

    /// As `ctl commit`.
    fn commit(&mut self, at: &dyn Fn(&str) -> PathBuf, mut disk: TestDisk, raw: bool) -> TestDisk {
        let begin = || {
            let chain = layers(&at("snap"), true);
            Commit::judge(&chain[0], &chain[1], 1).unwrap();
            let base = match raw {
                false => layers(&at("base"), false),
                true => {
                    let file = File::options().read(true).write(true).open(at("base")).unwrap();
                    let (file_bytes, file) = (file.metadata().unwrap().len(), Arc::new(file));
                    vec![Layer { file, file_bytes, format: LayerFormat::Raw, name: at("base") }]
                }
            };
            Commit::open(chain[0].clone(), base, &Bases::default(), 1, true).unwrap()
        };
        let (mut commit, mut done) = (begin(), 0);
        while done < commit.size() {
            done = commit.copy(done, 1 + self.rng.below(300_000)).unwrap().next;
            self.writes(&mut disk, 3);
            if self.rng.below(12) == 0 {
                // Cancelled, and begun anew.
                drop(commit);
                (commit, done) = (begin(), 0);
            }
        }
        commit.finish().unwrap();
        disk.image.skip_middle().unwrap();
        self.writes(&mut disk, 3);
        let disk = self.reopen(at, disk);
        commit.give_back().unwrap();
        disk
    }

    /// As `ctl flatten`.
    fn flatten(&mut self, at: &dyn Fn(&str) -> PathBuf, mut disk: TestDisk) -> TestDisk {
        let mut done = 0;
        while !pull(self.rng, &disk, &mut done) {
            self.writes(&mut disk, 3);
        }
        disk.image.detach().unwrap();
        self.writes(&mut disk, 3);
        self.reopen(at, disk)
    }

    /// In the rest at the end of a job. From then on what was merged may be deleted.
    fn reopen(&mut self, at: &dyn Fn(&str) -> PathBuf, disk: TestDisk) -> TestDisk {
        self.flush(&disk);
        disk.image.give_back().unwrap();
        drop(disk);
        let disk = TestDisk::open(&at("disk"), false);
        self.reaches(Stage::Merged);
        disk
    }
}

impl History {
    fn record(rng: &mut Rng) -> Self {
        let folder =
            tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "." });
        let folder = folder.unwrap();
        let at = |name: &str| folder.path().join(name);
        let bits = rng.pick(&[9, 12, 16]);
        let bytes = rng.pick(&[65536, 300 * SECTOR, 1 << 19]);
        let (raw, flattened) = (rng.below(2) == 0, rng.below(3) == 0);
        // A base that is smaller becomes as large.
        let lower = if rng.below(3) == 0 { bytes * 2 / 3 / SECTOR * SECTOR } else { bytes };
        let mut model = vec![0; bytes];
        let pattern = |(at, byte): (usize, &mut u8)| *byte = (at / SECTOR) as u8 | 1;
        model[..lower].iter_mut().enumerate().for_each(pattern);
        let create = |name: &str, bytes: usize, bits, backing| {
            let new = NewImage { virtual_size: bytes as u64, cluster_bits: bits, backing };
            let mut options = File::options();
            let file = options.read(true).write(true).create_new(true).open(at(name)).unwrap();
            new.write(&file).unwrap();
        };
        if raw {
            std::fs::write(at("base"), &model[..lower]).unwrap();
        } else {
            create("base", lower, rng.pick(&[9, bits]), None);
            let mut disk = TestDisk::open(&at("base"), false);
            disk.write(0, &model[..lower]);
            // Some of it is given back, so that there are holes among its clusters.
            (0..3).for_each(|_| disk.change(&mut random_changes(rng, &mut model[..lower])));
        }
        let format = if raw { Format::Raw } else { Format::Qcow2 };
        create("disk", bytes, bits, Some((Path::new("base"), format)));
        let content = model.clone();
        let read = |name: &str| std::fs::read(at(name)).unwrap();
        let mut before = vec![read("base"), read("disk")];
        let record = Record::of(&File::open(at("base")).unwrap());
        record.add(&File::open(at("disk")).unwrap());
        let (versions, events) = (Versions::new(), Vec::new());
        let stages = vec![(0, Stage::Before)];
        let mut making = Making { rng, record, model, versions, number: 0, events, stages };
        let mut disk = TestDisk::open(&at("disk"), false);
        making.writes(&mut disk, 12);
        let mut disk = making.snapshot(&at, disk, bits);
        let taken = making.model.clone();
        making.writes(&mut disk, 6);
        let mut disk = match flattened {
            true => making.flatten(&at, disk),
            false => making.commit(&at, disk, raw),
        };
        making.writes(&mut disk, 6);
        drop(disk);
        // What a new image is before it is recorded.
        let empty = folder.path().join("empty");
        let backing = Some((Path::new("snap"), Format::Qcow2));
        create("empty", bytes, bits, backing);
        before.push(std::fs::read(empty).unwrap());
        making.events.extend(making.record.take_all());
        let Making { versions, events, stages, .. } = making;
        Self { folder, raw, flattened, before, events, stages, content, versions, taken }
    }

    /// How far names and chain were then.
    fn stage(&self, count: usize) -> Stage {
        let reached = self.stages.iter().rev().find(|(from, _)| *from <= count);
        reached.map_or(Stage::Before, |(_, stage)| *stage)
    }

    fn judge(&self, rng: &mut Rng, count: usize, lie: Lie, qemu: bool) -> Result<Stage, String> {
        let events = &self.events[..count];
        let cut = |rng: &mut Rng, file: usize| {
            let its = events.iter().filter(|(nth, _)| *nth == file).map(|(_, event)| event);
            let its: Vec<_> = its.filter(|event| !matches!(event, Event::Note(_))).collect();
            after_cut(rng, &self.before[file], &its, lie)
        };
        let [base, old, new] = [BASE, OLD, NEW].map(|file| cut(rng, file));
        let mut stage = self.stage(count);
        let is_old = stage == Stage::Before || (stage == Stage::Naming && rng.below(2) == 0);
        let folder = self.folder.path().join("cut");
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let gone = stage == Stage::Merged;
        let garbage = || b"deleted, and used for something else".to_vec();
        std::fs::write(at("disk"), if is_old { &old } else { &new }).unwrap();
        std::fs::write(at("snap"), if gone { garbage() } else { old }).unwrap();
        let alone = gone && self.flattened;
        std::fs::write(at("base"), if alone { garbage() } else { base }).unwrap();
        let mut whole = vec!["disk"];
        whole.extend((!gone).then_some("snap"));
        whole.extend((!self.raw && !alone).then_some("base"));
        for name in &whole {
            checked(&at(name)).map_err(|wrong| format!("{stage:?}, {name}: {wrong}"))?;
            if let Some(named) = backing(&at(name)).filter(|named| !folder.join(named).is_file()) {
                return Err(format!("{stage:?}, {name}: it names {named:?}, which is not there"));
            }
            if qemu {
                qemu::check(&at(name), true);
            }
        }
        let reached = reached(events.iter().map(|(_, event)| event));
        let differs = |name: &str, wrong: String| Err(format!("{stage:?}, {name}: {wrong}"));
        let named = backing(&at("disk"));
        if gone && named != (!self.flattened).then(|| "base".into()) {
            return differs("disk", format!("it is based on {named:?}"));
        }
        let found = content(&at("disk"));
        if found.len() != self.content.len() {
            return differs("disk", format!("{} bytes", found.len()));
        }
        if let Err(wrong) = compare(&self.content, &self.versions, &found, reached) {
            return differs("disk", wrong);
        }
        if stage == Stage::Named && self.is_taken(count) && content(&at("snap")) != self.taken {
            return differs("snap", "it is not what was taken".into());
        }
        if gone && !self.flattened {
            let found =
                if self.raw { std::fs::read(at("base")).unwrap() } else { content(&at("base")) };
            if found != self.taken {
                return differs("base", "it is not what was merged".into());
            }
        }
        if is_old {
            stage = Stage::Before;
        }
        Ok(stage)
    }

    /// Nothing is written to the old image any more: the new one has been.
    fn is_taken(&self, count: usize) -> bool {
        let is_write = |(nth, event): &(usize, Event)| {
            *nth == NEW && matches!(event, Event::Write { .. } | Event::Size(_))
        };
        self.events[..count].iter().any(is_write)
    }
}

/// What the header of an image names.
fn backing(path: &Path) -> Option<PathBuf> {
    let file = File::open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    Header::read(&file, bytes).unwrap().unwrap().backing.map(|backing| backing.name)
}

/// All that a disk holds.
fn content(path: &Path) -> Vec<u8> {
    let mut reader = Reader::open(layers(path, true)).unwrap();
    let mut bytes = vec![0; usize::try_from(reader.size()).unwrap()];
    reader.read(0, &mut bytes).unwrap();
    bytes
}

/// Histories and cuts until there are so many; how many at each stage, or the first thing that is wrong.
fn campaign(rng: &mut Rng, cuts: u64, lie: Lie) -> Result<[u64; 4], String> {
    let (mut at, has_qemu) = ([0; 4], qemu::is_here());
    while at.iter().sum::<u64>() < cuts {
        let seed = rng.next_u64();
        let mut rng = Rng::new(seed);
        let history = History::record(&mut rng);
        for _ in 0..CUTS {
            let count = usize::try_from(rng.below(history.events.len() as u64 + 1)).unwrap();
            let qemu = has_qemu && lie == Lie::None && rng.below(QEMU) == 0;
            let judged = history.judge(&mut rng, count, lie, qemu);
            let stage = judged.map_err(|wrong| {
                let (raw, flattened) = (history.raw, history.flattened);
                format!(
                    "history {seed} (raw {raw}, flattened {flattened}), cut behind event {count}: {wrong}"
                )
            })?;
            at[stage as usize] += 1;
        }
    }
    Ok(at)
}

#[test]
fn c33_a_power_cut_while_a_chain_changes_leaves_a_whole_disk() {
    let cuts = std::env::var("RINGWAY_POWER_CUTS").map_or(480, |cuts| cuts.parse().unwrap());
    let mut rng = Rng::for_test("a_power_cut_while_a_chain_changes");
    let at = campaign(&mut rng, cuts, Lie::None).unwrap();
    println!(
        "cuts: {} before a snapshot, {} and {} in and after it, {} after a merge",
        at[0], at[1], at[2], at[3]
    );
    assert!(at[0] > 0 && at[2] > 0 && at[3] > 0, "{at:?}");
}

#[test]
fn c33_a_disk_that_forgets_what_was_synced_is_noticed() {
    let wrong = campaign(&mut Rng::new(33), 4000, Lie::Sync).unwrap_err();
    println!("{wrong}");
}
