//! Disks of a Ceph cluster, from outside: `ringway serve rbd:…` before a real cluster that the test makes, in
//! the sandbox. Group G of docs/hazards.md.

mod common;

use common::{Daemon, PATIENCE, folder, ringway, run, snapshot, text};
use ringway_driver::{BlkQueue, BufferPool, Device, Options};
use ringway_testkit::{Need, pattern, skip};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// What the guest writes of an image of 64 MiB.
const BYTES: u64 = 8 * MIB;
/// Of a request of the verified guest.
const LEN: u64 = 32 << 10;
const REQUESTS: u64 = BYTES / LEN;
const DEPTH: u16 = 24;

/// One cluster at a time: they are large.
static TURN: Mutex<()> = Mutex::new(());

/// A cluster; dropping it ends it.
struct Cluster {
    dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    /// With keys or without. `None` if its packages are not here.
    fn start(keys: bool) -> Option<Self> {
        for program in ["ceph-mon", "ceph-osd", "ceph", "rbd", "ceph-authtool", "monmaptool"] {
            let known = Command::new(program).arg("--version").stdout(Stdio::null()).status();
            if known.is_err() {
                skip(Need::Ceph, program);
                return None;
            }
        }
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // Of several processes of tests each has ports of its own.
        let own = u16::try_from(std::process::id() % 1000).unwrap() * 16;
        let port = 20_000 + own + 2 * NEXT.fetch_add(1, SeqCst);
        let dir = tempfile::tempdir().unwrap();
        let cluster = Self { dir, _turn: turn };
        let auth = if keys { "cephx" } else { "none" };
        let env =
            [("PORT", port.to_string()), ("AUTH", auth.into()), ("STORE", "bluestore".into())];
        cluster.script("start", &env);
        Some(cluster)
    }

    fn script(&self, what: &str, env: &[(&str, String)]) {
        let log = self.path().join("script.log");
        let log = std::fs::File::options().append(true).create(true).open(log).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/ceph-mini.sh");
        let mut command = Command::new(script);
        command.arg(what).arg(self.path()).envs(env.iter().cloned()).stdin(Stdio::null());
        let status = command.stdout(log.try_clone().unwrap()).stderr(log).status().unwrap();
        let log = || std::fs::read_to_string(self.path().join("script.log"));
        assert!(status.success(), "the cluster does not {what}: {:?}", log());
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn conf(&self) -> PathBuf {
        self.path().join("ceph.conf")
    }

    /// One of Ceph's programs.
    #[track_caller]
    fn tool(&self, program: &str, args: &[&str]) -> Vec<u8> {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.conf()).args(args);
        let output = run(command);
        assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
        output.stdout
    }

    fn kill_osd(&self) {
        let file = self.path().join("osd.0.pid");
        let pid = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        kill(pid);
        std::fs::remove_file(file).unwrap();
    }

    /// `ringway serve rbd:rbd/IMAGE ARGS`.
    fn serve(&self, dir: &Path, image: &str, args: &[&str]) -> Daemon {
        Daemon::start(self.command(dir, image, args))
    }

    fn command(&self, dir: &Path, image: &str, args: &[&str]) -> Command {
        let mut command = ringway();
        command.args(["serve", image, "--queues", "2", "--control", "ctl", "--ceph-conf"]);
        command.arg(self.conf()).args(args).current_dir(dir);
        command
    }

    /// What the guest has written, as the cluster has it.
    #[track_caller]
    fn assert_written(&self, sequence: u64) {
        let bytes = self.tool("rbd", &["export", "--no-progress", "rbd/img", "-"]);
        let bytes = &bytes[..usize::try_from(BYTES).unwrap()];
        let mut expected = vec![0; bytes.len()];
        pattern::fill(&mut expected, 1, 0, sequence);
        assert!(*bytes == expected[..], "the image is what the guest wrote");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.script("stop", &[]);
    }
}

fn kill(pid: i32) {
    // SAFETY: a process that this test has started, and whose file says that it lives.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

#[track_caller]
fn until(what: &str, is: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ctl(dir: &Path, args: &[&str]) -> String {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    let output = run(command);
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// The process of the disk.
fn process(dir: &Path) -> Option<i32> {
    let list = ctl(dir, &["list", "--json"]);
    let at = list.find("\"process\":")? + "\"process\":".len();
    let rest = list[at..].trim_start();
    rest[..rest.find(|sign: char| !sign.is_ascii_digit())?].parse().ok()
}

fn connect(dir: &Path, queues: u16) -> Device {
    let options = Options::new().queues(queues).patience(PATIENCE).reconnect(PATIENCE);
    options.memory(8 << 20).connect(dir.join("s")).unwrap()
}

/// Writes so much of the disk, each request with its own content, several at a time; then reads it.
/// `answered` counts. Every one has to succeed.
fn guest(pool: &BufferPool, queue: &mut BlkQueue<u64>, sequence: u64, answered: &AtomicU64) {
    let len = usize::try_from(LEN).unwrap();
    for reads in [false, true] {
        let (mut next, mut done) = (0, 0);
        while done < REQUESTS {
            while next < REQUESTS && queue.in_flight() < DEPTH {
                let Some(mut buffer) = pool.alloc(len) else { break };
                let queued = if reads {
                    queue.read(next * LEN, buffer, next)
                } else {
                    pattern::fill(&mut buffer, 1, next * LEN / 512, sequence);
                    queue.write(next * LEN, buffer, next)
                };
                queued.unwrap();
                next += 1;
            }
            assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer after {done} requests");
            while let Some(answer) = queue.pop().unwrap() {
                assert!(answer.is_ok(), "request {} failed: {:?}", answer.ctx, answer.status);
                if reads {
                    let mut expected = vec![0; len];
                    pattern::fill(&mut expected, 1, answer.ctx * LEN / 512, sequence);
                    let ctx = answer.ctx;
                    let found = answer.into_buffer().expect("what was read");
                    assert!(found[..] == expected[..], "request {ctx} reads something else");
                }
                done += 1;
                answered.fetch_add(1, SeqCst);
            }
        }
    }
}

/// Carries out a request that has been queued.
#[track_caller]
fn carry_out(queue: &mut BlkQueue<u64>) -> (bool, Vec<u8>) {
    assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
    let answer = queue.pop().unwrap().unwrap();
    let ok = answer.is_ok();
    (ok, answer.into_buffer().map(|buffer| buffer.to_vec()).unwrap_or_default())
}

/// A guest writes and reads without a pause and without an error, while somebody does something; what came of
/// that. In the end the cluster has what the guest wrote.
fn meanwhile<T>(cluster: &Cluster, dir: &Path, act: impl FnOnce(&AtomicU64) -> T) -> T {
    let mut device = connect(dir, 1);
    let mut queue = device.queue().unwrap();
    let (pool, answered, stop) = (device.pool(), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (answered, stop) = (&answered, &stop);
        let guest = scope.spawn(move || {
            let mut sequence = 1;
            while !stop.load(SeqCst) {
                sequence += 1;
                guest(&pool, &mut queue, sequence, answered);
            }
            queue.flush(0).unwrap();
            assert!(carry_out(&mut queue).0, "a flush");
            sequence
        });
        let came = act(answered);
        stop.store(true, SeqCst);
        let sequence = guest.join().unwrap();
        cluster.assert_written(sequence);
        came
    })
}

fn goes_on(answered: &AtomicU64, by: u64) {
    let before = answered.load(SeqCst);
    until("the guest goes on", || answered.load(SeqCst) >= before + by);
}

const IMAGE: &str = "rbd:rbd/img";

#[test]
fn a_guest_uses_an_image_a_snapshot_and_more_room() {
    // With keys, which the process of the disk cannot read once it is in the sandbox.
    let Some(cluster) = Cluster::start(true) else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s"]);
    assert!(daemon.ready.contains("engine rbd"), "{}", daemon.ready);
    assert!(daemon.log().contains("sandbox on"), "{}", daemon.log());
    let mut device = connect(path, 2);
    assert_eq!(device.info().capacity, 64 * MIB);
    let mut queues = device.queues().unwrap().into_iter();
    let (mut one, mut two) = (queues.next().unwrap(), queues.next().unwrap());
    let pool = device.pool();
    guest(&pool, &mut one, 3, &AtomicU64::new(0));
    guest(&pool, &mut two, 4, &AtomicU64::new(0));
    one.flush(0).unwrap();
    assert!(carry_out(&mut one).0);
    cluster.tool("rbd", &["snap", "create", "--no-progress", "rbd/img@then"]);
    // Zeroes, and what is discarded, which may read as anything.
    two.write_zeroes(0, MIB, false, 0).unwrap();
    assert!(carry_out(&mut two).0);
    two.discard(4 * MIB, 4 * MIB, 0).unwrap();
    assert!(carry_out(&mut two).0);
    two.read(MIB - LEN, pool.alloc(usize::try_from(LEN).unwrap()).unwrap(), 0).unwrap();
    assert_eq!(carry_out(&mut two), (true, vec![0; usize::try_from(LEN).unwrap()]));
    // More room.
    cluster.tool("rbd", &["resize", "--no-progress", "--size", "80M", "rbd/img"]);
    until("the size is seen", || {
        ctl(path, &["resize", "0"]);
        ctl(path, &["list"]).contains("80 MiB")
    });
    drop((one, two, queues, device));
    daemon.stop();
    let lockers = text(&cluster.tool("rbd", &["lock", "ls", "rbd/img"]));
    assert!(lockers.trim().is_empty(), "the lock is given back: {lockers}");
    // As it was then, for readers.
    let daemon = cluster.serve(path, "rbd:rbd/img@then", &["--socket", "s"]);
    let mut device = connect(path, 1);
    assert!(device.info().read_only);
    let mut queue = device.queue().unwrap();
    for request in [0, REQUESTS - 1] {
        let buffer = device.pool().alloc(usize::try_from(LEN).unwrap()).unwrap();
        queue.read(request * LEN, buffer, 0).unwrap();
        let mut expected = vec![0; usize::try_from(LEN).unwrap()];
        pattern::fill(&mut expected, 1, request * LEN / 512, 4);
        assert_eq!(carry_out(&mut queue), (true, expected));
    }
    drop((queue, device));
    daemon.stop();
}

#[test]
fn g01_what_was_answered_survives_a_daemon_that_is_killed() {
    let Some(cluster) = Cluster::start(false) else { return };
    let dir = folder();
    let path = dir.path();
    let mut daemon = Some(cluster.serve(path, IMAGE, &["--socket", "s"]));
    let daemon = meanwhile(&cluster, path, |answered| {
        for round in 1..=3 {
            goes_on(answered, 40 * round);
            daemon.take().unwrap().kill();
            let begun = Instant::now();
            daemon = Some(cluster.serve(path, IMAGE, &["--socket", "s"]));
            // The cluster itself would miss the dead one after half a minute.
            println!("served again after {:?}", begun.elapsed());
            let log = daemon.as_ref().unwrap().log();
            assert!(log.contains("is dead: its lock is broken"), "{log}");
            goes_on(answered, 40);
        }
        for round in 1..=3 {
            goes_on(answered, 40 * round);
            let before = process(path).unwrap();
            kill(before);
            until("another process", || process(path).is_some_and(|now| now != before));
            goes_on(answered, 40);
        }
        daemon.unwrap()
    });
    let listed = text(&cluster.tool("ceph", &["osd", "blocklist", "ls"]));
    assert!(listed.lines().filter(|line| line.contains("127.0.0.1:0/")).count() >= 6, "{listed}");
    daemon.stop();
}

#[test]
fn g02_who_lives_keeps_the_lock() {
    let Some(cluster) = Cluster::start(false) else { return };
    let (dir, other) = (folder(), folder());
    let daemon = cluster.serve(dir.path(), IMAGE, &["--socket", "s"]);
    let before = snapshot(other.path());
    let wait = ["--socket", "s", "--lock-wait", "1"];
    let output = run(cluster.command(other.path(), IMAGE, &wait));
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("it is in use by 127.0.0.1:0/"), "{said}");
    assert_eq!(snapshot(other.path()), before);
    // Readers need no lock.
    cluster.serve(other.path(), IMAGE, &["--socket", "s", "--read-only"]).stop();
    daemon.stop();
    cluster.serve(other.path(), IMAGE, &["--socket", "s", "--lock-wait", "1"]).stop();
}

#[test]
fn g03_requests_wait_for_an_osd_that_was_killed() {
    let Some(cluster) = Cluster::start(false) else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s", "--overdue", "2"]);
    meanwhile(&cluster, path, |answered| {
        goes_on(answered, 40);
        cluster.kill_osd();
        until("it is told", || daemon.log().contains("been under way for 2 s or longer"));
        assert!(ctl(path, &["list"]).contains("serving"), "the control socket answers");
        cluster.script("osd", &[]);
        goes_on(answered, 40);
    });
    // And one that does not come back keeps nobody from ending.
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<u64> = device.queue().unwrap();
    cluster.kill_osd();
    queue.write(0, device.pool().alloc(512).unwrap(), 0).unwrap();
    queue.submit().unwrap();
    let mut daemon = daemon;
    daemon.signal(libc::SIGTERM);
    daemon.signal(libc::SIGTERM);
    daemon.wait();
}

#[test]
fn g04_what_cannot_be_had_is_refused_with_the_reason_and_nothing_is_made() {
    let Some(cluster) = Cluster::start(true) else { return };
    let dir = folder();
    let path = dir.path();
    cluster.tool("rbd", &["create", "--size", "8M", "--image-feature", "layering", "rbd/bare"]);
    cluster.tool("rbd", &["create", "--size", "8M", "rbd/cached"]);
    cluster.tool("rbd", &["config", "image", "set", "rbd/cached", "rbd_cache", "true"]);
    let conf = cluster.conf().display().to_string();
    let silent = path.join("silent.conf").display().to_string();
    std::fs::write(&silent, "[global]\nmon host = v1:127.0.0.1:1\nauth client required = none\n")
        .unwrap();
    let before = snapshot(path);
    let conf = ["--ceph-conf", conf.as_str()];
    for (args, wanted) in [
        (vec![IMAGE, "--ceph-conf", "/nowhere"], "cannot read the configuration"),
        (vec![IMAGE, "--ceph-conf", &silent], "no monitor has answered within 15 s"),
        (vec!["disk.img", conf[0], conf[1]], "are for images of a Ceph cluster"),
        (vec!["rbd:rbd", conf[0], conf[1]], "it names no image of the pool"),
        (vec!["rbd:no/img", conf[0], conf[1]], "the cluster has no pool 'no'"),
        (vec!["rbd:rbd/no", conf[0], conf[1]], "the pool 'rbd' has no image 'no'"),
        (vec!["rbd:rbd/img@no", conf[0], conf[1]], "with a snapshot 'no'"),
        (vec!["rbd:rbd/bare", conf[0], conf[1]], "has no exclusive lock"),
        (vec!["rbd:rbd/cached", conf[0], conf[1]], "switches on rbd_cache"),
        (vec![IMAGE, conf[0], conf[1], "--ceph-user", "nobody"], "no key of client.nobody"),
        (vec![IMAGE, conf[0], conf[1], "--cache", "none"], "--cache is writeback"),
        (vec![IMAGE, conf[0], conf[1], "--size", "1M"], "leave --size out"),
        (vec![IMAGE, conf[0], conf[1], "--engine", "threads"], "leave --engine out"),
        (vec![IMAGE, conf[0], conf[1], "--format", "qcow2"], "leave --format out"),
        (vec![IMAGE, conf[0], conf[1], "--incoming"], "--incoming is for files"),
    ] {
        let mut command = ringway();
        command.arg("serve").args(&args).args(["--socket", "s"]).current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{args:?}: {said}");
        assert_eq!(snapshot(path), before);
    }
    // Whoever may only read cannot have the lock.
    let caps = ["auth", "get-or-create", "client.reader", "mon", "profile rbd"];
    let caps = [&caps[..], &["osd", "profile rbd-read-only"]].concat();
    let key = cluster.tool("ceph", &caps);
    let ring = cluster.path().join("keyring");
    let both = [std::fs::read(&ring).unwrap(), key].concat();
    std::fs::write(&ring, both).unwrap();
    let reader = ["--socket", "s", "--ceph-user", "reader"];
    let output = run(cluster.command(path, IMAGE, &reader));
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("client.reader"), "{said}");
    let readers = [&reader[..], &["--read-only"]].concat();
    cluster.serve(path, IMAGE, &readers).stop();
}

/// Requests are carried out one after the other, for so long, until one fails.
#[track_caller]
fn until_one_fails(what: &str, mut one: impl FnMut() -> bool) {
    let begun = Instant::now();
    while one() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads what the guest has written with this sequence; false with an error.
fn reads(pool: &BufferPool, queue: &mut BlkQueue<u64>, sequence: u64) -> bool {
    queue.read(0, pool.alloc(4096).unwrap(), 0).unwrap();
    let (ok, found) = carry_out(queue);
    let mut expected = vec![0; 4096];
    pattern::fill(&mut expected, 1, 0, sequence);
    assert!(!ok || found == expected, "something else is read, without an error");
    ok
}

/// Writes are queued one after the other, until one is under way for so long that `ctl` tells it.
#[track_caller]
fn until_a_write_waits(dir: &Path, pool: &BufferPool, queue: &mut BlkQueue<u64>) {
    let is_overdue = || {
        let stats = ctl(dir, &["stats", "--json"]);
        let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
        stats["disks"][0]["overdue"].as_u64().expect("a number") > 0
    };
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < PATIENCE, "never: a write waits");
        if queue.in_flight() == 0 {
            queue.write(0, pool.alloc(4096).unwrap(), 0).unwrap();
        }
        if queue.wait(Some(Duration::from_secs(1))).unwrap() {
            assert!(carry_out(queue).0, "a write");
        } else if is_overdue() {
            return;
        }
    }
}

impl Cluster {
    /// Has its OSD be full, whatever is in it, or have room again.
    fn set_full(&self, full: bool) {
        let ratios = [("full", "0.95"), ("backfillfull", "0.9"), ("nearfull", "0.85")];
        for (name, usual) in ratios {
            let ratio = if full { "0.00001" } else { usual };
            self.tool("ceph", &["osd", &format!("set-{name}-ratio"), ratio]);
        }
    }

    /// SIGSTOP or SIGCONT.
    fn signal_osd(&self, signal: i32) {
        let pid = std::fs::read_to_string(self.path().join("osd.0.pid")).unwrap();
        // SAFETY: a process that this test has started, and whose file says that it lives.
        let rc = unsafe { libc::kill(pid.trim().parse().unwrap(), signal) };
        assert_eq!(rc, 0);
    }
}

#[test]
fn g05_g07_requests_wait_for_room_and_for_a_cluster_that_stands_still() {
    let Some(cluster) = Cluster::start(false) else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s", "--overdue", "2"]);
    let mut device = connect(path, 2);
    let mut queues = device.queues().unwrap().into_iter();
    let (mut one, mut two) = (queues.next().unwrap(), queues.next().unwrap());
    let pool = device.pool();
    // Full: writes wait, reads do not.
    cluster.set_full(true);
    until_a_write_waits(path, &pool, &mut one);
    two.read(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(carry_out(&mut two).0, "a read of a cluster that is full");
    assert!(ctl(path, &["list"]).contains("serving"), "the control socket answers");
    cluster.set_full(false);
    assert!(carry_out(&mut one).0, "there is room again");
    // An OSD that stands still, as behind a network that does.
    cluster.signal_osd(libc::SIGSTOP);
    until_a_write_waits(path, &pool, &mut one);
    assert!(ctl(path, &["list"]).contains("serving"), "the control socket answers");
    cluster.signal_osd(libc::SIGCONT);
    assert!(carry_out(&mut one).0, "it goes on");
    drop((one, two, queues, device));
    daemon.stop();
    // With a time limit of the library's own.
    let conf = std::fs::read_to_string(cluster.conf()).unwrap() + "rados osd op timeout = 10\n";
    std::fs::write(path.join("limited.conf"), conf).unwrap();
    let mut command = ringway();
    command.args(["serve", IMAGE, "--ceph-conf", "limited.conf", "--socket", "s"]);
    command.current_dir(path);
    let daemon = Daemon::start(command);
    let mut device = connect(path, 1);
    let (pool, mut queue) = (device.pool(), device.queue().unwrap());
    queue.write(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(carry_out(&mut queue).0);
    cluster.signal_osd(libc::SIGSTOP);
    queue.write(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(!carry_out(&mut queue).0, "the time limit");
    cluster.signal_osd(libc::SIGCONT);
    queue.read(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(carry_out(&mut queue).0, "it goes on");
    drop((queue, device));
    daemon.stop();
}

#[test]
fn g06_who_is_fenced_or_has_lost_its_pool_has_errors_and_no_wrong_data() {
    let Some(cluster) = Cluster::start(false) else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s"]);
    let mut device = connect(path, 1);
    let (pool, mut queue) = (device.pool(), device.queue().unwrap());
    guest(&pool, &mut queue, 5, &AtomicU64::new(0));
    // While it is served it cannot be removed.
    let mut command = Command::new("rbd");
    command.arg("-c").arg(cluster.conf()).args(["rm", "--no-progress", "rbd/img"]);
    assert!(!run(command).status.success(), "an image in use was removed");
    assert!(reads(&pool, &mut queue, 5));
    // Its administrator fences the client.
    let list = text(&cluster.tool("rbd", &["lock", "ls", "--format", "json", "rbd/img"]));
    let (_, address) = list.split_once("\"address\":\"").expect("somebody has the lock");
    let (address, _) = address.split_once('"').unwrap();
    cluster.tool("ceph", &["osd", "blocklist", "add", address]);
    until_one_fails("a write of who is fenced fails", || {
        queue.write(BYTES, pool.alloc(4096).unwrap(), 0).unwrap();
        carry_out(&mut queue).0
    });
    assert!(!reads(&pool, &mut queue, 5), "a read of who is fenced");
    queue.flush(0).unwrap();
    assert!(!carry_out(&mut queue).0, "a flush of who is fenced");
    drop(queue);
    drop(device);
    daemon.stop();
    // A new client has it all.
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s"]);
    let mut device = connect(path, 1);
    let mut queue = device.queue().unwrap();
    let pool = device.pool();
    assert!(reads(&pool, &mut queue, 5));
    // The pool goes, with all images in it.
    cluster.tool("ceph", &["osd", "pool", "delete", "rbd", "rbd", "--yes-i-really-really-mean-it"]);
    until_one_fails("a read without the pool fails", || reads(&pool, &mut queue, 5));
    queue.write(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(!carry_out(&mut queue).0, "a write without the pool");
    drop((queue, device));
    daemon.stop();
}

#[test]
fn tools_know_images_of_a_cluster() {
    let Some(cluster) = Cluster::start(false) else { return };
    let dir = folder();
    let path = dir.path();
    let tool = |args: &[&str]| {
        let mut command = ringway();
        command.args(args).arg("--ceph-conf").arg(cluster.conf()).current_dir(path);
        let output = run(command);
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        (output.status.code(), said)
    };
    let succeeds = |args: &[&str]| {
        let (status, said) = tool(args);
        assert_eq!(status, Some(0), "{args:?}: {said}");
        said
    };
    let fails = |args: &[&str], wanted: &str| {
        let (status, said) = tool(args);
        assert!(status == Some(1) && said.contains(wanted), "{args:?}: {status:?} {said}");
    };
    // To the cluster and back. Most of it is a hole, or zeroes.
    let mut bytes = vec![0; usize::try_from(64 * MIB).unwrap()];
    let written = usize::try_from(8 * MIB).unwrap();
    pattern::fill(&mut bytes[written..2 * written], 1, 8 * MIB / 512, 7);
    std::fs::write(path.join("a.img"), &bytes).unwrap();
    fails(&["copy", "a.img", IMAGE], "overwrite it with --force");
    succeeds(&["copy", "--force", "--verify", "a.img", IMAGE]);
    let there = cluster.tool("rbd", &["export", "--no-progress", "rbd/img", "-"]);
    assert!(there == bytes, "the image is what was copied to it");
    let extents = text(&cluster.tool("rbd", &["diff", "--format", "json", "rbd/img"]));
    assert!(extents.matches("\"offset\"").count() <= 4, "zeroes take space: {extents}");
    succeeds(&["copy", "--verify", IMAGE, "b.img"]);
    assert!(std::fs::read(path.join("b.img")).unwrap() == bytes, "the copy is the image");
    use std::os::unix::fs::MetadataExt;
    let blocks = path.join("b.img").metadata().unwrap().blocks();
    assert!(blocks * 512 < 16 * MIB, "holes of the copy take space: {blocks} blocks");
    fails(&["copy", IMAGE, IMAGE], "are the same");
    fails(&["copy", "--force", "a.img", "rbd:rbd/no"], "has no image 'no'");
    // By hand.
    succeeds(&["io", IMAGE, "-c", "write -P 0x5a 1M 64K", "-c", "flush"]);
    succeeds(&["io", "--read-only", IMAGE, "-c", "verify -P 0x5a 1M 64K"]);
    // What it is, and how fast.
    let info = succeeds(&["info", "--json", IMAGE]);
    for wanted in ["\"bytes\": 67108864", "exclusive-lock", "\"lock\": null", "4194304"] {
        assert!(info.contains(wanted), "{wanted}: {info}");
    }
    assert!(succeeds(&["doctor", IMAGE]).contains("rbd"));
    succeeds(&["bench", IMAGE, "--io-size", "1M", "--quiet"]);
    fails(&["bench", IMAGE, "--rw", "write", "--io-size", "1M"], "Add --allow-write");
    // As it was then.
    cluster.tool("rbd", &["snap", "create", "--no-progress", "rbd/img@then"]);
    // In use.
    let daemon = cluster.serve(path, IMAGE, &["--socket", "s"]);
    let info = succeeds(&["info", IMAGE]);
    assert!(info.contains("127.0.0.1:0/") && info.contains("which lives"), "{info}");
    fails(&["doctor", IMAGE], "it is in use by 127.0.0.1:0/");
    fails(&["copy", "--force", IMAGE, "b.img"], "copy a snapshot of it");
    fails(&["copy", "--force", "a.img", IMAGE], "it is in use by 127.0.0.1:0/");
    fails(&["io", IMAGE, "-c", "read 0 4K"], "it is in use by 127.0.0.1:0/");
    succeeds(&["copy", "rbd:rbd/img@then", "then.qcow2"]);
    fails(&["copy", "--force", "a.img", "rbd:rbd/img@then"], "can only be read");
    fails(&["copy", "a.img", "c.img"], "are for images of a Ceph cluster");
    daemon.stop();
    // No tool keeps the lock.
    let lockers = text(&cluster.tool("rbd", &["lock", "ls", "rbd/img"]));
    assert!(lockers.trim().is_empty(), "a tool has kept the lock: {lockers}");
}
