//! An image is flattened while it is written: the same content, and then without what it was based on.

use crate::disk::{Change, TestDisk, layers};
use crate::matrix::{random_changes, same};
use crate::qemu;
use ringway_core::Op;
use ringway_image::{Format, Image, NewImage, Use};
use ringway_testkit::Rng;
use std::fs::File;
use std::path::Path;

/// Copies some of what an image lacks; true once nothing is left.
pub(crate) fn pull(rng: &mut Rng, disk: &TestDisk, at: &mut u64) -> bool {
    let pulled = disk.image.pull(*at, 1 + rng.below(300_000)).unwrap();
    assert!(pulled.next > *at && pulled.copied <= pulled.read);
    *at = pulled.next;
    *at == disk.image.size()
}

/// Flattens an image while it is written, and reads it without its backing files.
pub(crate) fn flatten(rng: &mut Rng, path: &Path, model: &mut [u8]) {
    let mut disk = TestDisk::open(path, false);
    let (mut at, mut left) = (0, true);
    while left {
        left = !pull(rng, &disk, &mut at);
        disk.change(&mut random_changes(rng, model));
        if rng.below(10) == 0 {
            // As after a kill: what was copied is there, and it begins again.
            drop(disk);
            qemu::check(path, false);
            disk = TestDisk::open(path, false);
            at = rng.pick(&[0, at]);
            left |= at == 0;
        }
    }
    disk.image.detach().unwrap();
    // It goes on as it is for a moment, and is opened anew.
    disk.change(&mut random_changes(rng, model));
    same(&disk.read(0, model.len()), model, 0);
    disk.image.give_back().unwrap();
    let mut alone = TestDisk::open(path, false);
    assert_eq!(alone.image.layers().len(), 1);
    drop(disk);
    for other in std::fs::read_dir(path.parent().unwrap()).unwrap() {
        let other = other.unwrap().path();
        let name = other.file_name().unwrap().to_str().unwrap();
        let its = path.file_stem().unwrap().to_str().unwrap();
        if name.strip_suffix(".raw").or(name.strip_suffix(".qcow2")).is_some_and(|stem| stem != its)
        {
            std::fs::remove_file(other).unwrap();
        }
    }
    same(&alone.read(0, model.len()), model, 0);
    alone.change(&mut random_changes(rng, model));
    drop(alone);
    qemu::check(path, false);
    same(&qemu::content(path, None), model, 0);
}

/// Zeroes of a base take no space, and read as zeroes without it.
#[test]
fn zeroes_are_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let mut base = vec![0; 40 << 16];
    base[7 << 16] = 1;
    std::fs::write(folder.path().join("base.raw"), &base).unwrap();
    let name = Path::new("base.raw");
    let backing = Some((name, Format::Raw));
    let new = NewImage { virtual_size: base.len() as u64, cluster_bits: 16, backing };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let disk = TestDisk::open(&path, false);
    let pulled = disk.image.pull(0, u64::MAX >> 1).unwrap();
    assert_eq!((pulled.next, pulled.copied), (base.len() as u64, 1 << 16));
    disk.image.detach().unwrap();
    drop(disk);
    let mut disk = TestDisk::open(&path, false);
    assert_eq!(disk.image.layers().len(), 1);
    same(&disk.read(0, base.len()), &base, 0);
}

/// It is flattened, its guest leaves before it is opened anew, and what it discards elsewhere is not to be found in the
/// former base when it comes back.
#[test]
fn c72_a_flattened_image_comes_back_without_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![7; 4 << 16]).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    let new = NewImage { virtual_size: 4 << 16, cluster_bits: 16, backing };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let disk = TestDisk::open(&path, false);
    disk.image.pull(0, u64::MAX >> 1).unwrap();
    disk.image.detach().unwrap();
    let mut left = disk.image.hand_over(1).unwrap();
    let usage = disk.image.usage();
    drop(disk);
    let mut elsewhere = TestDisk::open(&path, false);
    elsewhere.change(&mut [Change { op: Op::Discard, at: 1 << 16, bytes: vec![0; 1 << 16] }]);
    drop(elsewhere);
    left[0] = left[0].taken_over(usage, 1).unwrap();
    let mut back = TestDisk::of(Image::open(left, usage).unwrap());
    let found = [0, 1, 2, 3].map(|cluster| back.read(cluster << 16, 1)[0]);
    assert_eq!(found, [7, 0, 7, 7]);
}

/// A snapshot within the image looks for what it lacks in the backing file, too.
#[test]
fn an_image_with_snapshots_keeps_its_backing_file() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![7; 1 << 20]).unwrap();
    let name = path.to_str().unwrap();
    qemu::img(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", name]);
    qemu::img(&["snapshot", "-c", "kept", name]);
    let usage = Use { read_only: false, grows: true, barriers: true };
    let image = Image::open(layers(&path, false), usage).unwrap();
    for refused in [image.may_detach(), image.detach()] {
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("internal snapshots"), "{said}");
    }
    drop(image);
    let kept = qemu::content(&path, Some("kept"));
    assert!(kept.iter().all(|byte| *byte == 7));
}
