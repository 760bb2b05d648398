//! One call of `ringway serve`: its options, its plan, its daemon.

use crate::attach::QemuVersion;
use crate::configured::Configured;
use crate::hung::Hung;
use crate::signals::Signals;
use crate::{activation, daemon, endpoint, isolate, ready, sandbox};
use anyhow::bail;
use clap::error::ErrorKind;
use clap::{Args, Command, Id};
use ringway_control::config::{
    self, DaemonArgs, DiskArgs, EachDisk, NbdSecurity, Place, Plan, SocketRule, XenArgs, XenPlan,
};
use ringway_control::log::LogArgs;
use ringway_disk::Source;
use ringway_terminal::logging;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway serve disk.img --socket /run/ringway/disk.sock
  ringway serve a.img --format raw --socket /run/ringway/a.sock   in services
  ringway serve new.img --size 10G --socket /run/ringway/new.sock --queues 4
  ringway serve /dev/vg0/vm1 --socket /run/ringway/vm1.sock --cache none
  ringway serve /dev/sdb --socket /run/ringway/old.sock --path request
  ringway serve base.img --read-only --socket /run/ringway/base.sock
  ringway serve null:1T --socket /run/ringway/null.sock
  ringway serve /dev/vg0/vm2 --socket /run/ringway/vm2.sock --socket-group kvm
  ringway serve --control /run/ringway/control.sock  without disks: ctl adds
  ringway serve vm3.img --socket /run/ringway/vm3.sock --isolate  in its process
  ringway serve --xen --queues 4                   what Xen's toolstack attaches
  ringway serve --xen --user disks:disks           the same, as another user

A file for --config; the words are those of the options, relative paths start
at its folder:
  workers = 2
  socket-group = \"kvm\"
  [[disk]]
  image = \"vm1.img\"
  socket = \"/run/ringway/vm1.sock\"
  format = \"raw\"
  queues = 4
  [[disk]]
  image = \"/dev/vg0/vm2\"
  socket = \"/run/ringway/vm2.sock\"
  read-only = true

The same for guests of a Xen host: options for all disks, and for those that a
guest's name, a virtual device or an image tells apart; the first that fits:
  [xen]
  queues = 4
  [[xen.disk]]
  guest = \"db\"
  vdev = \"xvdb\"
  cache = \"writethrough\"
  [[xen.disk]]
  image = \"/srv/base.img\"
  read-only = true

SIGTERM and SIGINT: requests in flight are completed, then the exit status is 0,
unless what was answered found no room in an image.
SIGUSR1: prints the counts of --stats to standard error and goes on.
SIGHUP: reads --config FILE again: disks are added and removed, limits changed;
what cannot change while the daemon runs is logged.
Exit status: 0 stopped by signal, 1 failed, 2 wrong usage, 128+N second
signal N.";

/// An image and a file exclude each other, which clap's own line does not say.
const USAGE: &str = "\
ringway serve [OPTIONS] <IMAGE> --socket <PATH>
       ringway serve [OPTIONS] --config <FILE>
       ringway serve [OPTIONS] --control <PATH>
       ringway serve [OPTIONS] --xen";

/// The options of `ringway serve`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct ServeArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Serve the disks of a TOML file; see below. With --isolate all that say nothing else have
    /// processes of their own.
    #[arg(long, value_name = "FILE", help_heading = "Disk",
          conflicts_with_all = words_of_a_disk())]
    config: Option<PathBuf>,
    #[command(flatten)]
    daemon: DaemonArgs,
    #[command(flatten)]
    nbd: NbdSecurity,
    #[command(flatten)]
    xen: XenArgs,

    /// Another way to name IMAGE.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "image",
        help_heading = "For managers of virtual machines"
    )]
    blk_file: Option<PathBuf>,
    /// An inherited socket, connected or listening, instead of --socket.
    #[arg(long, value_name = "N", conflicts_with = "socket",
          value_parser = clap::value_parser!(i32).range(3..),
          help_heading = "For managers of virtual machines")]
    fd: Option<i32>,
    /// Say in JSON what this back-end can do, and exit.
    #[arg(long, help_heading = "For managers of virtual machines")]
    print_capabilities: bool,
    /// The line to the daemon that has started this process for one of its disks.
    #[arg(long, hide = true, value_name = "N",
          value_parser = clap::value_parser!(i32).range(3..))]
    isolated: Option<i32>,
}

/// What the file says of each disk, but for what may be said of all of them beside it. (The group that clap makes of `DiskArgs` is empty, because others
/// are flattened into it.)
fn words_of_a_disk() -> Vec<Id> {
    let disk = DiskArgs::augment_args(Command::new("disk"));
    let words = disk.get_arguments().map(|word| word.get_id().clone());
    let words = words.filter(|word| word != "isolate");
    words.chain(["blk_file".into(), "fd".into()]).collect()
}

/// Carries out `ringway serve`. Options that do not go together end the process as wrong ones of
/// `command` do.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub fn run(args: ServeArgs, log: &LogArgs, command: &mut Command) -> anyhow::Result<ExitCode> {
    // A daemon may wait for its image long before it listens to signals.
    Signals::hold_news()?;
    if args.print_capabilities {
        ringway_terminal::output::print(
            "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n",
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    sandbox::prepare();
    if let Some(fd) = args.isolated {
        return isolate::run(fd, log);
    }
    let (mut options, args_config) = (args.daemon.clone(), args.config.clone());
    let nbd = args.nbd.clone();
    if args_config.is_some() {
        options.each.isolate = args.disk.isolate;
    }
    let mut plan = match &args.config {
        Some(path) => config::read(path).map_err(anyhow::Error::msg)?,
        None => plan_of(args, command)?,
    };
    let mut configured = args_config.map(|path| Configured::new(&path, &plan));
    plan.overrule(options, nbd);
    plan.check_nbd(&plan.nbd).map_err(anyhow::Error::msg)?;
    plan.check_security_is_of_use(&plan.nbd).map_err(anyhow::Error::msg)?;
    if plan.xen.is_some() && plan.daemon.each.isolate == Some(true) {
        usage(command, "--isolate is for disks with sockets, and those of [xen] have none");
    }
    plan.check_sockets().map_err(anyhow::Error::msg)?;
    activation::give_sockets(&mut plan)?;
    let known = RefCell::new(Vec::new());
    plan.resolve_groups(|name| {
        let number = sandbox::group_number(name)?;
        known.borrow_mut().push((name.to_owned(), number));
        anyhow::Ok(number)
    })
    .map_err(anyhow::Error::msg)?;
    for (name, number) in known.into_inner() {
        configured.iter_mut().for_each(|configured| configured.know_group(&name, number));
    }
    start(plan, configured, log, command)
}

/// Serves what a plan says, until it is over.
///
/// # Errors
/// One message.
pub(crate) fn start(
    plan: Plan,
    configured: Option<Configured>,
    log: &LogArgs,
    command: &mut Command,
) -> anyhow::Result<ExitCode> {
    let polling = plan.daemon.polling().unwrap_or_else(|(_, error)| usage(command, &error));
    logging::start(log, plan.log_format, plan.log_level);
    logging::serve_guests();
    logging::tell_panics();
    raise_open_files();
    check_open_files(&plan)?;
    #[cfg(any(feature = "kill-points", debug_assertions))]
    if ringway_core::kill_points::arm() {
        tracing::warn!("this daemon will kill itself, as a test wants it to");
    }
    // Only for people, as it takes a moment; and now, as the daemon cannot start anything later.
    let person = !log.quiet && std::io::stdout().is_terminal();
    let qemu = if person { QemuVersion::installed() } else { None };
    let hung = Hung::look_at(&plan.disks)?;
    plan.check_apart(|path| hung.locate(path)).map_err(anyhow::Error::msg)?;
    let daemon = daemon::Daemon::start(plan, &hung, polling, configured, None, log)?;
    // Whoever sees that it is ready finds in the log how it came to that.
    logging::finish();
    if !log.quiet {
        ready::print(&daemon, qemu);
    }
    daemon.run()
}

/// Raises the soft limit of open files to the hard one: each queue has two descriptors, and a
/// hundred disks of 16 queues are more than the usual 1024.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if let Err(error) = raised {
        tracing::debug!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

/// Refuses more disks than this process has descriptors for, before the first one is opened. How many disks of other
/// kinds, or with processes of their own, need is found out when they are opened.
fn check_open_files(plan: &Plan) -> anyhow::Result<()> {
    /// Of the daemon itself, at least.
    const DAEMON: u64 = 16;
    /// Of a disk that nobody uses: its file, its state, its socket, what wakes its thread.
    const DISK: u64 = 4;
    /// Of a guest's queue: what it rings, and what rings it.
    const QUEUE: u64 = 2;
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let files = || plan.disks.iter().filter(|disk| matches!(disk.source, Source::Path(_)));
    let least = DAEMON + DISK * files().count() as u64;
    if plan.isolates() || least <= limit {
        return Ok(());
    }
    let queues: u64 = files().map(|disk| u64::from(disk.queues)).sum();
    // With room for connections and the memory of guests.
    let enough = (2 * (least + QUEUE * queues)).next_power_of_two();
    bail!(
        "this process may have {limit} open files, and {} disks take {least} before the first guest connects: {DISK} \
         each, and {QUEUE} more for each queue that a guest uses. Raise the limit: LimitNOFILE={enough} in the \
         unit, or `ulimit -n {enough}` in the shell that starts it",
        files().count()
    )
}

/// The plan of a command line without a file.
fn plan_of(args: ServeArgs, command: &mut Command) -> anyhow::Result<Plan> {
    let mut disk = args.disk;
    let each = EachDisk {
        access: SocketRule { mode: disk.socket_mode, group: disk.socket_group.clone() },
        isolate: disk.isolate,
    };
    if args.xen.xen {
        if each != EachDisk::default() || disk.memory_max.is_some() {
            usage(
                command,
                "--socket-mode, --socket-group, --isolate and --memory-max are for disks with sockets, \
                 and --xen has none",
            );
        }
        return Ok(Plan {
            xen: Some(XenPlan { args: args.xen, disk, disks: Vec::new() }),
            ..Plan::default()
        });
    }
    let Some(image) = disk.take_image().or(args.blk_file) else {
        if args.daemon.control.is_some() && disk.socket.is_none() && args.fd.is_none() {
            // Disks are added later.
            return Ok(Plan {
                daemon: DaemonArgs { each, ..DaemonArgs::default() },
                ..Plan::default()
            });
        }
        usage(command, "no disk to serve: name an IMAGE, or a file with --config");
    };
    let nbd = disk.take_nbd(&image).unwrap_or_else(|error| usage(command, &error));
    if nbd.is_some() && args.fd.is_some() {
        usage(command, "--fd: a disk has one place, and --nbd names it");
    }
    let place = match (nbd, disk.socket.take(), args.fd) {
        (Some(place), ..) => Place::Nbd(place),
        (_, Some(path), _) => Place::Socket(path),
        (_, None, Some(fd)) => endpoint::inherit(fd)?,
        (_, None, None) => match activation::only_one()? {
            Some(place) => place,
            None => usage(command, "no place to serve it at: add --socket PATH"),
        },
    };
    let spec = disk.into_spec(&image, place).unwrap_or_else(|error| usage(command, &error));
    let daemon = DaemonArgs { each, ..DaemonArgs::default() };
    Ok(Plan { disks: vec![spec], daemon, ..Plan::default() })
}

/// Ends the program as a wrong option would.
pub(crate) fn usage(command: &mut Command, message: &str) -> ! {
    command.error(ErrorKind::ValueValidation, message).exit()
}
