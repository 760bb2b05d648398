//! SIGHUP and `ringway ctl reload`: the configuration file is read again, in the sandbox.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text, write};
use ringway_driver::Options;
use serde_json::{Value, json};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const ONE: &str = "[[disk]]\nimage = 'disk.img'\nsocket = 's'\nqueues = 1\n";
const TWO: &str = "[[disk]]\nimage = 'null:1G'\nsocket = 't'\n";

fn say(dir: &Path, config: &str) {
    std::fs::write(dir.join("c.toml"), format!("control = 'ctl'\n{config}")).unwrap();
}

fn ctl(dir: &Path, args: &[&str]) -> Result<Value, String> {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json"]).args(args).current_dir(dir);
    let output = run(command);
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(text(&output.stderr)),
    }
}

fn sockets(dir: &Path) -> Vec<String> {
    let list = ctl(dir, &["list"]).unwrap();
    let disks = list["disks"].as_array().unwrap().iter();
    let name = |disk: &Value| disk["socket"].as_str().unwrap().rsplit('/').next().unwrap().into();
    let mut names: Vec<String> = disks.map(name).collect();
    names.sort();
    names
}

/// An image that is made with its disk is made again once a reload has removed that disk, and a clone that goes with its
/// disk after an `add` that failed.
#[test]
fn c88_what_is_removed_by_a_reload_or_was_never_served_is_made_again() {
    let dir = folder();
    let dir = dir.path();
    let made = "[[disk]]\nimage = 'made.img'\nformat = 'raw'\nsize = '4M'\nsocket = 'm'\n";
    say(dir, &[ONE, made].concat());
    let daemon = Daemon::serve(dir, &["--config", "c.toml", "--state-dir", "state"]);
    say(dir, ONE);
    assert_eq!(ctl(dir, &["reload"]).unwrap()["removed"], json!(["made.img"]));
    std::fs::remove_file(dir.join("made.img")).unwrap();
    say(dir, &[ONE, made].concat());
    assert_eq!(ctl(dir, &["reload"]).unwrap()["added"], json!(["made.img"]));
    let clone = ["add", "c.qcow2", "--base", "made.img", "--base-format", "raw", "--ephemeral"];
    let socket = ["--socket", "e"];
    say(dir, ONE);
    ctl(dir, &["reload"]).unwrap();
    let refused = ctl(dir, &[&clone[..], &socket, &["--limit-group", "none-such"]].concat());
    assert!(refused.unwrap_err().contains("none-such"));
    assert!(!dir.join("c.qcow2").exists());
    ctl(dir, &[&clone[..], &socket].concat()).unwrap();
    daemon.stop();
}

#[test]
fn disks_come_and_go_with_the_file() {
    let dir = folder();
    let dir = dir.path();
    say(dir, ONE);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let mut device = Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 0, 1));
    let nothing = ctl(dir, &["reload"]).unwrap();
    let wanted = json!({
        "added": [], "removed": [], "deleted": [], "limited": [], "policies": [], "unchanged": 1,
        "left": [], "failed": [], "dry_run": false,
    });
    assert_eq!(nothing, wanted);
    say(dir, &[ONE, TWO].concat());
    assert_eq!(ctl(dir, &["reload"]).unwrap()["added"], json!(["null:1G"]));
    assert_eq!(sockets(dir), ["s", "t"]);
    // By hand, and not in the file: it stays; in the file later on: it is the file's.
    ctl(dir, &["add", "null:2G", "--socket", "u"]).unwrap();
    assert_eq!(ctl(dir, &["reload"]).unwrap()["unchanged"], 2);
    assert_eq!(sockets(dir), ["s", "t", "u"]);
    let three = "[[disk]]\nimage = 'null:2G'\nsocket = 'u'\n";
    say(dir, &[ONE, three].concat());
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!((&done["removed"], &done["unchanged"]), (&json!(["null:1G"]), &json!(2)));
    assert_eq!(sockets(dir), ["s", "u"]);
    // What cannot change is named; what it is about goes on.
    say(
        dir,
        &format!(
            "workers = 7\nlog-level = 'debug'\n{}read-only = true\n",
            ONE.replace("queues = 1", "queues = 3")
        ),
    );
    let done = ctl(dir, &["reload"]).unwrap();
    let left = json!([
        {"image": null, "words": ["log-level", "workers"]},
        {"image": "disk.img", "words": ["queues", "read-only"]},
    ]);
    assert_eq!((&done["left"], &done["removed"]), (&left, &json!(["null:2G"])));
    assert!(write(&device, &mut queue, 0, 2), "the guest goes on");
    // Until the file says what runs.
    assert_eq!(ctl(dir, &["reload"]).unwrap()["left"], left);
    say(dir, ONE);
    assert_eq!(ctl(dir, &["reload"]).unwrap()["left"], json!([]));
    // Another socket for the same image: first the old one goes, with its guest.
    say(dir, &ONE.replace("'s'", "'v'"));
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!((&done["removed"], &done["added"]), (&json!(["disk.img"]), &json!(["disk.img"])));
    assert_eq!(sockets(dir), ["v"]);
    daemon.stop();
}

#[test]
fn limits_change_with_the_file() {
    let dir = folder();
    let dir = dir.path();
    let limits = |disk: &str, group: &str| {
        let of_group = format!("[[limit-group]]\nname = 'g'\nlimits = {{ iops = {group} }}\n");
        say(dir, &format!("{ONE}limits = {{ {disk} }}\n{TWO}limit-group = 'g'\n{of_group}"));
    };
    let shown = || {
        let list = ctl(dir, &["list"]).unwrap();
        let iops = |disk: usize| list["disks"][disk]["limits"].clone();
        (
            iops(0),
            list["disks"][1]["limit_group"].clone(),
            list["limit_groups"][0]["limits"].clone(),
        )
    };
    limits("iops = 100", "50");
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    assert_eq!(shown(), (json!({"iops": 100}), json!("g"), json!({"iops": 50})));
    limits("bps = 4096000", "60");
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!(done["limited"], json!(["limit-group g", "disk.img"]));
    assert_eq!((&done["unchanged"], &done["left"]), (&json!(1), &json!([])));
    assert_eq!(shown(), (json!({"bps": 4_096_000}), json!("g"), json!({"iops": 60})));
    // A disk of a group that there is not, and one that cannot be.
    for (config, what) in [
        (format!("{ONE}limit-group = 'h'\n"), "'h'"),
        (format!("{ONE}limits = {{ iops = 0 }}\n"), "iops"),
    ] {
        say(dir, &config);
        let error = ctl(dir, &["reload"]).unwrap_err();
        assert!(error.contains(what), "{what}: {error}");
        assert_eq!(shown().0, json!({"bps": 4_096_000}));
    }
    // Out of the file, and out of force; the group too, if nobody was put into it by hand.
    ctl(dir, &["limit", "disk.img", "--group", "g"]).unwrap();
    say(dir, &[ONE, TWO].concat());
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!(done["limited"], json!(["disk.img", "null:1G"]));
    assert_eq!(done["removed"], json!(["limit-group g"]));
    assert_eq!((shown().0, shown().1, shown().2), (json!({}), Value::Null, Value::Null));
    daemon.stop();
}

#[test]
fn error_policies_change_with_the_file() {
    let dir = folder();
    let dir = dir.path();
    let apart = "[[disk]]\nimage = 'null:1G'\nsocket = 't'\nisolate = true\n";
    say(dir, &[ONE, apart].concat());
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let words = "on-write-error = 'hold'\nhold-timeout = 7\n";
    say(dir, &[ONE, words, apart, words, "queues = 1\n"].concat());
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!((&done["policies"], &done["unchanged"]), (&json!(["disk.img"]), &json!(0)));
    let words = ["queues", "hold-timeout", "on-write-error"];
    assert_eq!(done["left"][0]["image"], "null:1G");
    let left = done["left"][0]["words"].as_array().unwrap();
    assert!(words.iter().all(|word| left.contains(&json!(word))) && left.len() == 3, "{left:?}");
    assert!(daemon.log().contains("does not change until the daemon is restarted: "));
    let errors = ctl(dir, &["list"]).unwrap()["disks"][0]["errors"].clone();
    assert_eq!((&errors["on_write_error"], &errors["hold_timeout"]), (&json!("hold"), &json!(7)));
    assert_eq!(errors["on_read_error"], "report");
    daemon.stop();
}

#[test]
fn e12_a_mistake_in_the_file_changes_nothing() {
    let dir = folder();
    let dir = dir.path();
    say(dir, ONE);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let with = |more: &str| format!("{TWO}[[disk]]\n{more}");
    for (config, what) in [
        ("[[disk]]\nimage = ".to_owned(), "c.toml, line 3"),
        (with("image = 'disk.img'\nsocket = 'w'\nquues = 1\n"), "unknown field `quues`"),
        (with("image = 'null:1G'\nsocket = 't'\n"), "is taken by the disk"),
        (with("image = 'missing.img'\nsocket = 'w'\n"), "missing.img"),
        (with("image = 'null:1G'\nsocket = 'no/such/w'\n"), "no/such"),
        (with("image = 'null:1G'\nsocket = 'w'\nsocket-group = 'nobody-knows'\n"), "nobody-knows"),
    ] {
        say(dir, &config);
        let error = ctl(dir, &["reload"]).unwrap_err();
        assert!(error.contains(what) && error.lines().count() == 1, "{what}: {error}");
        assert_eq!(sockets(dir), ["s"], "{what}");
        assert!(!dir.join("t").exists() && !dir.join("w").exists(), "{what}");
    }
    std::fs::remove_file(dir.join("c.toml")).unwrap();
    let error = ctl(dir, &["reload"]).unwrap_err();
    assert!(error.contains("c.toml") && error.contains("cannot read"), "{error}");
    assert_eq!(sockets(dir), ["s"]);
    daemon.stop();
}

#[test]
fn sighup_reads_the_file_again_and_tells_systemd() {
    let dir = folder();
    let dir = dir.path();
    say(dir, ONE);
    let heard = UnixDatagram::bind(dir.join("notify")).unwrap();
    heard.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "c.toml"]).current_dir(dir);
    command.env("NOTIFY_SOCKET", dir.join("notify"));
    let daemon = Daemon::start(command);
    let next = || {
        let mut buffer = [0; 256];
        let got = heard.recv(&mut buffer).unwrap();
        text(&buffer[..got])
    };
    assert_eq!(next(), "READY=1");
    say(dir, &[ONE, TWO].concat());
    daemon.signal(libc::SIGHUP);
    assert!(next().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(next(), "READY=1");
    assert_eq!(sockets(dir), ["s", "t"]);
    say(dir, "nonsense");
    daemon.signal(libc::SIGHUP);
    assert!(next().starts_with("RELOADING=1"));
    assert_eq!(next(), "READY=1");
    let begun = Instant::now();
    while !daemon.log().contains("nothing has changed") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(sockets(dir), ["s", "t"]);
    daemon.stop();
}

#[test]
fn without_a_file_there_is_nothing_to_read() {
    let dir = folder();
    let dir = dir.path();
    let args = ["disk.img", "--socket", "s", "--control", "ctl"];
    let daemon = Daemon::serve(dir, &args);
    let error = ctl(dir, &["reload"]).unwrap_err();
    assert!(error.contains("without --config"), "{error}");
    daemon.signal(libc::SIGHUP);
    let begun = Instant::now();
    while !daemon.log().contains("SIGHUP is ignored") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(sockets(dir), ["s"]);
    daemon.stop();
}

/// The folder of sockets has two names, as /run and /var/run are one; and a socket can have two names itself.
/// The control socket is an option of the daemon, and the file names none.
#[test]
fn e46_a_file_without_a_control_socket_is_read_again() {
    let dir = folder();
    let dir = dir.path();
    let file = dir.join("c.toml");
    std::fs::write(&file, ONE).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "c.toml", "--control", "ctl"]);
    assert_eq!(ctl(dir, &["reload"]).unwrap()["unchanged"], 1);
    std::fs::write(&file, [ONE, TWO].concat()).unwrap();
    assert_eq!(ctl(dir, &["reload"]).unwrap()["added"], json!(["null:1G"]));
    std::fs::write(&file, ["insecure = true\n", ONE].concat()).unwrap();
    assert_eq!(ctl(dir, &["reload"]).unwrap()["removed"], json!(["null:1G"]));
    assert_eq!(sockets(dir), ["s"]);
    daemon.stop();
}

#[test]
fn c48_a_disk_stays_whatever_its_socket_and_image_are_called() {
    for isolate in [false, true] {
        let dir = folder();
        let dir = dir.path();
        std::fs::create_dir(dir.join("run")).unwrap();
        std::os::unix::fs::symlink("run", dir.join("varrun")).unwrap();
        std::os::unix::fs::symlink("disk.img", dir.join("link.img")).unwrap();
        let say = |image: &str, socket: &str| {
            let group = "[[limit-group]]\nname = 'g'\nlimits = { iops = 500 }\n";
            let disk = format!("[[disk]]\nimage = '{image}'\nsocket = '{socket}'\nqueues = 1\n");
            say(dir, &format!("{group}{disk}isolate = {isolate}\nformat = 'raw'\n"));
        };
        say("disk.img", "varrun/s");
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        let mut device = Options::new().patience(PATIENCE).connect(dir.join("run/s")).unwrap();
        let mut queue = device.queue().unwrap();
        std::fs::hard_link(dir.join("run/s"), dir.join("other")).unwrap();
        for ((image, socket), byte) in
            [("disk.img", "run/s"), ("link.img", "varrun/../run/s"), ("disk.img", "other")]
                .into_iter()
                .zip(1..)
        {
            say(image, socket);
            let done = ctl(dir, &["reload"]).unwrap();
            assert_eq!(done["unchanged"], 1, "{isolate} {socket}: {done}");
            for nothing in ["added", "removed", "left", "failed"] {
                assert_eq!(done[nothing], json!([]), "{isolate} {socket}: {done}");
            }
            assert!(write(&device, &mut queue, 0, byte), "{isolate} {socket}");
        }
        // The folder that the file names is another one by now.
        say("disk.img", "varrun/s");
        assert_eq!(ctl(dir, &["reload"]).unwrap()["unchanged"], 1);
        std::fs::create_dir(dir.join("new")).unwrap();
        std::fs::remove_file(dir.join("varrun")).unwrap();
        std::os::unix::fs::symlink("new", dir.join("varrun")).unwrap();
        let done = ctl(dir, &["reload"]).unwrap();
        assert_eq!((&done["unchanged"], &done["removed"]), (&json!(1), &json!([])), "{isolate}");
        assert!(write(&device, &mut queue, 0, 9), "{isolate}");
        // A folder that cannot be looked up may be any.
        say("disk.img", "gone/s");
        let error = ctl(dir, &["reload"]).unwrap_err();
        assert!(error.contains("gone/s: its folder cannot be looked up"), "{error}");
        assert_eq!(sockets(dir), ["s"]);
        daemon.stop();
    }
}

#[test]
fn c48_an_ephemeral_clone_stays_with_a_disk_that_is_called_otherwise() {
    let dir = folder();
    let dir = dir.path();
    std::fs::create_dir(dir.join("run")).unwrap();
    std::os::unix::fs::symlink("run", dir.join("varrun")).unwrap();
    let say = |socket: &str, isolate: bool| {
        let disk = "image = 'vm.qcow2'\nbase = 'disk.img'\nbase-format = 'raw'\nephemeral = true\n";
        say(
            dir,
            &format!("[[disk]]\n{disk}queues = 1\nisolate = {isolate}\nsocket = '{socket}'\n"),
        );
    };
    for isolate in [false, true] {
        say("varrun/s", isolate);
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        let mut device = Options::new().patience(PATIENCE).connect(dir.join("run/s")).unwrap();
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 7, 5));
        say("run/s", isolate);
        assert_eq!(ctl(dir, &["reload"]).unwrap()["removed"], json!([]), "{isolate}");
        assert!(write(&device, &mut queue, 8, 5), "{isolate}");
        let inode = |name: &str| {
            std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(dir.join(name)).unwrap())
        };
        let image = inode("vm.qcow2");
        // It goes on at another place, with all that its guest has written.
        say("run/t", isolate);
        let done = ctl(dir, &["reload"]).unwrap();
        assert_eq!((&done["removed"], &done["failed"]), (&done["added"], &json!([])), "{isolate}");
        assert_eq!((sockets(dir), inode("vm.qcow2")), (vec!["t".to_owned()], image), "{isolate}");
        // Named no more, it goes.
        std::fs::write(dir.join("c.toml"), "control = 'ctl'\n").unwrap();
        assert_eq!(ctl(dir, &["reload"]).unwrap()["removed"].as_array().unwrap().len(), 1);
        assert!(!dir.join("vm.qcow2").exists(), "{isolate}");
        daemon.stop();
    }
}

#[test]
fn c48_exports_at_one_socket_are_known_whatever_it_is_called() {
    let dir = folder();
    let dir = dir.path();
    std::fs::create_dir(dir.join("run")).unwrap();
    std::os::unix::fs::symlink("run", dir.join("varrun")).unwrap();
    let say = |at: [&str; 2]| {
        let disk = |size, at, name| {
            format!("[[disk]]\nimage = 'null:{size}G'\nnbd = 'unix:{at}'\nexport = '{name}'\n")
        };
        say(dir, &[disk(1, at[0], "a"), disk(2, at[1], "b")].concat());
    };
    say(["varrun/n", "run/n"]);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    say(["run/n", "varrun/n"]);
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!((&done["unchanged"], &done["removed"]), (&json!(2), &json!([])), "{done}");
    daemon.stop();
}

#[test]
fn e30_a_file_that_cannot_be_had_leaves_nothing_behind() {
    let dir = folder();
    let dir = dir.path();
    say(dir, &format!("{ONE}isolate = true\n"));
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let made = "[[disk]]\nimage = 'made.img'\nsize = '1M'\nsocket = 'm'\n";
    let clone =
        "[[disk]]\nimage = 'c.qcow2'\nbase = 'base.img'\nbase-format = 'raw'\nsocket = 'c'\n";
    std::fs::write(dir.join("base.img"), [0; 4096]).unwrap();
    let wrong = "[[disk]]\nimage = 'no/such.img'\nsize = '1M'\nsocket = 'w'\n";
    let group = |name: &str| format!("[[limit-group]]\nname = '{name}'\nlimits = {{ iops = 7 }}\n");
    let long = group(&"z".repeat(300));
    for (isolate, groups, disks) in [
        ("", group("g"), [made, clone, wrong].concat()),
        ("isolate = true\n", group("g"), [made, clone, wrong].concat()),
        ("", group("g") + &long, String::new()),
    ] {
        let disks = disks.replace("[[disk]]\n", &format!("[[disk]]\n{isolate}"));
        say(dir, &format!("{groups}{ONE}isolate = true\n{disks}"));
        ctl(dir, &["reload"]).unwrap_err();
        let list = ctl(dir, &["list"]).unwrap();
        assert_eq!(list["limit_groups"], json!([]), "{isolate}{groups}");
        assert_eq!(sockets(dir), ["s"]);
        for name in ["made.img", "c.qcow2", "m", "c", "w"] {
            assert!(!dir.join(name).exists(), "{isolate}{name}");
        }
    }
    daemon.stop();
}

#[test]
fn e30_what_has_failed_is_tried_again_by_the_next_reload() {
    let dir = folder();
    let dir = dir.path();
    let apart = format!("{ONE}isolate = true\n");
    say(dir, &apart);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let disk = || ctl(dir, &["list"]).unwrap()["disks"][0].clone();
    let wait_for = |state: &str| {
        let begun = Instant::now();
        while disk()["state"] != state {
            assert!(begun.elapsed() < PATIENCE, "{}", disk());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    // Its process cannot be started again for now.
    std::fs::rename(dir.join("disk.img"), dir.join("away.img")).unwrap();
    let process = i32::try_from(disk()["process"].as_i64().unwrap()).unwrap();
    // SAFETY: no memory is involved.
    unsafe { libc::kill(process, libc::SIGKILL) };
    wait_for("restarting");
    say(dir, &format!("{apart}limits = {{ iops = 7 }}\n"));
    let error = ctl(dir, &["reload"]).unwrap_err();
    assert!(error.contains("disk.img"), "{error}");
    std::fs::rename(dir.join("away.img"), dir.join("disk.img")).unwrap();
    wait_for("serving");
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!(done["limited"], json!(["disk.img"]), "{done}");
    assert_eq!(disk()["limits"], json!({"iops": 7}));
    assert_eq!(ctl(dir, &["reload"]).unwrap()["unchanged"], 1);
    daemon.stop();
}

/// The group of a disk is taken away at any moment while the disk is added.
#[test]
fn e30_a_disk_that_cannot_be_added_is_not_listed() {
    let dir = folder();
    let dir = dir.path();
    let daemon = Daemon::serve(dir, &["--control", "ctl"]);
    let line = || std::os::unix::net::UnixStream::connect(dir.join("ctl")).unwrap();
    let ask = |line: &mut std::os::unix::net::UnixStream, request: Value| -> Value {
        use std::io::{BufRead, BufReader, Write};
        line.write_all(format!("{request}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        BufReader::new(&*line).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    };
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut line = line();
            let (create, remove) = (
                json!({"command": "limit", "group": "g", "create": true, "limits": {"iops": 9}}),
                json!({"command": "limit", "group": "g", "remove": true}),
            );
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                ask(&mut line, create.clone());
                ask(&mut line, remove.clone());
            }
        });
        let mut line = line();
        let socket = dir.join("v").canonicalize().unwrap_or(dir.join("v"));
        let disk = json!({"image": "null:1G", "socket": socket, "limit-group": "g", "queues": 1});
        let add = json!({"command": "add", "disk": disk});
        let listed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..100 {
                let added = ask(&mut line, add.clone());
                match added["ok"].as_bool().unwrap() {
                    true => {
                        let remove = json!({"command": "remove", "disk": added["answer"]["id"]});
                        assert_eq!(ask(&mut line, remove)["ok"], true);
                    }
                    false => {
                        let list = ask(&mut line, json!({"command": "list"}));
                        assert_eq!(list["answer"]["disks"], json!([]), "{added}");
                    }
                }
            }
        }));
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        listed.unwrap();
    });
    daemon.stop();
}

/// What can change does, and the rest is named.
#[test]
fn e91_what_a_file_says_of_a_disk_that_was_added_by_hand_counts() {
    let dir = folder();
    let dir = dir.path();
    say(dir, ONE);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    ctl(dir, &["add", "null:2G", "--socket", "u"]).unwrap();
    let words = "read-only = true\nlimits = { iops = 5 }\non-read-error = 'hold'\n";
    let at = |image: &str| format!("{ONE}[[disk]]\nimage = '{image}'\nsocket = 'u'\n");
    say(dir, &(at("null:2G") + words));
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!(done["left"], json!([{"image": "null:2G", "words": ["read-only"]}]), "{done}");
    let its = json!(["null:2G"]);
    assert_eq!((&done["limited"], &done["policies"]), (&its, &its), "{done}");
    assert_eq!(ctl(dir, &["list"]).unwrap()["disks"][1]["limits"], json!({"iops": 5}));
    // Another image there: its guest is not to be served that.
    say(dir, &at("null:3G"));
    let done = ctl(dir, &["reload"]).unwrap();
    assert_eq!(done["left"], json!([{"image": "null:2G", "words": ["image"]}]), "{done}");
    assert_eq!(done["unchanged"], 1, "{done}");
    daemon.stop();
}

#[test]
fn a_group_of_a_file_may_be_called_none() {
    let dir = folder();
    let dir = dir.path();
    let group = "[[limit-group]]\nname = 'none'\nlimits = { iops = 5 }\n";
    say(dir, &format!("{group}{ONE}limit-group = 'none'\n"));
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    say(dir, &format!("{group}{ONE}limit-group = 'none'\nlimits = {{ bps = 4096000 }}\n"));
    assert_eq!(ctl(dir, &["reload"]).unwrap()["limited"], json!(["disk.img"]));
    assert_eq!(ctl(dir, &["list"]).unwrap()["disks"][0]["limit_group"], "none");
    daemon.stop();
}

/// The last thing that the file asks for cannot be done: a disk takes the image of one that goes, in a format that it
/// has not.
#[test]
fn e42_a_reload_is_carried_out_whole_or_not_at_all() {
    for isolate in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let of_image = |socket: &str, more: &str| {
            let disk = format!("[[disk]]\nimage = 'disk.img'\nsocket = '{socket}'\nqueues = 1\n");
            format!("{disk}isolate = {isolate}\n{more}\n")
        };
        let group =
            |iops: u32| format!("[[limit-group]]\nname = 'g'\nlimits = {{ iops = {iops} }}\n");
        // By its name, which only the start can look up.
        let own = Command::new("id").arg("-gn").output().unwrap();
        let words = format!("format = 'raw'\nsocket-group = '{}'", text(&own.stdout).trim());
        say(dir, &[&group(5), &of_image("s", &words)[..], TWO].concat());
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        // By hand: the file does not know.
        ctl(dir, &["limit", "disk.img", "--iops", "77"]).unwrap();
        let connect = || {
            let options = Options::new().patience(PATIENCE).reconnect(PATIENCE);
            options.connect(dir.join("s")).unwrap()
        };
        let mut device = connect();
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 0, 1));
        let facts = || {
            let list = ctl(dir, &["list"]).unwrap();
            let limits = |disk: &Value| (disk["socket"].clone(), disk["limits"].clone());
            let errors = |disk: &Value| disk["errors"]["on_read_error"].clone();
            let disks = list["disks"].as_array().unwrap();
            let mut all: Vec<_> = disks.iter().map(|disk| (limits(disk), errors(disk))).collect();
            all.sort_by_key(|((socket, _), _)| socket.to_string());
            format!("{all:?} {}", list["limit_groups"])
        };
        let before = facts();
        let two = TWO.to_owned() + "limits = { iops = 7 }\non-read-error = 'hold'\n";
        let three = "[[disk]]\nimage = 'null:3G'\nsocket = 'u'\n";
        let more = "[[limit-group]]\nname = 'h'\nlimits = { iops = 3 }\n";
        let with = |format: &str| {
            let last = of_image("v", &format!("format = '{format}'"));
            [more, &group(9), &two[..], three, &last].concat()
        };
        let plan = json!({
            "added": ["null:3G", "disk.img"], "removed": ["disk.img"], "deleted": [],
            "limited": ["limit-group g", "limit-group h", "null:1G"], "policies": ["null:1G"],
            "unchanged": 0, "left": [], "failed": [], "dry_run": true,
        });
        say(dir, &with("qcow2"));
        assert_eq!(ctl(dir, &["reload", "--dry-run"]).unwrap(), plan, "{isolate}");
        assert_eq!(facts(), before, "{isolate}: nothing was done");
        let error = ctl(dir, &["reload"]).unwrap_err();
        assert!(error.contains("qcow2"), "{isolate}: {error}");
        assert_eq!(facts(), before, "{isolate}: {error}");
        assert!(!dir.join("u").exists() && !dir.join("v").exists());
        // Its front-end comes back to it.
        assert!(write(&device, &mut queue, 0, 2), "{isolate}: {}", daemon.log());
        drop((queue, device));
        say(dir, &with("raw"));
        let done = ctl(dir, &["reload"]).unwrap();
        assert_eq!(
            done,
            Value::Object({
                let mut plan = plan.as_object().unwrap().clone();
                plan.insert("dry_run".into(), json!(false));
                plan
            })
        );
        assert_eq!(sockets(dir), ["t", "u", "v"], "{isolate}");
        daemon.stop();
    }
}

/// It could not be paused again if the one that takes its image could not be served.
#[test]
fn e42_a_paused_disk_is_not_replaced() {
    for isolate in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let at = |socket: &str| {
            let disk = "[[disk]]\nimage = 'disk.img'\nformat = 'raw'\nqueues = 1\n";
            say(dir, &format!("{disk}isolate = {isolate}\nsocket = '{socket}'\n"));
        };
        at("s");
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        ctl(dir, &["pause", "0"]).unwrap();
        at("v");
        for args in [&["reload", "--dry-run"][..], &["reload"]] {
            let error = ctl(dir, args).unwrap_err();
            assert!(error.contains("which is paused"), "{isolate}: {error}");
        }
        assert_eq!(ctl(dir, &["list"]).unwrap()["disks"][0]["state"], "paused", "{isolate}");
        ctl(dir, &["resume", "0"]).unwrap();
        ctl(dir, &["reload"]).unwrap();
        assert_eq!(sockets(dir), ["v"], "{isolate}");
        daemon.stop();
    }
}

#[test]
fn e42_what_a_reload_deletes_is_named_before() {
    for isolate in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let clone = "[[disk]]\nimage = 'vm.qcow2'\nbase = 'disk.img'\nbase-format = 'raw'\nephemeral = true\n";
        say(dir, &format!("{clone}isolate = {isolate}\nsocket = 's'\n"));
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        say(dir, "");
        let plan = ctl(dir, &["reload", "--dry-run"]).unwrap();
        assert_eq!(
            (&plan["removed"], &plan["deleted"]),
            (&json!(["vm.qcow2"]), &json!(["vm.qcow2"]))
        );
        assert!(dir.join("vm.qcow2").exists() && sockets(dir) == ["s"], "{isolate}");
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "reload", "--dry-run"]).current_dir(dir);
        let said = text(&run(command).stdout);
        assert!(said.contains("vm.qcow2: its clone would be DELETED"), "{said}");
        assert_eq!(ctl(dir, &["reload"]).unwrap()["deleted"], json!(["vm.qcow2"]));
        assert!(daemon.log().contains("its clone is about to be deleted"), "{}", daemon.log());
        assert!(!dir.join("vm.qcow2").exists(), "{isolate}");
        daemon.stop();
    }
}
