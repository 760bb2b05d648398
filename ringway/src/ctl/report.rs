//! Answers as people read them.

use ringway_control::config::limit_words;
use ringway_control::protocol::{
    Counts, DiskFacts, Done, HeldFacts, Latencies, Limited, List, Removed, ResizedTo, Retried,
    Spread, Stats, WorkerStatsOf,
};
use ringway_control::size::Size;
use ringway_terminal::table;
use serde_json::{Result, Value, from_value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// The lines for the answer to `command`.
///
/// # Errors
/// That the answer has another form.
pub(super) fn write(command: &str, answer: Value) -> Result<String> {
    Ok(match command {
        "list" => list(&from_value(answer)?),
        "stats" => stats(&from_value(answer)?),
        "add" => added(&from_value(answer)?),
        "remove" => removed(&from_value(answer)?),
        "retry" => retried(&from_value(answer)?),
        "limit" => limited(&from_value(answer)?),
        "resize" => resized(&from_value(answer)?),
        _ => done(command, &from_value(answer)?),
    })
}

fn list(list: &List) -> String {
    let header = [
        "disk",
        "image",
        "size",
        "state",
        "front-end",
        "queues",
        "engine",
        "cache",
        "path",
        "limits",
        "place",
    ];
    let rows = list.disks.iter().map(|disk| {
        let size = Size(disk.size).to_string();
        vec![
            disk.id.to_string(),
            disk.image.clone(),
            if disk.read_only { size + " (read-only)" } else { size },
            match &disk.held {
                Some(held) => format!("{}, {} held", disk.state.word(), held.count),
                None => disk.state.word().into(),
            },
            (if disk.connected { "connected" } else { "-" }).into(),
            disk.queues.to_string(),
            disk.engine.clone(),
            disk.cache.clone(),
            disk.path.words(),
            limits(&disk.limits, disk.limit_group.as_deref()),
            place(disk),
        ]
    });
    let held: String = list
        .disks
        .iter()
        .filter_map(|disk| held(&disk.image, disk.held.as_ref()?).into())
        .collect();
    let groups = list.limit_groups.iter().map(|group| {
        let disks: Vec<_> = group.disks.iter().map(u64::to_string).collect();
        let disks = if disks.is_empty() { "-".to_owned() } else { disks.join(" ") };
        vec![group.name.clone(), limits(&group.limits, None), disks]
    });
    let mut shared = String::new();
    section(&mut shared, 3, &["limit group", "limits", "disks"], groups.collect());
    let gap = if shared.is_empty() { "" } else { "\n" };
    let daemon = &list.daemon;
    let up = Duration::from_secs(daemon.uptime_us / 1_000_000);
    format!(
        "{}\n{gap}{shared}{gap}{held}ringway {}, process {}, up for {up:?}\n",
        table::with_words(header.len(), &header, rows.collect()),
        daemon.version,
        daemon.pid
    )
}

/// What an operator should know of held requests.
fn held(image: &str, held: &HeldFacts) -> String {
    let HeldFacts { count, operation, error, .. } = held;
    let requests = if *count == 1 { "request is" } else { "requests are" };
    let seconds = |us: u64| us.div_ceil(1_000_000);
    let next = match held.retry_us {
        Some(us) => format!("tried again in {} s, or by ctl retry", seconds(us)),
        None => "tried again by ctl retry".into(),
    };
    let age = held.age_us / 1_000_000;
    format!("{image}: {count} {requests} held for {age} s: {operation} failed: {error}; {next}\n")
}

/// What a guest may ask of a disk, or disks of a group.
fn limits(own: &BTreeMap<String, u64>, group: Option<&str>) -> String {
    let group = group.map(|group| format!("group {group}"));
    let own = Some(limit_words(own)).filter(|own| !own.is_empty());
    let all: Vec<_> = own.into_iter().chain(group).collect();
    if all.is_empty() { "-".into() } else { all.join(", ") }
}

fn limited(limited: &Limited) -> String {
    let Limited { image, group, limits: own, .. } = limited;
    let name = match (image, group) {
        (Some(image), _) => image.clone(),
        (None, group) => format!("group {}", group.as_deref().unwrap_or("-")),
    };
    match limits(own, group.as_deref().filter(|_| image.is_some())).as_str() {
        "-" => format!("{name}: no limits\n"),
        words => format!("{name}: {words}\n"),
    }
}

/// Where front-ends meet it.
fn place(disk: &DiskFacts) -> String {
    let socket = disk.socket.as_ref().map(|path| path.display().to_string());
    socket.or_else(|| disk.device.clone()).unwrap_or("-".into())
}

fn stats(stats: &Stats) -> String {
    let mut text = String::new();
    let counted = ["reads", "read", "writes", "written", "flushes", "erases", "refused", "failed"];
    let disks = stats.disks.iter().map(|disk| {
        let mut cells =
            vec![disk.id.to_string(), disk.image.clone(), in_flight(disk.in_flight, disk.overdue)];
        cells.extend(counts(&disk.counts));
        cells
    });
    let header = [&["disk", "image", "in flight"], &counted[..]].concat();
    section(&mut text, 2, &header, disks.collect());

    let queues = stats.disks.iter().flat_map(|disk| {
        disk.queues.iter().map(|queue| {
            let name = format!("{}/{}", disk.id, queue.queue);
            let mut cells = vec![name, queue.worker.clone(), queue.queue_size.to_string()];
            let state = if queue.broken { "broken" } else { "" };
            cells.push(format!("{}{state}", in_flight(queue.in_flight, queue.overdue)));
            cells.extend(counts(&queue.counts));
            cells
        })
    });
    let header = [&["queue", "worker", "ring", "in flight"], &counted[..]].concat();
    section(&mut text, 2, &header, queues.collect());

    let failures = stats.disks.iter().flat_map(|disk| {
        disk.failures.iter().map(|failures| {
            vec![
                format!("{} {}", disk.id, failures.operation),
                failures.error.clone(),
                failures.count.to_string(),
                failures.sector.map_or("-".into(), |sector| sector.to_string()),
            ]
        })
    });
    section(&mut text, 2, &["failed", "error", "times", "last sector"], failures.collect());

    let timed = stats.disks.iter().filter_map(|disk| Some((disk.id, disk.latency.as_ref()?)));
    let rows = timed.flat_map(|(id, latency)| latencies(id, latency));
    section(
        &mut text,
        1,
        &["latency", "timed", "p50", "p90", "p99", "p99.9", "max"],
        rows.collect(),
    );
    let header = [
        "worker",
        "queues",
        "requests",
        "per batch",
        "per harvest",
        "syscalls",
        "sleeps",
        "lost kicks",
        "CPU",
        "polling",
    ];
    section(&mut text, 1, &header, stats.workers.iter().map(worker).collect());
    text
}

/// How many requests are in flight, and how many of them for too long.
fn in_flight(all: usize, overdue: usize) -> String {
    match overdue {
        0 => all.to_string(),
        _ => format!("{all} ({overdue} overdue)"),
    }
}

/// A table, if there is anything in it; its first `words` columns hold words.
fn section(text: &mut String, words: usize, header: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let gap = if text.is_empty() { "" } else { "\n" };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{gap}{}", table::with_words(words, header, rows));
}

fn counts(counts: &Counts) -> Vec<String> {
    vec![
        counts.reads.to_string(),
        Size(counts.read_bytes).to_string(),
        counts.writes.to_string(),
        Size(counts.written_bytes).to_string(),
        counts.flushes.to_string(),
        counts.erases.to_string(),
        // A daemon of before does not tell them apart.
        counts.refused.to_string(),
        counts.errors.saturating_sub(counts.refused).to_string(),
    ]
}

fn latencies(disk: u64, latency: &Latencies) -> Vec<Vec<String>> {
    let kinds =
        [("reads", &latency.reads), ("writes", &latency.writes), ("others", &latency.others)];
    let time = |nanos: u64| format!("{:.1} us", nanos as f64 / 1000.0);
    let row = |(kind, spread): (&str, &Spread)| {
        let mut cells = vec![format!("{disk} {kind}"), spread.count.to_string()];
        cells.extend([spread.p50, spread.p90, spread.p99, spread.p999, spread.max].map(time));
        cells
    };
    kinds.into_iter().filter(|(_, spread)| spread.count > 0).map(row).collect()
}

fn worker(worker: &WorkerStatsOf) -> Vec<String> {
    let share = |part: u64, whole: u64| match whole {
        0 => "-".into(),
        _ => format!("{:.0} %", 100.0 * part as f64 / whole as f64),
    };
    if !worker.answers {
        return vec![worker.worker.clone(), "does not answer".into()];
    }
    vec![
        worker.worker.clone(),
        worker.queues.to_string(),
        worker.requests.to_string(),
        worker.batches.p50.to_string(),
        worker.harvests.p50.to_string(),
        worker.syscalls.to_string(),
        worker.sleeps.to_string(),
        worker.lost_kicks.to_string(),
        share(worker.cpu_us, worker.age_us),
        share(worker.spin_us, worker.age_us),
    ]
}

fn added(disk: &DiskFacts) -> String {
    format!(
        "{}  disk {}  {}  {} queues  engine {} ({})  cache {} ({})\n",
        disk.image,
        disk.id,
        Size(disk.size),
        disk.queues,
        disk.engine,
        disk.engine_why,
        disk.cache,
        disk.cache_why
    )
}

fn removed(removed: &Removed) -> String {
    let image = &removed.image;
    match removed.drained {
        true => format!("{image}: removed\n"),
        false => format!(
            "{image}: removed, but the host's disk has not finished what was in flight: it may still \
             be written\n"
        ),
    }
}

fn resized(resized: &ResizedTo) -> String {
    let ResizedTo { image, from, to, guest_notice, .. } = resized;
    if from == to {
        return format!("{image}: {} as before\n", Size(*to));
    }
    let told = match guest_notice.as_str() {
        "yes" => "the guest was told",
        "nobody-there" => "no front-end is connected",
        "not-listening" => {
            "the guest was NOT told: its front-end does not listen for changes. It sees the size \
             after a reboot or a rescan"
        }
        "deaf" => "the guest was NOT told: its front-end does not read what it is told",
        _ => "the guest is told as soon as its driver runs",
    };
    format!("{image}: {} → {}; {told}\n", Size(*from), Size(*to))
}

fn retried(retried: &Retried) -> String {
    let Retried { image, requests, failed, held: left, .. } = retried;
    let words = if *requests == 1 { "request" } else { "requests" };
    let mut text = match (requests, failed) {
        (0, _) => format!("{image}: no request was held\n"),
        (_, true) => format!("{image}: {requests} {words} given up; the guest was told\n"),
        (_, false) => format!("{image}: {requests} {words} tried again\n"),
    };
    if let Some(left) = left {
        text += &held(image, left);
    }
    text
}

fn done(command: &str, done: &Done) -> String {
    let what = match command {
        "pause" => "paused: its guest waits until it is resumed",
        "resume" => "takes requests again",
        _ => "all that was in flight is done and durable",
    };
    let took = Duration::from_micros(done.took_us);
    format!("{}: {what} (state {}, took {took:.1?})\n", done.image, done.state.word())
}
