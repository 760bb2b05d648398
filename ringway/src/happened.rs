//! What a daemon tells of itself, in words for people.

use ringway_control::config::limit_words;
use ringway_control::protocol::{Happened, HeldFacts, Reloaded};
use ringway_control::size::Size;

/// What is said instead of an empty table.
pub(crate) const NO_DISKS: &str = "no disks; `ringway ctl add` adds one";

/// What it is, whether somebody should look at it, and the rest.
pub(crate) fn words(happened: Happened) -> (&'static str, bool, String) {
    let none = String::new();
    match happened {
        Happened::Added => ("added", false, none),
        Happened::Removed { drained, held } => {
            let flight = (!drained).then(|| "requests were still in flight".to_owned());
            let held = (held > 0).then(|| format!("held requests left unanswered: {held}"));
            let text: Vec<_> = flight.into_iter().chain(held).collect();
            ("removed", !text.is_empty(), text.join("; "))
        }
        Happened::Connected => ("connected", false, none),
        Happened::Disconnected { why } => ("disconnected", why.is_some(), why.unwrap_or_default()),
        Happened::Broken { queue, why } => ("broken", true, format!("queue {queue}: {why}")),
        Happened::Recovered { queue, requests } => {
            ("recovered", false, format!("queue {queue}: {requests} of the daemon before"))
        }
        Happened::Resized { from, to, guest_notice } => {
            let text = format!("from {} to {}; guest told: {guest_notice}", Size(from), Size(to));
            ("resized", false, text)
        }
        Happened::SnapshotTaken { snapshot, .. } => {
            ("snapshot taken", false, snapshot.display().to_string())
        }
        Happened::JobStarted { job, total_bytes } => {
            ("job started", false, format!("{job}, {}", Size(total_bytes)))
        }
        Happened::JobDone { job, copied_bytes, .. } => {
            ("job done", false, format!("{job}: {} copied", Size(copied_bytes)))
        }
        Happened::JobCancelled { job, copied_bytes } => {
            ("job cancelled", false, format!("{job}: {} copied", Size(copied_bytes)))
        }
        Happened::JobFailed { job, error, .. } => ("job failed", true, format!("{job}: {error}")),
        Happened::Paused => ("paused", false, none),
        Happened::Resumed => ("resumed", false, none),
        Happened::PathChanged { path } => ("path changed", false, format!("to {path}")),
        Happened::Failed { operation, count, error, .. } => {
            ("failed", true, format!("{count} × {operation}: {error}"))
        }
        Happened::ServerAway { why } => ("server away", true, why),
        Happened::ServerBack => ("server back", false, none),
        Happened::Held { held } => ("held", true, held.as_ref().map_or(none, held_words)),
        Happened::Released => ("no longer held", false, none),
        Happened::LimitsChanged { limits, limit_group } => {
            let own = Some(limit_words(&limits)).filter(|own| !own.is_empty());
            let group = limit_group.map(|group| format!("group {group}"));
            let all: Vec<_> = group.into_iter().chain(own).collect();
            ("limits changed", false, if all.is_empty() { "none".into() } else { all.join(": ") })
        }
        Happened::LimitGroupRemoved { limit_group } => ("limit group removed", false, limit_group),
        Happened::LimitReached => ("limit reached", false, "requests wait for it".into()),
        Happened::Overdue { requests } => ("overdue", true, format!("{requests} in flight")),
        Happened::InTime => ("no longer overdue", false, none),
        Happened::ProcessEnded { process, why } => {
            ("process ended", true, format!("process {process}: {why}"))
        }
        Happened::Restarted { process } => ("restarted", false, format!("process {process}")),
        Happened::Reloaded(done) => ("reloaded", !done.failed.is_empty(), reloaded(&done)),
        Happened::ReloadFailed { why } => ("not reloaded", true, why),
        Happened::WorkerFailed => ("worker failed", true, "the daemon ends".into()),
        Happened::SpawnerEnded => (
            "spawner ended",
            true,
            "no process of a disk is started again: restart the daemon".into(),
        ),
        Happened::HelperEnded => {
            ("helper ended", true, "no files are opened any more: restart the daemon".into())
        }
        Happened::Lost { events } => ("events lost", true, format!("{events} were not heard")),
    }
}

/// What an operator should know of held requests.
pub(crate) fn held(held: &HeldFacts) -> String {
    let HeldFacts { count, operation, error, .. } = held;
    let requests = if *count == 1 { "request is" } else { "requests are" };
    let seconds = |us: u64| us.div_ceil(1_000_000);
    let next = match held.retry_us {
        Some(us) => format!("tried again in {} s, or by ctl retry", seconds(us)),
        None => "tried again by ctl retry".into(),
    };
    let age = held.age_us / 1_000_000;
    format!("{count} {requests} held for {age} s: {operation} failed: {error}; {next}")
}

fn held_words(held: &HeldFacts) -> String {
    format!("{} waiting; {}: {}", held.count, held.operation, held.error)
}

fn reloaded(done: &Reloaded) -> String {
    let counts = [
        (done.added.len(), "added"),
        (done.removed.len(), "removed"),
        (done.limited.len(), "with other limits"),
        (done.policies.len(), "with another error policy"),
        (done.left.len(), "with changes that take a restart"),
        (done.failed.len(), "failed"),
    ];
    let words: Vec<_> = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    if words.is_empty() { "nothing is different".into() } else { words.join(", ") }
}
