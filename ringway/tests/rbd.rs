//! Disks of a Ceph cluster, from outside: `ringway serve rbd:…` before a real cluster that the test makes, in
//! the sandbox. Group G of docs/hazards.md.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, snapshot, text};
use ringway_driver::{BlkQueue, BufferPool, Device, Options};
use ringway_testkit::{Need, pattern, skip};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// What the guest writes of an image of 64 MiB.
const BYTES: u64 = 8 * MIB;
/// Of a request of the verified guest.
const LEN: u64 = 32 << 10;
const REQUESTS: u64 = BYTES / LEN;
const DEPTH: u16 = 24;

/// Tests share the cluster, but for those that do something to it.
static TURN: RwLock<()> = RwLock::new(());

/// The cluster of all tests of this process, as one of them has it: with an image of its own.
struct Cluster {
    dir: &'static Path,
    /// `POOL/IMAGE`
    image: &'static str,
    /// Where it is shared.
    shares: Option<RwLockReadGuard<'static, ()>>,
    /// Where it is not.
    alone: Option<RwLockWriteGuard<'static, ()>>,
}

/// How long a ticket of the cluster's is good for, in seconds: as short as no test notices.
const TICKET: u64 = 20;

/// Makes the cluster: with keys, and gone once this process is.
fn make() -> Option<PathBuf> {
    for program in ["ceph-mon", "ceph-osd", "ceph", "rbd", "ceph-authtool", "monmaptool"] {
        let known = Command::new(program).arg("--version").stdout(Stdio::null()).status();
        if known.is_err() {
            skip(Need::Ceph, program);
            return None;
        }
    }
    let dir = tempfile::tempdir().unwrap().keep();
    // Of several processes of tests each has ports of its own.
    let (port, own) = (20_000 + std::process::id() % 6000 * 2, std::process::id());
    let env = [
        ("PORT", port.to_string()),
        ("AUTH", "cephx".into()),
        ("STORE", "bluestore".into()),
        ("TICKET", TICKET.to_string()),
        ("GONE_WITH", own.to_string()),
    ];
    script(&dir, "start", &env);
    Some(dir)
}

fn script(dir: &Path, what: &str, env: &[(&str, String)]) {
    let log = std::fs::File::options().append(true).create(true).open(dir.join("script.log"));
    let log = log.unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/ceph-mini.sh");
    let mut command = Command::new(script);
    command.arg(what).arg(dir).envs(env.iter().cloned()).stdin(Stdio::null());
    let status = command.stdout(log.try_clone().unwrap()).stderr(log).status().unwrap();
    let log = || std::fs::read_to_string(dir.join("script.log"));
    assert!(status.success(), "the cluster does not {what}: {:?}", log());
}

impl Cluster {
    /// With other tests, that do nothing to the cluster, and an image of 64 MiB. `None` if its packages are
    /// not here.
    fn shared(image: &'static str) -> Option<Self> {
        let mut cluster = Self::new(image)?;
        cluster.shares = Some(TURN.read().unwrap_or_else(PoisonError::into_inner));
        cluster.make_image();
        Some(cluster)
    }

    /// The same without other tests meanwhile.
    fn alone(image: &'static str) -> Option<Self> {
        let mut cluster = Self::new(image)?;
        cluster.wait_until_alone();
        cluster.make_image();
        Some(cluster)
    }

    fn new(image: &'static str) -> Option<Self> {
        static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
        let dir = MADE.get_or_init(make).as_deref()?;
        Some(Self { dir, image, shares: None, alone: None })
    }

    /// From now on without other tests.
    fn wait_until_alone(&mut self) {
        self.shares = None;
        self.alone = Some(TURN.write().unwrap_or_else(PoisonError::into_inner));
    }

    fn make_image(&self) {
        let (pool, _) = self.image.split_once('/').unwrap();
        if pool != "rbd" {
            self.tool("ceph", &["osd", "pool", "create", pool, "8", "8"]);
            self.tool("rbd", &["pool", "init", pool]);
        }
        self.tool("rbd", &["create", "--size", "64M", self.image]);
    }

    /// Its image, in our words.
    fn source(&self) -> String {
        format!("rbd:{}", self.image)
    }

    fn script(&self, what: &str) {
        script(self.dir, what, &[]);
    }

    fn path(&self) -> &Path {
        self.dir
    }

    fn conf(&self) -> PathBuf {
        self.dir.join("ceph.conf")
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

    /// The address of whoever has the lock of its image.
    #[track_caller]
    fn holder(&self) -> String {
        let list = text(&self.tool("rbd", &["lock", "ls", "--format", "json", self.image]));
        let (_, address) = list.split_once("\"address\":\"").expect("somebody has the lock");
        address.split_once('"').unwrap().0.to_owned()
    }

    /// By what the objects of its image are named.
    fn image_id(&self) -> String {
        let info = self.tool("rbd", &["info", "--format", "json", self.image]);
        let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
        info["id"].as_str().expect("an id").to_owned()
    }

    /// Adds a user with rights to OSDs, and its key to the keyring.
    fn add_user(&self, user: &str, osd: &str) {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let caps = ["auth", "get-or-create", user, "mon", "profile rbd", "osd", osd];
        let (ring, key) = (self.path().join("keyring"), self.tool("ceph", &caps));
        let new = ring.with_extension("new");
        std::fs::write(&new, [std::fs::read(&ring).unwrap(), key].concat()).unwrap();
        // Others read it at any time.
        std::fs::rename(new, ring).unwrap();
    }

    fn kill_osd(&self) {
        let file = self.path().join("osd.0.pid");
        let pid = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        kill(pid);
        std::fs::remove_file(file).unwrap();
    }

    /// `ringway serve IMAGE ARGS`, with its image.
    fn serve(&self, dir: &Path, args: &[&str]) -> Daemon {
        Daemon::start(self.command(dir, &self.source(), args))
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
        let bytes = self.tool("rbd", &["export", "--no-progress", self.image, "-"]);
        let bytes = &bytes[..usize::try_from(BYTES).unwrap()];
        let mut expected = vec![0; bytes.len()];
        pattern::fill(&mut expected, 1, 0, sequence);
        assert!(*bytes == expected[..], "the image is what the guest wrote");
    }
}

impl Drop for Cluster {
    /// A test that has failed leaves the cluster to the others as they need it.
    fn drop(&mut self) {
        if !std::thread::panicking() || self.alone.is_none() {
            return;
        }
        if self.path().join("osd.0.pid").exists() {
            self.signal_osd(libc::SIGCONT);
            self.set_full(false);
        } else {
            self.script("osd");
        }
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

#[test]
fn a_guest_uses_an_image_a_snapshot_and_more_room() {
    // With keys, which the process of the disk cannot read once it is in the sandbox.
    let Some(cluster) = Cluster::shared("rbd/a") else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, &["--socket", "s"]);
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
    cluster.tool("rbd", &["snap", "create", "--no-progress", "rbd/a@then"]);
    // Zeroes, and what is discarded, which may read as anything.
    two.write_zeroes(0, MIB, false, 0).unwrap();
    assert!(carry_out(&mut two).0);
    two.discard(4 * MIB, 4 * MIB, 0).unwrap();
    assert!(carry_out(&mut two).0);
    two.read(MIB - LEN, pool.alloc(usize::try_from(LEN).unwrap()).unwrap(), 0).unwrap();
    assert_eq!(carry_out(&mut two), (true, vec![0; usize::try_from(LEN).unwrap()]));
    // More room.
    cluster.tool("rbd", &["resize", "--no-progress", "--size", "80M", "rbd/a"]);
    until("the size is seen", || {
        ctl(path, &["resize", "0"]);
        ctl(path, &["list"]).contains("80 MiB")
    });
    drop((one, two, queues, device));
    daemon.stop();
    let lockers = text(&cluster.tool("rbd", &["lock", "ls", "rbd/a"]));
    assert!(lockers.trim().is_empty(), "the lock is given back: {lockers}");
    // As it was then, for readers.
    let daemon = Daemon::start(cluster.command(path, "rbd:rbd/a@then", &["--socket", "s"]));
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
    let Some(cluster) = Cluster::shared("rbd/g01") else { return };
    let dir = folder();
    let path = dir.path();
    let mut daemon = Some(cluster.serve(path, &["--socket", "s"]));
    let mut dead = Vec::new();
    let daemon = meanwhile(&cluster, path, |answered| {
        for round in 1..=3 {
            goes_on(answered, 40 * round);
            dead.push(cluster.holder());
            daemon.take().unwrap().kill();
            let begun = Instant::now();
            daemon = Some(cluster.serve(path, &["--socket", "s"]));
            // The cluster itself would miss the dead one after half a minute.
            println!("served again after {:?}", begun.elapsed());
            let log = daemon.as_ref().unwrap().log();
            assert!(log.contains("is dead: its lock is broken"), "{log}");
            goes_on(answered, 40);
        }
        for round in 1..=3 {
            goes_on(answered, 40 * round);
            let before = process(path).unwrap();
            dead.push(cluster.holder());
            kill(before);
            until("another process", || process(path).is_some_and(|now| now != before));
            goes_on(answered, 40);
        }
        daemon.unwrap()
    });
    let listed = text(&cluster.tool("ceph", &["osd", "blocklist", "ls"]));
    for address in dead {
        assert!(listed.contains(&address), "{address} may still write: {listed}");
    }
    daemon.stop();
}

#[test]
fn g02_who_lives_keeps_the_lock() {
    let Some(cluster) = Cluster::shared("rbd/g02") else { return };
    let (dir, other) = (folder(), folder());
    let daemon = cluster.serve(dir.path(), &["--socket", "s"]);
    let before = snapshot(other.path());
    let wait = ["--socket", "s", "--lock-wait", "1"];
    let output = run(cluster.command(other.path(), "rbd:rbd/g02", &wait));
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("it is in use by 127.0.0.1:0/"), "{said}");
    assert_eq!(snapshot(other.path()), before);
    // Readers need no lock.
    cluster.serve(other.path(), &["--socket", "s", "--read-only"]).stop();
    daemon.stop();
    cluster.serve(other.path(), &["--socket", "s", "--lock-wait", "1"]).stop();
}

#[test]
fn g02_who_is_dead_keeps_the_lock_until_the_cluster_misses_it() {
    let Some(cluster) = Cluster::shared("rbd/g02b") else { return };
    let (dir, other) = (folder(), folder());
    for _ in 0..10 {
        let daemon = cluster.serve(dir.path(), &["--socket", "s"]);
        let mut device = connect(dir.path(), 1);
        guest(&device.pool(), &mut device.queue().unwrap(), 8, &AtomicU64::new(0));
        drop(device);
        let dead = cluster.holder();
        daemon.kill();
        // As if it had been a process of another host. `rbd image-meta` would wait for the lock.
        let header = format!("rbd_header.{}", cluster.image_id());
        cluster.tool("rados", &["-p", "rbd", "rmomapkey", &header, "metadata_ringway.owner"]);
        // One of a try before.
        let _ = std::fs::remove_file(other.path().join("s"));
        let mut command = cluster.command(
            other.path(),
            &cluster.source(),
            &["--socket", "s", "--lock-wait", "1"],
        );
        let mut early = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let ended = loop {
            if let Some(status) = early.try_wait().unwrap() {
                break Some(status);
            }
            // On a host that is busy for half a minute the cluster has missed the dead one by now.
            if other.path().join("s").exists() {
                early.kill().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let said = early.wait_with_output().unwrap().stderr;
        let Some(status) = ended else { continue };
        assert!(!status.success() && text(&said).contains("it is in use by"), "{}", text(&said));
        // Who waits has it after that.
        let daemon = cluster.serve(dir.path(), &["--socket", "s"]);
        assert!(daemon.log().contains("is dead: its lock is broken"), "{}", daemon.log());
        let listed = text(&cluster.tool("ceph", &["osd", "blocklist", "ls"]));
        assert!(listed.contains(&dead), "{dead} may still write: {listed}");
        let mut device = connect(dir.path(), 1);
        assert!(reads(&device.pool(), &mut device.queue().unwrap(), 8));
        drop(device);
        daemon.stop();
        return;
    }
    panic!("the dead one was missed within the second that others wait, each time");
}

#[test]
fn g03_requests_wait_for_an_osd_that_was_killed() {
    let Some(cluster) = Cluster::alone("rbd/g03") else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, &["--socket", "s", "--overdue", "2"]);
    meanwhile(&cluster, path, |answered| {
        goes_on(answered, 40);
        cluster.kill_osd();
        until("it is told", || daemon.log().contains("been under way for 2 s or longer"));
        assert!(ctl(path, &["list"]).contains("serving"), "the control socket answers");
        cluster.script("osd");
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
    cluster.script("osd");
}

#[test]
fn g04_what_cannot_be_had_is_refused_with_the_reason_and_nothing_is_made() {
    const IMAGE: &str = "rbd:rbd/g04";
    let Some(cluster) = Cluster::shared("rbd/g04") else { return };
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
        (vec!["rbd:rbd/g04@no", conf[0], conf[1]], "with a snapshot 'no'"),
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
    // Guests only, and no clients of NBD.
    for args in [
        ["nbd", IMAGE, "--listen", "unix:n", "--ceph-conf", conf[1]],
        ["serve", IMAGE, "--nbd", "unix:n", "--ceph-conf", conf[1]],
    ] {
        let mut command = ringway();
        command.args(args).current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        let wanted = "which serve virtual machines (socket) and no NBD clients";
        assert!(!output.status.success() && said.contains(wanted), "{args:?}: {said}");
        assert_eq!(snapshot(path), before);
    }
    // Whoever may only read cannot have the lock.
    cluster.add_user("client.reader", "profile rbd-read-only");
    let reader = ["--socket", "s", "--ceph-user", "reader"];
    let output = run(cluster.command(path, IMAGE, &reader));
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("client.reader"), "{said}");
    let readers = [&reader[..], &["--read-only"]].concat();
    cluster.serve(path, &readers).stop();
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
    let Some(cluster) = Cluster::alone("rbd/g05") else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, &["--socket", "s", "--overdue", "2"]);
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
    command.args(["serve", "rbd:rbd/g05", "--ceph-conf", "limited.conf", "--socket", "s"]);
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
    let Some(cluster) = Cluster::shared("fenced/g06") else { return };
    let dir = folder();
    let path = dir.path();
    let daemon = cluster.serve(path, &["--socket", "s"]);
    let mut device = connect(path, 1);
    let (pool, mut queue) = (device.pool(), device.queue().unwrap());
    guest(&pool, &mut queue, 5, &AtomicU64::new(0));
    // While it is served it cannot be removed.
    let mut command = Command::new("rbd");
    command.arg("-c").arg(cluster.conf()).args(["rm", "--no-progress", "fenced/g06"]);
    assert!(!run(command).status.success(), "an image in use was removed");
    assert!(reads(&pool, &mut queue, 5));
    // Its administrator fences the client.
    cluster.tool("ceph", &["osd", "blocklist", "add", &cluster.holder()]);
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
    let daemon = cluster.serve(path, &["--socket", "s"]);
    let mut device = connect(path, 1);
    let mut queue = device.queue().unwrap();
    let pool = device.pool();
    assert!(reads(&pool, &mut queue, 5));
    // The pool goes, with all images in it.
    cluster.tool(
        "ceph",
        &["osd", "pool", "delete", "fenced", "fenced", "--yes-i-really-really-mean-it"],
    );
    until_one_fails("a read without the pool fails", || reads(&pool, &mut queue, 5));
    queue.write(0, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(!carry_out(&mut queue).0, "a write without the pool");
    drop((queue, device));
    daemon.stop();
}

#[test]
fn g08_writes_wait_for_the_quota_of_a_pool() {
    if Command::new("ceph-mgr").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip(Need::Ceph, "ceph-mgr");
        return;
    }
    let Some(cluster) = Cluster::shared("small/g08") else { return };
    let dir = folder();
    let path = dir.path();
    // The quota is held against what a manager counts.
    cluster.script("mgr");
    let quota = |bytes: &str| {
        cluster.tool("ceph", &["osd", "pool", "set-quota", "small", "max_bytes", bytes]);
    };
    let daemon = cluster.serve(path, &["--socket", "s", "--overdue", "2"]);
    let mut device = connect(path, 2);
    let mut queues = device.queues().unwrap().into_iter();
    let (mut one, mut two) = (queues.next().unwrap(), queues.next().unwrap());
    let pool = device.pool();
    guest(&pool, &mut one, 9, &AtomicU64::new(0));
    quota("1000000");
    until_a_write_waits(path, &pool, &mut one);
    two.read(BYTES - LEN, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(carry_out(&mut two).0, "a read of a pool over its quota");
    assert!(ctl(path, &["list"]).contains("serving"), "the control socket answers");
    quota("0");
    assert!(carry_out(&mut one).0, "there is room again");
    drop((one, two, queues, device));
    daemon.stop();
}

#[test]
fn g09_rights_that_are_taken_away_hold_for_new_connections() {
    let Some(mut cluster) = Cluster::shared("rbd/g09") else { return };
    let dir = folder();
    let path = dir.path();
    cluster.add_user("client.guest", "profile rbd");
    let daemon = cluster.serve(path, &["--socket", "s", "--ceph-user", "guest"]);
    let mut device = connect(path, 1);
    let (pool, mut queue) = (device.pool(), device.queue().unwrap());
    guest(&pool, &mut queue, 6, &AtomicU64::new(0));
    let fewer = ["auth", "caps", "client.guest", "mon", "profile rbd", "osd"];
    cluster.tool("ceph", &[&fewer[..], &["profile rbd-read-only"]].concat());
    // By then no ticket with the old rights is good any more; a connection with them is.
    std::thread::sleep(Duration::from_secs(TICKET + 1));
    queue.write(BYTES, pool.alloc(4096).unwrap(), 0).unwrap();
    assert!(carry_out(&mut queue).0, "a write over a connection with the old rights");
    cluster.wait_until_alone();
    cluster.kill_osd();
    cluster.script("osd");
    until_one_fails("a write without the right fails", || {
        queue.write(BYTES, pool.alloc(4096).unwrap(), 0).unwrap();
        carry_out(&mut queue).0
    });
    assert!(reads(&pool, &mut queue, 6), "a read, for which the rights are there");
    drop((queue, device));
    daemon.stop();
    // Somebody with the rights has it all.
    let daemon = cluster.serve(path, &["--socket", "s"]);
    let mut device = connect(path, 1);
    assert!(reads(&device.pool(), &mut device.queue().unwrap(), 6));
    drop(device);
    daemon.stop();
}

#[test]
fn tools_know_images_of_a_cluster() {
    const IMAGE: &str = "rbd:rbd/tools";
    let Some(cluster) = Cluster::shared("rbd/tools") else { return };
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
    fails(&["copy", "a.img", IMAGE], "Overwrite it with --force");
    succeeds(&["copy", "--force", "--verify", "a.img", IMAGE]);
    let there = cluster.tool("rbd", &["export", "--no-progress", "rbd/tools", "-"]);
    assert!(there == bytes, "the image is what was copied to it");
    let extents = text(&cluster.tool("rbd", &["diff", "--format", "json", "rbd/tools"]));
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
    cluster.tool("rbd", &["snap", "create", "--no-progress", "rbd/tools@then"]);
    // In use.
    let daemon = cluster.serve(path, &["--socket", "s"]);
    let info = succeeds(&["info", IMAGE]);
    assert!(info.contains("127.0.0.1:0/") && info.contains("which lives"), "{info}");
    fails(&["doctor", IMAGE], "it is in use by 127.0.0.1:0/");
    fails(&["copy", "--force", IMAGE, "b.img"], "copy a snapshot of it");
    fails(&["copy", "--force", "a.img", IMAGE], "it is in use by 127.0.0.1:0/");
    fails(&["io", IMAGE, "-c", "read 0 4K"], "it is in use by 127.0.0.1:0/");
    succeeds(&["copy", "rbd:rbd/tools@then", "then.qcow2"]);
    fails(&["copy", "--force", "a.img", "rbd:rbd/tools@then"], "can only be read");
    fails(&["copy", "a.img", "c.img"], "are for images of a Ceph cluster");
    daemon.stop();
    // No tool keeps the lock.
    let lockers = text(&cluster.tool("rbd", &["lock", "ls", "rbd/tools"]));
    assert!(lockers.trim().is_empty(), "a tool has kept the lock: {lockers}");
}

#[test]
fn holes_of_an_image_are_not_read() {
    const IMAGE: &str = "rbd:rbd/holes";
    let Some(cluster) = Cluster::shared("rbd/holes") else { return };
    let dir = folder();
    let path = dir.path();
    let succeeds = |args: &[&str]| {
        let mut command = ringway();
        command.args(args).arg("--ceph-conf").arg(cluster.conf()).current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{args:?}: {said}");
        text(&output.stdout)
    };
    let data_of = |source: &str, to: &str| {
        // Zeroes are not looked for: what is no data was known to be a hole.
        let report = succeeds(&["copy", "--json", "--keep-zeroes", source, to]);
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        report["data_bytes"].as_u64().expect("a number")
    };
    let in_rbd = |args: &[&str]| cluster.tool("rbd", args);
    let mut bytes = vec![0; usize::try_from(64 * MIB).unwrap()];
    let written = usize::try_from(8 * MIB).unwrap();
    pattern::fill(&mut bytes[written..2 * written], 1, 8 * MIB / 512, 7);
    std::fs::write(path.join("a.img"), &bytes).unwrap();
    succeeds(&["copy", "--force", "a.img", IMAGE]);
    assert_eq!(data_of(IMAGE, "holes.img"), 8 * MIB);
    assert!(std::fs::read(path.join("holes.img")).unwrap() == bytes, "the copy is the image");
    // What a clone has of its parent is data of its own.
    in_rbd(&["snap", "create", "--no-progress", "rbd/holes@parent"]);
    let second = ["--rbd-default-clone-format", "2", "clone"];
    in_rbd(&[&second[..], &["rbd/holes@parent", "rbd/child"]].concat());
    succeeds(&["io", "rbd:rbd/child", "-c", "write -P 0x77 40M 64K"]);
    let data = data_of("rbd:rbd/child", "child.img");
    assert!((8 * MIB + 65_536..=12 * MIB).contains(&data), "{data} bytes of data");
    let child = in_rbd(&["export", "--no-progress", "rbd/child", "-"]);
    assert!(std::fs::read(path.join("child.img")).unwrap() == child, "the copy is the clone");
    in_rbd(&["rm", "--no-progress", "rbd/child"]);
    // Where the source has a hole, and the image data, it has zeroes afterwards.
    std::fs::write(path.join("less.img"), &bytes[..written + written / 2]).unwrap();
    let less = std::fs::File::options().write(true).open(path.join("less.img")).unwrap();
    less.set_len(64 * MIB).unwrap();
    succeeds(&["copy", "--force", "less.img", IMAGE]);
    let there = in_rbd(&["export", "--no-progress", "rbd/holes", "-"]);
    assert!(there == std::fs::read(path.join("less.img")).unwrap(), "nothing of before is left");
}
