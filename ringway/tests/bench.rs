//! `ringway bench`, from outside.

mod common;

use common::{Daemon, PATIENCE, folder, ringway, run, snapshot, text};
use ringway_testkit::{Need, skip};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// `ringway bench ARGS`, run in `dir`.
fn bench(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.arg("bench").args(args).current_dir(dir);
    run(command)
}

/// As [`bench`], which must succeed and print JSON.
fn json(dir: &Path, args: &[&str]) -> Value {
    let output = bench(dir, &[args, &["--json"]].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{args:?}\n{out}{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}{err}"))
}

/// As [`bench`], which must fail with `status` and one message that holds all `fragments`.
fn refused(dir: &Path, args: &[&str], status: i32, fragments: &[&str]) {
    let before = snapshot(dir);
    let output = bench(dir, args);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}\n{message}");
    assert!(message.starts_with("error: "), "{args:?}\n{message}");
    assert_eq!(message.matches("error:").count(), 1, "not one message:\n{args:?}\n{message}");
    for fragment in fragments {
        assert!(message.contains(fragment), "'{fragment}' is not in:\n{args:?}\n{message}");
    }
    assert!(output.stdout.is_empty(), "{args:?}\n{}", text(&output.stdout));
    assert_eq!(snapshot(dir), before, "something was created or changed: {args:?}");
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Every figure that can be had in two ways is the same in both.
fn consistent(found: &Value) {
    let mut all = 0;
    for side in ["read", "write"] {
        let side = &found[side];
        let requests = number(&side["requests"]);
        all += requests;
        let (late, unsent) = (number(&side["in_flight_at_end"]), number(&side["unsent"]));
        for kind in ["slat_ns", "clat_ns", "lat_ns"] {
            let kind = &side[kind];
            if requests + late + unsent == 0 || kind.is_null() {
                assert!(kind.is_null() && requests == 0);
                continue;
            }
            let bins = kind["histogram"].as_array().unwrap();
            let sum: u64 = bins.iter().map(|bin| number(&bin[1])).sum();
            let most = requests + late + unsent;
            assert!(sum == most || sum == most - unsent, "the histogram holds every request");
            let (p50, p99) = (&kind["percentile"]["50.000000"], &kind["percentile"]["99.000000"]);
            assert!(number(&kind["min"]) <= number(p50) && number(p50) <= number(p99));
            assert!(number(p99) <= number(&kind["max"]));
        }
        if requests > 0 && unsent == 0 {
            let mean = |kind: &str| side[kind]["mean"].as_f64().unwrap();
            let (parts, whole) = (mean("slat_ns") + mean("clat_ns"), mean("lat_ns"));
            assert!((parts - whole).abs() <= whole * 0.01 + 2.0, "{parts} is not {whole}");
        }
    }
    assert_eq!(all, number(&found["requests"]));
    let seconds = found["seconds"].as_f64().unwrap();
    let iops = found["iops"].as_f64().unwrap();
    assert!((iops * seconds - all as f64).abs() < 1.0);
    let frames = found["over_time"].as_array().unwrap();
    if let [first, second, ..] = &frames[..] {
        let width = second["seconds"].as_f64().unwrap() - first["seconds"].as_f64().unwrap();
        let sum: f64 = frames.iter().map(|frame| frame["iops"].as_f64().unwrap() * width).sum();
        assert!((sum - all as f64).abs() < 1.0, "{sum} requests over time, not {all}");
    }
}

#[test]
fn a_null_disk_is_measured_and_every_figure_fits_the_others() {
    let dir = folder();
    for client in ["--polling", "--sleeping"] {
        let found = json(dir.path(), &["null:1G", "--runtime", "300ms", client]);
        consistent(&found);
        assert!(number(&found["read"]["requests"]) > 0);
        assert_eq!(number(&found["read"]["bytes"]), number(&found["requests"]) * 4096);
        assert!(found["cpu_ns_per_io"]["client"].as_f64().unwrap() > 0.0);
        assert!(found["cpu_ns_per_io"]["server"].is_f64());
    }
}

#[test]
fn an_amount_of_data_ends_a_load_exactly() {
    let dir = folder();
    let load = ["--io-size", "4M", "--bs", "4k", "--rw", "randrw", "--rwmixread", "70"];
    for target in ["null:64M", "sim:ram:64M"] {
        let found = json(dir.path(), &[&[target, "--jobs", "2"], &load[..]].concat());
        consistent(&found);
        assert_eq!(number(&found["requests"]), 1024, "{target}");
        let reads = number(&found["read"]["requests"]);
        assert!((600..830).contains(&reads), "{reads} of 1024 are reads");
    }
    let text = text(&bench(dir.path(), &["sim:ram:64M", "--io-size", "1M"]).stdout);
    assert!(text.contains("a simulation"), "{text}");
}

#[test]
fn a_rate_is_kept_to() {
    let dir = folder();
    for limit in [["--rate-iops", "2000"], ["--rate", "8192000"]] {
        let args = ["null:1G", "--runtime", "600ms", "--ramp", "0", "--jobs", "2"];
        let found = json(dir.path(), &[&args[..], &limit].concat());
        consistent(&found);
        // Never more than the rate; less only if the machine was stopped meanwhile.
        let requests = number(&found["requests"]);
        assert!(requests <= 1203, "{limit:?}: {requests} requests in 0.6 s");
        assert!(requests > 0);
    }
}

#[test]
fn data_is_not_written_over_without_being_told() {
    let dir = folder();
    refused(dir.path(), &["disk.img", "--rw", "randwrite"], 1, &["holds data", "--allow-write"]);
    refused(dir.path(), &["vhost-user:s", "--rw", "rw"], 1, &["destroys", "--allow-write"]);
    let image = dir.path().join("disk.img");
    let before = std::fs::read(&image).unwrap();
    json(dir.path(), &["disk.img", "--cached", "--io-size", "256k"]);
    assert_eq!(std::fs::read(&image).unwrap(), before);
    let write = ["disk.img", "--cached", "--rw", "write", "--io-size", "256k"];
    json(dir.path(), &[&write[..], &["--allow-write"]].concat());
    assert_ne!(std::fs::read(&image).unwrap(), before);
    // A file without data needs no flag.
    std::fs::File::create(dir.path().join("hole")).unwrap().set_len(1 << 20).unwrap();
    json(dir.path(), &["hole", "--cached", "--rw", "write", "--io-size", "64k"]);
}

#[test]
fn bad_options_are_told() {
    let dir = folder();
    for (args, status, fragments) in [
        (&["missing.img"][..], 1, &["missing.img", "no such file", "--size"][..]),
        (&[], 2, &["TARGET"]),
        (&["null:1G", "--rw", "sideways"], 2, &["sideways", "randread"]),
        (&["null:1G", "--bs", "1000"], 2, &["multiple of 512"]),
        (&["null:1G", "--bssplit", "4k/60:8k/50"], 2, &["add up to 110"]),
        (&["null:1G", "--runtime", "soon"], 2, &["'soon' is not a time"]),
        (&["null:1G", "--runtime", "0"], 2, &["nothing would be measured"]),
        (&["null:1G", "--rate", "0"], 2, &["--rate 0"]),
        (&["null:1G", "--iodepth", "0"], 2, &["0", "iodepth"]),
        (&["null:1G", "--queues", "2"], 2, &["--polling"]),
        (&["null:1G", "--queue-size", "100"], 2, &["power of two", "not 100"]),
        (&["hole", "--size", "1M", "--queues", "2", "--polling"], 1, &["leave out --queues"]),
        (&["null:1G", "--size", "2G"], 1, &["--size 2 GiB", "the target has 1 GiB"]),
        (&["null:1G", "--offset", "1G"], 1, &["--offset 1 GiB", "the target has 1 GiB"]),
        (&["null:64k", "--bs", "128k"], 1, &["too small for requests of 128 KiB"]),
        (&["null:1G", "--engine", "threads"], 1, &["is no file", "--engine"]),
        (&["null:1G", "--vs", "null:1G", "--verify"], 2, &["--verify", "--vs"]),
        (&["null:1G", "--rounds", "3"], 2, &["--vs"]),
        (&["null:1G", "--html", "no/page.html"], 1, &["no/page.html", "cannot write"]),
        (&["sim:tape:1G"], 2, &["ram, ssd, hdd"]),
        (&["vhost-user:s"], 1, &["there is no socket at s"]),
        (&["vhost-user:disk.img"], 1, &["is not a socket"]),
        (
            &["sim:ram:1M", "--rw", "write", "--verify", "--jobs", "16"],
            1,
            &["--verify: each job has 64 KiB", "--size"],
        ),
    ] {
        refused(dir.path(), args, status, fragments);
    }
}

#[test]
fn a_job_can_poll_several_queues() {
    let dir = folder();
    let rings = ["--queue-size", "64", "--indirect", "always", "--packed"];
    let load = ["sim:ram:8M", "--jobs", "2", "--queues", "3", "--polling", "--iodepth", "4"];
    let verified = ["--rw", "randwrite", "--verify", "--io-size", "4M"];
    let found = json(dir.path(), &[&load[..], &rings, &verified].concat());
    consistent(&found);
    assert_eq!(number(&found["write"]["requests"]), 1024, "4 KiB each");
    // Judged when it was read back: each answer was that of its own queue and slot.
    assert_eq!(number(&found["verified_sectors"]), 8192);
}

#[test]
fn verify_accepts_what_it_wrote_and_finds_one_wrong_byte() {
    let dir = tempfile::tempdir().unwrap();
    let access = ["new.img", "--cached", "--verify", "--seed", "7"];
    let bench_it = |more: &[&str]| json(dir.path(), &[&access[..], more].concat());
    let wrote = ["--size", "4M", "--rw", "write", "--bs", "16k", "--io-size", "4M", "--jobs", "2"];
    let found = bench_it(&wrote);
    assert_eq!(number(&found["verified_sectors"]), 8192, "all of it was read back");
    let mixed =
        ["--rw", "randrw", "--bssplit", "512/30:4k/70", "--io-size", "8M", "--iodepth", "9"];
    bench_it(&[&mixed[..], &["--allow-write"]].concat());
    let found = bench_it(&["--rw", "read", "--io-size", "4M", "--jobs", "2"]);
    assert_eq!(number(&found["verified_sectors"]), 8192);

    let path = dir.path().join("new.img");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1_234_567).unwrap();
    file.write_all_at(&[byte[0] ^ 4], 1_234_567).unwrap();
    let read = ["--rw", "read", "--io-size", "4M", "--jobs", "2"];
    refused(
        dir.path(),
        &[&access[..], &read].concat(),
        3,
        &["wrong data in sector 2411", "first wrong byte is at offset 1234"],
    );
    // Another seed is another disk's data.
    let other = ["new.img", "--cached", "--verify", "--rw", "read", "--io-size", "4M"];
    refused(dir.path(), &other, 1, &["no run with --verify and this --seed"]);
}

/// What a run of random writes leaves is judged to the last sector, by any number of readers.
#[test]
fn verify_judges_every_sector_that_was_written() {
    for (jobs, load) in [
        ("1", &["--rw", "randwrite"][..]),
        ("1", &["--rw", "randwrite", "--io-size", "8M"]),
        ("3", &["--rw", "randwrite", "--iodepth", "7"]),
        ("2", &["--rw", "randwrite", "--bssplit", "512/50:4k/25:16k/25", "--iodepth", "8"]),
        ("2", &["--rw", "write", "--bs", "12k"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let target = ["new.img", "--cached", "--verify", "--jobs", jobs];
        let size = 8_u64 << 20;
        let found = json(dir.path(), &[&target[..], &["--size", "8M"], load].concat());
        let whole = if load.contains(&"12k") { size / 12_288 * 12_288 } else { size };
        assert_eq!(number(&found["written_once_bytes"]), whole, "{load:?}");
        for (jobs, bs) in [("1", "4k"), ("2", "512"), ("5", "128k")] {
            let read =
                ["new.img", "--cached", "--verify", "--rw", "read", "--jobs", jobs, "--bs", bs];
            let found = json(dir.path(), &read);
            assert_eq!(number(&found["verified_sectors"]), whole / 512, "{load:?} {jobs} {bs}");
            assert_eq!(number(&found["unwritten_sectors"]), (size - whole) / 512);
        }
    }
}

/// Whatever sector is damaged, in whatever way, is found; a healthy file is never called wrong.
#[test]
fn verify_finds_damage_in_any_sector() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.img");
    let target = ["new.img", "--cached", "--verify", "--iodepth", "4"];
    // A whole round, and two that end early.
    for (round, load) in [
        &["--rw", "randwrite", "--size", "64k", "--jobs", "2"][..],
        &["--rw", "randwrite", "--io-size", "24k", "--allow-write"],
        &["--rw", "randrw", "--io-size", "40k", "--allow-write", "--seed", "9"],
    ]
    .into_iter()
    .enumerate()
    {
        if round == 1 {
            // Nothing of the run before helps this one.
            std::fs::write(&path, vec![0; 65536]).unwrap();
        }
        let wrote = json(dir.path(), &[&target[..], load].concat());
        let once = number(&wrote["written_once_bytes"]);
        assert!(once > 0 && (once == 65536) == (round == 0), "{once}");
        let seed = if round == 2 { "9" } else { "1" };
        let read = [&target[..], &["--rw", "read", "--seed", seed]].concat();
        let found = json(dir.path(), &read);
        let unwritten = number(&found["unwritten_sectors"]);
        assert_eq!(number(&found["verified_sectors"]) + unwritten, 128);
        let healthy = std::fs::read(&path).unwrap();
        let mut missed = 0;
        for sector in 0..128 {
            let mut damaged = healthy.clone();
            let bytes = &mut damaged[sector * 512..][..512];
            match sector % 3 {
                0 => bytes.fill(0),
                1 => bytes[(sector * 37) % 512] ^= 1 << (sector % 8),
                _ => bytes.fill(0xa5),
            }
            if damaged[sector * 512..][..512] == healthy[sector * 512..][..512] {
                missed += 1;
                continue;
            }
            std::fs::write(&path, &damaged).unwrap();
            let output = bench(dir.path(), &read);
            let message = text(&output.stderr);
            match output.status.code() {
                Some(3) => {
                    assert!(
                        message.contains(&format!("wrong data in sector {sector}:")),
                        "{message}"
                    )
                }
                Some(0) => missed += 1,
                _ => panic!("{round} {sector}: {message}"),
            }
        }
        assert_eq!(missed, unwritten, "only what was never written may be anything");
        std::fs::write(&path, &healthy).unwrap();
    }
}

#[test]
fn our_daemon_is_measured_over_its_socket() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["sim:ram:64M", "--socket", "t", "--queues", "2"]);
    let target = ["vhost-user:t", "--jobs", "2", "--allow-write"];
    for rings in [&[][..], &["--packed"]] {
        let load = ["--rw", "randrw", "--verify", "--io-size", "8M"];
        let found = json(dir.path(), &[&target[..], &load, rings].concat());
        consistent(&found);
        assert_eq!(number(&found["requests"]), 2048);
        assert!(number(&found["verified_sectors"]) > 0);
        // Of the daemon, not of the process that made its socket.
        let server = found["cpu_ns_per_io"]["server"].as_f64();
        assert!(server.is_some_and(|ns| ns > 0.0), "{server:?}: the socket says who the server is");
    }
    let sizes = ["--bssplit", "512/30:4k/70", "--rw", "randrw", "--verify", "--io-size", "2M"];
    consistent(&json(dir.path(), &[&target[..], &sizes].concat()));
    refused(dir.path(), &["vhost-user:t", "--jobs", "3"], 1, &["3 queues", "the server has 2"]);
    daemon.stop();
}

#[test]
fn a_server_that_ends_is_told_of() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["null:64M", "--socket", "s"]);
    let mut command = ringway();
    command.args(["bench", "vhost-user:s", "--runtime", "15s"]).current_dir(dir.path());
    let begun = Instant::now();
    let bench = std::thread::spawn(move || run(command));
    std::thread::sleep(std::time::Duration::from_millis(1500));
    daemon.kill();
    let output = bench.join().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stderr).starts_with("error: vhost-user:s: "), "{}", text(&output.stderr));
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn a_signal_ends_it_early_with_what_was_measured() {
    let dir = folder();
    let interrupted = |seconds: u64| {
        let mut command = ringway();
        command.args(["bench", "null:1G", "--runtime", "60s", "--json"]).current_dir(dir.path());
        let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_secs(seconds));
        let pid = i32::try_from(child.id()).unwrap();
        // SAFETY: our own child, not waited for yet, so the number is still its own.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
        child.wait_with_output().unwrap()
    };
    // Before it has begun to measure, which may be late on a busy machine, a signal ends it as any program.
    let begun = |output: &Output| output.status.code().is_some() && !output.stdout.is_empty();
    let output = [2, 4, 8, 16].into_iter().map(interrupted).find(begun).expect("it measures");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let found: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    consistent(&found);
    assert!(found["seconds"].as_f64().unwrap() < 59.0);
}

/// Requests are counted, and nothing is said of times that were not taken.
#[test]
fn requests_may_only_be_counted() {
    let dir = folder();
    let args = ["null:1G", "--gtod-reduce", "--rw", "randrw", "--io-size", "64M"];
    let found = json(dir.path(), &args);
    assert_eq!(found["requests"], 16_384, "to the last one");
    let [bytes, iops] = ["bytes_per_second", "iops"].map(|key| found[key].as_f64().unwrap());
    assert!((bytes / iops - 4096.0).abs() < 1e-3, "{bytes} {iops}");
    assert!(found["seconds"].as_f64().unwrap() > 0.0);
    for side in ["read", "write"] {
        assert!(found[side]["requests"].as_u64().unwrap() > 4000);
        for time in ["slat_ns", "clat_ns", "lat_ns"] {
            assert_eq!(found[side][time], Value::Null);
        }
    }
    let args = ["null:1G", "--gtod-reduce", "--runtime", "200ms", "--html", "p.html"];
    let output = bench(dir.path(), &args);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("only counted") && !said.contains("p99"), "{said}");
    let page = std::fs::read_to_string(dir.path().join("p.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 1, "IOPS over time");
    assert!(!page.contains("p99") && !page.contains("NaN"), "{page}");
    refused(dir.path(), &["null:1G", "--gtod-reduce", "--rate-iops", "9"], 2, &["--rate-iops"]);
    let both = ["null:1G", "--vs", "null:2G", "--gtod-reduce", "--runtime", "50ms"];
    let output = bench(dir.path(), &[&both[..], &["--html", "q.html"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(dir.path().join("q.html")).unwrap();
    assert!(!page.contains("– ×"), "no ratio of what was not measured");
}

#[test]
fn two_targets_are_measured_in_turn_and_drawn() {
    let dir = folder();
    let args = ["null:1G", "--vs", "sim:ram:64M", "--rounds", "3", "--runtime", "100ms"];
    let output = bench(dir.path(), &[&args[..], &["--ramp", "20ms", "--html", "p.html"]].concat());
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let disturbed = "the most disturbed round: host: ";
    for part in ["ratio", "null:1G ÷ sim:ram:64M", "3 rounds", "IOPS", "p99.9", disturbed] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let page = std::fs::read_to_string(dir.path().join("p.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 4, "latency, IOPS, a heat map each");
    for foreign in ["<script", "src=", "href=", "@import", "url(", "NaN"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    let found = json(dir.path(), &args);
    assert_eq!(found["targets"][1]["rounds"].as_array().unwrap().len(), 3);
    found["targets"][0]["rounds"].as_array().unwrap().iter().for_each(consistent);
    assert!(found["medians"]["iops"]["ratio"].as_f64().unwrap() > 0.0);
}

/// Every round is disturbed here: as many as were asked for are dropped, and the last ones are taken all the same.
#[test]
fn disturbed_rounds_are_dropped_and_said() {
    let dir = folder();
    let stop = AtomicBool::new(false);
    let args = ["null:1G", "--vs", "null:2G", "--rounds", "2", "--runtime", "300ms", "--json"];
    let output = std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let output = bench(dir.path(), &args);
        stop.store(true, Relaxed);
        output
    });
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("2 rounds were dropped, and measured again"), "{said}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    for target in found["targets"].as_array().unwrap() {
        assert_eq!(target["rounds"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn qemus_storage_daemon_is_measured() {
    const QSD: &str = "qemu-storage-daemon";
    let dir = folder();
    let Ok(mut server) = std::process::Command::new(QSD)
        .args(["--blockdev", "driver=file,filename=disk.img,node-name=f", "--export"])
        .arg("type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=s,writable=on")
        .current_dir(dir.path())
        .spawn()
    else {
        return skip(Need::StorageDaemon, "apt install qemu-system-common");
    };
    let begun = Instant::now();
    while !dir.path().join("s").exists() && begun.elapsed() < PATIENCE {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let args = ["vhost-user:s", "--verify", "--rw", "randrw", "--io-size", "4M", "--allow-write"];
    let output = bench(dir.path(), &[&args[..], &["--json", "--iodepth", "16"]].concat());
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let found: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    consistent(&found);
    assert_eq!(number(&found["requests"]), 1024);
    assert!(number(&found["verified_sectors"]) > 0);
}

/// `ringway bench origins`, as short as can be; its tables hold all `parts`.
fn origins(which: &str, parts: &[&str]) {
    let dir = folder();
    let folder = dir.path().to_str().unwrap();
    let mut command = ringway();
    command.args(["bench", "origins", "--only", which, "--size", "64M", "--rounds", "1"]);
    command.args(["--runtime", "20ms", "--dir", folder, "--fast-dir", folder]);
    command.args(["--html", "o.html"]).current_dir(dir.path());
    let output = run(command);
    let said = text(&output.stdout);
    if text(&output.stderr).contains("O_DIRECT") {
        return skip(Need::Direct, folder);
    }
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    for part in parts {
        assert!(said.contains(part), "{part}: {said}");
    }
    let page = std::fs::read_to_string(dir.path().join("o.html")).unwrap();
    assert!(page.contains("class=\"bars\"") && page.contains("class=\"published\""));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "disk.img and o.html: {left:?}");
}

#[test]
fn origin_o1_is_printed_beside_the_published_table() {
    origins("o1", &["3467.44", "ringway: threads", "bare: ringway"]);
}

#[test]
fn origin_o2_is_printed_beside_the_published_table() {
    origins("o2", &["1822.7", "99.99th", "1384 / 1800", "at once"]);
}

#[test]
fn origin_o5_is_printed_beside_the_published_table() {
    let rows = ["372.0 k", "published: sixteen ÷ one", "ringway: sixteen rings", "back end alone"];
    origins("o5", &rows);
}

#[test]
fn origin_o3_is_printed_beside_the_published_tables() {
    let published = ["published: ramdisk, rand read", "published: SATA, qemu, seq write"];
    let ours = ["null, seq read", "sim:hdd (simulation), rand write", "file, O_DIRECT, seq write"];
    origins("o3", &[&published[..], &ours, &["auto ÷ better", "224.3 k"]].concat());
}

#[test]
fn requests_are_merged_in_the_front_end_on_request_and_counted() {
    let dir = folder();
    let args = ["null:1G", "--rw", "read", "--io-size", "40M", "--iodepth", "32", "--polling"];
    let found = json(dir.path(), &[&args[..], &["--path", "request"]].concat());
    let path = &found["path"];
    let [plugged, merged, sent] = ["plugged", "merged", "sent"].map(|key| number(&path[key]));
    // Those of the first turn are not counted, whatever was counted later.
    assert!(merged > 0 && plugged == merged + sent && plugged > 9000, "{path}");
    assert_eq!((&path["in_use"], number(&path["split"])), (&Value::from("request"), 0));
    assert_eq!(number(&found["requests"]), 40 << 8, "each is told of");
    assert!(found["facts"].as_str().unwrap().contains("path request"), "{found}");
    assert!(json(dir.path(), &args)["path"].is_null());
    // Judged, with writes, in both formats.
    let args = ["sim:ram:64M", "--rw", "randrw", "--io-size", "64M", "--verify", "--path"];
    for (path, format) in
        [("request", &[][..]), ("auto", &["--packed"]), ("request", &["--packed"])]
    {
        let found = json(dir.path(), &[&args[..], &[path], format].concat());
        assert!(number(&found["verified_sectors"]) > 0);
    }
    let output = bench(dir.path(), &[&args[..], &["request"]].concat());
    assert!(text(&output.stdout).contains("requests plugged"), "{}", text(&output.stdout));
    std::fs::write(dir.path().join("a"), [1; 1 << 20]).unwrap();
    refused(dir.path(), &["a", "--path", "request"], 1, &["without a front-end", "--path"]);
}

/// A target that stalls and has not come back when the time is over is slow, not absent.
#[test]
fn c58_a_stall_across_the_end_is_in_the_latencies() {
    let dir = folder();
    let path = dir.path();
    for rate in [None, Some("500")] {
        let daemon = Daemon::serve(path, &["disk.img", "--socket", "s", "--control", "c"]);
        let mut command = ringway();
        command.args(["bench", "vhost-user:s", "--iodepth", "4", "--runtime", "5s", "--json"]);
        command.args(["--ramp", "0"]);
        command.args(rate.iter().flat_map(|rate| ["--rate-iops", rate])).current_dir(path);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        common::guest::wait_for("it measures", || {
            let mut command = ringway();
            command.args(["ctl", "--control", "c", "--json", "stats"]).current_dir(path);
            let stats: Value = serde_json::from_slice(&run(command).stdout).unwrap();
            number(&stats["disks"][0]["counts"]["reads"]) > 200
        });
        // So that some are counted; then over the end.
        std::thread::sleep(Duration::from_millis(500));
        daemon.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_secs(6));
        daemon.signal(libc::SIGCONT);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        consistent(&found);
        let read = &found["read"];
        assert_eq!(number(&read["in_flight_at_end"]), 4, "{rate:?}");
        let max = number(&read["clat_ns"]["max"]);
        assert!(max > 2_000_000_000, "{rate:?}: {max} ns");
        assert_eq!(number(&read["unsent"]) > 0, rate.is_some());
        daemon.stop();
    }
}

#[test]
fn c58_a_measurement_of_nothing_is_no_success() {
    let dir = folder();
    let output = bench(dir.path(), &["null:1G,latency=2000ms", "--runtime", "300ms"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("no request was completed"), "{}", text(&output.stderr));
}

/// The report takes the place of another report, and of nothing else.
#[test]
fn c55_a_report_takes_the_place_of_no_target() {
    let dir = folder();
    let before = snapshot(dir.path());
    for target in ["disk.img", "null:1G"] {
        let args = [target, "--runtime", "50ms", "--html", "disk.img"];
        let output = bench(dir.path(), &args);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains("no page"), "{}", text(&output.stderr));
        assert_eq!(snapshot(dir.path()), before);
    }
    let made = ["new.img", "--size", "1M", "--runtime", "50ms", "--html", "new.img"];
    assert_eq!(bench(dir.path(), &made).status.code(), Some(1));
    assert!(!std::fs::read(dir.path().join("new.img")).unwrap().starts_with(b"<"));
    for _ in 0..2 {
        let args = ["null:1G", "--runtime", "50ms", "--html", "p.html"];
        assert_eq!(bench(dir.path(), &args).status.code(), Some(0));
    }
}
