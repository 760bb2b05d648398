//! The report: all that was found, and how people read it.

use super::engines::{Engine, State, Uring};
use super::host::Host;
use super::image::{Device, Image};
use super::measure::{Measured, better};
use super::memory::Memory;
use anstyle::{AnsiColor, Style};
use ringway_control::size::Size;
use ringway_terminal::short::{count, time};
use serde::Serialize;
use std::fmt::Write;

const TITLE: Style = Style::new().bold();

/// Columns to the left of a mark.
const INDENT: usize = 2;

/// The widest that is still easy to read.
const WIDTH_MAX: usize = 110;

/// All that was found. The names of its fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) host: Host,
    /// What this program may use, or the daemon that was asked, and the processes of its disks.
    pub(super) memory: Vec<Memory>,
    pub(super) engines: Vec<Engine>,
    pub(super) io_uring: Uring,
    pub(super) image: Option<Image>,
    /// What each engine did, where that was asked for.
    pub(super) measured: Vec<Measured>,
    /// What it and all that it is based on say of themselves, if it is qcow2.
    pub(super) chain: Option<serde_json::Value>,
    pub(super) warnings: Vec<Warning>,
    /// The same for people.
    #[serde(skip)]
    pub(super) images: Vec<(String, Vec<ReportLine>)>,
}

/// Something that costs speed or safety.
#[derive(Debug, Serialize)]
pub(crate) struct Warning {
    pub(crate) about: &'static str,
    pub(crate) what: String,
    pub(crate) to_do: String,
}

/// How good a fact is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Ok,
    Warn,
    No,
    /// Neither good nor bad.
    Fact,
}

impl Grade {
    fn word(self) -> (&'static str, Style) {
        match self {
            Self::Ok => ("ok", AnsiColor::Green.on_default()),
            Self::Warn => ("warn", AnsiColor::Yellow.on_default().bold()),
            Self::No => ("no", AnsiColor::Red.on_default().bold()),
            Self::Fact => ("-", Style::new().dimmed()),
        }
    }
}

/// `Ok` where it is true.
pub(crate) fn ok_if(good: bool, otherwise: Grade) -> Grade {
    if good { Grade::Ok } else { otherwise }
}

/// A fact.
#[derive(Debug)]
pub(crate) struct ReportLine {
    mark: Grade,
    name: String,
    value: String,
}

/// A fact of a report.
pub(crate) fn line(mark: Grade, name: &str, value: impl Into<String>) -> ReportLine {
    ReportLine { mark, name: name.into(), value: value.into() }
}

/// The whole report; wrapped on a terminal, a line each otherwise.
pub(super) fn write(mut report: Report) -> String {
    let mut sections = vec![
        ("Host".to_owned(), host(&report.host, &report.memory)),
        ("Engines, as `auto` prefers them".to_owned(), engines(&report)),
        ("io_uring".to_owned(), uring(&report)),
    ];
    if let Some(image) = &report.image {
        sections.push((format!("Disk {}", image.name), disk(image)));
        sections.append(&mut report.images);
        sections.push(("Served with `auto`".to_owned(), served(image)));
        if let Some(choice) = image.choice.as_ref().filter(|_| !report.measured.is_empty()) {
            let title = "Measured: engine, reads of 4 KiB in flight".to_owned();
            sections.push((title, measured(&report.measured, choice.engine)));
        }
    }
    let failed = report.image.as_ref().is_some_and(|image| image.error.is_some());
    if !failed || !report.warnings.is_empty() {
        sections.push(("Warnings".to_owned(), warnings(&report)));
    }
    lay_out(&sections, width())
}

/// Columns of the terminal, if there is one.
pub(crate) fn width() -> Option<usize> {
    let size = terminal_size::terminal_size_of(std::io::stdout());
    size.map(|(width, _)| usize::from(width.0).min(WIDTH_MAX))
}

fn warnings(report: &Report) -> Vec<ReportLine> {
    if report.warnings.is_empty() {
        return vec![line(Grade::Ok, "none", "")];
    }
    let warnings = report.warnings.iter().map(|warning| {
        line(Grade::Warn, warning.about, format!("{}\nTo do: {}", warning.what, warning.to_do))
    });
    warnings.collect()
}

/// Sections with their titles.
pub(crate) fn lay_out(sections: &[(String, Vec<ReportLine>)], width: Option<usize>) -> String {
    let lines = sections.iter().flat_map(|(_, lines)| lines);
    let names = lines.map(|line| line.name.len()).max().unwrap_or(0);
    let column = INDENT + 6 + names + 2;
    // Narrower than that nothing helps.
    let room = width.map(|width| width.saturating_sub(column).max(20));
    let mut text = String::new();
    for (index, (title, lines)) in sections.iter().enumerate() {
        let gap = if index == 0 { "" } else { "\n" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{gap}{TITLE}{title}{TITLE:#}");
        for line in lines {
            let (word, style) = line.mark.word();
            let value = wrap(&line.value, room).join(&format!("\n{:column$}", ""));
            let ReportLine { name, .. } = line;
            let fact = format!("{name:names$}  {value}");
            let _ = writeln!(
                text,
                "{:INDENT$}{style}{word}{style:#}{:gap$}{}",
                "",
                "",
                fact.trim_end(),
                gap = 6 - word.len()
            );
        }
    }
    text
}

/// Lines of at most `room` characters, broken at blanks.
fn wrap(value: &str, room: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in value.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            let long = line.chars().count() + 1 + word.chars().count();
            if !line.is_empty() && room.is_some_and(|room| long > room) {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    lines
}

fn host(host: &Host, memory: &[Memory]) -> Vec<ReportLine> {
    let model = host.cpu_model.as_ref().map_or(String::new(), |model| format!(", {model}"));
    let mut lines = vec![
        line(Grade::Fact, "kernel", format!("Linux {}, {}", host.kernel, host.architecture)),
        line(
            ok_if(host.cpus > 1, Grade::Warn),
            "cpus",
            format!("{} ({}){model}", host.cpus, host.cpu_list),
        ),
    ];
    let exempt = if host.memlock_exempt { ", but not for this process (CAP_IPC_LOCK)" } else { "" };
    let memlock = host.memlock_bytes.map_or("no limit".into(), |limit| Size(limit).to_string());
    let plenty = host.memlock_exempt || host.memlock_bytes.is_none_or(|limit| limit >= 1 << 30);
    lines.push(line(ok_if(plenty, Grade::Warn), "memlock", format!("{memlock}{exempt}")));
    lines.extend(memory.iter().map(memory_line));
    for size in &host.huge_pages {
        let name = format!("{} pages", Size(size.page_bytes));
        lines.push(line(Grade::Fact, &name, format!("{} free of {}", size.free, size.total)));
    }
    let files = host.open_files.map_or("no limit".into(), |limit| limit.to_string());
    lines.push(line(Grade::Fact, "open files", files));
    if let Some(aio) = host.aio_requests {
        let text = format!("{} taken of {} (fs.aio-max-nr)", aio.used, aio.max);
        lines.push(line(Grade::Fact, "AIO requests", text));
    }
    let landlock = host.landlock_abi.map_or("none".into(), |abi| format!("interface {abi}"));
    lines.push(line(ok_if(host.landlock_abi.is_some(), Grade::Fact), "Landlock", landlock));
    let seccomp = if host.seccomp { "yes" } else { "none" };
    lines.push(line(ok_if(host.seccomp, Grade::Fact), "seccomp", seccomp));
    let kvm = if host.kvm { "yes" } else { "no /dev/kvm: guests here are emulated, and slow" };
    lines.push(line(ok_if(host.kvm, Grade::Fact), "KVM", kvm));
    for program in &host.programs {
        lines.push(line(Grade::Fact, &program.name, program.version.clone()));
    }
    let folder = host.socket_folder.display();
    let sockets = format!(
        "for example {folder}/disk.sock (at most 107 bytes); the VM's user must be allowed to \
         write it (serve --socket-group), and the VM's memory must be shared"
    );
    lines.push(line(Grade::Fact, "sockets", sockets));
    lines
}

fn memory_line(memory: &Memory) -> ReportLine {
    let limit = memory.limit_bytes.map_or("no limit".into(), |limit| Size(limit).to_string());
    let process = memory.process.map_or(String::new(), |pid| format!(" for process {pid}"));
    let guests = memory.guests_bytes.map(|guests| format!("; guests have {}", Size(guests)));
    let text = format!("{limit}{process}{}", guests.unwrap_or_default());
    line(ok_if(memory.limit_bytes.is_none(), Grade::Fact), "memory", text)
}

fn engines(report: &Report) -> Vec<ReportLine> {
    let engines = report.engines.iter();
    engines
        .map(|engine| line(ok_if(engine.usable, Grade::No), engine.name, engine.why.clone()))
        .collect()
}

fn uring(report: &Report) -> Vec<ReportLine> {
    if let Some(error) = &report.io_uring.error {
        return vec![line(Grade::No, "io_uring", error.clone())];
    }
    let parts = report.io_uring.features.iter();
    parts
        .map(|part| {
            let mark = match part.state {
                State::InUse => Grade::Ok,
                State::NotNeeded | State::Later => Grade::Fact,
                State::Missing => Grade::No,
            };
            let why = part.why.as_deref().unwrap_or("in use");
            line(mark, part.name, format!("{why} (since Linux {})", part.since))
        })
        .collect()
}

/// What an image is.
pub(crate) fn disk(image: &Image) -> Vec<ReportLine> {
    let mut lines = Vec::new();
    let mut add = |mark, name: &str, value: String| lines.push(line(mark, name, value));
    if let Some(kind) = image.kind {
        add(Grade::Fact, "type", kind.into());
    }
    if let Some(format) = image.looks_like {
        let hint = if format == "qcow2" { ": if it is, --format qcow2 says so" } else { "" };
        add(Grade::Warn, "format", format!("looks like {format}, not raw{hint}"));
    }
    if let Some(bytes) = image.bytes {
        let sparse = match (image.sparse, image.allocated_bytes) {
            (Some(true), Some(there)) => format!(", sparse, {} allocated", Size(there)),
            (Some(false), Some(1..)) => ", all allocated".into(),
            _ => String::new(),
        };
        let mark = ok_if(bytes > 0 && bytes % 4096 == 0, Grade::Warn);
        add(mark, "size", format!("{} ({bytes}){sparse}", Size(bytes)));
    }
    if let Some(fs) = &image.file_system {
        let place = format!("{} at {} ({})", fs.name, fs.mounted_at, fs.source);
        add(Grade::Fact, "file system", format!("{place}, {} free", Size(fs.free_bytes)));
    }
    if let Some(direct) = &image.o_direct {
        let needs = match (direct.memory_alignment, direct.offset_alignment, direct.origin) {
            (Some(memory), Some(offset), Some(origin)) => {
                format!("memory to {memory}, offsets to {offset} bytes, says {origin}")
            }
            _ => direct.why.clone().unwrap_or_default(),
        };
        add(ok_if(direct.works, Grade::Warn), "O_DIRECT", needs);
    }
    if let (Some(logical), Some(physical)) = (image.logical_block, image.physical_block) {
        let best = match image.optimal_io {
            None | Some(0) => String::new(),
            Some(bytes) => format!(", best in {}", Size(bytes.into())),
        };
        add(Grade::Fact, "blocks", format!("{logical} logical, {physical} physical{best}"));
    }
    if let Some(unit) = image.discard_granularity {
        match image.discard {
            Some(true) => add(Grade::Ok, "discard", format!("yes, {unit} bytes and multiples")),
            Some(false) => add(Grade::No, "discard", "no".into()),
            None => add(Grade::Fact, "discard", "only trying would tell".into()),
        }
    }
    if let Some(below) = &image.device {
        device(below, &mut add);
    }
    if matches!(image.kind, Some("file" | "block device")) {
        match &image.in_use_by {
            Some(holder) => add(Grade::No, "in use", format!("by {holder}")),
            None => add(Grade::Ok, "in use", "by nobody that can be seen".into()),
        }
    }
    lines
}

fn device(below: &Device, add: &mut impl FnMut(Grade, &str, String)) {
    let kind = match below.rotational {
        Some(true) => ", rotational",
        Some(false) => ", not rotational",
        None => "",
    };
    let locked = if below.read_only { ", read-only" } else { "" };
    let blocks = match (below.logical_block, below.physical_block) {
        (Some(logical), Some(physical)) => format!(", blocks {logical}/{physical}"),
        _ => String::new(),
    };
    let best = match below.optimal_io {
        0 => String::new(),
        bytes => format!(", best in {}", Size(bytes)),
    };
    let discard = match below.discard_granularity {
        0 => ", no discard".into(),
        unit => format!(", discards {}", Size(unit)),
    };
    let text = format!("{}{kind}{locked}{blocks}{best}{discard}", below.name);
    add(Grade::Fact, "device", text);
    let meaning = match below.write_cache.as_deref() {
        Some("write back") => "write back: volatile, flushes make writes durable",
        Some("write through") => "write through: writes are durable, flushes are cheap",
        _ => "not known",
    };
    add(Grade::Fact, "write cache", meaning.into());
}

fn served(image: &Image) -> Vec<ReportLine> {
    let Some(choice) = &image.choice else {
        return vec![line(Grade::No, "not served", image.error.clone().unwrap_or_default())];
    };
    let direct = choice.cache == "none" || image.o_direct.is_none();
    vec![
        line(Grade::Ok, "engine", format!("{} ({})", choice.engine, choice.engine_why)),
        line(
            ok_if(direct, Grade::Warn),
            "cache",
            format!("{} ({})", choice.cache, choice.cache_why),
        ),
        line(Grade::Ok, "queues", format!("{} ({})", choice.queues, choice.queues_why)),
        line(Grade::Ok, "workers", format!("{} ({})", choice.workers, choice.workers_why)),
    ]
}

/// What each engine did; `chosen` is that of `auto`.
fn measured(all: &[Measured], chosen: &str) -> Vec<ReportLine> {
    let mut lines = Vec::new();
    for Measured { engine, depth, iops, iops_min, iops_max, cpu_ns } in all {
        let text = format!(
            "{}/s ({} to {}), {} of CPU each",
            count(*iops),
            count(*iops_min),
            count(*iops_max),
            // This report is ASCII: it is read on consoles of all kinds.
            time(*cpu_ns).replace('µ', "u")
        );
        lines.push(line(Grade::Fact, &format!("{engine}, {depth}"), text));
    }
    let better = better(all, chosen);
    if better.is_empty() {
        let text = format!("no engine reads clearly more than {chosen}, which `auto` takes");
        lines.push(line(Grade::Ok, "verdict", text));
        return lines;
    }
    let text = format!(
        "{chosen}, which `auto` takes, is not the fastest here: {}. Writes were not tried; `ringway bench` does \
         that where nothing is lost. --engine says which one to take",
        better.join(", ")
    );
    lines.push(line(Grade::Warn, "verdict", text));
    lines
}
