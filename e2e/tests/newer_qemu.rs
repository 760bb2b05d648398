//! What users of today's QEMU meet: guests and tools of Debian 13's, beside the machine's own.
//!
//! It gives every vhost-user-blk device rings of 1024 descriptors whatever `queue-size` says, of which the
//! firmware takes 256 and Linux 1024 (256 where memory is short), and asks for the region of requests in
//! flight with the property.

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, newer_qemu, server_is_control, skip_reason};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// Boots with the command line of the README, works, and goes on after each kill of the daemon.
fn survives_kills(qemu: &Path, name: &str, packed: bool) -> Result<()> {
    let bench = Bench::new()?;
    let mut daemon = Some(bench.serve()?);
    let mut disk = Disk::new(bench.socket()).queues(QUEUES).reconnect();
    if packed {
        disk = disk.packed();
    }
    let limit = Duration::from_secs(300 + 20 * u64::from(KILLS));
    let guest = Guest::new("kill").name(name).qemu(qemu).disk(disk).limit(limit);
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
    assert_eq!(killed, KILLS);
    let daemon = daemon.context("a daemon")?;
    said.push_str(&daemon.output());
    ensure!(!said.contains("not recorded") && !said.contains("refused"), "{said}");
    daemon.stop()
}

#[test]
fn b35_a_guest_of_a_newer_qemu_boots_and_survives_kills_of_the_daemon() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    match newer_qemu() {
        Ok(programs) => {
            let qemu = programs.join("qemu-system-x86_64");
            survives_kills(&qemu, "newer-qemu", false)?;
            survives_kills(&qemu, "newer-qemu-packed", true)
        }
        Err(lack) => {
            lack.skip();
            Ok(())
        }
    }
}
