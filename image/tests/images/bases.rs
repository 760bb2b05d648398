//! What images of a process are based on, opened once for all of them.

use crate::disk::{TestDisk, layers};
use crate::record::Hold;
use ringway_image::{Bases, Format, Image, NewImage, Use};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const BYTES: u64 = 1 << 20;

/// An image on a base of its own, which is qcow2.
fn on_a_base(folder: &Path, name: &str) -> (PathBuf, File) {
    let (base, top) = (format!("{name}.base"), folder.join(name));
    let base_file = File::create_new(folder.join(&base)).unwrap();
    let backing = Some((Path::new(&base), Format::Qcow2));
    NewImage { virtual_size: BYTES, cluster_bits: 16, backing: None }.write(&base_file).unwrap();
    let new = NewImage { virtual_size: BYTES, cluster_bits: 16, backing };
    new.write(&File::create_new(&top).unwrap()).unwrap();
    (top, base_file)
}

/// Opens an image on a thread of its own.
fn open(path: &Path, bases: &Arc<Bases>) -> Receiver<Image> {
    let (sender, receiver) = channel();
    let (layers, bases) = (layers(path, false), Arc::clone(bases));
    std::thread::spawn(move || {
        let usage = Use { read_only: false, grows: true, barriers: true };
        let _ = sender.send(Image::open_beside(layers, usage, &bases, 1).unwrap());
    });
    receiver
}

/// The storage of a base hangs, or there is much to be read of it: who opens it waits, and nobody else.
#[test]
fn b46_a_base_that_takes_long_holds_up_no_image_with_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let (slow, slow_base) = on_a_base(folder.path(), "slow");
    let (other, _) = on_a_base(folder.path(), "other");
    let (bases, patience) = (Arc::new(Bases::default()), Duration::from_secs(120));
    let reads = Hold::of_reads(&slow_base);
    let first = open(&slow, &bases);
    reads.reached();
    let second = open(&slow, &bases);
    let beside = open(&other, &bases).recv_timeout(patience);
    let beside = beside.expect("another base is opened");
    assert_eq!(beside.memory().base_images, 1);
    assert!(bases.based_on(&slow_base).unwrap() >= 1, "it counts before it is open");
    drop(reads);
    let (first, second) = (first.recv_timeout(patience), second.recv_timeout(patience));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.memory().base_images, 2, "one base for both");
    assert_eq!(bases.based_on(&slow_base).unwrap(), 2);
    drop((first, second));
    assert_eq!(bases.based_on(&slow_base).unwrap(), 0);
}

/// A snapshot of a disk is taken while that rests: whatever its storage does then, of a base above all, the new image is put
/// on top by what is known of all files.
#[test]
fn b46_a_new_image_is_put_on_top_without_a_look_at_a_file() {
    const CLUSTER: u64 = 65536;
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = on_a_base(folder.path(), "vm");
    let mut base = TestDisk::open(&folder.path().join("vm.base"), false);
    base.write(2 * CLUSTER, &[7; 512]);
    drop(base);
    let bases = Bases::default();
    let usage = Use { read_only: false, grows: true, barriers: true };
    let mut disk =
        TestDisk::of(Image::open_beside(layers(&path, false), usage, &bases, 1).unwrap());
    disk.write(0, &[1; 512]);
    let overlay = folder.path().join("overlay");
    let backing = Some((Path::new("vm"), Format::Qcow2));
    let new = NewImage { virtual_size: BYTES, cluster_bits: 16, backing };
    new.write(&File::create_new(&overlay).unwrap()).unwrap();
    let top = layers(&overlay, false).swap_remove(0);
    let new = disk.image.prepare_on_top(top, &path, 1, None).unwrap();
    // It is served on meanwhile: a table is new.
    disk.write(CLUSTER, &[2; 512]);
    disk.flush();
    let all: Vec<_> = disk.image.layers().iter().map(|layer| Arc::clone(&layer.file)).collect();
    let aside: Vec<_> = all.iter().map(|file| file.try_clone().unwrap()).collect();
    let nothing = File::open("/dev/null").unwrap();
    let replace = |file: &File, by: &File| {
        // SAFETY: both are open; nobody but this test has this number of a descriptor, which stays open.
        assert!(unsafe { libc::dup2(by.as_raw_fd(), file.as_raw_fd()) } >= 0);
    };
    all.iter().for_each(|file| replace(file, &nothing));
    let image = disk.image.put_on_top(new, &bases);
    all.iter().zip(&aside).for_each(|(file, aside)| replace(file, aside));
    let image = image.unwrap();
    // Who is based on the same shares it.
    let snapshot = &image.layers()[1].file;
    assert_eq!((all.len(), bases.based_on(snapshot).unwrap()), (2, 1));
    drop(disk);
    image.renew_base(&bases).unwrap();
    let beside =
        Image::open_beside(layers(&overlay, true), Use { read_only: true, ..usage }, &bases, 1);
    assert_eq!(beside.unwrap().memory().base_images, 2);
    let mut disk = TestDisk::of(image);
    for (cluster, byte) in [(0, 1), (1, 2), (2, 7), (3, 0)] {
        assert_eq!(disk.read(cluster * CLUSTER, 512), vec![byte; 512], "cluster {cluster}");
    }
    disk.write(0, &[3; 512]);
    assert_eq!((disk.read(0, 512), disk.read(512, 512)), (vec![3; 512], vec![0; 512]));
}

/// The table of its base says where its clusters are while it has none of its own: not beyond its end.
#[test]
fn c70_a_clone_that_has_written_nothing_grows_over_a_longer_base() {
    const CLUSTER: usize = 65536;
    for clusters in [3, 512] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clone.qcow2");
        let base = File::create_new(folder.path().join("base.raw")).unwrap();
        base.set_len(1000 * CLUSTER as u64).unwrap();
        let (old, new) = (clusters * CLUSTER, (clusters + 5) * CLUSTER);
        base.write_all_at(&vec![0xba; 8 * CLUSTER], (old - 3 * CLUSTER) as u64).unwrap();
        let backing = Some((Path::new("base.raw"), Format::Raw));
        let image = NewImage { virtual_size: old as u64, cluster_bits: 16, backing };
        image.write(&File::create_new(&path).unwrap()).unwrap();
        let mut disk = TestDisk::open(&path, false);
        assert_eq!(disk.read((old - CLUSTER) as u64, CLUSTER), vec![0xba; CLUSTER]);
        disk.image.grow(new as u64).unwrap();
        for again in [false, true] {
            let found = disk.read((old - CLUSTER) as u64, 6 * CLUSTER);
            assert!(found[..CLUSTER].iter().all(|byte| *byte == 0xba), "{clusters}, {again}");
            assert!(found[CLUSTER..].iter().all(|byte| *byte == 0), "{clusters}, {again}");
            drop(disk);
            disk = TestDisk::open(&path, false);
        }
    }
}
