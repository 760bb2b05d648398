//! SIGHUP and `ringway ctl reload`: the configuration file is read again, in the sandbox.

mod common;

use common::{Daemon, PATIENCE, folder, ringway, run, text, write};
use ringway_driver::Options;
use serde_json::{Value, json};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
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
        "added": [], "removed": [], "limited": [], "policies": [], "unchanged": 1, "left": [],
        "failed": [],
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
