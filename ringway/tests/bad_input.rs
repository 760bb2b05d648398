//! Bad input: one clear message, the right exit status, nothing created or changed.

use crate::common::{Daemon, folder, read, ringway, run, snapshot, text, write};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Failures.
const FAILED: i32 = 1;

/// Wrong options.
const USAGE: i32 = 2;

/// Nobody in particular.
const NOBODY: u32 = 65534;

/// Runs a command in `dir` that must fail with `status` and one message that holds all `fragments`.
fn refused(dir: &Path, mut command: Command, status: i32, fragments: &[&str]) {
    let before = snapshot(dir);
    command.current_dir(dir);
    let command_line = format!("{command:?}");
    let output = run(command);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{command_line}\n{message}");
    assert_eq!(message.matches("error:").count(), 1, "not one message:\n{command_line}\n{message}");
    assert!(message.starts_with("error: "), "{command_line}\n{message}");
    assert!(
        output.stdout.is_empty(),
        "it was not ready:\n{command_line}\n{}",
        text(&output.stdout)
    );
    for fragment in fragments {
        assert!(message.contains(fragment), "'{fragment}' is not in:\n{command_line}\n{message}");
    }
    if status == FAILED {
        assert_eq!(message.lines().count(), 1, "not one line:\n{command_line}\n{message}");
    }
    assert_eq!(snapshot(dir), before, "something was created or changed:\n{command_line}");
}

fn serve_refused(dir: &Path, args: &[&str], status: i32, fragments: &[&str]) {
    let mut command = ringway();
    command.arg("serve").args(args);
    refused(dir, command, status, fragments);
}

fn config_refused(toml: &str, fragments: &[&str]) {
    let dir = folder();
    std::fs::write(dir.path().join("disks.toml"), toml).unwrap();
    serve_refused(dir.path(), &["--config", "disks.toml"], FAILED, fragments);
}

#[test]
fn missing_file() {
    let dir = folder();
    let what = ["missing.img", "no such file", "--size"];
    serve_refused(dir.path(), &["missing.img", "--socket", "s"], FAILED, &what);
}

#[test]
fn size_not_a_multiple_of_512() {
    let dir = folder();
    std::fs::write(dir.path().join("odd.img"), vec![0; 1000]).unwrap();
    let what = ["odd.img", "1000 bytes", "not a multiple of 512", "truncate"];
    serve_refused(dir.path(), &["odd.img", "--socket", "s"], FAILED, &what);
    let what = ["new.img", "1000", "multiple of 512"];
    serve_refused(dir.path(), &["new.img", "--size", "1000", "--socket", "s"], FAILED, &what);
}

#[test]
fn empty_file_and_folder_and_pipe_are_no_disks() {
    let dir = folder();
    std::fs::write(dir.path().join("empty.img"), []).unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    let _socket = UnixListener::bind(dir.path().join("other")).unwrap();
    serve_refused(dir.path(), &["empty.img", "--socket", "s"], FAILED, &["empty.img", "truncate"]);
    serve_refused(dir.path(), &["sub", "--socket", "s"], FAILED, &["sub", "folder"]);
    serve_refused(dir.path(), &["other", "--socket", "s"], FAILED, &["other", "socket"]);
}

#[test]
fn busy_socket() {
    let dir = folder();
    let _living = UnixListener::bind(dir.path().join("s")).unwrap();
    let what = ["s: ", "another process is listening", "another path"];
    serve_refused(dir.path(), &["disk.img", "--socket", "s"], FAILED, &what);
    // An image that was made for it does not stay.
    serve_refused(dir.path(), &["new.img", "--size", "1M", "--socket", "s"], FAILED, &what);
}

#[test]
fn socket_path_that_is_taken_by_a_file() {
    let dir = folder();
    std::fs::write(dir.path().join("precious"), "data").unwrap();
    let what = ["precious", "not a socket", "another path"];
    serve_refused(dir.path(), &["disk.img", "--socket", "precious"], FAILED, &what);
    serve_refused(dir.path(), &["disk.img", "--socket", "disk.img"], FAILED, &["not a socket"]);
}

#[test]
fn socket_path_too_long() {
    let dir = folder();
    let long = "x".repeat(120);
    let what = ["too long", "107", "shorter"];
    serve_refused(dir.path(), &["disk.img", "--socket", &long], FAILED, &what);
    serve_refused(dir.path(), &["new.img", "--size", "1M", "--socket", &long], FAILED, &what);
}

#[test]
fn missing_folder() {
    let dir = folder();
    let what = ["no/s", "folder does not exist: make it"];
    serve_refused(dir.path(), &["disk.img", "--socket", "no/s"], FAILED, &what);
    serve_refused(dir.path(), &["new.img", "--size", "1M", "--socket", "no/s"], FAILED, &what);
    let what = ["no/new.img", "folder does not exist"];
    serve_refused(dir.path(), &["no/new.img", "--size", "1M", "--socket", "s"], FAILED, &what);
}

/// The program as somebody without rights, in a folder that belongs to somebody else. Whoever runs
/// the tests as root gets them carried out by nobody.
fn without_rights(dir: &Path, image_mode: u32) -> Command {
    std::fs::set_permissions(dir.join("disk.img"), PermissionsExt::from_mode(image_mode)).unwrap();
    // SAFETY: it only answers.
    if unsafe { libc::geteuid() } != 0 {
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o555)).unwrap();
        return ringway();
    }
    std::fs::set_permissions(dir, PermissionsExt::from_mode(0o755)).unwrap();
    // The target folder may be out of nobody's reach.
    let program = dir.join("ringway");
    std::fs::copy(env!("CARGO_BIN_EXE_ringway"), &program).unwrap();
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY);
    command
}

#[test]
fn no_permission_for_the_image() {
    let dir = folder();
    let mut command = without_rights(dir.path(), 0o400);
    // SAFETY: it only answers.
    if unsafe { libc::geteuid() } != 0 {
        command = without_rights(dir.path(), 0o000);
    }
    command.args(["serve", "disk.img", "--socket", "s"]);
    // Whoever is root may lack a right all the same.
    let what = [
        "disk.img",
        "no permission",
        "reading and writing",
        "--read-only",
        "cgroup",
        "DeviceAllow=",
    ];
    refused(dir.path(), command, FAILED, &what);
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn no_permission_for_the_socket() {
    let dir = folder();
    let mut command = without_rights(dir.path(), 0o666);
    command.args(["serve", "disk.img", "--socket", "s"]);
    refused(dir.path(), command, FAILED, &["s: ", "no permission", "another path"]);
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn no_permission_to_create_the_image() {
    let dir = folder();
    let mut command = without_rights(dir.path(), 0o666);
    command.args(["serve", "new.img", "--size", "1M", "--socket", "s"]);
    refused(dir.path(), command, FAILED, &["new.img", "no permission"]);
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
}

/// In one set of words for all commands, and not the kernel's.
#[test]
fn e96_tools_say_which_right_is_missing_and_where() {
    let dir = folder();
    let nothing = || PermissionsExt::from_mode(0o000);
    std::fs::copy(dir.path().join("disk.img"), dir.path().join("secret")).unwrap();
    std::fs::set_permissions(dir.path().join("secret"), nothing()).unwrap();
    std::fs::create_dir(dir.path().join("closed")).unwrap();
    std::fs::set_permissions(dir.path().join("closed"), nothing()).unwrap();
    let program = without_rights(dir.path(), 0o666).get_program().to_owned();
    let open = "secret: no permission to open it. Run as a user who may";
    let look =
        "no permission to look into its folder. Choose another one, or run as a user who may";
    let make = "b: no permission to make files in its folder. Choose another one";
    for (args, words) in [
        (&["check", "secret"][..], open),
        (&["commit", "secret"], open),
        (&["flatten", "secret"], open),
        (&["resize", "-f", "raw", "secret", "2M"], open),
        (&["copy", "secret", "b"], open),
        (&["create", "--force", "secret", "1M"], open),
        (&["copy", "disk.img", "b"], make),
        (&["copy", "disk.img", "closed/b"], look),
        (&["create", "closed/b", "1M"], look),
        (&["create", "no/b", "1M"], "no/b: there is no such folder: no"),
    ] {
        let mut command = Command::new(&program);
        command.args(args).current_dir(dir.path());
        // SAFETY: it only answers.
        if unsafe { libc::geteuid() } == 0 {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(FAILED), "{args:?}: {said}");
        assert!(said.contains(words) && !said.contains("os error"), "{args:?}: {said}");
    }
    for path in [dir.path(), &dir.path().join("closed")] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
}

#[test]
fn unsupported_engine() {
    let dir = folder();
    let socket = ["--socket", "s"];
    let args = [&["disk.img", "--engine", "magic"], &socket[..]].concat();
    serve_refused(dir.path(), &args, USAGE, &["'magic'", "--engine", "io_uring", "threads"]);
    let args = [&["disk.img", "--engine", "null"], &socket[..]].concat();
    serve_refused(dir.path(), &args, FAILED, &["--engine null", "lose every write", "auto"]);
    let args = [&["null:1G", "--engine", "threads"], &socket[..]].concat();
    serve_refused(dir.path(), &args, FAILED, &["--engine threads", "null"]);
    let args = [&["new.img", "--size", "1M", "--engine", "null"], &socket[..]].concat();
    serve_refused(dir.path(), &args, FAILED, &["--engine null"]);
}

#[test]
fn image_served_by_another_daemon() {
    let dir = folder();
    let _first = Daemon::serve(dir.path(), &["disk.img", "--socket", "first"]);
    let what = ["disk.img", "in use by process", "(ringway)", "stop the other one"];
    serve_refused(dir.path(), &["disk.img", "--socket", "s"], FAILED, &what);
    // Not even for reading, while somebody writes.
    serve_refused(dir.path(), &["disk.img", "--read-only", "--socket", "s"], FAILED, &what);
    // And a second disk on the first one's socket leaves image and socket alone.
    let what = ["first", "another process is listening"];
    serve_refused(dir.path(), &["null:1G", "--socket", "first"], FAILED, &what);
}

#[test]
fn no_o_direct_on_this_file_system() {
    let dir = folder();
    let args = ["/proc/version", "--read-only", "--cache", "none", "--socket", "s"];
    let what = ["/proc/version", "--cache none", "O_DIRECT", "--cache writeback"];
    serve_refused(dir.path(), &args, FAILED, &what);
}

#[test]
fn unknown_size_suffix() {
    let dir = folder();
    let args = ["new.img", "--size", "10X", "--socket", "s"];
    serve_refused(dir.path(), &args, USAGE, &["'10X'", "--size", "K, M, G or T"]);
    let what = ["null:much", "'much' is not a size"];
    serve_refused(dir.path(), &["null:much", "--socket", "s"], USAGE, &what);
}

#[test]
fn too_many_queues() {
    let dir = folder();
    let args = |number| ["disk.img", "--socket", "s", "--queues", number];
    serve_refused(dir.path(), &args("257"), USAGE, &["'257'", "--queues", "1 to 256"]);
    serve_refused(dir.path(), &args("0"), USAGE, &["'0'", "1 to 256"]);
    let args = |number| ["disk.img", "--socket", "s", "--queue-size", number];
    serve_refused(dir.path(), &args("1000"), USAGE, &["'1000'", "power of two", "32768"]);
}

#[test]
fn numbers_and_words_that_make_no_sense() {
    let dir = folder();
    let with =
        |option: &'static str, word: &'static str| ["disk.img", "--socket", "s", option, word];
    serve_refused(dir.path(), &with("--workers", "0"), USAGE, &["'0'", "--workers"]);
    serve_refused(dir.path(), &with("--block-size", "700"), USAGE, &["'700'", "512, 4096"]);
    serve_refused(dir.path(), &with("--cache", "warm"), USAGE, &["'warm'", "writeback"]);
    serve_refused(dir.path(), &with("--poll", "maybe"), USAGE, &["'maybe'", "adaptive"]);
    let long = "a serial of more than twenty bytes";
    serve_refused(dir.path(), &with("--serial", long), FAILED, &["serial", "20 bytes"]);
    let args = ["disk.img", "--socket", "s", "--poll", "never", "--poll-max-us", "9"];
    serve_refused(dir.path(), &args, USAGE, &["poll-max-us", "adaptive"]);
    let args = ["disk.img", "--socket", "s", "--poll", "always", "--poll-budget", "9"];
    serve_refused(dir.path(), &args, USAGE, &["poll-budget", "adaptive"]);
    serve_refused(dir.path(), &with("--poll-budget", "101"), USAGE, &["'101'", "--poll-budget"]);
}

#[test]
fn too_little_or_too_much_is_said() {
    let dir = folder();
    serve_refused(dir.path(), &[], USAGE, &["IMAGE", "--config"]);
    serve_refused(dir.path(), &["disk.img"], USAGE, &["--socket"]);
    let args = ["disk.img", "--config", "disks.toml"];
    serve_refused(dir.path(), &args, USAGE, &["--config", "cannot be used with", "[IMAGE]"]);
    let args = ["disk.img", "--blk-file", "disk.img", "--socket", "s"];
    serve_refused(dir.path(), &args, USAGE, &["--blk-file"]);
    let args = ["disk.img", "--fd", "3", "--socket", "s"];
    serve_refused(dir.path(), &args, USAGE, &["--fd", "--socket"]);
    refused(
        dir.path(),
        {
            let mut c = ringway();
            c.arg("sevre");
            c
        },
        USAGE,
        &["'sevre'", "serve"],
    );
}

#[test]
fn a_descriptor_that_is_no_socket() {
    let dir = folder();
    let what = ["--fd 77", "not an open socket"];
    serve_refused(dir.path(), &["disk.img", "--fd", "77"], FAILED, &what);
    serve_refused(dir.path(), &["disk.img", "--fd", "1"], USAGE, &["'1'", "--fd"]);
}

const DISK: &str = "[[disk]]\nimage = 'disk.img'\nsocket = 's'\n";

#[test]
fn a_configuration_that_is_malformed() {
    config_refused("workers = 2\n[[disk\n", &["disks.toml, line 2"]);
    config_refused(&format!("{DISK}quues = 4\n"), &["disks.toml, line 4", "quues", "queues"]);
    config_refused(&format!("worker = 4\n{DISK}"), &["disks.toml, line 1", "worker", "workers"]);
    config_refused(&format!("{DISK}queues = 'four'\n"), &["disks.toml, line 4", "string"]);
    config_refused(&format!("{DISK}queues = 400\n"), &["disks.toml, line 4", "1 to 256"]);
    config_refused(&format!("{DISK}size = '10X'\n"), &["disks.toml, line 4", "'10X'"]);
    let policy = format!("{DISK}on-enospc = 'hodl'\n");
    config_refused(&policy, &["disks.toml, line 4", "report, hold", "did you mean 'hold'?"]);
    config_refused(
        &format!("{DISK}limits = {{ bps = '99999999T' }}\n"),
        &["disks.toml, line 4", "too large"],
    );
    config_refused("[[disk]]\nsocket = 's'\n", &["disks.toml, line 1", "no image"]);
    config_refused("[[disk]]\nimage = 'disk.img'\n", &["disks.toml, line 1", "no socket"]);
    config_refused("workers = 2\n", &["disks.toml", "no disk", "[[disk]]"]);
}

#[test]
fn a_configuration_that_contradicts_itself() {
    let same_image = format!("{DISK}\n[[disk]]\nimage = './disk.img'\nsocket = 't'\n");
    config_refused(&same_image, &["disks.toml, line 5", "disk.img", "disks.toml, line 1"]);
    let same_socket = format!("{DISK}\n[[disk]]\nimage = 'null:1G'\nsocket = './s'\n");
    config_refused(&same_socket, &["disks.toml, line 5", "socket", "disks.toml, line 1"]);
}

#[test]
fn a_configuration_of_which_one_disk_fails_starts_none() {
    let config = format!(
        "[[disk]]\nimage = 'new.img'\nsize = '1M'\nsocket = 'n'\n{DISK}\
         [[disk]]\nimage = 'missing.img'\nsocket = 't'\n"
    );
    config_refused(&config, &["disks.toml, line 8", "missing.img", "no such file"]);
    let config = format!("{DISK}[[disk]]\nimage = 'null:1G'\nsocket = 'no/t'\n");
    config_refused(&config, &["disks.toml, line 4", "no/t", "folder does not exist"]);
}

#[test]
fn a_configuration_that_is_not_there() {
    let dir = folder();
    let what = ["disks.toml", "No such file"];
    serve_refused(dir.path(), &["--config", "disks.toml"], FAILED, &what);
}

#[test]
fn a_demo_without_room() {
    let dir = folder();
    let mut command = ringway();
    command.args(["demo", "--dir", "no"]);
    refused(dir.path(), command, FAILED, &["no: ", "cannot be used"]);
    let mut command = ringway();
    command.args(["demo", "--dir", ".", "--size", "900P"]);
    refused(dir.path(), command, FAILED, &["900 PiB", "--size", "--dir"]);
    let mut command = ringway();
    command.args(["demo", "--size", "1M"]);
    refused(dir.path(), command, FAILED, &["1 MiB", "at least 16 MiB"]);
}

#[test]
fn iopoll_that_cannot_work() {
    let dir = folder();
    std::fs::File::create(dir.path().join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let refused = |engine, what: &[&str]| {
        let args = ["disk.img", "--socket", "s", "--iopoll", "--cache", "writeback"];
        serve_refused(dir.path(), &[&args[..], &["--engine", engine]].concat(), FAILED, what);
    };
    refused("threads", &["disk.img", "--iopoll is a matter of io_uring", "threads"]);
    // A file in the page cache: there is nothing to poll, whatever the device has.
    refused("io_uring", &["disk.img", "--iopoll cannot work", "O_DIRECT"]);
}

/// A new image says nothing of its device: it is all holes, for which none is asked. Where that turns out to have no
/// queues to poll, its completions come as without --iopoll.
#[test]
fn iopoll_of_an_image_of_holes() {
    let dir = folder();
    let mut direct = std::fs::File::options();
    direct.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
    if direct.open(dir.path().join("new.img")).is_err() {
        return skip(Need::Direct, "this folder takes no O_DIRECT");
    }
    std::fs::remove_file(dir.path().join("new.img")).unwrap();
    let args = ["new.img", "--size", "1M", "--socket", "s", "--iopoll", "--engine", "io_uring"];
    let daemon = Daemon::serve(dir.path(), &[&args[..], &["--cache", "none"]].concat());
    let mut device = Options::new().connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    for round in 1..4 {
        assert!(write(&device, &mut queue, 7, round), "{}", daemon.log());
        assert_eq!(read(&device, &mut queue, 7)[0], round);
    }
    drop((queue, device));
    daemon.stop();
}

#[test]
fn one_path_for_two_sockets() {
    let dir = folder();
    let what = ["s is both control and socket", "its own path"];
    let args = ["disk.img", "--socket", "s", "--control", "s"];
    serve_refused(dir.path(), &args, FAILED, &what);
    let what = ["m is both control and metrics"];
    let args = ["disk.img", "--socket", "s", "--control", "m", "--metrics", "unix:./m"];
    serve_refused(dir.path(), &args, FAILED, &what);
    let what = ["disks.toml, line 2: ", "s is both control and socket"];
    config_refused(&format!("control = 's'\n{DISK}"), &what);
}

#[test]
fn a_port_that_is_taken() {
    let dir = folder();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let args = ["disk.img", "--socket", "s", "--metrics", &at];
    let what = [&format!("error: --metrics {at}: "), "another process listens there"];
    serve_refused(dir.path(), &args, FAILED, &what);
    let what = [&format!("disks.toml, line 2: metrics {at}: "), "another process listens there"];
    config_refused(&format!("\nmetrics = '{at}'\n{DISK}"), &what);
    // The option wins over the file, and is what to look at.
    std::fs::write(dir.path().join("disks.toml"), format!("metrics = '127.0.0.1:1'\n{DISK}"))
        .unwrap();
    let what = [&format!("error: --metrics {at}: "), "another process listens there"];
    serve_refused(dir.path(), &["--config", "disks.toml", "--metrics", &at], FAILED, &what);
    let what = ["disks.toml, line 2: NBD at ", &at, "another process listens there"];
    config_refused(&format!("\n[[disk]]\nimage = 'disk.img'\nnbd = '{at}'\n"), &what);
}

/// What concerns the daemon as a whole is told with its line, although it is found wrong when it is
/// used.
#[test]
fn words_of_the_daemon_in_a_file() {
    for (words, what) in [
        ("\ncpus = '900'", ["line 2: cpus 900: ", "does not exist"]),
        ("\n\nuser = 'no-such-user'", ["line 3: user no-such-user: ", "there is no user"]),
        ("socket-group = 'no-such-group'", ["line 1: socket-group: ", "there is no group"]),
        ("\nstate-dir = 'no/such'", ["line 2: state-dir: ", "cannot make this folder"]),
        ("\ncontrol = 'no/such'", ["line 2: control: ", "its folder does not exist"]),
        ("\nmetrics = 'unix:no/such'", ["line 2: metrics unix:", "its folder does not exist"]),
        ("\ntls-cert = 'c.pem'", ["line 2: ", "tls-cert needs tls-key"]),
        (
            "\ntls-cert = 'c.pem'\ntls-key = 'k.pem'",
            ["line 2: ", "for NBD clients, and no disk has some"],
        ),
        ("poll = 'never'\npoll-budget = 3", ["line 2: ", "poll-budget is the budget"]),
        ("\nworkers = 0", ["line 2: ", "workers must be at least 1"]),
        (
            "workers = 99999999999999999999",
            ["line 1: ", "99999999999999999999 is too large a number"],
        ),
    ] {
        config_refused(&format!("{words}\n{DISK}"), &["disks.toml, ", what[0], what[1]]);
    }
    let taken = "[[disk]]\nimage = 'disk.img'\nnbd = '0.0.0.0:0'\n";
    config_refused(taken, &["disks.toml, line 1: ", "other hosts could connect there"]);
}

#[test]
fn seconds_and_limits_that_are_none() {
    let dir = folder();
    for (option, word, what) in [
        ("--hold-timeout", "0", "it must be at least 1; leave it out for ever"),
        ("--lock-wait", "x", "'x' is not a time in whole seconds: give 30 or 30s"),
        ("--iops", "10T", "'10T' is neither a number of requests (500, 10k, 1M), nor none"),
        ("--iops", "99999999999999999999", "is too large"),
    ] {
        let args = ["disk.img", "--socket", "s", option, word];
        serve_refused(dir.path(), &args, USAGE, &[option, what]);
    }
    let args = ["null:1M", "--socket", "s", "--reconnect-timeout", "5"];
    serve_refused(dir.path(), &args, USAGE, &["null:1M is no disk of an NBD server"]);
    let args = ["disk.img", "--socket", "s", "--iops", "9", "--iops-max", "10"];
    let args = [&args[..], &["--iops-max-length", "0"]].concat();
    let what = ["iops-max-length = 0", "Leave it out for one second"];
    serve_refused(dir.path(), &args, USAGE, &what);
}
