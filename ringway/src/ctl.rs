//! `ringway ctl`: looks into a running daemon and changes its disks, over its control socket.

mod events;
mod images;
mod report;
mod stats;

use anyhow::{Context, anyhow, bail};
use clap::error::ErrorKind;
use clap::{Args, Subcommand};
use ringway_control::config::{DiskArgs, LimitArgs, NbdAddress, is_unreal};
use ringway_control::log::LogArgs;
use ringway_control::protocol::{ANSWER_MAX, Problem, ProblemKind, Reply, VERSION};
use ringway_control::size::Size;
use ringway_server::sandbox::group_number;
use ringway_terminal::{logging, output};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Map, Value, json};
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  ringway ctl --control /run/ringway/control.sock list
  export RINGWAY_CONTROL=/run/ringway/control.sock      from here on without it
  ringway ctl stats --json | jq .disks[0].counts
  ringway ctl add vm2.img --socket /run/ringway/vm2.sock
  ringway ctl resize vm2.img 20G
  ringway ctl retry vm2.img
  ringway ctl remove vm2.sock

DISK is the number of a disk, its image or its socket, as list shows them. The
name of image or socket without its folder, or the serial number, is enough
where only one has it.
Exit status: 0 done, 1 failed or refused, 2 wrong usage.";

/// What the help of each of its commands ends with.
macro_rules! example {
    ($words:literal) => {
        concat!(
            "Examples:\n  ringway ctl --control control.sock ",
            $words,
            "\n\nExit status: 0 done, 1 failed or refused, 2 wrong usage."
        )
    };
}

/// How long a daemon may take: draining a disk takes as long as the disk.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How long it may take to accept a connection.
const ACCEPT_MAX: Duration = Duration::from_secs(10);

/// The options of `ringway ctl`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CtlArgs {
    /// The control socket of the daemon: what `ringway serve --control` was told.
    #[arg(long, value_name = "PATH", global = true)]
    control: Option<PathBuf>,
    /// Print the answer as JSON instead of a table.
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// What can be asked for.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show the disks.
    #[command(after_help = example!("list"))]
    List,
    /// Show what disks, queues and workers have done.
    #[command(after_help = example!("stats vm1.sock"))]
    Stats {
        /// Only this disk.
        disk: Option<String>,
    },
    /// Print what happens, one line each, until the daemon ends: as words on a terminal, else as JSON.
    #[command(after_help = example!("events --json | jq .event"))]
    Events,
    /// Read the configuration file again: disks are added and removed, limits changed. All of it is done, or
    /// nothing.
    #[command(after_help = example!("reload --dry-run"))]
    Reload {
        /// Only show what would be done, and what deleted.
        #[arg(long)]
        dry_run: bool,
    },
    /// Serve one more disk; the words are those of `ringway serve`.
    #[command(after_help = example!("add vm2.img --socket vm2.sock"))]
    Add(Box<DiskArgs>),
    /// Serve a disk no more: what is in flight ends, then its front-end is disconnected. Take the disk
    /// from the guest first: it loses it at once.
    #[command(after_help = example!("remove vm2.img"))]
    Remove {
        /// The disk.
        disk: String,
    },
    /// Give a disk another size and tell its guest.
    #[command(after_help = example!("resize vm2.img 20G"))]
    Resize {
        /// The disk.
        disk: String,
        /// The new size; its file is made as long. Without it, the size that the file or block
        /// device has by now.
        size: Option<Size>,
        /// The disk may become smaller (not if its image is qcow2). What lies beyond the new end is
        /// LOST.
        #[arg(long)]
        shrink: bool,
    },
    /// Change what a guest may ask of a disk, or what a group of disks may together; without options,
    /// show it. What is not named stays as it is.
    #[command(after_help = LIMIT_EXAMPLES)]
    #[command(
        override_usage = "ringway ctl limit [OPTIONS] <DISK>\n       ringway ctl limit [OPTIONS] --group <NAME>"
    )]
    Limit(Box<LimitDisk>),
    /// Finish what is in flight, make it durable, and go on.
    #[command(after_help = example!("drain vm2.img"))]
    Drain {
        /// The disk.
        disk: String,
    },
    /// Take no more requests; the guest waits. Requests that are held stay so, but those of a front-end
    /// without a record are tried once more, and fail if the disk still fails them.
    #[command(after_help = example!("pause vm2.img"))]
    Pause {
        /// The disk.
        disk: String,
    },
    /// Try requests again that are held because the host's disk has failed them.
    #[command(after_help = example!("retry vm2.img"))]
    Retry {
        /// The disk.
        disk: String,
        /// Give them up instead: their guest is told that they have failed.
        #[arg(long)]
        fail: bool,
        /// Try flushes again after one that had failed before the disk was opened: what was written until then may be
        /// lost, and whoever uses the disk has been told so, or has checked it.
        #[arg(long, conflicts_with = "fail")]
        flushes: bool,
    },
    /// Keep what was written so far as a read-only image called NEW, in the folder of the disk's image.
    /// That goes on as a new qcow2 image on top of it, under the name it had, so that the words the disk
    /// is served by stay true.
    #[command(after_help = example!("snapshot vm2.qcow2 vm2-monday.qcow2"))]
    Snapshot(images::SnapshotOf),
    /// Copy what a disk's image is based on into it, while its guest works: it is one file then.
    #[command(after_help = example!("flatten vm2.qcow2 --bps 100M --wait"))]
    Flatten(images::FlattenOf),
    /// Merge the snapshot that a disk's image is based on into what that is based on itself, while its guest
    /// works. The snapshot is not needed any more then.
    #[command(after_help = example!("commit vm2.qcow2 --snapshot now.qcow2"))]
    Commit(images::CommitOf),
    /// Take requests again.
    #[command(after_help = example!("resume vm2.img"))]
    Resume {
        /// The disk.
        disk: String,
    },
}

const LIMIT_EXAMPLES: &str = "\
Examples:
  ringway ctl limit vm1.img --iops 500 --bps 100M
  ringway ctl limit vm1.img --iops-max 2000 --iops-max-length 30
  ringway ctl limit vm1.img --bps none       # no limit any more
  ringway ctl limit vm1.img --lift           # no limits at all
  ringway ctl limit --group gold --create --iops 5000
  ringway ctl limit vm1.img --group gold     # one of the group
  ringway ctl limit vm1.img --group none
  ringway ctl limit --group gold --remove    # once no disk is in it

The numbers hold until the daemon ends, or the disk is removed. In the examples
RINGWAY_CONTROL names the socket.

Exit status: 0 done, 1 failed or refused, 2 wrong usage.";

/// The options of `ringway ctl limit`.
#[derive(Debug, Args)]
struct LimitDisk {
    /// The disk; without it, the group is meant.
    #[arg(required_unless_present = "group")]
    disk: Option<String>,
    /// The group; with a disk, the one that it shares limits with from now on, or none.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Make the group.
    #[arg(long, requires = "group", conflicts_with = "disk")]
    create: bool,
    /// Take the group away; no disk may be in it any more.
    #[arg(long, requires = "group", conflicts_with_all = ["disk", "create", "lift", "LimitArgs"])]
    remove: bool,
    /// Lift all limits there were, before those that are named hold.
    #[arg(long)]
    lift: bool,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Carries out `ringway ctl`. Without a daemon to ask the process ends as wrong options of `usage` do.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(
    args: CtlArgs,
    log: &LogArgs,
    usage: &mut clap::Command,
) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let path = socket(args.control, usage);
    if let Command::Events = args.command {
        return match self::events(&path)? {
            Ok(lines) => {
                let people = !args.json && io::stdout().is_terminal();
                events::print(&path, lines, people).map(|()| ExitCode::SUCCESS)
            }
            Err(problem) => bail!("{}", problem.message),
        };
    }
    let (asked, added) = match &args.command {
        Command::Add(disk) => (disk.size, disk.image.clone().map(|path| (path, disk.read_only))),
        _ => (None, None),
    };
    let wait = match &args.command {
        Command::Flatten(flatten) => flatten.wait,
        Command::Commit(commit) => commit.wait,
        _ => false,
    };
    let (name, request) = request(args.command)?;
    let answer = match ask_from_here(&path, name, request)? {
        Ok(answer) if wait => images::job_ended(answer, args.json, || {
            let list = ask(&path, "list", Map::new(), TIMEOUT)?;
            list.map_err(|problem| anyhow!(problem.message))
        })?,
        Ok(answer) => answer,
        Err(problem) => {
            if args.json {
                let said = json!({ "error": problem });
                output::print(&(serde_json::to_string_pretty(&said)? + "\n"))?;
            }
            let hint = match added {
                _ if problem.kind == ProblemKind::NotMeant => " (--shrink)".to_owned(),
                Some((image, read_only)) => {
                    images::seen_from_here(&image, read_only, &problem.message)
                }
                None => String::new(),
            };
            bail!("{}{hint}", escaped(&problem.message));
        }
    };
    if let (Some(asked), Some(is)) = (asked, answer["size"].as_u64()) {
        if asked != Size(is) {
            let is = Size(is);
            eprintln!("warning: --size {asked} is for a new file; the one that was there has {is}");
        }
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&answer)? + "\n",
        false => report::write(name, in_one_line(answer))
            .context("the daemon's answer is not understood")?,
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Names may have line breaks, and what a terminal takes for commands: people see these escaped.
fn in_one_line(answer: Value) -> Value {
    match answer {
        Value::String(text) => escaped(&text).into(),
        Value::Array(all) => all.into_iter().map(in_one_line).collect(),
        Value::Object(all) => {
            all.into_iter().map(|(name, value)| (escaped(&name), in_one_line(value))).collect()
        }
        other => other,
    }
}

fn escaped(text: &str) -> String {
    let one = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(one).collect()
}

/// Where the daemon listens: as was said, or as the environment says. If neither does, that ends the
/// process as wrong options of `usage` do.
pub(crate) fn socket(control: Option<PathBuf>, usage: &mut clap::Command) -> PathBuf {
    let named = std::env::var_os("RINGWAY_CONTROL").filter(|path| !path.is_empty());
    let path = control.or_else(|| named.map(PathBuf::from));
    path.unwrap_or_else(|| {
        let why = "no daemon named: add --control PATH, that of `serve`, or set RINGWAY_CONTROL";
        usage.error(ErrorKind::MissingRequiredArgument, why).exit()
    })
}

/// The name of a command, and the rest of its request.
fn request(command: Command) -> anyhow::Result<(&'static str, Map<String, Value>)> {
    let (name, fields) = match command {
        Command::List => ("list", json!({})),
        Command::Events => ("events", json!({})),
        Command::Reload { dry_run } => ("reload", json!({ "dry_run": dry_run })),
        Command::Stats { disk: None } => ("stats", json!({})),
        Command::Stats { disk: Some(disk) } => ("stats", json!({ "disk": disk })),
        Command::Add(disk) => ("add", json!({ "disk": from_root(*disk)? })),
        Command::Remove { disk } => ("remove", json!({ "disk": disk })),
        Command::Resize { disk, size, shrink } => {
            ("resize", json!({ "disk": disk, "size": size, "shrink": shrink }))
        }
        Command::Limit(limit) => {
            let LimitDisk { disk, group, create, remove, lift, limits } = *limit;
            let fields = json!({
                "disk": disk, "group": group, "create": create, "remove": remove, "lift": lift,
                "limits": limits,
            });
            ("limit", fields)
        }
        Command::Drain { disk } => ("drain", json!({ "disk": disk })),
        Command::Pause { disk } => ("pause", json!({ "disk": disk })),
        Command::Retry { disk, fail, flushes } => {
            let mut fields = json!({ "disk": disk, "fail": fail });
            if flushes {
                // Earlier daemons do not know it.
                fields["flushes"] = true.into();
            }
            ("retry", fields)
        }
        Command::Snapshot(snapshot) => ("snapshot", snapshot.request()?),
        Command::Flatten(flatten) => ("flatten", flatten.request()),
        Command::Commit(commit) => ("commit", commit.request()?),
        Command::Resume { disk } => ("resume", json!({ "disk": disk })),
    };
    match fields {
        Value::Object(fields) => Ok((name, fields)),
        _ => bail!("no such request"),
    }
}

/// The daemon runs in another folder.
fn from_root(mut disk: DiskArgs) -> anyhow::Result<Value> {
    let image = disk.take_image().ok_or_else(|| anyhow!("no disk to add: name an IMAGE"))?;
    if let Some(NbdAddress::Unix(path)) = &mut disk.nbd {
        *path = std::path::absolute(&*path)?;
    }
    if let Some(socket) = &mut disk.socket {
        *socket = std::path::absolute(&*socket)?;
    } else if disk.nbd.is_none() {
        bail!("no place to serve it at: add --socket PATH");
    }
    let image = if is_unreal(&image) { image } else { std::path::absolute(image)? };
    disk.image = Some(image);
    for path in [&mut disk.backing_root, &mut disk.base, &mut disk.overlay].into_iter().flatten() {
        if !is_unreal(path) {
            *path = std::path::absolute(&*path)?;
        }
    }
    if let Some(group) = &mut disk.socket_group {
        let number = group_number(group).with_context(|| format!("--socket-group {group}"))?;
        *group = number.to_string();
    }
    serde_json::to_value(disk).map_err(|_| anyhow!(images::NO_TEXT))
}

/// Asks. The daemon may run in another folder: what is a path here is sent as a whole one, so that no
/// disk of the same name there is taken for it.
fn ask_from_here(
    path: &Path,
    command: &str,
    mut request: Map<String, Value>,
) -> anyhow::Result<Result<Value, Problem>> {
    if let Some(Value::String(disk)) = request.get("disk") {
        if disk.parse::<u64>().is_err() && Path::new(disk).exists() {
            let from_root = std::path::absolute(disk)?.display().to_string();
            request.insert("disk".into(), from_root.into());
        }
    }
    ask(path, command, request, TIMEOUT)
}

/// Asks a daemon for one thing: its answer, or what it finds wrong with the request. It may be silent
/// for as long as `timeout`.
///
/// # Errors
/// One message: there is no such daemon, or it does not answer.
pub(crate) fn ask(
    path: &Path,
    command: &str,
    request: Map<String, Value>,
    timeout: Duration,
) -> anyhow::Result<Result<Value, Problem>> {
    let stream = say(path, command, request, timeout)?;
    hear(path, &mut BufReader::new(stream))
}

/// Asks a daemon for events: the lines that tell them, one by one as they happen.
///
/// # Errors
/// As [`ask`].
pub(crate) fn events(path: &Path) -> anyhow::Result<Result<BufReader<UnixStream>, Problem>> {
    let mut lines = BufReader::new(say(path, "events", Map::new(), TIMEOUT)?);
    let refused = hear(path, &mut lines)?.err();
    lines.get_ref().set_read_timeout(None)?;
    Ok(refused.map_or(Ok(lines), Err))
}

/// Connects and asks.
fn say(
    path: &Path,
    command: &str,
    mut request: Map<String, Value>,
    timeout: Duration,
) -> anyhow::Result<UnixStream> {
    let mut stream = connect(path).map_err(|error| no_daemon(path, &error))?;
    // Waiting for an image takes as long as was asked for.
    let lock_wait = request.get("disk").and_then(|disk| disk.get("lock-wait")?.as_u64());
    let lock_wait = Duration::from_secs(lock_wait.unwrap_or(0));
    stream.set_read_timeout(Some(timeout.saturating_add(lock_wait)))?;
    request.insert("version".into(), VERSION.into());
    request.insert("command".into(), command.into());
    let mut bytes = serde_json::to_vec(&request)?;
    bytes.push(b'\n');
    stream.write_all(&bytes).with_context(|| format!("{}: cannot ask", path.display()))?;
    Ok(stream)
}

/// Reads the answer.
fn hear(path: &Path, lines: &mut BufReader<UnixStream>) -> anyhow::Result<Result<Value, Problem>> {
    let mut line = String::new();
    let got = lines.take(ANSWER_MAX).read_line(&mut line);
    let silent = || format!("{}: the daemon does not answer", path.display());
    if got.with_context(silent)? == 0 {
        bail!(
            "{}: the daemon closed the connection: is this the socket of a disk? Name the one of \
             `ringway serve --control`. Else the daemon's log says why",
            path.display()
        );
    }
    let reply: Reply = serde_json::from_str(&line)
        .with_context(|| format!("{}: this is no control socket", path.display()))?;
    match (reply.ok, reply.answer, reply.error) {
        (true, Some(answer), _) => Ok(Ok(answer)),
        (_, _, Some(problem)) => Ok(Err(problem)),
        _ => bail!("{}: the answer says nothing", path.display()),
    }
}

/// Connects. A listener that has as many connections waiting as it takes is not waited for without end.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // What is sent later has the same limit.
    set_socket_timeout(&socket, Timeout::Send, Some(ACCEPT_MAX))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn no_daemon(path: &Path, error: &io::Error) -> anyhow::Error {
    let is_socket = path.metadata().map_or(true, |meta| meta.file_type().is_socket());
    let path = path.display();
    match error.kind() {
        io::ErrorKind::ConnectionRefused if !is_socket => {
            anyhow!("{path} is no socket: name the one of `ringway serve --control`")
        }
        io::ErrorKind::NotFound => {
            anyhow!("there is no socket at {path}: start `ringway serve --control {path} …`")
        }
        io::ErrorKind::ConnectionRefused => anyhow!(
            "no one listens at {path} (its daemon has ended): start `ringway serve --control {path} …`"
        ),
        io::ErrorKind::PermissionDenied => {
            anyhow!("{path}: no permission: only the user who runs the daemon may control it")
        }
        io::ErrorKind::WouldBlock => anyhow!(
            "{path}: whoever listens there has accepted no connection for {} s: it is stopped, or hangs. Its log \
             may say why",
            ACCEPT_MAX.as_secs()
        ),
        _ => anyhow!("cannot connect to {path}: {error}"),
    }
}
