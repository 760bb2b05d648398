//! Images of `qemu-img` read here, images made here read by `qemu-img`, and both verdicts compared.

use ringway_image::{
    CheckOptions, Findings, Format, Header, NewImage, ReadAt, Refused, Snapshot, check,
    repair_leaks,
};
use ringway_testkit::{Need, Rng, skip};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Carries out a line of words for one of QEMU's programs, in `dir`. A `+` is a blank within a word.
fn run(dir: &Path, line: &str) -> Output {
    let mut words = line.split(' ').map(|word| word.replace('+', " "));
    let program = words.next().unwrap();
    Command::new(program).args(words).current_dir(dir).output().unwrap()
}

fn works(dir: &Path, line: &str) {
    // For LUKS it measures the CPU, and gives up where that is busy.
    let disturbed = |out: &Output| text(&out.stderr).contains("accurate CPU usage");
    let mut tries = std::iter::repeat_with(|| run(dir, line)).take(20);
    let out = tries.find(|out| !disturbed(out)).expect("the CPU is never quiet");
    assert!(out.status.success(), "{line}: {}", text(&out.stderr));
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// True if QEMU's programs are here.
fn qemu() -> bool {
    let here = |program| Command::new(program).arg("--version").output().is_ok();
    let all = here("qemu-img") && here("qemu-io");
    if !all {
        skip(Need::Qemu, "no qemu-img or qemu-io here (apt install qemu-utils)");
    }
    all
}

/// Ways to make an image: options of `qemu-img create`, size, and what is done to it then.
const KINDS: &[(&str, &str, &[&str])] = &[
    ("compat=0.10", "64M", &["write 0 1M", "write 20M 100k"]),
    (
        "compat=1.1",
        "64M",
        &["write 0 1M", "write -z 4M 1M", "write -z -u 0 64k", "discard 128k 64k"],
    ),
    ("cluster_size=512", "3M", &["write 0 300k", "write 2M 5k"]),
    ("cluster_size=2M", "1G", &["write 0 1M", "write 700M 3M"]),
    ("cluster_size=4k", "64M", &["write -c 0 4k", "write -c 8k 4k", "write 1M 64k"]),
    ("compression_type=zstd", "64M", &["write -c 0 64k", "write -c 64k 64k", "write 128k 64k"]),
    ("refcount_bits=1", "64M", &["write 3M 2M"]),
    ("refcount_bits=2", "64M", &["write 3M 2M"]),
    ("refcount_bits=8", "64M", &["write 3M 2M"]),
    ("refcount_bits=64", "64M", &["write 3M 2M"]),
    ("refcount_bits=32,cluster_size=512", "1M", &["write 0 1M"]),
    ("lazy_refcounts=on", "64M", &["write 0 1M"]),
    ("preallocation=metadata", "40M", &["write 3M 2M"]),
    ("preallocation=falloc", "10M", &[]),
    ("data_file=DATA", "16M", &["write 0 1M", "write 4M 64k", "discard 0 64k"]),
    ("data_file=DATA,data_file_raw=on", "16M", &["write 0 1M", "write 4M 64k"]),
];

/// An image of each kind, all with other names.
fn make_all(dir: &Path) -> Vec<PathBuf> {
    let mut images = Vec::new();
    for (number, (options, size, writes)) in KINDS.iter().enumerate() {
        let name = format!("{number}.qcow2");
        let options = options.replace("DATA", &format!("{number}.data"));
        works(dir, &format!("qemu-img create -f qcow2 -o {options} {name} {size}"));
        for write in *writes {
            works(dir, &format!("qemu-io -f qcow2 -c {} {name}", write.replace(' ', "+")));
        }
        images.push(dir.join(name));
    }
    // Snapshots, and bitmaps; both share clusters, or have their own.
    works(dir, "qemu-img create -f qcow2 snapshots.qcow2 64M");
    for round in 0..3 {
        works(dir, &format!("qemu-io -f qcow2 -c write+{round}M+3M snapshots.qcow2"));
        works(dir, &format!("qemu-img snapshot -c take{round} snapshots.qcow2"));
    }
    works(dir, "qemu-img snapshot -d take1 snapshots.qcow2");
    works(dir, "qemu-img create -f qcow2 bitmaps.qcow2 640M");
    works(dir, "qemu-img bitmap --add -f qcow2 bitmaps.qcow2 first");
    works(dir, "qemu-img bitmap --add -f qcow2 -g 64k bitmaps.qcow2 second");
    works(dir, "qemu-io -f qcow2 -c write+5M+3M bitmaps.qcow2");
    works(dir, "qemu-img create -f qcow2 -b 0.qcow2 -F qcow2 overlay.qcow2 128M");
    works(dir, "qemu-io -f qcow2 -c write+64k+200k overlay.qcow2");
    images.extend(["snapshots", "bitmaps", "overlay"].map(|n| dir.join(n).with_extension("qcow2")));
    images
}

/// What is found here, or why not.
fn ours(image: &Path, range: usize) -> Result<Findings, Refused> {
    let file = File::open(image).unwrap();
    let bytes = file.metadata().unwrap().len();
    let header = Header::read(&file, bytes).unwrap()?;
    check(&file, &header, bytes, CheckOptions { range, ..CheckOptions::default() }).unwrap()
}

/// The status of `qemu-img check`, and what it says.
fn theirs(image: &Path) -> (i32, Value) {
    let dir = image.parent().unwrap();
    let name = image.file_name().unwrap().to_str().unwrap();
    let out = Command::new("qemu-img")
        .args(["check", "--output=json", "-f", "qcow2", name])
        .current_dir(dir)
        .output()
        .unwrap();
    (out.status.code().unwrap(), serde_json::from_slice(&out.stdout).unwrap_or_default())
}

#[test]
fn the_figures_are_those_of_qemu_img() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for image in make_all(dir.path()) {
        let (status, said) = theirs(&image);
        assert_eq!(status, 0, "{}: {said}", image.display());
        // Several ranges find what one finds.
        for range in [8, 64, 8 << 20] {
            let found = ours(&image, range).unwrap();
            let words = format!("{}, {range}: {found:?}\n{said}", image.display());
            assert_eq!((found.errors, found.leaks), (0, 0), "{words}");
            let number = |key: &str| said[key].as_u64().unwrap_or(0);
            assert_eq!(found.total, number("total-clusters"), "{words}");
            assert_eq!(found.allocated, number("allocated-clusters"), "{words}");
            assert_eq!(found.compressed, number("compressed-clusters"), "{words}");
            assert_eq!(found.fragmented, number("fragmented-clusters"), "{words}");
            assert_eq!(found.end, number("image-end-offset"), "{words}");
        }
    }
}

/// One change where it hurts: a word of a table, or of the counts.
fn damage(image: &Path, random: &mut Rng) -> String {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let bytes = file.metadata().unwrap().len();
    let header = Header::read(&file, bytes).unwrap().unwrap();
    let word = |at: u64| {
        let mut word = [0; 8];
        file.read_padded(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let used = |table: u64, count: u64, random: &mut Rng| {
        let used: Vec<_> = (0..count).map(|n| table + n * 8).filter(|at| word(*at) != 0).collect();
        used.get(usize::try_from(random.below(used.len().max(1) as u64)).unwrap()).copied()
    };
    let l1 = used(header.l1_offset, header.l1_entries.into(), random);
    let l2 = l1.and_then(|l1| used(word(l1) & OFFSET, header.l2_entries(), random));
    let cluster = header.cluster_bytes();
    let block = word(header.refcount_table_offset);
    let (at, kind) = match random.below(5) {
        0 => (l1, "L1 entry"),
        1 | 2 => (l2, "L2 entry"),
        // Where counts of clusters that exist are.
        _ => {
            let counts = bytes / cluster * u64::from(header.refcount_bits()) / 8;
            (Some(block + random.below(counts.min(cluster).max(8) / 8) * 8), "counts")
        }
    };
    let Some(at) = at else { return "nothing".into() };
    let old = word(at);
    let new = match random.below(6) {
        0 => 0,
        1 => old ^ 1 << 63,
        2 => old.wrapping_add(cluster),
        3 => old ^ 1 << random.below(56),
        4 => old ^ (cluster * (1 + random.below(4))),
        _ => old | 1 << random.below(16),
    };
    file.write_all_at(&new.to_be_bytes(), at).unwrap();
    format!("{kind} at {at:#x}: {old:#x} is {new:#x}")
}

/// Compressed data of which an entry says that they begin where the file ends: nobody counts that cluster.
#[test]
fn b27_a_cluster_behind_the_end_of_the_file_is_compared_with_its_count() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image.qcow2");
    let name = image.to_str().unwrap();
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", name, "1M"])
        .status()
        .unwrap();
    assert!(made.success());
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let (header, l2) = (Header::read(&file, 1 << 20).unwrap().unwrap(), 4 << 16);
    // An L2 table that is counted, and its only entry.
    file.set_len(5 << 16).unwrap();
    file.write_all_at(&1_u16.to_be_bytes(), (2 << 16) + 4 * 2).unwrap();
    file.write_all_at(&(1_u64 << 63 | l2).to_be_bytes(), header.l1_offset).unwrap();
    for (behind, status) in [(0, 2), (1 << 16, 2)] {
        file.write_all_at(&(1_u64 << 62 | ((5 << 16) + behind)).to_be_bytes(), l2).unwrap();
        assert_eq!(theirs(&image).0.clamp(0, 2), status);
        for range in [8, 64] {
            let found = ours(&image, range).unwrap();
            assert_eq!((found.errors, found.leaks), (1, 0), "{behind}, {range}: {found:?}");
        }
    }
}

#[test]
fn b27_verdicts_on_damaged_images_are_those_of_qemu_img() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut random = Rng::for_test("damaged images");
    let (mut whole, mut leaks, mut errors) = (0, 0, 0);
    let images = make_all(dir.path());
    let victim = dir.path().join("victim.qcow2");
    for round in 0..images.len() * 8 {
        let image = &images[round % images.len()];
        fs::copy(image, &victim).unwrap();
        let done: Vec<_> = (0..1 + random.below(2)).map(|_| damage(&victim, &mut random)).collect();
        let (status, said) = theirs(&victim);
        // 1: it has found what keeps it from checking all of it (a table where the header is, say).
        let status = if status == 1 { 2 } else { status };
        let found = match ours(&victim, 64) {
            Ok(found) => found,
            // A header that makes no sense is not checked any further, here nor there.
            Err(refused) => {
                assert!(!matches!(status, 0 | 3), "{done:?}\n{refused}\n{said}");
                errors += 1;
                continue;
            }
        };
        let words = format!("{}: {done:?}\n{found:?}\n{said}", image.display());
        match status {
            0 => whole += 1,
            3 => leaks += 1,
            2 => errors += 1,
            _ => panic!("qemu-img check ends with {status}: {words}"),
        }
        let verdict = match (found.errors, found.leaks) {
            (0, 0) => 0,
            (0, _) => 3,
            _ => 2,
        };
        assert_eq!(verdict, status, "{words}");
        if status == 3 {
            assert_eq!(found.leaks, said["leaks"].as_u64().unwrap(), "{words}");
            let file = File::options().read(true).write(true).open(&victim).unwrap();
            let bytes = file.metadata().unwrap().len();
            let header = Header::read(&file, bytes).unwrap().unwrap();
            let options = CheckOptions { range: 64, ..CheckOptions::default() };
            let repaired = repair_leaks(&file, &header, bytes, options).unwrap().unwrap();
            assert_eq!(repaired.leaks_fixed, found.leaks, "{words}");
            assert_eq!(theirs(&victim).0, 0, "{words}");
        }
    }
    println!("{whole} whole, {leaks} with leaks, {errors} with errors");
    assert!(leaks > 5 && errors > 20, "{leaks} with leaks, {errors} with errors");
}

#[test]
fn what_is_made_here_is_an_image_for_qemu_img() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("base.raw"), vec![7; 1 << 20]).unwrap();
    let base = Some((Path::new("base.raw"), Format::Raw));
    let sizes = [0, 512, 1 << 20, 10 << 30, (1 << 40) + 512, 64 << 40];
    for cluster_bits in [9, 12, 16, 21] {
        for virtual_size in sizes {
            // More than 32 MiB of table.
            if virtual_size >> (2 * cluster_bits - 3) > 4 << 20 {
                continue;
            }
            for backing in [None, base] {
                let path = dir.path().join("new.qcow2");
                let file = File::options()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .open(&path)
                    .unwrap();
                NewImage { virtual_size, cluster_bits, backing }.write(&file).unwrap();
                let words =
                    format!("{virtual_size} bytes, clusters of 2^{cluster_bits}, {backing:?}");
                let (status, said) = theirs(&path);
                assert_eq!(status, 0, "{words}: {said}");
                let found = ours(&path, 1 << 20).unwrap();
                assert_eq!((found.errors, found.leaks), (0, 0), "{words}: {found:?}");
                let out = run(dir.path(), "qemu-img info --output=json -f qcow2 new.qcow2");
                let info: Value = serde_json::from_slice(&out.stdout).unwrap();
                assert_eq!(info["virtual-size"], virtual_size, "{words}: {info}");
                assert_eq!(info["cluster-size"], 1_u64 << cluster_bits, "{words}: {info}");
                if backing.is_some() {
                    assert_eq!(info["backing-filename"], "base.raw", "{words}");
                    assert_eq!(info["backing-filename-format"], "raw", "{words}");
                }
                if virtual_size >= 1 << 20 {
                    works(dir.path(), "qemu-io -f qcow2 -c write+512+100k new.qcow2");
                    assert_eq!(theirs(&path).0, 0, "{words}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("extended_l2=on,cluster_size=128k", "extended L2"),
        ("encrypt.format=luks,encrypt.key-secret=sec", "encrypted (LUKS)"),
    ];
    for (options, reason) in cases {
        let secret = "qemu-img create --object secret,id=sec,data=abc -f qcow2";
        works(dir.path(), &format!("{secret} -o {options} new.qcow2 1M"));
        let refused = ours(&dir.path().join("new.qcow2"), 64).unwrap_err();
        assert!(refused.to_string().contains(reason), "{refused}");
    }
    works(dir.path(), "qemu-img create -f qcow2 bitmaps.qcow2 1M");
    works(dir.path(), "qemu-img bitmap --add -f qcow2 bitmaps.qcow2 one");
    let file = File::open(dir.path().join("bitmaps.qcow2")).unwrap();
    let header = Header::read(&file, file.metadata().unwrap().len()).unwrap().unwrap();
    assert_eq!(header.may_write(), Err(Refused::Bitmaps(1)));
}

/// Whoever reads a damaged directory must not take what it leads to for lost space: each single bit of it is
/// flipped, leaks are repaired, the bit is flipped back; then all that it leads to is still counted.
#[test]
fn c57_a_flipped_bit_of_a_directory_frees_nothing() {
    if !qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("i.qcow2");
    works(dir.path(), "qemu-img create -f qcow2 -o cluster_size=4k i.qcow2 4M");
    for round in 0..2 {
        works(dir.path(), &format!("qemu-io -f qcow2 -c write+{round}M+200k i.qcow2"));
        works(dir.path(), &format!("qemu-img snapshot -c take{round} i.qcow2"));
    }
    works(dir.path(), "qemu-io -f qcow2 -c write+0+2M i.qcow2");
    works(dir.path(), "qemu-img bitmap --add -f qcow2 -g 512 i.qcow2 first");
    works(dir.path(), "qemu-img bitmap --add -f qcow2 i.qcow2 second");
    works(dir.path(), "qemu-io -f qcow2 -c write+3M+100k i.qcow2");
    let whole = fs::read(&path).unwrap();
    let header = Header::read(&whole[..], whole.len() as u64).unwrap().unwrap();
    let (_, table) = Snapshot::read_all(&whole[..], &header, whole.len() as u64).unwrap().unwrap();
    let bitmaps = header.bitmaps.unwrap();
    // How many snapshots there are, and where; how many bitmaps, how long their directory is, and where.
    let at = |needle: [u8; 8]| whole.windows(8).position(|bytes| bytes == needle).unwrap() as u64;
    let extension = at(bitmaps.directory_bytes.to_be_bytes());
    let places = [
        60..72,
        extension - 8..extension + 16,
        header.snapshots_offset..header.snapshots_offset + table.next_multiple_of(8),
        bitmaps.directory_offset..bitmaps.directory_offset + bitmaps.directory_bytes,
    ];
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let (mut seen, mut unseen) = (0, 0);
    for (at, bit) in places.into_iter().flatten().flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let byte = whole[usize::try_from(at).unwrap()];
        file.write_all_at(&[byte ^ 1 << bit], at).unwrap();
        let words = format!("byte {at}, bit {bit}");
        let read = Header::read(&file, whole.len() as u64).unwrap();
        let found = read.and_then(|header| {
            repair_leaks(&file, &header, whole.len() as u64, CheckOptions::default()).unwrap()
        });
        match found {
            Ok(found) if found.errors == 0 => unseen += 1,
            _ => seen += 1,
        }
        file.write_all_at(&[byte], at).unwrap();
        if fs::read(&path).unwrap() != whole {
            let found = ours(&path, 8 << 20).unwrap();
            // The place of a bitmap's table may become that of its own data, which have zeroes, too.
            let is_place = [0, 32].map(|entry| bitmaps.directory_offset + entry);
            let is_place = is_place.iter().any(|from| (*from..from + 8).contains(&at));
            assert!(found.errors == 0 || is_place, "{words}: {found:?}");
            fs::write(&path, &whole).unwrap();
        }
    }
    println!("{seen} flipped bits are errors, {unseen} are not");
    assert!(seen > unseen);
}
