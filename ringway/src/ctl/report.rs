//! Answers as people read them.

use super::images;
use super::stats::{section, stats};
use crate::happened::{NO_DISKS, held};
use ringway_control::config::limit_words;
use ringway_control::protocol::{
    DiskFacts, Done, FailedOf, LeftOf, Limited, List, Reloaded, Removed, ResizedTo, Retried,
};
use ringway_control::size::Size;
use ringway_terminal::short::{age, time};
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
        "reload" => reloaded(&from_value(answer)?),
        "remove" => removed(&from_value(answer)?),
        "retry" => retried(&from_value(answer)?),
        "limit" => limited(&from_value(answer)?),
        "resize" => resized(&from_value(answer)?),
        "snapshot" => images::snapshotted(&from_value(answer)?),
        "flatten" | "commit" => images::job(&from_value(answer)?),
        _ => done(command, &from_value(answer)?),
    })
}

fn reloaded(done: &Reloaded) -> String {
    let mut text = String::new();
    let images = |what: [&str; 2], images: &[String]| -> String {
        let what = what[usize::from(done.dry_run)];
        images.iter().map(|image| format!("{image}: {what}\n")).collect()
    };
    text += &images(["added", "would be added"], &done.added);
    text += &images(["removed", "would be removed"], &done.removed);
    let deleted = ["its clone was deleted (ephemeral)", "its clone would be DELETED (ephemeral)"];
    text += &images(deleted, &done.deleted);
    text += &images(["other limits", "would get other limits"], &done.limited);
    let policy = ["another error policy", "would get another error policy"];
    text += &images(policy, &done.policies);
    for LeftOf { image, words } in &done.left {
        let (image, words) = (image.as_deref().unwrap_or("the daemon"), words.join(", "));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{image}: does not change until the daemon is restarted: {words}");
    }
    for FailedOf { image, why } in &done.failed {
        let _ = writeln!(text, "{image}: failed: {why}");
    }
    let _ = writeln!(text, "{} unchanged", done.unchanged);
    text
}

/// What a narrow terminal leaves out first.
const LEAST_OF_LIST: [&str; 7] =
    ["path", "cache", "engine", "queues", "front-end", "place", "limits"];

const LIST: [&str; 11] = [
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

fn list(list: &List) -> String {
    let rows = list.disks.iter().map(|disk| {
        let size = Size(disk.size).to_string();
        vec![
            disk.id.to_string(),
            disk.image.clone(),
            if disk.read_only { size + " (read-only)" } else { size },
            state(disk),
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
        .filter_map(|disk| {
            let held = held(disk.held.as_ref()?);
            Some(format!("{}: {held}\n", disk.image))
        })
        .collect();
    let front_ends: String = list
        .disks
        .iter()
        .filter_map(|disk| Some(format!("{}: {}\n", disk.image, disk.front_end.as_ref()?)))
        .collect();
    let not_polled: String = list
        .disks
        .iter()
        .filter(|disk| disk.path.not_polled)
        .map(|disk| {
            format!(
                "{}: its device has no queues to poll (iopoll): completions come by interrupts\n",
                disk.image
            )
        })
        .collect();
    let storage: String = list
        .disks
        .iter()
        .flat_map(|disk| {
            let name = |words| format!("{}: {words}\n", disk.image);
            disk.storage.words().into_iter().map(name)
        })
        .collect();
    let held = held + &storage + &front_ends + &not_polled;
    let groups = list.limit_groups.iter().map(|group| {
        let disks: Vec<_> = group.disks.iter().map(u64::to_string).collect();
        let disks = if disks.is_empty() { "-".to_owned() } else { disks.join(" ") };
        vec![group.name.clone(), limits(&group.limits, None), disks]
    });
    let mut shared = String::new();
    section(&mut shared, 3, &["limit group", "limits", "disk numbers"], groups.collect());
    let gap = if shared.is_empty() { "" } else { "\n" };
    let daemon = &list.daemon;
    let up = age(daemon.uptime_us);
    let lacks: String = daemon.lacks.iter().map(|what| format!("{what}\n")).collect();
    let disks = match list.disks.is_empty() {
        true => NO_DISKS.to_owned(),
        false => table::fitting(LIST.len(), &LIST, rows.collect(), &LEAST_OF_LIST),
    };
    format!(
        "{disks}\n{gap}{shared}{gap}{held}{lacks}ringway {}, process {}, up for {up}\n",
        daemon.version, daemon.pid
    )
}

fn state(disk: &DiskFacts) -> String {
    let held = disk.held.as_ref().map_or(0, |held| held.count);
    let held = (held > 0).then(|| format!("{held} held"));
    let at_limit = disk.at_limit.then(|| "at its limit".to_owned());
    let job = disk.job.as_ref().and_then(images::under_way);
    let all = [Some(disk.state.word().to_owned()), held, at_limit, job];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// What a guest may ask of a disk, or disks of a group.
fn limits(own: &BTreeMap<String, u64>, group: Option<&str>) -> String {
    let group = group.map(|group| format!("group {group}"));
    let own = Some(limit_words(own)).filter(|own| !own.is_empty());
    let all: Vec<_> = own.into_iter().chain(group).collect();
    if all.is_empty() { "-".into() } else { all.join(", ") }
}

fn limited(limited: &Limited) -> String {
    let Limited { image, group, limits: own, removed, id: _ } = limited;
    let name = match (image, group) {
        (Some(image), _) => image.clone(),
        (None, group) => format!("group {}", group.as_deref().unwrap_or("-")),
    };
    if *removed {
        return format!("{name}: removed\n");
    }
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
    let lost = match removed.connected {
        true => "; a front-end was connected: its guest has lost the disk",
        false => "",
    };
    let held = match removed.held {
        0 => String::new(),
        held => format!(
            "\n{image}: held requests left unanswered: {held}. They are carried out if the image is \
             served to this front-end again, at the same socket; else their guest waits for ever"
        ),
    };
    match removed.drained {
        true => format!("{image}: removed{lost}{held}\n"),
        false => format!(
            "{image}: removed, but the host's disk has not finished what was in flight: it may still \
             be written{lost}{held}\n"
        ),
    }
}

fn resized(resized: &ResizedTo) -> String {
    let ResizedTo { image, from, to, guest_notice, .. } = resized;
    if from == to {
        return format!("{image}: {} as before\n", Size(*to));
    }
    let notice = match guest_notice.as_str() {
        "yes" => "the guest was told",
        "nobody-there" => "no front-end is connected",
        "not-listening" => {
            "the guest was NOT told: its front-end does not listen for changes. It sees the size \
             after a reboot or a rescan"
        }
        "undelivered" => "the guest was NOT told: its front-end does not take messages",
        _ => "the guest is told as soon as its driver runs",
    };
    format!("{image}: {} → {}; {notice}\n", Size(*from), Size(*to))
}

fn retried(retried: &Retried) -> String {
    let Retried { image, requests, failed, flushes, held: left, .. } = retried;
    let words = if *requests == 1 { "request" } else { "requests" };
    let mut text = match (requests, failed) {
        _ if *flushes == Some(true) => {
            format!(
                "{image}: flushes are tried again; what was written before one had failed may be lost\n"
            )
        }
        _ if flushes.is_some() => format!("{image}: no flush had failed\n"),
        (0, _) => format!("{image}: no request was held\n"),
        (_, true) => format!("{image}: {requests} {words} given up; the guest was told\n"),
        (_, false) => format!("{image}: {requests} {words} tried again\n"),
    };
    if let Some(left) = left {
        let _ = writeln!(text, "{image}: {}", held(left));
    }
    text
}

fn done(command: &str, done: &Done) -> String {
    let what = match command {
        "pause" => "paused: its guest waits until it is resumed",
        "resume" => "takes requests again",
        _ => "all that was in flight is done and durable",
    };
    let took = match Duration::from_micros(done.took_us) {
        short if short < Duration::from_millis(1) => String::new(),
        took => format!(", took {}", time(took.as_nanos() as f64)),
    };
    format!("{}: {what} (state {}{took})\n", done.image, done.state.word())
}
