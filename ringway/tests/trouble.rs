//! A host in trouble, from outside: a disk that is slower than everything, a process without
//! descriptors, a daemon that is replaced while guests want their disks.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, write};
use ringway_driver::{Device, Options};
use ringway_testkit::LateStore;
use ringway_testkit::raw::{DATA, F_VERSION_1, RawGuest, request, words};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

/// Half of the disks of a worker hang, with all that their guests can ask for: the other half finish what theirs do.
#[test]
fn c62_half_of_all_disks_hang_at_full_depth_and_the_others_go_on() {
    const DEPTH: u64 = 16;
    const REQUESTS: u64 = 5000;
    let dir = folder();
    let dir = dir.path();
    let mut config = "workers = 1\ncontrol = 'c'\n".to_owned();
    for at in 0..8 {
        let latency = if at % 2 == 0 { ",latency=600000ms" } else { "" };
        config += &format!(
            "[[disk]]\nimage = 'null:1G{latency}'\nsocket = '{at}'\nqueues = 1\nqueue-size = 1024\n"
        );
    }
    std::fs::write(dir.join("disks.toml"), config).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "disks.toml"]);
    let connect = |at: usize| {
        let options = Options::new().patience(PATIENCE).queue_size(1024);
        options.connect(dir.join(at.to_string())).unwrap()
    };
    let mut all: Vec<_> = (0..8).map(connect).collect();
    let mut queues: Vec<_> = all.iter_mut().map(|device| device.queue::<()>().unwrap()).collect();
    // More than there are places for.
    let mut asked = 0;
    for at in (0..8).step_by(2) {
        for _ in 0..queues[at].size() {
            let buffer = all[at].pool().alloc(512).unwrap();
            asked += u64::from(queues[at].write(asked * 512, buffer, ()).is_ok());
        }
        queues[at].submit().unwrap();
    }
    assert!(asked > 1500, "{asked}: they would hardly be missed");
    std::thread::scope(|scope| {
        for (at, (device, queue)) in all.iter_mut().zip(&mut queues).enumerate() {
            if at % 2 == 0 {
                continue;
            }
            let pool = device.pool();
            scope.spawn(move || {
                let (mut begun, mut done) = (0, 0);
                while done < REQUESTS {
                    while begun < REQUESTS.min(done + DEPTH) {
                        queue.write(begun * 512, pool.alloc(512).unwrap(), ()).unwrap();
                        begun += 1;
                    }
                    queue.submit().unwrap();
                    assert!(queue.wait(Some(PATIENCE)).unwrap(), "disk {at}: {done} of {REQUESTS}");
                    done += queue.completions().filter(|request| request.is_ok()).count() as u64;
                }
            });
        }
    });
    daemon.kill();
}

/// One worker serves a disk whose writes take seconds and one that is fast.
#[test]
fn c12_a_disk_slower_than_everything_leaves_the_other_alone() {
    let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let slow = store.path().display().to_string();
    let config = format!(
        "workers = 1\n[[disk]]\nimage = '{slow}'\nsocket = 'slow'\nengine = 'io_uring'\n\
         cache = 'none'\nqueues = 1\n[[disk]]\nimage = 'disk.img'\nsocket = 'fast'\n\
         engine = 'io_uring'\nqueues = 1\n"
    );
    std::fs::write(dir.path().join("disks.toml"), config).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "disks.toml"]);
    store.set_delay(Duration::from_secs(3));
    let mut device = connect(dir.path(), "slow");
    let mut queue = device.queue().unwrap();
    for number in 0..64u64 {
        let buffer = device.pool().alloc(4096).unwrap();
        queue.write(number * 4096, buffer, ()).unwrap();
    }
    queue.submit().unwrap();
    let begun = Instant::now();
    while store.log().is_empty() {
        assert!(begun.elapsed() < PATIENCE, "no write came: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut other = connect(dir.path(), "fast");
    let mut fast = other.queue().unwrap();
    let mut answers = 0;
    while store.log()[0].landed.is_none() && answers < 1000 {
        let sector = answers % 64;
        assert!(write(&other, &mut fast, sector, 0x12));
        assert_eq!(read(&other, &mut fast, sector), [0x12; 512]);
        answers += 1;
    }
    println!("{answers} writes and reads while the first write of the slow disk was on its way");
    assert!(answers >= 10, "the fast disk waited for the slow one");
    store.set_delay(Duration::ZERO);
    drop((fast, other, queue, device));
    daemon.stop();
}

/// Requests that take longer than `--overdue` says are logged, counted, and shown by `ctl`.
fn what_takes_too_long_is_told(more: &[&str]) {
    let dir = folder();
    let args = ["null:1G,latency=5000ms", "--socket", "s", "--overdue", "1", "--control", "ctl"];
    let daemon = Daemon::serve(dir.path(), &[&args, more].concat());
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    let stats = || {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "--json", "stats"]).current_dir(dir.path());
        let output = crate::common::run(command);
        let text = crate::common::text(&output.stdout);
        let answer: serde_json::Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{e}: {text}{}", crate::common::text(&output.stderr)));
        let disk = &answer["disks"][0];
        (disk["overdue"].as_u64().unwrap(), disk["counts"]["overdue"].as_u64().unwrap())
    };
    assert_eq!(stats(), (0, 0));
    let begun = Instant::now();
    // A machine that stands still for seconds sees none of it at the first try.
    while !daemon.log().contains("been under way for 1 s or longer") {
        assert!(begun.elapsed() < 3 * PATIENCE, "{}", daemon.log());
        if queue.in_flight() == 0 {
            queue.flush(()).unwrap();
            let buffer = device.pool().alloc(4096).unwrap();
            queue.read(8192, buffer, ()).unwrap();
            queue.submit().unwrap();
        }
        queue.completions().for_each(drop);
        std::thread::sleep(Duration::from_millis(20));
    }
    while stats().1 == 0 {
        assert!(begun.elapsed() < 3 * PATIENCE, "counted");
    }
    while !daemon.log().contains("no request waits for 1 s any more") {
        assert!(begun.elapsed() < 3 * PATIENCE, "{}", daemon.log());
        queue.completions().for_each(drop);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(stats().0, 0, "none is any more");
    drop((queue, device));
    daemon.stop();
}

#[test]
fn c08_what_takes_too_long_is_told() {
    what_takes_too_long_is_told(&[]);
}

/// By its own process, which has a watchdog of its own.
#[test]
fn c08_what_takes_too_long_in_an_isolated_disk_is_told() {
    what_takes_too_long_is_told(&["--isolate"]);
}

/// A client fills its call eventfd and makes it blocking, again and again. It costs the worker, and with
/// it everybody there, a moment each time, so the next connection waits.
#[test]
fn b21_who_held_up_others_is_served_again_after_a_pause() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--queues", "1"]);
    let connect = || {
        let socket = UnixStream::connect(dir.path().join("s")).unwrap();
        RawGuest::start(socket, 1, 64, F_VERSION_1)
    };
    let mut guest = connect();
    for pause in [1, 2, 4] {
        let call = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let queue = words(&[0]);
        assert!(guest.client.acked(request::SET_VRING_CALL, &queue, &[call.as_fd()]).unwrap());
        rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
        // The queue was called once.
        rustix::io::write(&call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        let begun = Instant::now();
        assert_eq!(guest.simple(0, 0, 0, DATA, 512), (0, 513));
        assert!(guest.client.is_closed());
        guest = connect();
        let served = begun.elapsed();
        assert!(served >= Duration::from_secs(pause), "after {served:?}");
        let message = format!("The next connection is taken in {pause} s");
        assert!(daemon.log().contains(&message), "{}", daemon.log());
    }
    assert_eq!(guest.simple(0, 0, 0, DATA, 512), (0, 513));
    drop(guest);
    daemon.stop();
}

fn limit_descriptors(pid: u32, count: u64) {
    let limit = libc::rlimit { rlim_cur: count, rlim_max: 4096 };
    let pid = i32::try_from(pid).unwrap();
    // SAFETY: the kernel reads one struct of ours; the process is our child.
    let rc =
        unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// Descriptors run out at every place of a connection in turn: that connection ends, with a line in
/// the log, and the daemon serves again when there are some.
#[test]
fn c14_without_descriptors_one_connection_fails() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--engine", "threads"]);
    let fds = format!("/proc/{}/fd", daemon.pid());
    let lowest_free = || {
        let numbers = std::fs::read_dir(&fds).unwrap();
        let taken = numbers.filter_map(|e| e.unwrap().file_name().to_str()?.parse::<u64>().ok());
        let taken: Vec<_> = taken.collect();
        (0..).find(|number| !taken.contains(number)).unwrap()
    };
    // It listens before all its threads have what they need; and connections leave after a while.
    drop(connect(dir.path(), "s"));
    let base = loop {
        let before = lowest_free();
        std::thread::sleep(Duration::from_millis(200));
        if lowest_free() == before {
            break before;
        }
    };
    let mut failed = 0;
    for more in 0..12 {
        limit_descriptors(daemon.pid(), base + more);
        let quick = Options::new().timeout(Duration::from_secs(2));
        match quick.connect(dir.path().join("s")) {
            Ok(mut device) => {
                // It got through: then it works.
                let mut queue = device.queue().unwrap();
                assert_eq!(read(&device, &mut queue, 0), [0; 512]);
            }
            Err(error) => {
                println!("{more} descriptors: {error}");
                failed += 1;
            }
        }
        limit_descriptors(daemon.pid(), 4096);
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 1, 0x34), "{}", daemon.log());
    }
    assert!(failed >= 3, "the descriptors did not run out");
    let log = daemon.log();
    assert!(log.contains("Too many open files"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    daemon.stop();
}

/// Bytes of address space that the process has.
fn memory_of(pid: u32) -> u64 {
    // The first field, in pages.
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    4096 * pages.split(' ').next().unwrap().parse::<u64>().unwrap()
}

/// How many bytes of address space the process may have.
fn limit_memory(pid: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    let pid = i32::try_from(pid).unwrap();
    // SAFETY: the kernel reads one struct of ours; the process is our child.
    let rc = unsafe { libc::prlimit(pid, libc::RLIMIT_AS, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// The daemon cannot map a guest's memory: that guest is refused with the reason, the one on the
/// other disk notices nothing, and the refused one is served once it asks for less or there is more.
#[test]
fn c14_without_memory_one_connection_fails() {
    let dir = folder();
    let config = "[[disk]]\nimage = 'disk.img'\nsocket = 's'\nengine = 'threads'\n\
                  [[disk]]\nimage = 'null:1G'\nsocket = 't'\n";
    std::fs::write(dir.path().join("disks.toml"), config).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "disks.toml"]);
    let mut good = connect(dir.path(), "s");
    let mut queue = good.queue().unwrap();
    assert!(write(&good, &mut queue, 1, 0x56));
    let with = |bytes| {
        let options = Options::new().patience(PATIENCE).memory(bytes);
        options.connect(dir.path().join("t"))
    };
    // Two threads may make heaps of their own meanwhile, of 64 MiB each.
    let enough = memory_of(daemon.pid()) + (192 << 20);
    for _ in 0..3 {
        limit_memory(daemon.pid(), enough);
        let error = with(512 << 20).map(drop).expect_err("512 MiB do not fit into 192");
        println!("{error}");
        assert_eq!(read(&good, &mut queue, 1), [0x56; 512], "{}", daemon.log());
        // A small one fits.
        drop(with(4 << 20).unwrap());
        limit_memory(daemon.pid(), libc::RLIM_INFINITY);
        drop(with(512 << 20).unwrap());
    }
    let log = daemon.log();
    assert!(log.contains("Cannot allocate memory") && !log.contains("panicked"), "{log}");
    drop((queue, good));
    daemon.stop();
}

/// There is memory for what is small, and for no thread.
#[test]
fn e53_a_daemon_that_gets_no_thread_ends_in_order() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--engine", "threads"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 1, 0x57));
    limit_memory(daemon.pid(), memory_of(daemon.pid()) + (1 << 20));
    drop((queue, device));
    daemon.stop();
    assert!(!dir.path().join("s").exists());
}

/// SIGTERM, and a successor that waits for the image: how long a guest is without its disk.
#[test]
fn a_daemon_is_replaced_while_its_guest_waits() {
    let rounds = std::env::var("RINGWAY_UPGRADES").map_or(8, |word| word.parse().unwrap());
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--lock-wait", "10"];
    let mut daemon = Daemon::serve(dir.path(), &args);
    let mut blackouts = Vec::new();
    for round in 0..rounds {
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 5, round));
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir.path());
        let successor = std::thread::spawn(|| Daemon::start(command));
        // By now it waits for the lock.
        std::thread::sleep(Duration::from_millis(200));
        let begun = Instant::now();
        daemon.signal(libc::SIGTERM);
        let (status, _) = daemon.wait();
        assert_eq!(status.code(), Some(0), "{}", daemon.log());
        drop((queue, device));
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert_eq!(read(&device, &mut queue, 5), [round; 512]);
        blackouts.push(begun.elapsed());
        daemon = successor.join().unwrap();
    }
    blackouts.sort_unstable();
    let at = |part: usize| blackouts[(blackouts.len() * part / 100).min(blackouts.len() - 1)];
    println!("{rounds} replacements: blackout p50 {:?}, p99 {:?}", at(50), at(99));
    daemon.stop();
}

/// Signals that do not say stop are for later, while a daemon waits for its image.
#[test]
fn e09_a_daemon_that_waits_for_its_image_lives_through_sighup() {
    let dir = folder();
    let first = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    for more in [&[][..], &["--isolate"]] {
        let words = [&["disk.img", "--socket", "t", "--lock-wait", "3"], more].concat();
        let mut command = ringway();
        let said = dir.path().join("said");
        let stderr = std::fs::File::create(&said).unwrap();
        let command = command.arg("serve").args(words).current_dir(dir.path()).stderr(stderr);
        let mut second = command.spawn().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !std::fs::read_to_string(&said).unwrap().contains("waiting up to") {
            assert!(Instant::now() < deadline, "it does not wait");
            std::thread::sleep(Duration::from_millis(10));
        }
        let pid = rustix::process::Pid::from_child(&second);
        for signal in [rustix::process::Signal::HUP, rustix::process::Signal::USR1] {
            rustix::process::kill_process(pid, signal).unwrap();
        }
        // It gives up by itself, with a status.
        assert_eq!(second.wait().unwrap().code(), Some(1), "{more:?}");
    }
    first.stop();
}

/// A limit of file sizes (`ulimit -f`, systemd's `LimitFSIZE=`): a write beyond it fails, and is no
/// reason for the daemon to end, nor for the process of an isolated disk.
#[test]
fn e14_a_write_beyond_the_limit_of_file_sizes_costs_that_write() {
    for engine in ["io_uring", "linux-aio", "threads"] {
        for more in ["", "isolate = true\n"] {
            let dir = folder();
            for image in ["one.img", "two.img"] {
                std::fs::File::create(dir.path().join(image)).unwrap().set_len(4 << 20).unwrap();
            }
            let config = format!(
                "[[disk]]\nimage = 'one.img'\nsocket = 'one'\nengine = '{engine}'\n{more}\
                 [[disk]]\nimage = 'two.img'\nsocket = 'two'\nengine = '{engine}'\n{more}"
            );
            std::fs::write(dir.path().join("disks.toml"), config).unwrap();
            let mut command = ringway();
            command.args(["serve", "--config", "disks.toml"]).current_dir(dir.path());
            // SAFETY: a plain system call, between fork and exec.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(&mut command, || {
                    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
                    match libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) {
                        0 => Ok(()),
                        _ => Err(std::io::Error::last_os_error()),
                    }
                });
            }
            let daemon = Daemon::start(command);
            let [mut one, mut two] = ["one", "two"].map(|socket| connect(dir.path(), socket));
            let (mut first, mut second) = (one.queue().unwrap(), two.queue().unwrap());
            assert!(write(&one, &mut first, 0, 1), "{engine} {more:?}: within the limit");
            assert!(!write(&one, &mut first, 4096, 1), "{engine} {more:?}: beyond it");
            assert!(write(&one, &mut first, 1, 1), "{engine} {more:?}: within it again");
            assert!(write(&two, &mut second, 0, 1), "{engine} {more:?}: the neighbour");
            drop((first, second, one, two));
            daemon.stop();
        }
    }
}
