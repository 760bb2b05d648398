//! What clients are told: disks, and what workers have counted.

use super::super::disks::{AnyDisk, Disks};
use super::super::isolate::Isolated;
use super::super::served::{Served, lock};
use super::super::stats::EngineAnswers;
use hdrhistogram::Histogram;
use ringway_control::protocol::{
    Buckets, DaemonFacts, DiskFacts, DiskStatsOf, DurationsOf, FailuresOf, Latencies, List,
    PathFacts, Qcow2Facts, QueueStatsOf, Spread, State, Stats, StorageFacts, WorkerStatsOf,
};
use ringway_disk::{Disk, EngineKind, Failures, Incidents};
use ringway_export::{
    DURATION_BOUNDS_NS, Durations, OPERATIONS, QueueReport, QueueTotals, WorkerStats,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long workers may take to tell their counts. They do between two turns.
const TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn list(disks: &Disks) -> List {
    let here = disks.list();
    let mut all: Vec<_> = here.iter().map(|served| facts(served)).collect();
    let isolated = disks.isolated();
    // Asked all at once: who does not answer keeps the others waiting once.
    let asked: Vec<_> = isolated.iter().map(|disk| disk.ask(json!({"command": "list"}))).collect();
    let begun = Instant::now();
    let mut lacks = disks.all_it_lacks();
    for (disk, answer) in isolated.iter().zip(asked) {
        let answer = answer.wait(TIMEOUT.saturating_sub(begun.elapsed())).ok();
        let mut said = answer.and_then(|answer| serde_json::from_value::<List>(answer).ok());
        let its = said.iter_mut().flat_map(|said| std::mem::take(&mut said.daemon.lacks));
        lacks.extend(its.map(|what| format!("{}: {what}", disk.image())));
        all.push(disk.facts(said.and_then(|said| said.disks.into_iter().next())));
    }
    all.sort_by_key(|disk| disk.id);
    List {
        daemon: DaemonFacts {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_us: micros(disks.begun.elapsed()),
            lacks,
        },
        disks: all,
        limit_groups: disks.limit_group_facts(),
    }
}

/// Of a disk with a process of its own, as that says now.
pub(crate) fn facts_apart(disk: &Isolated) -> DiskFacts {
    let answer = disk.ask(json!({"command": "list"})).wait(TIMEOUT).ok();
    let said = answer.and_then(|answer| serde_json::from_value::<List>(answer).ok());
    disk.facts(said.and_then(|said| said.disks.into_iter().next()))
}

/// Whether one with a process of its own is paused, as that says now; `None` if it says nothing.
pub(super) fn paused_apart(disk: &Isolated) -> Option<bool> {
    let answer = disk.ask(json!({"command": "list"})).wait(TIMEOUT).ok()?;
    let said = serde_json::from_value::<List>(answer).ok()?;
    said.disks.first().map(|disk| disk.state == State::Paused)
}

/// Of all disks; of those with processes of their own, as these said last.
pub(crate) fn all_facts(disks: &Disks) -> Vec<DiskFacts> {
    let mut all: Vec<_> = disks.list().iter().map(|served| facts(served)).collect();
    all.extend(disks.isolated().iter().map(|disk| disk.facts(None)));
    all.sort_by_key(|disk| disk.id);
    all
}

pub(crate) fn facts(served: &Served) -> DiskFacts {
    let (disk, options) = (served.export.disk(), served.export.options());
    let geometry = disk.geometry();
    let serial = String::from_utf8_lossy(disk.serial());
    let limits = lock(&served.limits);
    DiskFacts {
        id: served.id,
        image: disk.name().into(),
        socket: served.socket.clone(),
        device: served.device.clone(),
        size: geometry.capacity,
        read_only: geometry.read_only,
        serial: serial.trim_end_matches('\0').into(),
        block_size: geometry.logical_block,
        queues: options.queues,
        queue_size: options.queue_size,
        workers: served.workers,
        engine: disk.engine().to_string(),
        engine_why: disk.engine_why().into(),
        cache: disk.cache().to_string(),
        cache_why: disk.cache_why().into(),
        path: path(disk),
        errors: (&**disk).into(),
        storage: storage(disk),
        state: state(served),
        held: disk.held().map(Into::into),
        qcow2: Qcow2Facts::of(disk, served.base.clone(), served.is_ephemeral()),
        job: lock(&served.job).as_ref().map(|job| job.facts()),
        connected: served.export.is_connected(),
        front_end: served.export.front_end_trouble(),
        connections: served.export.connections(),
        process: None,
        restarts: 0,
        limits: limits.own.numbers(),
        limit_group: limits.group.clone(),
        at_limit: disk.is_at_limit(),
    }
}

fn path(disk: &Disk) -> PathFacts {
    let path = disk.policy();
    PathFacts {
        kind: path.mode().name().into(),
        in_use: path.chosen().name().into(),
        switches: path.switches(),
        not_polled: disk.is_not_polled(),
    }
}

fn storage(disk: &Disk) -> StorageFacts {
    StorageFacts { server_away: disk.server_away(), flushes_fail: disk.flushes_fail() }
}

pub(super) fn state(served: &Served) -> State {
    if served.is_leaving() {
        State::Leaving
    } else if served.export.is_paused() {
        State::Paused
    } else if !served.export.is_clear() {
        State::Stuck
    } else if !served.export.is_locked() {
        State::Unlocked
    } else {
        State::Serving
    }
}

/// What is reported beside counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Detail {
    /// Spreads come with their buckets.
    pub(crate) buckets: bool,
    /// Histograms of few buckets instead of latencies.
    pub(crate) histograms: bool,
}

/// Of one disk and its workers, or of all.
pub(crate) fn stats(disks: &Disks, one: Option<AnyDisk>, detail: Detail) -> Stats {
    let Detail { buckets, histograms } = detail;
    let (list, isolated) = match one {
        None => (disks.list(), disks.isolated()),
        Some(AnyDisk::Here(one)) => (vec![one], Vec::new()),
        Some(AnyDisk::Apart(one)) => (Vec::new(), vec![one]),
    };
    let request = json!({"command": "stats", "buckets": buckets, "histograms": histograms});
    let apart: Vec<_> = isolated.iter().map(|disk| disk.ask(request.clone())).collect();
    let begun = Instant::now();
    let kinds: Vec<_> = list.iter().map(|served| served.export.disk().engine()).collect();
    let mut asked = disks.workers().ask_within(TIMEOUT, !histograms || buckets);
    asked.retain(|engine| kinds.contains(&engine.kind));
    let mut all: Vec<_> = list.iter().map(|served| disk_stats(served, &asked, detail)).collect();
    let mut workers: Vec<_> =
        asked.iter().flat_map(|engine| worker_stats(engine, detail)).collect();
    for (disk, answer) in isolated.iter().zip(apart) {
        // It waits that long for its own workers.
        let answer = answer.wait((TIMEOUT * 2).saturating_sub(begun.elapsed())).ok();
        let (one, its) = apart_stats(disk, answer);
        all.push(one);
        workers.extend(its);
    }
    all.sort_by_key(|disk| disk.id);
    Stats { uptime_us: micros(disks.begun.elapsed()), disks: all, workers }
}

/// What the process of a disk has said, with the numbers and names of this daemon.
fn apart_stats(disk: &Isolated, answer: Option<Value>) -> (DiskStatsOf, Vec<WorkerStatsOf>) {
    let said = answer.and_then(|answer| serde_json::from_value::<Stats>(answer).ok());
    let Some((mut one, mut workers)) =
        said.and_then(|said| Some((said.disks.into_iter().next()?, said.workers)))
    else {
        return (disk.silent_stats(), Vec::new());
    };
    let name = |worker: &str| format!("{}:{worker}", disk.id);
    one.id = disk.id;
    one.queues.iter_mut().for_each(|queue| queue.worker = name(&queue.worker));
    workers.iter_mut().for_each(|worker| worker.worker = name(&worker.worker));
    (one, workers)
}

fn disk_stats(served: &Served, asked: &[EngineAnswers], detail: Detail) -> DiskStatsOf {
    let Detail { buckets, histograms } = detail;
    let disk = served.export.disk();
    let workers = asked.iter().find(|engine| engine.kind == disk.engine());
    let report = served.export.report(workers.map_or(&[], |engine| &engine.workers));
    DiskStatsOf {
        id: served.id,
        image: disk.name().into(),
        size: disk.capacity(),
        engine: disk.engine().to_string(),
        cache: disk.cache().to_string(),
        path: path(disk),
        storage: storage(disk),
        state: state(served),
        connected: report.connected,
        front_end: report.front_end,
        connections: served.export.connections(),
        write_cache: report.writeback,
        in_flight: report.queues.iter().map(|queue| queue.stats.in_flight).sum(),
        overdue: report.queues.iter().map(|queue| queue.stats.overdue).sum(),
        held: disk.held().map(Into::into),
        counts: (&report.counts).into(),
        complete: report.complete,
        kicks: report.totals.kicks,
        lost_kicks: report.totals.lost_kicks,
        calls: report.totals.calls,
        recovered: report.recovered,
        durations: if histograms { durations(&report.totals) } else { Vec::new() },
        failures: failures(disk),
        latency: report.latency.as_ref().map(|latency| Latencies::of(latency, buckets)),
        queues: report.queues.iter().map(|q| queue_stats(q, disk.engine(), buckets)).collect(),
    }
}

fn durations(totals: &QueueTotals) -> Vec<DurationsOf> {
    let one = |(operation, durations): (&str, &Durations)| {
        let bounded = DURATION_BOUNDS_NS.iter().copied().zip(durations.buckets);
        let nanoseconds = Buckets {
            count: durations.buckets.iter().sum(),
            sum: durations.sum_ns,
            buckets: bounded.collect(),
        };
        DurationsOf { operation: operation.into(), nanoseconds }
    };
    OPERATIONS.into_iter().zip(&totals.durations).map(one).collect()
}

fn failures(disk: &Disk) -> Vec<FailuresOf> {
    let all = (0..Incidents::KINDS).filter_map(|kind| disk.incidents().all(kind));
    let one = |failures: Failures| FailuresOf {
        operation: failures.op.name().into(),
        count: failures.count,
        errno: (failures.errno != 0).then_some(failures.errno),
        error: failures.reason(),
        sector: failures.sector,
    };
    all.map(one).collect()
}

fn queue_stats(queue: &QueueReport, engine: EngineKind, buckets: bool) -> QueueStatsOf {
    let QueueReport { queue, worker, stats } = queue;
    QueueStatsOf {
        queue: *queue,
        worker: format!("{engine}/{worker}"),
        queue_size: stats.queue_size,
        in_flight: stats.in_flight,
        overdue: stats.overdue,
        held: stats.held,
        broken: stats.broken,
        kicks: stats.totals.kicks,
        calls: stats.totals.calls,
        counts: (&stats.counts).into(),
        latency: stats.latency.as_ref().map(|latency| Latencies::of(latency, buckets)),
    }
}

fn worker_stats(asked: &EngineAnswers, detail: Detail) -> Vec<WorkerStatsOf> {
    let Detail { buckets, histograms } = detail;
    let one = |(number, said): (usize, &Option<WorkerStats>)| {
        let (answers, said) = (said.is_some(), said.clone().unwrap_or_default());
        WorkerStatsOf {
            worker: format!("{}/{number}", asked.kind),
            engine: asked.kind.to_string(),
            answers,
            age_us: micros(said.age),
            cpu_us: micros(said.cpu),
            turns: said.turns,
            spins: said.spins,
            spin_us: micros(said.spun),
            sleeps: said.sleeps,
            queues: said.queues.len(),
            requests: said.requests,
            operations: said.engine.queued,
            syscalls: said.engine.syscalls,
            lost_calls: said.lost_calls,
            lost_kicks: said.lost_kicks,
            batches: Spread::new(&said.batches, buckets),
            harvests: Spread::new(&said.harvests, buckets),
            batch_buckets: histograms.then(|| in_few_buckets(&said.batches)),
            harvest_buckets: histograms.then(|| in_few_buckets(&said.harvests)),
        }
    };
    asked.workers.iter().enumerate().map(one).collect()
}

/// Powers of two.
fn in_few_buckets(spread: &Histogram<u64>) -> Buckets {
    let (mut below, mut buckets) = (1, Vec::new());
    for bound in (0..10).map(|power| 1u64 << power) {
        buckets.push((bound, spread.count_between(below, bound)));
        below = bound + 1;
    }
    let each = spread.iter_recorded();
    let sum = each.map(|step| step.value_iterated_to() * step.count_since_last_iteration()).sum();
    Buckets { count: spread.len(), sum, buckets }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
