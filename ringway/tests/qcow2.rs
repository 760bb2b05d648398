//! Disks whose images are qcow2: served, killed, refused.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, folder, read, ringway, run, text, write};
use ringway_driver::Options;
use ringway_testkit::{Need, Rng, skip};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const ARGS: [&str; 5] = ["top.qcow2", "--format", "qcow2", "--socket", "s"];
/// Sectors of the disk.
const SECTORS: u64 = 16384;

/// Runs `qemu-img`, once nobody has the image any more: what a killed daemon started ends a moment
/// after it.
fn img(dir: &Path, args: &[&str]) -> std::io::Result<Output> {
    let deadline = Instant::now() + crate::common::PATIENCE;
    loop {
        let output = Command::new("qemu-img").args(args).current_dir(dir).output()?;
        if !text(&output.stderr).contains("\" lock") || Instant::now() >= deadline {
            return Ok(output);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs `qemu-img`; false if it is not here.
fn qemu(dir: &Path, args: &[&str]) -> bool {
    match img(dir, args) {
        Ok(output) if output.status.success() => true,
        Ok(output) => panic!("{args:?}: {}", text(&output.stderr)),
        Err(_) => {
            skip(Need::Qemu, "qemu-img".to_owned());
            false
        }
    }
}

/// An overlay on a raw image whose sectors hold what they are called.
fn overlay(dir: &Path) -> Option<Vec<u8>> {
    let base: Vec<u8> = (0..SECTORS * 512).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(dir.join("base.raw"), &base).unwrap();
    let made = qemu(dir, &["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"]);
    made.then_some(base)
}

/// The image is whole, with leaks only if they may be, and holds what it should.
fn judge(dir: &Path, model: &[u8], leaks: bool) {
    let check = img(dir, &["check", "top.qcow2"]).unwrap();
    let code = check.status.code();
    let said = text(&check.stdout) + &text(&check.stderr);
    assert!(code == Some(0) || (leaks && code == Some(3)), "{code:?} {said}");
    assert!(qemu(dir, &["convert", "-O", "raw", "top.qcow2", "now.raw"]));
    let now = std::fs::read(dir.join("now.raw")).unwrap();
    assert!(now.len() == model.len(), "{} bytes", now.len());
    let differs = |at: &usize| now[at * 512..at * 512 + 512] != model[at * 512..at * 512 + 512];
    assert_eq!((0..model.len() / 512).find(differs), None, "the first sector that differs");
}

#[test]
fn c19_what_was_answered_is_there_whether_the_daemon_ends_or_is_killed() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = overlay(dir) else { return };
    let mut rng = Rng::for_test("what_was_answered");
    for more in [
        &[][..],
        &["--cache", "none"],
        &["--sandbox", "off"],
        &["--engine", "threads"],
        &["--isolate"],
    ] {
        for killed in [false, true] {
            let daemon = Daemon::serve(dir, &[&ARGS[..], more].concat());
            let mut device = Options::new().connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            for _ in 0..60 {
                let (sector, byte) = (rng.below(SECTORS), (rng.next_u64() & 0xff) as u8);
                assert!(write(&device, &mut queue, sector, byte));
                let at = usize::try_from(sector * 512).unwrap();
                model[at..at + 512].fill(byte);
                let sector = rng.below(SECTORS);
                let at = usize::try_from(sector * 512).unwrap();
                let found = read(&device, &mut queue, sector);
                assert_eq!(found, model[at..at + 512], "sector {sector}");
            }
            if killed {
                daemon.kill();
                // The next one puts into the image what that one had answered.
                Daemon::serve(dir, &[&ARGS[..], more].concat()).stop();
            } else {
                drop((queue, device));
                daemon.stop();
            }
            judge(dir, &model, killed);
        }
        assert!(qemu(dir, &["check", "-r", "leaks", "top.qcow2"]));
    }
}

/// The words of a command to the daemon, and its status.
fn ctl(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = ringway();
    command.args(["ctl", "--control", "c"]).args(args).current_dir(dir);
    let output = run(command);
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

/// The size in the header is there before the guest knows it; a kill leaves either. What was added is
/// zeroes, though the base is longer, and can be written.
#[test]
fn c24_an_image_grows_while_it_is_served() {
    let dir = folder();
    let dir = dir.path();
    let Some(base) = overlay(dir) else { return };
    assert!(qemu(dir, &["resize", "--shrink", "-f", "qcow2", "top.qcow2", "1049088"]));
    let mut model = base[..1_049_088].to_vec();
    let args = [&ARGS[..], &["--control", "c"]].concat();
    let watching = Options::new().watch_config(true);
    for (nth, (size, more)) in
        [("2M", &["--path", "request"][..]), ("20M", &["--isolate"])].into_iter().enumerate()
    {
        let daemon = Daemon::serve(dir, &[&args[..], more].concat());
        let mut device = watching.clone().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        assert!(write(&device, &mut queue, 2048, 7));
        model[1 << 20..][..512].fill(7);
        let (status, said) = ctl(dir, &["resize", "0", "1M"]);
        assert_ne!(status, Some(0), "{said}");
        assert!(said.contains("only grows") && said.contains("ringway resize --shrink"), "{said}");
        let (status, said) = ctl(dir, &["resize", "0", size]);
        assert_eq!(status, Some(0), "{said}");
        let bytes = if nth == 0 { 2 << 20 } else { 20 << 20 };
        model.resize(bytes, 0);
        let last = bytes as u64 / 512 - 1;
        assert!(device.config_changed().unwrap());
        assert_eq!(device.capacity(), bytes as u64);
        assert_eq!(read(&device, &mut queue, 2050), [0; 512]);
        assert_eq!(read(&device, &mut queue, last - 1), [0; 512]);
        assert!(write(&device, &mut queue, last, 9));
        model[bytes - 512..].fill(9);
        daemon.kill();
        Daemon::serve(dir, &[&args[..], more].concat()).stop();
        judge(dir, &model, true);
        assert!(qemu(dir, &["check", "-r", "leaks", "top.qcow2"]));
    }
}

/// A data file is found by the helper, written by the engines, and stays a raw image of the disk.
#[test]
fn c20_an_image_with_a_data_file_is_served() {
    let dir = folder();
    let dir = dir.path();
    let options = "data_file=top.data,data_file_raw=on";
    if !qemu(dir, &["create", "-f", "qcow2", "-o", options, "top.qcow2", "8M"]) {
        return;
    }
    let mut model = vec![0; SECTORS as usize * 512];
    for killed in [false, true] {
        let daemon = Daemon::serve(dir, &ARGS);
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        for sector in [0, 77, 4096, SECTORS - 1] {
            assert_eq!(read(&device, &mut queue, sector), model[sector as usize * 512..][..512]);
            let byte = sector as u8 ^ u8::from(killed) | 1;
            assert!(write(&device, &mut queue, sector, byte));
            model[sector as usize * 512..][..512].fill(byte);
        }
        drop(queue);
        match killed {
            true => daemon.kill(),
            false => drop(daemon.stop()),
        }
        judge(dir, &model, killed);
        assert!(std::fs::read(dir.join("top.data")).unwrap() == model);
    }
}

#[test]
fn an_image_that_cannot_be_served_so_is_refused_with_the_way_out() {
    let dir = folder();
    let dir = dir.path();
    if overlay(dir).is_none() {
        return;
    }
    let before = std::fs::read(dir.join("top.qcow2")).unwrap();
    std::fs::create_dir(dir.join("clones")).unwrap();
    let clone = ["create", "-f", "qcow2", "-b", "../top.qcow2", "-F", "qcow2", "clones/one.qcow2"];
    assert!(qemu(dir, &clone));
    let refused = |args: &[&str], words: &[&str]| {
        let mut command = ringway();
        command.arg("serve").args(args).args(["--socket", "s"]).current_dir(dir);
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    let qcow2 = ["--format", "qcow2"];
    refused(
        &[&["base.raw"], &qcow2[..]].concat(),
        &["no qcow2 image", "served without --format qcow2"],
    );
    refused(&["top.qcow2"], &["qcow2"]);
    refused(&[&["clones/one.qcow2"], &qcow2[..]].concat(), &["--backing-root", "top.qcow2"]);
    assert!(std::fs::read(dir.join("top.qcow2")).unwrap() == before, "nothing was changed");
    let args = ["clones/one.qcow2", "--format", "qcow2", "--backing-root", ".", "--socket", "s"];
    Daemon::serve(dir, &args).stop();
}

/// Threads of a daemon that write clusters of an image together with its own.
fn writers(daemon: &Daemon) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")));
    // One that ends meanwhile has no name.
    names.filter(|name| name.as_ref().is_ok_and(|name| name.trim() == "image-io")).count()
}

/// In the sandbox, with direct I/O: first writes of many requests are carried out together, by threads that
/// an idle disk does not have.
#[test]
fn first_writes_have_threads_that_end() {
    let dir = folder();
    let dir = dir.path();
    if overlay(dir).is_none() {
        return;
    }
    let daemon = Daemon::serve(dir, &[&ARGS[..], &["--cache", "none"]].concat());
    assert_eq!(writers(&daemon), 0);
    let load = ["--rw", "randwrite", "--iodepth", "32", "--bs", "4k", "--io-size", "2M"];
    let bench = [&["bench", "vhost-user:s", "--allow-write"], &load[..]].concat();
    let mut load = ringway();
    let mut load = load.args(bench).current_dir(dir).stdout(Stdio::null()).spawn().unwrap();
    let mut most = 0;
    while load.try_wait().unwrap().is_none() {
        most = writers(&daemon).max(most);
        std::thread::sleep(Duration::from_millis(1));
    }
    most = writers(&daemon).max(most);
    assert!(load.wait().unwrap().success() && (1..8).contains(&most), "{most} threads");
    let deadline = Instant::now() + crate::common::PATIENCE;
    while writers(&daemon) > 0 {
        assert!(Instant::now() < deadline, "they never end");
        std::thread::sleep(Duration::from_millis(100));
    }
    daemon.stop();
    let check = img(dir, &["check", "top.qcow2"]).unwrap();
    assert!(check.status.success(), "{}", text(&check.stdout));
}
