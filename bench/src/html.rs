//! `--html`: one page that needs nothing but itself.

pub(crate) mod page;
mod plots;

use crate::counters::{Frames, Tick};
use crate::load::Load;
use crate::measured::Measured;
use crate::outcome::Outcome;
use crate::summary;
use crate::{usage, versus};
use anyhow::{Context, Result, ensure};
use page::Page;
use ringway_terminal::short::{self, count};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

const DISTRIBUTION: &str =
    "Share of requests by latency, on a logarithmic scale; further left is better.";

/// The page of a measurement, or of two in turn.
///
/// # Errors
/// What the drawing library says.
pub(crate) fn report(load: &Load, all: &[Measured]) -> Result<String> {
    let names: Vec<_> = all.iter().map(|measured| measured.name.as_str()).collect();
    let mut lines = vec![load.describe()];
    if let [one] = all {
        lines.push(one.facts.clone());
    }
    lines.extend(page::origin());
    let mut page = Page::new(&names.join(" versus "), &lines);
    if all.len() > 1 {
        for (measured, colour) in all.iter().zip(['a', 'b']) {
            page.key(colour, &format!("{}  {}", measured.name, measured.facts));
        }
        compared(&mut page, all);
    } else if let Some(outcome) = all.first().and_then(|measured| measured.rounds.first()) {
        cards(&mut page, outcome);
    }
    pictures(&mut page, all)?;
    if let [one] = all {
        one.rounds.iter().for_each(|outcome| tables(&mut page, outcome));
    } else {
        let note =
            "Medians over all rounds; ratio: the first target to the second. IOPS and MB/s: \
                    more is better; latencies and CPU time: less is better."
                .to_owned();
        page.table("Comparison", &versus::head(all), &versus::rows(all), &[note]);
    }
    page.footer(&footer());
    Ok(page.finish())
}

/// Makes sure that a file can be written, before anything is measured.
///
/// # Errors
/// What the host says; that it holds something that is no page, as a target does.
pub(crate) fn create(path: &Path) -> Result<&Path> {
    open(path).map(|_| path)
}

/// Writes a page, in the place of another one.
///
/// # Errors
/// As [`create`].
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    let mut file = open(path)?;
    let regular = file.metadata().is_ok_and(|meta| meta.is_file());
    let emptied = if regular { file.set_len(0) } else { Ok(()) };
    emptied
        .and_then(|()| file.write_all(text.as_bytes()))
        .with_context(|| format!("--html {}: cannot write it", path.display()))
}

fn open(path: &Path) -> Result<File> {
    let name = path.display();
    let cannot = || format!("--html {name}: cannot write it");
    let is_regular = path.metadata().is_ok_and(|meta| meta.is_file());
    // A pipe or a terminal has nothing to read.
    let mut options = File::options();
    let file =
        options.create(true).append(true).read(is_regular).open(path).with_context(cannot)?;
    let kind = file.metadata().with_context(cannot)?.file_type();
    let mut head = Vec::new();
    if is_regular {
        let len = page::HEAD.len() as u64;
        (&file).take(len).read_to_end(&mut head).with_context(cannot)?;
    }
    ensure!(
        !kind.is_block_device() && (head.is_empty() || head == page::HEAD.as_bytes()),
        "--html {name}: it is there, and it is no page of HTML: it is not overwritten. Name another file"
    );
    Ok(file)
}

/// Who measured, where.
pub(crate) fn footer() -> String {
    let (cpu, cores, kernel) = usage::machine();
    let version = env!("CARGO_PKG_VERSION");
    format!("ringway {version} · {cpu}, {cores} CPUs, Linux {kernel}")
}

fn cards(page: &mut Page, outcome: &Outcome) {
    let total = outcome.tick.total();
    let done = outcome.tick.done().max(1) as f64;
    page.card(&count(total.done as f64 / outcome.seconds), "IOPS (more is better)");
    let mb_s = format!("{:.1}", total.bytes as f64 / outcome.seconds / 1e6);
    page.card(&mb_s, "MB/s (more is better)");
    if !total.lat.is_empty() {
        page.card(&short::time(total.lat.mean()), "mean latency (less is better)");
        page.card(
            &short::time(total.lat.value_at_percentile(99.0) as f64),
            "p99 latency (less is better)",
        );
    }
    page.card(&short::time(outcome.client_ns as f64 / done), "client CPU per I/O (less is better)");
    if let Some(server_ns) = outcome.server_ns {
        page.card(&short::time(server_ns as f64 / done), "server CPU per I/O (less is better)");
    }
}

/// The ratios that matter.
fn compared(page: &mut Page, all: &[Measured]) {
    let ratios = versus::rows(all);
    let better = ["above 1: the first is better", "below 1: the first is better"];
    for (row, (name, better)) in ratios.iter().zip([
        ("IOPS", better[0]),
        ("MB/s", better[0]),
        ("mean latency", better[1]),
        ("p50", better[1]),
        ("p99", better[1]),
        ("p99.9", better[1]),
    ]) {
        if let Some(ratio) = row.last().filter(|ratio| *ratio != "–") {
            page.card(&format!("{ratio} ×"), &format!("{name}, 1st ÷ 2nd ({better})"));
        }
    }
}

fn pictures(page: &mut Page, all: &[Measured]) -> Result<()> {
    let mut latencies = Vec::new();
    for measured in all {
        let mut sum = Tick::default();
        measured.rounds.iter().for_each(|outcome| sum.add(&outcome.tick));
        latencies.push(sum.total().lat);
    }
    let frames: Vec<Vec<&Frames>> =
        all.iter().map(|m| m.rounds.iter().map(|outcome| &outcome.frames).collect()).collect();
    if latencies.iter().any(|lat| !lat.is_empty()) {
        let svg = plots::latencies(&latencies)?;
        page.figure("half", "Latency", DISTRIBUTION, &svg);
    }
    let caption = if all.iter().any(|measured| measured.rounds.len() > 1) {
        "Rounds stand one behind the other; higher is better."
    } else {
        "Requests completed, per second; higher is better."
    };
    page.figure("half", "IOPS over time", caption, &plots::over_time(&frames)?);
    for ((measured, frames), _) in
        all.iter().zip(&frames).zip(&latencies).filter(|(_, lat)| !lat.is_empty())
    {
        let shades: String =
            (0..10).map(|shade| format!("<i style=\"background:var(--h{shade})\"></i>")).collect();
        let caption = format!(
            "Requests by latency and time, lower is better: few <span class=\"scale\">{shades}</span> many."
        );
        let title = match all.len() {
            1 => "Latency over time".to_owned(),
            _ => format!("Latency over time: {}", measured.name),
        };
        page.figure("heat", &title, &caption, &plots::heat_map(frames)?);
    }
    Ok(())
}

fn tables(page: &mut Page, outcome: &Outcome) {
    let (head, rows) = summary::latency_table(outcome);
    let mut notes = vec![summary::effort(outcome)];
    if let Some(verified) = summary::verified(outcome) {
        notes.push(format!("Verified: {verified}."));
    }
    let head = if rows.is_empty() { Vec::new() } else { head };
    let title = if rows.is_empty() { "Effort" } else { "Latencies in µs" };
    page.table(title, &head, &rows, &notes);
}
