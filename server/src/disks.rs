//! The disks that a daemon serves, and the workers they share. Disks come and go while it runs.

mod apart;
mod crew;
mod limits;
mod means;

use super::bell::{Bell, event};
use super::endpoint::Endpoint;
use super::events::Events;
use super::host::{Host, NewImage};
use super::incidents::Incidents;
use super::isolate::{Isolated, LogWords, Spawner, Starting};
use super::limits::LimitGroups;
use super::numbers::{rings, workers};
use super::paths::Paths;
use super::pools::{Engine, Pools};
use super::served::{Served, lock};
use super::spread::Spread;
use super::stats::Workers;
use anyhow::{Context, anyhow, bail};
pub(crate) use limits::limits_of;
pub(crate) use means::{AnyDisk, Means};
use means::{is_isolated, wait_for_all, with_origin};
use ringway_control::config::{CpuList, DaemonArgs, DiskSpec, Place, XenPlan, cpus};
use ringway_control::protocol::Happened;
use ringway_core::kill_point;
use ringway_disk::{Disk, EngineKind};
use ringway_export::{
    Cpus, ExportOptions, OnFailure, Polling, PoolOptions, RingPool, WorkerOptions,
};
use ringway_vhost_user::Access;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long to wait until nobody looks at a removed disk any more.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// A disk that is ready, and not served yet.
pub(crate) struct Ready {
    served: Arc<Served>,
    endpoint: Endpoint,
}

/// All disks, and their workers.
pub(crate) struct Disks {
    options: DaemonArgs,
    /// The toolstack that attaches disks, if it is one of Xen's.
    xen: Option<Arc<XenPlan>>,
    /// Where images and sockets are.
    pub(super) host: Host,
    /// In a sandbox: all rings there will ever be.
    rings: Option<RingPool>,
    polling: Polling,
    /// The CPUs of all workers, whatever their engine.
    pins: Cpus,
    paths: Paths,
    incidents: Incidents,
    /// What happens to them.
    pub(crate) events: Arc<Events>,
    list: Mutex<Vec<Arc<Served>>>,
    /// Those with a process of their own.
    isolated: Mutex<Vec<Arc<Isolated>>>,
    spawner: Option<Arc<Spawner>>,
    log: LogWords,
    sampled: bool,
    next_id: AtomicU64,
    /// Limits that some of them share.
    pub(crate) limit_groups: LimitGroups,
    engines: Mutex<Vec<Engine>>,
    /// Held while a disk is added; false once none may be added any more.
    open: Mutex<bool>,
    pub(super) bell: Arc<Bell>,
    pub(crate) begun: Instant,
}

impl Disks {
    /// Opens disks, starts workers, listens. From then on front-ends can connect; they are served
    /// after [`Disks::launch`]. `enter` is called before the first thread is started: from then on
    /// nothing is opened but by `host`. New images go again unless they are kept.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn start(
        specs: Vec<DiskSpec>,
        options: DaemonArgs,
        polling: Polling,
        means: Means,
        enter: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<(Self, Vec<Ready>, Vec<NewImage>)> {
        let Means { host, xen, spawner, log, sampled, limit_groups } = means;
        let (mut opened, mut ids, mut starting) = (Vec::new(), Vec::new(), Vec::new());
        let (mut new_images, mut turn, next_id) = (Vec::new(), 0, AtomicU64::new(0));
        for spec in specs {
            let id = next_id.fetch_add(1, SeqCst);
            if let Some(spawner) = spawner.as_ref().filter(|_| is_isolated(&spec, &options)) {
                let origin = spec.origin.clone();
                let queues = usize::from(spec.queues);
                let started = Starting::new(spawner, spec, &options, log, turn);
                starting.push((id, started.map_err(|error| with_origin(&origin, error))?));
                turn += workers(&options, queues);
                continue;
            }
            ids.push(id);
            let (disk, new_image) =
                host.open(&spec).map_err(|error| with_origin(&spec.origin, error))?;
            opened.push((Arc::new(disk), spec));
            new_images.extend(new_image);
        }
        // As long as signals still end this process: it may wait for somebody else's image.
        let isolated = wait_for_all(starting, &host, spawner.as_ref())?;
        let rings = rings(&opened, &options, &host)?;
        // Asked for now: the files that tell it cannot be read afterwards.
        cpus();
        host.confine();
        enter()?;
        let bell = Bell::new()?;
        let events = Arc::<Events>::default();
        let pins = Cpus::new(options.cpus.as_ref().map_or(&[][..], CpuList::numbers));
        let disks = Self {
            options,
            xen,
            host,
            rings,
            polling,
            pins,
            paths: Paths::start(&events)?,
            incidents: Incidents::start(&events)?,
            events,
            list: Mutex::default(),
            isolated: Mutex::new(isolated),
            spawner,
            log,
            sampled,
            next_id,
            limit_groups,
            engines: Mutex::default(),
            open: Mutex::new(true),
            bell: Arc::new(bell),
            begun: Instant::now(),
        };
        kill_point!(Locked);
        disks.start_pools(&opened)?;
        disks.warn_of_crowd(0);
        let mut ready = Vec::new();
        for ((disk, spec), id) in opened.into_iter().zip(ids) {
            let origin = spec.origin.clone();
            let prepared = disks.prepare(disk, spec, id);
            ready.push(prepared.map_err(|error| with_origin(&origin, error))?);
        }
        kill_point!(Listening);
        Ok((disks, ready, new_images))
    }

    /// Workers with engine `kind` for `queues` queues; as many as there are already, at least.
    fn provide(&self, kind: EngineKind, queues: usize) -> anyhow::Result<()> {
        let wanted = workers(&self.options, queues);
        let context = || format!("cannot start {wanted} workers with engine {kind}");
        let mut engines = lock(&self.engines);
        let there = engines.iter().find(|engine| engine.kind == kind);
        let there = there.map_or(0, |engine| engine.pool.len());
        let wanted = match &self.rings {
            // Queues share the workers that there can be.
            Some(rings) if kind == EngineKind::IoUring => wanted.min(there + rings.left()),
            _ => wanted,
        };
        if wanted == 0 {
            bail!(
                "there is no io_uring for this disk: it did not work when the daemon started, and \
                 in the sandbox none can be set up later. Use another engine"
            );
        }
        if let Some(engine) = engines.iter_mut().find(|engine| engine.kind == kind) {
            engine.pool.grow(wanted).with_context(context)?;
            engine.spread.grow(engine.pool.len());
            return Ok(());
        }
        let options = PoolOptions {
            engine: kind,
            workers: wanted,
            iopoll: self.options.iopoll,
            worker: WorkerOptions {
                polling: self.polling,
                pin_memory: self.options.pin_memory,
                sample_latency: self.options.is_watched() || self.sampled,
            },
        };
        let bell = Arc::clone(&self.bell);
        let on_failure: OnFailure = Arc::new(move || {
            bell.worker_failed.store(true, SeqCst);
            bell.ring();
        });
        let rings = self.rings.clone();
        let care = (self.pins.clone(), on_failure, rings);
        let pool = Pools::start(self.xen.is_some(), options, care);
        let pool = pool.with_context(context)?;
        let mut spread = Spread::new();
        spread.grow(pool.len());
        engines.push(Engine { kind, pool, spread });
        Ok(())
    }

    /// Gives an open disk its workers and its place.
    fn prepare(&self, disk: Arc<Disk>, spec: DiskSpec, id: u64) -> anyhow::Result<Ready> {
        disk.set_error_policy(spec.errors);
        let claim = spec.claim(|path| self.host.locate(path));
        let options = ExportOptions { queues: spec.queues, queue_size: spec.queue_size };
        let image_lock = (self.host.names(&spec.source), spec.lock_wait);
        let rule = spec.access.or(&self.options.each.access);
        let (mode, group) = rule.settle(self.options.user.is_some()).map_err(anyhow::Error::msg)?;
        let limits =
            self.limit_groups.of_new(&spec.words.limits, spec.words.limit_group.as_deref())?;
        let endpoint = Endpoint::open(spec.place, Access { mode, group }, &self.host)?;
        let stop = event()?;
        let (workers, first, export) = {
            let mut engines = lock(&self.engines);
            let engine = engines.iter_mut().find(|engine| engine.kind == disk.engine());
            let engine = engine.ok_or_else(|| anyhow!("no workers for {}", disk.engine()))?;
            let first = engine.spread.place(spec.queues.into());
            self.paths.listen(id, &disk);
            self.incidents.listen(id, &disk);
            (engine.pool.len(), first, engine.pool.export(disk, options, first, image_lock))
        };
        let busy = workers.min(spec.queues.into());
        let place = (first, workers);
        let served = Arc::new(Served {
            id,
            export,
            claim,
            socket: endpoint.path().map(Path::to_path_buf),
            device: endpoint.device().map(str::to_owned),
            workers: busy,
            limits: Mutex::new(limits),
            place,
            stop,
            leaving: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            thread: Mutex::default(),
        });
        let (events, image) = (Arc::clone(&self.events), served.name().to_owned());
        let listener = move |notice| events.notice((id, &image), notice);
        served.export.on_notice(Box::new(listener));
        if served.export.is_paused() {
            tracing::warn!(
                disk = served.export.disk().name(),
                "paused, as it was when it was served before: ringway ctl resume"
            );
        }
        lock(&self.list).push(Arc::clone(&served));
        self.settle_limits(&served)?;
        Ok(Ready { served, endpoint })
    }

    /// Serves a disk on a thread of its own.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn launch(&self, ready: Ready) -> anyhow::Result<()> {
        let Ready { served, endpoint } = ready;
        let (disk, bell) = (Arc::clone(&served), Arc::clone(&self.bell));
        let xen = self.xen.as_ref().and_then(|plan| super::xen::session(plan, &self.host));
        let name = format!("disk-{}", served.id);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // A panic ends this disk as an error does: it is heard of, and the daemon ends in order.
            let ended = catch_unwind(AssertUnwindSafe(|| disk.serve(&endpoint, xen)));
            // Its socket file goes before anybody hears that it has ended.
            drop(endpoint);
            disk.ended.store(true, SeqCst);
            drop(disk);
            bell.ended(ended.is_err());
            ended.unwrap_or_else(|panic| resume_unwind(panic))
        })?;
        *lock(&served.thread) = Some(thread);
        self.bell.changed();
        Ok(())
    }

    /// Opens one more disk and serves it.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn add(&self, spec: DiskSpec) -> anyhow::Result<AnyDisk> {
        self.check_apart(&spec)?;
        if is_isolated(&spec, &self.options) {
            return self.add_isolated(spec).map(AnyDisk::Apart);
        }
        if self.xen.is_some() != matches!(spec.place, Place::Xen(_)) {
            bail!(
                "this daemon serves what the toolstack of Xen attaches (--xen), and nothing else"
            );
        }
        // With --lock-wait this takes its time; the daemon can stop meanwhile.
        let (disk, new_image) = self.host.open(&spec)?;
        let open = lock(&self.open);
        if !*open {
            bail!("the daemon is stopping");
        }
        // Another one may have come meanwhile.
        self.check_apart(&spec)?;
        let (queues, before) = (self.queues_now(disk.engine()), self.count_workers());
        self.provide(disk.engine(), queues + usize::from(spec.queues))?;
        self.warn_of_crowd(before);
        let id = self.next_id.fetch_add(1, SeqCst);
        let ready = self.prepare(Arc::new(disk), spec, id)?;
        let served = Arc::clone(&ready.served);
        if let Err(error) = self.launch(ready) {
            self.forget(&served);
            return Err(error);
        }
        if let Some(image) = new_image {
            image.keep();
        }
        tracing::info!(disk = served.name(), id = served.id, "disk added");
        self.events.tell(Some((served.id, served.name())), Happened::Added);
        Ok(AnyDisk::Here(served))
    }

    /// Drains a disk, disconnects its front-end, removes its socket file and closes it. True if all
    /// that was in flight is over; a stuck disk may still write.
    ///
    /// # Errors
    /// That somebody else removes it already, or what the host said to its thread.
    pub(crate) fn remove(&self, served: Arc<Served>) -> anyhow::Result<bool> {
        if served.leaving.swap(true, SeqCst) {
            bail!("it is being removed already");
        }
        served.stop();
        let outcome = served.join().unwrap_or(Ok(()));
        self.forget(&served);
        let clear = served.export.is_clear();
        tracing::info!(disk = served.name(), id = served.id, "disk removed");
        let removed = Happened::Removed { drained: clear };
        self.events.tell(Some((served.id, served.name())), removed);
        // Others may be looking at it for a moment.
        let begun = Instant::now();
        while Arc::strong_count(&served) > 1 && begun.elapsed() < LAST_LOOK {
            // Nobody unparks this thread.
            std::thread::park_timeout(Duration::from_millis(1));
        }
        if clear {
            let disk = served.export.disk();
            // The toolstack removes a disk when its guest has let it go.
            disk.ends(served.device.is_some());
            disk.unlock();
        }
        outcome.map(|()| clear)
    }

    fn forget(&self, served: &Arc<Served>) {
        let mut list = lock(&self.list);
        let Some(at) = list.iter().position(|other| Arc::ptr_eq(other, served)) else { return };
        list.remove(at);
        drop(list);
        self.incidents.forget(served.export.disk());
        let kind = served.export.disk().engine();
        if let Some(engine) = lock(&self.engines).iter_mut().find(|engine| engine.kind == kind) {
            let (first, workers) = served.place;
            engine.spread.leave(first, served.export.options().queues.into(), workers);
        }
    }

    /// What holds for all of them.
    pub(crate) fn options(&self) -> &DaemonArgs {
        &self.options
    }

    /// The disks, in the order they came.
    pub(crate) fn list(&self) -> Vec<Arc<Served>> {
        lock(&self.list).clone()
    }

    /// The workers of all disks, to ask for their counts.
    pub(crate) fn workers(&self) -> Workers {
        let disks = self.list().into_iter().map(|served| Arc::clone(served.export.disk()));
        let engines = lock(&self.engines);
        let pools = engines.iter().map(|engine| (engine.kind, engine.pool.counts()));
        Workers::new(pools, disks)
    }

    /// Readable when [`Disks::clear_up`] has something to do.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.event.as_fd()
    }

    /// Forgets disks whose thread ended by itself. False if there is none left.
    ///
    /// # Errors
    /// That a worker failed, or a disk's thread.
    pub(crate) fn clear_up(&self) -> anyhow::Result<bool> {
        self.bell.silence();
        if self.bell.worker_failed.load(SeqCst) {
            self.events.tell(None, Happened::WorkerFailed);
            bail!("a worker failed, and its queues with it; the log says why");
        }
        for served in self.list() {
            // One that is leaving is cleared up by whoever told it to.
            if !served.is_leaving() && served.ended.load(SeqCst) {
                let outcome = served.join();
                self.forget(&served);
                outcome.transpose()?;
            }
        }
        if self.bell.disk_panicked.load(SeqCst) {
            bail!("the thread of a disk that was being removed panicked; the log says why");
        }
        Ok(!lock(&self.list).is_empty() || !lock(&self.isolated).is_empty())
    }

    /// Stops all disks at once and waits for them.
    ///
    /// # Errors
    /// The first that a disk's thread met.
    pub(crate) fn stop_all(&self) -> anyhow::Result<()> {
        *lock(&self.open) = false;
        let (list, isolated) = (self.list(), self.isolated());
        list.iter().for_each(|served| served.stop());
        isolated.iter().for_each(|disk| disk.stop());
        let mut outcome = Ok(());
        for served in list {
            if let Some(Err(error)) = served.join() {
                outcome = outcome.and(Err(error));
            }
            self.forget(&served);
        }
        for disk in isolated {
            disk.join();
        }
        outcome
    }

    /// Ends all workers; the disks must have been stopped.
    pub(crate) fn end_workers(&self) {
        let engines = std::mem::take(&mut *lock(&self.engines));
        drop(engines);
    }
}
