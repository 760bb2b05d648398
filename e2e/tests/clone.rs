//! A stock Linux guest on a clone of another guest's disk: a qcow2 image that is based on a raw one.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{
    Daemon, Disk, Guest, Serve, ringway_program, server_is_control, skip_reason,
};

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 4;
/// Kills of the daemon under the guest.
const KILLS: u32 = 3;
/// How long each of the other guests may take.
const LIMIT: Duration = Duration::from_secs(240);

/// Runs the program, which must succeed; what it says.
fn ringway(args: &[&str], folder: &Path) -> Result<String> {
    let output = Command::new(ringway_program()?).args(args).current_dir(folder).output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(output.status.success(), "{args:?}: {said}");
    Ok(said)
}

/// `qemu-img check`: no error; leaks only if they may be.
fn judge(folder: &Path, leaks: bool) -> Result<()> {
    let args = ["check", "-f", "qcow2", "clone.qcow2"];
    let output = Command::new("qemu-img").args(args).current_dir(folder).output()?;
    let code = output.status.code();
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(code == Some(0) || (leaks && code == Some(3)), "qemu-img check: {code:?} {said}");
    Ok(())
}

/// One guest fills a raw disk; another boots with a clone of it and finds every file; a third one writes
/// the clone while its daemon is killed again and again. The clone is whole, and the base is as it was.
#[test]
fn guests_work_on_a_clone_whose_daemon_is_killed() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server keeps no record of what is in flight.
    }
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    let (base, socket) = (folder.join("guest.img"), folder.join("v.sock"));
    std::fs::File::create(&base)?.set_len(512 * MIB)?;
    let disk = || Disk::new(&socket).queues(QUEUES).reconnect();

    let daemon = Daemon::serve(&Serve::new(&base, &socket).queues(QUEUES))?;
    let full = Guest::new("full").disk(disk()).limit(LIMIT).param("write_cache", "back");
    let full = full.boot()?.finish()?;
    full.expect_ok();
    daemon.stop()?;
    let before = std::fs::read(&base).context("the base")?;
    let mut permissions = base.metadata()?.permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&base, permissions)?;

    ringway(&["create", "clone.qcow2", "--backing", "guest.img"], folder)?;
    let clone = folder.join("clone.qcow2");
    let serve = || Serve::new(&clone, &socket).queues(QUEUES).arg("--format").arg("qcow2");
    let daemon = Daemon::serve(&serve())?;
    let second = Guest::new("verify").disk(disk()).limit(LIMIT).boot()?.finish()?;
    second.expect_ok();
    let sums = full.infos_with("sum.");
    assert!(sums.len() > 20, "only {} checksums", sums.len());
    assert_eq!(sums, second.infos_with("sum."), "the files of the base");
    daemon.stop()?;
    judge(folder, false)?;

    let mut daemon = Some(Daemon::serve(&serve())?);
    let limit = Duration::from_secs(120 + 30 * u64::from(KILLS));
    let guest = Guest::new("kill").disk(disk()).limit(limit).param("kills", KILLS);
    let mut killed = 0;
    let report = guest.param("timeout", limit.as_secs()).boot()?.finish_with(|_| {
        let mut next = || -> Result<Daemon> {
            daemon.take().map_or(Ok(()), Daemon::kill)?;
            Daemon::serve(&serve())
        };
        match next() {
            Ok(next) => {
                daemon = Some(next);
                killed += 1;
                "ok".to_owned()
            }
            Err(error) => format!("{error:#}").replace('\n', " "),
        }
    });
    let said = daemon.as_ref().map(Daemon::output);
    let report = report.with_context(|| format!("after {killed} kills; the daemon: {said:?}"))?;
    report.expect_ok();
    assert_eq!(killed, KILLS);
    // The last one goes without a word, too; the next one puts into the clone what that had answered.
    daemon.map_or(Ok(()), Daemon::kill)?;
    Daemon::serve(&serve())?.stop()?;
    judge(folder, true)?;
    ringway(&["check", "--repair", "leaks", "clone.qcow2"], folder)?;
    judge(folder, false)?;
    assert!(std::fs::read(&base)? == before, "the base has changed");
    Ok(())
}
