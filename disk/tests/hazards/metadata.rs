//! Images whose tables lead where they must not, or whose file was cut off.

// Bytes of a small disk.
#![allow(clippy::cast_possible_truncation)]

use crate::bench::{Ask, Bench, Memory, engine};
use ringway_aio::Engine;
use ringway_core::{Op, Status};
use ringway_disk::open::open_unmapped;
use ringway_disk::{CacheMode, OpenOptions, Qcow2, Source};
use ringway_image::NewImage;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: u64 = 32;
/// Bits of L1 and L2 entries.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// A queue on an image, and memory of a cluster.
struct Scene {
    bench: Bench<Box<dyn Engine>>,
    memory: Memory,
}

fn open(path: &Path) -> io::Result<Scene> {
    let mut options = OpenOptions::new(Source::Path(path.into()));
    options.qcow2 = Some(Qcow2::default());
    options.cache = Some(CacheMode::Writeback);
    let mut disk = open_unmapped(&options).map_err(io::Error::other)?;
    disk.map_image()?;
    let bench = Bench::new(engine("threads", 64).unwrap(), Arc::new(disk), 32).unwrap();
    Ok(Scene { bench, memory: Memory::new(CLUSTER as usize, 0) })
}

impl Scene {
    fn ask(&mut self, op: Op, cluster: u64) -> Status {
        self.bench.one(&self.memory, Ask::new(op, cluster * CLUSTER, CLUSTER))
    }

    fn write(&mut self, cluster: u64, byte: u8) -> Status {
        self.memory.bytes().fill(byte);
        self.ask(Op::Write, cluster)
    }

    /// The bytes of a cluster, if they are all the same.
    fn read(&mut self, cluster: u64) -> (Status, Option<u8>) {
        self.memory.bytes().fill(0xee);
        let status = self.ask(Op::Read, cluster);
        let first = self.memory.bytes()[0];
        (status, self.memory.bytes().iter().all(|&byte| byte == first).then_some(first))
    }
}

/// An image whose first clusters were written, and where its tables are.
struct Image {
    _folder: TempDir,
    path: std::path::PathBuf,
    file: File,
    l1: u64,
    l2: u64,
    refcount_table: u64,
    refcount_block: u64,
}

fn image(written: u64) -> Image {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("top.qcow2");
    let new =
        NewImage { virtual_size: CLUSTERS * CLUSTER, cluster_bits: CLUSTER.ilog2(), backing: None };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let mut scene = open(&path).unwrap();
    for cluster in 0..written {
        assert_eq!(scene.write(cluster, 1 + cluster as u8), Status::Ok);
    }
    drop(scene);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let word = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let (l1, refcount_table) = (word(40), word(48));
    let (l2, refcount_block) = (word(l1) & OFFSET, word(refcount_table));
    Image { l2, refcount_block, _folder: folder, path, l1, refcount_table, file }
}

impl Image {
    fn set_entry(&self, cluster: u64, word: u64) {
        self.file.write_all_at(&word.to_be_bytes(), self.l2 + 8 * cluster).unwrap();
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }
}

/// Such an entry would be data in an image whose data are in another file; here the header lies there.
#[test]
fn b32_an_entry_of_nowhere_is_not_the_header() {
    let image = image(1);
    let header = image.bytes(0, 104);
    image.set_entry(1, COPIED);
    image.set_entry(2, COPIED);
    let mut scene = open(&image.path).unwrap();
    assert_eq!(scene.read(1), (Status::Ok, Some(0)));
    assert_eq!(scene.write(1, 0x55), Status::Ok);
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(scene.ask(op, 2), Status::Ok);
    }
    // What was given back by mistake would be found by these.
    for cluster in 3..20 {
        assert_eq!(scene.write(cluster, cluster as u8), Status::Ok);
    }
    drop(scene);
    assert!(image.bytes(0, 104) == header);
    let mut scene = open(&image.path).unwrap();
    assert_eq!(scene.read(0), (Status::Ok, Some(1)));
    assert_eq!(scene.read(1), (Status::Ok, Some(0x55)));
    assert_eq!(scene.read(2), (Status::Ok, Some(0)));
    assert_eq!(scene.read(19), (Status::Ok, Some(19)));
}

#[test]
fn b32_no_entry_leads_a_guest_to_the_tables() {
    let image = image(1);
    let tables = [image.l1, image.l2, image.refcount_table, image.refcount_block];
    for (cluster, table) in (1..).zip(tables) {
        image.set_entry(cluster, COPIED | table);
        // Shared, as if with a snapshot: a write gives it back and goes elsewhere.
        image.set_entry(cluster + 4, table);
    }
    image.set_entry(9, COMPRESSED);
    let mut scene = open(&image.path).unwrap();
    for cluster in 1..5 {
        scene.read(cluster);
        assert_eq!(scene.write(cluster, 0x77), Status::IoError, "cluster {cluster}");
    }
    for cluster in 1..10 {
        scene.ask(Op::Discard, cluster);
        scene.write(cluster, 0x77);
        scene.ask(Op::WriteZeroes, cluster);
    }
    for cluster in 10..30 {
        assert_eq!(scene.write(cluster, cluster as u8), Status::Ok);
    }
    drop(scene);
    let mut scene = open(&image.path).unwrap();
    assert_eq!(scene.read(0), (Status::Ok, Some(1)));
    for cluster in 10..30 {
        assert_eq!(scene.read(cluster), (Status::Ok, Some(cluster as u8)));
    }
}

#[test]
fn b32_an_image_whose_tables_lie_on_each_other_is_not_written_to() {
    for other in [|image: &Image| image.l1, |image: &Image| image.refcount_block] {
        let image = image(1);
        let word = COPIED | other(&image);
        image.file.write_all_at(&word.to_be_bytes(), image.l1).unwrap();
        let error = open(&image.path).err().expect("it is refused").to_string();
        assert!(error.contains("two of its tables are at"), "{error}");
    }
}

/// The rest of a cluster that was cut off within reads as zeroes, and a queue may write there when the file has grown
/// past it. An image that lacks whole clusters is refused.
#[test]
fn b32_a_cluster_that_was_cut_off_is_written_once_the_file_reaches_it() {
    for cut in [CLUSTER, CLUSTER / 2, 2 * CLUSTER] {
        let image = image(4);
        let words = image.bytes(image.l2, 32);
        let words =
            words.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap()) & OFFSET);
        image.file.set_len(words.max().unwrap() + CLUSTER - cut).unwrap();
        if cut >= CLUSTER {
            let error = open(&image.path).err().expect("it is refused").to_string();
            assert!(error.contains("the end of the file is missing"), "{error}");
            continue;
        }
        let mut scene = open(&image.path).unwrap();
        for cluster in 0..4 {
            scene.read(cluster);
        }
        for cluster in 8..24 {
            assert_eq!(scene.write(cluster, cluster as u8), Status::Ok);
        }
        // Done, or refused: in either case answered.
        for cluster in 0..4 {
            if scene.write(cluster, 0x99) == Status::Ok {
                assert_eq!(scene.read(cluster), (Status::Ok, Some(0x99)));
            }
        }
        for cluster in 8..24 {
            assert_eq!(scene.read(cluster), (Status::Ok, Some(cluster as u8)));
        }
    }
}
