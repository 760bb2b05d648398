//! All disks of a daemon share the threads that serve front-ends: what one of these does, or its disk,
//! is no matter of the others.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, says, text, threads};
use ringway_driver::Options;
use ringway_testkit::raw::{
    DATA, Desc, F_PROTOCOL, F_VERSION_1, RawClient, RawGuest, halves, inflight_payload, request,
    words,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Disks of each kind whose front-ends misbehave: more than there are threads.
const EACH: usize = 8;

/// A daemon with this many disks without data, at `s0`, `s1` and so on, and a control socket.
fn serve(dir: &Path, disks: usize, image: impl Fn(usize) -> String) -> Daemon {
    let mut toml = "control = 'ctl'\nworkers = 2\n".to_owned();
    for number in 0..disks {
        let (image, name) = (image(number), format!("s{number}"));
        toml += &format!("[[disk]]\nimage = '{image}'\nsocket = '{name}'\nqueues = 1\n");
    }
    std::fs::write(dir.join("disks.toml"), toml).unwrap();
    Daemon::serve(dir, &["--config", "disks.toml"])
}

fn connect(dir: &Path, number: usize) -> UnixStream {
    UnixStream::connect(dir.join(format!("s{number}"))).unwrap()
}

fn ctl(dir: &Path, args: &[&str]) -> String {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json"]).args(args).current_dir(dir);
    let output = run(command);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// How many disks have a request in flight.
fn in_flight(dir: &Path) -> usize {
    let stats: serde_json::Value = serde_json::from_str(&ctl(dir, &["stats"])).unwrap();
    stats["disks"].as_array().unwrap().iter().filter(|disk| disk["in_flight"] == 1).count()
}

fn until(daemon: &Daemon, what: &str, so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "{what}:\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A guest with a request that is not answered for a long time, and its socket.
fn asks(dir: &Path, number: usize) -> (RawGuest, UnixStream) {
    let socket = connect(dir, number);
    let mut guest = RawGuest::start(socket.try_clone().unwrap(), 1, 64, F_VERSION_1);
    let (header, status) = (DATA - 0x1000, DATA - 0x0f00);
    guest.put_header(header, 0, 0);
    let part = |addr, len, flags| Desc { addr, len, flags, next: 0 };
    guest.put_chain(0, 0, &[part(header, 16, 0), part(DATA, 512, 2), part(status, 1, 2)]);
    guest.offer(0, 0);
    (guest, socket)
}

/// Sends questions, and reads no answer, until no more are taken.
fn floods(socket: &UnixStream) {
    let question: Vec<u8> =
        [request::GET_FEATURES, 1, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    // What the daemon does not read any more stays full.
    let mut full = 0;
    while full < 100 {
        match send(socket, &question, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => full = 0,
            Err(_) => {
                full += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// Front-ends that stop in the middle of a message, that read no answers, and whose disks do not finish
/// what is in flight: twice as many of each as there are threads while nothing is held up.
#[test]
fn b29_front_ends_that_are_held_up_do_not_hold_up_others() {
    const SLOW: &str = "null:1G,latency=300000ms";
    let dir = folder();
    let dir = dir.path();
    let neighbour = 4 * EACH;
    let image = |number| if number < 2 * EACH { SLOW } else { "null:1G" };
    let daemon = serve(dir, neighbour + 1, |number| image(number).into());
    let guests: Vec<_> = (0..2 * EACH).map(|number| asks(dir, number)).collect();
    until(&daemon, "requests are not in flight", || in_flight(dir) == 2 * EACH);
    for (number, (guest, _)) in guests.iter().enumerate() {
        if number < EACH {
            guest.client.send(request::GET_VRING_BASE, 0, &[0; 8], &[]).unwrap();
        } else {
            guest.client.hang_up();
        }
    }
    let halves: Vec<_> = (2 * EACH..3 * EACH).map(|number| connect(dir, number)).collect();
    let half = [request::GET_FEATURES, 1].map(u32::to_ne_bytes).concat();
    for socket in &halves {
        assert_eq!(send(socket, &half, SendFlags::NOSIGNAL), Ok(half.len()));
    }
    let deaf: Vec<_> = (3 * EACH..4 * EACH).map(|number| connect(dir, number)).collect();
    std::thread::scope(|scope| {
        for socket in &deaf {
            scope.spawn(|| floods(socket));
        }
    });

    // Whole handshakes, one after the other, and a request each.
    for _ in 0..5 {
        let place = dir.join(format!("s{neighbour}"));
        let mut device = Options::new().patience(PATIENCE).connect(place).unwrap();
        let mut queue = device.queue().unwrap();
        assert_eq!(read(&device, &mut queue, 7), [0; 512]);
    }
    // A front-end in the middle of a message does not keep orders from its disk.
    ctl(dir, &["pause", &(2 * EACH).to_string()]);
    // All that was slow still is.
    for (_, socket) in &guests[..EACH] {
        let mut byte = [0];
        assert_eq!(recv(socket, &mut byte, RecvFlags::DONTWAIT), Err(Errno::AGAIN));
    }
    drop((halves, deaf, guests));
    daemon.kill();
}

/// How many disks: `RINGWAY_IDLE_DISKS`, or two hundred.
fn many() -> usize {
    std::env::var("RINGWAY_IDLE_DISKS").ok().and_then(|s| s.parse().ok()).unwrap_or(200)
}

/// All disks are connected to at the same moment, from two hundred to a thousand: each front-end is
/// served, and what the daemon has for that is a few threads, also while all of them stay connected.
#[test]
fn e24_front_ends_that_connect_at_once_are_all_served_by_few_threads() {
    let (dir, disks) = (folder(), many());
    let daemon = serve(dir.path(), disks, |_| "null:1G".into());
    let clients: Vec<_> =
        (0..disks).map(|number| RawClient::new(connect(dir.path(), number))).collect();
    for client in &clients {
        client.send(request::GET_FEATURES, 0, &[], &[]).unwrap();
        client.send(request::GET_QUEUE_NUM, 0, &[], &[]).unwrap();
    }
    for client in &clients {
        assert_eq!(client.receive().unwrap().0, request::GET_FEATURES);
        assert_eq!(
            client.receive().unwrap(),
            (request::GET_QUEUE_NUM, vec![1, 0, 0, 0, 0, 0, 0, 0])
        );
    }
    let names = || threads(daemon.pid()).iter().map(|thread| thread.name()).collect::<Vec<_>>();
    let sessions = || names().iter().filter(|name| name.starts_with("session")).count();
    until(&daemon, "threads do not end", || sessions() == 2);
    assert!(names().len() <= 16, "{:?}", names());
    // Each of them is still there, and so is the daemon's end in order.
    for client in &clients {
        client.ask_u64(request::GET_FEATURES).unwrap();
    }
    daemon.stop();
    assert!(clients.iter().all(RawClient::is_closed));
}

/// As QEMU does whose memory is not shared: it sets a queue up, and tells of no memory. `enable` says whether it enables
/// the queue.
fn without_memory(socket: &Path, enable: bool) -> RawClient {
    use rustix::event::{EventfdFlags, eventfd};
    let client = RawClient::new(UnixStream::connect(socket).unwrap());
    client.send(request::SET_OWNER, 0, &[], &[]).unwrap();
    // MQ, REPLY_ACK, CONFIGURE_MEM_SLOTS.
    let protocol = 1 | 1 << 3 | 1 << 15;
    client.send(request::SET_PROTOCOL_FEATURES, 0, &words(&[protocol]), &[]).unwrap();
    let features = F_VERSION_1 | F_PROTOCOL;
    assert!(client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap());
    assert!(client.acked(request::SET_VRING_NUM, &halves(&[0, 64]), &[]).unwrap());
    assert!(client.acked(request::SET_VRING_BASE, &halves(&[0, 0]), &[]).unwrap());
    let mut address = halves(&[0, 0]);
    address.extend(words(&[0x1000, 0x3000, 0x2000, 0]));
    assert!(client.acked(request::SET_VRING_ADDR, &address, &[]).unwrap());
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    assert!(client.acked(request::SET_VRING_KICK, &words(&[0]), &[kick.as_fd()]).unwrap());
    if enable {
        assert!(client.acked(request::SET_VRING_ENABLE, &halves(&[0, 1]), &[]).unwrap());
    }
    client
}

/// Its guest would wait for ever, and nothing say why.
#[test]
fn e44_guest_memory_that_is_not_shared_is_said_once_with_the_words_that_share_it() {
    for isolate in [&[][..], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let args = ["null:1G", "--socket", "s", "--control", "ctl", "--queues", "1"];
        let daemon = Daemon::serve(dir, &[&args[..], isolate].concat());
        let ask = |args: &[&str]| {
            let mut command = ringway();
            command.args(args).current_dir(dir);
            text(&run(command).stdout)
        };
        let list = |json: &[&str]| ask(&[&["ctl", "--control", "ctl", "list"], json].concat());
        let disk = || {
            let list: serde_json::Value = serde_json::from_str(&list(&["--json"])).unwrap();
            list["disks"][0].clone()
        };
        for _ in 0..3 {
            let client = without_memory(&dir.join("s"), true);
            let said = list(&[]);
            for words in ["share=on", "<access mode='shared'/>"] {
                assert!(said.contains(words), "{isolate:?}: {said}");
            }
            drop(client);
        }
        assert!(disk()["connections"].as_u64() >= Some(3), "{isolate:?}: {}", disk());
        assert_eq!(daemon.log().matches("share=on").count(), 1, "{isolate:?}: {}", daemon.log());
        let client = without_memory(&dir.join("s"), true);
        let shown = ask(&["top", "--control", "ctl", "--once", "--interval", "1"]);
        assert!(shown.contains("no guest"), "{isolate:?}: {shown}");
        drop(client);
        // Queues that are never enabled are said after a moment.
        let client = without_memory(&dir.join("s"), false);
        let begun = Instant::now();
        while !disk()["front_end"].to_string().contains("enabled none of them") {
            assert!(begun.elapsed() < PATIENCE, "{isolate:?}: {}", disk());
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(client);
        // One with memory is well.
        let mut device = Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        read(&device, &mut queue, 0);
        assert_eq!(disk()["front_end"], serde_json::Value::Null, "{isolate:?}");
        drop((queue, device));
        daemon.stop();
    }
}

/// A front-end that connects again and again without a queue that runs.
#[test]
fn e44_a_front_end_that_comes_back_all_the_time_is_counted_and_named() {
    let dir = folder();
    let dir = dir.path();
    let daemon = Daemon::serve(dir, &["null:1G", "--socket", "s", "--control", "ctl"]);
    let disk = || {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "list", "--json"]).current_dir(dir);
        let list: serde_json::Value = serde_json::from_slice(&run(command).stdout).unwrap();
        list["disks"][0].clone()
    };
    let begun = Instant::now();
    while !disk()["front_end"].to_string().contains("has come back") {
        assert!(begun.elapsed() < PATIENCE, "{}", disk());
        drop(RawGuest::connect(UnixStream::connect(dir.join("s")).unwrap(), F_VERSION_1));
    }
    assert!(disk()["connections"].as_u64() > Some(5), "{}", disk());
    daemon.stop();
}

/// A region of an earlier version, or of whoever asks for too little: its queues are served, and what that means is said
/// once for all of them.
#[test]
fn b35_a_region_that_is_too_small_is_said_once_and_what_it_means() {
    let dir = folder();
    let dir = dir.path();
    let mut daemon = Daemon::serve(dir, &["null:1G", "--socket", "s", "--queues", "2"]);
    let mut guest = RawGuest::connect(UnixStream::connect(dir.join("s")).unwrap(), F_VERSION_1);
    guest.size = 64;
    let region = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&region, 64).unwrap();
    let payload = inflight_payload(64, 0, 2, guest.size);
    assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
    for queue in 0..2 {
        assert!(guest.start_queue(queue).unwrap());
        assert_eq!(guest.simple(queue, 0, 7, DATA, 512), (0, 513));
    }
    drop(guest);
    daemon.signal(libc::SIGTERM);
    daemon.wait();
    let log = daemon.log();
    assert_eq!(log.matches("no room for this queue of 64 descriptors").count(), 1, "{log}");
    for words in
        ["it is served, and not recorded", "requests in flight are lost", "A reset of the guest"]
    {
        assert!(log.contains(words), "{words}: {log}");
    }
}

/// A driver that has started reads the disk, unless its guest is stopped or its kicks go nowhere.
#[test]
fn e81_queues_through_which_nothing_comes_are_named() {
    let dir = folder();
    let dir = dir.path();
    let daemon = Daemon::serve(dir, &["null:1G", "--socket", "s", "--control", "ctl"]);
    let trouble = || {
        let said: serde_json::Value = serde_json::from_str(&ctl(dir, &["stats"])).unwrap();
        said["disks"][0]["front_end"].clone()
    };
    let mut device = Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    let begun = Instant::now();
    while !trouble().to_string().contains("no request has come") {
        assert!(begun.elapsed() < PATIENCE, "{}", trouble());
        std::thread::sleep(Duration::from_millis(50));
    }
    let shown = says(dir, &["top", "--control", "ctl", "--once", "--interval", "1"], 0, &[]);
    assert!(shown.contains("no guest"), "{shown}");
    read(&device, &mut queue, 0);
    assert_eq!(trouble(), serde_json::Value::Null);
    drop((queue, device));
    daemon.stop();
}
