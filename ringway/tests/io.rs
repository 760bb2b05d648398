//! `ringway io` and `ringway info`, and what is generated for shells and manuals, from outside.

use crate::common::{Daemon, folder, ringway, run, snapshot, text};
use ringway_testkit::{Need, skip};
use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn io(dir: &Path, target: &str, commands: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["io", target]).current_dir(dir);
    commands.iter().for_each(|one| {
        command.args(["-c", one]);
    });
    run(command)
}

#[track_caller]
fn does(dir: &Path, target: &str, commands: &[&str]) -> String {
    let output = io(dir, target, commands);
    assert_eq!(output.status.code(), Some(0), "{commands:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn fails(dir: &Path, target: &str, commands: &[&str], status: i32, says: &str) {
    let output = io(dir, target, commands);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{commands:?}: {error}");
    assert!(error.contains(says), "{commands:?}: {error}");
}

/// Everything that a disk takes, on a file and through a server.
fn all_commands(dir: &Path, target: &str) {
    does(dir, target, &["write -P 0x5a 4K 8K", "flush", "verify -P 0x5a 4K 8K", "v -P 0 0 4K"]);
    does(
        dir,
        target,
        &["w -P place:7 64K 300K", "read -P place:7 100K 1K", "v -P place:7 64K 300K"],
    );
    fails(dir, target, &["verify -P place:8 64K 1K"], 3, "of 1024 bytes differ");
    fails(
        dir,
        target,
        &["read -P 0x5a 8K 8K"],
        3,
        "byte 12288 is 0x00 where 0x5a was expected; 4096",
    );
    does(dir, target, &["zero 5K 1K", "v -P 0 5K 1K", "v -P 0x5a 6K 6K", "zero -u 64K 64K"]);
    does(dir, target, &["v -P 0 64K 64K", "v -P place:7 128K 1K", "discard 128K 128K", "f"]);
    let shown = does(dir, target, &["read -v 4608 1536"]);
    assert!(
        shown.contains("00001200  5a 5a") && shown.contains("|ZZZZZZZZZZZZZZZZ|\n*\n"),
        "{shown}"
    );
    assert!(does(dir, target, &["info"]).contains("1 MiB (1048576 bytes)"));
    fails(dir, target, &["read 1M 512"], 1, "beyond the end at 1048576");
    fails(dir, target, &["write 1023K 2K"], 1, "command 1: write 1023K 2K: bytes 1047552 to");
    fails(dir, target, &["read 18446744073709551615 512"], 1, "beyond the end");
    // Nothing is done of a list with a word that is no command.
    fails(dir, target, &["write -P 1 0 4K", "wirte 0 1"], 2, "unrecognized subcommand");
    does(dir, target, &["verify -P 0 0 4K", "quit", "verify -P 1 0 4K"]);
}

#[test]
fn a_file_takes_all_commands() {
    let dir = folder();
    all_commands(dir.path(), "disk.img");
    fails(dir.path(), "disk.img", &["id"], 1, "no serial number");
    fails(dir.path(), "missing", &["id"], 1, "missing: there is no such file. Check the path");
    let mut command = ringway();
    command.args(["io", "--direct", "disk.img", "-c", "write 4K 8K", "-c", "read -P 0xcd 4K 8K"]);
    let output = run({
        command.current_dir(dir.path());
        command
    });
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_served_disk_takes_all_commands() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--serial", "IO-TEST"];
    let daemon = Daemon::serve(dir.path(), &args);
    all_commands(dir.path(), "vhost-user:s");
    all_commands(dir.path(), "s");
    assert_eq!(does(dir.path(), "s", &["id"]), "IO-TEST\n");
    fails(dir.path(), "s", &["read 1 512"], 1, "must be multiples of 512");
    fails(dir.path(), "disk.img", &["read 0 512"], 1, "in use by process");
    daemon.stop();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--read-only"]);
    for change in ["write 0 512", "zero 0 512", "discard 0 4K"] {
        fails(dir.path(), "s", &[change], 1, "it is read-only");
    }
    daemon.stop();
    fails(dir.path(), "vhost-user:s", &["info"], 1, "ringway serve");
}

/// Runs a script from standard input.
fn script(dir: &Path, args: &[&str], lines: &str) -> (i32, String, String) {
    let mut command = ringway();
    command.args(["io"]).args(args).current_dir(dir).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may end before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_script_ends_with_its_first_failure() {
    let dir = folder();
    let lines = "# a script\n\nwrite -P 9 0 4K # first\nverify -P 8 0 4K\nwrite -P 7 0 4K\n";
    let (status, said, error) = script(dir.path(), &["disk.img"], lines);
    assert_eq!(status, 3, "{error}");
    assert!(said.starts_with("wrote 4 KiB at 0  ") && said.lines().count() == 1, "{said}");
    assert!(error.contains("line 4: verify -P 8 0 4K: byte 0 is 0x09"), "{error}");
    does(dir.path(), "disk.img", &["v -P 9 0 4K"]);
    let (status, said, _) = script(dir.path(), &["--keep-going", "-q", "disk.img"], lines);
    assert_eq!((status, said.as_str()), (3, ""));
    does(dir.path(), "disk.img", &["v -P 7 0 4K"]);
    let (status, ..) = script(dir.path(), &["-r", "disk.img"], "read 0 4K\nsleep 1\nsleep 1ms\n");
    assert_eq!(status, 0);
    let (status, _, error) = script(dir.path(), &["-r", "disk.img"], "sleep soon\n");
    assert!(status == 2 && error.contains("'soon' is not a time: give 10s, 500ms"), "{error}");
    let (status, _, error) = script(dir.path(), &["-r", "disk.img"], "write 0 4K\n");
    assert!(status == 1 && error.contains("it is read-only"), "{error}");
}

fn info(dir: &Path, target: &str) -> (String, Value) {
    let table = ["info", target];
    let json = ["info", "--json", target];
    let [table, json] = [&table[..], &json[..]].map(|args| {
        let mut command = ringway();
        command.args(args).current_dir(dir);
        let output = run(command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    });
    (table, serde_json::from_str(&json).unwrap_or_else(|e| panic!("{e}:\n{json}")))
}

#[test]
fn a_served_disk_is_described() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--queues", "3", "--serial", "INFO"];
    let daemon = Daemon::serve(dir.path(), &args);
    let (table, info) = info(dir.path(), "s");
    assert_eq!((&info["bytes"], &info["serial"]), (&(1 << 20).into(), &"INFO".into()), "{info:#}");
    assert_eq!((&info["queues"]["server"], &info["queues"]["disk"]), (&3.into(), &3.into()));
    assert_eq!((&info["read_only"], &info["blocks"]["logical"]), (&false.into(), &512.into()));
    assert_eq!(info["server"]["pid"], daemon.pid());
    assert!(info["server"]["resident_bytes"].as_u64().unwrap() > 1 << 20, "{info:#}");
    assert!(info["limits"]["write_zeroes_bytes"].as_u64().unwrap() >= 1 << 20);
    let has = |list: &str, name: &str| {
        info[list].as_array().unwrap().iter().any(|feature| feature["name"] == name)
    };
    for name in ["VERSION_1", "MQ", "FLUSH", "DISCARD", "RING_PACKED", "EVENT_IDX"] {
        assert!(has("virtio_features", name) && table.contains(name), "{name}: {table}");
    }
    for name in ["CONFIG", "REPLY_ACK", "CONFIGURE_MEM_SLOTS"] {
        assert!(has("vhost_user_features", name) && table.contains(name), "{name}: {table}");
    }
    assert!(table.is_ascii() && !table.contains('\x1b'), "{table}");
    daemon.stop();
}

#[test]
fn a_foreign_server_is_described() {
    let dir = folder();
    let export = "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=q,writable=on";
    let server = Command::new("qemu-storage-daemon")
        .args(["--blockdev", "driver=file,filename=disk.img,node-name=f", "--export", export])
        .current_dir(dir.path())
        .spawn();
    let Ok(mut server) = server else {
        return skip(Need::StorageDaemon, "apt install qemu-system-common");
    };
    while !dir.path().join("q").exists() && server.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let (table, info) = info(dir.path(), "vhost-user:q");
    does(dir.path(), "vhost-user:q", &["w -P place 0 64K", "f", "v -P place 0 64K"]);
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(info["bytes"], 1 << 20, "{info:#}");
    assert_eq!(info["server"]["name"].as_str().unwrap().get(..12), Some("qemu-storage"));
    assert!(table.contains("VERSION_1") && table.contains("seg"), "{table}");
}

#[test]
fn an_image_is_described_and_nothing_is_changed() {
    let dir = folder();
    let sparse = std::fs::File::create(dir.path().join("sparse")).unwrap();
    sparse.set_len(8 << 20).unwrap();
    sparse.write_all_at(&[1; 4096], 4 << 20).unwrap();
    sparse.sync_all().unwrap();
    let before = snapshot(dir.path());
    let (table, info) = info(dir.path(), "sparse");
    assert_eq!((&info["kind"], &info["bytes"]), (&"file".into(), &(8 << 20).into()), "{info:#}");
    let extents = &info["extents"];
    let sum = ["data_bytes", "hole_bytes"].map(|key| extents[key].as_u64().unwrap());
    assert_eq!(sum.iter().sum::<u64>(), 8 << 20, "{extents}");
    assert!(table.contains("of data") && table.contains("O_DIRECT"), "{table}");
    assert_eq!(snapshot(dir.path()), before);
    let mut command = ringway();
    command.args(["info", "missing"]).current_dir(dir.path());
    let output = run(command);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("missing"));
}

#[test]
fn shells_get_completions_that_they_can_read() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let mut command = ringway();
        command.args(["completions", shell]);
        let output = run(command);
        let script = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{shell}");
        for word in ["copy", "info", "in-flight", "target-is-zero"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let mut command = Command::new("bash");
    let test = "source <(\"$0\" completions bash) && COMP_WORDS=(ringway co) COMP_CWORD=1 && \
                _ringway ringway co ringway && echo \"${COMPREPLY[@]}\"";
    command.args(["-c", test, env!("CARGO_BIN_EXE_ringway")]);
    let output = run(command);
    let words = text(&output.stdout);
    assert!(
        words.contains("copy") && words.contains("completions"),
        "{words} {}",
        text(&output.stderr)
    );
}

#[test]
fn manual_pages_tell_examples_and_exit_statuses() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = ringway();
    command.args(["man", "pages"]).current_dir(dir.path());
    assert_eq!(run(command).status.code(), Some(0));
    for page in ["man5/ringway.toml.5", "man7/ringway-control.7"] {
        assert!(dir.path().join("pages").join(page).is_file(), "{page}");
    }
    let pages = dir.path().join("pages/man1");
    for name in ["ringway", "ringway-serve", "ringway-copy", "ringway-io", "ringway-info"] {
        let page = std::fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
        for part in [".TH", "NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS", "EXAMPLES"] {
            assert!(page.contains(part), "{name}: {part}");
        }
        let groff = Command::new("groff")
            .args(["-man", "-ww", "-Tutf8"])
            .arg(pages.join(format!("{name}.1")))
            .output();
        let Ok(groff) = groff else {
            skip(Need::Groff, "apt install groff-base");
            continue;
        };
        assert_eq!(text(&groff.stderr), "", "{name}");
        assert!(text(&groff.stdout).contains("wrong usage"), "{name}");
    }
}
