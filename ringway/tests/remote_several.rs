//! Several connections to an NBD server, from outside: row F15 of docs/hazards.md, by every way that a server
//! is reached.

use crate::common::exports::{EXPORT, LISTEN, STORAGE, connect, goes_on, guest_of_queues, image};
use crate::common::guest::wait_for as until;
use crate::common::nbd::{Server, server, server_at};
use crate::common::{Daemon, authorities, folder};
use ringway_driver::BlkQueue;
use ringway_testkit::{Need, skip};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Servers that allow several connections, with their words.
const SEVERAL: &[(&str, &[&str])] = &[
    ("nbdkit", &["-f", "-U", "n.sock", "-e", "d", "file", "disk.img"]),
    ("qemu-nbd", &["-t", "-e", "9", "-f", "raw", "-k", "DIR/n.sock", "-x", "d", "disk.img"]),
    ("qemu-storage-daemon", &["--blockdev", STORAGE, "--nbd-server", LISTEN, "--export", EXPORT]),
    (
        "ringway",
        &["nbd", "disk.img", "--format", "raw", "--listen", "unix:n.sock", "--export", "d"],
    ),
];

fn start(dir: &Path, (program, args): (&str, &[&str])) -> Option<Server> {
    let args: Vec<String> =
        args.iter().map(|arg| arg.replace("DIR", dir.to_str().unwrap())).collect();
    server(dir, program, &args.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn f15_a_guest_of_four_queues_has_four_connections_to_each_server() {
    for &words in SEVERAL {
        let dir = folder();
        let path = dir.path();
        image(path);
        let Some(_server) = start(path, words) else { continue };
        let export = format!("nbd:unix:{}/n.sock:d", path.display());
        for (asked, there) in [("4", 4), ("3", 3), ("1", 1)] {
            let args = [&export, "--socket", "s", "--queues", "4", "--nbd-connections", asked];
            let daemon = Daemon::serve(path, &args);
            let wanted = format!("{there} connections");
            assert_eq!(daemon.ready.contains(&wanted), there > 1, "{words:?}: {}", daemon.ready);
            let (stop, answered) = (AtomicBool::new(true), AtomicU64::new(0));
            assert!(guest_of_queues(path, 4, (2, &stop), &answered), "{words:?}: {}", daemon.log());
            daemon.stop();
        }
    }
}

#[test]
fn f15_servers_that_allow_fewer_connections_have_fewer() {
    // The connection by which the test has seen that it listens may still count.
    let limited: &[&str] = &["--filter=limit", "file", "disk.img", "limit=3"];
    let unshared: &[&str] = &["--filter=multi-conn", "file", "disk.img", "multi-conn-mode=disable"];
    for (args, there, why) in
        [(limited, 2..=3, "the server takes no more"), (unshared, 1..=1, "CAN_MULTI_CONN")]
    {
        let dir = folder();
        let path = dir.path();
        image(path);
        let words = [&["-f", "-U", "n.sock"], args].concat();
        let Some(_server) = server(path, "nbdkit", &words) else { return };
        let export = format!("nbd:unix:{}/n.sock", path.display());
        let args = [&export, "--socket", "s", "--queues", "4", "--nbd-connections", "4"];
        let daemon = Daemon::serve(path, &args);
        let said = |there| format!("nbd-connections = 4, and there are {there}");
        let told = || there.clone().any(|there| daemon.log().contains(&said(there)));
        until("that is told", told);
        assert!(daemon.log().contains(why), "{}", daemon.log());
        let (stop, answered) = (AtomicBool::new(true), AtomicU64::new(0));
        assert!(guest_of_queues(path, 4, (1, &stop), &answered), "{}", daemon.log());
        daemon.stop();
    }
}

#[test]
fn f15_a_server_that_is_killed_takes_all_connections_and_they_come_back() {
    for (words, cache, survives) in [
        (SEVERAL[0], "writethrough", true),
        (SEVERAL[0], "writeback", false),
        (SEVERAL[1], "writethrough", true),
        (SEVERAL[2], "writethrough", true),
    ] {
        let dir = folder();
        let path = dir.path();
        image(path);
        let Some(first) = start(path, words) else { continue };
        let export = format!("nbd:unix:{}/n.sock:d", path.display());
        let args = ["--socket", "s", "--queues", "4", "--nbd-connections", "4", "--cache", cache];
        let daemon = Daemon::serve(path, &[&[export.as_str()], &args[..]].concat());
        let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        let flushed = std::thread::scope(|scope| {
            let guest = scope.spawn(|| guest_of_queues(path, 4, (1, &stop), &answered));
            let mut server = Some(first);
            for round in 1..=3 {
                goes_on(&answered, 50 * round);
                drop(server.take());
                server = start(path, words);
                goes_on(&answered, 50);
            }
            stop.store(true, SeqCst);
            guest.join().unwrap()
        });
        let log = daemon.log();
        assert!(log.matches("connected to the NBD server again").count() >= 3, "{log}");
        assert_eq!(flushed, survives, "{words:?} {cache}: {log}");
        daemon.stop();
    }
}

/// Carries connections of `p.sock` to `n.sock`, and can cut one of them.
struct Cutter(Arc<Mutex<Vec<UnixStream>>>);

impl Cutter {
    fn start(dir: &Path) -> Self {
        let listener = UnixListener::bind(dir.join("p.sock")).unwrap();
        let (to, all) = (dir.join("n.sock"), Arc::new(Mutex::new(Vec::new())));
        let list = Arc::clone(&all);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                let server = UnixStream::connect(&to).unwrap();
                list.lock().unwrap().push(client.try_clone().unwrap());
                for (mut from, mut to) in
                    [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Both);
                        let _ = from.shutdown(std::net::Shutdown::Both);
                    });
                }
            }
        });
        Self(all)
    }

    /// Cuts one of those that were made last; how many have been made.
    fn cut(&self, of_last: usize) -> usize {
        let all = self.0.lock().unwrap();
        all[all.len() - 1 - of_last].shutdown(std::net::Shutdown::Both).unwrap();
        all.len()
    }

    fn made(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[test]
fn f15_one_connection_that_is_cut_under_load_costs_its_guest_a_moment() {
    for (cache, survives) in [("writethrough", true), ("writeback", false)] {
        let dir = folder();
        let path = dir.path();
        image(path);
        // nbdkit 1.32 ends now and then when a client of it goes.
        let Some(_server) = start(path, SEVERAL[1]) else { return };
        let cutter = Cutter::start(path);
        let export = format!("nbd:unix:{}/p.sock:d", path.display());
        let args = ["--socket", "s", "--queues", "4", "--nbd-connections", "4", "--cache", cache];
        let daemon = Daemon::serve(path, &[&[export.as_str()], &args[..]].concat());
        assert_eq!(cutter.made(), 4);
        let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        let flushed = std::thread::scope(|scope| {
            let guest = scope.spawn(|| guest_of_queues(path, 4, (1, &stop), &answered));
            for lane in 0..4 {
                goes_on(&answered, 50);
                let before = cutter.cut(lane);
                until("all are made anew", || cutter.made() >= before + 4);
                goes_on(&answered, 50);
            }
            stop.store(true, SeqCst);
            guest.join().unwrap()
        });
        assert_eq!(flushed, survives, "{cache}: {}", daemon.log());
        daemon.stop();
    }
}

/// How a server is reached.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Where it listens, instead of a Unix socket.
    host: Option<&'static str>,
    tls: bool,
    /// The disk has a process of its own.
    isolate: bool,
}

/// A server that is reached in a way, and is started anew at the same place.
struct Place<'a> {
    dir: &'a Path,
    way: Way,
    port: String,
    program: &'static str,
}

const PROGRAMS: [&str; 3] = ["nbdkit", "qemu-nbd", "ringway"];

impl<'a> Place<'a> {
    /// With an empty disk, and certificates if they are needed. Each way has an address of this host that no
    /// other test has, so a port that is free stays so.
    fn new(dir: &'a Path, way: Way, program: &'static str) -> Option<Self> {
        image(dir);
        if way.tls && !authorities(dir) {
            skip(Need::Nbd, "openssl");
            return None;
        }
        let port = |host| TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
        let port = way.host.map_or(0, port).to_string();
        Some(Self { dir, way, port, program })
    }

    fn start(&self) -> Option<Server> {
        let (dir, port) = (self.dir, self.port.as_str());
        let socket = dir.join("n.sock").display().to_string();
        let unix = format!("unix:{socket}");
        let tcp = format!("{}:{port}", self.way.host.unwrap_or_default());
        let at: Vec<&str> = match (self.program, self.way.host) {
            ("nbdkit", Some(host)) => vec!["-f", "-i", host, "-p", port],
            ("nbdkit", None) => vec!["-f", "-U", &socket],
            ("qemu-nbd", Some(host)) => vec!["-b", host, "-p", port],
            ("qemu-nbd", None) => vec!["-k", &socket],
            (_, host) => vec!["nbd", "--listen", if host.is_some() { &tcp } else { &unix }],
        };
        let tls: &[&str] = match self.program {
            _ if !self.way.tls => &[],
            "nbdkit" => &["--tls=require", "--tls-certificates=server", "--tls-verify-peer"],
            "qemu-nbd" => &[
                "--object",
                "tls-creds-x509,id=t,endpoint=server,dir=server,verify-peer=on",
                "--tls-creds",
                "t",
            ],
            _ => &[
                "--tls-cert",
                "server/server-cert.pem",
                "--tls-key",
                "server/server-key.pem",
                "--tls-ca",
                "ca-cert.pem",
            ],
        };
        let disk: &[&str] = match self.program {
            "nbdkit" => &["-e", "d", "file", "disk.img"],
            "qemu-nbd" => &["-t", "-e", "9", "-f", "raw", "-x", "d", "disk.img"],
            _ => &["disk.img", "--format", "raw", "--export", "d"],
        };
        let args = [&at[..], tls, disk].concat();
        match self.way.host {
            Some(_) => server_at(dir, self.program, &args, || TcpStream::connect(&tcp).is_ok()),
            None => server(dir, self.program, &args),
        }
    }

    fn export(&self) -> String {
        let here = self.dir.display();
        let tls = format!("tls-certificates={here}/full&tls-hostname=localhost");
        match (self.way.host, self.way.tls) {
            (Some(host), true) => format!("nbds://{host}:{}/d?{tls}", self.port),
            (Some(host), false) => format!("nbd://{host}:{}/d", self.port),
            (None, true) => format!("nbds+unix:///d?socket={here}/n.sock&{tls}"),
            (None, false) => format!("nbd+unix:///d?socket={here}/n.sock"),
        }
    }

    /// A daemon whose disk has four connections.
    fn serve(&self, args: &[&str]) -> Daemon {
        let four = ["--socket", "s", "--queues", "4", "--nbd-connections", "4"];
        let isolate: &[&str] = if self.way.isolate { &["--isolate"] } else { &[] };
        let daemon = Daemon::serve(
            self.dir,
            &[&[self.export().as_str()], &four[..], isolate, args].concat(),
        );
        assert!(daemon.ready.contains("4 connections"), "{:?}: {}", self.way, daemon.ready);
        daemon
    }
}

/// Each server is killed twice under a guest of four queues, whose data is verified.
fn outlives_its_server(way: Way) {
    for program in PROGRAMS {
        let dir = folder();
        let path = dir.path();
        let Some(place) = Place::new(path, way, program) else { return };
        let Some(first) = place.start() else { continue };
        let daemon = place.serve(&["--cache", "writethrough"]);
        let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        let flushed = std::thread::scope(|scope| {
            let guest = scope.spawn(|| guest_of_queues(path, 4, (1, &stop), &answered));
            let mut server = Some(first);
            for round in 1..=2 {
                goes_on(&answered, 50 * round);
                drop(server.take());
                server = place.start();
                goes_on(&answered, 50);
            }
            stop.store(true, SeqCst);
            guest.join().unwrap()
        });
        let log = daemon.log();
        assert!(log.matches("connected to the NBD server again").count() >= 2, "{program}: {log}");
        assert!(flushed, "{program} {way:?}: {log}");
        daemon.stop();
    }
}

#[test]
fn f15_several_connections_over_tcp_outlive_their_server() {
    outlives_its_server(Way { host: Some("127.77.0.1"), tls: false, isolate: false });
}

#[test]
fn f15_several_connections_over_tls_outlive_their_server() {
    outlives_its_server(Way { host: None, tls: true, isolate: false });
}

#[test]
fn f15_several_connections_over_tls_and_tcp_outlive_their_server() {
    outlives_its_server(Way { host: Some("127.77.0.2"), tls: true, isolate: false });
}

#[test]
fn f15_several_connections_of_an_isolated_disk_outlive_their_server() {
    outlives_its_server(Way { host: None, tls: false, isolate: true });
}

#[test]
fn f15_several_connections_of_an_isolated_disk_over_tls_and_tcp_outlive_their_server() {
    outlives_its_server(Way { host: Some("127.77.0.3"), tls: true, isolate: true });
}

/// A process that stands still has its connections stay, and new ones be accepted by the kernel. The thread
/// that carries TLS waits for it, too.
#[test]
fn f03_a_server_over_tls_that_stands_still_is_left_after_the_time_that_was_given() {
    for isolate in [false, true] {
        let dir = folder();
        let path = dir.path();
        let way = Way { host: None, tls: true, isolate };
        let Some(place) = Place::new(path, way, "qemu-nbd") else { return };
        let Some(server) = place.start() else { return };
        let signal = |signal| {
            let pid = i32::try_from(server.0.id()).unwrap();
            // SAFETY: a process that this test has started, and has not waited for.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        };
        let daemon = place.serve(&["--response-timeout", "1", "--connect-timeout", "1"]);
        let mut device = connect(path, 1);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        assert!(crate::common::write(&device, &mut queue, 3, 7));
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0);
        signal(libc::SIGSTOP);
        queue.read(3 * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
        queue.submit().unwrap();
        until("that is told", || daemon.log().contains("has said nothing for 1 s"));
        assert!(!queue.wait(Some(Duration::from_millis(100))).unwrap(), "who answers?");
        signal(libc::SIGCONT);
        assert_eq!(crate::common::finish(&mut queue), (true, vec![7; 512]));
        let again = || daemon.log().contains("connected to the NBD server again");
        until("that it is connected again is told", again);
        assert!(crate::common::write(&device, &mut queue, 4, 8));
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0, "nothing was lost");
        daemon.stop();
    }
}
