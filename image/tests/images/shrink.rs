//! Images that become smaller: those of QEMU's programs of every kind, and what a power cut leaves.

use crate::disk::{TestDisk, layers};
use crate::matrix::random_changes;
use crate::power_cuts::{CUTS, Lie, QEMU, SECTOR, after_cut, checked, content, repaired};
use crate::qemu;
use crate::record::{Event, Record};
use ringway_image::{Format, Image, NewImage, Use};
use ringway_testkit::Rng;
use std::fs::File;
use std::path::{Path, PathBuf};

fn open(path: &Path) -> Image {
    let usage = Use { read_only: false, grows: true, barriers: true };
    Image::open(layers(path, false), usage).unwrap()
}

/// What the base of all of them holds.
fn base(folder: &Path, bytes: usize) -> Vec<u8> {
    let base: Vec<u8> = (0..bytes).map(|at| (at / SECTOR) as u8 | 1).collect();
    std::fs::write(folder.join("base.raw"), &base).unwrap();
    base
}

/// A size that may be in the middle of a cluster, or of a table, or at the end of one.
fn size(rng: &mut Rng, below: usize) -> usize {
    let unit = rng.pick(&[SECTOR, 4096, 32768, 65536]);
    ((1 + rng.below((below / unit).max(1) as u64) as usize) * unit).min(below - SECTOR)
}

/// Larger again: what was added is zeroes, by whichever program.
fn grows(rng: &mut Rng, path: &Path, model: &mut Vec<u8>) {
    let bytes = model.len() + (1 + rng.below(2000) as usize) * SECTOR;
    if rng.below(2) == 0 {
        let image = open(path);
        image.grow(bytes as u64).unwrap();
        image.give_back().unwrap();
    } else {
        qemu::img(&["resize", "-q", "-f", "qcow2", path.to_str().unwrap(), &bytes.to_string()]);
    }
    model.resize(bytes, 0);
}

/// They are whole for `qemu-img`, without leaks, and so are their snapshots; what was cut off does not come
/// back.
#[test]
fn c37_images_of_every_kind_become_smaller() {
    if !qemu::is_here() {
        return;
    }
    let mut rng = Rng::for_test("images_become_smaller");
    let images = std::env::var("RINGWAY_IMAGES").map_or(40, |count| count.parse().unwrap());
    for nth in 0..images {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = folder.path().join("image");
        let name = path.to_str().unwrap();
        let bytes = 1 << 20;
        let (old, backed) = (rng.below(4) == 0, rng.below(2) == 0);
        // Version 2 has no word for zeroes over a base.
        let backed = backed && !old;
        let cluster = rng.pick(&["512", "4k", "64k"]);
        let options = format!("compat={},cluster_size={cluster}", if old { "0.10" } else { "1.1" });
        let mut model = vec![0; bytes];
        let all = |bytes: usize| format!("{bytes}");
        if backed {
            model = base(folder.path(), 2 * bytes)[..bytes].to_vec();
            let on = ["-b", "base.raw", "-F", "raw", name, &all(bytes)];
            qemu::img(&[&["create", "-q", "-f", "qcow2", "-o", &options][..], &on].concat());
        } else {
            qemu::img(&["create", "-q", "-f", "qcow2", "-o", &options, name, &all(bytes)]);
        }
        if rng.below(2) == 0 && cluster != "512" {
            let cluster = if cluster == "4k" { 4096 } else { 65536 };
            let at = rng.below((bytes / cluster) as u64) as usize * cluster;
            qemu::io(&path, &[format!("write -q -c -P 7 {at} {cluster}")]);
            model[at..at + cluster].fill(7);
        }
        let write = |rng: &mut Rng, model: &mut Vec<u8>| {
            let mut disk = TestDisk::open(&path, false);
            (0..4).for_each(|_| disk.change(&mut random_changes(rng, model)));
        };
        write(&mut rng, &mut model);
        let mut taken = None;
        if rng.below(2) == 0 && !old {
            qemu::img(&["snapshot", "-q", "-c", "kept", name]);
            taken = Some(model.clone());
            write(&mut rng, &mut model);
        }
        for round in 0..3 {
            let wanted = size(&mut rng, model.len());
            open(&path).shrink(wanted as u64).unwrap();
            model.truncate(wanted);
            qemu::check(&path, false);
            assert!(qemu::content(&path, None) == model, "{nth} {round} {options}: {wanted}");
            grows(&mut rng, &path, &mut model);
            assert!(qemu::content(&path, None) == model, "{nth} {round} {options}: larger again");
            write(&mut rng, &mut model);
            qemu::check(&path, false);
            assert!(qemu::content(&path, None) == model, "{nth} {round} {options}: written");
        }
        if let Some(taken) = taken {
            // With the size that it had.
            qemu::img(&["snapshot", "-q", "-a", "kept", name]);
            qemu::check(&path, false);
            assert!(qemu::content(&path, None) == taken, "{nth} {options}: the snapshot");
        }
    }
}

/// Each before anything is changed.
#[test]
fn c37_what_would_lose_more_than_was_said_is_refused() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let name = path.to_str().unwrap();
    base(folder.path(), 1 << 20);
    let made = |options: &str, more: &[&str]| {
        let _ = std::fs::remove_file(&path);
        let words = ["create", "-q", "-f", "qcow2", "-o", options];
        qemu::img(&[&words[..], more, &[name, "1M"]].concat());
        qemu::io(&path, &["write -q -P 7 0 1M".into()]);
    };
    let refused = |size: u64, words: &str| {
        // Its last cluster is whole from the first time on.
        drop(open(&path));
        let before = std::fs::read(&path).unwrap();
        let said = open(&path).shrink(size).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
        assert!(std::fs::read(&path).unwrap() == before, "{words}");
        qemu::check(&path, false);
    };
    made("compat=1.1", &[]);
    for size in [0, 511, 1 << 20, 2 << 20] {
        refused(size, "no size");
    }
    made("compat=0.10", &["-b", "base.raw", "-F", "raw"]);
    refused(65536, "version 2");
    made("compat=0.10", &[]);
    qemu::img(&["snapshot", "-c", "kept", name]);
    refused(65536, "version 2");
    made(&format!("data_file={name}.data"), &[]);
    refused(65536, "another file");
}

/// What is asked of a file while its disk becomes smaller.
struct History {
    folder: tempfile::TempDir,
    path: PathBuf,
    before: Vec<u8>,
    events: Vec<Event>,
    model: Vec<u8>,
    base: Vec<u8>,
    size: usize,
}

impl History {
    fn record(rng: &mut Rng) -> Self {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = folder.path().join("image.qcow2");
        let cluster_bits = rng.pick(&[9, 9, 12, 16]);
        let bytes = rng.pick(&[300 * SECTOR, 1 << 20]);
        let backed = rng.below(2) == 0;
        let base = if backed { base(folder.path(), bytes) } else { vec![0; bytes] };
        let mut model = base.clone();
        let backing = backed.then_some((Path::new("base.raw"), Format::Raw));
        let new = NewImage { virtual_size: bytes as u64, cluster_bits, backing };
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        new.write(&file).unwrap();
        let mut disk = TestDisk::open(&path, false);
        (0..8).for_each(|_| disk.change(&mut random_changes(rng, &mut model)));
        drop(disk);
        let before = std::fs::read(&path).unwrap();
        let record = Record::of(&file);
        let size = size(rng, bytes);
        open(&path).shrink(size as u64).unwrap();
        let events = record.take();
        Self { folder, path, before, events, model, base, size }
    }

    /// The old size or the new one, with all that lies before both. What is to be cut off is as it was, or
    /// gone.
    fn compare(&self, found: &[u8]) -> Result<(), String> {
        if ![self.size, self.model.len()].contains(&found.len()) {
            return Err(format!("{} bytes", found.len()));
        }
        if found[..self.size] != self.model[..self.size] {
            return Err("what lies before the new end".into());
        }
        let sector = |all: &'_ [u8], at: usize| all[at * SECTOR..(at + 1) * SECTOR].to_vec();
        for at in self.size / SECTOR..found.len() / SECTOR {
            let here = sector(found, at);
            let may = [sector(&self.model, at), sector(&self.base, at), vec![0; SECTOR]];
            if !may.contains(&here) {
                return Err(format!("sector {at}"));
            }
        }
        Ok(())
    }

    fn judge(&self, rng: &mut Rng, count: usize, lie: Lie) -> Result<(), String> {
        let events: Vec<_> = self.events[..count].iter().collect();
        let path = self.folder.path().join("cut.qcow2");
        std::fs::write(&path, after_cut(rng, &self.before, &events, lie)).unwrap();
        checked(&path)?;
        let mut model = content(&path);
        self.compare(&model)?;
        if rng.below(QEMU) == 0 && qemu::is_here() && lie == Lie::None {
            qemu::check(&path, true);
        }
        if rng.below(4) > 0 || lie != Lie::None {
            return Ok(());
        }
        // The same command goes on, and what was cut off does not come back.
        if model.len() > self.size {
            open(&path).shrink(self.size as u64).unwrap();
            model.truncate(self.size);
        }
        repaired(&path)?;
        let image = open(&path);
        image.grow(self.model.len() as u64 + 65536).unwrap();
        image.give_back().unwrap();
        drop(image);
        model.resize(self.model.len() + 65536, 0);
        checked(&path)?;
        if content(&path) == model { Ok(()) } else { Err("when it had grown again".into()) }
    }
}

/// Cuts until there are so many; the first thing that is wrong.
fn campaign(rng: &mut Rng, cuts: u64, lie: Lie) -> Result<(), String> {
    let mut done = 0;
    while done < cuts {
        let seed = rng.next_u64();
        let mut rng = Rng::new(seed);
        let history = History::record(&mut rng);
        for _ in 0..CUTS.min(cuts - done) {
            let count = rng.below(history.events.len() as u64 + 1) as usize;
            let judged = history.judge(&mut rng, count, lie);
            judged.map_err(|wrong| format!("history {seed}, cut behind event {count}: {wrong}"))?;
            done += 1;
        }
        // Durable when it returns.
        let events: Vec<_> = history.events.iter().collect();
        let image = after_cut(&mut rng, &history.before, &events, lie);
        std::fs::write(&history.path, image).unwrap();
        if lie == Lie::None {
            assert_eq!(content(&history.path).len(), history.size, "history {seed}");
        }
    }
    Ok(())
}

#[test]
fn c37_a_power_cut_while_a_disk_becomes_smaller_leaves_an_image_that_is_whole() {
    let cuts = std::env::var("RINGWAY_POWER_CUTS").map_or(480, |cuts| cuts.parse().unwrap());
    let mut rng = Rng::for_test("a_disk_becomes_smaller");
    campaign(&mut rng, cuts, Lie::None).unwrap();
}

#[test]
fn c37_a_disk_that_forgets_what_was_synced_is_noticed() {
    let wrong = campaign(&mut Rng::new(37), 2000, Lie::Sync).unwrap_err();
    println!("{wrong}");
}
