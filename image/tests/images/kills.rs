//! A process that writes an image is killed at any moment: the image is whole, and what was answered
//! is there.

use crate::disk::{TestDisk, journal, replayed_by};
use crate::matrix::{random_changes, same};
use crate::qemu;
use ringway_image::Replayed;
use ringway_testkit::Rng;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Bytes of the disk.
const BYTES: usize = 6 << 20;

/// The process: run by the test below, with a path and a seed.
#[test]
#[ignore = "the process that is killed; the other test of this file starts it"]
fn the_one_that_is_killed() {
    let Ok(path) = std::env::var("RINGWAY_KILLED_IMAGE") else { return };
    let seed = std::env::var("RINGWAY_KILLED_SEED").unwrap().parse().unwrap();
    let (mut rng, mut model) = (Rng::new(seed), vec![0; BYTES]);
    // As with direct I/O, in half of them: clusters are written by several threads then.
    let unit = if seed % 2 == 0 { 512 } else { 1 };
    let path = Path::new(&path);
    let mut disk = match has_journal(seed) {
        true => TestDisk::open_with_journal(path, unit, &path.with_file_name("journal")).0,
        false => TestDisk::open_in_units(path, false, unit),
    };
    // Not through the test's own output, which is kept back.
    let mut out = std::fs::File::create("/proc/self/fd/1").unwrap();
    loop {
        let mut changes = random_changes(&mut rng, &mut model);
        disk.change(&mut changes);
        if rng.below(8) == 0 {
            disk.flush();
        }
        if out.write_all(b"answered\n").is_err() {
            return;
        }
    }
}

/// In half of them, too.
fn has_journal(seed: u64) -> bool {
    (seed / 2) % 2 == 0
}

/// As whoever opens it next.
fn finish(path: &Path) -> Replayed {
    let journal = journal(&path.with_file_name("journal"));
    let file = Arc::new(File::options().read(true).write(true).open(path).unwrap());
    replayed_by(&file, 1, Some(&journal)).unwrap()
}

fn one_kill(rng: &mut Rng, backed: bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("killed.qcow2");
    let cluster = rng.pick(&["512", "4k", "64k"]);
    let (options, size) = (format!("cluster_size={cluster}"), BYTES.to_string());
    let mut model = vec![0; BYTES];
    let mut args = vec!["create", "-f", "qcow2", "-o", &options];
    if backed {
        model.fill(0x5a);
        std::fs::write(folder.path().join("base.raw"), &model).unwrap();
        args.extend(["-b", "base.raw", "-F", "raw"]);
    }
    args.extend([path.to_str().unwrap(), &size]);
    qemu::img(&args);
    if backed {
        qemu::img(&["snapshot", "-c", "kept", path.to_str().unwrap()]);
    }
    let before = model.clone();
    let seed = rng.next_u64();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kills::the_one_that_is_killed", "--ignored", "--nocapture"])
        .env("RINGWAY_KILLED_IMAGE", &path)
        .env("RINGWAY_KILLED_SEED", seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let is_answer = |line: &Result<String, _>| line.as_ref().is_ok_and(|l| l.ends_with("answered"));
    let mut lines = lines.filter(is_answer);
    let wanted = 1 + rng.below(40);
    let mut answered = lines.by_ref().take(usize::try_from(wanted).unwrap()).count();
    // Somewhere in the next ones.
    std::thread::sleep(std::time::Duration::from_micros(rng.below(3000)));
    child.kill().unwrap();
    child.wait().unwrap();
    answered += lines.count();
    qemu::check(&path, true);
    let left = if has_journal(seed) { finish(&path) } else { Replayed::Nothing };
    // More small clusters may be freed at a time than the list has room for; and what a snapshot has, too, is not in it.
    qemu::check(&path, cluster == "512" || backed || !has_journal(seed));
    println!(
        "cluster {cluster}, backed {backed}, seed {seed}: killed after {answered} answers, {left:?}"
    );
    // The same changes again, as far as they were answered; the next ones may be there in part.
    let mut again = Rng::new(seed);
    for _ in 0..answered {
        random_changes(&mut again, &mut model);
        again.below(8);
    }
    let mut after = model.clone();
    random_changes(&mut again, &mut after);
    let mut found = qemu::content(&path, None);
    for sector in 0..BYTES / 512 {
        let range = sector * 512..sector * 512 + 512;
        if found[range.clone()] == after[range.clone()] {
            found[range.clone()].copy_from_slice(&model[range]);
        }
    }
    same(&found, &model, 0);
    // It goes on from there, and nothing is lost by what has leaked.
    let mut disk = TestDisk::open(&path, false);
    disk.write(512, &[7; 512]);
    drop(disk);
    qemu::check(&path, true);
    qemu::img(&["check", "-r", "leaks", "-f", "qcow2", path.to_str().unwrap()]);
    qemu::check(&path, false);
    if backed {
        same(&qemu::content(&path, Some("kept")), &before, 0);
    }
}

#[test]
fn c19_a_kill_at_any_moment_leaves_an_image_that_is_whole() {
    if !qemu::is_here() {
        return;
    }
    let count = std::env::var("RINGWAY_KILLS").map_or(8, |count| count.parse().unwrap());
    let mut rng = Rng::for_test("a_kill_at_any_moment");
    for nth in 0..count {
        one_kill(&mut rng, nth % 2 == 1);
    }
}
