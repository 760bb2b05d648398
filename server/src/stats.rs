//! What the workers have counted: at the end, or whenever SIGUSR1 asks.

use super::promise::{IsPending, Promises};
use hdrhistogram::Histogram;
use ringway_control::size::Size;
use ringway_disk::{Disk, EngineKind, SchedulerStats};
use ringway_export::{Counts, Rouse, WorkerStats};
use ringway_terminal::logging;
use ringway_terminal::table;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// How long all workers may take for the counts that are printed: they answer between two turns.
const TELL_MAX: Duration = Duration::from_secs(2);

/// All workers of a daemon, by engine, and its disks.
pub(crate) struct Workers {
    engines: Vec<(EngineKind, Vec<Box<dyn Counts>>)>,
    disks: Vec<Arc<Disk>>,
}

/// What the workers of one engine have said; `None` if one did not answer in time.
pub(crate) struct EngineAnswers {
    /// Their engine.
    pub(crate) kind: EngineKind,
    /// In the order of their numbers.
    pub(crate) workers: Vec<Option<WorkerStats>>,
}

impl Workers {
    /// The workers of each engine, and the disks.
    pub(crate) fn new(
        pools: impl Iterator<Item = (EngineKind, Vec<Box<dyn Counts>>)>,
        disks: impl Iterator<Item = Arc<Disk>>,
    ) -> Self {
        Self { engines: pools.collect(), disks: disks.collect() }
    }

    /// Asks all of them at once and waits no longer than `timeout`. Without `spreads` queues tell no
    /// latencies.
    pub(crate) fn ask_within(&self, timeout: Duration, spreads: bool) -> Vec<EngineAnswers> {
        let begun = Instant::now();
        let promises: Vec<Vec<_>> = self
            .engines
            .iter()
            .map(|(_, handles)| {
                handles.iter().map(|handle| handle.ask_stats(spreads).ok()).collect()
            })
            .collect();
        let wait = |promise: Option<Receiver<WorkerStats>>| {
            promise?.recv_timeout(timeout.saturating_sub(begun.elapsed())).ok()
        };
        self.engines
            .iter()
            .zip(promises)
            .map(|((kind, _), promises)| EngineAnswers {
                kind: *kind,
                workers: promises.into_iter().map(wait).collect(),
            })
            .collect()
    }

    /// Asks those that owe no answer for a look: see [`ringway_export::Handle::ask_inspect`].
    pub(crate) fn scan_stalled(
        &self,
        now: Duration,
        limit: Duration,
        rouse: &Rouse,
        is_pending: IsPending<'_>,
    ) -> Promises {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let all = self.engines.iter().flat_map(|(kind, handles)| {
            handles.iter().enumerate().map(move |(number, handle)| ((*kind, number), handle))
        });
        let asked = all.filter(|(id, _)| !is_pending(*id)).map(|(id, handle)| {
            (id, handle.ask_inspect(nanos(now), nanos(limit), Some(Arc::clone(rouse))))
        });
        asked.filter_map(|(id, promise)| Some((id, promise.ok()?))).collect()
    }

    /// Asks them; without those that have ended, which has been logged, or do not answer in time, as the watchdog says.
    fn ask(&self) -> Vec<(String, WorkerStats)> {
        let answers = self.ask_within(TELL_MAX, true).into_iter();
        let named = answers.flat_map(|EngineAnswers { kind, workers }| {
            let all = workers.into_iter().enumerate();
            all.filter_map(move |(n, stats)| Some((format!("{kind}/{n}"), stats?)))
        });
        named.collect()
    }

    /// Prints their counts on standard output.
    pub(crate) fn print(&self) {
        logging::print(&self.text(&self.ask()));
    }

    /// Tells their counts on standard error, in the format of the log if that is for machines.
    pub(crate) fn tell(&self) {
        let counts = self.ask();
        if logging::is_json() {
            counts.iter().for_each(|(worker, stats)| log(worker, stats));
            self.disks.iter().for_each(|disk| log_path(disk));
        } else {
            logging::say(&self.text(&counts));
        }
    }

    fn text(&self, counts: &[(String, WorkerStats)]) -> String {
        let rows = self.disks.iter().map(|disk| {
            let path = disk.policy();
            let words = [path.mode().name(), path.chosen().name(), &path.switches().to_string()];
            std::iter::once(disk.name()).chain(words).map(str::to_owned).collect()
        });
        let paths = table::text(&["disk", "path", "in use", "switches"], rows.collect());
        // The disks first: which of several processes these are is seen by that.
        paths + "\n\n" + &tables(counts)
    }
}

fn log_path(disk: &Disk) {
    let path = disk.policy();
    tracing::info!(
        disk = disk.name(),
        path = path.mode().name(),
        path_in_use = path.chosen().name(),
        path_switches = path.switches(),
        "path"
    );
}

fn log(worker: &str, stats: &WorkerStats) {
    let disk = &stats.disk;
    tracing::info!(
        worker,
        reads = disk.reads,
        read_bytes = disk.read_bytes,
        writes = disk.writes,
        written_bytes = disk.written_bytes,
        flushes = disk.flushes,
        erases = disk.erases,
        errors = disk.errors,
        refused = disk.refused,
        failed = disk.failed(),
        overdue = disk.overdue,
        requests = stats.requests,
        bounced = disk.bounced,
        split = disk.split,
        plugged = disk.path.plugged,
        merged = disk.path.merged,
        merged_runs = disk.path.runs,
        merged_split = disk.path.split,
        deadlines = disk.path.expired,
        syscalls = stats.engine.syscalls,
        syscalls_per_io = stats.syscalls_per_io(),
        sleeps = stats.sleeps,
        lost_calls = stats.lost_calls,
        lost_kicks = stats.lost_kicks,
        completions_per_harvest_p50 = stats.harvests.value_at_quantile(0.5),
        completions_per_harvest_max = stats.harvests.max(),
        requests_per_submission_p50 = stats.batches.value_at_quantile(0.5),
        requests_per_submission_max = stats.batches.max(),
        "counts"
    );
}

/// What one table shows of one worker.
type Row = fn(&WorkerStats) -> Vec<String>;

fn tables(workers: &[(String, WorkerStats)]) -> String {
    let what =
        ["worker", "reads", "read", "writes", "written", "flushes", "erases", "refused", "failed"];
    let how =
        ["worker", "requests", "overdue", "bounced", "split", "syscalls", "syscalls/I/O", "sleeps"];
    let merging = &["worker", "plugged", "merged", "operations", "split again", "deadlines"];
    let spread = ["times", "p1", "p10", "p50", "p90", "p99.99", "max"];
    let harvests = [&["completions per harvest"], &spread[..]].concat();
    let batches = [&["requests per submission"], &spread[..]].concat();
    let shown: [(&[&str], Row); 5] = [
        (&what, requests),
        (&how, effort),
        (merging, |stats| merges(&stats.disk.path)),
        (&harvests, |stats| percentiles(&stats.harvests)),
        (&batches, |stats| percentiles(&stats.batches)),
    ];
    let table = |(header, row): (&[&str], Row)| {
        let rows = workers.iter().map(|(name, stats)| {
            let mut cells = row(stats);
            cells.insert(0, name.clone());
            cells
        });
        table::text(header, rows.collect()) + "\n"
    };
    shown.map(table).join("\n")
}

fn requests(stats: &WorkerStats) -> Vec<String> {
    let disk = &stats.disk;
    vec![
        disk.reads.to_string(),
        Size(disk.read_bytes).to_string(),
        disk.writes.to_string(),
        Size(disk.written_bytes).to_string(),
        disk.flushes.to_string(),
        disk.erases.to_string(),
        disk.refused.to_string(),
        disk.failed().to_string(),
    ]
}

fn effort(stats: &WorkerStats) -> Vec<String> {
    vec![
        stats.requests.to_string(),
        stats.disk.overdue.to_string(),
        stats.disk.bounced.to_string(),
        stats.disk.split.to_string(),
        stats.engine.syscalls.to_string(),
        match stats.completed() {
            0 => "-".into(),
            _ => format!("{:.2}", stats.syscalls_per_io()),
        },
        stats.sleeps.to_string(),
    ]
}

/// What the request path did.
fn merges(path: &SchedulerStats) -> Vec<String> {
    [path.plugged, path.merged, path.runs, path.split, path.expired].map(|n| n.to_string()).into()
}

/// How often, and how many at a time.
fn percentiles(histogram: &Histogram<u64>) -> Vec<String> {
    let mut cells = vec![histogram.len().to_string()];
    if histogram.is_empty() {
        cells.resize(7, "-".into());
        return cells;
    }
    let values = [0.01, 0.1, 0.5, 0.9, 0.9999].map(|part| histogram.value_at_quantile(part));
    cells.extend(values.iter().chain(&[histogram.max()]).map(u64::to_string));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_export::Findings;
    use std::sync::mpsc::{SyncSender, sync_channel};

    /// It waits for something in the kernel, or answers.
    struct Worker {
        answers: bool,
        owed: std::sync::Mutex<Vec<SyncSender<WorkerStats>>>,
    }

    impl Counts for Worker {
        fn ask_stats(&self, _: bool) -> std::io::Result<Receiver<WorkerStats>> {
            let (reply, answer) = sync_channel(1);
            if self.answers {
                reply.send(WorkerStats::default()).unwrap();
            }
            self.owed.lock().unwrap().push(reply);
            Ok(answer)
        }

        fn ask_inspect(
            &self,
            _: u64,
            _: u64,
            _: Option<Rouse>,
        ) -> std::io::Result<Receiver<Findings>> {
            unreachable!()
        }
    }

    #[test]
    fn e50_counts_are_told_without_a_worker_that_does_not_answer() {
        let worker = |answers| Box::new(Worker { answers, owed: Default::default() }) as Box<_>;
        let pools = [(EngineKind::Null, vec![worker(false), worker(true)])];
        let workers = Workers::new(pools.into_iter(), std::iter::empty());
        let names: Vec<_> = workers.ask().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [format!("{}/1", EngineKind::Null)]);
    }
}
