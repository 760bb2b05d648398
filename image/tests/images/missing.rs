//! Files whose end is missing: what tables lead to there is lost, and no zeroes.

use crate::disk::{TestDisk, layers};
use crate::power_cuts::checked;
use crate::qemu;
use ringway_image::{Chain, Format, Image, NewImage, Reader, Top, Use};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const CLUSTER: u64 = 65536;
const CLUSTERS: u64 = 32;

fn written(path: &Path, backing: Option<(&Path, Format)>, clusters: std::ops::Range<u64>) {
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    let new = NewImage { virtual_size: CLUSTERS * CLUSTER, cluster_bits: 16, backing };
    new.write(&file).unwrap();
    let mut disk = TestDisk::open(path, false);
    clusters.for_each(|cluster| disk.write(cluster * CLUSTER, &[0x77; CLUSTER as usize]));
}

fn open(path: &Path, read_only: bool) -> io::Result<Image> {
    Image::open(layers(path, read_only), Use { read_only, grows: true, barriers: true })
}

/// Cuts a file off; how many of its clusters are there.
fn cut(path: &Path, bytes: u64) {
    let file = File::options().write(true).open(path).unwrap();
    assert!(file.metadata().unwrap().len() >= bytes);
    file.set_len(bytes).unwrap();
}

/// What can be read of a disk of clusters that hold 0x77, cluster by cluster: 0x77, zeroes, or an error.
fn read(path: &Path) -> Vec<Option<u8>> {
    let mut reader = Reader::open(layers(path, true)).unwrap();
    let mut bytes = vec![0xee; CLUSTER as usize];
    let read = |cluster| {
        let result = reader.read(cluster * CLUSTER, &mut bytes);
        assert!(result.is_err() || bytes.iter().all(|byte| *byte == bytes[0]));
        result.is_ok().then_some(bytes[0])
    };
    (0..CLUSTERS).map(read).collect()
}

fn path(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("image.qcow2")
}

#[test]
fn c45_what_is_behind_the_end_of_a_file_is_lost_and_no_zeroes() {
    let folder = tempfile::tempdir().unwrap();
    let path = path(&folder);
    written(&path, None, 0..20);
    let whole = read(&path);
    assert_eq!(whole, [vec![Some(0x77); 20], vec![Some(0); 12]].concat());
    let used = checked(&path).unwrap().end;
    let bytes = File::open(&path).unwrap().metadata().unwrap().len();
    // Behind all that is used, or in the middle of the last cluster, nothing is lost.
    for (end, lost) in [(bytes, 0), (used, 0), (used - CLUSTER / 2, 0), (used - 7 * CLUSTER, 7)] {
        cut(&path, end);
        let there = 20 - lost;
        if lost == 0 {
            drop(open(&path, false).unwrap());
            cut(&path, end);
            continue;
        }
        let error = open(&path, false).unwrap_err().to_string();
        let range = format!("{}..{}", there * CLUSTER, 20 * CLUSTER);
        for words in ["image.qcow2", &(lost * CLUSTER).to_string(), &range, "--read-only"] {
            assert!(error.contains(words), "{error:?} does not say {words:?}");
        }
        assert_eq!(File::open(&path).unwrap().metadata().unwrap().len(), end, "nothing is changed");
        let found = read(&path);
        let there = usize::try_from(there).unwrap();
        assert!(found[there..20].iter().all(Option::is_none), "{found:?}");
        assert!(found[..there].iter().all(|byte| *byte == Some(0x77)), "{found:?}");
        assert_eq!(found[20..], whole[20..], "what was never written is zeroes");
        drop(open(&path, true).unwrap());
        let mut reader = Reader::open(layers(&path, true)).unwrap();
        let (from, to) = (there as u64 * CLUSTER, 20 * CLUSTER);
        assert_eq!(reader.lost().unwrap(), std::slice::from_ref(&(from..to)));
        assert_eq!(reader.next_hole(0).unwrap(), to, "no hole");
        reader.salvage();
        let mut bytes = vec![0xee; 2 * CLUSTER as usize];
        reader.read(from - CLUSTER, &mut bytes).unwrap();
        assert_eq!((bytes[CLUSTER as usize - 1], bytes[CLUSTER as usize]), (0x77, 0));
    }
    // A table: what it said is lost, and nobody takes it for a disk on which nothing was written.
    cut(&path, 4 * CLUSTER);
    assert!(open(&path, false).is_err());
    assert!(read(&path).iter().all(Option::is_none));
}

/// A kill leaves clusters that are counted and not used: they may be behind the end.
#[test]
fn c45_what_is_counted_behind_the_end_and_not_used_is_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = path(&folder);
    written(&path, None, 0..3);
    let mut disk = TestDisk::open(&path, false);
    disk.write(3 * CLUSTER, &[0x77; CLUSTER as usize]);
    std::mem::forget(disk);
    let found = checked(&path).unwrap();
    assert!(found.leaks > 0);
    let content = read(&path);
    cut(&path, (3 + 2 + 4) * CLUSTER);
    assert_eq!(read(&path), content);
    let mut disk = TestDisk::open(&path, false);
    (4..20).for_each(|cluster| disk.write(cluster * CLUSTER, &[0x77; CLUSTER as usize]));
    drop(disk);
    checked(&path).unwrap();
    assert_eq!(read(&path)[..20], [Some(0x77); 20]);
}

#[test]
fn c45_an_image_is_not_written_whose_base_lacks_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (base, path) = (folder.path().join("base.qcow2"), path(&folder));
    written(&base, None, 0..20);
    written(&path, Some((Path::new("base.qcow2"), Format::Qcow2)), 18..20);
    cut(&base, checked(&base).unwrap().end - 4 * CLUSTER);
    let error = open(&path, false).unwrap_err().to_string();
    assert!(error.contains("base.qcow2") && error.contains("--read-only"), "{error}");
    let found = read(&path);
    assert_eq!(found[16..18], [None; 2]);
    // What the image itself holds is there.
    assert_eq!((&found[..16], &found[18..20]), (&[Some(0x77); 16][..], &[Some(0x77); 2][..]));
    let mut reader = Reader::open(layers(&path, true)).unwrap();
    assert_eq!(reader.lost().unwrap(), std::slice::from_ref(&(16 * CLUSTER..18 * CLUSTER)));
}

#[test]
fn c45_a_data_file_that_lacks_its_end_is_not_made_longer() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, data) = (path(&folder), folder.path().join("data.raw"));
    let options = format!("data_file={},cluster_size=64k", data.display());
    let size = (CLUSTERS * CLUSTER).to_string();
    qemu::img(&["create", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), &size]);
    let mut disk = TestDisk::open(&path, false);
    (0..20).for_each(|cluster| disk.write(cluster * CLUSTER, &[0x77; CLUSTER as usize]));
    drop(disk);
    // As long as it has to be, but no longer.
    cut(&data, 20 * CLUSTER);
    drop(open(&path, false).unwrap());
    cut(&data, 15 * CLUSTER);
    let error = open(&path, false).unwrap_err().to_string();
    assert!(error.contains("983040..1310720"), "{error}");
    assert_eq!(File::open(&data).unwrap().metadata().unwrap().len(), 15 * CLUSTER);
    let found = read(&path);
    assert_eq!((&found[..15], &found[15..20]), (&[Some(0x77); 15][..], &[None; 5][..]));
}

#[test]
fn c45_a_file_that_becomes_shorter_while_it_is_read_is_no_zeroes() {
    let folder = tempfile::tempdir().unwrap();
    let (base, path) = (folder.path().join("base.raw"), path(&folder));
    std::fs::write(&base, vec![0x77; (CLUSTERS * CLUSTER) as usize]).unwrap();
    written(&path, Some((Path::new("base.raw"), Format::Raw)), 0..4);
    for (file, cluster) in [(&path, 3), (&base, 31)] {
        let mut reader = Reader::open(layers(&path, true)).unwrap();
        let mut bytes = vec![0xee; 4096];
        reader.read(cluster * CLUSTER, &mut bytes).unwrap();
        assert_eq!(bytes, [0x77; 4096]);
        let end = File::open(file).unwrap().metadata().unwrap().len();
        cut(file, if file == &base { end - 8192 } else { 7 * CLUSTER });
        let at = cluster * CLUSTER + if file == &base { CLUSTER - 8192 } else { 0 };
        let error = reader.read(at, &mut bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{}", file.display());
        let all = reader.next_hole(0).unwrap();
        assert_eq!(all, CLUSTERS * CLUSTER, "no hole");
    }
}

/// An image with its data at `data`, opened for writing with what it names; `lock` is asked for each other file.
fn chain_of(folder: &Path, data: &Path, lock: &mut dyn FnMut(&Path)) -> Result<Chain, String> {
    let path = folder.join("image.qcow2");
    if !path.exists() {
        let options = format!("data_file={},cluster_size=64k", data.display());
        qemu::img(&["create", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), "1M"]);
    }
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let top = Top { file, name: path, format: Format::Qcow2, read_only: false };
    let mut lock = |_: &File, name: &Path, _: bool| {
        lock(name);
        Ok(())
    };
    let chain = Chain::open(top, Some(Path::new("/")), &mut lock);
    chain.map_err(|error| error.to_string())
}

/// Whoever has the lock of a file that nobody finds keeps nobody away.
#[test]
fn c76_a_data_file_that_was_replaced_while_it_was_locked_is_not_written() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data.raw");
    drop(chain_of(folder.path(), &data, &mut |_| {}).unwrap());
    let mut replace = |name: &Path| {
        std::fs::write(name.with_extension("new"), vec![0; 1 << 20]).unwrap();
        std::fs::rename(name.with_extension("new"), name).unwrap();
    };
    let said = chain_of(folder.path(), &data, &mut replace).unwrap_err();
    assert!(said.contains("data file") && said.contains("replaced"), "{said}");
    drop(chain_of(folder.path(), &data, &mut |_| {}).unwrap());
}

/// A device that is mounted, or claimed by somebody else, is written by nobody else.
#[test]
fn c76_a_device_with_the_data_of_an_image_is_claimed() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir_in(".").unwrap();
    let device = match ringway_testkit::LoopDevice::new(folder.path(), 1 << 20, 512) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let mut exclusive = File::options();
    exclusive.read(true).custom_flags(libc::O_EXCL);
    let chain = chain_of(folder.path(), device.path(), &mut |_| {}).unwrap();
    assert_eq!(exclusive.open(device.path()).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    drop(chain);
    let claimed = exclusive.open(device.path()).unwrap();
    let said = chain_of(folder.path(), device.path(), &mut |_| {}).unwrap_err();
    assert!(said.contains("data file") && said.contains("busy"), "{said}");
    drop(claimed);
    drop(chain_of(folder.path(), device.path(), &mut |_| {}).unwrap());
}
