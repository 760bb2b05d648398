//! All that one daemon does.

use super::seconds::overdue;
use super::{
    Claim, CpuList, DiskSpec, LimitGroup, Location, MetricsAt, NbdAddress, NbdPlace, NbdSecurity,
    Origins, Place, SocketRule, XenPlan, hint,
};
use crate::log::{LogFormat, LogLevel};
use clap::{Args, ValueEnum};
use ringway_export::Polling;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// What concerns the daemon as a whole; options win over the file.
#[derive(Clone, Debug, Default, Args, Deserialize, Serialize)]
#[command(next_help_heading = "Workers")]
pub struct DaemonArgs {
    /// Threads that serve queues [default: one per queue, at most one per CPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: Option<u16>,
    /// CPUs for workers, such as 0,2-3: each is pinned to one, in turn [default: any].
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuList>,
    /// Whether workers look for work before they sleep: as long as it pays, always (least latency,
    /// a whole CPU each), or never (least CPU time) [default: adaptive].
    #[arg(long, value_enum, value_name = "WHEN")]
    pub poll: Option<Poll>,
    /// The longest adaptive look, for a guest or for its disk, in microseconds [default: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub poll_max_us: Option<u32>,
    /// The most CPU time that a worker may spend on adaptive looks beyond what sleeping would have
    /// cost, in percent of a CPU [default: 50].
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub poll_budget: Option<u8>,
    /// Let io_uring pin guest memory: less CPU time per byte. Not with a balloon or free page
    /// reporting in the guest, which would corrupt its data.
    #[arg(long)]
    pub pin_memory: bool,
    /// Let io_uring ask the device for completions instead of waiting for its interrupt: less
    /// latency, a busy CPU while requests are under way. Needs a device with poll queues.
    #[arg(long)]
    pub iopoll: bool,
    /// Listen on this Unix socket for `ringway ctl` and `ringway top`: disks come and go and change
    /// their size while the daemon runs. Only this user can connect.
    #[arg(long, value_name = "PATH", help_heading = "Control")]
    pub control: Option<PathBuf>,
    /// Tell metrics here, to Prometheus and others who collect them: a port of this host alone such as
    /// 127.0.0.1:9099, or unix:PATH.
    #[arg(long, value_name = "ADDRESS", help_heading = "Control")]
    pub metrics: Option<MetricsAt>,
    /// Let other hosts read the metrics, with an address that they reach. Nobody is asked who it is.
    #[arg(long, help_heading = "Control")]
    pub metrics_remote: bool,
    /// A name under which others reach the port of --metrics, besides addresses and localhost: requests
    /// for any other are refused, as a foreign web page could make a browser send them. May be given
    /// several times.
    #[arg(long, value_name = "NAME", help_heading = "Control")]
    pub metrics_name: Vec<String>,
    /// Whether the daemon gives up, before it meets a guest, all that it does not need: whatever it
    /// should not do then ends it (on), is done (off), or is done and written to the kernel's audit
    /// log (log) [default: on].
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Safety")]
    pub sandbox: Option<Sandbox>,
    /// Run as this user once images and sockets are open; only for root. Names or numbers.
    #[arg(long, value_name = "USER[:GROUP]", help_heading = "Safety")]
    pub user: Option<String>,
    /// Keep here what must outlive this daemon and is not in guests' memory: failed flushes, pauses.
    /// A folder in memory [default: /run/ringway/state for root, $XDG_RUNTIME_DIR/ringway/state for
    /// others].
    #[arg(long, value_name = "DIR", help_heading = "Safety")]
    pub state_dir: Option<PathBuf>,
    /// Warn of requests that have been under way for so long, of lost kicks and of stuck workers; 0
    /// for no such watchdog [default: 30s].
    #[arg(long, value_name = "TIME", help_heading = "Output", value_parser = overdue)]
    pub overdue: Option<u32>,
    /// Print counts at the end.
    #[arg(long, help_heading = "Output")]
    pub stats: bool,
    /// What holds for each disk that says nothing else. On the command line these are options of the
    /// disk.
    #[arg(skip)]
    pub each: EachDisk,
}

/// What is said for all disks, and by a disk only if it is to differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct EachDisk {
    /// Who may connect.
    pub access: SocketRule,
    /// Whether it has a process of its own.
    pub isolate: Option<bool>,
}

/// Whether a worker spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    // As long as it pays.
    Adaptive,
    // Never sleeps.
    Always,
    // Sleeps at once.
    Never,
}

/// Whether the daemon is confined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment would be a line of the help")]
pub enum Sandbox {
    // Whatever is not allowed ends the process.
    #[default]
    On,
    // Not at all.
    Off,
    // Whatever is not allowed is done, and the kernel's audit log tells of it.
    Log,
}

impl DaemonArgs {
    /// `self`, and where it says nothing `other`.
    pub fn or(self, other: &Self) -> Self {
        Self {
            workers: self.workers.or(other.workers),
            cpus: self.cpus.or_else(|| other.cpus.clone()),
            poll: self.poll.or(other.poll),
            poll_max_us: self.poll_max_us.or(other.poll_max_us),
            poll_budget: self.poll_budget.or(other.poll_budget),
            pin_memory: self.pin_memory || other.pin_memory,
            iopoll: self.iopoll || other.iopoll,
            control: self.control.or_else(|| other.control.clone()),
            metrics: self.metrics.or_else(|| other.metrics.clone()),
            metrics_remote: self.metrics_remote || other.metrics_remote,
            metrics_name: match self.metrics_name.is_empty() {
                true => other.metrics_name.clone(),
                false => self.metrics_name,
            },
            sandbox: self.sandbox.or(other.sandbox),
            user: self.user.or_else(|| other.user.clone()),
            state_dir: self.state_dir.or_else(|| other.state_dir.clone()),
            overdue: self.overdue.or(other.overdue),
            stats: self.stats || other.stats,
            each: EachDisk {
                access: self.each.access.or(&other.each.access),
                isolate: self.each.isolate.or(other.each.isolate),
            },
        }
    }

    /// True if somebody may ask how long requests take.
    pub fn is_watched(&self) -> bool {
        self.control.is_some() || self.metrics.is_some()
    }

    /// How workers wait.
    ///
    /// # Errors
    /// The word that is wrong, and the message: a limit for something that is switched off, or one that
    /// makes no sense.
    pub fn polling(&self) -> Result<Polling, (&'static str, String)> {
        if let Some(percent @ 101..) = self.poll_budget {
            let why = format!("poll-budget is a percentage of a CPU: 0 to 100, not {percent}");
            return Err(("poll-budget", why));
        }
        let adaptive = [
            ("poll-max-us", "limit", self.poll_max_us.is_some()),
            ("poll-budget", "budget", self.poll_budget.is_some()),
        ];
        let polling = match self.poll {
            Some(Poll::Always) => Polling::Always,
            Some(Poll::Never) => Polling::Never,
            Some(Poll::Adaptive) | None => {
                let max = self.poll_max_us.map(|us| Duration::from_micros(us.into()));
                return Ok(Polling::Adaptive {
                    max: max.unwrap_or(Polling::MAX),
                    budget: self.poll_budget.unwrap_or(Polling::BUDGET),
                });
            }
        };
        match adaptive.iter().find(|(.., said)| *said) {
            None => Ok(polling),
            Some((word, what, _)) => {
                let to_do = "leave it out, or choose adaptive";
                Err((word, format!("{word} is the {what} of adaptive polling: {to_do}")))
            }
        }
    }
}

/// All that one daemon does.
#[derive(Debug, Default)]
pub struct Plan {
    /// The disks; at least one, unless there is a control socket to add some.
    pub disks: Vec<DiskSpec>,
    /// Limits that several disks share.
    pub limit_groups: Vec<LimitGroup>,
    /// The toolstack that attaches more of them, if it is one of Xen's.
    pub xen: Option<XenPlan>,
    /// What concerns all of them.
    pub daemon: DaemonArgs,
    /// Where that was said.
    pub origins: Origins,
    /// How NBD clients are met.
    pub nbd: NbdSecurity,
    /// How log lines look.
    pub log_format: Option<LogFormat>,
    /// What is logged.
    pub log_level: Option<LogLevel>,
}

impl Plan {
    /// Puts numbers in place of groups' names.
    ///
    /// # Errors
    /// That there is no such group, and where it was named.
    pub fn resolve_groups<E: std::fmt::Display>(
        &mut self,
        number: impl Fn(&str) -> Result<u32, E>,
    ) -> Result<(), String> {
        let all = self.daemon.each.access.resolve(&number);
        all.map_err(|error| self.origins.lead(&["socket-group"]) + &error)?;
        for disk in &mut self.disks {
            disk.access.resolve(&number).map_err(|error| match disk.origin.as_str() {
                "" => error,
                origin => format!("{origin}: {error}"),
            })?;
        }
        Ok(())
    }

    /// True if a disk is to have a process of its own.
    pub fn isolates(&self) -> bool {
        let all = self.daemon.each.isolate == Some(true);
        all || self.disks.iter().any(|disk| disk.own_process() == Some(true))
    }

    /// True if a socket is to belong to a group that was named.
    pub fn names_groups(&self) -> bool {
        let each = &self.daemon.each;
        each.access.group.is_some() || self.disks.iter().any(|disk| disk.access.group.is_some())
    }

    /// Refuses disks of a limit group that there is not.
    ///
    /// # Errors
    /// Where that is said, if it was told, and the message.
    pub fn check_limit_groups(&self) -> Result<(), (Option<&str>, String)> {
        let said =
            self.disks.iter().map(|disk| (Some(disk.origin.as_str()), &disk.words.limit_group));
        let xen = self.xen.iter().flat_map(|xen| {
            let each = xen.disks.iter().map(|d| (Some(d.origin.as_str()), &d.words.limit_group));
            std::iter::once((None, &xen.disk.limit_group)).chain(each)
        });
        for (origin, group) in said.chain(xen) {
            if let Some(group) = group {
                let known = self.limit_groups.iter().map(|group| group.name.as_str());
                check_limit_group(group, known)
                    .map_err(|e| (origin.filter(|o| !o.is_empty()), e))?;
            }
        }
        Ok(())
    }

    /// Refuses two disks on one socket, and two on one image unless both only read it; `locate` looks
    /// paths up.
    ///
    /// # Errors
    /// The message, with both places.
    pub fn check_apart(&self, locate: impl Fn(&Path) -> Location) -> Result<(), String> {
        let claims: Vec<Claim> = self.disks.iter().map(|disk| disk.claim(&locate)).collect();
        for (number, claim) in claims.iter().enumerate() {
            for earlier in &claims[..number] {
                claim.check_apart(earlier)?;
            }
        }
        Ok(())
    }

    /// Refuses words on TLS that do not go together.
    ///
    /// # Errors
    /// The message, with the place if it is known.
    pub fn check_security(&self, security: &NbdSecurity) -> Result<(), String> {
        security.check().map_err(|error| self.origins.lead(&NbdSecurity::WORDS) + &error)
    }

    /// Refuses words of security where no disk has NBD clients, nor can get some by the control socket. For a daemon
    /// that starts: one that runs may have been given its socket, and these words, elsewhere than here.
    ///
    /// # Errors
    /// The message, with the place if it is known.
    pub fn check_security_is_of_use(&self, security: &NbdSecurity) -> Result<(), String> {
        let has_clients = self.disks.iter().any(|disk| matches!(disk.place, Place::Nbd(_)));
        if has_clients || *security == NbdSecurity::default() || self.daemon.control.is_some() {
            return Ok(());
        }
        Err(self.origins.lead(&NbdSecurity::WORDS)
            + "tls-cert, tls-key, tls-ca and insecure are for NBD clients, and no disk has some: add nbd to one, or \
               leave them out")
    }

    /// Refuses disks for NBD clients that cannot be served so, with this security.
    ///
    /// # Errors
    /// The message, with the place if it is known.
    pub fn check_nbd(&self, security: &NbdSecurity) -> Result<(), String> {
        let place = |disk: &DiskSpec| match &disk.place {
            Place::Nbd(place) => Some(place.clone()),
            _ => None,
        };
        let places: Vec<_> = self.disks.iter().filter_map(place).collect();
        self.check_security(security)?;
        if places.is_empty() {
            return Ok(());
        }
        let mut earlier: Vec<&NbdPlace> = Vec::new();
        for disk in &self.disks {
            if let Place::Nbd(place) = &disk.place {
                security.check_place(place, &earlier).map_err(|error| disk.lead() + &error)?;
                earlier.push(place);
            }
        }
        if let Some(other) = self.disks.iter().find(|disk| place(disk).is_none()) {
            return Err(other.lead()
                + "a daemon serves NBD clients (nbd) or virtual machines (socket): give each a daemon \
                   of its own");
        }
        if let Some(disk) = self.disks.iter().find(|disk| disk.is_of_cluster()) {
            return Err(disk.lead()
                + "images of Ceph clusters have processes of their own, which serve virtual machines \
                   (socket) and no NBD clients");
        }
        if self.isolates() {
            return Err(self.origins.lead(&["isolate"])
                + "isolate: disks of NBD clients have no processes of their own");
        }
        Ok(())
    }

    /// Refuses a path of which two sockets of this daemon are to be made.
    ///
    /// # Errors
    /// The message, with both words.
    pub fn check_sockets(&self) -> Result<(), String> {
        let metrics = match &self.daemon.metrics {
            Some(MetricsAt::Unix(path)) => Some(("metrics", path, self.origins.lead(&["metrics"]))),
            _ => None,
        };
        let control = self.daemon.control.as_ref();
        let control = control.map(|path| ("control", path, self.origins.lead(&["control"])));
        let disks = self.disks.iter().filter_map(|disk| match &disk.place {
            Place::Socket(path) => Some(("socket", path, disk.lead())),
            Place::Nbd(NbdPlace { address: NbdAddress::Unix(path), .. }) => {
                Some(("nbd", path, disk.lead()))
            }
            _ => None,
        });
        let all: Vec<_> = control.into_iter().chain(metrics).chain(disks).collect();
        for (number, (word, path, lead)) in all.iter().enumerate() {
            let place = Location::of(path);
            for (other, earlier, _) in &all[..number] {
                if word != other && Location::of(earlier).is_same_place(&place) {
                    let path = path.display();
                    return Err(format!(
                        "{lead}{path} is both {other} and {word}: give each its own path"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Refuses the name of a limit group that is not among those `known`.
///
/// # Errors
/// The message, with the nearest one.
pub fn check_limit_group<'a>(
    name: &str,
    known: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), String> {
    if known.clone().any(|other| other == name) {
        return Ok(());
    }
    Err(format!(
        "there is no limit group '{name}'{}: add it as a [[limit-group]] of the file that --config \
         names, or by `ringway ctl limit --group {name} --create`",
        hint(name, known)
    ))
}

/// The CPUs this process may use.
///
/// Asked once: it is told by files that cannot be read later.
pub fn cpus() -> u16 {
    static CPUS: OnceLock<u16> = OnceLock::new();
    *CPUS.get_or_init(|| {
        std::thread::available_parallelism()
            .map_or(1, |n| u16::try_from(n.get()).unwrap_or(u16::MAX))
    })
}
