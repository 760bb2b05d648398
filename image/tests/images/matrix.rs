//! Images of every kind, at random: read as QEMU reads them, written so that QEMU reads what was
//! written.
//!
//! `RINGWAY_IMAGES=500` has more of them, `RINGWAY_SEED` repeats a run.

use crate::disk::{Change, TestDisk, layers};
use crate::flatten::flatten;
use crate::qemu;
use ringway_core::Op;
use ringway_image::{CheckOptions, Header, Reader, check};
use ringway_testkit::Rng;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Cluster sizes, in bytes; the usual one often.
const CLUSTERS: &[u64] = &[512, 1024, 4096, 4096, 65536, 65536, 65536, 262_144, 2 << 20];

/// What an image is like.
#[derive(Debug)]
struct Kind {
    cluster: u64,
    old: bool,
    refcount_bits: u32,
    lazy: bool,
    preallocation: &'static str,
    zstd: bool,
    compressed: bool,
    /// Its data are in another file,
    data_file: bool,
    /// which is to be a raw image of the disk.
    data_file_raw: bool,
}

impl Kind {
    fn random(rng: &mut Rng) -> Self {
        let old = rng.below(4) == 0;
        let new = |this, that| if old { that } else { this };
        Self {
            cluster: rng.pick(CLUSTERS),
            old,
            refcount_bits: new(rng.pick(&[1, 2, 4, 8, 16, 16, 16, 32, 64]), 16),
            lazy: !old && rng.below(4) == 0,
            preallocation: rng.pick(&["off", "off", "off", "metadata", "falloc"]),
            zstd: !old && rng.below(2) == 0,
            compressed: rng.below(3) == 0,
            data_file: !old && rng.below(6) == 0,
            data_file_raw: rng.below(2) == 0,
        }
    }

    fn options(&self, preallocated: bool) -> String {
        let mut options = format!("cluster_size={}", self.cluster);
        if self.old {
            options += ",compat=0.10";
        } else {
            options += &format!(",compat=1.1,refcount_bits={}", self.refcount_bits);
            options += if self.lazy { ",lazy_refcounts=on" } else { "" };
            options += if self.zstd { ",compression_type=zstd" } else { "" };
        }
        if preallocated {
            options += &format!(",preallocation={}", self.preallocation);
        }
        options
    }
}

/// Bytes that compress, with holes.
fn random_content(rng: &mut Rng, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    for _ in 0..rng.below(12) {
        let at = rng.below(bytes);
        let len = rng.below((bytes - at).min(300_000)) + 1;
        let byte = (rng.next_u64() & 0xff) as u8;
        let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
        for (nth, slot) in content[range].iter_mut().enumerate() {
            *slot = byte ^ u8::try_from(nth / 512 % 256).unwrap();
        }
    }
    content
}

/// Sectors of a disk at random.
fn random_range(rng: &mut Rng, bytes: u64, most: u64) -> (u64, u64) {
    let at = rng.below(bytes / 512) * 512;
    (at, (rng.below(most / 512) * 512 + 512).min(bytes - at))
}

/// An image with content of its own, or the end of a chain.
fn make(rng: &mut Rng, folder: &Path, level: u32) -> PathBuf {
    let mut kind = Kind::random(rng);
    kind.compressed &= !kind.data_file;
    let data_file = format!(",data_file={}/level{level}.data", folder.display());
    let data_file = if kind.data_file { data_file } else { String::new() };
    let raw_data = if kind.data_file && kind.data_file_raw { ",data_file_raw=on" } else { "" };
    println!("level {level}: {kind:?}");
    let path = folder.join(format!("level{level}.qcow2"));
    let name = path.to_str().unwrap();
    // With the smallest clusters tables are many, and QEMU is slow.
    let bytes = (rng.below(8 << 20) / 512 + 1) * 512;
    let raw = folder.join(format!("level{level}.raw"));
    if level == 3 || rng.below(3) == 0 {
        let content = random_content(rng, bytes);
        std::fs::write(&raw, content).unwrap();
        let options = kind.options(!kind.compressed && !kind.data_file) + &data_file + raw_data;
        let mut args = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", &options];
        args.extend(kind.compressed.then_some("-c"));
        args.extend([raw.to_str().unwrap(), name]);
        qemu::img(&args);
        return path;
    }
    let (backing, format) = if rng.below(3) == 0 {
        std::fs::write(&raw, random_content(rng, bytes)).unwrap();
        (raw, "raw")
    } else {
        (make(rng, folder, level + 1), "qcow2")
    };
    let size = if rng.below(2) == 0 { None } else { Some((rng.below(8 << 20) / 512 + 1) * 512) };
    let size = size.map(|size| size.to_string());
    let options = kind.options(false) + &data_file;
    let backing = backing.file_name().unwrap().to_str().unwrap().to_owned();
    let mut args =
        vec!["create", "-f", "qcow2", "-o", &options, "-b", &backing, "-F", format, name];
    args.extend(size.as_deref());
    qemu::img(&args);
    path
}

/// Has QEMU write some of it.
fn written_by_qemu(rng: &mut Rng, path: &Path, bytes: u64, old: bool) {
    let mut commands = Vec::new();
    for _ in 0..rng.below(6) {
        let (at, len) = random_range(rng, bytes, 400_000);
        let word = rng.pick(&["write -P 77", "write -P 78", "write -z", "write -zu", "discard"]);
        if !old || word.starts_with("write -P") {
            commands.push(format!("{word} {at} {len}"));
        }
    }
    if !commands.is_empty() {
        qemu::io(path, &commands);
    }
}

/// What the disk should hold, and what it holds at random places.
fn compare(rng: &mut Rng, disk: &mut TestDisk, model: &[u8], reads: u32) {
    for _ in 0..reads {
        let (at, len) = random_range(rng, model.len() as u64, 600_000);
        let len = usize::try_from(len).unwrap();
        let from = usize::try_from(at).unwrap();
        let read = disk.read(at, len);
        same(&read, &model[from..from + len], at);
    }
}

/// Compares, and says where the first difference is.
pub(crate) fn same(found: &[u8], wanted: &[u8], at: u64) {
    assert_eq!(found.len(), wanted.len());
    let differs = |sector: &usize| {
        let range = sector * 512..(sector * 512 + 512).min(found.len());
        found[range.clone()] != wanted[range]
    };
    if let Some(sector) = (0..found.len().div_ceil(512)).find(differs) {
        panic!(
            "at {at} + {}: {:x?}, not {:x?}",
            sector * 512,
            &found[sector * 512..sector * 512 + 8],
            &wanted[sector * 512..sector * 512 + 8]
        );
    }
}

/// Changes at random that do not touch each other.
pub(crate) fn random_changes(rng: &mut Rng, model: &mut [u8]) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    for _ in 0..=rng.below(8) {
        let most = rng.pick(&[4096, 4096, 70_000, 1 << 20]);
        let (at, len) = random_range(rng, model.len() as u64, most);
        let clash =
            |change: &Change| change.at < at + len && at < change.at + change.bytes.len() as u64;
        if changes.iter().any(clash) {
            continue;
        }
        let op = rng.pick(&[Op::Write, Op::Write, Op::Write, Op::Write, Op::WriteZeroes]);
        let byte = (rng.next_u64() | 1) as u8;
        let bytes = match op {
            Op::Write => (0..len).map(|nth| byte.wrapping_add((nth / 512) as u8)).collect(),
            _ => vec![0; usize::try_from(len).unwrap()],
        };
        let from = usize::try_from(at).unwrap();
        model[from..from + bytes.len()].copy_from_slice(&bytes);
        changes.push(Change { op, at, bytes });
    }
    changes
}

fn one_image(rng: &mut Rng) {
    let folder = tempfile::tempdir().unwrap();
    let path = make(rng, folder.path(), 0);
    let old = Kind::random(rng).old;
    // A snapshot doubles the count of each cluster, which compressed data share, and QEMU makes none of
    // data in another file.
    let (_, top) = header(&path);
    let shared = top.refcount_bits() < 16 && qemu::has_compressed(&path);
    let may_snapshot = top.refcount_bits() > 1 && top.data_file.is_none() && !shared;
    let snapshot = rng.below(4) == 0 && may_snapshot;
    let before = qemu::content(&path, None);
    written_by_qemu(rng, &path, before.len() as u64, old);
    if snapshot {
        qemu::img(&["snapshot", "-c", "kept", path.to_str().unwrap()]);
    }
    let mut model = qemu::content(&path, None);
    let kept = model.clone();
    {
        let mut disk = TestDisk::open(&path, true);
        assert_eq!(disk.image.size(), model.len() as u64);
        compare(rng, &mut disk, &model, 12);
    }
    by_tools(&path, &model);
    let (file, header) = header(&path);
    drop(file);
    let raw_data = header.data_file.filter(|data| data.raw).and_then(|data| data.name);
    for unit in [1, 512] {
        let mut disk = TestDisk::open_in_units(&path, false, unit);
        for _ in 0..12 {
            let mut changes = random_changes(rng, &mut model);
            disk.change(&mut changes);
            compare(rng, &mut disk, &model, 2);
            if rng.below(4) == 0 {
                discard(rng, &mut disk, &mut model);
            }
        }
        if rng.below(2) == 0 {
            grow(rng, &mut disk, &mut model);
        }
        let all = disk.read(0, model.len());
        same(&all, &model, 0);
        drop(disk);
        if let Some(name) = &raw_data {
            let mut found = std::fs::read(folder.path().join(name)).unwrap();
            // QEMU makes whole clusters.
            assert!(found.len() >= model.len() && found.len() < model.len() + (2 << 20));
            found.truncate(model.len());
            same(&found, &model, 0);
        }
        qemu::check(&path, false);
        same(&qemu::content(&path, None), &model, 0);
        checked(&path);
        by_tools(&path, &model);
    }
    if top.backing.is_some() && !snapshot && rng.below(2) == 0 {
        flatten(rng, &path, &mut model);
        checked(&path);
    }
    if snapshot {
        // QEMU shows it with the present size.
        let mut found = qemu::content(&path, Some("kept"));
        found.truncate(kept.len());
        same(&found, &kept, 0);
    }
}

/// The disk becomes larger while it is used: what was added reads as zeroes, whatever it is based on, and
/// is written.
fn grow(rng: &mut Rng, disk: &mut TestDisk, model: &mut Vec<u8>) {
    let most = rng.pick(&[4, 200, 4000, 40_000]);
    let size = model.len() as u64 + (rng.below(most) + 1) * 512;
    println!("from {} to {size}", model.len());
    if let Err(error) = disk.image.grow(size) {
        let said = error.to_string();
        assert!(said.contains("version 2") || said.contains("in one piece"), "{said}");
        println!("not grown: {said}");
        return;
    }
    assert_eq!(disk.image.size(), size);
    model.resize(usize::try_from(size).unwrap(), 0);
    for _ in 0..3 {
        compare(rng, disk, model, 4);
        let mut changes = random_changes(rng, model);
        disk.change(&mut changes);
    }
}

fn header(path: &Path) -> (File, Header) {
    let file = File::open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    let header = Header::read(&file, bytes).unwrap().unwrap();
    (file, header)
}

/// Our check agrees with QEMU's: nothing is wrong.
pub(crate) fn checked(path: &Path) {
    let (file, header) = header(path);
    let bytes = file.metadata().unwrap().len();
    let found = check(&file, &header, bytes, CheckOptions::default()).unwrap().unwrap();
    assert_eq!((found.errors, found.leaks), (0, 0), "{:?}", found.problems);
}

/// Read without being served: the same, and what QEMU's map has nowhere is known to be zero without
/// being read.
fn by_tools(path: &Path, model: &[u8]) {
    let mut reader = Reader::open(layers(path, true)).unwrap();
    let mut found = vec![0; model.len()];
    reader.read(0, &mut found).unwrap();
    same(&found, model, 0);
    let mut at = 0;
    while at < model.len() as u64 {
        let data = reader.next_data(at).unwrap().unwrap_or(model.len() as u64);
        let hole = &model[usize::try_from(at).unwrap()..usize::try_from(data).unwrap()];
        assert!(hole.iter().all(|&byte| byte == 0), "{at} to {data} is no hole");
        at = if data < model.len() as u64 { reader.next_hole(data).unwrap() } else { data };
    }
    for (start, len) in qemu::nowhere(path) {
        let data = reader.next_data(start).unwrap();
        let end = (start + len).min(model.len() as u64);
        assert!(data.is_none_or(|data| data >= end), "{start} to {end} is nowhere, not {data:?}");
    }
}

/// What was discarded reads as before, or as zeroes, or as what lies below: here only that it can be
/// read, and stays as it is.
fn discard(rng: &mut Rng, disk: &mut TestDisk, model: &mut [u8]) {
    let (at, len) = random_range(rng, model.len() as u64, 2 << 20);
    let len = usize::try_from(len).unwrap();
    disk.change(&mut [Change { op: Op::Discard, at, bytes: vec![0; len] }]);
    let from = usize::try_from(at).unwrap();
    model[from..from + len].copy_from_slice(&disk.read(at, len));
}

#[test]
fn images_of_every_kind_are_read_and_written_as_qemu_does() {
    if !qemu::is_here() {
        return;
    }
    let count = std::env::var("RINGWAY_IMAGES").map_or(12, |count| count.parse().unwrap());
    let mut rng = Rng::for_test("images_of_every_kind");
    for nth in 0..count {
        let seed = rng.next_u64();
        println!("image {nth}: seed {seed}");
        one_image(&mut Rng::new(seed));
    }
}
