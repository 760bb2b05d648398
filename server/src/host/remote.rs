//! Disks that are elsewhere: connections to servers, made anew, and images of Ceph clusters.

use super::Host;
use anyhow::{Context, anyhow};
use ringway_control::config::DiskSpec;
use ringway_disk::open::ClusterDisk;
use ringway_disk::{Disk, OpenOptions, Source};
use ringway_nbd_client::{Connections, Remote, Target, Timeouts};
use ringway_terminal::reasons::in_full;
use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long a start of the daemon waits for the first flushes of all servers together, and for each at least. A disk
/// whose server takes longer waits for it by itself.
const FIRST_FLUSHES: Duration = Duration::from_secs(10);
const FIRST_FLUSH_MIN: Duration = Duration::from_millis(500);

impl Host {
    /// Reads what has to be read from files for a disk of a Ceph cluster; `None` if it is none. It is opened
    /// in the sandbox.
    ///
    /// # Errors
    /// What is wrong with it; nothing was created or changed then.
    pub(crate) fn prepare(&self, spec: &DiskSpec) -> anyhow::Result<Option<ClusterDisk>> {
        let options = self.local.options(spec);
        let Source::Rbd { target, access } = &options.source else { return Ok(None) };
        Ok(Some(ClusterDisk::prepare(target, access, &options)?))
    }

    /// From now on a lost connection of a disk to its server, or to that of its base, comes back by itself.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn supervise(&self, disk: &Arc<Disk>, spec: &DiskSpec) -> anyhow::Result<()> {
        let (remote, mut options) = match (disk.remote(), disk.remote_base(), &spec.base_export) {
            (Some(remote), ..) => (remote, self.local.options(spec)),
            (None, Some(base), Some(source)) => (base, self.base_options(source)),
            _ => return Ok(()),
        };
        let helper = self.helper.clone();
        if let Source::Nbd(target) = &mut options.source {
            warn_of_fewer(disk, remote, target);
            // As many as there are, for whom the guest waits.
            let most = u16::try_from(remote.connections()).unwrap_or(u16::MAX);
            *target = target.with_connections(Connections::asked(most));
        }
        let limit = first_flush_limit(spec);
        let owner = Arc::downgrade(disk);
        let again = move || {
            let disk = match &helper {
                Some(helper) => helper.open_again(&options)?.disk,
                None => ringway_disk::open(&options)?,
            };
            // One that was away at the start has not been asked for it before a connection of it is used: what came
            // until then may have been another export.
            let owes = |owner: &Arc<Disk>| owner.remote().is_some_and(|it| it.never_came());
            if let Some(owner) = owner.upgrade().filter(owes) {
                if !flush_now(&disk, limit).map_err(|error| not_flushed(&disk, &error))? {
                    may_have_lost(&owner);
                }
            }
            let connected = disk.remote().and_then(|remote| remote.unused());
            connected.context("it is an export no more")
        };
        let again = move || again().map_err(|error: anyhow::Error| in_full(&error).into());
        let usual = Timeouts::default();
        let silence = spec.response_timeout.unwrap_or(usual.silence);
        let timeouts = Timeouts { give_up: spec.reconnect_timeout, silence };
        remote.supervise(Box::new(again), timeouts).context("cannot look after its connection")
    }

    /// How an export is to be opened that a disk of a plan is based on.
    pub(super) fn base_options(&self, source: &Source) -> OpenOptions {
        let source = match source {
            Source::Nbd(target) => Source::Nbd(target.to_be_read()),
            other => other.clone(),
        };
        let engines = self.local.engines(None);
        OpenOptions { read_only: true, engines, ..OpenOptions::new(source) }
    }

    /// Tells if the server of an export is away.
    pub(super) fn warn_of_away(disk: &Disk) {
        if let Some(why) = disk.remote().and_then(|remote| remote.was_away()) {
            tracing::warn!(
                disk = disk.name(),
                "its NBD server is away: {why}. The disk is served as its server offered it before, and requests \
                 wait until that is back"
            );
        }
    }

    /// Has what earlier daemons had answered made durable, before anything else is asked of a server: one that is
    /// started anew later has not lost it then. At a start of the daemon one that does not answer is taken for away.
    ///
    /// # Errors
    /// That the server does not answer in time, or does not keep to the protocol.
    pub(super) fn flush_first(&self, disk: &Disk, spec: &DiskSpec) -> anyhow::Result<()> {
        let Some(remote) = disk.remote().filter(|remote| remote.was_away().is_none()) else {
            Self::warn_of_away(disk);
            return Ok(());
        };
        let (mut limit, starts) = (first_flush_limit(spec), !self.confined.load(SeqCst));
        let waited = || self.first_flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if starts {
            limit = limit.min(FIRST_FLUSHES.saturating_sub(*waited()).max(FIRST_FLUSH_MIN));
        }
        let begun = Instant::now();
        let flushed = flush_now(disk, limit);
        *waited() += begun.elapsed();
        match flushed {
            Ok(true) => {}
            Ok(false) => may_have_lost(disk),
            Err(error) if starts && error.kind() != ErrorKind::Other => {
                remote.take_for_away(format!("its first flush: {error}"));
            }
            Err(error) => return Err(not_flushed(disk, &error)),
        }
        Self::warn_of_away(disk);
        Ok(())
    }
}

fn first_flush_limit(spec: &DiskSpec) -> Duration {
    spec.response_timeout.unwrap_or(Timeouts::default().silence)
}

/// Asks for the first flush, if the disk is one of a server and written. False if the server fails it.
fn flush_now(disk: &Disk, limit: Duration) -> io::Result<bool> {
    let remote = disk.remote().filter(|_| !disk.geometry().read_only);
    remote.map_or(Ok(true), |remote| remote.flush_first(limit))
}

fn not_flushed(disk: &Disk, error: &io::Error) -> anyhow::Error {
    anyhow!("{}: its first flush: {error}", disk.name())
}

fn may_have_lost(disk: &Disk) {
    tracing::error!(disk = disk.name(), "the NBD server fails the first flush");
    disk.server_may_have_lost();
}

/// Tells of connections that were asked for and cannot be had.
fn warn_of_fewer(disk: &Disk, remote: &Remote, target: &Target) {
    let Connections { most, asked: true } = target.connections() else { return };
    let there = remote.connections();
    if there >= most.into() {
        return;
    }
    let why = match remote.negotiated().abilities().any(|ability| ability == "multi-conn") {
        true => "the server takes no more",
        false => "the server does not say that several of them are one disk (CAN_MULTI_CONN)",
    };
    tracing::warn!(disk = disk.name(), "nbd-connections = {most}, and there are {there}: {why}");
}
