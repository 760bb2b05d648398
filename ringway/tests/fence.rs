//! The fence: what a killed daemon had begun has landed before its successor serves (hazard C10), on
//! every engine, with a disk that takes its time.

use crate::common::{Daemon, PATIENCE, read, ringway, run, text, wait, write};
use ringway_driver::{Device, Options};
use ringway_testkit::LateStore;
use rustix::fs::FlockOperation;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const WRITES: u64 = 8;
const OLD: u8 = 0xaa;
const NEW: u8 = 0xbb;

fn serve(image: &Path, dir: &Path, engine: &str, more: &[&str]) -> Command {
    let mut command = ringway();
    command.arg("serve").arg(image).args(["--socket", "s", "--cache", "none", "--queues", "1"]);
    command.args(["--engine", engine]).args(more).current_dir(dir);
    command
}

fn connect(dir: &Path) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap()
}

/// Again and again until the host is not too slow to see it.
fn fence(engine: &str) {
    let seen = [3, 6, 12, 24].into_iter().any(|late| fence_once(engine, Duration::from_secs(late)));
    assert!(seen, "the writes landed too early for this test, each time");
}

/// Kills a daemon whose writes are on their way for so long and starts others at once. False if the
/// writes had landed before those came.
fn fence_once(engine: &str, delay: Duration) -> bool {
    let (mount, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let Some(store) = LateStore::mount(mount.path(), 1 << 20).map_err(|lack| lack.skip()).ok()
    else {
        return true;
    };
    let image = store.path().to_owned();
    let mut old = Daemon::start(serve(&image, dir.path(), engine, &["--control", "c"]));
    store.set_delay(delay);
    // Kept to the end: a process that waits for its writes keeps its sockets open.
    let mut front_end = connect(dir.path());
    let mut queue = front_end.queue().unwrap();
    for number in 0..WRITES {
        let mut buffer = front_end.pool().alloc(4096).unwrap();
        buffer.fill(OLD);
        queue.write(number * 4096, buffer, ()).unwrap();
    }
    queue.submit().unwrap();
    if !arrive(&store, delay) {
        return false;
    }
    old.signal(libc::SIGKILL);
    let killed = Instant::now();
    store.set_delay(Duration::ZERO);

    // One that has no patience is told why.
    let hasty = serve(&image, dir.path(), engine, &["--lock-wait", "1"]);
    let Some(refused) = until_ready(hasty, delay) else { return false };
    let (waited, error) = (killed.elapsed(), text(&refused.stderr));
    // What QEMU looks at is locked as long.
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let locked = ringway_disk::lock_image(&file, false);
    drop(file);
    let late = store.log().iter().filter(|write| write.landed.is_none()).count();
    let threads = std::fs::read_dir(format!("/proc/{}/task", old.pid())).map_or(0, Iterator::count);
    println!(
        "{engine}: {late} of {WRITES} on their way after {} ms, {} threads beside the zombie",
        waited.as_millis(),
        threads.saturating_sub(1)
    );
    if late == 0 {
        return false;
    }
    assert!(matches!(locked, Err(ringway_disk::LockError::Marked(_))), "{locked:?}");
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(waited >= Duration::from_secs(1), "refused after {waited:?}: {error}");
    assert!(error.contains("in use by") && error.contains("last writes"), "{error}");

    // Its successor waits, for the control socket, too: the dead one still listens.
    let new = Daemon::start(serve(&image, dir.path(), engine, &["--control", "c"]));
    let ready = Instant::now();
    let writes = store.log();
    assert!(
        writes.iter().all(|write| write.landed.is_some_and(|landed| landed <= ready)),
        "served before {writes:?}"
    );
    if !new.log().contains("waiting up to 30 s") {
        return false;
    }
    let (status, _) = old.wait();
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    let mut device = connect(dir.path());
    let mut new_queue = device.queue().unwrap();
    for number in 0..WRITES {
        assert!(write(&device, &mut new_queue, 8 * number, NEW));
        assert_eq!(read(&device, &mut new_queue, 8 * number), [NEW; 512]);
    }

    // A second one beside it is refused at once, and told by whom.
    let begun = Instant::now();
    let second = run(serve(&image, dir.path(), engine, &[]));
    let error = text(&second.stderr);
    assert!(error.contains(&format!("in use by process {} (ringway)", new.pid())), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(20), "a living one is not waited for");
    drop((new_queue, device, queue, front_end));
    new.stop();

    let log = store.log();
    let first_new = log.iter().position(|write| write.byte == NEW).unwrap();
    for write in &log[..first_new] {
        assert_eq!(write.byte, OLD);
        assert!(write.landed.unwrap() <= log[first_new].arrived, "out of order: {log:?}");
    }
    assert!(log[first_new..].iter().all(|write| write.byte == NEW), "{log:?}");
    for number in 0..usize::try_from(WRITES).unwrap() {
        assert_eq!(store.byte(4096 * number), NEW, "write {number} of the dead is on top");
        assert_eq!(store.byte(4096 * number + 512), OLD, "write {number} of the dead got lost");
    }
    true
}

/// Whether all writes reach the disk while the first is still on its way.
fn arrive(store: &LateStore, delay: Duration) -> bool {
    let begun = Instant::now();
    while store.log().len() < usize::try_from(WRITES).unwrap() {
        if begun.elapsed() > delay {
            println!("they do not arrive in {delay:?}: {:?}", store.log());
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// What a daemon says that must not start; `None` if it starts, or says nothing for so long.
fn until_ready(mut command: Command, patience: Duration) -> Option<Output> {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    if wait(&mut child, patience).is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
        return None;
    }
    Some(child.wait_with_output().unwrap())
}

#[test]
fn c10_the_last_writes_of_a_killed_daemon_come_first_io_uring() {
    fence("io_uring");
}

#[test]
fn c10_the_last_writes_of_a_killed_daemon_come_first_linux_aio() {
    fence("linux-aio");
}

#[test]
fn c10_the_last_writes_of_a_killed_daemon_come_first_threads() {
    fence("threads");
}

/// A helper whose daemon was killed makes durable what that had answered, which takes as long as the disk takes. It has
/// the lock meanwhile, and is not taken for a daemon that goes on.
#[test]
fn c10_the_helper_of_a_dead_daemon_is_waited_for() {
    let dir = crate::common::folder();
    let dir = dir.path();
    let flock = std::fs::read("/usr/bin/flock").expect("a part of util-linux");
    for (name, waits) in [(ringway_disk::open::ENDING, true), ("ringway-else", false)] {
        let program = dir.join(name);
        std::fs::write(&program, &flock).unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let mut holder = Command::new(&program);
        holder.args(["-x", "disk.img", "sleep", "2"]).current_dir(dir).stdin(Stdio::null());
        let mut holder = holder.spawn().unwrap();
        let image = std::fs::File::open(dir.join("disk.img")).unwrap();
        let begun = Instant::now();
        while rustix::fs::flock(&image, FlockOperation::NonBlockingLockShared).is_ok() {
            rustix::fs::flock(&image, FlockOperation::Unlock).unwrap();
            assert!(begun.elapsed() < PATIENCE && holder.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        if waits {
            Daemon::serve(dir, &["disk.img", "--socket", "s"]).stop();
        } else {
            let mut command = ringway();
            command.args(["serve", "disk.img", "--socket", "s"]).current_dir(dir);
            let said = text(&run(command).stderr);
            assert!(said.contains("ringway-else"), "{said}");
        }
        assert!(holder.wait().unwrap().success());
    }
}
