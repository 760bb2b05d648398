//! What the tools have in common, from outside: output that arrives or is told, formats that are not
//! raw, busy servers, names that cannot be disks, nothing left behind.

use crate::common::{Daemon, folder, ringway, run, snapshot, text};
use ringway_driver::Options;
use rustix::pipe::PipeFlags;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn tool(dir: &Path, args: &[&str]) -> Command {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    command
}

#[track_caller]
fn says(dir: &Path, args: &[&str], status: i32, words: &[&str]) -> String {
    let output = run(tool(dir, args));
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say {word:?}: {said}");
    }
    said
}

/// A run command's status, with standard output where the test wants it.
fn status_into(dir: &Path, args: &[&str], stdout: Stdio) -> (Option<i32>, String) {
    let child = tool(dir, args).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), text(&output.stderr))
}

#[test]
fn output_that_does_not_arrive_is_told() {
    let dir = folder();
    let control = ["--socket", "s", "--control", "c"];
    let daemon = Daemon::serve(dir.path(), &[&["disk.img"][..], &control].concat());
    let short = "--io-size";
    for args in [
        &["doctor"][..],
        &["doctor", "--json", "null:1G"],
        &["info", "disk.img"],
        &["info", "--json", "disk.img"],
        &["info", "--json", "vhost-user:s"],
        &["bench", "--json", "null:1G", short, "4M"],
        &["bench", "null:1G", short, "4M"],
        &["ctl", "--control", "c", "list"],
        &["ctl", "--control", "c", "--json", "stats"],
        &["top", "--control", "c", "--once"],
        &["top", "--control", "c", "--json"],
        &["completions", "bash"],
        &["--version"],
        &["help", "serve"],
        &["ctl", "--help"],
        &["io", "vhost-user:s", "-c", "read -v 0 512"],
        &["io", "disk.img", "-c", "help"],
        &["copy", "vhost-user:s", "copy.img"],
        &["serve", "--print-capabilities"],
        &["demo", "--quick", "--size", "16M"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (status, message) = status_into(dir.path(), args, full.into());
        assert_eq!(status, Some(1), "{args:?}: {message}");
        assert!(message.contains("cannot write to standard output"), "{args:?}: {message}");
        // A reader that has gone has seen enough.
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let _ = std::fs::remove_file(dir.path().join("copy.img"));
        let (status, message) = status_into(dir.path(), args, writer.into());
        assert_eq!((status, message.as_str()), (Some(0), ""), "{args:?}");
    }
    daemon.stop();
}

/// No tool takes another format's file for a raw disk, and none touches it.
#[test]
fn b16_other_formats_are_refused_unless_they_are_said_to_be_raw() {
    let dir = folder();
    let qcow2 = [b"QFI\xfb\0\0\0\x03".as_slice(), &[7; 65528]].concat();
    std::fs::write(dir.path().join("vm.img"), &qcow2).unwrap();
    let control = ["--control", "c"];
    let daemon =
        Daemon::serve(dir.path(), &[&["disk.img", "--socket", "s"][..], &control].concat());
    let before = std::fs::read(dir.path().join("vm.img")).unwrap();
    let wanted = ["looks like a qcow2 image", "--format qcow2", "--format raw"];
    let toml = "[[disk]]\nimage = 'vm.img'\nsocket = 't'\n";
    std::fs::write(dir.path().join("d.toml"), toml).unwrap();
    let copy = ["looks like a qcow2 image", "--from-format qcow2", "--from-format raw"];
    says(dir.path(), &["copy", "vm.img", "new.img"], 1, &copy);
    for args in [
        &["serve", "vm.img", "--socket", "t"][..],
        &["serve", "vm.img", "--socket", "t", "--read-only", "--cache", "writeback"],
        &["serve", "--config", "d.toml"],
        &["ctl", "--control", "c", "add", "vm.img", "--socket", "t"],
        &["bench", "vm.img", "--rw", "write", "--allow-write", "--cached", "--io-size", "64k"],
        &["doctor", "vm.img"],
        &["nbd", "vm.img", "--listen", "unix:t"],
    ] {
        says(dir.path(), args, 1, &wanted);
    }
    // One that has grown by a cluster which is not whole is no raw image of a wrong size.
    std::fs::write(dir.path().join("odd.img"), [&qcow2[..], &[7; 100]].concat()).unwrap();
    for more in [&["--cached"][..], &[], &["--vs", "null:64M"]] {
        let bench = [&["bench", "odd.img", "--io-size", "64k"][..], more].concat();
        let text = says(dir.path(), &bench, 1, &wanted);
        assert!(!text.contains("truncate") && !text.contains("--cached"), "{text}");
    }
    let vmdk = [b"KDMV".as_slice(), &[7; 65532]].concat();
    std::fs::write(dir.path().join("vm.vmdk"), vmdk).unwrap();
    let convert = ["looks like a VMDK image", "qemu-img convert -O qcow2", "--format raw"];
    says(dir.path(), &["serve", "vm.vmdk", "--socket", "t"], 1, &convert);
    let write = ["io", "vm.img", "-c", "write 0 512"];
    for command in ["write 0 512", "zero 0 512", "discard 0 512"] {
        says(dir.path(), &["io", "vm.img", "-c", command], 1, &wanted[..2]);
    }
    says(dir.path(), &["info", "vm.img"], 0, &["looks like qcow2", "not servable"]);
    says(dir.path(), &["doctor", "vm.img"], 1, &["looks like qcow2, not raw"]);
    let json = says(dir.path(), &["info", "--json", "vm.img"], 0, &[]);
    assert!(json.contains("\"looks_like\": \"qcow2\""), "{json}");
    // What does no harm.
    says(dir.path(), &["io", "vm.img", "-c", "read -P 7 8 504"], 0, &[]);
    says(dir.path(), &["bench", "vm.img", "--rw", "read", "--cached", "--io-size", "64k"], 0, &[]);
    assert!(std::fs::read(dir.path().join("vm.img")).unwrap() == before);
    assert!(!dir.path().join("new.img").exists() && !dir.path().join("t").exists());

    // An owner who says that it is raw gets what he asks for.
    let raw = ["--format", "raw"];
    says(dir.path(), &[&["copy", "vm.img", "new.img"][..], &raw].concat(), 0, &[]);
    assert!(std::fs::read(dir.path().join("new.img")).unwrap() == before);
    let add = ["ctl", "--control", "c", "add", "vm.img", "--socket", "t"];
    says(dir.path(), &[&add[..], &raw].concat(), 0, &["vm.img"]);
    says(dir.path(), &["io", "vhost-user:t", "-c", "read -P 7 512 512"], 0, &[]);
    daemon.stop();
    std::fs::write(dir.path().join("d.toml"), format!("{toml}format = 'raw'\n")).unwrap();
    Daemon::serve(dir.path(), &["--config", "d.toml"]).stop();
    // A destination's format does not matter: nothing of it is left.
    says(dir.path(), &["copy", "--force", "disk.img", "vm.img"], 0, &[]);
    says(dir.path(), &write, 0, &["wrote"]);
    std::fs::write(dir.path().join("vm.img"), &qcow2).unwrap();
    says(dir.path(), &[&write[..], &raw].concat(), 0, &["wrote"]);
    says(dir.path(), &["serve", "vm.img", "--socket", "t", "--format", "qcow2"], 1, &["raw"]);
}

/// Who only looks at an image needs no lock, and is told who has it.
#[test]
fn an_image_that_is_locked_can_be_looked_at() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let holder = format!("process {} (ringway", daemon.pid());
    let before = std::fs::read(dir.path().join("disk.img")).unwrap();
    says(dir.path(), &["info", "disk.img"], 0, &["1 MiB", &holder]);
    let json = says(dir.path(), &["info", "--json", "disk.img"], 0, &[]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["bytes"], 1 << 20);
    assert!(json["in_use_by"].as_str().unwrap().contains(&holder), "{json}");
    assert!(json["extents"].is_object(), "{json}");
    // Looking has neither taken the lock nor lost it for its holder.
    let other = ["serve", "disk.img", "--socket", "t"];
    says(dir.path(), &other, 1, &["in use by", &holder]);
    let device = Options::new().connect(dir.path().join("s")).unwrap();
    drop(device);
    assert!(std::fs::read(dir.path().join("disk.img")).unwrap() == before);
    daemon.stop();
    let json = says(dir.path(), &["info", "--json", "disk.img"], 0, &[]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["in_use_by"].is_null(), "{json}");
}

/// Who asks a server that serves somebody else is told so, and by whom, and need not wait.
#[test]
fn a_busy_server_is_told_of_at_once() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let device = Options::new().connect(dir.path().join("s")).unwrap();
    let pid = format!("process {} (ringway", daemon.pid());
    for args in [
        &["info", "vhost-user:s"][..],
        &["bench", "vhost-user:s"],
        &["io", "vhost-user:s", "-c", "info"],
        &["copy", "vhost-user:s", "new.img"],
    ] {
        // Without it: 5 s at least each time. A busy host may make one late, and not three.
        let times = [(); 3].map(|()| {
            let begun = Instant::now();
            says(dir.path(), args, 1, &["s: busy: ", &pid, "another front-end"]);
            begun.elapsed()
        });
        let quick = times.iter().any(|&took| took < Duration::from_secs(4));
        assert!(quick, "{args:?}: {times:?}");
    }
    assert!(!dir.path().join("new.img").exists());
    drop(device);
    says(dir.path(), &["info", "vhost-user:s"], 0, &["1 MiB"]);
    daemon.stop();
}

#[test]
fn the_folder_is_named_if_it_is_the_folder_that_is_missing() {
    let dir = folder();
    let control = Daemon::serve(dir.path(), &["--control", "c"]);
    for (args, words) in [
        (&["serve", "no/disk.img", "--socket", "t"][..], &["its folder does not exist"][..]),
        (
            &["serve", "no/disk.img", "--size", "1M", "--socket", "t"],
            &["its folder does not exist"],
        ),
        (&["doctor", "no/disk.img"], &["its folder does not exist"]),
        (&["info", "no/disk.img"], &["its folder does not exist"]),
        (&["bench", "no/disk.img"], &["no such folder: no"]),
        (&["bench", "no/disk.img", "--size", "1M", "--rw", "write"], &["no such folder: no"]),
        (&["copy", "no/disk.img", "b"], &["no such folder: no"]),
        (&["copy", "disk.img", "no/b"], &["no such folder: no"]),
        (&["io", "no/disk.img", "-c", "info"], &["no such folder: no"]),
    ] {
        says(dir.path(), args, 1, words);
    }
    for args in [&["doctor", "no.img"][..], &["info", "no.img"]] {
        let said = says(dir.path(), args, 1, &["there is no such file"]);
        assert!(!said.contains("add --size"), "an option that it does not have: {said}");
    }
    control.stop();
}

#[test]
fn what_can_be_no_disk_is_no_destination_and_force_is_no_advice() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    assert!(Command::new("mkfifo").arg(dir.path().join("pipe")).status().unwrap().success());
    let before = snapshot(dir.path());
    for (name, what) in
        [("folder", "is a folder"), ("/dev/null", "is a character device"), ("pipe", "is a pipe")]
    {
        for more in [&[][..], &["--force"], &["--resume"]] {
            for ends in [["disk.img", name], [name, "new.img"]] {
                let said = says(dir.path(), &[&["copy"][..], &ends, more].concat(), 1, &[what]);
                assert!(!said.contains("--force"), "{said}");
            }
        }
        says(dir.path(), &["io", name, "-c", "info"], 1, &[]);
    }
    assert_eq!(snapshot(dir.path()), before);
}

#[test]
fn a_journal_that_cannot_be_made_leaves_nothing() {
    let dir = folder();
    // Its name is taken by a folder, so the new journal cannot get it.
    std::fs::create_dir_all(dir.path().join("j/x")).unwrap();
    let before = snapshot(dir.path());
    says(dir.path(), &["copy", "--force", "--journal", "j", "disk.img", "b"], 1, &["journal j"]);
    assert_eq!(snapshot(dir.path()), before);
}

/// Not even a demo that is killed leaves its disk.
#[test]
fn a_demo_that_is_killed_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    for signal in [libc::SIGKILL, libc::SIGHUP] {
        let mut command = ringway();
        command.args(["demo", "--size", "16M"]).env("TMPDIR", dir.path());
        let mut demo = Daemon::start(command);
        demo.signal(signal);
        let (status, _) = demo.wait();
        assert!(!status.success());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{signal}");
    }
}

/// The file refuses them as well: no guest of Xen sees either.
#[test]
fn xen_has_no_use_for_serial_numbers_and_queue_sizes() {
    let dir = folder();
    for option in [["--serial", "a"], ["--queue-size", "64"]] {
        let args = [&["serve", "--xen"][..], &option].concat();
        says(dir.path(), &args, 2, &["--xen", option[0], "cannot be used with"]);
    }
}

#[test]
fn pages_say_when_and_how_they_were_made_and_which_way_is_better() {
    let dir = folder();
    let page = |args: &[&str]| {
        says(dir.path(), &[&["bench"][..], args, &["--html", "p q.html"]].concat(), 0, &[]);
        std::fs::read_to_string(dir.path().join("p q.html")).unwrap()
    };
    let short = ["--runtime", "100ms", "--ramp", "0"];
    for targets in [&["null:1G"][..], &["null:1G", "--vs", "null:1G", "--rounds", "1"]] {
        let html = page(&[targets, &short].concat());
        assert!(html.contains("ringway bench null:1G"), "{html}");
        assert!(html.contains("--html &#39;p q.html&#39;") && html.contains(" UTC</p>"));
        assert!(html.contains("more is better") && html.contains("less is better"));
    }
}

#[test]
fn the_version_says_of_what_it_was_made() {
    let said = |option: &str| {
        let mut command = ringway();
        command.arg(option);
        text(&run(command).stdout)
    };
    assert_eq!(said("-V"), format!("ringway {}\n", env!("CARGO_PKG_VERSION")));
    let long = said("--version");
    let field = |name: &str| {
        let found = long.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        found.unwrap_or_else(|| panic!("no {name} in: {long}")).to_owned()
    };
    assert!(long.starts_with(&said("-V")), "{long}");
    assert_eq!(field("features").contains("xen"), cfg!(feature = "xen"));
    assert!(field("build").contains(std::env::consts::ARCH), "{long}");
    let git = std::process::Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"])
        .output();
    // Sources that were unpacked without git have another way to know.
    if let Some(git) = git.ok().filter(|git| git.status.success()) {
        assert!(text(&git.stdout).starts_with(&field("commit")), "{long}");
    }
}

/// The keys of an object and of all in it; those of limits are words of options.
fn keys(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(all) => {
            for (key, value) in all {
                found.insert(key.clone());
                keys(value, found);
            }
        }
        Value::Array(all) => all.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

#[test]
fn all_keys_of_json_are_in_the_documentation() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/json.md");
    let page = std::fs::read_to_string(page).unwrap();
    let dir = folder();
    let _daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "c"]);
    let dir = dir.path();
    File::create(dir.join("raw")).unwrap().set_len(1 << 20).unwrap();
    says(dir, &["create", "a.qcow2", "--backing", "raw"], 0, &[]);
    let show = |args: &[&str]| {
        let output = run(tool(dir, args));
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        let value: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
        let mut found = BTreeSet::new();
        keys(&value, &mut found);
        assert!(!found.is_empty());
        let missing = found.iter().filter(|key| !page.contains(&format!("`{key}`")));
        assert_eq!(missing.collect::<Vec<_>>(), Vec::<&String>::new(), "{args:?}");
    };
    show(&["info", "--json", "vhost-user:s"]);
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let _queue = device.queue::<()>().unwrap();
    for args in [
        &["top", "--control", "c", "--json", "--interval", "100ms"][..],
        &["doctor", "--json", "raw"],
        &["doctor", "--json", "--format", "qcow2", "a.qcow2"],
        &["info", "--json", "raw"],
        &["info", "--json", "a.qcow2"],
        &["info", "--json", "--format", "qcow2", "a.qcow2"],
        &["check", "--json", "a.qcow2"],
        &["copy", "--json", "raw", "b.qcow2"],
        &["resize", "--json", "b.qcow2", "2M"],
        &["flatten", "--json", "a.qcow2"],
    ] {
        show(args);
    }
}
