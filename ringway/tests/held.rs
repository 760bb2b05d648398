//! The host's disk fails, or is full, and is mended: guests wait, and in the end all is right. Row C18 of
//! docs/hazards.md, from outside.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, text, write};
use ringway_driver::{BlkQueue, BufferPool, Device, Options};
use ringway_testkit::{LateStore, Mounted, Rng, pattern};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 24 * MIB;
/// Of a request of the verified guest.
const LEN: u64 = 32 << 10;
const REQUESTS: u64 = BYTES / LEN;
const DEPTH: u16 = 24;

/// `ringway ctl`: status 0 or not, and what it said.
fn ctl(dir: &Path, args: &[&str]) -> (bool, String) {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    let output = run(command);
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

fn facts(dir: &Path) -> Value {
    let (_, list) = ctl(dir, &["--json", "list"]);
    let list: Value = serde_json::from_str(&list).unwrap_or_else(|e| panic!("{e}: {list}"));
    list["disks"][0].clone()
}

fn held(dir: &Path) -> u64 {
    facts(dir)["held"]["count"].as_u64().unwrap_or(0)
}

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes the whole disk, each request with its own content, several at a time; then reads it.
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
        if !reads {
            queue.flush(REQUESTS).unwrap();
            assert!(queue.wait(Some(PATIENCE)).unwrap());
            assert!(queue.pop().unwrap().unwrap().is_ok());
        }
    }
}

/// A guest writes a sparse image on a file system that is too small, and knows nothing of it. Its
/// daemon is asked, paused, told to end, killed while it holds requests and while it lets them go.
fn full_file_system(engine: &str, packed: bool) {
    let dir = folder();
    let path = dir.path();
    let small = match Mounted::in_memory(path.join("small"), 4 * MIB) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let image = small.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(BYTES).unwrap();
    let config = format!(
        "workers = 1\ncontrol = 'ctl'\n[[disk]]\nimage = 'small/disk.img'\n\
         socket = 's'\ncache = 'writeback'\nengine = '{engine}'\nqueues = 1\n[[disk]]\nimage = 'disk.img'\nsocket = 't'\n\
         engine = '{engine}'\nqueues = 1\n"
    );
    std::fs::write(path.join("disks.toml"), config).unwrap();
    let serve = || Daemon::serve(path, &["--config", "disks.toml"]);
    let mut daemon = serve();
    let device = Options::new().patience(PATIENCE).packed(packed).reconnect(PATIENCE);
    let mut device = device.memory(16 << 20).connect(path.join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    let (answered, sequence) = (AtomicU64::new(0), 7);
    let daemon = std::thread::scope(|scope| {
        let (pool, answered) = (device.pool(), &answered);
        let guest = scope.spawn(move || guest(&pool, &mut queue, sequence, answered));
        let is_held = || held(path) > 0 || guest.is_finished();
        until("requests are held", is_held);
        held_is_listed(path, &daemon);

        small.set_room(6 * MIB);
        until("the guest goes on by itself", || answered.load(SeqCst) > 5 * MIB / LEN);
        until("requests are held again", is_held);
        daemon.kill();
        daemon = serve();
        until("a successor holds them", is_held);
        let begun = Instant::now();
        daemon.stop();
        assert!(begun.elapsed() < Duration::from_secs(15), "held requests are not waited for");
        daemon = serve();
        until("the next one holds them", is_held);

        let mut random = Rng::for_test("held");
        for mib in [8, 10, 12, 14] {
            small.set_room(mib * MIB);
            let before = answered.load(SeqCst);
            let _ = ctl(path, &["retry", "0"]);
            std::thread::sleep(Duration::from_micros(random.below(4000)));
            daemon.kill();
            daemon = serve();
            until("what was let go is held once more", || {
                (held(path) > 0 && answered.load(SeqCst) > before) || guest.is_finished()
            });
        }
        assert!(!guest.is_finished(), "there is no room for all of it yet");
        small.set_room(2 * BYTES);
        guest.join().unwrap();
        daemon
    });
    assert_eq!(held(path), 0);
    assert!(daemon.log().contains("no request is held any more"), "{}", daemon.log());
    drop(device);
    daemon.stop();
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
    std::fs::File::open(&image).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    let mut expected = bytes.clone();
    pattern::fill(&mut expected, 1, 0, sequence);
    assert!(bytes == expected, "the image is what the guest wrote");
}

/// What is said of held requests, and that nothing else waits for them.
fn held_is_listed(path: &Path, daemon: &Daemon) {
    // There are moments without any: when they are tried again, every few seconds.
    let mut disk = facts(path);
    until("what is held is told", || {
        disk = facts(path);
        disk["held"].is_object()
    });
    let held = &disk["held"];
    assert_eq!(held["operation"], "write", "{disk}");
    assert_eq!(held["errno"], libc::ENOSPC, "{disk}");
    assert!(held["retry_us"].as_u64().is_some_and(|us| us <= 3_000_000), "{disk}");
    assert_eq!(disk["errors"]["on_enospc"], "hold", "a sparse image");
    assert_eq!(disk["errors"]["on_write_error"], "report");
    let words = ["held", "write failed: No space left on device", "ctl retry"];
    until("a list says so", || {
        let (_, list) = ctl(path, &["list"]);
        words.iter().all(|word| list.contains(word))
    });
    until("a line of the log", || daemon.log().contains("requests are held"));
    until("a drain is refused", || {
        let (done, said) = ctl(path, &["drain", "0"]);
        !done && said.contains("requests are held") && said.contains("ctl retry")
    });
    // Tried again, in vain.
    until("they are tried again", || {
        let (done, words) = ctl(path, &["retry", "0"]);
        assert!(done, "{words}");
        words.contains("tried again")
    });
    let begun = Instant::now();
    for command in ["pause", "resume"] {
        let (done, said) = ctl(path, &[command, "0"]);
        assert!(done, "{said}");
    }
    assert!(begun.elapsed() < Duration::from_secs(15), "a pause waits for no held request");
    until("held after the pause as before", || self::held(path) > 0);
    // The other disk has the same worker.
    let mut other = Options::new().patience(PATIENCE).connect(path.join("t")).unwrap();
    let mut queue = other.queue().unwrap();
    for sector in 0..64 {
        assert!(write(&other, &mut queue, sector, 0x5a));
        assert_eq!(read(&other, &mut queue, sector), [0x5a; 512]);
    }
}

#[test]
fn c18_a_full_file_system_is_waited_for() {
    full_file_system("auto", false);
}

#[test]
fn c18_a_full_file_system_is_waited_for_with_a_packed_ring() {
    full_file_system("threads", true);
}

/// A disk that fails every write, or every read, until it is mended and its operator says so.
#[test]
fn c18_a_disk_that_was_mended_goes_on() {
    let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
    let path = dir.path();
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let image = store.path().display().to_string();
    let hold = ["--on-write-error", "hold", "--on-read-error", "hold"];
    let args = [&image, "--socket", "s", "--control", "ctl", "--cache", "none", "--queues", "1"];
    let daemon = Daemon::serve(path, &[&args[..], &hold].concat());
    let mut device = Options::new().patience(PATIENCE).connect(path.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let mut ask = |device: &Device, write: bool| {
        let mut buffer = device.pool().alloc(4096).unwrap();
        buffer.fill(7);
        if write {
            queue.write(8192, buffer, ()).unwrap();
        } else {
            queue.read(8192, buffer, ()).unwrap();
        }
        queue.submit().unwrap();
    };
    for is_write in [true, false] {
        store.set_error(is_write.then_some(libc::EIO));
        store.set_read_error((!is_write).then_some(libc::EIO));
        ask(&device, is_write);
        until("it is held", || held(path) == 1);
        let disk = facts(path);
        assert_eq!(disk["held"]["operation"], if is_write { "write" } else { "read" });
        assert_eq!((&disk["held"]["errno"], &disk["held"]["retry_us"]), (&5.into(), &Value::Null));
        let (done, said) = ctl(path, &["retry", "0"]);
        assert!(done && said.contains("1 request tried again") && said.contains("Input/output"));
        store.set_error(None);
        store.set_read_error(None);
        assert_eq!(held(path), 1, "nothing says that it was mended");
        let (done, said) = ctl(path, &["--json", "retry", "0"]);
        let answer: Value = serde_json::from_str(&said).unwrap();
        assert!(done && answer["requests"] == 1 && answer["held"].is_null(), "{said}");
    }
    for _ in 0..2 {
        assert!(queue.wait(Some(PATIENCE)).unwrap());
        assert!(queue.pop().unwrap().unwrap().is_ok());
        if queue.in_flight() == 0 {
            break;
        }
    }
    // Given up: its guest is told.
    store.set_error(Some(libc::EIO));
    let buffer = device.pool().alloc(4096).unwrap();
    queue.write(0, buffer, ()).unwrap();
    queue.submit().unwrap();
    until("it is held", || held(path) == 1);
    let (done, said) = ctl(path, &["retry", "0", "--fail"]);
    assert!(done && said.contains("1 request given up"), "{said}");
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert!(!queue.pop().unwrap().unwrap().is_ok());
    // And a queue that is stopped by its guest is not kept waiting.
    let buffer = device.pool().alloc(4096).unwrap();
    queue.write(0, buffer, ()).unwrap();
    queue.submit().unwrap();
    until("it is held", || held(path) == 1);
    let begun = Instant::now();
    device.stop().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(15), "a reset waits for no held request");
    assert_eq!(held(path), 0);
    drop((queue, device));
    daemon.stop();
}

/// Its queue is stopped and started all the time meanwhile, as by a front-end that changes its memory.
#[test]
fn c18_a_held_request_goes_on_with_its_time_when_its_queue_starts_again() {
    let dir = folder();
    let path = dir.path();
    let small = match Mounted::in_memory(path.join("small"), MIB) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    std::fs::File::create(small.path().join("disk.img")).unwrap().set_len(BYTES).unwrap();
    let args = ["small/disk.img", "--socket", "s", "--control", "ctl", "--cache", "writeback"];
    let daemon = Daemon::serve(path, &[&args[..], &["--hold-timeout", "3"]].concat());
    let device = Options::new().patience(PATIENCE).reconnect(PATIENCE);
    let mut device = device.connect(path.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let mut big = device.pool().alloc(2 << 20).unwrap();
    big.fill(1);
    queue.write(0, big, ()).unwrap();
    queue.submit().unwrap();
    until("it is held", || held(path) == 1);
    let begun = Instant::now();
    while queue.in_flight() > 0 && !queue.wait(Some(Duration::from_millis(10))).unwrap() {
        assert!(begun.elapsed() < PATIENCE, "its time begins anew each time: {}", daemon.log());
        for change in ["pause", "resume"] {
            let (done, said) = ctl(path, &[change, "0"]);
            assert!(done, "{said}");
        }
    }
    assert!(!queue.pop().unwrap().unwrap().is_ok(), "there never was room");
    drop((queue, device));
    daemon.stop();
}

/// After its time a held request is reported; words that cannot be are told with those that can.
#[test]
fn c18_patience_has_an_end_and_words_are_checked() {
    let dir = folder();
    let path = dir.path();
    let small = match Mounted::in_memory(path.join("small"), MIB) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    std::fs::File::create(small.path().join("disk.img")).unwrap().set_len(BYTES).unwrap();
    let args = ["small/disk.img", "--socket", "s", "--control", "ctl", "--cache", "writeback"];
    let daemon = Daemon::serve(path, &[&args[..], &["--hold-timeout", "1"]].concat());
    let mut device = Options::new().patience(PATIENCE).connect(path.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let mut big = device.pool().alloc(2 << 20).unwrap();
    big.fill(1);
    queue.write(0, big, ()).unwrap();
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert!(!queue.pop().unwrap().unwrap().is_ok(), "there never was room");
    let (_, stats) = ctl(path, &["--json", "stats"]);
    let stats: Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["disks"][0]["counts"]["held"], 1);
    assert_eq!(stats["disks"][0]["failures"][0]["errno"], libc::ENOSPC);
    drop((queue, device));
    daemon.stop();
    for (args, says) in [
        (["--on-enospc", "stop"], "possible values: report, hold"),
        (["--on-read-error", "holds"], "'hold'"),
        (["--hold-timeout", "0"], "--hold-timeout"),
    ] {
        let mut command = ringway();
        command.args(["serve", "disk.img", "--socket", "s"]).args(args).current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
    std::fs::write(
        path.join("bad.toml"),
        "[[disk]]\nimage = 'disk.img'\nsocket = 's'\non-enospc = 'stop'\n",
    )
    .unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "bad.toml"]).current_dir(path);
    let said = text(&run(command).stderr);
    assert!(said.contains("line 4") && said.contains("report, hold"), "{said}");
}

/// What a guest was answered so far: the numbers of its requests, and whether they succeeded.
fn answers(queue: &mut BlkQueue<u64>, count: usize) -> Vec<(u64, bool)> {
    let mut answers = Vec::new();
    while answers.len() < count {
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "only {answers:?}");
        while let Some(answer) = queue.pop().unwrap() {
            answers.push((answer.ctx, answer.is_ok()));
        }
    }
    answers.sort_unstable();
    answers
}

/// A disk of a daemon without others, whose writes fail until they are held, in a process of its own
/// or not. Three requests are.
struct Failing {
    _mount: tempfile::TempDir,
    dir: tempfile::TempDir,
    store: LateStore,
    daemon: Daemon,
    add: Vec<String>,
}

impl Failing {
    fn serve(isolate: bool) -> Option<Self> {
        let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
        let store = match LateStore::mount(mount.path(), 1 << 20) {
            Ok(store) => store,
            Err(lack) => {
                lack.skip();
                return None;
            }
        };
        let config = format!("control = 'ctl'\nisolate = {isolate}\n");
        std::fs::write(dir.path().join("c.toml"), config).unwrap();
        let daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
        let image = store.path().display().to_string();
        let words =
            ["--socket", "s", "--cache", "none", "--queues", "1", "--on-write-error", "hold"];
        let add = ["add", &image].into_iter().chain(words).map(str::to_owned).collect();
        let disk = Self { _mount: mount, dir, store, daemon, add };
        disk.add();
        Some(disk)
    }

    fn add(&self) {
        let (done, said) =
            ctl(self.path(), &self.add.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(done, "{said}");
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Has three writes held.
    fn hold(&self, device: &Device, queue: &mut BlkQueue<u64>) {
        self.store.set_error(Some(libc::EIO));
        for number in 0..3 {
            let mut buffer = device.pool().alloc(4096).unwrap();
            buffer.fill(u8::try_from(number).unwrap() + 1);
            queue.write(number * 8192, buffer, number).unwrap();
        }
        queue.submit().unwrap();
        until("three are held", || held(self.path()) == 3);
    }

    /// The disk is mended: all three are carried out, once.
    fn mend(&self, queue: &mut BlkQueue<u64>) {
        self.store.set_error(None);
        until("they are carried out", || {
            let (done, said) = ctl(self.path(), &["retry", "s"]);
            assert!(done, "{said}");
            held(self.path()) == 0
        });
        assert_eq!(answers(queue, 3), [(0, true), (1, true), (2, true)]);
        let mut landed: Vec<_> =
            self.store.log().iter().map(|write| (write.offset, write.byte)).collect();
        landed.sort_unstable();
        assert_eq!(landed, [(0, 1), (8192, 2), (16384, 3)]);
    }
}

fn patient() -> Options {
    Options::new().patience(PATIENCE).reconnect(PATIENCE)
}

/// They stay in the record while the disk is paused, and when the process that holds them is killed.
#[test]
fn c18_a_pause_and_the_end_of_its_process_leave_what_a_disk_holds() {
    for isolate in [false, true] {
        let Some(disk) = Failing::serve(isolate) else { return };
        let path = disk.path();
        let mut device = patient().connect(path.join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        disk.hold(&device, &mut queue);
        let held_now = facts(path)["held"].clone();
        assert_eq!((&held_now["operation"], &held_now["errno"]), (&"write".into(), &5.into()));
        assert!(held_now["retry_us"].is_null(), "{held_now}");
        let (done, said) = ctl(path, &["drain", "s"]);
        assert!(!done && said.contains("3 requests are held"), "{said}");

        let (done, said) = ctl(path, &["pause", "s"]);
        assert!(done, "{said}");
        assert_eq!((&facts(path)["state"], held(path)), (&"paused".into(), 0));
        let (done, said) = ctl(path, &["--json", "retry", "s"]);
        let answer: Value = serde_json::from_str(&said).unwrap();
        assert!(done && answer["requests"] == 0, "none is with the disk: {said}");
        let (done, said) = ctl(path, &["resume", "s"]);
        assert!(done, "{said}");
        until("they come first again", || held(path) == 3);
        if isolate {
            let process = facts(path)["process"].as_i64().unwrap();
            // SAFETY: a process of the daemon's, which was there a moment ago.
            assert_eq!(unsafe { libc::kill(process.try_into().unwrap(), libc::SIGKILL) }, 0);
            until("the next process holds them", || {
                facts(path)["process"].as_i64().is_some_and(|next| next != process)
                    && held(path) == 3
            });
        }
        assert_eq!(queue.pop().unwrap().map(|answer| answer.ctx), None);
        disk.mend(&mut queue);
        drop((queue, device));
        disk.daemon.stop();
    }
}

/// What is removed is not waited for. A front-end with a record finds its requests carried out if it
/// is served again; one without is told at once that they have failed.
#[test]
fn c18_a_disk_is_removed_while_it_holds_requests() {
    for isolate in [false, true] {
        let Some(disk) = Failing::serve(isolate) else { return };
        let path = disk.path();
        let mut device = patient().connect(path.join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        disk.hold(&device, &mut queue);
        let (done, said) = ctl(path, &["--json", "remove", "s"]);
        assert!(done, "{said}");
        let removed: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((&removed["drained"], &removed["connected"]), (&true.into(), &true.into()));
        assert_eq!(removed["held"], 3, "{removed}");
        until("the log says so", || disk.daemon.log().contains("held requests stay unanswered"));
        disk.add();
        until("whoever serves it next holds them", || held(path) == 3);
        disk.mend(&mut queue);

        // In words.
        disk.store.set_error(Some(libc::EIO));
        queue.write(0, device.pool().alloc(4096).unwrap(), 7).unwrap();
        queue.submit().unwrap();
        until("one is held", || held(path) == 1);
        let (done, said) = ctl(path, &["remove", "s"]);
        assert!(done && said.contains("left unanswered: 1"), "{said}");
        disk.add();
        until("it is held again", || held(path) == 1);
        let (done, said) = ctl(path, &["retry", "s", "--fail"]);
        assert!(done && said.contains("given up"), "{said}");
        assert_eq!(answers(&mut queue, 1), [(7, false)]);
        drop((queue, device));

        let mut device = Options::new().patience(PATIENCE).connect(path.join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        disk.hold(&device, &mut queue);
        let (done, said) = ctl(path, &["--json", "remove", "s"]);
        let removed: Value = serde_json::from_str(&said).unwrap();
        assert!(done && removed["held"] == 0, "nobody could go on with them: {said}");
        assert_eq!(answers(&mut queue, 3), [(0, false), (1, false), (2, false)]);
        drop((queue, device));
        disk.daemon.stop();
    }
}

/// A larger disk holds what it held; of a smaller one those fail that have lost their place.
#[test]
fn c18_a_disk_is_resized_while_it_holds_requests() {
    for isolate in ["--isolate=false", "--isolate"] {
        let dir = folder();
        let path = dir.path();
        let small = match Mounted::in_memory(path.join("small"), 512 << 10) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let image = small.path().join("disk.img");
        std::fs::File::create(&image).unwrap().set_len(8 * MIB).unwrap();
        let args =
            ["small/disk.img", "--socket", "s", "--control", "ctl", "--queues", "1", isolate];
        let daemon = Daemon::serve(path, &[&args[..], &["--cache", "writeback"]].concat());
        let mut device = patient().memory(16 << 20).connect(path.join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        // None of them has room.
        for number in 0..4 {
            let mut buffer = device.pool().alloc(1 << 20).unwrap();
            buffer.fill(u8::try_from(number).unwrap() + 1);
            queue.write(2 * MIB * number, buffer, number).unwrap();
        }
        queue.submit().unwrap();
        until("all are held", || held(path) == 4);
        let resize = |args: &[&str]| {
            let (done, said) = ctl(path, &[&["--json", "resize", "s"], args].concat());
            assert!(done, "{said}");
            serde_json::from_str::<Value>(&said).unwrap()
        };
        let resized = resize(&["12M"]);
        assert_eq!((&resized["from"], &resized["to"]), (&(8 * MIB).into(), &(12 * MIB).into()));
        until("all are held again", || held(path) == 4);
        assert_eq!(queue.pop().unwrap().map(|answer| answer.ctx), None);
        // The third one ends with the disk, the fourth lies beyond it.
        let resized = resize(&["5M", "--shrink"]);
        assert_eq!((&resized["from"], &resized["to"]), (&(12 * MIB).into(), &(5 * MIB).into()));
        assert_eq!(answers(&mut queue, 1), [(3, false)]);
        until("the others are held", || held(path) == 3);
        small.set_room(16 * MIB);
        assert_eq!(answers(&mut queue, 3), [(0, true), (1, true), (2, true)]);
        drop((queue, device));
        daemon.stop();
        let bytes = std::fs::read(&image).unwrap();
        let at = |mib: u64| bytes[usize::try_from(mib * MIB).unwrap()..][..1 << 20].to_vec();
        assert_eq!(bytes.len() as u64, 5 * MIB);
        for number in 0..3 {
            assert!(at(2 * number) == vec![u8::try_from(number).unwrap() + 1; 1 << 20]);
        }
    }
}
