//! What has changed between two answers of a daemon. What came and went in between is not seen.

use super::super::figures::Sample;
use ringway_control::protocol::{DiskFacts, DiskStatsOf, State};
use ringway_control::size::Size;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// One change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Change {
    /// Milliseconds since 1970: when the later answer came.
    pub(super) at: u64,
    /// What it is, in one word.
    pub(super) kind: &'static str,
    /// Something that somebody should look at.
    pub(super) bad: bool,
    /// The number of the disk it is about.
    pub(super) disk: Option<u64>,
    /// The disk by its name, or the worker.
    pub(super) of: String,
    pub(super) text: String,
}

/// Finds changes.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Disks some of whose requests failed since the last answer: told when that begins.
    failing: HashSet<u64>,
}

/// Both answers about a disk.
struct Pair<'a> {
    facts: (&'a DiskFacts, &'a DiskFacts),
    stats: (&'a DiskStatsOf, &'a DiskStatsOf),
}

impl Changes {
    /// What has changed from `then` to `now`, two answers of one daemon.
    pub(super) fn between(&mut self, then: &Sample, now: &Sample, at: u64) -> Vec<Change> {
        let mut found = Vec::new();
        let before: HashMap<u64, &DiskFacts> =
            then.list.disks.iter().map(|disk| (disk.id, disk)).collect();
        let stats = |sample: &'_ Sample| -> HashMap<u64, usize> {
            sample.stats.disks.iter().enumerate().map(|(place, disk)| (disk.id, place)).collect()
        };
        let (old, new) = (stats(then), stats(now));
        for facts in &now.list.disks {
            let mut tell = |(kind, bad, text): (&'static str, bool, String)| {
                let of = facts.image.clone();
                found.push(Change { at, kind, bad, disk: Some(facts.id), of, text });
            };
            let Some(earlier) = before.get(&facts.id) else {
                tell(("added", false, format!("{}, {}", Size(facts.size), facts.engine)));
                continue;
            };
            let (Some(&old), Some(&new)) = (old.get(&facts.id), new.get(&facts.id)) else {
                continue;
            };
            let pair = Pair {
                facts: (earlier, facts),
                stats: (&then.stats.disks[old], &now.stats.disks[new]),
            };
            pair.changes().into_iter().for_each(&mut tell);
            self.failures(&pair).into_iter().for_each(tell);
        }
        let here: HashSet<u64> = now.list.disks.iter().map(|disk| disk.id).collect();
        self.failing.retain(|id| here.contains(id));
        for gone in then.list.disks.iter().filter(|disk| !here.contains(&disk.id)) {
            let (of, text) = (gone.image.clone(), String::new());
            found.push(Change { at, kind: "removed", bad: false, disk: Some(gone.id), of, text });
        }
        found.extend(workers(then, now, at));
        found
    }

    /// Requests that have begun to fail.
    fn failures(&mut self, pair: &Pair<'_>) -> Option<(&'static str, bool, String)> {
        let (then, now) = pair.stats;
        let errors = now.counts.errors.saturating_sub(then.counts.errors);
        if errors == 0 {
            self.failing.remove(&now.id);
            return None;
        }
        if !self.failing.insert(now.id) {
            return None;
        }
        let before = |operation: &str, errno: Option<i32>| {
            let same = then.failures.iter().find(|f| f.operation == operation && f.errno == errno);
            same.map_or(0, |failure| failure.count)
        };
        let grown = now.failures.iter().find(|one| one.count > before(&one.operation, one.errno));
        let why =
            grown.map_or_else(String::new, |one| format!("; {}: {}", one.operation, one.error));
        let requests = if errors == 1 { "request" } else { "requests" };
        Some(("failed", true, format!("{errors} {requests}{why}")))
    }
}

impl Pair<'_> {
    fn changes(&self) -> Vec<(&'static str, bool, String)> {
        let mut found = Vec::new();
        let (then, now) = self.stats;
        match (then.connected, now.connected) {
            (false, true) => found.push(("connected", false, String::new())),
            (true, false) => found.push(("disconnected", false, String::new())),
            _ => {}
        }
        if then.size != now.size {
            let text = format!("from {} to {}", Size(then.size), Size(now.size));
            found.push(("resized", false, text));
        }
        if then.path.in_use != now.path.in_use {
            let text = format!("from {} to {}", then.path.in_use, now.path.in_use);
            found.push(("path changed", false, text));
        }
        if then.state != now.state {
            let bad = matches!(now.state, State::Stuck | State::Restarting);
            found.push((now.state.word(), bad, format!("was {}", then.state.word())));
        }
        let restarts = self.facts.1.restarts.saturating_sub(self.facts.0.restarts);
        if restarts > 0 {
            found.push(("restarted", true, "its process had ended".to_owned()));
        }
        match (then.overdue, now.overdue) {
            (0, 1..) => found.push(("overdue", true, format!("{} in flight", now.overdue))),
            (1.., 0) => found.push(("no longer overdue", false, String::new())),
            _ => {}
        }
        let held = |disk: &DiskStatsOf| disk.held.as_ref().map_or(0, |held| held.count);
        match (held(then), &now.held) {
            (0, Some(held)) if held.count > 0 => {
                let text = format!("{} waiting; {}: {}", held.count, held.operation, held.error);
                found.push(("held", true, text));
            }
            (1.., _) if held(now) == 0 => found.push(("no longer held", false, String::new())),
            _ => {}
        }
        let broken = |queue: &usize, disk: &DiskStatsOf| {
            disk.queues.iter().any(|other| other.queue == *queue && other.broken)
        };
        let queues = now.queues.iter().map(|queue| queue.queue);
        for queue in queues.filter(|queue| broken(queue, now) && !broken(queue, then)) {
            found.push(("broken", true, format!("queue {queue}, by its guest")));
        }
        found
    }
}

fn workers(then: &Sample, now: &Sample, at: u64) -> Vec<Change> {
    let before: HashMap<&str, bool> =
        then.stats.workers.iter().map(|worker| (&*worker.worker, worker.answers)).collect();
    let changed = now.stats.workers.iter().filter_map(|worker| {
        let answered = *before.get(&*worker.worker)?;
        let (kind, bad) = match (answered, worker.answers) {
            (true, false) => ("silent", true),
            (false, true) => ("answers again", false),
            _ => return None,
        };
        let (of, text) = (worker.worker.clone(), String::new());
        Some(Change { at, kind, bad, disk: None, of, text })
    });
    changed.collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::case::{Case, sample};
    use super::*;
    use ringway_control::protocol::HeldFacts;

    fn kinds(found: &[Change]) -> Vec<(&'static str, Option<u64>)> {
        found.iter().map(|change| (change.kind, change.disk)).collect()
    }

    #[test]
    fn what_differs_is_told_once() {
        let mut changes = Changes::default();
        let then = sample(&Case::default());
        let mut now = sample(&Case { overdue: 2, ..Case::default() });
        assert_eq!(changes.between(&then, &then, 1), []);
        now.stats.disks[0].connected = false;
        now.stats.disks[0].size = 1 << 30;
        now.stats.disks[0].path.in_use = "request".into();
        now.stats.disks[0].queues[0].broken = true;
        now.stats.disks[1].state = State::Paused;
        now.list.disks[1].restarts = 1;
        now.stats.workers[0].answers = false;
        let found = changes.between(&then, &now, 5);
        let first = ["disconnected", "resized", "path changed", "overdue", "broken"];
        let mut expected: Vec<_> = first.map(|kind| (kind, Some(0))).into();
        expected.extend([("paused", Some(1)), ("restarted", Some(1)), ("silent", None)]);
        assert_eq!(kinds(&found), expected);
        assert_eq!(found[1].text, "from 10 GiB to 1 GiB");
        assert!(found[3].bad && found[3].at == 5 && found[3].of == "/srv/vm1.img");
        assert_eq!(changes.between(&now, &now, 6), []);
        let back = changes.between(&now, &then, 7);
        assert!(kinds(&back).contains(&("answers again", None)), "{back:?}");
    }

    #[test]
    fn requests_are_held_and_go_on() {
        let (then, mut now) = (sample(&Case::default()), sample(&Case::default()));
        now.stats.disks[0].held = Some(HeldFacts {
            count: 3,
            operation: "write".into(),
            error: "No space left on device".into(),
            age_us: 0,
            errno: Some(28),
            retry_us: None,
        });
        let mut changes = Changes::default();
        let held = changes.between(&then, &now, 1);
        assert_eq!(kinds(&held), [("held", Some(0))]);
        assert_eq!(held[0].text, "3 waiting; write: No space left on device");
        assert_eq!(changes.between(&now, &now, 1), []);
        assert_eq!(kinds(&changes.between(&now, &then, 2)), [("no longer held", Some(0))]);
    }

    #[test]
    fn disks_come_and_go() {
        let mut changes = Changes::default();
        let (mut then, now) = (sample(&Case::default()), sample(&Case::default()));
        then.list.disks.remove(0);
        assert_eq!(kinds(&changes.between(&then, &now, 1)), [("added", Some(0))]);
        assert_eq!(kinds(&changes.between(&now, &then, 1)), [("removed", Some(0))]);
    }

    #[test]
    fn a_disk_that_goes_on_failing_is_told_of_when_it_begins() {
        let mut changes = Changes::default();
        let failed = |errors| {
            let mut sample = sample(&Case::default());
            sample.stats.disks[0].counts.errors = errors;
            sample
        };
        let samples = [0, 3, 5, 5, 6].map(failed);
        let told = samples.windows(2).map(|pair| changes.between(&pair[0], &pair[1], 1));
        let texts: Vec<_> = told.flatten().map(|change| change.text).collect();
        assert_eq!(texts, ["3 requests", "1 request"]);
    }
}
