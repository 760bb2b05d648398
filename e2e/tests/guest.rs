//! A stock Linux guest on a disk that Ringway serves.  See `ringway_e2e::guest`.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, server_is_control, skip_reason};

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 4;

/// A sparse disk image and a place for its socket.
struct Bench {
    dir: tempfile::TempDir,
    image: PathBuf,
}

impl Bench {
    fn new(size: u64) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let image = dir.path().join("disk.img");
        File::create(&image)?.set_len(size)?;
        Ok(Self { dir, image })
    }

    fn serve(&self) -> Serve {
        Serve::new(&self.image, self.dir.path().join("v.sock")).queues(QUEUES)
    }

    fn guest(daemon: &Daemon, scenario: &str) -> Guest {
        Guest::new(scenario).disk(Disk::new(daemon.socket()).queues(QUEUES))
    }
}

/// Bytes the host really holds for a file.
fn allocated(image: &Path) -> u64 {
    image.metadata().map_or(0, |found| found.blocks() * 512)
}

/// The first boot formats, writes, deletes, trims and zeroes; the second one, with a fresh daemon,
/// finds everything in its place.
#[test]
fn guest_boots_formats_writes_verifies_reboots() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let bench = Bench::new(512 * MIB)?;

    let daemon = Daemon::serve(&bench.serve().serial("RW-GUEST-0001"))?;
    // QEMU's own server reports no write cache and a serial number of its own.
    let (cache, serial) = match server_is_control() {
        true => ("through", "vhost_user_blk"),
        false => ("back", "RW-GUEST-0001"),
    };
    let first = Bench::guest(&daemon, "full").param("write_cache", cache).boot()?.finish()?;
    first.expect_ok();
    assert_eq!(first.info("vda.serial"), serial);
    assert_eq!(first.info("vda.sectors"), (512 * MIB / 512).to_string());
    daemon.stop()?;

    let daemon = Daemon::serve(&bench.serve())?;
    let second = Bench::guest(&daemon, "verify").boot()?.finish()?;
    second.expect_ok();
    let sums = first.infos_with("sum.");
    assert!(sums.len() > 20, "only {} checksums", sums.len());
    assert_eq!(sums, second.infos_with("sum."));
    daemon.stop()
}

/// Packed rings under the stock driver: verified I/O from every CPU, a file system, trim, zeroing,
/// and all of it still there for a guest on split rings. QEMU falls back to split ones silently, so
/// the guest says which it has: feature bit 34 is character 35.
#[test]
fn guest_on_packed_rings_boots_formats_writes_verifies() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server has no packed rings.
    }
    let bench = Bench::new(512 * MIB)?;
    let daemon = Daemon::serve(&bench.serve())?;
    let disk = Disk::new(daemon.socket()).queues(QUEUES).packed();
    let packed = Guest::new("full").disk(disk).boot()?.finish()?;
    packed.expect_ok();
    assert_eq!(packed.info("vda.packed"), "1");
    assert_eq!(packed.info("vda.features").chars().nth(34), Some('1'));

    let split = Bench::guest(&daemon, "verify").boot()?.finish()?;
    split.expect_ok();
    assert_eq!(split.info("vda.packed"), "0");
    let sums = packed.infos_with("sum.");
    assert!(sums.len() > 20, "only {} checksums", sums.len());
    assert_eq!(sums, split.infos_with("sum."));
    daemon.stop()
}

/// A stock guest whose disk is behind a virtual IOMMU: it programs I/O virtual addresses, QEMU
/// translates them page by page, and takes the translations back while requests are in flight, after
/// each request with `iommu.strict=1`. Feature bit 33 says that the guest does not use physical ones.
fn behind_an_iommu(packed: bool, strict: bool) -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server has no translation cache.
    }
    let bench = Bench::new(256 * MIB)?;
    let daemon = Daemon::serve(&bench.serve())?;
    let mut disk = Disk::new(daemon.socket()).queues(QUEUES).behind_iommu();
    if packed {
        disk = disk.packed();
    }
    // QEMU answers for one page at a time, from a loop that its emulated CPUs leave little time.
    let mut guest = Guest::new("iommu").disk(disk).limit(std::time::Duration::from_secs(300));
    if strict {
        guest = guest.kernel_arg("iommu.strict=1");
    }
    let report = guest.boot()?.finish()?;
    report.expect_ok();
    assert_eq!(report.info("vda.features").chars().nth(33), Some('1'));
    assert_eq!(report.info("vda.packed"), if packed { "1" } else { "0" });
    assert_eq!(report.info("iommu_mode"), if strict { "DMA" } else { "DMA-FQ" });
    daemon.stop()
}

#[test]
fn guest_behind_an_iommu_writes_and_verifies() -> Result<()> {
    behind_an_iommu(false, false)
}

#[test]
fn guest_behind_a_strict_iommu_on_packed_rings_writes_and_verifies() -> Result<()> {
    behind_an_iommu(true, true)
}

/// A file of 96 MiB is deleted in the guest and trimmed: the image gives the space back, and the
/// guest's other files are unharmed.
#[test]
fn guest_sees_fstrim_free_space() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let bench = Bench::new(512 * MIB)?;
    let daemon = Daemon::serve(&bench.serve())?;
    let (mut full, mut trimmed) = (0, 0);
    let report = Bench::guest(&daemon, "trim").boot()?.finish_with(|question| {
        match question {
            "big_file_written" => full = allocated(&bench.image),
            "trimmed" => trimmed = allocated(&bench.image),
            _ => return "what?".to_owned(),
        }
        "ok".to_owned()
    })?;
    report.expect_ok();
    assert!(full >= 96 * MIB, "the image held only {full} bytes before the trim");
    assert!(trimmed + 90 * MIB <= full, "the trim freed too little: {full} to {trimmed} bytes");
    daemon.stop()
}

/// A running guest sees its disk grow and shrink, with a file system in use on it: QEMU is told
/// (VHOST_USER_BACKEND_CONFIG_CHANGE_MSG), and tells its guest.
#[test]
fn guest_sees_a_new_size() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server is told in another way.
    }
    let bench = Bench::new(64 * MIB)?;
    let control = bench.dir.path().join("ctl");
    let daemon = Daemon::serve(&bench.serve().arg("--control").arg(&control))?;
    let mut said = Vec::new();
    let report = Bench::guest(&daemon, "resize").boot()?.finish_with(|question| {
        let done = match question {
            "grow" => Daemon::ctl(&control, &["resize", "0", "128M"]),
            "grow_file" => File::options()
                .write(true)
                .open(&bench.image)
                .and_then(|file| file.set_len(192 * MIB))
                .map_err(Into::into)
                .and_then(|()| Daemon::ctl(&control, &["resize", "0"])),
            "shrink" => Daemon::ctl(&control, &["resize", "0", "64M", "--shrink"]),
            _ => return "what?".to_owned(),
        };
        match done {
            Ok(line) => {
                said.push(line);
                "ok".to_owned()
            }
            Err(error) => format!("{error:#}").replace('\n', " "),
        }
    })?;
    report.expect_ok();
    assert_eq!(said.len(), 3);
    assert!(said.iter().all(|line| line.contains("the guest was told")), "{said:?}");
    assert_eq!(bench.image.metadata()?.len(), 64 * MIB);
    daemon.stop()
}

/// QEMU does not read the size when it reconnects, and shows its guest what it has kept: the next daemon
/// tells it.
#[test]
fn c15_guest_sees_a_size_that_changed_while_daemons_came_and_went() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server is told in another way.
    }
    let bench = Bench::new(64 * MIB)?;
    let control = bench.dir.path().join("ctl");
    let serve = || Daemon::serve(&bench.serve().arg("--control").arg(&control));
    let mut daemon = Some(serve()?);
    let disk = Disk::new(bench.dir.path().join("v.sock")).queues(QUEUES).reconnect();
    let report = Guest::new("size").disk(disk).boot()?.finish_with(|question| {
        let mut change = || -> Result<()> {
            let mut kill = || daemon.take().map_or(Ok(()), Daemon::kill);
            let grow = |mib| File::options().write(true).open(&bench.image)?.set_len(mib * MIB);
            match question {
                // The file has its new size, and the daemon that has it dies before it notices.
                "grown_and_killed" => grow(96).map_err(Into::into).and_then(|()| kill())?,
                "killed_and_grown" => kill().and_then(|()| Ok(grow(128)?))?,
                // The daemon knows, and so may the guest.
                "resized_and_killed" => {
                    Daemon::ctl(&control, &["resize", "0", "160M"])?;
                    kill()?;
                }
                _ => anyhow::bail!("what?"),
            }
            daemon = Some(serve()?);
            Ok(())
        };
        change().map_or_else(|error| format!("{error:#}").replace('\n', " "), |()| "ok".to_owned())
    })?;
    report.expect_ok();
    daemon.map_or(Ok(()), Daemon::stop)
}

#[test]
fn guest_readonly_disk_refuses_writes() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let bench = Bench::new(64 * MIB)?;
    let content: Vec<u8> = (0..4 * MIB).map(|n| (n % 251).to_le_bytes()[0]).collect();
    File::options().write(true).open(&bench.image)?.write_all(&content)?;
    let before = std::fs::read(&bench.image)?;

    let daemon = Daemon::serve(&bench.serve().read_only())?;
    let report = Bench::guest(&daemon, "readonly").boot()?.finish()?;
    report.expect_ok();
    daemon.stop()?;
    let sum = std::process::Command::new("sh")
        .args(["-c", "head -c 4194304 \"$1\" | sha256sum | cut -d' ' -f1", "sh"])
        .arg(&bench.image)
        .output()?;
    assert_eq!(report.info("read_sha256"), String::from_utf8(sum.stdout)?.trim());
    assert!(std::fs::read(&bench.image)? == before, "the read-only image has changed");
    Ok(())
}

/// Kills of the daemon under one guest.
fn kills() -> u32 {
    std::env::var("RINGWAY_GUEST_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(3)
}

/// The daemon is killed under verified writes, 256 in flight, and another one started; QEMU
/// reconnects, and the guest goes on with every write in its place and a clean log. Behind an IOMMU
/// what was in flight can be done again only once QEMU has translated its addresses anew.
fn survives_kills(packed: bool, iommu: bool) -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    let bench = Bench::new(256 * MIB)?;
    let mut daemon = Some(Daemon::serve(&bench.serve())?);
    let mut disk = Disk::new(bench.dir.path().join("v.sock")).queues(QUEUES).reconnect();
    if packed {
        disk = disk.packed();
    }
    if iommu {
        disk = disk.behind_iommu();
    }
    let limit = 300 + 20 * u64::from(kills());
    let limit = std::time::Duration::from_secs(limit);
    let guest = Guest::new("kill").disk(disk).limit(limit).param("kills", kills());
    let mut killed = 0;
    let report = guest.param("timeout", limit.as_secs()).boot()?.finish_with(|_| {
        let mut next = || -> Result<Daemon> {
            daemon.take().map_or(Ok(()), Daemon::kill)?;
            Daemon::serve(&bench.serve())
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
    assert_eq!(killed, kills());
    daemon.map_or(Ok(()), Daemon::stop)
}

#[test]
fn guest_survives_kills_of_the_daemon() -> Result<()> {
    survives_kills(false, false)
}

#[test]
fn guest_on_packed_rings_survives_kills_of_the_daemon() -> Result<()> {
    survives_kills(true, false)
}

#[test]
fn guest_behind_an_iommu_survives_kills_of_the_daemon() -> Result<()> {
    survives_kills(false, true)
}

/// What the daemon has counted since it was started: whether the guest's write cache is on, bytes
/// written, and how many of them durably; flushes.
fn written(control: &Path) -> Result<(bool, u64, u64, u64)> {
    let text = Daemon::ctl(control, &["stats", "--json"])?;
    let stats: serde_json::Value = serde_json::from_str(&text)?;
    let disk = &stats["disks"][0];
    let count = |name: &str| disk["counts"][name].as_u64().context("a count");
    let cache = disk["write_cache"].as_bool().context("write_cache")?;
    Ok((cache, count("written_bytes")?, count("durable_bytes")?, count("flushes")?))
}

/// A guest that has switched its write cache off flushes no more, and QEMU does not repeat that when
/// it reconnects: the next daemon has to know.
#[test]
fn c06_guest_without_a_write_cache_outlives_its_daemons() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps nothing.
    }
    let bench = Bench::new(64 * MIB)?;
    let control = bench.dir.path().join("c");
    let state = bench.dir.path().join("state");
    let serve = || {
        let serve = bench.serve().arg("--control").arg(&control);
        Daemon::serve(&serve.arg("--state-dir").arg(&state))
    };
    let mut daemon = Some(serve()?);
    let disk = Disk::new(bench.dir.path().join("v.sock")).queues(QUEUES).reconnect();
    let mut before = (true, 0, 0, 0);
    let report = Guest::new("cache").disk(disk).boot()?.finish_with(|question| {
        let mut act = || -> Result<()> {
            match question {
                "killed" => daemon.take().map_or(Ok(()), Daemon::kill)?,
                "stopped" => daemon.take().map_or(Ok(()), Daemon::stop)?,
                _ => {}
            }
            if daemon.is_none() {
                daemon = Some(serve()?);
                before = (false, 0, 0, 0);
                return Ok(());
            }
            let now = written(&control)?;
            let (bytes, durable) = (now.1 - before.1, now.2 - before.2);
            let right = match question {
                "flushed" => now.0 && bytes > 0 && durable == 0 && now.3 > 0,
                "durable" => !now.0 && bytes >= 96 << 10 && durable >= bytes,
                "volatile" => now.0 && bytes >= 96 << 10 && durable == 0 && now.3 > before.3,
                _ => true,
            };
            before = now;
            anyhow::ensure!(right, "{question}: {now:?}, {bytes} bytes, {durable} durably");
            Ok(())
        };
        act().map_or_else(|error| format!("{error:#}").replace('\n', " "), |()| "ok".to_owned())
    })?;
    report.expect_ok();
    daemon.map_or(Ok(()), Daemon::stop)
}
