//! The disks that a daemon serves, and the workers they share. Disks come and go while it runs.

mod add;
mod apart;
mod commit;
mod files_change;
mod flatten;
mod jobs;
mod launch;
mod limits;
mod means;
mod removals;
mod remove;
mod snapshot;
mod workers;

use super::bell::{Bell, event};
use super::configured::{Configured, DiskWords};
use super::endpoint::Endpoint;
use super::events::Events;
use super::host::{EphemeralClone, Host, NewImage};
use super::hung::Absent;
use super::incidents::Incidents;
use super::isolate::{Isolated, Leaving, LogWords, Mouth, Spawner, Starting};
use super::limits::LimitGroups;
use super::nbd_clients::Portals;
use super::paths::Paths;
use super::pools::{Engine, workers_of};
use super::served::{Served, lock};
use super::session_threads::SessionThreads;
use super::sizing::{rings, workers};
use crate::sandbox::Guests;
use anyhow::{anyhow, bail};
pub(crate) use files_change::ChangeOfFiles;
pub(crate) use limits::limits_of;
pub(crate) use means::{AnyDisk, Means};
use means::{connect, is_isolated, open_clusters, prepare_cluster, wait_for_all, with_origin};
use removals::Removals;
use ringway_control::config::{CpuList, DaemonArgs, DiskSpec, XenPlan, cpus};
use ringway_control::protocol::Happened;
use ringway_core::kill_point;
use ringway_disk::Disk;
use ringway_export::{Cpus, ExportOptions, Polling, RingPool};
use ringway_vhost_user::Access;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// A disk that is ready, and not served yet.
pub(crate) struct Ready {
    served: Arc<Served>,
    endpoint: Endpoint,
}

/// Why somebody does not get to remove a disk.
#[derive(Debug, thiserror::Error)]
#[error("it is being removed already")]
pub(crate) struct BeingRemoved;

/// The number of a disk, and its image if that goes with it.
type Own = (u64, Option<EphemeralClone>);

/// All disks, and their workers.
pub(crate) struct Disks {
    options: DaemonArgs,
    /// Who comes to them: over one transport.
    guests: Guests,
    /// The toolstack that attaches disks, if it is one of Xen's.
    xen: Option<Arc<XenPlan>>,
    /// Where NBD clients come in.
    pub(super) portals: Portals,
    /// Where images and sockets are.
    pub(super) host: Host,
    /// In a sandbox: all rings there will ever be.
    rings: Option<RingPool>,
    polling: Polling,
    /// The CPUs of all workers, whatever their engine.
    pins: Cpus,
    paths: Paths,
    incidents: Incidents,
    /// The file that says what they are, if there is one.
    pub(super) configured: Option<Configured>,
    /// What happens to them.
    pub(crate) events: Arc<Events>,
    list: Mutex<Vec<Arc<Served>>>,
    /// Those with a process of their own.
    isolated: Mutex<Vec<Arc<Isolated>>>,
    spawner: Option<Arc<Spawner>>,
    log: LogWords,
    sampled: bool,
    /// The daemon that has the disk, if this is the process of one.
    parent: Option<Arc<Mouth>>,
    next_id: AtomicU64,
    /// Limits that some of them share.
    pub(crate) limit_groups: LimitGroups,
    engines: Mutex<Vec<Engine>>,
    /// Held while a disk is added; false once none may be added any more.
    open: Mutex<bool>,
    pub(super) removed: AtomicBool,
    pub(crate) removals: Arc<Removals>,
    /// What was not left in order when a disk ended by itself: the first.
    parted: Arc<Mutex<Option<anyhow::Error>>>,
    /// Who serves front-ends, once there is a disk for these.
    session_threads: Mutex<Option<SessionThreads>>,
    pub(super) bell: Arc<Bell>,
    pub(crate) begun: Instant,
    /// What does not work any more.
    lacks: Mutex<Vec<&'static str>>,
    /// What could not be served at the start.
    absent: Mutex<Vec<Absent>>,
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
        let Means { host, guests, xen, portals, spawner, log, configured, .. } = means;
        let Means { sampled, parent, limit_groups, .. } = means;
        let (mut opened, mut ids, mut starting) = (Vec::new(), Vec::new(), Vec::new());
        let (mut new_images, mut turn, next_id) = (Vec::new(), 0, AtomicU64::new(0));
        let mut of_clusters = Vec::new();
        // All at once: a server that is silent takes its time.
        let connecting: Vec<_> = specs.iter().map(|spec| connect(&host, spec, &options)).collect();
        for (spec, connecting) in specs.into_iter().zip(connecting) {
            let id = next_id.fetch_add(1, SeqCst);
            let apart = is_isolated(&spec, &options).map_err(|e| with_origin(&spec.origin, e))?;
            if let Some(spawner) = spawner.as_ref().filter(|_| apart) {
                let (origin, queues) = (spec.origin.clone(), usize::from(spec.queues));
                let started = Starting::new(spawner, spec, &options, log, turn);
                starting.push((id, started.map_err(|error| with_origin(&origin, error))?));
                turn += workers(&options, queues);
                continue;
            }
            if let Some(disk) = prepare_cluster(&host, &spec)? {
                of_clusters.push((id, disk, spec));
                continue;
            }
            let open = match connecting.transpose() {
                Some(connecting) => connecting.and_then(|it| host.connected(it, &spec)),
                None => host.open(&spec),
            };
            let open = open.map_err(|error| with_origin(&spec.origin, error))?;
            ids.push((id, open.clone));
            opened.push((Arc::new(open.disk), spec));
            new_images.extend(open.new);
        }
        // As long as signals still end this process: it may wait for somebody else's image.
        let isolated = wait_for_all(starting, &host, spawner.as_ref())?;
        let rings = rings(&opened, &options, &host)?;
        // Asked for now: the files that tell it cannot be read afterwards.
        cpus();
        host.confine();
        enter()?;
        for (id, disk, spec) in open_clusters(of_clusters)? {
            ids.push((id, None));
            opened.push((Arc::new(disk), spec));
        }
        let events = Arc::<Events>::default();
        let disks = Self {
            pins: Cpus::new(options.cpus.as_ref().map_or(&[][..], CpuList::numbers)),
            options,
            guests,
            xen,
            portals,
            host,
            rings,
            polling,
            paths: Paths::start(&events)?,
            incidents: Incidents::start(&events)?,
            events,
            configured,
            list: Mutex::default(),
            isolated: Mutex::new(isolated),
            spawner,
            log,
            sampled,
            parent,
            next_id,
            limit_groups,
            engines: Mutex::default(),
            open: Mutex::new(true),
            removed: AtomicBool::new(false),
            removals: Arc::default(),
            parted: Arc::default(),
            session_threads: Mutex::default(),
            bell: Arc::new(Bell::new()?),
            begun: Instant::now(),
            lacks: Mutex::default(),
            absent: Mutex::default(),
        };
        kill_point!(Locked);
        disks.start_pools(&opened)?;
        disks.warn_of_crowd(0);
        let prepare = |((disk, spec), own): ((Arc<Disk>, DiskSpec), Own)| {
            let origin = spec.origin.clone();
            disks.prepare(disk, spec, own).map_err(|error| with_origin(&origin, error))
        };
        let ready = opened.into_iter().zip(ids).map(prepare).collect::<anyhow::Result<_>>()?;
        if disks.configured.is_some() {
            disks.all().iter().for_each(|disk| lock(disk.words()).in_file = true);
        }
        kill_point!(Listening);
        Ok((disks, ready, new_images))
    }

    /// Gives an open disk its workers and its place.
    fn prepare(&self, disk: Arc<Disk>, spec: DiskSpec, (id, clone): Own) -> anyhow::Result<Ready> {
        disk.set_error_policy(spec.errors);
        self.host.supervise(&disk, &spec)?;
        let (mut claim, words) =
            (spec.claim(|path| self.host.locate(path)), DiskWords::of(&spec, false));
        let options = ExportOptions { queues: spec.queues, queue_size: spec.queue_size };
        let image_lock = (self.host.names(&spec.source), spec.lock_wait);
        let rule = spec.access.or(&self.options.each.access);
        let (mode, group) = rule.settle(self.options.user.is_some()).map_err(anyhow::Error::msg)?;
        let limits =
            self.limit_groups.of_new(&spec.words.limits, spec.words.limit_group.as_deref())?;
        let endpoint =
            Endpoint::open(spec.place, Access { mode, group }, (&self.portals, &self.host))?;
        claim.listens(|path| self.host.locate(path));
        if let Endpoint::Nbd(clients) = &endpoint {
            clients.open(&disk, spec.queues);
        }
        let stop = Arc::new(event()?);
        let (busy, place, export) = {
            let mut engines = lock(&self.engines);
            let engine = engines.iter_mut().find(|engine| engine.kind == disk.engine());
            let engine = engine.ok_or_else(|| anyhow!("no workers for {}", disk.engine()))?;
            let workers = engine.pool.len();
            let busy = workers_of(&disk, workers, spec.queues);
            let first = engine.spread.place(spec.queues.into(), busy);
            self.paths.listen(id, &disk);
            self.incidents.listen(id, &disk);
            let export = engine.pool.export(disk, options, first, image_lock);
            (busy, (first, workers), export)
        };
        let served = Arc::new(Served {
            id,
            export,
            claim: Mutex::new(claim),
            words: Mutex::new(words),
            files_change: Mutex::default(),
            resizing: Mutex::default(),
            job: Mutex::default(),
            socket: endpoint.path().map(Path::to_path_buf),
            device: endpoint.device().map(str::to_owned),
            workers: busy,
            limits: Mutex::new(limits),
            place,
            stop,
            base: spec.base.map(|(base, _)| base),
            clone: Mutex::new(clone),
            leaving: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            flushing: AtomicBool::new(false),
            server: Mutex::default(),
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
        // Its group may have gone meanwhile.
        self.settle_limits(&served).inspect_err(|_| self.forget(&served))?;
        Ok(Ready { served, endpoint })
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
            let queues = served.export.options().queues.into();
            engine.spread.leave(first, (queues, served.workers), workers);
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

    /// All disks, wherever they are served.
    pub(crate) fn all(&self) -> Vec<AnyDisk> {
        let here = self.list().into_iter().map(AnyDisk::Here);
        here.chain(self.isolated().into_iter().map(AnyDisk::Apart)).collect()
    }

    /// Something does not work any more: from now on whoever asks is told.
    pub(crate) fn lacks(&self, what: &'static str) {
        lock(&self.lacks).push(what);
    }

    /// The disks that could not be served at the start, until others know better.
    pub(crate) fn set_absent(&self, absent: Vec<Absent>) {
        *lock(&self.absent) = absent;
    }

    /// What does not work, and what is not served.
    pub(crate) fn all_it_lacks(&self) -> Vec<String> {
        let lacks: Vec<_> = lock(&self.lacks).iter().map(|&what| what.to_owned()).collect();
        let mut absent = lock(&self.absent);
        if absent.is_empty() {
            return lacks;
        }
        let all: Vec<_> = self.all().iter().map(|disk| PathBuf::from(disk.image())).collect();
        absent.retain(|disk| !all.contains(&disk.image));
        lacks.into_iter().chain(absent.iter().map(|disk| disk.why.clone())).collect()
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
                self.part_from(served);
                outcome.transpose()?;
            }
        }
        if self.bell.disk_panicked.load(SeqCst) {
            bail!("the thread of a disk that was being removed panicked; the log says why");
        }
        Ok(!lock(&self.list).is_empty() || !lock(&self.isolated).is_empty())
    }

    /// Leaves a disk in order that has ended by itself: a server may take its time to flush, and others are served
    /// meanwhile. The daemon ends after that.
    fn part_from(&self, served: Arc<Served>) {
        let parting = self.removals.begin();
        let (disk, parted_from) = (Arc::clone(&served), Arc::clone(&self.parted));
        let removals = Arc::clone(&self.removals);
        let part = move |served: &Served| {
            served.flush_server();
            if let Err(error) = served.leave() {
                tracing::error!(disk = served.name(), "{error}");
                lock(&parted_from).get_or_insert(error);
            }
            served.end_server();
        };
        let here = part.clone();
        let parted = std::thread::Builder::new().name("part".into()).spawn(move || {
            part(&disk);
            removals.close_disk(disk);
            drop(parting);
        });
        if parted.is_err() {
            here(&served);
        }
    }

    /// Stops all disks at once and waits for them, and for those that others are removing.
    ///
    /// # Errors
    /// The first that a disk's thread met, or that was not left in order, also of those that have ended by themselves.
    pub(crate) fn stop_all(&self) -> anyhow::Result<()> {
        *lock(&self.open) = false;
        let (mut list, mut isolated) = (self.list(), self.isolated());
        list.retain(|served| !served.leaving.swap(true, SeqCst));
        isolated.retain(|disk| disk.begin_to_leave(Leaving::Ends));
        list.iter().for_each(|served| served.stop());
        // Beside each other: a process that hears nothing any more takes its time.
        let outcome = std::thread::scope(|scope| {
            let end = |disk: Arc<Isolated>| {
                let (its, thread) = (Arc::clone(&disk), std::thread::Builder::new());
                let end = move || {
                    its.stop();
                    its.join()
                };
                (thread.name("end".into()).spawn_scoped(scope, end).ok(), disk)
            };
            let ends: Vec<_> = isolated.into_iter().map(end).collect();
            let here = self.stop_here(list);
            ends.into_iter().fold(here, |outcome, (thread, disk)| {
                let departure = match thread.map(|thread| thread.join()) {
                    Some(Ok(departure)) => departure,
                    // Without a thread it is told only now.
                    Some(Err(_)) | None => {
                        disk.stop();
                        disk.join()
                    }
                };
                match departure.unsaved {
                    true => outcome.and(Err(anyhow!(disk.not_in_order()))),
                    false => outcome,
                }
            })
        });
        self.removals.wait();
        outcome.and(lock(&self.parted).take().map_or(Ok(()), Err))
    }

    /// Waits for disks of this process that were told to stop.
    fn stop_here(&self, list: Vec<Arc<Served>>) -> anyhow::Result<()> {
        let part = |served: &Served| {
            let joined = served.join().unwrap_or(Ok(()));
            served.flush_server();
            let left = if self.removed.load(SeqCst) {
                self.forget_image(served);
                served.leave_or_delete(true)
            } else {
                served.end_clone(false);
                served.leave()
            };
            // Nobody is served any more: what waits for a server waits no longer.
            served.export.disk().storage().give_up(false, Duration::ZERO);
            joined.and(left)
        };
        // Beside each other: a server that does not answer takes its time, and so does storage that hangs, also for a
        // job, or for a worker that the disk's session waits for.
        let part = &part;
        let parted: Vec<_> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for served in &list {
                let thread = std::thread::Builder::new().name("part".into());
                threads.push((served, thread.spawn_scoped(scope, move || part(served)).ok()));
            }
            let end = |(served, thread): (&Arc<Served>, Option<ScopedJoinHandle<'_, _>>)| {
                let panicked = || anyhow!("{}: leaving it panicked", served.name());
                match thread {
                    Some(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
                    None => part(served),
                }
            };
            threads.into_iter().map(end).collect()
        });
        let outcome = parted.into_iter().collect::<anyhow::Result<()>>();
        list.iter().for_each(|served| self.forget(served));
        outcome
    }
}
