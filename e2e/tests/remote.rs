//! A stock Linux guest that its firmware starts from disks of other servers: of an NBD server that is not
//! ours, of a Ceph cluster. Server and daemon are killed in turn.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, server_is_control, skip_reason};
use ringway_testkit::{Need, skip};

/// Of the disk's 256 MiB so many are what the guest starts from, and nobody writes.
const BOOT_MIB: u32 = 96;
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
fn f10_a_guest_boots_from_an_nbd_export_and_outlives_its_server_and_its_daemon() -> Result<()> {
    if cannot_boot() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    let socket = folder.join("v.sock");
    let image = folder.join("guest.img");
    let guest = guest(&socket, "remote", KILLS).from_disk(&image, BOOT_MIB)?;
    let before = beginning(&image)?;
    let mut server = Some(Server::start(folder)?);
    let export = format!("nbd:unix:{}/n.sock", folder.display());
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
    works_while_killed(guest, &mut kill)?;
    assert_eq!(killed, KILLS);
    daemon.map_or(Ok(()), Daemon::stop)?;
    drop(server);
    ensure!(beginning(&image)? == before, "what the guest has started from has changed");
    Ok(())
}

/// True if guests, or what makes a disk that boots, are not here; that is told.
fn cannot_boot() -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let is_there = |name: &str| path.split(':').any(|dir| Path::new(dir).join(name).is_file());
    if skip_reason().is_some() {
        return true;
    }
    let missing = ["mkfs.vfat", "mcopy", "syslinux"].into_iter().find(|name| !is_there(name));
    if let Some(name) = missing {
        skip(
            Need::Guest,
            format_args!("there is no {name}: packages dosfstools, mtools, syslinux"),
        );
    }
    missing.is_some()
}

/// A guest on the disk at `socket` that writes and verifies what is behind its boot file system, and asks
/// `kills` times that something be killed.
fn guest(socket: &Path, name: &str, kills: u32) -> Guest {
    let limit = Duration::from_secs(300 + 60 * u64::from(kills));
    let disk = Disk::new(socket).queues(QUEUES).reconnect();
    let guest = Guest::new("kill").name(name).disk(disk).limit(limit).param("kills", kills);
    guest.param("timeout", limit.as_secs()).param("from_mib", BOOT_MIB)
}

/// What a guest starts from.
fn beginning(image: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(image)?.take(u64::from(BOOT_MIB) << 20).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The guest starts, works, and has `kill` kill something, after which all is there again.
fn works_while_killed(guest: Guest, kill: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let answer = |_: &str| match kill() {
        Ok(()) => "ok".to_owned(),
        Err(error) => format!("{error:#}").replace('\n', " "),
    };
    guest.boot()?.finish_with(answer)?.expect_ok();
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
        command.env("STORE", "bluestore");
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the cluster does not {what}: {said}");
        Ok(())
    }

    /// `rbd ARGS`.
    fn rbd(&self, args: &[&str]) -> Result<()> {
        let mut command = Command::new("rbd");
        command.arg("-c").arg(self.0.join("ceph.conf")).args(args).arg("--no-progress");
        let output = command.current_dir(self.0).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "rbd {args:?}: {said}");
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
fn g01_a_guest_boots_from_an_image_and_outlives_its_daemon_and_the_osd() -> Result<()> {
    if cannot_boot() || server_is_control() {
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
    let (socket, image) = (folder.join("v.sock"), folder.join("guest.img"));
    let guest = guest(&socket, "cluster", 3).from_disk(&image, BOOT_MIB)?;
    cluster.rbd(&["import", "guest.img", "rbd/guest"])?;
    let serve = || {
        let serve = Serve::new("rbd:rbd/guest", &socket).queues(QUEUES);
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
    works_while_killed(guest, &mut kill)?;
    assert_eq!(killed, 3);
    daemon.map_or(Ok(()), Daemon::stop)?;
    cluster.rbd(&["export", "rbd/guest", "after.img"])?;
    let after = beginning(&folder.join("after.img"))?;
    ensure!(after == beginning(&image)?, "what the guest has started from has changed");
    Ok(())
}
