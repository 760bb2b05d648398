//! What clients are told: disks, and what workers have counted.

use super::super::disks::{AnyDisk, Disks};
use super::super::isolate::Isolated;
use super::super::served::Served;
use super::super::stats::Asked;
use ringway_control::protocol::{
    DaemonFacts, DiskFacts, DiskStatsOf, FailuresOf, Latencies, List, PathFacts, QueueStatsOf,
    Spread, State, Stats, WorkerStatsOf,
};
use ringway_disk::{Disk, EngineKind, Failures, Incidents};
use ringway_export::{QueueReport, WorkerStats};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long workers may take to tell their counts. They do between two turns.
const PATIENCE: Duration = Duration::from_secs(1);

pub(super) fn list(disks: &Disks) -> List {
    let here = disks.list();
    let mut all: Vec<_> = here.iter().map(|served| facts(served)).collect();
    let isolated = disks.isolated();
    // Asked all at once: who does not answer keeps the others waiting once.
    let asked: Vec<_> = isolated.iter().map(|disk| disk.ask(json!({"command": "list"}))).collect();
    let begun = Instant::now();
    for (disk, answer) in isolated.iter().zip(asked) {
        let answer = answer.wait(PATIENCE.saturating_sub(begun.elapsed())).ok();
        let said = answer.and_then(|answer| serde_json::from_value::<List>(answer).ok());
        all.push(disk.facts(said.and_then(|said| said.disks.into_iter().next())));
    }
    all.sort_by_key(|disk| disk.id);
    List {
        daemon: DaemonFacts {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_us: micros(disks.begun.elapsed()),
        },
        disks: all,
    }
}

pub(crate) fn facts(served: &Served) -> DiskFacts {
    let (disk, options) = (served.export.disk(), served.export.options());
    let geometry = disk.geometry();
    let serial = String::from_utf8_lossy(disk.serial());
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
        state: state(served),
        held: disk.held().map(Into::into),
        connected: served.export.is_connected(),
        process: None,
        restarts: 0,
    }
}

fn path(disk: &Disk) -> PathFacts {
    let path = disk.policy();
    PathFacts {
        kind: path.mode().name().into(),
        in_use: path.chosen().name().into(),
        switches: path.switches(),
    }
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

/// Of one disk and its workers, or of all; spreads with their `buckets`, if asked for.
pub(super) fn stats(disks: &Disks, one: Option<AnyDisk>, buckets: bool) -> Stats {
    let (list, isolated) = match one {
        None => (disks.list(), disks.isolated()),
        Some(AnyDisk::Here(one)) => (vec![one], Vec::new()),
        Some(AnyDisk::Apart(one)) => (Vec::new(), vec![one]),
    };
    let request = json!({"command": "stats", "buckets": buckets});
    let apart: Vec<_> = isolated.iter().map(|disk| disk.ask(request.clone())).collect();
    let begun = Instant::now();
    let kinds: Vec<_> = list.iter().map(|served| served.export.disk().engine()).collect();
    let mut asked = disks.workers().ask_within(PATIENCE);
    asked.retain(|engine| kinds.contains(&engine.kind));
    let mut all: Vec<_> = list.iter().map(|served| disk_stats(served, &asked, buckets)).collect();
    let mut workers: Vec<_> =
        asked.iter().flat_map(|engine| worker_stats(engine, buckets)).collect();
    for (disk, answer) in isolated.iter().zip(apart) {
        // It waits that long for its own workers.
        let answer = answer.wait((PATIENCE * 2).saturating_sub(begun.elapsed())).ok();
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

fn disk_stats(served: &Served, asked: &[Asked], buckets: bool) -> DiskStatsOf {
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
        state: state(served),
        connected: report.connected,
        write_cache: report.writeback,
        in_flight: report.queues.iter().map(|queue| queue.stats.in_flight).sum(),
        overdue: report.queues.iter().map(|queue| queue.stats.overdue).sum(),
        held: disk.held().map(Into::into),
        counts: (&report.counts).into(),
        failures: failures(disk),
        latency: report.latency.as_ref().map(|latency| Latencies::of(latency, buckets)),
        queues: report.queues.iter().map(|q| queue_stats(q, disk.engine(), buckets)).collect(),
    }
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
        kicks: stats.kicks,
        calls: stats.calls,
        counts: (&stats.counts).into(),
        latency: stats.latency.as_ref().map(|latency| Latencies::of(latency, buckets)),
    }
}

fn worker_stats(asked: &Asked, buckets: bool) -> Vec<WorkerStatsOf> {
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
        }
    };
    asked.workers.iter().enumerate().map(one).collect()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
