//! A stock Linux guest under verified writes is migrated between two QEMUs and two daemons, all on one
//! host, with one image file: the lock of the image goes with the guest (hazard C17), and all that is known
//! of a qcow2 image with it (hazard C36).
#![allow(missing_docs)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{
    Daemon, Disk, Guest, NewerQemu, Running, Serve, newer_qemu, server_is_control, skip_reason,
};
use ringway_e2e::qmp::Monitor;

const QUEUES: u16 = 2;
const QCOW2: &str = "disk.qcow2";
const LIMIT: Duration = Duration::from_secs(420);
/// A loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the guest is started in.
#[derive(Clone, Copy, Default)]
struct Kind {
    packed: bool,
    behind_iommu: bool,
    /// Behind it, with a translation cache of the device's own.
    ats: bool,
    /// The machine's own, if this says nothing.
    qemu: Option<&'static Path>,
}

impl Kind {
    fn guest(self, side: &Side) -> Guest {
        let mut disk = Disk::new(side.path("sock")).queues(QUEUES).reconnect();
        if self.packed {
            disk = disk.packed();
        }
        if self.behind_iommu {
            disk = disk.behind_iommu();
        }
        if !self.ats {
            disk = disk.without_ats();
        }
        let ring = if self.packed { "-packed" } else { "" };
        let iommu = if self.behind_iommu { "-iommu" } else { "" };
        let guest = Guest::new("migrate")
            .name(&format!("migrate-{}{iommu}{ring}", side.name))
            .disk(disk)
            .vcpus(2)
            .limit(LIMIT)
            .param("timeout", LIMIT.as_secs())
            .qemu_arg("-qmp")
            .qemu_arg(format!("unix:{},server=on,wait=off", side.path("qmp").display()));
        let guest = match self.behind_iommu && self.qemu.is_none() {
            true => guest.kernel_arg("iommu.strict=1"),
            false => guest,
        };
        match self.qemu {
            Some(programs) => guest.qemu(&programs.join("qemu-system-x86_64")),
            None => guest,
        }
    }
}

/// One QEMU and its daemon.
struct Side {
    name: String,
    dir: PathBuf,
    daemon: Option<Daemon>,
    machine: Option<Running>,
    monitor: Option<Monitor>,
}

impl Side {
    fn path(&self, what: &str) -> PathBuf {
        self.dir.join(format!("{}.{what}", self.name))
    }

    fn serve(&self, incoming: bool) -> Result<Daemon> {
        let qcow2 = self.dir.join(QCOW2);
        let serve = match qcow2.exists() {
            true => Serve::new(qcow2, self.path("sock")).arg("--format").arg("qcow2"),
            false => Serve::new(self.dir.join("disk.img"), self.path("sock")),
        };
        let serve = serve.queues(QUEUES);
        let serve = serve.arg("--control").arg(self.path("ctl"));
        Daemon::serve(&if incoming { serve.arg("--incoming") } else { serve })
    }

    /// The daemon and the QEMU that the guest starts in.
    fn source(dir: &Path, kind: Kind) -> Result<Self> {
        let mut side = Self::named(dir, "a");
        side.daemon = Some(side.serve(false)?);
        side.machine = Some(kind.guest(&side).boot()?);
        side.monitor = Some(Monitor::connect(&side.path("qmp"))?);
        Ok(side)
    }

    /// Those that it is to be migrated to.
    fn target(dir: &Path, name: &str, kind: Kind, source: &Self) -> Result<Self> {
        let mut side = Self::named(dir, name);
        side.daemon = Some(side.serve(true)?);
        let incoming = format!("unix:{}", side.path("migration").display());
        let guest = kind.guest(&side).qemu_arg("-incoming").qemu_arg(incoming);
        side.machine = Some(guest.boot_beside(source.machine.as_ref().context("a machine")?)?);
        side.monitor = Some(Monitor::connect(&side.path("qmp"))?);
        Ok(side)
    }

    fn named(dir: &Path, name: &str) -> Self {
        let (name, dir) = (name.to_owned(), dir.to_owned());
        Self { name, dir, daemon: None, machine: None, monitor: None }
    }

    fn ask(&mut self, command: &str, arguments: &str) -> Result<String> {
        self.monitor.as_mut().context("a monitor")?.ask(command, arguments)
    }

    fn until(&mut self, command: &str, wanted: &str, unwanted: &str) -> Result<String> {
        self.monitor.as_mut().context("a monitor")?.until(command, wanted, unwanted)
    }

    fn migrate_to(&mut self, target: &Self) -> Result<()> {
        let uri = target.path("migration");
        let uri = format!(r#"{{"uri": "unix:{}"}}"#, uri.display());
        self.ask("migrate", &uri).map(drop)
    }

    /// Whether migrations wait for a word when all rings have stopped, before the target is told.
    fn pause_before_switchover(&mut self, on: bool) -> Result<()> {
        let capability = format!(
            r#"{{"capabilities": [{{"capability": "pause-before-switchover", "state": {on}}}]}}"#
        );
        self.ask("migrate-set-capabilities", &capability).map(drop)
    }

    fn ctl(&self, args: &[&str]) -> Result<String> {
        Daemon::ctl(&self.path("ctl"), args)
    }

    fn is_locked(&self) -> Result<bool> {
        Ok(!self.ctl(&["list", "--json"])?.contains(r#""state": "unlocked""#))
    }

    fn until_locked(&self, locked: bool) -> Result<()> {
        let begun = Instant::now();
        while self.is_locked()? != locked {
            ensure!(begun.elapsed() < PATIENCE, "{}: locked is not {locked}", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Writes that the daemon has carried out.
    fn writes(&self) -> Result<u64> {
        let stats = self.ctl(&["stats", "--json"])?;
        let at = stats.find(r#""writes": "#).context("no count of writes")? + 10;
        let end = stats[at..].find([',', '\n']).context("no number")?;
        Ok(stats[at..at + end].parse()?)
    }

    /// The guest writes here.
    fn goes_on(&self) -> Result<()> {
        let (begun, before) = (Instant::now(), self.writes()?);
        while self.writes()? < before + 200 {
            ensure!(
                begun.elapsed() < PATIENCE,
                "no writes at {}:\n{}",
                self.name,
                self.daemon.as_ref().map(Daemon::output).unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// After a migration in vain QEMU starts its guest again, or leaves that to whoever asked.
    fn runs_again(&mut self) -> Result<()> {
        if !self.ask("query-status", "{}")?.contains(r#""running": true"#) {
            self.ask("cont", "{}")?;
        }
        self.until_locked(true)?;
        self.goes_on()
    }
}

fn migrated(packed: bool, qcow2: bool) -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server locks by its own rules.
    }
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    image(dir, qcow2)?;
    let kind = Kind { packed, ..Kind::default() };
    let mut a = Side::source(dir, kind)?;
    a.machine.as_mut().context("a machine")?.wait_for_line("RINGWAY ASK migrate")?;
    a.pause_before_switchover(true)?;
    let stopped = r#""status": "pre-switchover""#;

    // The target's daemon is killed when all rings have stopped, and so the migration is cancelled: the
    // source takes its lock back. (QEMU 7.2 does not start a device whose back-end came back before
    // its guest ran.)
    let mut target = Side::target(dir, "cancelled", kind, &a)?;
    ensure!(a.is_locked()? && !target.is_locked()?, "before the migration");
    a.goes_on()?;
    a.migrate_to(&target)?;
    a.until("query-migrate", stopped, "failed")?;
    a.until_locked(false)?;
    target.daemon.take().context("a daemon")?.kill()?;
    a.ask("migrate_cancel", "{}")?;
    a.until("query-migrate", "cancelled", "completed")?;
    a.runs_again()?;
    drop(target);

    // Failed: the target's QEMU dies before it has all.
    let mut target = Side::target(dir, "failed", kind, &a)?;
    a.migrate_to(&target)?;
    a.until("query-migrate", stopped, "failed")?;
    a.until_locked(false)?;
    drop(target.machine.take());
    // It may have noticed by now.
    let _ = a.ask("migrate-continue", r#"{"state": "pre-switchover"}"#);
    a.until("query-migrate", r#""status": "failed""#, "completed")?;
    a.runs_again()?;
    drop(target);

    // The source's daemon is killed in between; the target's, when it has the guest.
    let mut b = Side::target(dir, "b", kind, &a)?;
    a.migrate_to(&b)?;
    a.until("query-migrate", stopped, "failed")?;
    a.until_locked(false)?;
    a.daemon.take().context("a daemon")?.kill()?;
    a.ask("migrate-continue", r#"{"state": "pre-switchover"}"#)?;
    a.until("query-migrate", r#""status": "completed""#, "failed")?;
    b.goes_on()?;
    leave(a, &mut b)?;
    b.daemon.take().context("a daemon")?.kill()?;
    b.daemon = Some(b.serve(true)?);
    b.until_locked(true)?;
    b.goes_on()?;

    // As it should be.
    b.pause_before_switchover(false)?;
    let mut c = Side::target(dir, "c", kind, &b)?;
    b.goes_on()?;
    b.migrate_to(&c)?;
    let done = b.until("query-migrate", r#""status": "completed""#, "failed")?;
    c.goes_on()?;
    ensure!(!b.is_locked()? && c.is_locked()?, "after the migration");
    let downtime = done.split_once(r#""downtime": "#).map_or("", |(_, rest)| rest);
    let downtime = downtime.split([',', '}']).next().unwrap_or_default();
    println!("packed: {packed}, QEMU says {downtime} ms of downtime");
    leave(b, &mut c)?;

    ends(c, packed)?;
    if qcow2 {
        // What daemons leave that were killed, and nothing else.
        img(dir, &["check", "-r", "leaks", QCOW2])?;
    }
    Ok(())
}

/// The guest is told that all is over, and says what it has found.
fn ends(mut c: Side, packed: bool) -> Result<()> {
    let mut machine = c.machine.take().context("a machine")?;
    machine.send_line("ok")?;
    let report = machine.finish()?;
    report.expect_ok();
    // Where a QEMU cannot have packed rings with this device, it takes split ones without a word.
    ensure!(report.info("vda.packed") == if packed { "1" } else { "0" }, "packed: not {packed}");
    c.daemon.take().context("a daemon")?.stop()
}

/// A raw image of zeroes; with `qcow2` another one on top of it, which is served.
fn image(dir: &Path, qcow2: bool) -> Result<()> {
    File::create(dir.join("disk.img"))?.set_len(256 << 20)?;
    let overlay = ["create", "-f", "qcow2", "-b", "disk.img", "-F", "raw", QCOW2];
    if qcow2 { img(dir, &overlay) } else { Ok(()) }
}

fn img(dir: &Path, args: &[&str]) -> Result<()> {
    let output = Command::new("qemu-img").args(args).current_dir(dir).output()?;
    ensure!(output.status.success(), "{args:?}: {output:?}");
    Ok(())
}

/// The guest has left this side for another one.
fn leave(mut from: Side, to: &mut Side) -> Result<()> {
    let there = to.machine.as_mut().context("a machine")?;
    from.machine.take().context("a machine")?.gone_to(there);
    from.daemon.take().map_or(Ok(()), Daemon::stop)
}

#[test]
fn c17_a_guest_is_migrated_with_its_image_split() -> Result<()> {
    migrated(false, false)
}

#[test]
fn c17_a_guest_is_migrated_with_its_image_packed() -> Result<()> {
    migrated(true, false)
}

#[test]
fn c36_a_guest_is_migrated_with_its_qcow2_image() -> Result<()> {
    migrated(false, true)
}

/// Once, between two machines of this QEMU, the machine's own if none is named.
fn migrated_by(which: Option<NewerQemu>, behind_iommu: bool, packed: bool) -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server locks by its own rules, and has no translation cache.
    }
    let qemu = match which.map(newer_qemu).transpose() {
        Ok(programs) => programs,
        Err(lack) => {
            lack.skip();
            return Ok(());
        }
    };
    let dir = tempfile::tempdir()?;
    image(dir.path(), false)?;
    let ats = which != Some(NewerQemu::Stable);
    let kind = Kind { packed, behind_iommu, ats, qemu };
    let mut a = Side::source(dir.path(), kind)?;
    a.machine.as_mut().context("a machine")?.wait_for_line("RINGWAY ASK migrate")?;
    let mut b = Side::target(dir.path(), "b", kind, &a)?;
    a.goes_on()?;
    a.migrate_to(&b)?;
    a.until("query-migrate", r#""status": "completed""#, "failed")?;
    b.goes_on()?;
    leave(a, &mut b)?;
    ends(b, packed)
}

/// Its rings have 1024 descriptors, whatever `queue-size` says.
#[test]
fn b35_guests_of_newer_qemus_are_migrated() -> Result<()> {
    migrated_by(Some(NewerQemu::Stable), false, false)?;
    migrated_by(Some(NewerQemu::Stable), false, true)?;
    migrated_by(Some(NewerQemu::Backports), false, false)
}

/// Behind an IOMMU the rings of a guest of QEMU 10 and 11 are scattered in its memory. (QEMU 7.2 gives rings of 128
/// descriptors, which lie in one page each.) A destination before 11 ends by an assertion of its own once its guest
/// empties the whole translation cache of a device: that of 7.2 is told of single pages, and 10 has no such cache
/// (docs/migrating.md).
#[test]
fn a28_guests_behind_an_iommu_are_migrated() -> Result<()> {
    migrated_by(None, true, false)?;
    for which in [NewerQemu::Stable, NewerQemu::Backports] {
        migrated_by(Some(which), true, false)?;
        migrated_by(Some(which), true, true)?;
    }
    Ok(())
}
