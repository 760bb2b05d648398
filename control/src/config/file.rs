//! The configuration file: TOML, several disks, the words of the command line.

use super::nearest::with_hint;
use super::plan::{Poll, Sandbox};
use super::seconds::seconds_in_file;
use super::xen::{self, XenTable};
use super::{
    CpuList, DaemonArgs, DiskArgs, DiskSpec, EachDisk, LimitGroup, Location, MetricsAt,
    NbdSecurity, Origins, Place, Plan, SocketMode, SocketRule,
};
use crate::log::{LogFormat, LogLevel};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    workers: Option<u16>,
    cpus: Option<CpuList>,
    poll: Option<Poll>,
    poll_max_us: Option<u32>,
    poll_budget: Option<u8>,
    #[serde(default)]
    pin_memory: bool,
    control: Option<PathBuf>,
    metrics: Option<MetricsAt>,
    #[serde(default)]
    metrics_name: Vec<String>,
    #[serde(default)]
    metrics_remote: bool,
    sandbox: Option<Sandbox>,
    user: Option<String>,
    #[serde(default)]
    iopoll: bool,
    state_dir: Option<PathBuf>,
    #[serde(default, deserialize_with = "seconds_in_file")]
    overdue: Option<u32>,
    #[serde(default)]
    stats: bool,
    log_format: Option<LogFormat>,
    log_level: Option<LogLevel>,
    socket_mode: Option<SocketMode>,
    socket_group: Option<String>,
    isolate: Option<bool>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_ca: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    limit_group: Vec<Spanned<LimitGroup>>,
    #[serde(default)]
    disk: Vec<Spanned<DiskArgs>>,
    xen: Option<XenTable>,
}

/// Reads a configuration file. Relative paths in it start at its folder. Nothing but the file is looked at: whether its
/// disks are apart is asked once more by who knows where paths lead ([`Plan::check_apart`]).
///
/// # Errors
/// The message, with file and line.
pub fn read(path: &Path) -> Result<Plan, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{}: cannot read the configuration: {error}", path.display()))?;
    parse(&text, path, Location::unknown)
}

const NO_DISK: &str = "there is no disk in it. Add a [[disk]] table with image and socket, [xen] for \
                       what Xen's toolstack attaches, or a control socket to add disks later";

/// Reads what the configuration file at `path` says; `locate` looks other paths up.
///
/// # Errors
/// The message, with file and line.
pub fn parse(text: &str, path: &Path, locate: impl Fn(&Path) -> Location) -> Result<Plan, String> {
    let at = |offset: usize| format!("{}, line {}", path.display(), line_of(text, offset));
    let file: File = toml::from_str(text).map_err(|error| {
        let place = error.span().map_or(path.display().to_string(), |span| at(span.start));
        format!("{place}: {}", with_hint(error.message()))
    })?;
    if file.disk.is_empty() && file.control.is_none() && file.xen.is_none() {
        return Err(format!("{}: {NO_DISK}", path.display()));
    }
    let origins = Origins::of(text, at);
    // A word that was not said by itself is the default of another.
    let lead = |words: &[&str]| match origins.lead(words) {
        lead if lead.is_empty() => format!("{}: ", path.display()),
        lead => lead,
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let nbd = security(&file).within(folder);
    check_beside_xen(&file, at, lead)?;
    let xen = file.xen.map(|table| xen::plan(table, folder, at)).transpose()?;
    let (limit_groups, mut disks) = (limit_groups(file.limit_group, at)?, Vec::new());
    for table in file.disk {
        let origin = at(table.span().start);
        let disk = disk(table.into_inner(), folder).map_err(|e| format!("{origin}: {e}"))?;
        disks.push(DiskSpec { origin, ..disk });
    }
    if file.workers == Some(0) {
        return Err(lead(&["workers"]) + "workers must be at least 1");
    }
    let daemon = DaemonArgs {
        workers: file.workers,
        cpus: file.cpus,
        poll: file.poll,
        poll_max_us: file.poll_max_us,
        poll_budget: file.poll_budget,
        pin_memory: file.pin_memory,
        iopoll: file.iopoll,
        control: file.control.map(|control| folder.join(control)),
        metrics: file.metrics.map(|metrics| metrics.within(folder)),
        metrics_name: file.metrics_name,
        metrics_remote: file.metrics_remote,
        sandbox: file.sandbox,
        user: file.user,
        state_dir: file.state_dir.map(|dir| folder.join(dir)),
        overdue: file.overdue,
        stats: file.stats,
        each: EachDisk {
            access: SocketRule { mode: file.socket_mode, group: file.socket_group },
            isolate: file.isolate,
        },
    };
    daemon.polling().map_err(|(word, error)| lead(&[word]) + &error)?;
    let (log_format, log_level) = (file.log_format, file.log_level);
    let plan = Plan { disks, limit_groups, xen, daemon, origins, nbd, log_format, log_level };
    plan.check_apart(locate)?;
    plan.check_limit_groups().map_err(|error| match error {
        (None, error) => format!("{}: {error}", path.display()),
        (Some(origin), error) => format!("{origin}: {error}"),
    })?;
    Ok(plan)
}

/// What a toolstack attaches has no sockets, and nothing beside it.
fn check_beside_xen(
    file: &File,
    at: impl Fn(usize) -> String,
    lead: impl Fn(&[&str]) -> String,
) -> Result<(), String> {
    if file.xen.is_none() {
        return Ok(());
    }
    if let Some(disk) = file.disk.first() {
        return Err(format!(
            "{}: a daemon with [xen] serves what the toolstack attaches, and nothing else: serve \
             this [[disk]] by another one",
            at(disk.span().start)
        ));
    }
    let for_sockets = file.socket_mode.is_some() || file.socket_group.is_some();
    if for_sockets || file.isolate == Some(true) {
        return Err(lead(&["socket-mode", "socket-group", "isolate"])
            + "socket-mode, socket-group and isolate are for disks with sockets, and those of [xen] \
               have none");
    }
    Ok(())
}

fn security(file: &File) -> NbdSecurity {
    NbdSecurity {
        tls_cert: file.tls_cert.clone(),
        tls_key: file.tls_key.clone(),
        tls_ca: file.tls_ca.clone(),
        insecure: file.insecure,
    }
}

fn limit_groups(
    tables: Vec<Spanned<LimitGroup>>,
    at: impl Fn(usize) -> String,
) -> Result<Vec<LimitGroup>, String> {
    let mut groups: Vec<LimitGroup> = Vec::new();
    for table in tables {
        let origin = at(table.span().start);
        let group = table.into_inner();
        if groups.iter().any(|other| other.name == group.name) {
            return Err(format!("{origin}: there are two limit groups '{}'", group.name));
        }
        groups.push(group);
    }
    Ok(groups)
}

fn disk(mut disk: DiskArgs, folder: &Path) -> Result<DiskSpec, String> {
    let image = disk.take_image().ok_or("this disk has no image. Add image = \"disk.img\"")?;
    let image = if super::is_unreal(&image) { image } else { folder.join(image) };
    for path in [&mut disk.backing_root, &mut disk.base, &mut disk.overlay].into_iter().flatten() {
        if !super::is_unreal(path) {
            *path = folder.join(&*path);
        }
    }
    disk.nbd = disk.nbd.map(|address| address.within(folder));
    if let Some(place) = disk.take_nbd(&image)? {
        return disk.into_spec(&image, Place::Nbd(place));
    }
    let none = "this disk has no socket. Add socket = \"disk.sock\", or nbd for NBD clients";
    let socket = disk.socket.take().ok_or(none)?;
    disk.into_spec(&image, Place::Socket(folder.join(socket)))
}

/// Lines are counted from 1.
fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|&&byte| byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_disk::{CacheMode, EngineKind, SchedulerMode, Source};
    use ringway_export::Polling;

    fn parse(text: &str) -> Result<Plan, String> {
        super::parse(text, Path::new("conf/disks.toml"), Location::of)
    }

    #[test]
    fn all_words_of_the_command_line_can_be_said_in_a_file() {
        let plan = parse(
            r#"
            workers = 3
            cpus = "0,2-3"
            poll = "never"
            stats = true
            control = "ctl.sock"
            metrics = "unix:m.sock"
            sandbox = "log"
            user = "nobody"
            socket-mode = "0600"
            socket-group = "7"
            isolate = true
            log-format = "json"
            log-level = "warn"

            [[disk]]
            image = "a.img"
            socket = "/run/a.sock"
            socket-mode = "0666"
            socket-group = "8"
            isolate = false
            size = "10G"
            read-only = true
            serial = "A"
            block-size = 4096
            lock-wait = 7
            incoming = true
            queues = 8
            queue-size = 256
            engine = "threads"
            cache = "writeback"
            path = "request"

            [[disk]]
            image = "null:1T"
            socket = "b.sock"
            engine = "auto"
            "#,
        )
        .unwrap();
        assert_eq!(plan.daemon.workers, Some(3));
        assert_eq!(plan.daemon.control, Some("conf/ctl.sock".into()));
        assert_eq!(plan.daemon.metrics, Some(MetricsAt::Unix("conf/m.sock".into())));
        assert_eq!(plan.daemon.sandbox, Some(Sandbox::Log));
        assert_eq!(plan.daemon.user.as_deref(), Some("nobody"));
        assert_eq!(plan.daemon.cpus, Some("0,2-3".parse().unwrap()));
        let [a, b] = &plan.disks[..] else { panic!("two disks") };
        assert_eq!(a.source, Source::Path("conf/a.img".into()));
        assert_eq!((a.create_bytes, a.read_only, a.queues), (Some(10 << 30), true, 8));
        assert_eq!((a.engine, a.cache), (Some(EngineKind::Threads), Some(CacheMode::Writeback)));
        assert_eq!(a.lock_wait, Some(std::time::Duration::from_secs(7)));
        assert!(a.incoming && !b.incoming);
        assert_eq!((a.path, b.path), (SchedulerMode::Request, SchedulerMode::Auto));
        assert_eq!(a.origin, "conf/disks.toml, line 16");
        let all = &plan.daemon.each;
        assert_eq!((all.isolate, a.isolate, b.isolate), (Some(true), Some(false), None));
        assert_eq!(all.access.settle(true), Ok((0o600, Some(7))));
        assert_eq!(a.access.settle(true), Ok((0o666, Some(8))));
        assert_eq!(b.access, SocketRule::default());
        let again: DiskArgs =
            serde_json::from_str(&serde_json::to_string(&a.words).unwrap()).unwrap();
        assert_eq!(again.image.as_deref(), Some(Path::new("conf/a.img")));
        assert_eq!(again.socket_mode.unwrap().to_string(), "0666");
        assert_eq!((&b.source, b.engine), (&Source::Null { bytes: 1 << 40, latency_us: 0 }, None));
        assert!(matches!(&b.place, Place::Socket(path) if path == Path::new("conf/b.sock")));
    }

    /// The manual names each word that a file knows.
    #[test]
    fn the_manual_has_all_words_of_files() {
        let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/manual.md");
        let manual = std::fs::read_to_string(manual).unwrap();
        let (_, rest) = manual.split_once("\n### Several disks from one file\n").unwrap();
        let (section, _) = rest.split_once("\n### ").unwrap();
        // The message names what is known.
        let unknown = |error: toml::de::Error| -> Vec<String> {
            let message = error.message().to_owned();
            message.split('`').skip(3).step_by(2).map(str::to_owned).collect()
        };
        let daemon = unknown(toml::from_str::<File>("no-such = 1").unwrap_err());
        let disk = unknown(toml::from_str::<DiskArgs>("no-such = 1").unwrap_err());
        assert!(daemon.len() > 20 && disk.len() > 30, "{daemon:?} {disk:?}");
        for word in daemon.iter().chain(&disk) {
            // Tables have sections of their own.
            let table = ["disk", "xen"].contains(&word.as_str());
            let known = section.contains(&format!("`{word}`"));
            assert!(table || known || section.contains(&format!("`[[{word}]]`")), "{word}");
        }
    }

    #[test]
    fn polling_has_limits_that_are_said() {
        let disk = "[[disk]]\nimage = 'a'\nsocket = 's'\n";
        let polling = |text: &str| parse(&format!("{text}\n{disk}")).unwrap().daemon.polling();
        let adaptive = |us, budget| {
            Ok(Polling::Adaptive { max: std::time::Duration::from_micros(us), budget })
        };
        assert_eq!(polling(""), adaptive(50, 50));
        assert_eq!(polling("poll-max-us = 80"), adaptive(80, 50));
        assert_eq!(polling("poll = 'adaptive'\npoll-budget = 0"), adaptive(50, 0));
        assert_eq!(polling("poll-max-us = 5\npoll-budget = 100"), adaptive(5, 100));
        assert_eq!(polling("poll = 'always'"), Ok(Polling::Always));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        let disk = "[[disk]]\nimage = 'a'\nsocket = 's'\n";
        for (text, line, what) in [
            ("workers = \n".to_owned(), "line 1", ""),
            ("\n\nqueues = 3\n".to_owned(), "line 3", "unknown field `queues`"),
            (format!("{disk}quues = 3\n"), "line 4", "unknown field `quues`"),
            (format!("{disk}queues = 1000\n"), "line 4", "1 to 256 queues, not 1000"),
            (format!("{disk}queue-size = 3\n"), "line 4", "power of two"),
            (format!("{disk}size = '10X'\n"), "line 4", "'10X' is not a size"),
            (format!("{disk}engine = 'magic'\n"), "line 4", "'magic' is not one of"),
            (format!("{disk}limits = {{ iops = 0 }}\n"), "line 4", "iops = 0"),
            (format!("{disk}[disk.limits]\nbps = 1\nbps-max = 0\n"), "line 4", "bps-max = 0"),
            (
                format!("[[limit-group]]\nname = 'g'\nlimits = {{ iops-max = 3 }}\n{disk}"),
                "line 3",
                "iops-max needs iops",
            ),
            (format!("{disk}path = 'scenic'\n"), "line 4", "'scenic' is not one of bio"),
            (format!("{disk}cache = 'warm'\n"), "line 4", "'warm' is not one of"),
            (format!("{disk}socket-mode = 660\n"), "line 4", "is a text, such as \"0660\""),
            (format!("{disk}socket-mode = '0444'\n"), "line 4", "nobody could connect"),
            (format!("socket-mode = 'all'\n{disk}"), "line 1", "'all' is not the mode"),
            ("\n[[disk]]\nsocket = 's'\n".to_owned(), "line 2", "has no image"),
            ("[[disk]]\nimage = 'a'\n".to_owned(), "line 1", "has no socket"),
            (format!("{disk}\n[[disk]]\nimage = 'b'\nsocket = './s'\n"), "line 5", "line 1"),
            (format!("{disk}\n[[disk]]\nimage = './a'\nsocket = 't'\n"), "line 5", "line 1"),
            ("\ncpus = '0-'\n".to_owned() + disk, "line 2", "'0-' is not a CPU"),
            ("poll = 'sometimes'".to_owned(), "line 1", "is not one of"),
            ("metrics = 'there'".to_owned(), "line 1", "'there' is no place for metrics"),
            ("sandbox = 'perhaps'".to_owned(), "line 1", "is not one of"),
            (
                "poll = 'never'\npoll-max-us = 3\n".to_owned() + disk,
                "line 2",
                "poll-max-us is the limit",
            ),
            (
                "poll = 'always'\npoll-budget = 3\n".to_owned() + disk,
                "line 2",
                "poll-budget is the budget",
            ),
            ("poll-budget = 101\n".to_owned() + disk, "line 1", "0 to 100, not 101"),
            (format!("\nworkers = 0\n{disk}"), "line 2", "at least 1"),
            ("workers = 99999999999999999999999".to_owned(), "line 1", "too large a number"),
            ("poll-budget = '20%'\n".to_owned() + disk, "line 1", "invalid type"),
            (String::new(), "", "no disk"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(line), "{text}\n{error}");
            assert!(error.contains(what), "{text}\n{error}");
            assert!(error.starts_with("conf/disks.toml"), "{error}");
        }
    }
}
