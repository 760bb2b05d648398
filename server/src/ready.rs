//! What is printed when front-ends can connect.

use super::attach::{self, Attach, QemuVersion};
use super::daemon::Daemon;
use super::xen;
use anstyle::{AnsiColor, Style};
use ringway_control::config::{CpuList, MetricsAt};
use ringway_control::protocol::DiskFacts;
use ringway_control::size::Size;
use ringway_disk::SchedulerMode;
use ringway_terminal::logging;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::Path;

const NAME: Style = AnsiColor::Green.on_default().bold();
const TITLE: Style = Style::new().bold();
const NOTE: Style = Style::new().dimmed();

/// Where a line that goes on below begins.
const INDENT: usize = 2;

/// Prints one line per disk, and the lines that attach them.
pub(crate) fn print(daemon: &Daemon, qemu: Option<QemuVersion>) {
    let disks = daemon.disk_facts();
    let mut text = disk_lines(&disks, daemon.cpus());
    if let Some(plan) = daemon.xen() {
        let line = xen::attach_line(Path::new("/path/to/disk.img"));
        text.push_str(&format!(
            "{NAME}{}{NAME:#}  disks of this Xen host's guests{NOTE} (xl: {line}){NOTE:#}\n",
            plan.folder()
        ));
    }
    if let Some(control) = daemon.control() {
        text.push_str(&control_line(control.path()));
    }
    if let Some(metrics) = daemon.metrics() {
        text.push_str(&metrics_line(metrics.at()));
    }
    let attach: Vec<_> = disks
        .iter()
        .filter_map(|disk| {
            let socket = disk.socket.as_deref()?;
            Some(Attach { socket, queues: disk.queues, queue_size: disk.queue_size })
        })
        .collect();
    let nbd = daemon.nbd();
    if !nbd.is_empty() {
        text.push_str(&nbd_lines(&nbd));
    } else if !attach.is_empty() {
        text.push('\n');
        text.push_str(&attach_lines(&attach, qemu));
    }
    logging::print(&text);
}

/// How to attach disks to each kind of virtual machine.
pub fn attach_lines(disks: &[Attach<'_>], qemu: Option<QemuVersion>) -> String {
    let note =
        if qemu.is_none() { "before 9.2 write reconnect=1 for reconnect-ms=1000" } else { "" };
    let mut text = String::new();
    for (title, note, lines) in [
        ("QEMU", note, attach::qemu(disks, qemu)),
        ("libvirt", "the first line in <domain>, the rest in <devices>", attach::libvirt(disks)),
        ("cloud-hypervisor", "", attach::cloud_hypervisor(disks)),
    ] {
        // Writing to a string cannot fail.
        let gap = if note.is_empty() { "" } else { "  " };
        let _ = writeln!(text, "{TITLE}{title}{TITLE:#}{gap}{NOTE}{note}{NOTE:#}");
        for line in lines.lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

/// One line per disk, names in a column.
fn disk_lines(disks: &[DiskFacts], cpus: Option<&CpuList>) -> String {
    let column = disks.iter().map(|disk| disk.image.chars().count()).max().unwrap_or(0);
    let line = |disk: &DiskFacts| disk_line(&format!("{:column$}", disk.image), &facts(disk, cpus));
    disks.iter().map(line).collect()
}

/// What to give to clients.
fn nbd_lines(uris: &[String]) -> String {
    let line = |uri: &String| {
        format!("{NAME}{uri}{NAME:#}  for NBD clients{NOTE} (nbdinfo '{uri}'){NOTE:#}\n")
    };
    uris.iter().map(line).collect()
}

fn metrics_line(at: &MetricsAt) -> String {
    match at {
        MetricsAt::Tcp(address) => {
            format!("{NAME}http://{address}/metrics{NAME:#}  metrics, for Prometheus\n")
        }
        MetricsAt::Unix(path) => {
            format!("{NAME}{}{NAME:#}  metrics, for Prometheus\n", path.display())
        }
    }
}

fn control_line(path: &Path) -> String {
    let path = path.display();
    format!(
        "{NAME}{path}{NAME:#}  control socket{NOTE} (ringway ctl --control {path} list){NOTE:#}\n"
    )
}

/// One line; on a terminal that is too narrow it goes on below, indented.
pub fn disk_line(name: &str, facts: &[String]) -> String {
    let width = std::io::stdout()
        .is_terminal()
        .then(terminal_size::terminal_size)
        .flatten()
        .map_or(usize::MAX, |(width, _)| usize::from(width.0));
    let mut at = name.chars().count();
    let mut text = format!("{NAME}{name}{NAME:#}");
    for fact in facts {
        let long = fact.chars().count() + 2;
        if at + long > width && at > INDENT {
            text.push_str(&format!("\n{:INDENT$}", ""));
            at = INDENT;
        }
        // The reasons are there to be looked up, not to be looked at.
        let (plain, why) = fact.split_at(fact.find(" (").unwrap_or(fact.len()));
        text.push_str(&format!("  {plain}{NOTE}{why}{NOTE:#}"));
        at += long;
    }
    text.push('\n');
    text
}

/// What is worth knowing of a disk, and why it is so.
fn facts(disk: &DiskFacts, cpus: Option<&CpuList>) -> Vec<String> {
    let mut facts = vec![Size(disk.size).to_string()];
    if disk.read_only {
        facts.push("read-only".into());
    }
    facts.push(count(disk.queues.into(), "queue"));
    let cpus = cpus.map_or(String::new(), |cpus| format!(" on CPUs {cpus}"));
    facts.push(count(disk.workers, "worker") + &cpus);
    facts.push(format!("engine {} ({})", disk.engine, disk.engine_why));
    facts.push(format!("cache {} ({})", disk.cache, disk.cache_why));
    if disk.path.kind != SchedulerMode::Auto.name() {
        facts.push(format!("path {}", disk.path.kind));
    }
    if let Some(process) = disk.process {
        facts.push(format!("process {process}"));
    }
    facts
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
