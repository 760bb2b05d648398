//! Hosts of NBD servers that move, and resolvers that are slow or know nothing, from outside: row F13 of
//! docs/hazards.md. The daemon has files of /etc and a server of names of its own.

use crate::common::exports::image;
use crate::common::guest::wait_for as until;
use crate::common::nbd::{Server, server_at};
use crate::common::{Daemon, folder, ringway};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::{Need, skip};
use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Where the server of names is: loopback addresses that no other test has.
const NAMES: &str = "127.53.0.1";
const FIRST: Ipv4Addr = Ipv4Addr::new(127, 53, 0, 2);
const SECOND: Ipv4Addr = Ipv4Addr::new(127, 53, 0, 3);

/// What a server of names does.
#[derive(Clone, Copy)]
enum Names {
    Silent,
    Unknown,
    At(Ipv4Addr),
}

/// Starts a server of names that knows one host; `None` where it cannot be.
fn serve_names() -> Option<Arc<Mutex<Names>>> {
    let socket = UdpSocket::bind((NAMES, 53)).ok()?;
    let names = Arc::new(Mutex::new(Names::At(FIRST)));
    let shared = Arc::clone(&names);
    std::thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut question) {
            let now = *shared.lock().unwrap();
            if let Some(answer) = answer(&question[..len], now) {
                let _ = socket.send_to(&answer, from);
            }
        }
    });
    Some(names)
}

/// RFC 1035, 4.1: a head of 12 bytes, the question, and an address (A) if that is what is asked for.
fn answer(question: &[u8], names: Names) -> Option<Vec<u8>> {
    let end = 12 + question[12..].iter().position(|&byte| byte == 0)? + 5;
    let asks_for_a = question[end - 4..end - 2] == [0, 1];
    let (code, address) = match names {
        Names::Silent => return None,
        Names::Unknown => (3, None),
        Names::At(address) => (0, Some(address).filter(|_| asks_for_a)),
    };
    let count = u8::from(address.is_some());
    let mut answer = question[..2].to_vec();
    answer.extend([0x81, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0]);
    answer.extend(&question[12..end]);
    if let Some(address) = address {
        // The name of the question; class IN, good for no time.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        answer.extend(address.octets());
    }
    Some(answer)
}

/// Has a command find files of `dir` in /etc: in a mount namespace of its own.
fn with_own_resolver(command: &mut Command, dir: &Path) {
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let files = ["hosts", "nsswitch.conf", "resolv.conf"]
        .map(|name| (path(&dir.join(name)), path(&Path::new("/etc").join(name))));
    let set_up = move || {
        let checked = |status| if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        let (none, own) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
        // SAFETY: system calls alone, with strings that live as long as the command.
        unsafe {
            checked(libc::unshare(libc::CLONE_NEWNS))?;
            checked(libc::mount(none, c"/".as_ptr(), none, own, none.cast()))?;
            for (from, to) in &files {
                let (from, to) = (from.as_ptr(), to.as_ptr());
                checked(libc::mount(from, to, none, libc::MS_BIND, none.cast()))?;
            }
        }
        Ok(())
    };
    // SAFETY: it allocates nothing, and locks nothing.
    unsafe { command.pre_exec(set_up) };
}

/// Files by which a resolver asks the test, and gives up after two seconds; false if no command can have
/// them.
fn prepare(dir: &Path) -> bool {
    std::fs::write(dir.join("hosts"), "127.0.0.1 localhost\n").unwrap();
    std::fs::write(dir.join("nsswitch.conf"), "hosts: files dns\n").unwrap();
    let words = format!("nameserver {NAMES}\noptions timeout:2 attempts:1\n");
    std::fs::write(dir.join("resolv.conf"), words).unwrap();
    let mut command = Command::new("true");
    with_own_resolver(&mut command, dir);
    command.status().is_ok_and(|status| status.success())
}

fn nbdkit(dir: &Path, at: Ipv4Addr, port: &str) -> Option<Server> {
    let host = at.to_string();
    let words = ["-f", "-i", &host, "-p", port, "file", "disk.img"];
    let listens = || TcpStream::connect(format!("{host}:{port}")).is_ok();
    server_at(dir, "nbdkit", &words, listens)
}

fn connect(dir: &Path) -> Device {
    let options = Options::new().queues(1).patience(crate::common::PATIENCE);
    options.memory(1 << 20).connect(dir.join("s")).unwrap()
}

#[test]
fn f13_a_host_that_moves_is_found_and_a_resolver_that_does_not_help_holds_up_nobody() {
    let dir = folder();
    if !prepare(dir.path()) {
        return skip(Need::Mount, "files of /etc of its own");
    }
    let Some(names) = serve_names() else {
        return skip(Need::HostName, "no server of names can be at 127.53.0.1:53");
    };
    for more in [&[][..], &["--isolate"]] {
        *names.lock().unwrap() = Names::At(FIRST);
        moves(dir.path(), &names, more);
    }
}

fn moves(path: &Path, names: &Mutex<Names>, more: &[&str]) {
    image(path);
    let says = |now| *names.lock().unwrap() = now;
    let port = TcpListener::bind((FIRST, 0)).unwrap().local_addr().unwrap().port().to_string();
    let Some(first) = nbdkit(path, FIRST, &port) else { return };
    let export = format!("nbd://store.example:{port}");
    let mut command = ringway();
    let args = ["--socket", "s", "--cache", "writethrough", "--connect-timeout", "1"];
    command.args(["serve", &export]).args(args).args(more).current_dir(path);
    with_own_resolver(&mut command, path);
    let daemon = Daemon::start(command);
    let mut device = connect(path);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 3, 7));
    assert!(!daemon.log().contains("look up"), "{}", daemon.log());

    // Who is asked says nothing: the server is where it was.
    says(Names::Silent);
    drop(first);
    let second = nbdkit(path, FIRST, &port);
    assert!(crate::common::write(&device, &mut queue, 4, 8));
    let told =
        "'store.example' again: the resolver has not answered for 1 s. It is tried at 127.53.0.2";
    until("that is told", || daemon.log().contains(told));

    // Nobody knows the name any more.
    says(Names::Unknown);
    drop(second);
    queue.read(3 * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
    queue.submit().unwrap();
    let told = "again: failed to lookup address information: N";
    until("that is told", || daemon.log().contains(told));
    let third = nbdkit(path, FIRST, &port);
    assert_eq!(crate::common::finish(&mut queue), (true, vec![7; 512]));

    // It has moved.
    says(Names::At(SECOND));
    drop(third);
    let fourth = nbdkit(path, SECOND, &port);
    assert_eq!(crate::common::read(&device, &mut queue, 3), [7; 512]);
    assert!(crate::common::write(&device, &mut queue, 6, 10));
    let told = "the host 'store.example' is at 127.53.0.3 now (before: 127.53.0.2)";
    until("that is told", || daemon.log().contains(told));
    queue.flush(()).unwrap();
    assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
    drop((queue, device));
    daemon.stop();
    let disk = std::fs::read(path.join("disk.img")).unwrap();
    for (sector, byte) in [(3, 7), (4, 8), (6, 10)] {
        assert!(disk[sector * 512..][..512] == [byte; 512], "sector {sector}");
    }
    drop(fourth);
}
