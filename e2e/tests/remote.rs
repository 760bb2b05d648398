//! A stock Linux guest on disks of other servers: an NBD server that is not ours, a Ceph cluster. Server and
//! daemon are killed in turn.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, server_is_control, skip_reason};
use ringway_testkit::{Need, skip};

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 4;
/// Kills of the server and of the daemon under the guest, in turn.
const KILLS: u32 = 4;

/// `qemu-nbd`; dropping it kills it.
struct Server(Child);

impl Server {
    /// Serves `guest.img` of `folder` at its socket `n.sock`.
    fn start(folder: &Path) -> Result<Self> {
        let socket = folder.join("n.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=8", "--format=raw", "--cache=writeback"]);
        command.arg("--socket").arg(&socket).arg("guest.img").current_dir(folder);
        let server = Self(command.spawn()?);
        let begun = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            ensure!(begun.elapsed() < Duration::from_secs(60), "qemu-nbd does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// F10: every write is durable, so neither end may lose any.
#[test]
fn f10_a_guest_outlives_its_nbd_server_and_its_daemon() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    std::fs::File::create(folder.join("guest.img"))?.set_len(256 * MIB)?;
    let mut server = Some(Server::start(folder)?);
    let export = format!("nbd:unix:{}/n.sock", folder.display());
    let socket = folder.join("v.sock");
    let serve = || {
        let serve = Serve::new(&export, &socket).queues(QUEUES);
        Daemon::serve(&serve.arg("--cache").arg("writethrough"))
    };
    let mut daemon = Some(serve()?);

    let mut killed = 0;
    let mut kill = || -> Result<()> {
        if killed % 2 == 0 {
            drop(server.take());
            server = Some(Server::start(folder)?);
        } else {
            daemon.take().map_or(Ok(()), Daemon::kill)?;
            daemon = Some(serve()?);
        }
        killed += 1;
        Ok(())
    };
    works_while_killed(&socket, "remote", KILLS, &mut kill)?;
    assert_eq!(killed, KILLS);
    daemon.map_or(Ok(()), Daemon::stop)
}

/// A guest on the disk at `socket` writes and verifies, and asks `kills` times that something be killed, and
/// all is there again, by the function.
fn works_while_killed(
    socket: &Path,
    name: &str,
    kills: u32,
    kill: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let limit = Duration::from_secs(120 + 30 * u64::from(kills));
    let disk = Disk::new(socket).queues(QUEUES).reconnect();
    let guest = Guest::new("kill").name(name).disk(disk).limit(limit).param("kills", kills);
    let answer = |_: &str| match kill() {
        Ok(()) => "ok".to_owned(),
        Err(error) => format!("{error:#}").replace('\n', " "),
    };
    let report = guest.param("timeout", limit.as_secs()).boot()?.finish_with(answer)?;
    report.expect_ok();
    Ok(())
}

/// `tools/ceph-mini.sh` on a folder: a cluster of one monitor and one OSD. Dropping it ends it.
struct Cluster<'a>(&'a Path);

impl Cluster<'_> {
    fn script(&self, what: &str) -> Result<()> {
        // Another than those of the program's tests.
        let port = 10_000 + std::process::id() % 4_000 * 2;
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/ceph-mini.sh");
        let mut command = Command::new(script);
        command.arg(what).arg(self.0).env("PORT", port.to_string());
        command.env("STORE", "bluestore").env("SIZE", "256M");
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the cluster does not {what}: {said}");
        Ok(())
    }

    /// Kills its OSD, and starts it again.
    fn restart_osd(&self) -> Result<()> {
        let file = self.0.join("osd.0.pid");
        let pid = std::fs::read_to_string(&file)?;
        let status = Command::new("kill").args(["-9", pid.trim()]).status()?;
        ensure!(status.success(), "the OSD is not there");
        let begun = Instant::now();
        // Its folder is locked until it is gone.
        while Path::new("/proc").join(pid.trim()).exists() {
            ensure!(begun.elapsed() < Duration::from_secs(60), "the OSD does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_file(file)?;
        self.script("osd")
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        let _ = self.script("stop");
    }
}

/// G1, G3: the daemon, the OSD and the daemon again are killed.
#[test]
fn g01_a_guest_outlives_its_daemon_and_the_osd_of_its_cluster() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(());
    }
    for program in ["ceph-mon", "ceph-osd", "ceph", "rbd", "ceph-authtool", "monmaptool"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
            skip(Need::Ceph, program);
            return Ok(());
        }
    }
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    let cluster = Cluster(folder);
    cluster.script("start")?;
    let socket = folder.join("v.sock");
    let serve = || {
        let serve = Serve::new("rbd:rbd/img", &socket).queues(QUEUES);
        Daemon::serve(&serve.arg("--ceph-conf").arg(folder.join("ceph.conf")))
    };
    let mut daemon = Some(serve()?);
    let mut killed = 0;
    let mut kill = || -> Result<()> {
        if killed % 2 == 0 {
            daemon.take().map_or(Ok(()), Daemon::kill)?;
            daemon = Some(serve()?);
        } else {
            cluster.restart_osd()?;
        }
        killed += 1;
        Ok(())
    };
    works_while_killed(&socket, "cluster", 3, &mut kill)?;
    assert_eq!(killed, 3);
    daemon.map_or(Ok(()), Daemon::stop)
}
