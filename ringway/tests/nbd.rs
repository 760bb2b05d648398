//! `ringway nbd` from outside, in its sandbox: stock clients read, write, copy and verify; wrong words are
//! refused; kills and signals lose nothing that was answered.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, folder, ringway, run, says, snapshot, text};
use ringway_testkit::nbd::{Client, EXTENDED, QEMU, STRUCTURED, command as c, extents_of, flag};
use ringway_testkit::{Mounted, Need, Rng, skip};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// `ringway nbd ARGS`, run in `dir`; returns once it is ready.
fn nbd(dir: &Path, args: &[&str]) -> Daemon {
    let mut command = ringway();
    command.arg("nbd").args(args).current_dir(dir);
    Daemon::start(command)
}

/// What a stock program says; `None` if it is not here.
fn stock(dir: &Path, program: &str, args: &[&str]) -> Option<Output> {
    let output = Command::new(program).args(args).current_dir(dir).output();
    match output {
        Ok(output) => Some(output),
        Err(_) => {
            let need = if program.starts_with("qemu") { Need::Qemu } else { Need::Nbd };
            skip(need, program);
            None
        }
    }
}

/// The same, of one that must say that all is well.
fn well(dir: &Path, program: &str, args: &[&str]) -> Option<String> {
    let output = stock(dir, program, args)?;
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
    Some(said)
}

/// Content without order, with a hole in it.
fn content(rng: &mut Rng) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..4 * MIB / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    bytes[MIB..2 * MIB].fill(0);
    bytes
}

#[test]
fn stock_clients_copy_both_ways_over_both_kinds_of_sockets() {
    let mut rng = Rng::for_test("stock_clients_copy_both_ways_over_both_kinds_of_sockets");
    for listen in ["unix:n.sock", "127.0.0.1:0"] {
        for format in ["raw", "qcow2"] {
            let dir = folder();
            let dir = dir.path();
            std::fs::write(dir.join("from.img"), content(&mut rng)).unwrap();
            if format == "qcow2" {
                let args = ["create", "-q", "-f", "qcow2", "disk.q", "4M"];
                if well(dir, "qemu-img", &args).is_none() {
                    return;
                }
            } else {
                std::fs::write(dir.join("disk.q"), vec![0; 4 * MIB]).unwrap();
            }
            let mut daemon =
                nbd(dir, &["disk.q", "--format", format, "--listen", listen, "--export", "one"]);
            let uri = uri_of(&mut daemon);
            let to = ["convert", "-n", "-f", "raw", "-O", "raw", "from.img", &uri];
            let Some(_) = well(dir, "qemu-img", &to) else { return };
            well(dir, "qemu-img", &["compare", "-f", "raw", "-F", "raw", "from.img", &uri]);
            let Some(info) = well(dir, "nbdinfo", &["--json", &uri]) else { return };
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            let export = &info["exports"][0];
            assert_eq!(info["protocol"], "newstyle-fixed", "{info}");
            for (word, wanted) in [
                ("export-size", serde_json::json!(4 * MIB)),
                ("can_multi_conn", true.into()),
                ("can_fua", true.into()),
                ("can_trim", true.into()),
                ("can_fast_zero", true.into()),
                ("is_read_only", false.into()),
                ("block_minimum", serde_json::json!(512)),
                ("block_size_maximum", serde_json::json!(32 * MIB)),
            ] {
                let said = [word, "block_size_minimum"].map(|word| &export[word]);
                let said = if word == "block_minimum" { said[1] } else { said[0] };
                assert_eq!(said, &wanted, "{word}: {info}");
            }
            well(dir, "nbdcopy", &["--connections=4", &uri, "back.img"]);
            let (from, back) = ["from.img", "back.img"].map(|name| dir.join(name)).into();
            assert!(std::fs::read(from).unwrap() == std::fs::read(back).unwrap());
            well(dir, "nbdcopy", &["--connections=4", "from.img", &uri]);
            well(dir, "qemu-img", &["compare", "-f", "raw", "-F", "raw", "from.img", &uri]);
            daemon.stop();
        }
    }
}

/// The URI of the line that tells it.
fn uri_of(daemon: &mut Daemon) -> String {
    let list = daemon.ready.clone() + &daemon.next_line();
    let uri = list.split_whitespace().find(|word| word.starts_with("nbd"));
    uri.unwrap_or_else(|| panic!("no URI in {list}")).to_owned()
}

#[test]
fn stock_clients_see_holes_and_write_in_every_way() {
    let dir = folder();
    let dir = dir.path();
    let file = std::fs::File::create(dir.join("disk.img")).unwrap();
    file.set_len(8 * MIB as u64).unwrap();
    let mut daemon = nbd(dir, &["disk.img", "--listen", "unix:n.sock", "--cache", "writeback"]);
    let uri = uri_of(&mut daemon);
    let write = "\
h.pwrite(b'\\x5a' * 65536, 1 << 20)
h.pwrite(b'\\x11' * 4096, 2 << 20, nbd.CMD_FLAG_FUA)
h.zero(4096, (1 << 20) + 4096)
h.zero(4096, 3 << 20, nbd.CMD_FLAG_NO_HOLE)
h.trim(4096, 2 << 20)
h.pwrite(b'\\x22' * 512, 5 << 20)
h.flush()
h.cache(4096, 0)
assert h.pread(65536, 1 << 20) == b'\\x5a' * 4096 + bytes(4096) + b'\\x5a' * 57344
assert h.pread(4096, 2 << 20) == bytes(4096)
assert h.pread(4096, 5 << 20) == b'\\x22' * 512 + bytes(3584)
h.set_strict_mode(0)
for bad in (lambda: h.pread(512, 8 << 20), lambda: h.pwrite(bytes(512), (8 << 20) - 256)):
    try:
        bad()
    except nbd.Error as error:
        assert error.errno in ('EINVAL', 'ENOSPC'), error
    else:
        assert False
assert h.pread(512, 0) == bytes(512)
";
    // What nbdsh is, by the Python that Debian's module is for.
    let script = ["-m", "nbd", "-u", &uri, "-c", write];
    let Some(output) = stock(dir, "/usr/bin/python3", &script) else { return };
    let said = text(&output.stderr);
    if said.contains("No module named") {
        return skip(Need::Nbd, "the Python module of libnbd");
    }
    assert!(output.status.success(), "{said}");
    let map = well(dir, "nbdinfo", &["--map", "--json", &uri]).unwrap();
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let data_at = |at: u64| {
        let has = |e: &&serde_json::Value| {
            let begin = e["offset"].as_u64().unwrap();
            (begin..begin + e["length"].as_u64().unwrap()).contains(&at)
        };
        map.iter().find(has).map(|extent| extent["type"] == 0).unwrap()
    };
    // A file system without holes tells that all is data, which is allowed.
    assert!(data_at(1 << 20) && data_at(5 << 20), "{map:?}");
    assert_eq!(data_at(0), data_at(7 << 20), "{map:?}");
    let io = ["-f", "raw", "-c", "write -P 7 0 1M", "-c", "read -P 7 0 1M", "-c", "flush", &uri];
    well(dir, "qemu-io", &io);
    well(dir, "qemu-io", &["-f", "raw", "-c", "read -P 0x5a 1M 4k", "-c", "discard 0 1M", &uri]);
    daemon.stop();
}

#[test]
fn fio_verifies_what_it_writes() {
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("disk.img"), vec![0; 16 * MIB]).unwrap();
    let Some(engines) = stock(dir, "fio", &["--enghelp"]) else { return };
    if !text(&engines.stdout).contains("nbd") {
        return skip(Need::Nbd, "fio without its nbd engine");
    }
    let mut daemon = nbd(dir, &["disk.img", "--listen", "unix:n.sock"]);
    let uri = format!("--uri={}", uri_of(&mut daemon));
    let args = [
        "--name=v",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=32",
        "--size=8M",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
    ];
    well(dir, "fio", &args);
    daemon.stop();
}

#[test]
fn what_was_answered_is_there_after_a_kill_and_a_client_comes_back() {
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("disk.img"), vec![0; 4 * MIB]).unwrap();
    let args = ["disk.img", "--listen", "unix:n.sock", "--connections", "2", "--export", "disk"];
    let mut model = vec![0u8; 64];
    let mut rng = Rng::for_test("what_was_answered_is_there_after_a_kill_and_a_client_comes_back");
    for round in 1..=6u8 {
        let daemon = nbd(dir, &args);
        let mode = if round % 2 == 0 { STRUCTURED } else { EXTENDED };
        let mut client = Client::new(UnixStream::connect(dir.join("n.sock")).unwrap(), mode);
        for (at, &byte) in (0..).zip(&model) {
            let there = client.call(c::READ, 0, (at * 65536, 512), &[]);
            assert_eq!(there.data, [byte; 512], "{at}, round {round}");
        }
        // Many are under way when it is killed: those that were answered count.
        for at in 0..64u64 {
            let fua = if rng.below(3) == 0 { flag::FUA } else { 0 };
            client.ask(c::WRITE, fua, at, (at * 65536, 512), &[round; 512]);
        }
        for _ in 0..rng.below(64) {
            let reply = client.reply().unwrap();
            assert_eq!(reply.error, 0);
            model[reply.cookie as usize] = round;
        }
        match round % 3 {
            0 => drop(daemon.stop()),
            _ => daemon.kill(),
        }
        // The rest may have been carried out or not; what was answered before the end counts, too.
        while let Some(reply) = client.reply() {
            model[reply.cookie as usize] = round;
        }
        let file = std::fs::read(dir.join("disk.img")).unwrap();
        for (at, byte) in model.iter_mut().enumerate() {
            let there = file[at * 65536];
            assert!(there == *byte || there == round, "{at}: {there}, round {round}");
            *byte = there;
        }
    }
}

#[test]
fn the_control_socket_knows_it() {
    let dir = folder();
    let dir = dir.path();
    let daemon = nbd(
        dir,
        &["disk.img", "--listen", "unix:n.sock", "--control", "c.sock", "--export", "disk"],
    );
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        run({
            command.args(["ctl", "--control", "c.sock"]).args(args).current_dir(dir);
            command
        })
    };
    let list = || {
        let output = ctl(&["list", "--json"]);
        let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        list["disks"][0].clone()
    };
    assert_eq!(list()["connected"], false);
    assert!(list()["socket"].as_str().unwrap().ends_with("/n.sock"));
    let connect = || Client::new(UnixStream::connect(dir.join("n.sock")).unwrap(), STRUCTURED);
    let (mut one, mut two) = (connect(), connect());
    for client in [&mut one, &mut two] {
        assert_eq!(client.call(c::WRITE, flag::FUA, (0, 4096), &[1; 4096]).error, 0);
    }
    assert_eq!(list()["connected"], true);
    let stats = ctl(&["stats", "--json"]);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!(stats["disks"][0]["queues"].as_array().unwrap().len(), 2, "{stats}");
    // Pauses keep what clients ask for; resumed, it is done.
    assert!(ctl(&["pause", "0"]).status.success());
    one.ask(c::READ, 0, 5, (0, 4096), &[]);
    assert!(ctl(&["resume", "0"]).status.success());
    assert_eq!(one.reply().unwrap().data, [1; 4096]);
    std::fs::write(dir.join("other.img"), vec![0; MIB]).unwrap();
    let refused = ctl(&["add", "other.img", "--socket", "o.sock"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("NBD"), "{}", text(&refused.stderr));
    daemon.stop();
}

#[test]
fn wrong_words_are_refused_and_nothing_is_created() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (args, status, fragment) in [
        (&["disk.img"][..], 2, "--listen"),
        (&["--listen", "unix:n"], 2, "name an IMAGE"),
        (&["disk.img", "--listen", "nowhere"], 2, "is no place for NBD clients"),
        (&["disk.img", "--listen", "0.0.0.0:0"], 2, "--insecure"),
        (&["disk.img", "--listen", "[::]:0"], 2, "nothing is encrypted"),
        (&["disk.img", "--listen", "127.0.0.1:0", "--socket-mode", "0660"], 2, "Unix sockets"),
        (&["disk.img", "--listen", "unix:n", "--socket", "s"], 2, "--listen"),
        (&["disk.img", "--listen", "unix:n", "--queues", "2"], 2, "see connections"),
        (&["disk.img", "--listen", "unix:n", "--queue-size", "8"], 2, "no rings"),
        (&["disk.img", "--listen", "unix:n", "--connections", "0"], 2, "--connections"),
        (&["disk.img", "--listen", "unix:n", "--incoming"], 2, "incoming:"),
        (&["disk.img", "--listen", "unix:n", "--isolate"], 2, "isolate:"),
        (&["disk.img", "a/disk.img", "--listen", "unix:n"], 2, "two disks are called 'disk.img'"),
        (&["disk.img", "b.img", "--listen", "unix:n", "--export", "x"], 2, "--export"),
        (&["disk.img", "--listen", "unix:n", "--tls-cert", "c.pem"], 2, "--tls-key"),
        (&["disk.img", "--listen", "unix:n", "--tls-ca", "c.pem"], 2, "--tls-cert"),
        (&["none.img", "--listen", "unix:n"], 1, "none.img"),
        (&["disk.img", "--listen", "unix:missing/n"], 1, "missing"),
        (&["disk.img", "--listen", &taken], 1, "Choose another port"),
    ] {
        let dir = folder();
        let before = snapshot(dir.path());
        let mut command = ringway();
        command.arg("nbd").args(args).current_dir(dir.path());
        let output = run(command);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}\n{message}");
        assert!(
            message.starts_with("error: ") && message.contains(fragment),
            "{args:?}\n{message}"
        );
        assert_eq!(snapshot(dir.path()), before, "{args:?}");
    }
}

/// Says what a program must, of what it prints as JSON.
fn json(dir: &Path, program: &str, args: &[&str]) -> Option<serde_json::Value> {
    Some(serde_json::from_str(&well(dir, program, args)?).expect("JSON"))
}

#[test]
fn several_disks_are_at_one_address_by_their_names() {
    let dir = folder();
    let dir = dir.path();
    for (name, byte, len) in [("a.img", 1, MIB), ("b.img", 2, 2 * MIB), ("c.img", 3, MIB)] {
        std::fs::write(dir.join(name), vec![byte; len]).unwrap();
    }
    let config = "control = 'c.sock'
[[disk]]
image = 'a.img'
nbd = 'unix:n.sock'
[[disk]]
image = 'b.img'
nbd = 'unix:n.sock'
export = 'two'
connections = 2
[[disk]]
image = 'c.img'
nbd = '127.0.0.1:0'
";
    std::fs::write(dir.join("disks.toml"), config).unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "disks.toml"]).current_dir(dir);
    let daemon = Daemon::start(command);
    let socket = dir.join("n.sock");
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", socket.display());
    let names = |dir: &Path| {
        let list = json(dir, "nbdinfo", &["--list", "--json", &uri("")])?;
        let exports = list["exports"].as_array().unwrap().clone();
        let one = |e: &serde_json::Value| {
            (e["export-name"].as_str().unwrap().to_owned(), e["export-size"].as_u64().unwrap())
        };
        Some(exports.iter().map(one).collect::<Vec<_>>())
    };
    let Some(exports) = names(dir) else { return };
    assert_eq!(exports, [("a.img".to_owned(), MIB as u64), ("two".to_owned(), 2 * MIB as u64)]);
    // Who names nothing gets the first.
    for (name, image) in [("", "a.img"), ("a.img", "a.img"), ("two", "b.img")] {
        well(dir, "nbdcopy", &["--connections=2", &uri(name), "back.img"]);
        let same = std::fs::read(dir.join(image)).unwrap();
        assert!(std::fs::read(dir.join("back.img")).unwrap() == same, "{name}");
    }
    let unknown = stock(dir, "nbdinfo", &[&uri("none")]).unwrap();
    assert!(!unknown.status.success());
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "c.sock"]).args(args).current_dir(dir);
        run(command)
    };
    let list = ctl(&["list", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    let sockets = list["disks"].as_array().unwrap().iter().map(|disk| disk["socket"].clone());
    let sockets: Vec<_> = sockets.map(|at| at.as_str().unwrap().to_owned()).collect();
    assert!(sockets[1].starts_with("nbd+unix:///two?socket=/"), "{sockets:?}");
    assert!(sockets[2].starts_with("nbd://127.0.0.1:") && sockets[2].ends_with("/c.img"));
    // One goes, another one comes: the address and the rest stay.
    let config = config.replace("image = 'a.img'", "image = 'd.img'\nsize = '1M'");
    std::fs::write(dir.join("disks.toml"), &config).unwrap();
    let done = ctl(&["reload", "--json"]);
    let done: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(done["added"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(done["removed"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(done["unchanged"], 2, "{done}");
    assert_eq!(
        names(dir).unwrap().iter().map(|(n, _)| &n[..]).collect::<Vec<_>>(),
        ["two", "d.img"]
    );
    assert!(socket.exists());
    // Row D18: who names nothing does not get another disk instead, and gets this one when it is back.
    assert!(!stock(dir, "nbdinfo", &[&uri("")]).unwrap().status.success());
    let again = "[[disk]]\nimage = 'a.img'\nformat = 'raw'\nnbd = 'unix:n.sock'\n";
    std::fs::write(dir.join("disks.toml"), config + again).unwrap();
    assert!(ctl(&["reload"]).status.success());
    well(dir, "nbdcopy", &[&uri(""), "back.img"]);
    assert!(std::fs::read(dir.join("back.img")).unwrap() == [1; MIB]);
    daemon.stop();
    assert!(!socket.exists());
}

#[test]
fn an_overlay_tells_what_it_has_and_what_lies_beneath() {
    let dir = folder();
    let dir = dir.path();
    let create = "qemu-img create -q -f raw base.img 8M
qemu-io -f raw -c 'write -q -P 1 1M 1M' base.img
qemu-io -f raw -c 'write -q -P 1 4M 64k' base.img
qemu-img create -q -f qcow2 -b base.img -F raw top.q 8M
qemu-io -f qcow2 -c 'write -q -P 2 6M 128k' top.q
qemu-io -f qcow2 -c 'write -q -z 4M 64k' top.q
qemu-io -f qcow2 -c 'write -q -P 2 1088k 64k' top.q";
    if stock(dir, "qemu-img", &["--version"]).is_none() {
        return;
    }
    well(dir, "sh", &["-ec", create]);
    let mut daemon = nbd(dir, &["top.q", "--format", "qcow2", "--listen", "unix:n.sock"]);
    let uri = uri_of(&mut daemon);
    let map = ["map", "--output=json", "-f", "raw", &uri];
    let map = json(dir, "qemu-img", &map).unwrap();
    let data = map.as_array().unwrap().iter().filter(|extent| extent["data"] == true);
    let data: Vec<_> = data
        .map(|e| (e["start"].as_u64().unwrap() >> 16, e["length"].as_u64().unwrap() >> 16))
        .collect();
    // QEMU writes the first block of a new raw file.
    assert_eq!(data, [(0, 0), (16, 16), (96, 2)], "{map}");
    // A cluster of zeroes hides what lies beneath; what is written shows at once.
    let io = ["-f", "raw", "-c", "write -q -P 7 3M 64k", "-c", "discard -q 6M 64k", &uri];
    well(dir, "qemu-io", &io);
    let map = json(dir, "qemu-img", &["map", "--output=json", "-f", "raw", &uri]).unwrap();
    let data = map.as_array().unwrap().iter().filter(|extent| extent["data"] == true);
    let data: Vec<_> = data.map(|e| e["start"].as_u64().unwrap() >> 16).collect();
    assert_eq!(data, [0, 16, 48, 97], "{map}");
    daemon.stop();
}

#[test]
fn d14_block_status_of_many_tables_comes_in_parts() {
    let dir = folder();
    let dir = dir.path();
    // A table says where 64 clusters are.
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "huge.q", "1G"];
    if well(dir, "qemu-img", &create).is_none() {
        return;
    }
    let args = ["huge.q", "--format", "qcow2", "--listen", "unix:n.sock", "--export", "disk"];
    let daemon = nbd(dir, &args);
    let mut client = Client::new(UnixStream::connect(dir.join("n.sock")).unwrap(), EXTENDED);
    let mut at = 0;
    for _ in 0..3 {
        let reply = client.call(c::BLOCK_STATUS, 0, (at, 512 << 20), &[]);
        assert_eq!(reply.error, 0);
        let extents = extents_of(EXTENDED, &reply.data);
        let covered: u64 = extents.iter().map(|(len, _)| len).sum();
        assert!(extents.len() == 1 && extents[0].1 == 3, "{extents:?}");
        // Less than was asked for: the thread of the connection is bounded in what it looks at.
        assert!((64 * 512..=16 << 20).contains(&covered), "{covered}");
        at += covered;
    }
    daemon.stop();
}

/// ENOSPC, by which QEMU knows when to stop its guest (`werror=enospc`), and not EIO.
#[test]
fn a_host_without_room_is_told_as_such() {
    let dir = folder();
    let dir = dir.path();
    let small = match Mounted::in_memory(dir.join("small"), 2 << 20) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let image = small.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let mut top = ringway();
    top.args(["create", "small/top.qcow2", "--size", "16M"]).current_dir(dir);
    assert!(run(top).status.success());
    for (image, format) in [("small/disk.img", "raw"), ("small/top.qcow2", "qcow2")] {
        let place = ["--listen", "unix:n", "--export", "disk"];
        let args = [&[image, "--format", format, "--on-enospc", "report"], &place[..]].concat();
        let daemon = nbd(dir, &args);
        let mut client = Client::new(UnixStream::connect(dir.join("n")).unwrap(), STRUCTURED);
        let errors: Vec<u32> = (0..6)
            .map(|mib| client.call(c::WRITE, 0, (mib << 20, 1 << 20), &vec![7; 1 << 20]).error)
            .collect();
        let enospc = libc::ENOSPC as u32;
        assert!(errors[0] == 0 && errors[5] == enospc, "{format}: {errors:?}");
        assert!(errors.iter().all(|error| [0, enospc].contains(error)), "{format}: {errors:?}");
        drop(client);
        daemon.stop();
        std::fs::remove_file(dir.join(image)).unwrap();
    }
}

/// The bytes that QEMU's client has sent since 8.2: extended headers, and writes without the flag that says
/// that their length is that of their data.
#[test]
fn d17_a_client_of_todays_qemu_writes_to_each_kind_of_daemon() {
    for (command, place) in [("nbd", "--listen"), ("serve", "--nbd")] {
        let dir = folder();
        let dir = dir.path();
        std::fs::write(dir.join("disk.img"), vec![0; MIB]).unwrap();
        let mut daemon = ringway();
        daemon.args([command, "disk.img", "--format", "raw", place, "unix:n.sock"]);
        daemon.args(["--export", "disk"]).current_dir(dir);
        let daemon = Daemon::start(daemon);
        let mut client = Client::new(UnixStream::connect(dir.join("n.sock")).unwrap(), QEMU);
        for (at, flags, len) in [(0u64, 0, 4096u32), (65536, flag::FUA, 512), (131072, 0, 262144)] {
            let data = vec![0x51; len as usize];
            let reply = client.call(c::WRITE, flags, (at, len), &data);
            assert_eq!(reply.error, 0, "{command}: a write of {len}");
            let there = std::fs::read(dir.join("disk.img")).unwrap();
            assert!(there[at as usize..][..len as usize] == data, "{command}: {len} at {at}");
        }
        assert_eq!(client.call(c::READ, 0, (0, 4096), &[]).data, [0x51; 4096]);
        daemon.stop();
    }
}

/// A port cannot be opened again in the sandbox, and the old name goes before the new one comes.
#[test]
fn a_port_stays_open_when_its_only_export_gets_another_name() {
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("a.img"), vec![1; MIB]).unwrap();
    let name = |name: &str| {
        let config = format!(
            "control = 'c.sock'\n[[disk]]\nimage = 'a.img'\nformat = 'raw'\nnbd = '127.0.0.1:0'\nexport = '{name}'\n"
        );
        std::fs::write(dir.join("disks.toml"), config).unwrap();
    };
    name("one");
    let mut command = ringway();
    command.args(["serve", "--config", "disks.toml"]).current_dir(dir);
    let daemon = Daemon::start(command);
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "c.sock"]).args(args).current_dir(dir);
        let said = run(command);
        assert!(said.status.success(), "{args:?}: {}", text(&said.stderr));
        serde_json::from_slice::<serde_json::Value>(&said.stdout).unwrap()
    };
    for other in ["two", "one"] {
        name(other);
        let done = ctl(&["reload", "--json"]);
        assert_eq!(done["added"].as_array().unwrap().len(), 1, "{done}");
        let list = ctl(&["list", "--json"]);
        let at = list["disks"][0]["socket"].as_str().unwrap().to_owned();
        assert!(at.ends_with(other), "{list}");
        let Some(info) = json(dir, "nbdinfo", &["--json", &at]) else { return };
        assert_eq!(info["exports"][0]["export-size"], MIB as u64, "{info}");
    }
    daemon.stop();
}

#[test]
fn e65_a_disk_without_a_name_at_its_address_is_shown_by_its_uri_too() {
    let dir = folder();
    let dir = dir.path();
    let daemon = nbd(dir, &["disk.img", "--listen", "unix:n.sock", "--control", "c.sock"]);
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "c.sock", "--json"]).args(args).current_dir(dir);
        let said = run(command);
        assert!(said.status.success(), "{args:?}: {}", text(&said.stderr));
        serde_json::from_slice::<serde_json::Value>(&said.stdout).unwrap()
    };
    let socket = dir.join("n.sock").display().to_string();
    let uri = format!("nbd+unix:///?socket={socket}");
    assert_eq!(ctl(&["list"])["disks"][0]["socket"], uri);
    // Its socket's path names it still, as the URI does.
    for name in [&socket, &uri] {
        assert_eq!(ctl(&["stats", name])["disks"][0]["id"], 0, "{name}");
    }
    daemon.stop();
}

/// Nobody wants to hear of slow requests: what overlaps a write that is older than a second waits for it all the same,
/// as the client of that may be back, without the host knowing that it had gone.
#[test]
fn c53_old_writes_are_known_although_nobody_is_told_of_them() {
    let dir = folder();
    let dir = dir.path();
    let args = ["null:1M,latency=12000ms", "--overdue", "0", "--listen", "unix:n.sock"];
    let daemon = nbd(dir, &[&args[..], &["--connections", "2", "--export", "disk"]].concat());
    let connect = || Client::new(UnixStream::connect(dir.join("n.sock")).unwrap(), STRUCTURED);
    let (mut first, mut second) = (connect(), connect());
    first.ask(c::WRITE, 0, 1, (0, 4096), &[1; 4096]);
    // Three looks, and what a busy machine needs beside them.
    std::thread::sleep(Duration::from_secs(5));
    second.ask(c::READ, 0, 1, (0, 4096), &[]);
    second.ask(c::READ, 0, 2, (65536, 4096), &[]);
    assert_eq!(second.reply().unwrap().cookie, 2, "the first one does not wait");
    assert_eq!(first.reply().unwrap().error, 0);
    assert_eq!(second.reply().unwrap().cookie, 1);
    daemon.stop();
}

/// As the one export of qemu-nbd, which clients get that name none.
#[test]
fn e83_an_export_may_have_no_name() {
    let dir = folder();
    let dir = dir.path();
    let mut daemon = nbd(dir, &["disk.img", "--listen", "unix:n.sock", "--export", ""]);
    let socket = dir.join("n.sock").display().to_string();
    assert_eq!(uri_of(&mut daemon), format!("nbd+unix:///?socket={socket}"));
    says(dir, &["info", &format!("nbd:unix:{socket}")], 0, &["1 MiB"]);
    let other = format!("nbd:unix:{socket}:disk.img");
    says(dir, &["info", &other], 1, &["the server has no export 'disk.img'", "It has: ''"]);
    daemon.stop();
}
