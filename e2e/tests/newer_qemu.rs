//! What users of today's QEMU meet: guests and tools of Debian 13's, beside the machine's own.
//!
//! It gives every vhost-user-blk device rings of 1024 descriptors whatever `queue-size` says, of which the
//! firmware takes 256 and Linux 1024 (256 where memory is short), and asks for the region of requests in
//! flight with the property.

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{
    Daemon, Disk, Guest, NewerQemu, Serve, newer_qemu, ringway_program, server_is_control,
    skip_reason,
};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const QUEUES: u16 = 4;
const KILLS: u32 = 3;

struct Bench {
    dir: tempfile::TempDir,
    image: PathBuf,
}

impl Bench {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let image = dir.path().join("disk.img");
        File::create(&image)?.set_len(256 << 20)?;
        Ok(Self { dir, image })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("v.sock")
    }

    fn serve(&self) -> Result<Daemon> {
        Daemon::serve(&Serve::new(&self.image, self.socket()).queues(QUEUES))
    }
}

/// What the README has a newer QEMU started with, at this socket.
fn words_of_the_readme(socket: &Path) -> Result<Vec<String>> {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("**QEMU** (9.2 and later").context("no words for QEMU")?;
    let words = rest.split("```").nth(1).context("no block")?.replace('\\', " ");
    let at = "path=/run/ringway/disk.sock,";
    ensure!(words.matches(at).count() == 1, "{words}");
    let words = words.replace(at, &format!("path={},", socket.display()));
    Ok(words.split_whitespace().map(str::to_owned).collect())
}

/// Boots with the command line of the README, as it stands unless the ring is packed or behind an IOMMU, works, and
/// goes on after each kill of the daemon.
fn survives_kills(programs: &Path, name: &str, packed: bool, iommu: bool) -> Result<()> {
    let qemu = &programs.join("qemu-system-x86_64");
    let bench = Bench::new()?;
    let mut daemon = Some(bench.serve()?);
    let mut disk = Disk::new(bench.socket()).queues(QUEUES).reconnect();
    if packed {
        disk = disk.packed();
    }
    if iommu {
        disk = disk.behind_iommu();
    }
    let limit = Duration::from_secs(300 + 20 * u64::from(KILLS));
    let guest = Guest::new("kill").name(name).qemu(qemu).limit(limit);
    let guest = match packed || iommu {
        true => guest.disk(disk),
        false => words_of_the_readme(&bench.socket())?.into_iter().fold(guest, Guest::qemu_arg),
    };
    let guest = guest.param("kills", KILLS).param("timeout", limit.as_secs());
    let (mut killed, mut said) = (0, String::new());
    let report = guest.boot()?.finish_with(|_| {
        let mut next = || -> Result<Daemon> {
            let old = daemon.take().context("a daemon")?;
            said.push_str(&old.output());
            old.kill()?;
            bench.serve()
        };
        match next() {
            Ok(next) => {
                daemon = Some(next);
                killed += 1;
                "ok".to_owned()
            }
            Err(error) => format!("{error:#}").replace('\n', " "),
        }
    })?;
    report.expect_ok();
    assert_eq!(report.info("vda.packed"), if packed { "1" } else { "0" });
    assert_eq!(report.info("vda.features").chars().nth(33), Some(if iommu { '1' } else { '0' }));
    assert_eq!(killed, KILLS);
    let daemon = daemon.context("a daemon")?;
    said.push_str(&daemon.output());
    ensure!(!said.contains("not recorded") && !said.contains("refused"), "{said}");
    daemon.stop()
}

/// Runs `test` with the programs of such a QEMU, if this machine can have them.
fn with(which: NewerQemu, test: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    match newer_qemu(which) {
        Ok(programs) => test(programs),
        Err(lack) => {
            lack.skip();
            Ok(())
        }
    }
}

/// As [`with`], for guests.
fn guest_of(which: NewerQemu, test: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    with(which, test)
}

#[test]
fn b35_a_guest_of_a_newer_qemu_boots_and_survives_kills_of_the_daemon() -> Result<()> {
    guest_of(NewerQemu::Stable, |qemu| {
        survives_kills(qemu, "newer-qemu", false, false)?;
        survives_kills(qemu, "newer-qemu-packed", true, false)
    })
}

/// Linux's rings of 1024 descriptors are scattered in its memory.
#[test]
fn a28_a_guest_of_a_newer_qemu_behind_an_iommu_survives_kills_of_the_daemon() -> Result<()> {
    guest_of(NewerQemu::Stable, |qemu| {
        survives_kills(qemu, "newer-qemu-iommu", false, true)?;
        survives_kills(qemu, "newer-qemu-iommu-packed", true, true)
    })
}

#[test]
fn a_guest_of_the_newest_qemu_boots_and_survives_kills_of_the_daemon() -> Result<()> {
    guest_of(NewerQemu::Backports, |qemu| {
        survives_kills(qemu, "newest-qemu", false, false)?;
        survives_kills(qemu, "newest-qemu-iommu-packed", true, true)
    })
}

/// A daemon of this test, which ends with it.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU's NBD client sends writes with extended headers and without the flag that says so, since 8.2.
#[test]
fn tools_of_a_newer_qemu_write_over_nbd() -> Result<()> {
    with(NewerQemu::Stable, tools_write_over_nbd)?;
    with(NewerQemu::Backports, tools_write_over_nbd)
}

/// Starts `program` and waits until it listens at `socket`.
fn start(program: &mut Command, socket: &Path) -> Result<Server> {
    let server = Server(program.spawn()?);
    let begun = Instant::now();
    while !socket.exists() {
        ensure!(begun.elapsed() < Duration::from_secs(60), "{program:?} does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}

/// `ringway nbd` with the bench's image, and where it is.
fn nbd_server(bench: &Bench) -> Result<(Server, String)> {
    let socket = bench.dir.path().join("nbd.sock");
    let mut server = Command::new(ringway_program()?);
    server.arg("nbd").arg(&bench.image).arg("--listen");
    let server = start(server.arg(format!("unix:{}", socket.display())), &socket)?;
    Ok((server, format!("nbd+unix:///?socket={}", socket.display())))
}

/// Runs it to the end: what it says.
fn run(program: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output()?;
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    // qemu-io may fail a command and end with status 0.
    ensure!(output.status.success() && !said.contains("failed"), "{program:?} {args:?}: {said}");
    Ok(said)
}

/// A file of the size of a disk, with data in its first part.
fn source(bench: &Bench, bytes: u64) -> Result<String> {
    let source = bench.dir.path().join("source.img");
    let content: Vec<u8> = (0..8u32 << 20).map(|at| (at / 512 % 251).to_le_bytes()[0]).collect();
    std::fs::write(&source, content)?;
    File::options().write(true).open(&source)?.set_len(bytes)?;
    Ok(source.to_str().context("a name")?.to_owned())
}

fn tools_write_over_nbd(programs: &Path) -> Result<()> {
    let bench = Bench::new()?;
    let (_server, export) = nbd_server(&bench)?;
    let run = |program: &str, args: &[&str]| run(&programs.join(program), args).map(drop);
    for cache in ["none", "writeback"] {
        let write = ["-f", "raw", "-t", cache, "-c", "write -P 90 1M 192k", "-c", "flush", &export];
        run("qemu-io", &write)?;
        let zero =
            ["-f", "raw", "-t", cache, "-c", "write -z 1M 64k", "-c", "discard 4M 1M", &export];
        run("qemu-io", &zero)?;
        let read = ["-c", "read -P 0 1M 64k", "-c", "read -P 90 1088k 128k", &export];
        run("qemu-io", &[&["-f", "raw"][..], &read].concat())?;
    }
    let source = source(&bench, 256 << 20)?;
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &source, &export])?;
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &export])
}

/// libnbd as a client of `ringway nbd`, nbdkit as a server of `ringway copy`.
#[test]
fn nbd_tools_of_a_newer_debian_copy_both_ways() -> Result<()> {
    with(NewerQemu::Stable, |programs| {
        let bench = Bench::new()?;
        let source = source(&bench, 256 << 20)?;
        let back = bench.dir.path().join("back.img");
        let back = back.to_str().context("a name")?;
        {
            let (_server, export) = nbd_server(&bench)?;
            let tool = |program: &str, args: &[&str]| run(&programs.join(program), args);
            let size = tool("nbdinfo", &["--size", &export])?;
            ensure!(size.trim() == (256u64 << 20).to_string(), "nbdinfo: {size}");
            tool("nbdcopy", &["--flush", &source, &export])?;
            tool("nbdinfo", &["--map", &export])?;
            tool("nbdcopy", &[&export, back])?;
        }
        ensure!(std::fs::read(&source)? == std::fs::read(back)?, "what nbdcopy has copied");
        std::fs::remove_file(back)?;
        let socket = bench.dir.path().join("kit.sock");
        let mut server = Command::new(programs.join("nbdkit"));
        server.args(["-f", "-U"]).arg(&socket);
        server.arg(programs.with_file_name("plugins").join("nbdkit-memory-plugin.so"));
        let _server = start(server.arg("size=256M"), &socket)?;
        let export = format!("nbd+unix:///?socket={}", socket.display());
        run(&ringway_program()?, &["copy", "--force", &source, &export])?;
        run(&ringway_program()?, &["copy", "--verify", &export, back])?;
        ensure!(std::fs::read(&source)? == std::fs::read(back)?, "what nbdkit has kept");
        Ok(())
    })
}

/// What its servers serve is copied both ways, and served to guests: exports of qemu-nbd, disks of
/// qemu-storage-daemon.
#[test]
fn servers_of_newer_qemus_are_read_and_written() -> Result<()> {
    with(NewerQemu::Stable, servers_are_used)?;
    with(NewerQemu::Backports, servers_are_used)
}

fn servers_are_used(programs: &Path) -> Result<()> {
    let bench = Bench::new()?;
    let source = source(&bench, 256 << 20)?;
    let ringway = ringway_program()?;
    let path = |name: &str| bench.dir.path().join(name);
    let image = bench.image.to_str().context("a name")?;
    let back = path("back.img");
    let same = |from: &str| -> Result<()> {
        run(&ringway, &["copy", "--verify", from, back.to_str().context("a name")?])?;
        ensure!(std::fs::read(&source)? == std::fs::read(&back)?, "what was copied from {from}");
        Ok(std::fs::remove_file(&back)?)
    };
    let io = |at: &str, byte: u8| {
        let write = format!("write -P {byte} 1M 192k");
        let verify = format!("verify -P {byte} 1M 192k");
        run(&ringway, &["io", at, "-c", &write, "-c", "flush", "-c", &verify]).map(drop)
    };
    {
        let socket = path("qemu-nbd.sock");
        let mut server = Command::new(programs.join("qemu-nbd"));
        server.args(["-f", "raw", "-t", "-e", "8", "-k"]).arg(&socket).arg(image);
        let _server = start(&mut server, &socket)?;
        let export = format!("nbd:unix:{}", socket.display());
        run(&ringway, &["copy", "--force", &source, &export])?;
        same(&export)?;
        // In front of a guest.
        let daemon = Daemon::serve(&Serve::new(&export, bench.socket()))?;
        io(&format!("vhost-user:{}", bench.socket().display()), 90)?;
        daemon.stop()?;
    }
    ensure!(std::fs::read(image)?[1 << 20..][..192 << 10] == vec![90; 192 << 10], "qemu-nbd");
    let socket = path("storage.sock");
    let mut server = Command::new(programs.join("qemu-storage-daemon"));
    server.arg("--blockdev").arg(format!("driver=file,filename={image},node-name=f"));
    server.args(["--object", "iothread,id=t", "--export"]).arg(format!(
        "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable=on,num-queues=2,iothread=t",
        socket.display()
    ));
    let _server = start(&mut server, &socket)?;
    let disk = format!("vhost-user:{}", socket.display());
    io(&disk, 91)?;
    run(&ringway, &["copy", "--force", &source, &disk])?;
    same(&disk)?;
    let load = ["--rw", "randrw", "--verify", "--io-size", "4M", "--allow-write", "--jobs", "2"];
    run(&ringway, &[&["bench", &disk][..], &load].concat()).map(drop)
}

/// Each is a judge of what the other one makes.
#[test]
fn images_of_newer_qemus_and_ours_are_the_same_to_both() -> Result<()> {
    with(NewerQemu::Stable, images_are_the_same)?;
    with(NewerQemu::Backports, images_are_the_same)
}

fn images_are_the_same(programs: &Path) -> Result<()> {
    let bench = Bench::new()?;
    let dir = bench.dir.path();
    let source = source(&bench, 64 << 20)?;
    let name = |name: &str| dir.join(name).to_str().map(str::to_owned).context("a name");
    let (qemu_img, qemu_io) = (programs.join("qemu-img"), programs.join("qemu-io"));
    let ringway = ringway_program()?;
    let (made, clone) = (name("made.qcow2")?, name("clone.qcow2")?);
    let whole = |image: &str, content: &str, format: &str| -> Result<()> {
        run(&qemu_img, &["check", "-f", "qcow2", image])?;
        run(&ringway, &["check", image])?;
        run(&qemu_img, &["compare", "-f", "qcow2", "-F", format, image, content])?;
        let flat = name("flat.img")?;
        run(&ringway, &["copy", "-f", "qcow2", image, &flat])?;
        run(&qemu_img, &["compare", "-f", "raw", "-F", format, &flat, content])?;
        Ok(std::fs::remove_file(flat)?)
    };
    for compress in ["none", "zlib", "zstd"] {
        let compressed = format!("--compress={compress}");
        let compressed: &[&str] = if compress == "none" { &[] } else { &[&compressed] };
        // Ours.
        run(&ringway, &[&["copy", &source, &made][..], compressed].concat())?;
        whole(&made, &source, "raw")?;
        run(&ringway, &["create", &clone, "--backing", &made])?;
        // Both write to it, and to a part of a cluster.
        run(&ringway, &["io", "-f", "qcow2", &clone, "-c", "write -P 7 100k 300k"])?;
        run(&qemu_io, &["-f", "qcow2", "-c", "write -P 8 5M 70k", "-c", "write -z 6M 1M", &clone])?;
        let verify =
            ["-c", "verify -P 8 5M 70k", "-c", "verify -P 0 6M 1M", "-c", "verify -P 7 100k 300k"];
        run(&ringway, &[&["io", "-f", "qcow2", "--read-only", &clone][..], &verify].concat())?;
        let both = name("both.img")?;
        run(&qemu_img, &["convert", "-f", "qcow2", "-O", "raw", &clone, &both])?;
        whole(&clone, &both, "raw")?;
        for file in [&made, &clone, &both] {
            std::fs::remove_file(file)?;
        }
        // Theirs, by default and with other clusters and counts.
        let kind =
            format!("compression_type={}", if compress == "none" { "zlib" } else { compress });
        let compressed: &[&str] = if compress == "none" { &[] } else { &["-c"] };
        for options in [kind.clone(), format!("{kind},cluster_size=4k,refcount_bits=1")] {
            let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", &options, &source, &made];
            run(&qemu_img, &[&convert[..1], compressed, &convert[1..]].concat())?;
            whole(&made, &source, "raw")?;
            std::fs::remove_file(&made)?;
        }
    }
    Ok(())
}
