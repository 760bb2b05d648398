//! The sandbox of `ringway serve`, from outside: what /proc says of a daemon, its helper, another
//! user. That each forbidden call ends it is tested beside the lists (`src/sandbox/tests.rs`); that
//! nothing is forbidden which is needed, by all other tests of this folder, which run inside.

use crate::common::{Daemon, PATIENCE, Thread, folder, read, ringway, run, text, threads, write};
use ringway_control::request::COMMANDS;
use ringway_driver::{Device, Options};
use ringway_testkit::{Need, skip};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

fn ctl(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    run(command)
}

/// A line of /proc/PID/status; nothing if the process has ended.
fn status(pid: &str, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The helper of a daemon.
fn helper(pid: u32) -> Option<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let mut numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.find(|other| {
        status(&other.to_string(), "PPid") == pid.to_string()
            && status(&other.to_string(), "Name") == "ringway-helper"
    })
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks a daemon for one thing: whether it was done, and the answer.
fn ask(control: &Path, request: &Value) -> (bool, String) {
    let stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    writeln!(&stream, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    let reply: Value = serde_json::from_str(&line).unwrap_or_default();
    (reply["ok"] == true, line)
}

/// A folder that anybody may enter, with an image of nobody's.
fn nobodys_folder() -> tempfile::TempDir {
    let dir = folder();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn root() -> bool {
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        skip(Need::Root, "to change the user");
    }
    root
}

/// How many filters a thread has. The one that starts threads of engines moves no data.
fn filters_of(name: &str) -> &'static str {
    let moves_data = name.starts_with("worker-") || name.starts_with("io-");
    if moves_data && name != "io-start" { "3" } else { "2" }
}

/// All threads are there, each with its filters. A thread bears the name of the one that made it, and no
/// filter of its own, until it has seen to itself.
fn are_confined(daemon: &Daemon, engine: &str) -> bool {
    let threads: Vec<_> = threads(daemon.pid())
        .into_iter()
        .map(|thread| (thread.name(), thread.field("Seccomp_filters")))
        .filter(|(name, _)| !name.starts_with("iou-"))
        .collect();
    let count = |word: &str| threads.iter().filter(|(name, _)| name.starts_with(word)).count();
    let all = count("worker-") >= 1 && count("sessions") == 1 && count("session-") >= 1;
    let all = all && (engine == "io_uring" || count("io-") > 0);
    all && threads.iter().all(|(name, has)| has == filters_of(name))
}

#[test]
fn every_thread_is_confined_and_data_threads_more() {
    let dir = folder();
    for engine in ["io_uring", "linux-aio", "threads"] {
        let args =
            ["disk.img", "--socket", "s", "--queues", "2", "--engine", engine, "--control", "ctl"];
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir.path());
        let daemon = Daemon::start(command);
        if daemon.log().contains("does not work here") {
            let need = if engine == "linux-aio" { Need::LinuxAio } else { Need::IoUring };
            skip(need, daemon.log());
            continue;
        }
        assert!(
            daemon
                .log()
                .contains("sandbox on: 52 system calls (workers 30 of them, their helpers 22)"),
            "{}",
            daemon.log()
        );
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 3, 7));
        // One more disk, with more workers, from inside.
        let added = ctl(
            dir.path(),
            &["add", "b.img", "--size", "1M", "--socket", "t", "--queues", "2", "--engine", engine],
        );
        assert!(added.status.success(), "{}\n{}", text(&added.stderr), daemon.log());
        until("not all threads are confined", || are_confined(&daemon, engine));
        let threads = threads(daemon.pid());
        let names: Vec<_> = threads.iter().map(Thread::name).collect();
        let named = |word: &str| names.iter().filter(|name| name.starts_with(word)).count();
        assert!(
            named("worker-") >= 1 && named("sessions") == 1 && named("session-") >= 1,
            "{names:?}"
        );
        assert_eq!(named("io-") > 0, engine != "io_uring", "{names:?}");
        // io_uring may have threads of the kernel's own, which make no calls.
        for thread in threads.iter().filter(|thread| !thread.name().starts_with("iou-")) {
            let name = thread.name();
            assert_eq!(thread.field("NoNewPrivs"), "1", "{name}");
            assert_eq!(thread.field("Seccomp"), "2", "{name}");
            assert_eq!(thread.field("Seccomp_filters"), filters_of(&name), "{name}");
            let blocked = u64::from_str_radix(&thread.field("SigBlk"), 16).unwrap();
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
                assert_ne!(blocked & (1 << (signal - 1)), 0, "{name}: {signal}");
            }
        }
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
        assert!(
            std::fs::read_to_string(format!("/proc/{}/environ", daemon.pid())).is_ok() || !root()
        );
        drop((queue, device));
        daemon.stop();
        assert!(
            !dir.path().join("s").exists()
                && !dir.path().join("t").exists()
                && !dir.path().join("ctl").exists()
        );
    }
}

#[test]
fn it_is_off_or_only_tells_if_asked() {
    let dir = folder();
    let off = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--sandbox", "off"]);
    assert_eq!(status(&off.pid().to_string(), "Seccomp"), "0");
    assert!(off.log().contains("sandbox off"), "{}", off.log());
    assert_eq!(helper(off.pid()), None);
    off.stop();
    assert!(!dir.path().join("s").exists());
    std::fs::write(
        dir.path().join("c.toml"),
        "sandbox = 'log'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n",
    )
    .unwrap();
    let log = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    assert_eq!(status(&log.pid().to_string(), "Seccomp"), "2");
    assert!(
        log.log().contains("sandbox log: ") && log.log().contains("files not restricted"),
        "{}",
        log.log()
    );
    log.stop();
    // Options win over the file.
    let off = Daemon::serve(dir.path(), &["--config", "c.toml", "--sandbox", "off"]);
    assert!(off.log().contains("sandbox off"), "{}", off.log());
    off.stop();
}

#[test]
fn e35_the_helper_ends_with_the_daemon_and_the_daemon_goes_on_without_it() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--queues", "1"];
    let daemon = Daemon::serve(dir.path(), &args);
    let its = helper(daemon.pid()).expect("there is a helper");
    // Its line, standard input and outputs; for the disk the folder of states, its file, the image with
    // the daemon's lock, and the image opened by itself.
    assert_eq!(std::fs::read_dir(format!("/proc/{its}/fd")).unwrap().count(), 8);
    assert_eq!(status(&its.to_string(), "NoNewPrivs"), "1");
    daemon.kill();
    until("the helper stays behind", || !Path::new(&format!("/proc/{its}")).exists());

    let daemon = Daemon::serve(dir.path(), &args);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    let its = helper(daemon.pid()).unwrap();
    // Signals from a terminal are for the daemon.
    let its_number = i32::try_from(its).unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
        // SAFETY: the daemon's child, which it does not wait for.
        assert_eq!(unsafe { libc::kill(its_number, signal) }, 0);
    }
    assert!(ctl(dir.path(), &["add", "b.img", "--size", "1M", "--socket", "t"]).status.success());
    let mut events = BufReader::new(UnixStream::connect(dir.path().join("ctl")).unwrap());
    events.get_ref().set_read_timeout(Some(crate::common::PATIENCE)).unwrap();
    events.get_mut().write_all(b"{\"command\":\"events\"}\n").unwrap();
    events.read_line(&mut String::new()).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(its_number, libc::SIGKILL) }, 0);
    let refused = text(&ctl(dir.path(), &["add", "c.img", "--size", "1M", "--socket", "u"]).stderr);
    assert!(
        refused.contains("the process that opens files for this daemon has ended"),
        "{refused}"
    );
    let told = "the process that opens files for this daemon has ended (ringway-helper): disks are served on";
    until("e35: it is not told", || daemon.log().contains(told));
    let list = text(&ctl(dir.path(), &["list"]).stdout);
    assert!(list.contains(told) && list.contains("none can be added"), "{list}");
    let list: Value = serde_json::from_slice(&ctl(dir.path(), &["list", "--json"]).stdout).unwrap();
    assert_eq!(list["daemon"]["lacks"].as_array().map(Vec::len), Some(1), "{list}");
    let mut event = String::new();
    events.read_line(&mut event).unwrap();
    assert!(event.contains("helper-ended"), "{event}");
    assert_eq!(daemon.log().matches(told).count(), 1, "it is told once");
    assert!(write(&device, &mut queue, 1, 9));
    assert_eq!(read(&device, &mut queue, 1), [9; 512]);
    drop((queue, device));
    daemon.stop();
    // The next one replaces what stayed.
    let daemon = Daemon::serve(dir.path(), &args);
    daemon.stop();
    assert!(!dir.path().join("s").exists());
}

#[test]
fn a_daemon_that_is_stopped_and_continued_goes_on() {
    let dir = folder();
    for engine in ["io_uring", "linux-aio", "threads"] {
        let args =
            ["disk.img", "--socket", "s", "--queues", "1", "--engine", engine, "--control", "ctl"];
        let daemon = Daemon::serve(dir.path(), &args);
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        for round in 0..3 {
            daemon.signal(libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(150));
            daemon.signal(libc::SIGCONT);
            assert!(write(&device, &mut queue, round, 5), "{engine}");
        }
        assert!(ctl(dir.path(), &["list"]).status.success());
        daemon.signal(libc::SIGUSR1);
        until("no counts", || daemon.log().contains("writes"));
        drop((queue, device));
        daemon.stop();
    }
}

#[test]
fn another_user_has_none_of_roots_rights() {
    if !root() {
        return;
    }
    let dir = nobodys_folder();
    let args =
        ["disk.img", "--socket", "s", "--control", "ctl", "--queues", "1", "--user", "nobody"];
    let daemon = Daemon::serve(dir.path(), &args);
    assert!(daemon.log().contains(", user nobody"), "{}", daemon.log());
    let group = status(&daemon.pid().to_string(), "Gid");
    // Threads begin after the word that it is ready.
    let lasting = ["ringway", "worker-", "sessions", "session-", "control"];
    until("not all threads", || {
        let names: Vec<_> = threads(daemon.pid()).iter().map(Thread::name).collect();
        lasting.iter().all(|lasting| names.iter().any(|name| name.starts_with(lasting)))
    });
    let judged: Vec<_> = threads(daemon.pid())
        .into_iter()
        .map(|thread| {
            let name = thread.name();
            assert_eq!(thread.field("Uid"), [NOBODY.to_string().as_str(); 4].join(" "), "{name}");
            assert_eq!(thread.field("Groups"), "", "{name}");
            for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
                assert_eq!(thread.field(set), "0000000000000000", "{name}: {set}");
            }
            name
        })
        .collect();
    for lasting in lasting {
        assert!(judged.iter().any(|name| name.starts_with(lasting)), "{lasting}: {judged:?}");
    }
    let owner =
        |name: &str| std::fs::metadata(dir.path().join(name)).map(|meta| (meta.uid(), meta.gid()));
    let number = group.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(owner("s").unwrap(), (NOBODY, number));
    let mode = std::fs::metadata(dir.path().join("s")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660, "the group may connect, and nobody else");
    assert_eq!(owner("ctl").unwrap().0, 0, "who started it controls it");
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 1, 9));

    // What root alone may open is not to be had any more, nor made.
    std::fs::write(dir.path().join("roots.img"), vec![0; 1 << 20]).unwrap();
    std::fs::set_permissions(dir.path().join("roots.img"), std::fs::Permissions::from_mode(0o600))
        .unwrap();
    for args in [
        &["add", "roots.img", "--socket", "t"][..],
        &["add", "new.img", "--size", "1M", "--socket", "t"],
    ] {
        let refused = text(&ctl(dir.path(), args).stderr);
        assert!(refused.contains("no permission"), "{refused}");
    }
    assert!(!dir.path().join("new.img").exists() && !dir.path().join("t").exists());
    // What it may open is.
    let own = dir.path().join("own");
    std::fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(NOBODY), None).unwrap();
    let added = ctl(dir.path(), &["add", "own/new.img", "--size", "1M", "--socket", "own/t"]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    assert_eq!((owner("own/new.img").unwrap().0, owner("own/t").unwrap().0), (NOBODY, NOBODY));
    let removed = ctl(dir.path(), &["remove", "own/new.img"]);
    assert!(removed.status.success(), "{}", text(&removed.stderr));
    drop((queue, device));
    daemon.stop();
    for gone in ["s", "ctl", "own/t"] {
        assert!(!dir.path().join(gone).exists(), "{gone}");
    }

    // Without the rest of the sandbox, too.
    let args = ["disk.img", "--socket", "s", "--user", "nobody:root", "--sandbox", "off"];
    let daemon = Daemon::serve(dir.path(), &args);
    assert_eq!(status(&daemon.pid().to_string(), "CapEff"), "0000000000000000");
    assert_eq!(owner("s").unwrap(), (NOBODY, 0));
    daemon.stop();
    assert!(!dir.path().join("s").exists());
}

#[test]
fn users_that_cannot_be_are_refused() {
    let dir = nobodys_folder();
    let serve = |user: &str, uid: Option<u32>| {
        let mut command = ringway();
        command
            .args(["serve", "disk.img", "--socket", "s", "--user", user])
            .current_dir(dir.path());
        if let Some(uid) = uid {
            command.uid(uid);
        }
        let output = run(command);
        assert_eq!(output.status.code(), Some(1));
        assert!(!dir.path().join("s").exists());
        text(&output.stderr)
    };
    let error = serve("no-such-user", None);
    assert!(error.contains("--user no-such-user: there is no user"), "{error}");
    if !root() {
        return;
    }
    for (user, what) in [
        ("54321", "say 54321:GROUP"),
        ("root", "gives nothing up"),
        ("nobody:none-such", "there is no group"),
    ] {
        let error = serve(user, None);
        assert!(error.contains(what), "{user}: {error}");
    }
    let error = serve("daemon", Some(NOBODY));
    assert!(error.contains("only root can become another user, and this is user 65534"), "{error}");
}

/// Every command of the control socket, also the rare ones, one of each kind: none makes a call that
/// ends the daemon. What a library looks up when it is first used, it has looked up before.
#[test]
fn e13_every_command_is_carried_out_inside() {
    let dir = folder();
    let there = |name: &str| dir.path().join(name);
    let file = |isolate: bool| {
        format!(
            "control = 'ctl'\nmetrics = 'unix:m'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n\
             isolate = {isolate}\n[[disk]]\nimage = 'q'\nformat = 'qcow2'\nsocket = 'q.sock'\n"
        )
    };
    let more = json!({"image": "null:1G", "socket": there("t"), "queues": 1});
    let walk = [
        ("list", json!({})),
        ("stats", json!({"buckets": true})),
        ("stats", json!({"histograms": true})),
        ("limit", json!({"disk": 0, "limits": {"iops": 1000}})),
        ("pause", json!({"disk": 0})),
        ("resume", json!({"disk": 0})),
        ("drain", json!({"disk": 0})),
        ("resize", json!({"disk": 0, "size": "2M"})),
        ("retry", json!({"disk": 0})),
        ("snapshot", json!({"disk": 1, "snapshot": "kept"})),
        ("commit", json!({"disk": 1, "snapshot": "merged"})),
        ("flatten", json!({"disk": 1})),
        ("add", json!({"disk": more})),
        ("remove", json!({"disk": 2})),
        ("reload", json!({})),
        ("events", json!({})),
    ];
    for command in COMMANDS {
        assert!(walk.iter().any(|(walked, _)| *walked == command), "{command} is left out");
    }
    let mut create = ringway();
    create.args(["create", "--format", "qcow2", "q", "--size", "1M"]).current_dir(dir.path());
    assert!(run(create).status.success());
    for isolate in [false, true] {
        std::fs::write(there("c.toml"), file(isolate)).unwrap();
        // The first that asks for the time may be whoever tells systemd.
        let heard = std::os::unix::net::UnixDatagram::bind(there("notify")).unwrap();
        let mut command = ringway();
        command.args(["serve", "--config", "c.toml"]).current_dir(dir.path());
        command.env("NOTIFY_SOCKET", there("notify"));
        let daemon = Daemon::start(command);
        for (command, fields) in &walk {
            let mut request = fields.clone();
            request["command"] = (*command).into();
            if let Some(name) = request["snapshot"].as_str() {
                request["snapshot"] = format!("{name}-{isolate}").into();
            }
            let (begun, mut answer) = (Instant::now(), ask(&there("ctl"), &request));
            // What takes its time with the files of a disk is done one after the other.
            while !answer.0 && *command == "flatten" && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(20));
                answer = ask(&there("ctl"), &request);
            }
            assert!(answer.0, "{request}: {}\n{}", answer.1, daemon.log());
        }
        let mut scraped = String::new();
        let mut stream = UnixStream::connect(there("m")).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        stream.read_to_string(&mut scraped).unwrap();
        assert!(scraped.contains("process_cpu_seconds_total"), "{scraped}");
        daemon.signal(libc::SIGUSR1);
        daemon.signal(libc::SIGHUP);
        let message = "the configuration was read again";
        until("SIGHUP", || daemon.log().matches(message).count() == 2);
        daemon.stop();
        drop(heard);
        std::fs::remove_file(there("notify")).unwrap();
    }
}
