//! A guest that writes numbers to places of a disk, and what the disk and its image hold then.

use super::{PATIENCE, copy, ringway, run, text};
use ringway_driver::Options;
use ringway_testkit::{Need, Rng, skip};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

/// Bytes of the disk.
pub(crate) const BYTES: u64 = 16 << 20;
/// Places that are written, each in a cluster or so of its own.
pub(crate) const PLACES: usize = 200;
pub(crate) const STRIDE: u64 = 72 << 10;

/// What a guest knows of each place: the number of the last write it has begun, and of the last one that
/// was acknowledged.
pub(crate) struct Known {
    pub(crate) begun: Vec<AtomicU64>,
    pub(crate) acknowledged: Vec<AtomicU64>,
    pub(crate) stop: AtomicBool,
}

impl Known {
    pub(crate) fn new() -> Self {
        let zeroes = || (0..PLACES).map(|_| AtomicU64::new(0)).collect();
        Self { begun: zeroes(), acknowledged: zeroes(), stop: AtomicBool::new(false) }
    }

    /// All that was acknowledged, in writes.
    pub(crate) fn done(&self) -> u64 {
        Self::now(&self.acknowledged).iter().sum()
    }

    /// What a disk was found to hold is what the next writer begins with.
    pub(crate) fn holds(&self, found: &[u64]) {
        for (place, number) in found.iter().enumerate() {
            self.begun[place].store(*number, SeqCst);
            self.acknowledged[place].store(*number, SeqCst);
        }
    }

    pub(crate) fn now(all: &[AtomicU64]) -> Vec<u64> {
        all.iter().map(|number| number.load(SeqCst)).collect()
    }

    /// Writes until each place was written, and stops.
    pub(crate) fn write_each_place(&self, dir: &Path, seed: u64) {
        std::thread::scope(|scope| {
            let load = scope.spawn(|| self.write(dir, seed));
            wait_for("each place is written", || {
                Self::now(&self.acknowledged).iter().all(|number| *number > 0)
            });
            self.stop.store(true, SeqCst);
            load.join().unwrap();
        });
    }

    /// Writes all the time until it is told to stop, or the daemon is gone. How many writes.
    pub(crate) fn write(&self, dir: &Path, seed: u64) -> u64 {
        let mut rng = Rng::for_test(&format!("snapshot-load-{seed}"));
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<(usize, u64)>().unwrap();
        let (mut free, mut done) = ((0..PLACES).collect::<Vec<_>>(), 0);
        loop {
            while queue.in_flight() < 32 && !self.stop.load(SeqCst) {
                let at = usize::try_from(rng.below(free.len() as u64)).unwrap();
                let place = free.swap_remove(at);
                let number = self.begun[place].fetch_add(1, SeqCst) + 1;
                let mut buffer = device.pool().alloc(512).unwrap();
                buffer.chunks_exact_mut(8).for_each(|word| {
                    word.copy_from_slice(&number.to_le_bytes());
                });
                queue.write(place as u64 * STRIDE, buffer, (place, number)).unwrap();
            }
            if queue.in_flight() == 0 || !queue.wait(Some(PATIENCE)).unwrap_or(false) {
                return done;
            }
            while let Ok(Some(answer)) = queue.pop() {
                if !answer.is_ok() {
                    return done;
                }
                let (place, number) = answer.ctx;
                self.acknowledged[place].store(number, SeqCst);
                free.push(place);
                done += 1;
            }
        }
    }
}

/// What a whole disk says of each place; a sector of two writes is a mistake.
pub(crate) fn places(content: &[u8]) -> Vec<u64> {
    assert_eq!(content.len() as u64, BYTES);
    let of = |place: usize| {
        let at = usize::try_from(place as u64 * STRIDE).unwrap();
        let words = content[at..at + 512].chunks_exact(8);
        let mut numbers = words.map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let first = numbers.next().unwrap();
        assert!(numbers.all(|number| number == first), "place {place} is torn");
        first
    };
    (0..PLACES).map(of).collect()
}

/// What the places of an image hold, with all it is based on.
pub(crate) fn content(dir: &Path, image: &str) -> Vec<u64> {
    places(&bytes(dir, image))
}

/// All bytes of an image, with all it is based on.
pub(crate) fn bytes(dir: &Path, image: &str) -> Vec<u8> {
    // What a killed daemon has started ends a moment after it.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = copy(dir, &["--force", "--from-format", "qcow2", image, "out.raw"]);
        let said = text(&output.stderr);
        match output.status.success() {
            true => return std::fs::read(dir.join("out.raw")).unwrap(),
            false
                if ["in use", "uses it"].iter().any(|word| said.contains(word))
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            false => panic!("{image}: {said}"),
        }
    }
}

/// The same bytes but for the places.
#[track_caller]
pub(crate) fn same_between(mut one: Vec<u8>, mut other: Vec<u8>) {
    for bytes in [&mut one, &mut other] {
        for place in 0..PLACES {
            let at = usize::try_from(place as u64 * STRIDE).unwrap();
            bytes[at..at + 512].fill(0);
        }
    }
    let differs = one.chunks(512).zip(other.chunks(512)).position(|(one, other)| one != other);
    assert_eq!((one.len(), differs), (other.len(), None), "the first sector that differs");
}

/// QEMU's verdict, and ours, on an image that nobody writes. Leaks are what a kill may leave.
#[track_caller]
pub(crate) fn whole(dir: &Path, image: &str) {
    let ours = says(dir, &["check", image]);
    assert!(matches!(ours.status.code(), Some(0 | 4)), "{image}: {}", text(&ours.stderr));
    match Command::new("qemu-img").args(["check", "-q", image]).current_dir(dir).output() {
        Ok(output) => assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "{image}: {}",
            text(&output.stderr)
        ),
        Err(_) => skip(Need::Qemu, "qemu-img".to_owned()),
    }
}

pub(crate) fn says(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    run(command)
}

pub(crate) fn ctl(dir: &Path, args: &[&str]) -> Output {
    says(dir, &[&["ctl", "--control", "ctl", "--json"], args].concat())
}

#[track_caller]
pub(crate) fn done(dir: &Path, args: &[&str]) -> Value {
    let output = ctl(dir, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn within(found: &[u64], least: &[u64], most: &[u64], what: &str) {
    for (place, number) in found.iter().enumerate() {
        let (least, most) = (least[place], most[place]);
        assert!(
            (least..=most).contains(number),
            "{what}: place {place} holds write {number}; {least} was acknowledged, {most} begun"
        );
    }
}

/// A disk of content and zeroes at random, which holds a zero at each place.
pub(crate) fn base(seed: u64) -> Vec<u8> {
    let mut rng = Rng::for_test(&format!("base-{seed}"));
    let mut base = vec![0; usize::try_from(BYTES).unwrap()];
    for sector in base.chunks_mut(64 << 10) {
        if rng.below(4) > 0 {
            sector.iter_mut().for_each(|byte| *byte = (rng.next_u64() & 0xff) as u8);
        }
    }
    for place in 0..PLACES {
        let at = usize::try_from(place as u64 * STRIDE).unwrap();
        base[at..at + 512].fill(0);
    }
    base
}

/// What [`base`] makes as `base`, raw or qcow2, and `disk.qcow2` on top of it; all they hold.
pub(crate) fn disk_on_base(dir: &Path, seed: u64, raw: bool) -> Vec<u8> {
    let content = base(seed);
    std::fs::write(dir.join("content"), &content).unwrap();
    let made = match raw {
        true => says(dir, &["copy", "content", "base"]),
        false => says(dir, &["copy", "--to-format", "qcow2", "content", "base"]),
    };
    assert!(made.status.success(), "{}", text(&made.stderr));
    let format = if raw { "raw" } else { "qcow2" };
    let args = ["create", "disk.qcow2", "--backing", "base", "--backing-format", format];
    let made = says(dir, &args);
    assert!(made.status.success(), "{}", text(&made.stderr));
    content
}

/// How many images the disk is made of, by its headers.
pub(crate) fn images(dir: &Path) -> usize {
    let output = says(dir, &["info", "--format", "qcow2", "--json", "disk.qcow2"]);
    let facts: Value = serde_json::from_slice(&output.stdout).unwrap();
    facts["chain"].as_array().unwrap().len()
}

pub(crate) fn job(dir: &Path) -> Value {
    done(dir, &["list"])["disks"][0]["job"].clone()
}

#[track_caller]
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[track_caller]
pub(crate) fn refused(dir: &Path, args: &[&str], words: &[&str]) {
    let output = ctl(dir, args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
}
