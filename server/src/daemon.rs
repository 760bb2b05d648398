//! A daemon from its start to its end: disks, control socket, signals.

use super::configured::Configured;
use super::control::{Control, all_facts};
use super::deadline;
use super::departure::{Departure, Watch};
use super::disks::{Disks, Means, Ready};
use super::host::{Duties, Host, StateDir, is_socket_busy};
use super::hung::Hung;
use super::isolate::{Inside, Spawner};
use super::limits::LimitGroups;
use super::metrics::Metrics;
use super::nbd_clients::Portals;
use super::notify::Notify;
use super::pulse::Pulse;
use super::reload::reload;
use super::survive::survive;
use super::toolstack::Toolstack;
use super::watchdog::{self, Watchdog};
use crate::dying;
use crate::sandbox::{self, Account, Guests};
use crate::signals::Signals;
use anyhow::{Context, anyhow, ensure};
use ringway_control::config::{
    CpuList, DaemonArgs, DiskSpec, NbdPlace, Origins, Place, Plan, XenPlan,
};
use ringway_control::log::LogArgs;
use ringway_control::protocol::{DiskFacts, Happened};
use ringway_core::panic_point;
use ringway_disk::EngineKind;
use ringway_export::{Polling, report_suppressed};
use ringway_terminal::logging;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is logged where a daemon can keep nothing.
const NO_STATE: &str = "no --state-dir, and no XDG_RUNTIME_DIR to use: failed flushes and pauses are \
                        forgotten when this daemon ends";

/// What does not work any more without a process of the daemon's own.
const NO_SPAWNER: &str = "the process that starts others for disks has ended (ringway-spawner): all disks are \
                          served on, but one whose own process ends is not served again, and none with a \
                          process of its own can be added";
const NO_HELPER: &str = "the process that opens files for this daemon has ended (ringway-helper): disks are \
                         served on, but none can be added, changed by a file that is read again, or found by \
                         a path; there are no snapshots and merges; a lost connection to an NBD server does \
                         not come back; images stay locked for a guest that leaves, and socket files and \
                         ephemeral clones stay at the end";

/// All parts of a daemon.
pub(crate) struct Daemon {
    /// Its disks.
    pub(crate) disks: Arc<Disks>,
    ready: Vec<Ready>,
    outside: Outside,
    xen: Option<(Arc<XenPlan>, Toolstack)>,
    /// Where NBD clients find its disks.
    nbd: Vec<NbdPlace>,
    /// The daemon that has its disk, if it is the process of one.
    inside: Option<Inside>,
    notify: Arc<Notify>,
    signals: Signals,
    print_stats: bool,
    /// When to warn of requests that take long; never if zero.
    overdue: Duration,
}

/// Where it is told what to do, and asked how it is.
struct Outside {
    control: Option<Control>,
    metrics: Option<Metrics>,
}

impl Outside {
    fn listen(options: &DaemonArgs, origins: &Origins, host: &Host) -> anyhow::Result<Self> {
        let control = options
            .control
            .as_deref()
            .map(|path| listen(path, host).with_context(|| origins.name("control")));
        let metrics = options.metrics.as_ref();
        let metrics = metrics.map(|at| {
            let listen = || {
                ensure!(
                    !at.is_public() || options.metrics_remote,
                    "other hosts could read the metrics there, and nobody is asked who it is. Listen at \
                     127.0.0.1 or at a Unix socket, or add --metrics-remote (metrics-remote = true) if that is meant"
                );
                Metrics::listen(at, &options.metrics_name, host)
            };
            listen().with_context(|| format!("{} {at}", origins.name("metrics")))
        });
        Ok(Self { control: control.transpose()?, metrics: metrics.transpose()? })
    }
}

/// Whose rights it will have, if not those of who starts it.
fn account(user: Option<&str>, origins: &Origins) -> anyhow::Result<Option<Account>> {
    let find =
        |user| Account::find(user).with_context(|| format!("{} {user}", origins.name("user")));
    user.map(find).transpose()
}

fn check_cpus(plan: &Plan) -> anyhow::Result<()> {
    let Some(cpus) = &plan.daemon.cpus else { return Ok(()) };
    cpus.check().map_err(|error| anyhow!("{} {cpus}: {error}", plan.origins.name("cpus")))
}

/// Who comes to the disks of a daemon.
///
/// In the process of one disk of a Ceph cluster, whose guests come over vhost-user, the cluster's library
/// counts as well.
fn guests_of(plan: &Plan, inside: bool) -> Guests {
    let cluster = plan.disks.iter().any(DiskSpec::is_of_cluster);

    let nbd = plan.disks.iter().any(|disk| matches!(disk.place, Place::Nbd(_)));
    match &plan.xen {
        Some(_) => Guests::Xen,
        None if nbd => Guests::Nbd,
        None if inside && cluster => Guests::Cluster,
        None => Guests::VhostUser,
    }
}

fn nbd_places(plan: &Plan) -> Vec<NbdPlace> {
    let places = plan.disks.iter().filter_map(|disk| match &disk.place {
        Place::Nbd(place) => Some(place.clone()),
        _ => None,
    });
    places.collect()
}

/// For how long a request may be in flight before that is reported.
fn overdue(options: &DaemonArgs) -> Duration {
    options.overdue.map_or(watchdog::LIMIT, |seconds| Duration::from_secs(seconds.into()))
}

fn limit_groups(plan: &Plan) -> anyhow::Result<LimitGroups> {
    plan.check_limit_groups().map_err(|(_, error)| anyhow!(error))?;
    LimitGroups::new(&plan.limit_groups)
}

impl Daemon {
    /// Opens disks, enters the sandbox, starts workers, listens, in an order that leaves nothing
    /// behind if a later part fails. From then on front-ends can connect.
    ///
    /// There must be no other thread: until the sandbox is entered none is started.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn start(
        mut plan: Plan,
        hung: &Hung,
        polling: Polling,
        configured: Option<Configured>,
        mut inside: Option<Inside>,
        log: &LogArgs,
    ) -> anyhow::Result<Self> {
        let limit_groups = limit_groups(&plan)?;
        let (print_stats, overdue) = (plan.daemon.stats, overdue(&plan.daemon));
        check_cpus(&plan)?;
        let mode = plan.daemon.sandbox.unwrap_or_default();
        let account = account(plan.daemon.user.as_deref(), &plan.origins)?;
        let guests = guests_of(&plan, inside.is_some());
        let duties = Duties {
            account: account.clone(),
            acts_for_it: inside.as_ref().is_some_and(|inside| inside.added),
            adds: plan.daemon.control.is_some() || plan.xen.is_some() || configured.is_some(),
            changes: inside.as_ref().is_some_and(|inside| inside.commanded),
            configuration: configured.as_ref().map(|configured| configured.path.clone()),
            groups: plan.names_groups(),
            clones: plan.disks.iter().any(|disk| {
                disk.base.is_some() || disk.qcow2 && !disk.read_only && !disk.never_repair
            }),
            iopoll: plan.daemon.iopoll,
            nvme: plan.disks.iter().any(|disk| disk.engine == Some(EngineKind::Nvme)),
            exports: plan.disks.iter().filter_map(|disk| disk.export().cloned()).collect(),
            xen: plan.xen.as_ref().map(super::xen::prepare).transpose()?,
            state_dir: StateDir::open(plan.daemon.state_dir.as_deref())
                .with_context(|| plan.origins.name("state-dir"))?,
        };
        // The process of a disk starts none itself.
        let isolates = inside.is_none() && plan.isolates();
        let fork = || Spawner::fork(log, &plan.daemon, duties.adds);
        let spawner = isolates.then(fork).transpose()?;
        let (added, adds) = (duties.acts_for_it, duties.adds);
        let host = Host::start(mode, duties)?;
        if added {
            // Who has asked for it may be in wrong hands: from here on it names nothing with other rights.
            account.iter().try_for_each(Account::become_it)?;
        }
        inside.as_ref().map_or(Ok(()), |inside| inside.check_name(&plan))?;
        // No child has it: it goes with this very process.
        let claim = plan.xen.as_ref().map(super::xen::claim).transpose()?.flatten();
        let notify = Arc::new(Notify::connect());
        // First, because a disk that is to be made is only made once all else is in place.
        let outside = Outside::listen(&plan.daemon, &plan.origins, &host)?;
        let (portals, nbd) = (Portals::open(&plan)?, nbd_places(&plan));
        let (mut signals, mut sandbox) = (None, String::new());
        let enter = || {
            ringway_export::install_handlers()?;
            signals = Some(Signals::take()?);
            sandbox = sandbox::enter(mode, guests, account.as_ref())?;
            // The first thread: before there is any, whoever logs writes as far as it does not block.
            Ok(logging::start_thread()?)
        };
        let xen = plan.xen.map(Arc::new);
        let means = Means {
            host,
            guests,
            xen: xen.clone(),
            portals,
            spawner: spawner.map(Arc::new),
            log: (plan.log_format, plan.log_level),
            limit_groups,
            configured,
            sampled: inside.as_ref().is_some_and(|inside| inside.sampled),
            parent: inside.as_ref().map(Inside::mouth),
        };
        let absent = hung.part(&mut plan.disks, adds)?;
        let (disks, ready, new_images) =
            Disks::start(plan.disks, plan.daemon, polling, means, enter)?;
        disks.started()?;
        disks.set_absent(absent);
        let disk = inside.as_ref().map(|inside| inside.name.as_str());
        tracing::info!(disk, "{sandbox}");
        if let Some(why) = disks.no_cgroups() {
            tracing::info!("disks with processes of their own share one cgroup: {why}");
        }
        if !disks.host.keeps_state() {
            tracing::info!(disk, "{NO_STATE}");
        }
        let signals = signals.ok_or_else(|| anyhow!("signals are not listened to"))?;
        let disks = Arc::new(disks);
        let xen = xen.map(|plan| {
            let toolstack = Toolstack::listen(&disks, &plan, claim)?;
            anyhow::Ok((plan, toolstack))
        });
        let xen = xen.transpose()?;
        inside.as_mut().map_or(Ok(()), |inside| inside.wait_for_go(&disks))?;
        new_images.into_iter().for_each(|image| image.keep());
        Ok(Self { disks, ready, outside, xen, nbd, inside, notify, signals, print_stats, overdue })
    }

    /// The disks it starts with.
    pub(crate) fn disk_facts(&self) -> Vec<DiskFacts> {
        all_facts(&self.disks)
    }

    /// The CPUs of its workers.
    pub(crate) fn cpus(&self) -> Option<&CpuList> {
        self.disks.options().cpus.as_ref()
    }

    /// The toolstack that attaches disks.
    pub(crate) fn xen(&self) -> Option<&XenPlan> {
        self.xen.as_ref().map(|(plan, _)| &**plan)
    }

    /// What NBD clients connect to.
    pub(crate) fn nbd(&self) -> Vec<String> {
        self.disks.portals.uris(&self.nbd, &self.disks.host)
    }

    /// Where its metrics are served.
    pub(crate) fn metrics(&self) -> Option<&Metrics> {
        self.outside.metrics.as_ref()
    }

    /// Its control socket.
    pub(crate) fn control(&self) -> Option<&Control> {
        self.outside.control.as_ref()
    }

    /// Serves until a signal says stop, until no front-end can come any more, or until a worker
    /// fails.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let (print_stats, overdue) = (self.print_stats, self.overdue);
        let Self { disks, ready, outside, xen, inside, notify, signals, .. } = self;
        let Outside { control, metrics } = outside;
        let name = inside.as_ref().map(|inside| inside.name.clone());
        let asked = Arc::clone(&disks);
        let news = move || {
            survive("the answer to SIGUSR1", || {
                panic_point!("news");
                asked.tell_counts();
            });
        };
        let (asked, service) = (Arc::clone(&disks), Arc::clone(&notify));
        let again = move || {
            survive("reading the configuration again", || {
                if asked.configured.is_none() {
                    tracing::warn!("SIGHUP is ignored: this daemon was started without --config");
                    return;
                }
                service.reloading();
                // What is wrong is in the log.
                let _ = reload(&asked, false);
                service.ready();
            });
        };
        let stop = signals.listen(inside.is_none(), news, again)?;
        notify.ready();
        // A file that is read again may name other disks.
        let stays =
            control.is_some() || disks.configured.is_some() || xen.is_some() || inside.is_some();
        let launched = ready.into_iter().try_for_each(|ready| disks.launch(ready));
        let launched = launched.and_then(|()| disks.launch_isolated());
        let farewell = inside.map(|inside| inside.attend(&disks, &stop)).transpose()?;
        // Whatever cannot be started: disks that are served are ended in order.
        let (control, heard) = started(control.map(|control| control.run(&disks)));
        let (metrics, told) = started(metrics.map(|metrics| metrics.run(&disks)));
        let pulse = Pulse::default();
        let (watchdog, looked) = started(Some(Watchdog::start(&disks, overdue, pulse.clone())));
        let served = launched.and(heard).and(told).and(looked);
        let served = served.and_then(|()| wait(&disks, &stop, stays, &|| pulse.tell(&notify)));
        if let Err(error) = deadline::begin(&disks, name.is_some()) {
            tracing::error!("what does not end keeps the daemon from its end: {error}");
        }
        notify.stopping();
        // New requests are refused first: nothing is added any more.
        drop((control, metrics));
        drop(xen);
        // Asked later, when all is counted; named now, while the disks are there.
        let (workers, list) = (disks.workers(), disks.list());
        let has_own = !list.is_empty() || disks.isolated().is_empty();
        let all = || list.iter().map(|served| &**served);
        let watch = Watch::begin(all());
        let stopped = disks.stop_all();
        let departure = Departure { unsaved: stopped.is_err(), ..watch.end(all()) };
        drop(list);
        if print_stats && has_own {
            workers.print();
        }
        drop((watchdog, workers));
        disks.end_workers();
        report_suppressed(Instant::now(), true);
        if let Some(farewell) = farewell {
            farewell.say(departure);
        }
        served.and(stopped).map_err(|error| match &name {
            Some(name) => error.context(name.clone()),
            None => error,
        })?;
        tracing::info!(disk = name, "stopped");
        Ok(ExitCode::SUCCESS)
    }
}

/// What was started, and that it was, if it was to be.
fn started<T>(part: Option<std::io::Result<T>>) -> (Option<T>, anyhow::Result<()>) {
    match part.transpose() {
        Ok(part) => (part, Ok(())),
        Err(error) => (None, Err(error.into())),
    }
}

/// `alive` is called now and then, and says when the next time is due.
fn wait(
    disks: &Disks,
    stop: &OwnedFd,
    stays: bool,
    alive: &dyn Fn() -> Option<Timespec>,
) -> anyhow::Result<()> {
    // Their answers are for those who ask; their end is told whatever is asked for.
    let mut lines = vec![
        (disks.end_of_spawner(), Happened::SpawnerEnded, NO_SPAWNER),
        (disks.host.end_of_helper(), Happened::HelperEnded, NO_HELPER),
    ];
    loop {
        lines.retain(|(line, ..)| line.is_some());
        let next = alive();
        let bell = disks.bell();
        let fds = [(stop.as_fd(), PollFlags::IN), (bell.as_fd(), PollFlags::IN)];
        let ends =
            lines.iter().filter_map(|(line, ..)| line.map(|line| (line, PollFlags::empty())));
        let mut polled: Vec<_> = fds
            .into_iter()
            .chain(ends)
            .map(|(fd, events)| PollFd::from_borrowed_fd(fd, events))
            .collect();
        match poll(&mut polled, next.as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        if !polled[0].revents().is_empty() {
            return Ok(());
        }
        for ((line, happened, lacks), polled) in lines.iter_mut().zip(&polled[2..]) {
            if !polled.revents().is_empty() {
                *line = None;
                disks.events.tell(None, happened.clone());
                tracing::error!("{lacks}. Start the daemon anew when you can");
                disks.lacks(lacks);
            }
        }
        if !disks.clear_up()? && !stays {
            return Ok(());
        }
    }
}

/// The control socket. The helper of a daemon that was killed as it started may be making the same one:
/// whoever looks too early sees nobody listen, and somebody a moment later.
fn listen(path: &Path, host: &Host) -> anyhow::Result<Control> {
    let mut tries = 0;
    loop {
        dying::wait_for(path);
        match Control::listen(path, host) {
            Err(error) if tries < 2 && is_socket_busy(&error) => tries += 1,
            done => return done,
        }
    }
}
