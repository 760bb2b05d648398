//! Answers as a daemon gives them, for tests.

use super::figures::Sample;
use ringway_control::protocol::{
    Counts, DaemonFacts, DiskFacts, DiskStatsOf, ErrorFacts, Latencies, List, PathFacts,
    QueueStatsOf, Spread, State, Stats, StorageFacts, WorkerStatsOf,
};

/// What one answer counts. Disk 0, `/srv/vm1.img`, is in use by one queue; nobody uses disk 1,
/// `/srv/vm2.img`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixture {
    pub(super) pid: u32,
    pub(super) uptime_us: u64,
    /// Of 4096 bytes each, as the writes.
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) kicks: u64,
    /// Reads timed: 8 µs, and 2 ms.
    pub(super) fast: u64,
    pub(super) slow: u64,
    pub(super) cpu_us: u64,
    pub(super) spin_us: u64,
    pub(super) requests: u64,
    pub(super) syscalls: u64,
    /// Submissions of ten requests.
    pub(super) batches: u64,
    pub(super) state: State,
    pub(super) overdue: usize,
}

impl Default for Fixture {
    fn default() -> Self {
        Self {
            pid: 1,
            uptime_us: 0,
            reads: 0,
            writes: 0,
            kicks: 0,
            fast: 0,
            slow: 0,
            cpu_us: 0,
            spin_us: 0,
            requests: 0,
            syscalls: 0,
            batches: 0,
            state: State::Serving,
            overdue: 0,
        }
    }
}

fn spread(pairs: &[(u64, u64)]) -> Spread {
    let pairs = pairs.iter().copied().filter(|(_, count)| *count > 0).collect();
    Spread { buckets: Some(pairs), ..Spread::default() }
}

fn worker(case: &Fixture) -> WorkerStatsOf {
    WorkerStatsOf {
        worker: "io_uring/0".into(),
        engine: "io_uring".into(),
        answers: true,
        age_us: case.uptime_us,
        cpu_us: case.cpu_us,
        spin_us: case.spin_us,
        queues: 1,
        requests: case.requests,
        operations: case.requests,
        syscalls: case.syscalls,
        batches: spread(&[(10, case.batches)]),
        harvests: spread(&[]),
        ..WorkerStatsOf::default()
    }
}

/// The answer.
pub(super) fn sample(case: &Fixture) -> Sample {
    let counts = Counts {
        reads: case.reads,
        read_bytes: case.reads * 4096,
        writes: case.writes,
        written_bytes: case.writes * 4096,
        ..Counts::default()
    };
    let latency = || Latencies {
        reads: spread(&[(8191, case.fast), (2_000_000, case.slow)]),
        writes: spread(&[]),
        others: spread(&[]),
    };
    let queue = QueueStatsOf {
        queue: 0,
        worker: "io_uring/0".into(),
        queue_size: 128,
        in_flight: 32,
        overdue: case.overdue,
        held: 0,
        broken: false,
        kicks: case.kicks,
        calls: 0,
        counts: counts.clone(),
        latency: Some(latency()),
    };
    let path =
        PathFacts { kind: "auto".into(), in_use: "bio".into(), switches: 0, not_polled: false };
    let facts = |id: u64| DiskFacts {
        id,
        image: format!("/srv/vm{}.img", id + 1),
        socket: Some(format!("/run/vm{}.sock", id + 1).into()),
        device: None,
        size: 10 << 30,
        read_only: false,
        serial: String::new(),
        block_size: 512,
        queues: 1,
        queue_size: 128,
        workers: 1,
        engine: "io_uring".into(),
        engine_why: "fastest".into(),
        cache: "none".into(),
        cache_why: "O_DIRECT works".into(),
        path: path.clone(),
        errors: ErrorFacts::default(),
        storage: StorageFacts::default(),
        state: State::Serving,
        held: None,
        qcow2: None,
        job: None,
        connected: id == 0,
        front_end: None,
        connections: 0,
        process: None,
        restarts: 0,
        limits: (id == 0).then(|| ("iops".into(), 500)).into_iter().collect(),
        limit_group: None,
        at_limit: false,
    };
    let disk = |id: u64| DiskStatsOf {
        id,
        image: facts(id).image,
        size: 10 << 30,
        engine: "io_uring".into(),
        cache: "none".into(),
        path: path.clone(),
        state: if id == 0 { case.state } else { State::Serving },
        connected: id == 0,
        write_cache: true,
        in_flight: if id == 0 { 32 } else { 0 },
        overdue: if id == 0 { case.overdue } else { 0 },
        held: None,
        counts: if id == 0 { counts.clone() } else { Counts::default() },
        latency: (id == 0).then(latency),
        ..DiskStatsOf::default()
    };
    let (version, pid, uptime_us, lacks) = ("0.1.0".into(), case.pid, case.uptime_us, Vec::new());
    let daemon = DaemonFacts { version, pid, uptime_us, lacks };
    Sample {
        list: List { daemon, disks: vec![facts(0), facts(1)], limit_groups: Vec::new() },
        stats: Stats {
            uptime_us: case.uptime_us,
            disks: vec![DiskStatsOf { queues: vec![queue], ..disk(0) }, disk(1)],
            workers: vec![worker(case)],
        },
    }
}
