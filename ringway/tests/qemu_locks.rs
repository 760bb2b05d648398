//! Programs of QEMU and this one on the same image: each refuses what the other one has locked (hazard
//! C11), as two programs of QEMU do.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text};
use ringway_testkit::{Need, skip};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAMS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-storage-daemon", "qemu-system-x86_64"];

/// True if one of QEMU's programs is missing, which is an error in CI.
fn skips() -> bool {
    let works = |program: &&str| {
        let version = Command::new(program).arg("--version").stdout(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    let Some(missing) = PROGRAMS.iter().find(|program| !works(program)) else { return false };
    skip(Need::Qemu, format_args!("no {missing} here (apt install qemu-utils qemu-system-x86)"));
    true
}

fn qemu(dir: &Path, line: &[&str]) -> Output {
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).current_dir(dir).stdin(Stdio::null());
    run(command)
}

fn works(dir: &Path, line: &[&str]) {
    let output = qemu(dir, line);
    // `qemu-io` ends with 0 though a command failed.
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && !said.contains("failed"), "{line:?}: {said}");
}

fn is_refused(dir: &Path, line: &[&str]) {
    let output = qemu(dir, line);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("lock"), "{line:?}: {said}");
}

/// What a disk is given to a program with.
fn blockdevs(read_only: bool) -> [String; 2] {
    let ro = if read_only { "on" } else { "off" };
    [
        format!("driver=file,node-name=f,filename=disk.img,read-only={ro}"),
        format!("driver=raw,node-name=r,file=f,read-only={ro}"),
    ]
}

/// `qemu-storage-daemon` on the image.
fn storage_daemon(read_only: bool) -> Vec<String> {
    let [file, raw] = blockdevs(read_only);
    let writable = if read_only { "off" } else { "on" };
    let export = format!(
        "type=vhost-user-blk,id=e,node-name=r,addr.type=unix,addr.path=q,writable={writable}"
    );
    let words = ["qemu-storage-daemon", "--blockdev", &file, "--blockdev", &raw];
    words.into_iter().chain(["--export", &export]).map(Into::into).collect()
}

/// A machine with the image as its disk. It is not started: QEMU has the image all the same.
fn machine(read_only: bool) -> Vec<String> {
    let [file, raw] = blockdevs(read_only);
    let words = "qemu-system-x86_64 -accel tcg -m 32M -display none -nodefaults -S";
    let disk = ["-blockdev", &file, "-blockdev", &raw, "-device", "virtio-blk-pci,drive=r"];
    words.split(' ').chain(disk).map(Into::into).collect()
}

fn words(line: &[String]) -> Vec<&str> {
    line.iter().map(String::as_str).collect()
}

/// A program of QEMU that goes on; killed when dropped.
struct Program(Child);

impl Program {
    /// Returns once it has the image open and locked.
    fn start(dir: &Path, line: &[String]) -> Self {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).current_dir(dir).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut program = Self(command.spawn().unwrap());
        let begun = Instant::now();
        while !program.has_locked() {
            let ended = program.0.try_wait().unwrap();
            assert!(ended.is_none(), "{line:?}: {}", program.said());
            assert!(begun.elapsed() < PATIENCE, "{line:?} does not open the image");
            std::thread::sleep(Duration::from_millis(10));
        }
        program
    }

    /// QEMU locks an image several times while it opens it; a process that sleeps has done so.
    fn has_locked(&self) -> bool {
        let locked = || {
            let files = std::fs::read_dir(format!("/proc/{}/fdinfo", self.0.id()));
            files.into_iter().flatten().flatten().any(|file| {
                std::fs::read_to_string(file.path()).is_ok_and(|info| info.contains("OFDLCK"))
            })
        };
        (0..5).all(|_| {
            std::thread::sleep(Duration::from_millis(50));
            locked()
        })
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }

    /// What it is called when it keeps somebody from an image.
    fn name(&self) -> String {
        format!("in use by process {} (qemu-", self.0.id())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const WRITES: &[&str] = &["qemu-io", "-f", "raw", "-c", "write -P 7 0 512", "disk.img"];
const READS: &[&str] = &["qemu-io", "-r", "-f", "raw", "-c", "read -P 0 0 512", "disk.img"];

#[test]
fn c11_qemu_is_refused_what_is_served_for_writing() {
    if skips() {
        return;
    }
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("other"), [7; 1 << 20]).unwrap();
    for sandbox in ["on", "off"] {
        let daemon = Daemon::serve(dir, &["disk.img", "--socket", "s", "--sandbox", sandbox]);
        is_refused(dir, WRITES);
        is_refused(dir, &["qemu-img", "resize", "-f", "raw", "disk.img", "2M"]);
        is_refused(
            dir,
            &["qemu-img", "convert", "-n", "-O", "raw", "-f", "raw", "other", "disk.img"],
        );
        is_refused(dir, &words(&storage_daemon(false)));
        is_refused(dir, &words(&machine(false)));
        // A machine lets nobody write what it reads.
        is_refused(dir, &words(&machine(true)));
        // Those that only look are let in, as QEMU lets them in.
        works(dir, &["qemu-img", "info", "-U", "-f", "raw", "disk.img"]);
        works(dir, &["qemu-io", "-U", "-r", "-f", "raw", "-c", "read -P 0 0 512", "disk.img"]);
        daemon.stop();
    }
    assert_eq!(std::fs::read(dir.join("disk.img")).unwrap(), vec![0; 1 << 20]);
    works(dir, WRITES);
}

#[test]
fn c11_readers_of_both_kinds_share_and_keep_writers_out() {
    if skips() {
        return;
    }
    let dir = folder();
    let dir = dir.path();
    let ours = ["disk.img", "--socket", "s", "--read-only"];
    let daemon = Daemon::serve(dir, &ours);
    is_refused(dir, WRITES);
    is_refused(dir, &words(&storage_daemon(false)));
    is_refused(dir, &words(&machine(false)));
    works(dir, READS);
    works(dir, &["qemu-img", "info", "-f", "raw", "disk.img"]);
    let readers = [Program::start(dir, &storage_daemon(true)), Program::start(dir, &machine(true))];
    daemon.stop();
    // The other way round.
    let daemon = Daemon::serve(dir, &ours);
    daemon.stop();
    drop(readers);
    works(dir, WRITES);
}

fn serve(dir: &Path, more: &[&str]) -> Command {
    let mut command = ringway();
    command.args(["serve", "disk.img", "--socket", "s"]).args(more).current_dir(dir);
    command
}

fn we_are_refused(dir: &Path, holder: &Program, more: &[&str]) {
    let output = run(serve(dir, more));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{more:?}: {said}");
    assert!(said.contains(&holder.name()), "{more:?}: {said}");
    assert!(!dir.join("s").exists());
}

#[test]
fn c11_we_are_refused_what_qemu_has() {
    if skips() {
        return;
    }
    let dir = folder();
    let dir = dir.path();
    for line in [storage_daemon(false), machine(false)] {
        let program = Program::start(dir, &line);
        we_are_refused(dir, &program, &[]);
        we_are_refused(dir, &program, &["--sandbox", "off"]);
        we_are_refused(dir, &program, &["--read-only"]);
        we_are_refused(dir, &program, &["--lock-wait", "1"]);
        // All others of ours that touch images do it by the same code.
        for line in [
            &["io", "disk.img", "-c", "write 0 512"][..],
            &["copy", "disk.img", "new"],
            &["copy", "--force", "other", "disk.img"],
            &["bench", "disk.img", "--rw", "write", "--runtime", "1", "--allow-write", "--cached"],
            &["doctor", "disk.img"],
        ] {
            std::fs::write(dir.join("other"), [7; 1 << 20]).unwrap();
            let mut command = ringway();
            let output = run({
                command.args(line).current_dir(dir);
                command
            });
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(said.contains(&program.name()), "{line:?}: {said}");
            assert!(!output.status.success(), "{line:?}: {said}");
        }
    }
    let program = Program::start(dir, &machine(true));
    we_are_refused(dir, &program, &[]);
    assert_eq!(std::fs::read(dir.join("disk.img")).unwrap(), vec![0; 1 << 20]);
}

/// As [`storage_daemon`], of a qcow2 image.
fn storage_daemon_of_qcow2() -> Vec<String> {
    let words = storage_daemon(false).into_iter();
    let words = words.map(|word| word.replace("disk.img", "disk.qcow2"));
    words.map(|word| word.replace("driver=raw", "driver=qcow2")).collect()
}

fn ctl(dir: &Path, words: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["ctl", "--control", "c"]).args(words).current_dir(dir);
    run(command)
}

/// A disk that is added to a daemon which runs. From its sandbox that sees no process; whoever asks it
/// does.
#[test]
fn c11_what_qemu_has_is_not_added_until_it_is_let_go() {
    if skips() {
        return;
    }
    let dir = folder();
    let dir = dir.path();
    works(dir, &["qemu-img", "create", "-f", "qcow2", "disk.qcow2", "1M"]);
    let raw = ["add", "disk.img", "--socket", "added"];
    let qcow2 = ["add", "disk.qcow2", "--format", "qcow2", "--socket", "added"];
    for sandbox in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let daemon = Daemon::serve(
            dir,
            &[&["null:1M", "--socket", "s", "--control", "c"], sandbox].concat(),
        );
        let cases = [
            (storage_daemon(false), &raw[..]),
            (machine(false), &raw),
            (storage_daemon_of_qcow2(), &qcow2),
        ];
        for (line, add) in cases {
            let program = Program::start(dir, &line);
            let before = (disks(dir), content(dir));
            let ways = [&["--lock-wait", "1"][..], &["--read-only", "--lock-wait", "0"], &[]];
            // A disk with a process of its own waits for half a minute by itself.
            for more in &ways[..if sandbox == ["--isolate"] { 2 } else { 3 }] {
                let output = ctl(dir, &[add, more].concat());
                let said = text(&output.stderr);
                let asked = format!("{sandbox:?}, {add:?} {more:?}: {said}");
                assert_eq!(output.status.code(), Some(1), "{asked}");
                assert!(said.contains(&program.name()), "{asked}");
                assert!(said.contains("--incoming"), "{asked}");
                assert!(!dir.join("added").exists(), "{asked}");
                assert_eq!((disks(dir), content(dir)), before, "{asked}");
            }
            drop(program);
            let output = ctl(dir, add);
            let said = text(&output.stderr);
            assert!(output.status.success(), "{sandbox:?}, {add:?}, let go: {said}");
            let mut device = ringway_driver::Device::connect(dir.join("added")).unwrap();
            let mut queue = device.queue().unwrap();
            assert!(crate::common::write(&device, &mut queue, 1, 7), "{sandbox:?}, {add:?}");
            drop((queue, device));
            assert!(ctl(dir, &["remove", add[1]]).status.success(), "{sandbox:?}, {add:?}");
            let _ = std::fs::remove_file(dir.join("q"));
        }
        daemon.stop();
    }
}

/// The disks that the daemon has.
fn disks(dir: &Path) -> Vec<String> {
    let list = ctl(dir, &["list", "--json"]).stdout;
    let list: serde_json::Value = serde_json::from_slice(&list).unwrap();
    let disks = list["disks"].as_array().unwrap();
    disks.iter().map(|disk| disk["image"].as_str().unwrap().to_owned()).collect()
}

/// What the images hold.
fn content(dir: &Path) -> [Vec<u8>; 2] {
    ["disk.img", "disk.qcow2"].map(|name| std::fs::read(dir.join(name)).unwrap())
}

#[test]
fn c11_what_is_advised_of_an_image_in_use_can_be_done() {
    if skips() {
        return;
    }
    let dir = folder();
    let dir = dir.path();
    works(dir, &["qemu-img", "create", "-f", "qcow2", "disk.qcow2", "1M"]);
    for (image, format) in [("disk.img", "raw"), ("disk.qcow2", "qcow2")] {
        let words = [image, "--format", format, "--socket"];
        let first = Daemon::serve(dir, &[&words[..], &["s"]].concat());
        let second = |more: &[&str]| {
            let mut command = ringway();
            command.arg("serve").args(words).arg("t").args(more).current_dir(dir);
            run(command)
        };
        let said = text(&second(&[]).stderr);
        // Or its helper, which opens images.
        assert!(said.contains("in use by process ") && said.contains(" (ringway"), "{said}");
        assert!(said.contains("--read-only from both"), "{said}");
        assert!(said.contains("--incoming"), "{said}");
        // It starts, and waits for its guest and the lock.
        Daemon::serve(dir, &[&words[..], &["t", "--incoming"]].concat()).stop();
        first.stop();
        let both = ["s", "t"]
            .map(|socket| Daemon::serve(dir, &[&words[..], &[socket, "--read-only"]].concat()));
        both.into_iter().for_each(|daemon| drop(daemon.stop()));
    }
}

/// A program of QEMU is waited for if asked, with its name in the log.
#[test]
fn c11_qemu_is_waited_for_on_request() {
    if skips() {
        return;
    }
    let dir = folder();
    for sandbox in ["on", "off"] {
        // On a busy machine the daemon may come when the program has ended already.
        let waited = [2, 4, 8, 16].into_iter().any(|seconds| {
            let program = Program::start(dir.path(), &storage_daemon(false));
            let name = program.name();
            let ends = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(seconds));
                drop(program);
            });
            let args = ["--lock-wait", "60", "--sandbox", sandbox];
            let daemon = Daemon::start(serve(dir.path(), &args));
            let log = daemon.log();
            println!("{log}");
            ends.join().unwrap();
            daemon.stop();
            std::fs::remove_file(dir.path().join("q")).unwrap();
            log.contains("waiting up to 60 s") && log.contains(&name)
        });
        assert!(waited, "sandbox {sandbox}: it never waits");
    }
}
