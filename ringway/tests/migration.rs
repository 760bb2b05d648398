//! A guest whose disk is a qcow2 image goes from one daemon to another, and back: all that is known of the
//! image goes by the file, and its lock with the guest (hazard C36).
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, PATIENCE, folder, kill_all, ringway, run, text};
use ringway_testkit::raw::{DATA, F_FLUSH, F_PROTOCOL, F_VERSION_1, RawGuest, halves};
use ringway_testkit::raw::{request, words};
use ringway_testkit::{Need, Rng, skip};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const LOG_ALL: u64 = 1 << 26;
const FEATURES: u64 = F_VERSION_1 | F_FLUSH | F_DISCARD | F_WRITE_ZEROES;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// Sectors of the disk.
const SECTORS: u64 = 16384;
const QUEUES: u32 = 2;
/// Long enough for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(300);

/// Runs `qemu-img`; its status and what it said, or nothing if it is not here.
fn img(dir: &Path, args: &[&str]) -> Option<(Option<i32>, String)> {
    let Ok(output) = Command::new("qemu-img").args(args).current_dir(dir).output() else {
        skip(Need::Qemu, "qemu-img".to_owned());
        return None;
    };
    Some((output.status.code(), text(&output.stdout) + &text(&output.stderr)))
}

/// As [`img`], which has to succeed: once no daemon that waits for the image tries whether it can have it.
fn qemu(dir: &Path, args: &[&str]) -> bool {
    let begun = Instant::now();
    loop {
        let Some((code, said)) = img(dir, args) else { return false };
        if code == Some(0) {
            return true;
        }
        assert!(said.contains("\" lock") && begun.elapsed() < PATIENCE, "{args:?}: {said}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `top.qcow2` on a raw image whose sectors hold what they are called, and what the disk holds.
fn overlay(dir: &Path, cluster: &str) -> Option<Vec<u8>> {
    let base: Vec<u8> = (0..SECTORS * 512).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(dir.join("base.raw"), &base).unwrap();
    let size = format!("cluster_size={cluster}");
    let on = ["-b", "base.raw", "-F", "raw", "top.qcow2"];
    qemu(dir, &[&["create", "-f", "qcow2", "-o", &size][..], &on].concat()).then_some(base)
}

/// The image is whole, with leaks only if they may be, and holds what it should.
fn judge(dir: &Path, model: &[u8], leaks: bool) {
    let begun = Instant::now();
    let (code, said) = loop {
        // What a killed daemon began ends a moment after it.
        let (code, said) = img(dir, &["check", "top.qcow2"]).unwrap();
        if !said.contains("\" lock") || begun.elapsed() > PATIENCE {
            break (code, said);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(code == Some(0) || (leaks && code == Some(3)), "{code:?} {said}");
    assert!(qemu(dir, &["convert", "-O", "raw", "top.qcow2", "now.raw"]));
    let now = std::fs::read(dir.join("now.raw")).unwrap();
    assert_eq!(now.len(), model.len());
    let differs = |at: &usize| now[at * 512..at * 512 + 512] != model[at * 512..at * 512 + 512];
    assert_eq!((0..model.len() / 512).find(differs), None, "the first sector that differs");
}

/// A daemon and the guest that is connected to it.
struct Side {
    name: &'static str,
    daemon: Daemon,
    guest: RawGuest,
}

impl Side {
    fn serve(dir: &Path, name: &'static str, incoming: bool, more: &[&str]) -> Self {
        let control = format!("{name}.ctl");
        let words = ["top.qcow2", "--format", "qcow2", "--queues", "2", "--socket", name];
        let incoming = if incoming { &["--incoming"][..] } else { &[] };
        let words = [&words[..], &["--control", &control], incoming, more].concat();
        let daemon = Daemon::serve(dir, &words);
        let guest = RawGuest::connect(UnixStream::connect(dir.join(name)).unwrap(), FEATURES);
        Self { name, daemon, guest }
    }

    fn ctl(&self, dir: &Path, words: &[&str]) -> (bool, String) {
        let mut command = ringway();
        command.args(["ctl", "--control", &format!("{}.ctl", self.name)]).args(words);
        command.current_dir(dir);
        let output = run(command);
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    }

    fn is_locked(&self, dir: &Path) -> bool {
        !self.ctl(dir, &["list", "--json"]).1.contains(r#""state": "unlocked""#)
    }

    fn until_locked(&self, dir: &Path, locked: bool) {
        soon(&format!("{}: locked is {locked}", self.name), || self.is_locked(dir) == locked);
    }

    fn start(&mut self) {
        (0..QUEUES).for_each(|queue| assert!(self.guest.start_queue(queue).unwrap()));
    }

    fn stop(&mut self) {
        for queue in 0..QUEUES {
            self.guest.stop_queue(queue).unwrap();
        }
    }

    /// A migration begins or ends.
    fn log_all(&self, on: bool) {
        let features = FEATURES | F_PROTOCOL | if on { LOG_ALL } else { 0 };
        let client = &self.guest.client;
        assert!(client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap());
    }

    /// The rings stop for good.
    fn leave(&mut self) {
        self.log_all(true);
        self.stop();
    }

    fn read(&mut self, sector: u64) -> Vec<u8> {
        self.guest.poke(DATA, &[0xee; 512]);
        let (status, _) = self.guest.simple(1, IN, sector, DATA, 512);
        assert_eq!(status, 0, "sector {sector}: {}", self.daemon.log());
        self.guest.peek(DATA, 512)
    }

    fn write(&mut self, model: &mut [u8], sector: u64, sectors: u64, byte: u8) {
        let bytes = vec![byte; 512 * sectors as usize];
        self.guest.poke(DATA, &bytes);
        let (status, _) = self.guest.simple(0, OUT, sector, DATA, bytes.len() as u32);
        assert_eq!(status, 0, "{}", self.daemon.log());
        model[512 * sector as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    /// Writes, zeroes, discards and reads all over the disk.
    fn work(&mut self, model: &mut [u8], rng: &mut Rng, requests: u32) {
        for _ in 0..requests {
            let most = if rng.below(3) == 0 { 512 } else { 16 };
            let sectors = 1 + rng.below(most);
            let sector = rng.below(model.len() as u64 / 512 - sectors);
            match rng.below(8) {
                0..4 => self.write(model, sector, sectors, rng.below(255) as u8 + 1),
                4 => {
                    let mut segment = words(&[sector]);
                    segment.extend(halves(&[sectors as u32, 1]));
                    self.guest.poke(DATA, &segment);
                    assert_eq!(self.guest.simple(0, WRITE_ZEROES, 0, DATA, 16).0, 0);
                    model[512 * sector as usize..][..512 * sectors as usize].fill(0);
                }
                5 => assert_eq!(self.guest.simple(0, FLUSH, 0, DATA, 0).0, 0),
                _ => {
                    let found = self.read(sector);
                    assert!(found == model[512 * sector as usize..][..512], "sector {sector}");
                }
            }
        }
    }

    fn discard(&mut self, sector: u64, sectors: u32) {
        let mut segment = words(&[sector]);
        segment.extend(halves(&[sectors, 0]));
        self.guest.poke(DATA, &segment);
        assert_eq!(self.guest.simple(0, DISCARD, 0, DATA, 16).0, 0);
    }
}

fn soon(what: &str, mut happens: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happens() {
        assert!(begun.elapsed() < PATIENCE, "not yet: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// There and back, several times: what one daemon wrote the other one finds, and goes on allocating where
/// the first one left off.
#[test]
fn c36_a_guest_goes_there_and_back_with_its_image() {
    let mut rng = Rng::for_test("there_and_back");
    let direct = &["--cache", "none", "--engine", "threads"][..];
    let ways =
        [&[][..], direct, &["--isolate"], &["--sandbox", "off"], &["--cache", "writethrough"]];
    for (nth, more) in ways.into_iter().enumerate() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let Some(mut model) = overlay(dir, ["64k", "4k"][nth % 2]) else { return };
        let mut here = Side::serve(dir, "a", false, more);
        let mut there = Side::serve(dir, "b", true, more);
        here.start();
        here.work(&mut model, &mut rng, 40);
        for _ in 0..6 {
            assert!(here.is_locked(dir) && !there.is_locked(dir), "{more:?}");
            // Its rings are told to start before the source has let go: they wait.
            there.start();
            here.log_all(true);
            here.work(&mut model, &mut rng, 20);
            // Clusters that are about to be given back.
            here.discard(0, 4096);
            here.write(&mut model, 0, 4096, 0);
            assert!(!there.is_locked(dir));
            here.stop();
            there.until_locked(dir, true);
            here.until_locked(dir, false);
            let (done, said) = here.ctl(dir, &["resize", "0", "9M"]);
            assert!(!done && said.contains("not locked"), "{said}");
            there.work(&mut model, &mut rng, 40);
            there.log_all(false);
            here.log_all(false);
            std::mem::swap(&mut here, &mut there);
        }
        let bytes = model.len() + (1 << 20);
        assert!(here.ctl(dir, &["resize", "0", &bytes.to_string()]).0);
        model.resize(bytes, 0);
        here.work(&mut model, &mut rng, 20);
        there.start();
        here.leave();
        there.until_locked(dir, true);
        there.work(&mut model, &mut rng, 40);
        // Whoever has no lock ends, too, and changes nothing.
        here.daemon.stop();
        there.work(&mut model, &mut rng, 20);
        there.daemon.stop();
        judge(dir, &model, false);
    }
}

/// A migration that is cancelled or fails: the source goes on, whether the lock was given up by then or not.
#[test]
fn c36_a_cancelled_migration_goes_on_at_the_source() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir, "4k") else { return };
    let mut rng = Rng::for_test("cancelled");
    let mut here = Side::serve(dir, "a", false, &[]);
    here.start();
    for round in 0..30 {
        here.work(&mut model, &mut rng, 5);
        here.leave();
        match round % 3 {
            0 => here.until_locked(dir, false),
            1 => std::thread::sleep(Duration::from_micros(rng.below(3000))),
            _ => {}
        }
        here.start();
        here.log_all(false);
        here.work(&mut model, &mut rng, 5);
        here.until_locked(dir, true);
        // Nobody else can have it now.
        assert!(qemu_is_refused(dir));
    }
    here.daemon.stop();
    judge(dir, &model, false);
}

fn qemu_is_refused(dir: &Path) -> bool {
    let (code, said) = img(dir, &["resize", "top.qcow2", "+1M"]).unwrap();
    code == Some(1) && said.contains("lock")
}

/// One of the daemons is killed at any moment in between: the other one goes on with all that was answered.
#[test]
fn c36_a_daemon_that_is_killed_in_between_loses_nothing() {
    let kills = std::env::var("RINGWAY_MIGRATION_KILLS");
    let kills = kills.map_or(16, |count| count.parse().unwrap());
    let mut rng = Rng::for_test("killed_in_between");
    for nth in 0..kills {
        let dir = folder();
        let dir = dir.path();
        let Some(mut model) = overlay(dir, ["64k", "512", "4k"][nth % 3]) else { return };
        let mut here = Side::serve(dir, "a", false, &[]);
        let mut there = Side::serve(dir, "b", true, &[]);
        here.start();
        here.work(&mut model, &mut rng, 30);
        if nth % 2 == 0 {
            // The source, while it gives its image up, or a moment later.
            there.start();
            here.leave();
            std::thread::sleep(Duration::from_micros(rng.below(4000)));
            here.daemon.kill();
            there.until_locked(dir, true);
            there.work(&mut model, &mut rng, 30);
            there.daemon.stop();
        } else {
            // The destination, while it takes it over; the source goes on.
            here.leave();
            there.start();
            std::thread::sleep(Duration::from_micros(rng.below(4000)));
            there.daemon.kill();
            here.start();
            here.log_all(false);
            here.work(&mut model, &mut rng, 30);
            here.until_locked(dir, true);
            here.daemon.stop();
        }
        judge(dir, &model, nth % 2 == 0);
    }
}

/// Words of both daemons of a host that keep what outlives them in one folder.
const SHARED: &[&str] = &["--state-dir", "state"];

fn states(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("state")).unwrap().count()
}

/// A destination that never gets its guest leaves what the source keeps: it is not its own.
#[test]
fn c40_a_destination_without_a_guest_takes_nothing_away() {
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let Some(mut model) = overlay(dir, "64k") else { return };
        let more = [SHARED, more].concat();
        let mut here = Side::serve(dir, "a", false, &more);
        here.start();
        here.write(&mut model, 0, 1, 1);
        for ends in [0, 1] {
            assert!(here.ctl(dir, &["pause", "0"]).0);
            let there = Side::serve(dir, "b", true, &more);
            match ends {
                0 => drop(there.daemon.stop()),
                _ => {
                    assert!(there.ctl(dir, &["remove", "0"]).0);
                    drop(there.daemon);
                }
            }
            assert_eq!(states(dir), 1, "{more:?}");
            kill_all_of(here.daemon);
            here = Side::serve(dir, "a", false, &more);
            let (_, list) = here.ctl(dir, &["list", "--json"]);
            assert!(list.contains(r#""paused""#), "{more:?}: {list}");
            assert!(here.ctl(dir, &["resume", "0"]).0);
            here.start();
            // What waits for a flush is found by whoever comes next.
            let there = Side::serve(dir, "b", true, &more);
            there.daemon.stop();
            (1..40).for_each(|cluster| here.write(&mut model, cluster * 128, 1, 2));
            kill_all_of(here.daemon);
            here = Side::serve(dir, "a", false, &more);
            here.start();
            (1..40).for_each(|cluster| assert_eq!(here.read(cluster * 128)[0], 2, "{more:?}"));
        }
        here.daemon.stop();
        judge(dir, &model, true);
        assert_eq!(states(dir), 0, "nothing is left");
    }
}

/// The source ends once its guest has left: what the destination keeps by then stays.
#[test]
fn c40_a_source_whose_guest_has_left_takes_nothing_away() {
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"], &["--cache", "none"]] {
        for ends in ["stop", "remove", "kill"] {
            let dir = folder();
            let dir = dir.path();
            let Some(mut model) = overlay(dir, "64k") else { return };
            let more = [SHARED, more].concat();
            let mut here = Side::serve(dir, "a", false, &more);
            let mut there = Side::serve(dir, "b", true, &more);
            here.start();
            here.write(&mut model, 0, 1, 1);
            there.start();
            here.leave();
            there.until_locked(dir, true);
            here.until_locked(dir, false);
            (1..20).for_each(|cluster| there.write(&mut model, cluster * 128, 1, 2));
            match ends {
                "stop" => drop(here.daemon.stop()),
                "remove" => {
                    assert!(here.ctl(dir, &["remove", "0"]).0);
                    drop(here.daemon);
                }
                _ => kill_all_of(here.daemon),
            }
            (20..40).for_each(|cluster| there.write(&mut model, cluster * 128, 1, 2));
            assert_eq!(states(dir), 1, "{more:?} {ends}");
            assert!(there.ctl(dir, &["pause", "0"]).0);
            assert!(there.ctl(dir, &["resume", "0"]).0);
            (40..50).for_each(|cluster| there.write(&mut model, cluster * 128, 1, 2));
            kill_all_of(there.daemon);
            let mut there = Side::serve(dir, "b", false, &more);
            there.start();
            (1..50).for_each(|cluster| assert_eq!(there.read(cluster * 128)[0], 2, "{more:?}"));
            there.daemon.stop();
            judge(dir, &model, true);
            assert_eq!(states(dir), 0, "nothing is left");
        }
    }
}

/// A pause goes with the guest where both daemons have one folder.
#[test]
fn c40_a_pause_goes_with_the_lock() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir, "64k") else { return };
    let mut here = Side::serve(dir, "a", false, SHARED);
    let mut there = Side::serve(dir, "b", true, SHARED);
    here.start();
    here.write(&mut model, 0, 1, 1);
    here.log_all(true);
    assert!(here.ctl(dir, &["pause", "0"]).0);
    here.stop();
    there.start();
    soon("it is paused", || there.ctl(dir, &["list", "--json"]).1.contains(r#""paused""#));
    assert!(there.ctl(dir, &["resume", "0"]).0);
    there.write(&mut model, 128, 1, 2);
    here.daemon.stop();
    there.daemon.stop();
    judge(dir, &model, false);
    assert_eq!(states(dir), 0, "nothing is left");
}

/// From the moment a guest may leave, nothing that was answered is in the source's state folder alone: the source is
/// killed when its guest has left and nothing is durable, and another daemon goes on that knows no other folder.
#[cfg(feature = "kill-points")]
#[test]
fn c40_what_was_answered_leaves_with_the_guest() {
    for more in [&[][..], &["--cache", "none"]] {
        let dir = folder();
        let dir = dir.path();
        let Some(mut model) = overlay(dir, "64k") else { return };
        let mut command = ringway();
        let words = ["serve", "top.qcow2", "--format", "qcow2", "--queues", "2", "--socket", "a"];
        command.args(words).args(["--control", "a.ctl", "--state-dir", "state"]).args(more);
        command.current_dir(dir).env("RINGWAY_KILL_POINT", "left-unsynced:1");
        let daemon = Daemon::start(command);
        let guest = RawGuest::connect(UnixStream::connect(dir.join("a")).unwrap(), FEATURES);
        let mut here = Side { name: "a", daemon, guest };
        let mut there = Side::serve(dir, "b", true, &["--state-dir", "other"]);
        let mut rng = Rng::for_test("leaves_with_the_guest");
        here.start();
        here.work(&mut model, &mut rng, 30);
        here.write(&mut model, 0, 1, 9);
        (1..40).for_each(|cluster| here.write(&mut model, cluster * 128, 1, 2));
        let marked = || {
            let header = std::fs::read(dir.join("top.qcow2")).unwrap();
            header[88..96] != [0; 8]
        };
        assert!(marked(), "it has no journal");
        here.log_all(true);
        assert!(!marked(), "what is answered from now on waits for a flush");
        (40..60).for_each(|cluster| here.write(&mut model, cluster * 128, 1, 3));
        assert!(!marked());
        for queue in 0..QUEUES {
            // The last answer may not come any more.
            let _ = here.guest.stop_queue(queue);
        }
        let (status, _) = here.daemon.wait();
        assert_eq!(status.code(), None, "{}", here.daemon.log());
        there.start();
        there.until_locked(dir, true);
        for sector in 0..SECTORS {
            let found = there.read(sector);
            assert!(found == model[512 * sector as usize..][..512], "{more:?}: sector {sector}");
        }
        assert_eq!(there.guest.simple(0, FLUSH, 0, DATA, 0).0, 0, "{}", there.daemon.log());
        there.daemon.stop();
        judge(dir, &model, true);
    }
}

/// As [`kill_all`], of a daemon that may have nobody else.
fn kill_all_of(daemon: Daemon) {
    match crate::common::children(daemon.pid()).is_empty() {
        true => daemon.kill(),
        false => kill_all(daemon),
    }
}

/// What another program did to the image meanwhile is seen, or the guest waits, and the log says why.
#[test]
fn c36_what_changed_meanwhile_is_seen_or_waited_out() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir, "64k") else { return };
    std::fs::copy(dir.join("base.raw"), dir.join("other.raw")).unwrap();
    let before = std::fs::read(dir.join("top.qcow2")).unwrap();
    let mut there = Side::serve(dir, "b", true, &[]);
    let waits = |there: &mut Side, words: &str| {
        // Each wait is told of after a moment.
        there.stop();
        there.start();
        soon(words, || there.daemon.log().contains(words));
        assert!(!there.is_locked(dir), "{words}");
    };
    // Nothing is kept from the start but what the files are.
    assert!(qemu(dir, &["resize", "top.qcow2", "+1M"]));
    assert!(qemu(dir, &["rebase", "-u", "-b", "other.raw", "-F", "raw", "top.qcow2"]));
    waits(&mut there, "based on other files by now: start this daemon anew");
    // In the same file, with other clusters.
    let other = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "top.qcow2", "9M"];
    assert!(qemu(dir, &other));
    waits(&mut there, "its clusters have another size by now");
    let file = File::options().read(true).write(true).open(dir.join("top.qcow2")).unwrap();
    file.set_len(0).unwrap();
    file.write_all_at(&[0x5a; 4096], 0).unwrap();
    waits(&mut there, "no qcow2 image");
    // As it was: it goes on by itself.
    file.set_len(0).unwrap();
    file.write_all_at(&before, 0).unwrap();
    drop(file);
    there.until_locked(dir, true);
    let mut rng = Rng::for_test("changed_meanwhile");
    there.work(&mut model, &mut rng, 40);
    // Larger than it was, and the guest is told.
    there.leave();
    there.until_locked(dir, false);
    assert!(qemu(dir, &["resize", "top.qcow2", "+1M"]));
    model.resize(model.len() + (1 << 20), 0);
    there.start();
    there.until_locked(dir, true);
    there.write(&mut model, SECTORS + 2047, 1, 7);
    // Another file has its name.
    there.leave();
    there.until_locked(dir, false);
    std::fs::copy(dir.join("top.qcow2"), dir.join("new.qcow2")).unwrap();
    std::fs::rename(dir.join("top.qcow2"), dir.join("old.qcow2")).unwrap();
    std::fs::rename(dir.join("new.qcow2"), dir.join("top.qcow2")).unwrap();
    waits(&mut there, "another file has its name by now");
    let was = std::fs::read(dir.join("old.qcow2")).unwrap();
    there.daemon.stop();
    assert!(std::fs::read(dir.join("old.qcow2")).unwrap() == was, "it was not its any more");
    judge(dir, &model, false);
}

/// A job that is under way ends when the guest leaves; what it has done so far is no harm.
#[test]
fn c36_a_job_ends_when_the_guest_leaves() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir, "64k") else { return };
    let mut rng = Rng::for_test("a_job_ends");
    let mut here = Side::serve(dir, "a", false, &[]);
    let mut there = Side::serve(dir, "b", true, &[]);
    here.start();
    here.work(&mut model, &mut rng, 20);
    assert!(here.ctl(dir, &["flatten", "0", "--bps", "1M"]).0);
    soon("it copies", || !here.ctl(dir, &["list", "--json"]).1.contains(r#""done_bytes": 0,"#));
    there.start();
    here.leave();
    there.until_locked(dir, true);
    there.work(&mut model, &mut rng, 40);
    soon("it ends", || here.ctl(dir, &["list", "--json"]).1.contains(r#""state": "failed""#));
    let (done, said) = here.ctl(dir, &["flatten", "0"]);
    assert!(!done && said.contains("not locked"), "{said}");
    here.daemon.stop();
    there.work(&mut model, &mut rng, 20);
    there.daemon.stop();
    judge(dir, &model, false);
}

/// A clone that the daemon made goes with a guest that leaves; only who has its lock deletes it.
#[test]
fn c36_an_ephemeral_clone_is_deleted_by_who_has_its_lock() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir, "64k") else { return };
    std::fs::remove_file(dir.join("top.qcow2")).unwrap();
    let words = ["--base", "base.raw", "--base-format", "raw"];
    let ephemeral = [&words[..], &["--ephemeral"]].concat();
    let mut command = ringway();
    let serve = ["serve", "top.qcow2", "--format", "qcow2", "--socket", "n", "--incoming"];
    command.args(serve).args(words).current_dir(dir);
    let refused = run(command);
    assert_eq!(refused.status.code(), Some(1), "nothing to be taken over is made");
    assert!(!dir.join("top.qcow2").exists(), "{}", text(&refused.stderr));
    let mut here = Side::serve(dir, "a", false, &ephemeral);
    let mut there = Side::serve(dir, "b", true, &ephemeral);
    let mut rng = Rng::for_test("ephemeral");
    here.start();
    here.work(&mut model, &mut rng, 20);
    there.start();
    here.leave();
    there.until_locked(dir, true);
    here.until_locked(dir, false);
    assert!(here.ctl(dir, &["remove", "0"]).0);
    there.work(&mut model, &mut rng, 20);
    assert!(dir.join("top.qcow2").exists());
    assert!(there.ctl(dir, &["remove", "0"]).0);
    soon("it is deleted", || !dir.join("top.qcow2").exists());
}

/// A disk that is removed at the source, paused or while its guest leaves: the destination finds an image that
/// nobody writes any more.
#[test]
fn c36_a_disk_that_is_removed_leaves_its_image_in_order() {
    let mut rng = Rng::for_test("removed");
    for round in 0..8 {
        let dir = folder();
        let dir = dir.path();
        let Some(mut model) = overlay(dir, "4k") else { return };
        let mut here = Side::serve(dir, "a", false, &[]);
        let mut there = Side::serve(dir, "b", true, &[]);
        here.start();
        here.work(&mut model, &mut rng, 40);
        here.discard(0, 4096);
        here.write(&mut model, 0, 4096, 0);
        there.start();
        if round % 2 == 0 {
            assert!(here.ctl(dir, &["pause", "0"]).0);
        } else {
            here.leave();
        }
        let (done, said) = here.ctl(dir, &["remove", "0"]);
        assert!(done, "{said}");
        there.until_locked(dir, true);
        there.work(&mut model, &mut rng, 40);
        drop(here);
        there.work(&mut model, &mut rng, 20);
        there.daemon.stop();
        judge(dir, &model, false);
    }
}

/// The lock of a data file would have to go, too.
#[test]
fn c36_images_with_data_files_stay_where_they_are() {
    let dir = folder();
    let dir = dir.path();
    if !qemu(dir, &["create", "-f", "qcow2", "-o", "data_file=top.data", "top.qcow2", "8M"]) {
        return;
    }
    let mut here = Side::serve(dir, "a", false, &[]);
    here.start();
    here.leave();
    std::thread::sleep(A_WHILE);
    assert!(here.is_locked(dir));
    here.daemon.stop();
    let mut command = ringway();
    let serve = ["serve", "top.qcow2", "--format", "qcow2", "--socket", "n", "--incoming"];
    command.args(serve).current_dir(dir);
    let said = text(&run(command).stderr);
    assert!(said.contains("--incoming") && said.contains("data are in another file"), "{said}");
}
