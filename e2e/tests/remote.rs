//! A stock Linux guest on a disk of an NBD server that is not ours, whose server and whose daemon are
//! killed in turn.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, server_is_control, skip_reason};

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

    let limit = Duration::from_secs(120 + 30 * u64::from(KILLS));
    let disk = Disk::new(&socket).queues(QUEUES).reconnect();
    let guest = Guest::new("kill").name("remote").disk(disk).limit(limit).param("kills", KILLS);
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
    let answer = |_: &str| match kill() {
        Ok(()) => "ok".to_owned(),
        Err(error) => format!("{error:#}").replace('\n', " "),
    };
    let report = guest.param("timeout", limit.as_secs()).boot()?.finish_with(answer)?;
    report.expect_ok();
    assert_eq!(killed, KILLS);
    daemon.map_or(Ok(()), Daemon::stop)
}
