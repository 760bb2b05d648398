//! A daemon from its start to its end: disks, control socket, signals.

use super::control::{Control, all_facts};
use super::deadline;
use super::disks::{Disks, Means, Ready};
use super::host::{Duties, Host, StateDir, is_socket_busy};
use super::isolate::{Inside, Spawner};
use super::limits::LimitGroups;
use super::metrics::Metrics;
use super::notify::Notify;
use super::pulse::Pulse;
use super::survive::survive;
use super::toolstack::Toolstack;
use super::watchdog::{self, Watchdog};
use crate::dying;
use crate::sandbox::{self, Account, Guests};
use crate::signals::Signals;
use anyhow::{Context, anyhow};
use ringway_control::config::{CpuList, DaemonArgs, Plan, XenPlan};
use ringway_control::log::LogArgs;
use ringway_control::protocol::DiskFacts;
use ringway_core::panic_point;
use ringway_export::{Polling, tell_suppressed};
use ringway_terminal::logging;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// All parts of a daemon.
pub(crate) struct Daemon {
    /// Its disks.
    pub(crate) disks: Arc<Disks>,
    ready: Vec<Ready>,
    outside: Outside,
    xen: Option<(Arc<XenPlan>, Toolstack)>,
    /// The daemon that has its disk, if it is the process of one.
    inside: Option<Inside>,
    notify: Notify,
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
    fn listen(options: &DaemonArgs, host: &Host) -> anyhow::Result<Self> {
        let control = options.control.as_deref().map(|path| listen(path, host));
        let metrics = options.metrics.as_ref().map(|at| Metrics::listen(at, host));
        Ok(Self { control: control.transpose()?, metrics: metrics.transpose()? })
    }
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
        plan: Plan,
        polling: Polling,
        mut inside: Option<Inside>,
        log: &LogArgs,
    ) -> anyhow::Result<Self> {
        let limit_groups = limit_groups(&plan)?;
        let print_stats = plan.daemon.stats;
        let overdue =
            plan.daemon.overdue.map_or(watchdog::LIMIT, |s| Duration::from_secs(s.into()));
        if let Some(cpus) = &plan.daemon.cpus {
            cpus.check().map_err(|error| anyhow!("--cpus {cpus}: {error}"))?;
        }
        let mode = plan.daemon.sandbox.unwrap_or_default();
        let user = plan.daemon.user.as_deref();
        let account =
            user.map(|user| Account::find(user).with_context(|| format!("--user {user}")));
        let account = account.transpose()?;
        let guests = if plan.xen.is_some() { Guests::Xen } else { Guests::VhostUser };
        let duties = Duties {
            account: account.clone(),
            adds: plan.daemon.control.is_some() || plan.xen.is_some(),
            groups: plan.names_groups(),
            iopoll: plan.daemon.iopoll,
            xen: plan.xen.as_ref().map(super::xen::prepare).transpose()?,
            state_dir: StateDir::open(plan.daemon.state_dir.as_deref())?,
        };
        let spawner = plan.isolates().then(|| Spawner::fork(account.clone(), log)).transpose()?;
        let host = Host::start(mode, duties)?;
        let notify = Notify::connect();
        // First, because a disk that is to be made is only made once all else is in place.
        let outside = Outside::listen(&plan.daemon, &host)?;
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
            xen: xen.clone(),
            spawner: spawner.map(Arc::new),
            log: (plan.log_format, plan.log_level),
            limit_groups,
            sampled: inside.as_ref().is_some_and(|inside| inside.sampled),
        };
        let (disks, ready, new_images) =
            Disks::start(plan.disks, plan.daemon, polling, means, enter)?;
        disks.started()?;
        let disk = inside.as_ref().map(|inside| inside.name.as_str());
        tracing::info!(disk, "{sandbox}");
        if !disks.host.keeps_state() {
            tracing::info!(
                disk,
                "no --state-dir: a failed flush and a pause will not outlive this daemon"
            );
        }
        let signals = signals.ok_or_else(|| anyhow!("signals are not listened to"))?;
        let disks = Arc::new(disks);
        let xen = xen.map(|plan| {
            let toolstack = Toolstack::listen(&disks, &plan)?;
            anyhow::Ok((plan, toolstack))
        });
        let xen = xen.transpose()?;
        if let Some(inside) = &mut inside {
            inside.wait_for_go(&disks)?;
        }
        new_images.into_iter().for_each(|image| image.keep());
        Ok(Self { disks, ready, outside, xen, inside, notify, signals, print_stats, overdue })
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

    /// Where its metrics are told.
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
        let stop = signals.listen(inside.is_none(), news)?;
        notify.ready();
        let stays = control.is_some() || xen.is_some() || inside.is_some();
        let launched = ready.into_iter().try_for_each(|ready| disks.launch(ready));
        let launched = launched.and_then(|()| disks.launch_isolated());
        let farewell = inside.map(|inside| inside.attend(&disks, &stop)).transpose()?;
        let control = control.map(|control| control.run(&disks)).transpose();
        let metrics = metrics.map(|metrics| metrics.run(&disks)).transpose();
        let pulse = Pulse::default();
        let watchdog = match overdue {
            Duration::ZERO => None,
            limit => Some(Watchdog::start(&disks, limit, pulse.clone())?),
        };
        let served = launched.and_then(|()| wait(&disks, &stop, stays, &|| pulse.tell(&notify)));
        deadline::begin(&disks, name.is_some())?;
        notify.stopping();
        // New requests are refused first: nothing is added any more.
        drop((control?, metrics?));
        drop(xen);
        // Asked later, when all is counted; named now, while the disks are there.
        let (workers, list) = (disks.workers(), disks.list());
        let has_own = !list.is_empty() || disks.isolated().is_empty();
        let stopped = disks.stop_all();
        let clear = list.iter().all(|served| served.export.is_clear());
        drop(list);
        if print_stats && has_own {
            workers.print();
        }
        drop((watchdog, workers));
        disks.end_workers();
        tell_suppressed(Instant::now(), true);
        if let Some(farewell) = farewell {
            farewell.say(clear);
        }
        served.and(stopped).map_err(|error| match &name {
            Some(name) => error.context(name.clone()),
            None => error,
        })?;
        tracing::info!(disk = name, "stopped");
        Ok(ExitCode::SUCCESS)
    }
}

/// `alive` is called now and then, and says when the next time is due.
fn wait(
    disks: &Disks,
    stop: &OwnedFd,
    stays: bool,
    alive: &dyn Fn() -> Option<Timespec>,
) -> anyhow::Result<()> {
    loop {
        let next = alive();
        let bell = disks.bell();
        let stop = stop.as_fd();
        let mut polled = [PollFd::new(&stop, PollFlags::IN), PollFd::new(&bell, PollFlags::IN)];
        match poll(&mut polled, next.as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        if !polled[0].revents().is_empty() {
            return Ok(());
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
