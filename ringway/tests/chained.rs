//! Clones on a local file that are based on an export of an NBD server, from outside: rows F47 to F52 of
//! docs/hazards.md.

use crate::common::exports::{BYTES, connect};
use crate::common::guest::{ctl, job, says, wait_for as until};
use crate::common::nbd::{Server, server};
use crate::common::{Daemon, PATIENCE, folder, ringway, run, text};
use fastrand::Rng;
use ringway_driver::{BlkQueue, BufferPool, Options};
use ringway_testkit::{Need, skip};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const SECTOR: u64 = 512;

/// Each sector of the base says which one it is.
fn base(dir: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    for sector in 0..BYTES / SECTOR {
        content.extend(sector.to_le_bytes().repeat(64));
    }
    std::fs::write(dir.join("base.raw"), &content).unwrap();
    content
}

/// Servers that only let the base be read, by their programs.
fn serve_base(dir: &Path, program: &str) -> Option<Server> {
    let socket = format!("{}/n.sock", dir.display());
    let args: &[&str] = match program {
        "nbdkit" => &["-f", "-r", "-U", "n.sock", "file", "base.raw"],
        "qemu-nbd" => &["-t", "-r", "-f", "raw", "-e", "8", "-k", &socket, "-x", "d", "base.raw"],
        _ => &["nbd", "base.raw", "--read-only", "--listen", "unix:n.sock", "--export", "d"],
    };
    server(dir, program, args)
}

fn named(dir: &Path, program: &str) -> String {
    let export = if program == "nbdkit" { "" } else { ":d" };
    format!("nbd:unix:{}/n.sock{export}", dir.display())
}

fn serve(dir: &Path, name: &str, more: &[&str]) -> Daemon {
    let args = ["clone.qcow2", "--base", name, "--socket", "s", "--queues", "2"];
    Daemon::serve(dir, &[&args[..], more].concat())
}

/// What a disk has to hold.
struct Oracle {
    content: Vec<u8>,
    random: Rng,
    /// Goes on with each write, so that none is like another.
    sequence: u64,
}

/// What is in flight: where, and the bytes of a write.
struct Asked {
    at: usize,
    written: Option<Vec<u8>>,
}

impl Oracle {
    fn new(content: Vec<u8>) -> Self {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        Self { content, random: Rng::with_seed(seed), sequence: 0 }
    }

    /// So many requests of random places and lengths, some at a time, that do not overlap. Each has to succeed, and
    /// what is read to be what was written.
    fn ask(&mut self, pool: &BufferPool, queue: &mut BlkQueue<usize>, requests: usize) {
        let mut asked: Vec<Option<Asked>> = (0..8).map(|_| None).collect();
        let (mut begun, mut done) = (0, 0);
        while done < requests {
            for slot in 0..asked.len() {
                if begun == requests || asked[slot].is_some() {
                    continue;
                }
                let sectors = 1 << self.random.u64(..9);
                let len = usize::try_from(sectors * SECTOR).unwrap();
                let at = self.random.u64(..BYTES / SECTOR - sectors) * SECTOR;
                let at = usize::try_from(at).unwrap();
                let overlaps = |other: &Asked| {
                    let there = other.written.as_ref().map_or(256 << 10, Vec::len);
                    at < other.at + there && other.at < at + len
                };
                if asked.iter().flatten().any(overlaps) {
                    continue;
                }
                let Some(mut buffer) = pool.alloc(len) else { continue };
                let written = self.random.bool().then(|| {
                    self.sequence += 1;
                    buffer.copy_from_slice(&self.sequence.to_le_bytes().repeat(len / 8));
                    buffer.to_vec()
                });
                match written.is_some() {
                    true => queue.write(at as u64, buffer, slot).unwrap(),
                    false => queue.read(at as u64, buffer, slot).unwrap(),
                }
                asked[slot] = Some(Asked { at, written });
                begun += 1;
            }
            assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer after {done} requests");
            while let Some(answer) = queue.pop().unwrap() {
                let Asked { at, written } = asked[answer.ctx].take().unwrap();
                assert!(answer.is_ok(), "a request at {at} failed: {:?}", answer.status);
                match written {
                    Some(bytes) => self.content[at..at + bytes.len()].copy_from_slice(&bytes),
                    None => {
                        let found = answer.into_buffer().expect("what was read");
                        assert!(found[..] == self.content[at..at + found.len()], "at {at}");
                    }
                }
                done += 1;
            }
        }
    }

    /// All of it is as it has to be.
    fn check(&self, dir: &Path) {
        let mut device = connect(dir, 1);
        let mut queue = device.queue::<usize>().unwrap();
        let pool = device.pool();
        for at in (0..self.content.len()).step_by(256 << 10) {
            let buffer = pool.alloc(256 << 10).unwrap();
            queue.read(at as u64, buffer, at).unwrap();
            assert!(queue.wait(Some(PATIENCE)).unwrap());
            let answer = queue.pop().unwrap().unwrap();
            assert!(answer.is_ok(), "{at}");
            let found = answer.into_buffer().unwrap();
            assert!(found[..] == self.content[at..at + found.len()], "at {at}");
        }
    }
}

/// QEMU's verdict on an image that nobody has.
fn whole(dir: &Path) {
    let mut check = Command::new("qemu-img");
    match check.args(["check", "-q", "clone.qcow2"]).current_dir(dir).output() {
        Ok(output) => {
            let said = text(&output.stderr);
            assert!(matches!(output.status.code(), Some(0 | 3)), "{said}");
        }
        Err(_) => skip(Need::Qemu, "qemu-img".to_owned()),
    }
}

#[test]
fn f47_a_clone_of_an_export_is_made_served_and_found_again() {
    for program in ["nbdkit", "ringway", "qemu-nbd"] {
        let dir = folder();
        let path = dir.path();
        let content = base(path);
        let Some(_server) = serve_base(path, program) else { continue };
        let name = named(path, program);
        let mut oracle = Oracle::new(content.clone());
        let ways: [&[&str]; 4] = [&[], &["--sandbox", "off"], &["--isolate"], &["--cache", "none"]];
        for more in ways {
            let daemon = serve(path, &name, more);
            let isolated = more.contains(&"--isolate");
            assert!(isolated || daemon.ready.contains("+nbd"), "{}", daemon.ready);
            let mut device = connect(path, 2);
            assert_eq!(device.info().capacity, BYTES);
            let mut queues = device.queues().unwrap();
            let pool = device.pool();
            for queue in &mut queues {
                oracle.ask(&pool, queue, 300);
            }
            drop((queues, device));
            oracle.check(path);
            daemon.stop();
            whole(path);
        }
        assert!(std::fs::read(path.join("base.raw")).unwrap() == content, "nobody writes it");
        // What a header says leads nowhere by itself.
        let args = ["serve", "clone.qcow2", "--format", "qcow2", "--socket", "s"];
        let mut command = ringway();
        command.args(args).current_dir(path);
        let refused = run(command);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains("--base nbd://"), "{}", text(&refused.stderr));
    }
}

/// Every now and then the daemon or the server is killed, while a guest goes on.
#[test]
fn f48_a_clone_of_an_export_outlives_daemon_and_server() {
    for program in ["nbdkit", "ringway"] {
        let dir = folder();
        let path = dir.path();
        let content = base(path);
        let Some(mut server) = serve_base(path, program) else { continue };
        let name = named(path, program);
        let mut oracle = Oracle::new(content.clone());
        let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut daemon = serve(path, &name, &[]);
        let (daemon, _server) = std::thread::scope(|scope| {
            let ends = Ends(&stop);
            let guest = scope.spawn(|| {
                let mut device = connect(path, 1);
                let mut queue = device.queue::<usize>().unwrap();
                let pool = device.pool();
                while !stop.load(SeqCst) {
                    oracle.ask(&pool, &mut queue, 20);
                    answered.fetch_add(20, SeqCst);
                }
            });
            for round in 0..12 {
                let before = answered.load(SeqCst);
                until("the guest goes on", || {
                    assert!(!guest.is_finished(), "the guest has failed: {}", daemon.log());
                    answered.load(SeqCst) >= before + 60
                });
                if round % 3 != 0 {
                    drop(server);
                    server = serve_base(path, program).expect("it was there");
                }
                if round % 3 != 1 {
                    daemon.kill();
                    daemon = serve(path, &name, &[]);
                }
            }
            drop(ends);
            (daemon, server)
        });
        oracle.check(path);
        daemon.stop();
        whole(path);
        assert!(std::fs::read(path.join("base.raw")).unwrap() == content, "nobody writes it");
    }
}

/// While the server is away what was written is read, whole clusters are written, and what is only at the server waits.
#[test]
fn f49_without_its_server_a_clone_serves_what_it_has() {
    const CLUSTER: u64 = 64 << 10;
    let dir = folder();
    let path = dir.path();
    let content = base(path);
    let Some(server) = serve_base(path, "nbdkit") else { return };
    let daemon = serve(path, &named(path, "nbdkit"), &["--control", "ctl"]);
    let mut device = connect(path, 2);
    let mut queues = device.queues::<u64>().unwrap();
    let (one, others) = queues.split_first_mut().unwrap();
    let pool = device.pool();
    let answer = |queue: &mut BlkQueue<u64>| {
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer: {}", daemon.log());
        queue.pop().unwrap().unwrap()
    };
    let filled = |len: u64, byte: u8| {
        let mut buffer = pool.alloc(usize::try_from(len).unwrap()).unwrap();
        buffer.fill(byte);
        buffer
    };
    one.write(0, filled(CLUSTER, 1), 0).unwrap();
    assert!(answer(one).is_ok());
    drop(server);
    // A part of a cluster, and a place of the base: both wait.
    one.write(8 * CLUSTER + 512, filled(512, 2), 1).unwrap();
    one.read(12 * CLUSTER, filled(512, 0), 2).unwrap();
    assert!(!one.wait(Some(Duration::from_millis(300))).unwrap());
    // So does a job.
    let flatten = ctl(path, &["flatten", "s"]);
    assert!(flatten.status.success(), "{}", text(&flatten.stderr));
    // What comes in its place is another one.
    let other_one =
        crate::common::nbd::server(path, "nbdkit", &["-f", "-U", "n.sock", "memory", "16M"]);
    until("that is told", || daemon.log().contains("another size than before"));
    let away = || {
        text(&says(path, &["ctl", "--control", "ctl", "list"]).stdout)
            .contains("its NBD server is away")
    };
    assert!(away(), "list says it");
    drop(other_one);
    let other = &mut others[0];
    for round in 0..20 {
        let at = (20 + round) * CLUSTER;
        other.write(at, filled(CLUSTER, 3), round).unwrap();
        assert!(answer(other).is_ok());
        other.read(at, filled(CLUSTER, 0), round).unwrap();
        let found = answer(other).into_buffer().unwrap();
        assert!(found.iter().all(|byte| *byte == 3));
    }
    assert_eq!(one.in_flight(), 2);
    let server = serve_base(path, "nbdkit");
    for _ in 0..2 {
        let found = answer(one);
        assert!(found.is_ok());
        if found.ctx == 2 {
            let at = usize::try_from(12 * CLUSTER).unwrap();
            assert!(found.into_buffer().unwrap()[..] == content[at..at + 512]);
        }
    }
    until("list says no more of it", || !away());
    one.read(8 * CLUSTER, filled(CLUSTER, 0), 3).unwrap();
    let found = answer(one).into_buffer().unwrap();
    let at = usize::try_from(8 * CLUSTER).unwrap();
    let mut expected = content[at..at + usize::try_from(CLUSTER).unwrap()].to_vec();
    expected[512..1024].fill(2);
    assert!(found[..] == expected[..]);
    until("it is flattened", || job(path)["state"] == "done");
    drop((queues, device));
    daemon.stop();
    drop(server);
    whole(path);
}

/// Snapshots, a merge and a flatten of a disk that is based on an export.
#[test]
fn f50_snapshots_of_a_clone_of_an_export_and_its_independence() {
    let dir = folder();
    let path = dir.path();
    let content = base(path);
    let Some(server) = serve_base(path, "nbdkit") else { return };
    let name = named(path, "nbdkit");
    let mut oracle = Oracle::new(content);
    let daemon = serve(path, &name, &["--control", "ctl"]);
    let mut device = connect(path, 1);
    let mut queue = device.queue::<usize>().unwrap();
    let pool = device.pool();
    oracle.ask(&pool, &mut queue, 50);
    let commit = ctl(path, &["commit", "s", "--snapshot", "no.qcow2"]);
    let said = text(&commit.stderr);
    assert!(said.contains("is not on this host") && !path.join("no.qcow2").exists(), "{said}");
    let snapshot = ctl(path, &["snapshot", "s", "old.qcow2"]);
    assert!(snapshot.status.success(), "{}", text(&snapshot.stderr));
    oracle.ask(&pool, &mut queue, 50);
    // Behind the end of the base are zeroes.
    let resize = ctl(path, &["resize", "s", "12M"]);
    assert!(resize.status.success(), "{}", text(&resize.stderr));
    oracle.content.resize(12 << 20, 0);
    drop((queue, device));
    oracle.check(path);
    daemon.stop();
    // The same words serve it, with the snapshot between.
    let daemon = serve(path, &name, &["--control", "ctl"]);
    oracle.check(path);
    let flatten = ctl(path, &["flatten", "s", "--wait"]);
    assert!(flatten.status.success(), "{}", text(&flatten.stderr));
    oracle.check(path);
    daemon.stop();
    drop(server);
    whole(path);
    let args = ["clone.qcow2", "--format", "qcow2", "--socket", "s"];
    let daemon = Daemon::serve(path, &args);
    oracle.check(path);
    daemon.stop();
}

/// One message each, and nothing is left half made.
#[test]
fn f51_what_cannot_be_a_base_is_refused() {
    let dir = folder();
    let path = dir.path();
    base(path);
    let refused = |base: &str, more: &[&str], why: &str| {
        let mut command = ringway();
        command.args(["serve", "clone.qcow2", "--socket", "s", "--base", base]).args(more);
        command.current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0));
        assert!(said.contains(why), "{base}: {said}");
        assert!(!path.join("clone.qcow2").exists() && !path.join("s").exists(), "{base}");
    };
    refused("rbd:pool/image", &[], "cannot be a base");
    refused("null:1G", &[], "or an export of an NBD server");
    refused("tape:x", &[], "there is no kind of image 'tape:'");
    refused("nbd://127.0.0.1/x", &["--base-format", "qcow2"], "which is raw");
    let absent = format!("nbd:unix:{}/n.sock", path.display());
    refused(&absent, &[], "cannot connect to");
    let limits = ["--filter=blocksize-policy", "file", "base.raw", "blocksize-minimum=4096"];
    let args = [&["-f", "-r", "-U", "n.sock"][..], &limits].concat();
    let Some(server) = server(path, "nbdkit", &args) else { return };
    refused(&absent, &[], "--block-size 4096");
    drop(server);
    // Of another base than it says.
    let Some(_server) = serve_base(path, "nbdkit") else { return };
    serve(path, &absent, &[]).stop();
    let other = format!("{absent}:other");
    let mut command = ringway();
    command.args(["serve", "clone.qcow2", "--socket", "s", "--base", &other]).current_dir(path);
    let said = run(command);
    assert!(text(&said.stderr).contains("is not based on"), "{}", text(&said.stderr));
    std::fs::remove_file(path.join("clone.qcow2")).unwrap();
    // Whose header says that its bytes are an image.
    let uri = format!("nbd+unix:///?socket={}/n.sock", path.display());
    let args =
        ["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &uri, "clone.qcow2", "8M"];
    match Command::new("qemu-img").args(args).current_dir(path).status() {
        Ok(made) => assert!(made.success()),
        Err(error) => return skip(Need::Qemu, error),
    }
    let mut command = ringway();
    command.args(["serve", "clone.qcow2", "--socket", "s", "--base", &absent]).current_dir(path);
    let said = text(&run(command).stderr);
    assert!(said.contains("its owner says that it is raw"), "{said}");
}

/// What waits for the server keeps a daemon from ending for as long as with the export itself, also if a job waits, or
/// more than one for what is fetched for the image's thread.
#[test]
fn f53_a_stop_without_the_server_ends_as_that_of_the_export() {
    const CLUSTER: u64 = 64 << 10;
    let stop = |case: &str| {
        let dir = folder();
        let path = dir.path();
        base(path);
        let Some(server) = serve_base(path, "nbdkit") else { return };
        let name = named(path, "nbdkit");
        let export = [&name, "--read-only", "--socket", "s", "--queues", "2"];
        let daemon = match case {
            "export" => Daemon::serve(path, &export),
            "process" => serve(path, &name, &["--isolate"]),
            _ => serve(path, &name, &["--control", "ctl"]),
        };
        let mut device = connect(path, 2);
        let mut queues = device.queues::<u64>().unwrap();
        let pool = device.pool();
        queues[1].read(CLUSTER, pool.alloc(512).unwrap(), 0).unwrap();
        assert!(queues[1].wait(Some(PATIENCE)).unwrap());
        drop(server);
        for queue in queues.iter_mut().filter(|_| case != "job") {
            queue.read(12 * CLUSTER, pool.alloc(512).unwrap(), 0).unwrap();
            for cluster in (2..6).filter(|_| case != "export") {
                let buffer = pool.alloc(512).unwrap();
                queue.write(cluster * CLUSTER + 512, buffer, cluster).unwrap();
            }
            queue.wait(Some(Duration::from_millis(300))).unwrap();
        }
        if case == "job" || case == "all" {
            let flatten = ctl(path, &["flatten", "s"]);
            assert!(flatten.status.success(), "{}", text(&flatten.stderr));
        }
        daemon.stop();
        drop((queues, device));
        if case != "export" {
            let _server = serve_base(path, "nbdkit");
            serve(path, &name, &[]).stop();
            whole(path);
        }
    };
    std::thread::scope(|scope| {
        let stop = &stop;
        for case in ["export", "clone", "process", "job", "all"] {
            scope.spawn(move || stop(case));
        }
    });
}

/// How random reads of what nobody has written compare with those of the export itself: it only tells, as others use the
/// machine.
#[test]
fn f52_reads_of_the_base_beside_the_export_itself() {
    let dir = folder();
    let path = dir.path();
    base(path);
    let Some(_server) = serve_base(path, "nbdkit") else { return };
    let name = named(path, "nbdkit");
    let args = [&name, "--read-only", "--socket", "e", "--queues", "1", "--control", "e.ctl"];
    let export = Daemon::serve(path, &args);
    let clone = serve(path, &name, &["--control", "s.ctl"]);
    let best = [("e", "e.ctl"), ("s", "s.ctl")].map(|(socket, control)| {
        let best = (0..3).map(|_| rate(path, socket)).max().unwrap();
        let stats = says(path, &["ctl", "--control", control, "--json", "stats"]);
        let stats: Value = serde_json::from_slice(&stats.stdout).unwrap();
        let sum = |key: &str| -> f64 {
            let of = |worker: &Value| worker[key].as_f64().unwrap();
            stats["workers"].as_array().unwrap().iter().map(of).sum()
        };
        let each = ["syscalls", "sleeps", "turns"].map(|key| sum(key) / sum("requests"));
        println!(
            "{socket}: {best} reads in a second; system calls, sleeps, turns of each {each:.2?}"
        );
        best
    });
    assert!(best.iter().all(|best| *best > 0));
    export.stop();
    clone.stop();
}

/// Reads at depth 32 for a second, as many as there are.
fn rate(path: &Path, socket: &str) -> u64 {
    let options = Options::new().queues(1).patience(PATIENCE).memory(8 << 20);
    let mut device = options.connect(path.join(socket)).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    let pool = device.pool();
    let mut random = Rng::with_seed(1);
    let (begun, mut done) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(1) {
        while queue.in_flight() < 32 {
            let at = random.u64(..BYTES / 4096) * 4096;
            queue.read(at, pool.alloc(4096).unwrap(), at).unwrap();
        }
        assert!(queue.wait(Some(PATIENCE)).unwrap());
        while let Some(answer) = queue.pop().unwrap() {
            assert!(answer.is_ok());
            done += 1;
        }
    }
    while queue.in_flight() > 0 {
        assert!(queue.wait(Some(PATIENCE)).unwrap());
        while queue.pop().unwrap().is_some() {}
    }
    done
}

/// Ends a guest, also when a test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}
