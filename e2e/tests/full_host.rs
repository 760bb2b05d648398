//! A stock Linux guest on a sparse image whose file system is full, and on a disk that fails for a while.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{Daemon, Disk, Guest, Serve, server_is_control, skip_reason};
use ringway_testkit::{LateStore, Mounted};

const MIB: u64 = 1 << 20;

/// How many requests the daemon holds.
fn held(control: &Path) -> Result<u64> {
    let text = Daemon::ctl(control, &["list", "--json"])?;
    let list: serde_json::Value = serde_json::from_str(&text)?;
    let held = &list["disks"][0]["held"];
    if held.is_null() { Ok(0) } else { held["count"].as_u64().context("how many are held") }
}

fn until_some_are_held(control: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(40);
    while held(control)? == 0 {
        ensure!(Instant::now() < deadline, "nothing is held after 40 s");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// 64 MiB of writes onto 24 MiB of room: the guest waits, through a kill of the daemon, until there is
/// more, and then goes on without an error.
#[test]
fn c18_guest_waits_while_the_hosts_file_system_is_full() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server holds nothing.
    }
    let dir = tempfile::tempdir()?;
    let small = match Mounted::in_memory(dir.path().join("small"), 24 * MIB) {
        Ok(small) => small,
        Err(lack) => {
            lack.skip();
            return Ok(());
        }
    };
    let (image, control) = (small.path().join("disk.img"), dir.path().join("c"));
    let socket = dir.path().join("v.sock");
    File::create(&image)?.set_len(64 * MIB)?;
    let serve = || {
        let serve = Serve::new(&image, &socket).queues(4);
        Daemon::serve(&serve.arg("--control").arg(&control))
    };
    let mut daemon = Some(serve()?);
    let disk = Disk::new(&socket).queues(4).reconnect();
    let report = Guest::new("held").disk(disk).boot()?.finish_with(|question| {
        let mut act = || match question {
            "held" => until_some_are_held(&control),
            "kill" => {
                daemon.take().map_or(Ok(()), Daemon::kill)?;
                daemon = Some(serve()?);
                Ok(())
            }
            _ => {
                small.set_room(128 * MIB);
                Ok(())
            }
        };
        act().map_or_else(|error| format!("{error:#}").replace('\n', " "), |()| "ok".to_owned())
    })?;
    report.expect_ok();
    ensure!(held(&control)? == 0, "held once the guest has what it wrote");
    daemon.map_or(Ok(()), Daemon::stop)
}

/// The same on a disk that fails each write until it is mended and its operator says so: a daemon is killed
/// while it holds them all, the next one holds them too, and no error reaches the guest.
#[test]
fn c18_guest_waits_while_the_hosts_disk_fails() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server holds nothing.
    }
    let (mount, dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let store = match LateStore::mount(mount.path(), 64 << 20) {
        Ok(store) => store,
        Err(lack) => {
            lack.skip();
            return Ok(());
        }
    };
    let (socket, control) = (dir.path().join("v.sock"), dir.path().join("c"));
    let serve = || {
        let serve = Serve::new(store.path(), &socket).queues(4).arg("--cache").arg("none");
        let serve = serve.arg("--on-write-error").arg("hold");
        Daemon::serve(&serve.arg("--control").arg(&control))
    };
    let mut daemon = Some(serve()?);
    store.set_error(Some(libc::EIO));
    let disk = Disk::new(&socket).queues(4).reconnect();
    let guest = Guest::new("held").disk(disk).boot()?;
    let (mended, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let report = std::thread::scope(|scope| {
        // What had failed before may be held only now: the operator tries again until all is well.
        scope.spawn(|| {
            while !done.load(SeqCst) {
                if mended.load(SeqCst) {
                    let _ = Daemon::ctl(&control, &["retry", "0"]);
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let report = guest.finish_with(|question| {
            let mut act = || match question {
                "held" => until_some_are_held(&control),
                "kill" => {
                    daemon.take().map_or(Ok(()), Daemon::kill)?;
                    daemon = Some(serve()?);
                    Ok(())
                }
                _ => {
                    // In vain: it still fails.
                    Daemon::ctl(&control, &["retry", "0"])?;
                    until_some_are_held(&control)?;
                    ensure!(store.log().is_empty(), "a write has passed");
                    store.set_error(None);
                    mended.store(true, SeqCst);
                    Ok(())
                }
            };
            act().map_or_else(|error| format!("{error:#}").replace('\n', " "), |()| "ok".into())
        });
        done.store(true, SeqCst);
        report
    })?;
    report.expect_ok();
    ensure!(held(&control)? == 0, "held once the guest has what it wrote");
    ensure!(!store.log().is_empty(), "the guest's writes are on the disk");
    daemon.map_or(Ok(()), Daemon::stop)
}
