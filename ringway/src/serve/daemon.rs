//! Puts a daemon together, in an order that leaves nothing behind if a later part fails: disks,
//! workers, sockets.

use super::accept;
use super::endpoint::Endpoint;
use super::stats::Workers;
use crate::config::{DaemonArgs, DiskSpec, Plan, cpus};
use crate::size::Size;
use anyhow::{Context, anyhow, bail};
use ringway_aio::io_uring::can_poll;
use ringway_disk::{CacheMode, Disk, EngineKind, OpenOptions, Source, open};
use ringway_export::{Export, ExportOptions, Polling, Pool, PoolOptions, usable_engines};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// A disk with its place, ready to be served.
pub(crate) struct Served {
    /// The disk, as offered.
    pub(crate) export: Export,
    /// Where.
    pub(crate) endpoint: Endpoint,
    /// Threads that serve its queues.
    pub(crate) workers: usize,
}

/// All parts of a daemon.
pub(crate) struct Daemon {
    /// The disks, in the order they were named.
    pub(crate) disks: Vec<Served>,
    // Below the exports, which talk to the workers: dropped after them.
    pools: Vec<(EngineKind, Pool)>,
    print_stats: bool,
}

impl Daemon {
    /// Opens disks, starts workers, listens. From then on front-ends can connect.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn start(plan: Plan, polling: Polling) -> anyhow::Result<Self> {
        let mut opened = Vec::new();
        let mut new_images = Vec::new();
        for spec in plan.disks {
            let disk = open_disk(&spec).map_err(|error| with_origin(&spec.origin, error))?;
            new_images.extend(NewImage::of(&disk, &spec));
            if plan.daemon.iopoll {
                check_iopoll(&disk).map_err(|error| with_origin(&spec.origin, error))?;
            }
            opened.push((Arc::new(disk), spec));
        }
        let pools = start_pools(&opened, &plan.daemon, polling)?;
        let mut disks = Vec::new();
        let mut taken = vec![0; pools.len()];
        for (disk, spec) in opened {
            let at = pools.iter().position(|(engine, _)| *engine == disk.engine());
            let at = at.ok_or_else(|| anyhow!("no workers for {}", disk.engine()))?;
            let workers = pools[at].1.handles().to_vec();
            let options = ExportOptions { queues: spec.queues, queue_size: spec.queue_size };
            let busy = workers.len().min(spec.queues.into());
            let export = Export::new(disk, options, workers, taken[at]);
            taken[at] += usize::from(spec.queues);
            let endpoint =
                Endpoint::open(spec.place).map_err(|error| with_origin(&spec.origin, error))?;
            disks.push(Served { export, endpoint, workers: busy });
        }
        new_images.into_iter().for_each(NewImage::keep);
        Ok(Self { disks, pools, print_stats: plan.daemon.stats })
    }

    /// The workers of all disks, to ask for their counts.
    pub(crate) fn workers(&self) -> Workers {
        Workers::new(self.pools.iter().map(|(engine, pool)| (*engine, pool.handles())))
    }

    /// Serves until `stop` is readable, or until no front-end can come any more.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn run(self, stop: &OwnedFd) -> anyhow::Result<ExitCode> {
        // Nobody may be listening; that is no failure.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let outcome = std::thread::scope(|scope| -> anyhow::Result<()> {
            let mut threads = Vec::new();
            for (index, served) in self.disks.iter().enumerate() {
                let thread = std::thread::Builder::new().name(format!("disk-{index}"));
                let serve = || accept::serve(&served.export, &served.endpoint, stop.as_fd());
                threads.push(thread.spawn_scoped(scope, serve)?);
            }
            for (thread, served) in threads.into_iter().zip(&self.disks) {
                let name = served.export.disk().name();
                let ended = thread.join().map_err(|_| anyhow!("{name}: its thread panicked"))?;
                ended.with_context(|| format!("{name}: cannot wait for front-ends"))?;
            }
            Ok(())
        });
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        if self.print_stats {
            self.workers().print();
        }
        outcome?;
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    }
}

fn with_origin(origin: &str, error: anyhow::Error) -> anyhow::Error {
    if origin.is_empty() { error } else { anyhow!("{origin}: {error:#}") }
}

fn open_disk(spec: &DiskSpec) -> anyhow::Result<Disk> {
    let disk = open(&OpenOptions {
        source: spec.source.clone(),
        read_only: spec.read_only,
        cache: spec.cache,
        engine: spec.engine,
        engines: usable_engines(),
        serial: spec.serial.clone(),
        block_size: spec.block_size,
        create_bytes: spec.create_bytes,
    })?;
    if disk.cache() == CacheMode::Unsafe && disk.is_real() {
        tracing::warn!(
            "{}: --cache unsafe ignores flushes: a crash of this host LOSES what guests believe is \
             safe. Use it for data you can make again",
            disk.name()
        );
    }
    let bytes = disk.geometry().capacity;
    if let Some(wanted) = spec.create_bytes.filter(|&wanted| wanted != bytes) {
        tracing::warn!(
            "{} exists and has {}, not {}: it is served as it is",
            disk.name(),
            Size(bytes),
            Size(wanted)
        );
    }
    Ok(disk)
}

/// An error if completions of this disk cannot be polled for.
fn check_iopoll(disk: &Disk) -> anyhow::Result<()> {
    let name = disk.name();
    if disk.engine() != EngineKind::IoUring {
        bail!("{name}: --iopoll is a matter of io_uring, and the engine is {}", disk.engine());
    }
    can_poll(disk.file()).with_context(|| format!("{name}: --iopoll cannot work"))
}

/// One pool of workers for each engine in use.
fn start_pools(
    opened: &[(Arc<Disk>, DiskSpec)],
    daemon: &DaemonArgs,
    polling: Polling,
) -> anyhow::Result<Vec<(EngineKind, Pool)>> {
    let mut pools: Vec<(EngineKind, Pool)> = Vec::new();
    for engine in opened.iter().map(|(disk, _)| disk.engine()) {
        if pools.iter().any(|(other, _)| *other == engine) {
            continue;
        }
        let queues = opened
            .iter()
            .filter(|(disk, _)| disk.engine() == engine)
            .map(|(_, spec)| usize::from(spec.queues))
            .sum::<usize>();
        let workers = daemon.workers.map_or_else(|| queues.min(cpus().into()), usize::from);
        let pool = Pool::start(PoolOptions {
            engine,
            workers,
            polling,
            harvest_at_once: true,
            pin_memory: daemon.pin_memory,
            iopoll: daemon.iopoll,
            sample_latency: false,
        })
        .with_context(|| format!("cannot start {workers} workers with engine {engine}"))?;
        pools.push((engine, pool));
    }
    Ok(pools)
}

/// An image that was made just now and goes again unless the daemon starts.
struct NewImage(Option<PathBuf>);

impl NewImage {
    fn of(disk: &Disk, spec: &DiskSpec) -> Option<Self> {
        match &spec.source {
            Source::Path(path) if disk.created() => Some(Self(Some(path.clone()))),
            _ => None,
        }
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Best effort: the error that brought us here is the one worth telling.
            let _ = std::fs::remove_file(path);
        }
    }
}
