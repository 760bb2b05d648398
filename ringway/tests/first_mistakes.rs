//! What somebody does who comes from other programs, or does for the first time.

use crate::common::{Daemon, copies, copy, folder, names, ringway, run, says, text};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

/// Letters of `qemu-img` mean here what they mean there.
#[test]
fn letters_mean_what_they_do_in_qemu_img() {
    let dir = folder();
    let dir = dir.path();
    says(dir, &["create", "-f", "qcow2", "-s", "1G", "base"], 0, &["base: made, 1 GiB, qcow2"]);
    let clone = ["create", "-f", "qcow2", "-b", "base", "-F", "qcow2", "vm"];
    says(dir, &clone, 0, &["vm: made, 1 GiB, qcow2, based on base (qcow2)"]);
    // It is no --force.
    says(dir, &clone, 1, &["vm: it is there already. Overwrite it with --force"]);
    says(dir, &["create", "-f", "qcow2", "g", "10G"], 0, &["g: made, 10 GiB, qcow2"]);
    says(dir, &["create", "n", "1G", "--size", "2G"], 2, &["cannot be used with"]);
    says(dir, &["create", "n"], 2, &["required arguments"]);
    says(dir, &["copy", "-f", "raw", "-O", "qcow2", "disk.img", "c"], 0, &["of qcow2"]);
    says(dir, &["copy", "-c", "disk.img", "d"], 0, &["compressed by zlib"]);
    says(dir, &["copy", "-f", "qcow2", "-O", "raw", "c", "e"], 0, &["1 MiB copied"]);
    says(dir, &["copy", "-f", "disk.img", "e"], 2, &["invalid value 'disk.img'", "raw, qcow2"]);
    says(dir, &["copy", "-c", "zstd", "disk.img", "f"], 2, &["write --compress=zstd"]);
    says(dir, &["info", "-f", "qcow2", "c"], 0, &["qcow2"]);
    says(dir, &["create", "--help"], 0, &["--backing base.qcow2", "a clone, in a moment"]);
    assert_eq!(names(dir), ["base", "c", "d", "disk.img", "e", "g", "vm"]);
}

#[test]
fn words_of_other_programs_are_answered_with_a_pointer() {
    let dir = folder();
    for (args, tip) in [
        (&["convert", "a", "b"][..], "`ringway copy` converts"),
        (&["rebase", "a"], "`ringway flatten`"),
        (&["map", "a"], "`ringway info --json`"),
        (&["info", "--output=json", "a"], "--json"),
        (&["serve", "--log-level", "debug", "a"], "-v, -vv and -q"),
        (&["nbd", "a", "--tls-psk", "x"], "by certificates"),
        (&["ctl", "limit", "d", "--none"], "--iops none"),
        (&["create", "x", "--size", "-5"], "-5 is no size"),
        (&["resize", "x", "+10G"], "name the size that it is to have"),
        (&["ctl", "resize", "x", "+10G"], "name the size that it is to have"),
        (&["create", "x", "-5"], "-5 is no size"),
        (&["create", "-f", "qcow2", "-o", "preallocation=full", "x", "1G"], "--cluster-size"),
        (&["create", "-u", "-b", "a", "x"], "looked at"),
        (&["copy", "-o", "cluster_size=4k", "a", "b"], "--cluster-size"),
        (&["copy", "-p", "a", "b"], "by itself"),
        (&["copy", "-n", "a", "b"], "an image that is there"),
        (&["check", "-r", "all", "a"], "`qemu-img check -r`"),
        (&["info", "-U", "a"], "locks"),
        (&["info", "--backing-chain", "a"], "--format qcow2"),
        (&["resize", "--preallocation=full", "a", "1G"], "`ringway copy --prealloc full`"),
        (&["commit", "-d", "a"], "stays"),
        (&["amend", "a"], "`qemu-img amend`"),
        (&["bitmap", "a"], "`qemu-img bitmap`"),
        (&["dd", "if=a", "of=b"], "`ringway copy`"),
        (&["list"], "`ringway ctl list`"),
        (&["pause", "a"], "`ringway ctl pause`"),
    ] {
        let said = says(dir.path(), args, 2, &["tip: ", tip]);
        assert!(!said.contains("as a value, use '--") && !said.contains("similar"), "{said}");
    }
    assert_eq!(names(dir.path()), ["disk.img"]);
}

#[test]
fn a_name_of_another_format_is_raw_with_a_warning() {
    let dir = folder();
    let dir = dir.path();
    let warning = "it will be a raw image: of its name only .qcow2 says a format";
    says(dir, &["create", "a.vmdk", "--size", "1M"], 0, &["a.vmdk", warning, "-O vmdk"]);
    says(dir, &["copy", "disk.img", "b.VHDX"], 0, &["b.VHDX", warning]);
    for args in [
        &["create", "c.vmdk", "--size", "1M", "--format", "raw"][..],
        &["copy", "disk.img", "d.vdi", "--to-format", "raw"],
        &["copy", "disk.img", "e.img"],
        &["copy", "disk.img", "f.qcow2"],
    ] {
        assert!(!says(dir, args, 0, &[]).contains("raw image"), "{args:?}");
    }
}

#[test]
fn e97_a_raw_image_is_served_under_the_name_of_another_format_with_a_warning() {
    let dir = folder();
    for (name, more, warned) in [
        ("a.qcow2", &["--size", "1M"][..], true),
        ("a.qcow2", &[], true),
        ("a.qcow2", &["--format", "raw"], false),
        ("b.VMDK", &["--size", "1M"], true),
        ("c.img", &["--size", "1M"], false),
        ("d", &["--size", "1M"], false),
    ] {
        let daemon = Daemon::serve(dir.path(), &[&[name, "--socket", "s"][..], more].concat());
        let log = daemon.log();
        let said = log.contains(&format!("{name}: it is a raw image, whatever its name says"));
        assert_eq!(said, warned, "{name} {more:?}: {log}");
        daemon.stop();
    }
}

#[test]
fn options_that_contradict_each_other_are_wrong_usage() {
    let dir = folder();
    let dir = dir.path();
    for args in [
        &["create", "n", "--size", "1M", "--cluster-size", "4K"][..],
        &["create", "n", "--format", "raw", "--backing", "disk.img"],
        &["copy", "disk.img", "n.qcow2", "--prealloc", "full"],
        &["copy", "disk.img", "n", "--compress", "--to-format", "raw"],
        &["copy", "disk.img", "n", "--backing-root", "."],
        &["copy", "disk.img", "n", "--reflink", "always", "--prealloc", "full"],
        &["copy", "disk.img", "n", "--journal", "disk.img"],
        &["copy", "disk.img", "n", "--ceph-user", "me"],
        &["copy", "disk.img", "-"],
        &["copy", "-", "n"],
    ] {
        says(dir, args, 2, &["error: "]);
        assert_eq!(names(dir), ["disk.img"], "{args:?}");
    }
    says(dir, &["copy", "disk.img", "./-"], 0, &[]);
    assert!(dir.join("-").is_file());
}

#[test]
fn a_raw_image_is_resized_as_its_file() {
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("disk.img"), vec![7; 1 << 20]).unwrap();
    says(dir, &["resize", "disk.img", "4M"], 0, &["disk.img: 4 MiB by now, it had 1 MiB"]);
    says(dir, &["resize", "disk.img", "1M"], 1, &["loses all that lies beyond 1 MiB", "--shrink"]);
    says(dir, &["resize", "--shrink", "disk.img", "1M"], 0, &["1 MiB by now"]);
    assert!(std::fs::read(dir.join("disk.img")).unwrap() == vec![7; 1 << 20]);
    says(dir, &["resize", "disk.img", "1M"], 0, &["it has 1 MiB already"]);
    says(dir, &["resize", "-f", "qcow2", "disk.img", "4M"], 1, &["it is no qcow2 image"]);
    says(dir, &["resize", "disk.img", "1000"], 1, &["1000 bytes are not", "as 512 are"]);
    says(dir, &["create", "new", "1025"], 1, &["1025 bytes, is not", "as 1024 is"]);
    for (size, why) in [("8E", "less than 8 EiB (8E)"), ("7E", "takes no file as long as 7 EiB")] {
        let said = says(dir, &["resize", "disk.img", size], 1, &["disk.img: ", why]);
        assert!(!said.contains("os error"), "{said}");
    }
    std::fs::write(dir.join("v"), [b"KDMV", &[0; 2044][..]].concat()).unwrap();
    says(dir, &["resize", "v", "4M"], 1, &["looks like", "`qemu-img resize`", "--format raw"]);
    let daemon = Daemon::serve(dir, &["disk.img", "--socket", "s"]);
    says(dir, &["resize", "disk.img", "4M"], 1, &["it is in use by"]);
    daemon.stop();
    // Many times as large in one call.
    says(dir, &["create", "a.qcow2", "--size", "180M"], 0, &[]);
    says(dir, &["resize", "a.qcow2", "1T"], 0, &["1 TiB by now, it had 180 MiB"]);
    says(dir, &["check", "a.qcow2"], 0, &["whole"]);
}

/// Its guest could have any file of the host named in the header, and changed.
#[test]
fn b16_a_raw_image_that_begins_as_qcow2_is_not_resized_as_one() {
    let dir = folder();
    let dir = dir.path();
    says(dir, &["create", "image", "-f", "qcow2", "-b", "disk.img", "-F", "raw"], 0, &[]);
    std::fs::copy(dir.join("image"), dir.join("named.qcow2")).unwrap();
    let mut raw = std::fs::read(dir.join("image")).unwrap();
    raw.resize(4 << 20, 7);
    std::fs::write(dir.join("raw"), &raw).unwrap();
    for name in ["raw", "image"] {
        let before = std::fs::read(dir.join(name)).unwrap();
        for args in [&["8M"][..], &["1M", "--shrink"]] {
            let words = ["looks like a qcow2 image", "add --format qcow2", "add --format raw"];
            says(dir, &[&["resize", name][..], args].concat(), 1, &words);
        }
        assert!(std::fs::read(dir.join(name)).unwrap() == before);
    }
    says(dir, &["resize", "raw", "8M", "--format", "raw"], 0, &["8 MiB by now, it had 4 MiB"]);
    raw.resize(8 << 20, 0);
    assert!(std::fs::read(dir.join("raw")).unwrap() == raw);
    says(dir, &["resize", "image", "8M", "-f", "qcow2"], 0, &["8 MiB by now, it had 1 MiB"]);
    says(dir, &["resize", "named.qcow2", "8M"], 0, &["8 MiB by now, it had 1 MiB"]);
}

/// Blocks that a file takes, in bytes.
fn taken(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

#[test]
fn a_sparse_file_stays_as_small_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    let file = std::fs::File::create(&from).unwrap();
    file.set_len(32 << 20).unwrap();
    for at in (0..32 << 20).step_by(128 << 10) {
        file.write_all_at(&[7; 4096], at).unwrap();
    }
    file.sync_all().unwrap();
    copies(dir.path(), &["--verify", "--reflink", "never", "a", "b"]);
    crate::common::same(&from, &to);
    // Its extents may take a block or so of the file system's own.
    assert!(taken(&to) <= 2 * taken(&from), "{} of {}", taken(&to), taken(&from));
}

#[test]
fn names_that_are_long_or_no_text_are_copied() {
    let dir = folder();
    let long = "n".repeat(255);
    for name in [OsStr::new(&long), OsStr::from_bytes(b"caf\xe9.img")] {
        let copy = |from: &OsStr, to: &OsStr| {
            let mut command = ringway();
            command.arg("copy").arg(from).arg(to).current_dir(dir.path());
            let output = run(command);
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        };
        copy(OsStr::new("disk.img"), name);
        copy(name, OsStr::new("back"));
        crate::common::same(&dir.path().join("disk.img"), &dir.path().join("back"));
        std::fs::remove_file(dir.path().join("back")).unwrap();
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    // With a journal of a name that there can be, by which it is known again.
    let mut command = ringway();
    command.args(["copy", "disk.img", &long, "--prealloc", "full"]).current_dir(dir.path());
    assert_eq!(run(command).status.code(), Some(0));
    says(dir.path(), &["copy", "disk.img", &long], 1, &["it is there already"]);
    assert_eq!(names(dir.path()), ["disk.img", &long], "no journal is left");
}

#[test]
fn e45_control_characters_of_names_do_not_reach_the_terminal() {
    let dir = folder();
    let dir = dir.path();
    let name = "a\u{1b}[31m\nb";
    std::fs::copy(dir.join("disk.img"), dir.join(name)).unwrap();
    let to = "c\u{7}\u{9b}d";
    for (args, status) in [
        (&["copy", name, to][..], 0),
        (&["copy", name, to], 1),
        (&["copy", name, name], 1),
        (&["copy", "--force", to, name], 0),
        (&["copy", &format!("no{name}"), to], 1),
        (&["copy", "disk.img", "e.qcow2", "--journal", name], 2),
        (&["copy", "disk.img", "e", "--journal", name], 1),
        (&["info", name], 0),
        (&["info", &format!("vhost-user:{name}")], 1),
        (&["info", &format!("no{name}")], 1),
        (&["create", name, "--size", "1M"], 1),
        (&["create", "--force", name, "--size", "1M"], 0),
        (&["resize", name, "2M"], 0),
        (&["check", name], 1),
    ] {
        let said = says(dir, args, status, &[]);
        let bad = |c: char| c.is_control() && c != '\n';
        assert!(!said.contains(bad) && !said.contains("m\nb"), "{args:?}: {said:?}");
    }
}

#[test]
fn f31_an_export_whose_size_is_no_multiple_of_512_is_served_in_whole_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let words = ["-f", "-U", "n.sock", "memory", "1000100"];
    let Some(_server) = crate::common::nbd::server(dir, "nbdkit", &words) else { return };
    let export = format!("nbd:unix:{}", dir.join("n.sock").display());
    let args = [export.as_str(), "--socket", "s"];
    let daemon = Daemon::serve(dir, &args);
    let said =
        "the export has 1000100 bytes, which is no whole number of blocks of 512: the last 164";
    assert!(daemon.log().contains(said), "{}", daemon.log());
    let last =
        ["io", "vhost-user:s", "-c", "write -P 5 999424 512", "-c", "verify -P 5 999424 512"];
    says(dir, &last, 0, &[]);
    daemon.stop();
    let daemon = Daemon::serve(dir, &[&args[..], &["--block-size", "4096"]].concat());
    says(dir, &["info", "vhost-user:s"], 0, &["(999424)"]);
    daemon.stop();
    // A copy would lack the end without a word.
    says(dir, &["copy", &export, "c"], 1, &["the last 164", "would not be copied"]);
    assert!(!dir.join("c").exists());
}

#[test]
fn the_block_size_that_is_asked_for_is_told_to_nbd_clients() {
    let dir = folder();
    let dir = dir.path();
    for (more, block) in [(&[][..], 512), (&["--block-size", "4096"], 4096)] {
        let mut command = ringway();
        command.args(["nbd", "disk.img", "--listen", "unix:n.sock"]).args(more).current_dir(dir);
        let daemon = Daemon::start(command);
        let export = format!("nbd:unix:{}", dir.join("n.sock").display());
        let info = says(dir, &["info", "--json", &export], 0, &[]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["nbd"]["min_block"], block, "{info}");
        daemon.stop();
    }
}

#[test]
fn a_disk_that_is_no_whole_number_of_blocks_is_resized_not_truncated() {
    let dir = tempfile::tempdir().unwrap();
    says(dir.path(), &["create", "a.qcow2", "--size", "1000448"], 0, &[]);
    let serve = ["serve", "a.qcow2", "--format", "qcow2", "--socket", "s", "--block-size", "4096"];
    let said = says(dir.path(), &serve, 1, &["`ringway resize a.qcow2 1003520`"]);
    assert!(!said.contains("truncate"), "{said}");
    says(dir.path(), &["resize", "a.qcow2", "1003520"], 0, &[]);
    Daemon::serve(dir.path(), &serve[1..]).stop();
}

#[test]
fn a_clone_that_is_smaller_than_its_base_is_made_with_a_warning() {
    let dir = folder();
    let dir = dir.path();
    let words = "cannot be read through it";
    says(dir, &["create", "a.qcow2", "-b", "disk.img", "--size", "512K"], 0, &[words]);
    let args = ["b.qcow2", "--base", "disk.img", "--size", "512K", "--socket", "s"];
    let daemon = Daemon::serve(dir, &args);
    assert!(daemon.log().contains(words), "{}", daemon.log());
    daemon.stop();
}

#[test]
fn whoever_waits_for_an_image_in_use_is_told_so_and_a_full_disk_is_named() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    says(dir.path(), &["copy", "disk.img", "b"], 1, &["is in use by", "waiting for 2 s"]);
    daemon.stop();
    std::fs::write(dir.path().join("disk.img"), vec![7; 1 << 20]).unwrap();
    for to in ["b.img", "b.qcow2"] {
        let mut limited = Command::new("sh");
        let script = format!("ulimit -f 64; trap '' XFSZ; exec \"$0\" copy disk.img {to}");
        limited.args(["-c", &script]).arg(ringway().get_program()).current_dir(dir.path());
        let output = run(limited);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(to), "{}", text(&output.stderr));
    }
}

/// Whoever follows one of them after the other meets one folder, which systemd makes, too.
#[test]
fn the_sockets_of_readme_and_manuals_are_in_one_folder() {
    for (name, text) in [
        ("README.md", include_str!("../../README.md")),
        ("manual.md", include_str!("../../docs/manual.md")),
        ("operating.md", include_str!("../../docs/operating.md")),
    ] {
        let ends = |c: char| !c.is_alphanumeric() && !"/._-".contains(c);
        let sockets =
            text.split(ends).filter(|word| word.starts_with('/') && word.ends_with(".sock"));
        let sockets: Vec<_> = sockets.collect();
        assert!(!sockets.is_empty(), "{name}");
        for socket in sockets {
            assert!(socket.starts_with("/run/ringway/"), "{name}: {socket}");
        }
    }
}

#[test]
fn metrics_for_other_hosts_need_a_word() {
    let dir = folder();
    let serve = ["serve", "disk.img", "--socket", "s", "--metrics", "0.0.0.0:0"];
    says(dir.path(), &serve, 1, &["--metrics 0.0.0.0:0: ", "add --metrics-remote"]);
    Daemon::serve(dir.path(), &[&serve[1..], &["--metrics-remote"]].concat()).stop();
    let toml = "metrics = '0.0.0.0:0'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n";
    std::fs::write(dir.path().join("d.toml"), toml).unwrap();
    let what = ["line 1: metrics 0.0.0.0:0: ", "metrics-remote = true"];
    says(dir.path(), &["serve", "--config", "d.toml"], 1, &what);
    std::fs::write(dir.path().join("d.toml"), format!("metrics-remote = true\n{toml}")).unwrap();
    Daemon::serve(dir.path(), &["--config", "d.toml"]).stop();
}

#[test]
fn a_start_that_would_run_out_of_descriptors_says_the_limit_first() {
    let dir = folder();
    let disk = |number: usize| {
        std::fs::copy(dir.path().join("disk.img"), dir.path().join(format!("{number}.img")))
            .unwrap();
        format!("[[disk]]\nimage = '{number}.img'\nsocket = '{number}.sock'\nqueues = 1\n")
    };
    let toml: String = (0..20).map(disk).collect();
    std::fs::write(dir.path().join("d.toml"), toml).unwrap();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 64; exec \"$0\" serve --config d.toml"]);
    limited.arg(ringway().get_program()).current_dir(dir.path());
    let output = run(limited);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in
        ["may have 64 open files, and 20 disks take 96", "4 each, and 2 more", "LimitNOFILE="]
    {
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(said.lines().count(), 1, "before the first disk is opened: {said}");
}

#[test]
fn numbers_of_requests_take_units_and_bytes_that_are_durable_are_counted_for_qcow2() {
    let dir = folder();
    let dir = dir.path();
    says(dir, &["create", "a.qcow2", "--size", "16M"], 0, &[]);
    let args = ["a.qcow2", "--format", "qcow2", "--socket", "s", "--control", "c", "--iops", "10k"];
    let daemon = Daemon::serve(dir, &[&args[..], &["--cache", "writethrough"]].concat());
    let limits = says(dir, &["ctl", "--control", "c", "list", "--json"], 0, &[]);
    assert!(limits.contains("10000"), "{limits}");
    says(dir, &["io", "vhost-user:s", "-c", "write 0 1M", "-c", "write 0 1M"], 0, &[]);
    let stats = says(dir, &["ctl", "--control", "c", "stats", "--json"], 0, &[]);
    let stats: Value = serde_json::from_str(&stats).unwrap();
    let mut all = Vec::new();
    numbers(&stats, "durable_bytes", &mut all);
    assert_eq!(all.iter().max(), Some(&(2 << 20)), "{stats}");
    daemon.stop();
}

/// What is called `name` anywhere in it.
fn numbers(value: &Value, name: &str, found: &mut Vec<u64>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get(name).and_then(Value::as_u64));
            fields.values().for_each(|value| numbers(value, name, found));
        }
        Value::Array(values) => values.iter().for_each(|value| numbers(value, name, found)),
        _ => {}
    }
}

#[test]
fn what_bench_fills_a_file_with_cannot_be_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let bench = ["bench", "b.img", "--size", "4M", "--runtime", "50ms"];
    says(dir.path(), &bench, 0, &["IOPS"]);
    let output = copy(dir.path(), &["--json", "--compress=zstd", "b.img", "b.qcow2"]);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(summary["file_bytes"].as_u64() >= Some(4 << 20), "{summary}");
    // Nor are there figures of nothing.
    let nothing = ["bench", "null:1G,latency=2000000us", "--runtime", "50ms"];
    let said = says(dir.path(), &nothing, 1, &["no request was completed"]);
    assert!(!said.contains("IOPS"), "{said}");
}

/// A daemon of two disks, and the script of `shell`.
fn completed(shell: &str) -> (tempfile::TempDir, Daemon) {
    let dir = folder();
    std::fs::copy(dir.path().join("disk.img"), dir.path().join("vm7.img")).unwrap();
    let toml = "control = 'c'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n[[disk]]\nimage = 'vm7.img'\n\
                socket = 't'\n";
    std::fs::write(dir.path().join("d.toml"), toml).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "d.toml"]);
    let script = says(dir.path(), &["completions", shell], 0, &[]);
    std::fs::write(dir.path().join("script"), script).unwrap();
    (dir, daemon)
}

/// Which images `words`, a script of `shell`, prints.
fn offered(dir: &Path, shell: &[&str], words: &str) -> String {
    let mut command = Command::new(shell[0]);
    let program = ringway();
    let folder = Path::new(program.get_program()).parent().unwrap();
    let path = std::env::join_paths([folder, Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    command.args(&shell[1..]).arg(words).current_dir(dir).env("PATH", path).env("HOME", dir);
    let output = run(command);
    let images: Vec<_> = text(&output.stdout)
        .lines()
        .filter(|line| line.contains("img"))
        .map(str::to_owned)
        .collect();
    assert!(output.stderr.is_empty(), "{words}: {}", text(&output.stderr));
    images.join(" ")
}

#[test]
fn bash_completes_the_disks_of_a_daemon() {
    let (dir, daemon) = completed("bash");
    for (words, images) in [
        ("ringway ctl --control c pause ''", "disk.img vm7.img"),
        ("ringway ctl --control = c pause v", "vm7.img"),
        ("ringway ctl --control c list ''", ""),
    ] {
        let line = format!(
            ". ./script; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _ringway_and_disks ringway \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        assert_eq!(offered(dir.path(), &["bash", "-c"], &line), images, "{words}");
    }
    daemon.stop();
}

#[test]
fn fish_completes_the_disks_of_a_daemon() {
    let (dir, daemon) = completed("fish");
    for (words, images) in [
        ("ringway ctl --control c pause ", "disk.img vm7.img"),
        ("ringway ctl --control=c stats v", "vm7.img"),
        ("ringway ctl pause ", ""),
    ] {
        // Without files, which are offered beside where nothing forbids it.
        let line = format!("source script; complete -C '{words}' | string match -v '*/*'");
        assert_eq!(offered(dir.path(), &["fish", "--no-config", "-c"], &line), images, "{words}");
    }
    daemon.stop();
}

#[test]
fn zsh_completes_the_disks_of_a_daemon() {
    let (dir, daemon) = completed("zsh");
    let script = std::fs::read_to_string(dir.path().join("script")).unwrap();
    let called = |line: &&str| line.contains("disk -- ") && line.contains(":_ringway_disks'");
    assert_eq!(script.lines().filter(called).count(), 11, "{script}");
    for (words, images) in [
        ("ringway ctl --control c pause ", "disk.img vm7.img"),
        ("ringway ctl --control=c pause v", "disk.img vm7.img"),
        ("ringway ctl pause ", ""),
    ] {
        // compadd keeps what begins as the word does.
        let line = format!(
            "compdef() {{ :; }}; compadd() {{ print -l $disks; }}; . ./script; LBUFFER='{words}'; _ringway_disks"
        );
        assert_eq!(offered(dir.path(), &["zsh", "-fc"], &line), images, "{words}");
    }
    daemon.stop();
}
