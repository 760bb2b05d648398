//! The middle one of three images is merged into its base while the first is written: the same content,
//! and then without the middle one.

use crate::disk::{Change, TestDisk, layers};
use crate::matrix::{random_changes, same};
use crate::qemu;
use crate::record::{Event, Record, fail_next_sync};
use ringway_core::Op;
use ringway_image::{Bases, Commit, Format, Header, Image, Layer, LayerFormat, NewImage, Use};
use ringway_testkit::Rng;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Three images or more, all in one folder.
struct Chain {
    folder: tempfile::TempDir,
    base: PathBuf,
    /// The base is raw.
    raw: bool,
    /// It has an internal snapshot with this content.
    kept: Option<Vec<u8>>,
}

impl Chain {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The base and what it is based on; the base can be written.
    fn base(&self) -> Vec<Layer> {
        if !self.raw {
            return layers(&self.base, false);
        }
        let file = File::options().read(true).write(true).open(&self.base).unwrap();
        let file_bytes = file.metadata().unwrap().len();
        let name = self.base.clone();
        vec![Layer { file: Arc::new(file), file_bytes, format: LayerFormat::Raw, name }]
    }

    /// Begins to merge; `None` if the base cannot become as large, as QEMU's cannot.
    fn commit(&self) -> Option<Commit> {
        let chain = layers(&self.path("top"), true);
        Commit::judge(&chain[1], &chain[2], 1).unwrap();
        match Commit::open(chain[1].clone(), self.base(), &Bases::default(), 1, true) {
            Ok(commit) => Some(commit),
            Err(error) => {
                let said = error.to_string();
                assert!(said.contains("version 2") || said.contains("in one piece"), "{said}");
                println!("not as large: {said}");
                None
            }
        }
    }
}

fn content(rng: &mut Rng, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    for piece in content.chunks_mut(24 << 10) {
        let byte = rng.next_u64() as u8;
        if rng.below(3) > 0 {
            piece.iter_mut().enumerate().for_each(|(nth, slot)| *slot = byte ^ (nth / 512) as u8);
        }
    }
    content
}

/// Has QEMU write some of an image.
fn write(rng: &mut Rng, path: &Path, bytes: u64, old: bool) {
    let words = ["write -P 71", "write -P 72", "write -P 0", "write -z", "write -zu", "discard"];
    let words = if old { &words[..3] } else { &words[..] };
    let commands: Vec<_> = (0..rng.below(12))
        .map(|_| {
            let at = rng.below(bytes / 512) * 512;
            let len = ((rng.below(600) + 1) * 512).min(bytes - at);
            format!("{} {at} {len}", rng.pick(words))
        })
        .collect();
    if !commands.is_empty() {
        qemu::io(path, &commands);
    }
}

fn options(cluster: u64, old: bool) -> String {
    format!("cluster_size={cluster},compat={}", if old { "0.10" } else { "1.1" })
}

/// A chain of QEMU's images: each of either version, the base compressed or not, with a snapshot or not,
/// on top of another one or not, and no longer than the middle one.
fn chain(rng: &mut Rng) -> Chain {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let bytes = (rng.below(4 << 20) / 512 + 1) * 512;
    let (old, raw, compressed) = (rng.below(4) == 0, rng.below(4) == 0, rng.below(3) == 0);
    let cluster: u64 = rng.pick(&[512, 4096, 65536]);
    let larger = rng.below(3) == 0;
    let whole = bytes + if larger { (rng.below(1 << 20) / 512 + 1) * 512 } else { 0 };
    std::fs::write(at("content"), content(rng, bytes)).unwrap();
    let (base, mut kept) = (folder.path().join("base"), None);
    if raw {
        std::fs::rename(at("content"), at("base")).unwrap();
    } else {
        let options = options(cluster, old);
        if rng.below(2) == 0 {
            let args = ["create", "-f", "qcow2", "-o", &options, "-b", "content", "-F", "raw"];
            qemu::img(&[&args[..], &[&at("base")]].concat());
            write(rng, &base, bytes, old);
        } else {
            let mut args = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", &options];
            args.extend(compressed.then_some("-c"));
            qemu::img(&[&args[..], &[&at("content"), &at("base")]].concat());
        }
        if rng.below(3) == 0 {
            qemu::img(&["snapshot", "-c", "kept", &at("base")]);
            kept = Some(qemu::content(&base, Some("kept")));
            write(rng, &base, bytes, old);
        }
    }
    for (name, on) in [("middle", "base"), ("top", "middle")] {
        let format = if raw && on == "base" { "raw" } else { "qcow2" };
        let cluster = if on == "base" { cluster.max(rng.pick(&[512, 65536])) } else { 65536 };
        let (old, size) = (rng.below(4) == 0, whole.to_string());
        let options = options(cluster, old);
        let args = ["create", "-f", "qcow2", "-o", &options, "-b", on, "-F", format];
        qemu::img(&[&args[..], &[&at(name), &size]].concat());
        for _ in 0..2 {
            write(rng, &folder.path().join(name), whole, old);
        }
    }
    println!("{bytes} of {whole} bytes, raw {raw}, old {old}, kept {}", kept.is_some());
    Chain { folder, base, raw, kept }
}

/// The base of a chain says what the middle one did, and a snapshot in it what it did before.
fn base_holds(chain: &Chain, middle: &[u8], leaks: bool) {
    if chain.raw {
        return same(&std::fs::read(&chain.base).unwrap(), middle, 0);
    }
    qemu::check(&chain.base, leaks);
    same(&qemu::content(&chain.base, None), middle, 0);
    if let Some(kept) = &chain.kept {
        // QEMU shows it with the present size.
        let found = qemu::content(&chain.base, Some("kept"));
        same(&found[..kept.len()], kept, 0);
    }
}

fn merge(rng: &mut Rng) {
    let chain = chain(rng);
    let top = chain.path("top");
    let middle = qemu::content(&chain.path("middle"), None);
    let mut model = qemu::content(&top, None);
    let mut disk = TestDisk::open(&top, false);
    let Some(mut commit) = chain.commit() else { return };
    let (mut at, mut leaks) = (0, false);
    assert_eq!(commit.size(), middle.len() as u64);
    while at < commit.size() {
        let copied = commit.copy(at, 1 + rng.below(300_000)).unwrap();
        assert!(copied.next > at && copied.copied <= copied.read);
        at = copied.next;
        disk.change(&mut random_changes(rng, &mut model));
        if rng.below(10) == 0 {
            // As after a kill: what was taken ahead leaks, and it begins again.
            std::mem::forget(commit);
            drop(disk);
            leaks = true;
            if !chain.raw {
                qemu::check(&chain.base, true);
            }
            same(&qemu::content(&chain.path("middle"), None), &middle, 0);
            disk = TestDisk::open(&top, false);
            commit = chain.commit().unwrap();
            at = 0;
        } else if rng.below(10) == 0 {
            // Cancelled: whoever has the disk open reads the base by the tables it had.
            drop(commit);
            leaks = true;
            disk.change(&mut random_changes(rng, &mut model));
            same(&disk.read(0, model.len()), &model, 0);
            commit = chain.commit().unwrap();
            at = 0;
        }
        same(&disk.read(0, model.len()), &model, 0);
    }
    let base = commit.finish().unwrap();
    assert_eq!(base.file_bytes, base.file.metadata().unwrap().len());
    disk.image.may_skip_middle().unwrap();
    assert!(!disk.image.skips_middle());
    disk.image.skip_middle().unwrap();
    assert!(disk.image.skips_middle());
    // It goes on as it is for a moment, and is opened anew.
    disk.change(&mut random_changes(rng, &mut model));
    same(&disk.read(0, model.len()), &model, 0);
    disk.image.give_back().unwrap();
    drop(disk);
    commit.give_back().unwrap();
    std::fs::remove_file(chain.path("middle")).unwrap();
    let mut disk = TestDisk::open(&top, false);
    same(&disk.read(0, model.len()), &model, 0);
    disk.change(&mut random_changes(rng, &mut model));
    drop(disk);
    qemu::check(&top, false);
    same(&qemu::content(&top, None), &model, 0);
    base_holds(&chain, &middle, leaks);
}

#[test]
fn c29_images_of_every_kind_are_merged_into_their_base() {
    if !qemu::is_here() {
        return;
    }
    let count = std::env::var("RINGWAY_IMAGES").map_or(8, |count| count.parse().unwrap());
    let mut rng = Rng::for_test("images_are_merged_into_their_base");
    // Reads what is merged into a base behind the end that it had.
    let known = std::iter::once(9_408_572_981_664_841_624);
    for (nth, seed) in (0..=count).zip(known.chain(std::iter::repeat_with(|| rng.next_u64()))) {
        println!("chain {nth}: seed {seed}");
        merge(&mut Rng::new(seed));
    }
}

/// An image of `bytes` in clusters of 64 KiB, based on `on`.
fn image(folder: &Path, name: &str, on: Option<(&str, Format)>, bytes: u64, cluster_bits: u32) {
    let backing = on.map(|(on, format)| (Path::new(on), format));
    let new = NewImage { virtual_size: bytes, cluster_bits, backing };
    new.write(&File::create_new(folder.join(name)).unwrap()).unwrap();
}

fn skip_middle(path: &Path) -> std::io::Result<()> {
    let usage = Use { read_only: false, grows: true, barriers: true };
    Image::open(layers(path, false), usage).unwrap().skip_middle()
}

/// Each name goes where the other one is not, and what follows the header stays.
#[test]
fn a_header_names_one_base_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("ground.raw"), vec![7; 1 << 20]).unwrap();
    image(folder.path(), "low", Some(("./ground.raw", Format::Raw)), 1 << 20, 16);
    let long = format!("{}.qcow2", "middle".repeat(30));
    image(folder.path(), &long, Some(("low", Format::Qcow2)), 1 << 20, 16);
    image(folder.path(), "top", Some((&long, Format::Qcow2)), 1 << 20, 16);
    for (name, format, images) in [("low", "qcow2", 3), ("./ground.raw", "raw", 2)] {
        skip_middle(&at("top")).unwrap();
        let file = File::open(at("top")).unwrap();
        let header = Header::read(&file, file.metadata().unwrap().len()).unwrap().unwrap();
        let backing = header.backing.unwrap();
        assert_eq!((&*backing.name, backing.format.as_deref()), (Path::new(name), Some(format)));
        assert_eq!(layers(&at("top"), true).len(), images);
    }
    let mut disk = TestDisk::open(&at("top"), true);
    same(&disk.read(0, 1 << 20), &vec![7; 1 << 20], 0);
}

/// A relative name means another file in another folder.
#[test]
fn a_middle_one_in_another_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sub = folder.path().join("sub");
    std::fs::create_dir(&sub).unwrap();
    std::fs::write(sub.join("base"), vec![7; 1 << 20]).unwrap();
    image(&sub, "middle", Some(("base", Format::Raw)), 1 << 20, 16);
    image(folder.path(), "top", Some(("sub/middle", Format::Qcow2)), 1 << 20, 16);
    let said = skip_middle(&folder.path().join("top")).unwrap_err().to_string();
    assert!(said.contains("another folder (sub/middle)"), "{said}");
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("long.raw"), vec![7; 2 << 20]).unwrap();
    image(folder.path(), "coarse", None, 1 << 20, 17);
    for (name, on, format) in [
        ("on-long", "long.raw", Format::Raw),
        ("on-coarse", "coarse", Format::Qcow2),
        ("fine", "coarse", Format::Qcow2),
    ] {
        image(
            folder.path(),
            name,
            Some((on, format)),
            1 << 20,
            if name == "fine" { 17 } else { 16 },
        );
    }
    let said = |name: &str| {
        let chain = layers(&at(name), true);
        Commit::judge(&chain[0], &chain[1], 1).map_err(|error| error.to_string())
    };
    assert!(said("on-long").unwrap_err().contains("2097152 bytes"));
    assert!(said("on-coarse").unwrap_err().contains("clusters of 131072 bytes"));
    said("fine").unwrap();
    if qemu::is_here() {
        let name = at("fine").to_str().unwrap().to_owned();
        qemu::img(&["snapshot", "-c", "kept", &name]);
        assert!(said("fine").unwrap_err().contains("internal snapshots"));
        qemu::img(&["snapshot", "-d", "kept", &name]);
        qemu::img(&["bitmap", "--add", at("coarse").to_str().unwrap(), "changed"]);
        assert!(said("fine").unwrap_err().contains("persistent bitmaps"));
    }
}

/// What a failed sync has not made durable is in the host's memory still, and a sync that succeeds leaves it out.
#[test]
fn c103_a_merge_that_is_said_again_writes_the_tables_of_its_base_again() {
    let folder = tempfile::tempdir().unwrap();
    let (base, middle) = (folder.path().join("base"), folder.path().join("middle"));
    let new = |path: &Path, backing| {
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        NewImage { virtual_size: 4 << 20, cluster_bits: 16, backing }.write(&file).unwrap();
        file
    };
    let file = new(&base, None);
    new(&middle, Some((Path::new("base"), Format::Qcow2)));
    let mut disk = TestDisk::open(&middle, false);
    disk.change(&mut [Change { op: Op::Write, at: 1 << 20, bytes: vec![1; 4 << 16] }]);
    drop(disk);
    let merge = |fails: bool| {
        let below = layers(&base, false);
        let chain = layers(&middle, true);
        let mut commit = Commit::open(chain[0].clone(), below, &Bases::default(), 1, true).unwrap();
        let mut at = 0;
        while at < commit.size() {
            at = commit.copy(at, 1 << 20).unwrap().next;
        }
        if fails {
            fail_next_sync(&file);
        }
        commit.finish().map(drop)
    };
    assert_eq!(merge(true).unwrap_err().raw_os_error(), Some(libc::EIO));
    let record = Record::of(&file);
    merge(false).unwrap();
    let events = record.take();
    let image = std::fs::read(&base).unwrap();
    let word = |at: u64| {
        let at = usize::try_from(at).unwrap();
        u64::from_be_bytes(*image[at..].first_chunk().unwrap()) << 8 >> 8
    };
    let (l1, counts) = (word(40), word(48));
    for table in [0, l1, word(l1), counts, word(counts)] {
        let written = events.iter().any(|event| match event {
            Event::Write { at, bytes } => (*at..*at + bytes.len() as u64).contains(&table),
            _ => false,
        });
        assert!(written, "{table:#x} is in the host's memory alone");
    }
    same(&TestDisk::open(&base, true).read(1 << 20, 4 << 16), &[1; 4 << 16], 0);
}
