//! The words of the control socket: what `ringway serve --control` answers and `ringway ctl` asks.
//!
//! One JSON object per line and direction; `docs/control.md` is the contract. Names of fields are
//! keys of the JSON and stay as they are; new ones may come.

#![allow(missing_docs, reason = "docs/control.md says what each field means, for all programs")]

mod events;
mod held;
mod jobs;
mod limits;
mod lossy;
mod qcow2;
mod reload;
mod removed;
mod spread;

pub use events::{Event, Happened};
pub use held::{ErrorFacts, HeldFacts, Retried};
pub use jobs::{JobFacts, JobOf, JobState};
pub use limits::{LimitGroupFacts, Limited};
pub use qcow2::{Qcow2Facts, Snapshotted};
pub use reload::{FailedOf, LeftOf, Reloaded};
pub use removed::Removed;
pub use spread::{Buckets, DurationsOf, Latencies, Spread};

use ringway_disk::DiskStats;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The version of the contract. It goes up when a program that knew the last one would go wrong.
pub const VERSION: u32 = 1;

/// The longest line that is read, in bytes: a request, or an answer about some thousand queues.
pub const REQUEST_MAX: u64 = 64 << 10;
/// As [`REQUEST_MAX`], of an answer.
pub const ANSWER_MAX: u64 = 64 << 20;

/// An answer: `answer` if `ok`, else `error`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Reply {
    pub version: u32,
    /// What the request had there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Value>,
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
}

/// Why a request was not carried out.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Problem {
    /// For programs.
    pub kind: ProblemKind,
    /// For people: what was wrong, where, what to do.
    pub message: String,
}

/// Kinds of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// The line is no request.
    Malformed,
    /// The request is of a version that this daemon does not speak.
    Version,
    /// There is no such command.
    UnknownCommand,
    /// No disk has this number, image or socket.
    NoSuchDisk,
    /// No limit group has this name.
    NoSuchGroup,
    /// Another change of the disk is under way.
    Busy,
    /// It would lose data, and the request does not say that this is meant.
    NotMeant,
    /// It cannot be done.
    Failed,
}

impl Problem {
    pub fn new(kind: ProblemKind, message: impl ToString) -> Self {
        Self { kind, message: message.to_string() }
    }
}

/// `list`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct List {
    pub daemon: DaemonFacts,
    pub disks: Vec<DiskFacts>,
    #[serde(default)]
    pub limit_groups: Vec<LimitGroupFacts>,
}

/// The daemon.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DaemonFacts {
    /// Of the program.
    pub version: String,
    pub pid: u32,
    pub uptime_us: u64,
    /// What does not work any more, because a process of the daemon's own has ended; and what could not be served at
    /// the start, because its file system hung.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

/// A disk, as it is offered.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiskFacts {
    /// Never given to another disk of this daemon.
    pub id: u64,
    pub image: String,
    #[serde(default, serialize_with = "lossy::maybe")]
    pub socket: Option<PathBuf>,
    /// Its folder in xenstore, if a Xen host's toolstack has attached it.
    #[serde(default)]
    pub device: Option<String>,
    pub size: u64,
    pub read_only: bool,
    pub serial: String,
    pub block_size: u32,
    pub queues: u16,
    pub queue_size: u16,
    pub workers: usize,
    pub engine: String,
    pub engine_why: String,
    pub cache: String,
    pub cache_why: String,
    #[serde(default)]
    pub path: PathFacts,
    /// What becomes of requests that the disk fails.
    #[serde(default)]
    pub errors: ErrorFacts,
    #[serde(default)]
    pub storage: StorageFacts,
    pub state: State,
    /// Requests that the disk has failed, and that wait to be tried again.
    #[serde(default)]
    pub held: Option<HeldFacts>,
    #[serde(default)]
    pub qcow2: Option<Qcow2Facts>,
    /// What is under way with its image, or was last.
    #[serde(default)]
    pub job: Option<JobFacts>,
    /// A front-end is there.
    pub connected: bool,
    /// What is wrong with it, as far as the daemon can see, if its queues do not run.
    #[serde(default)]
    pub front_end: Option<String>,
    /// How many front-ends have connected so far.
    #[serde(default)]
    pub connections: u64,
    /// The process that serves it, if it has one of its own.
    #[serde(default)]
    pub process: Option<u32>,
    /// How often that one has been started again.
    #[serde(default)]
    pub restarts: u64,
    /// Its own, by their words.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    /// The group that it shares limits with.
    #[serde(default)]
    pub limit_group: Option<String>,
    /// Requests have waited for a limit within the last second.
    #[serde(default)]
    pub at_limit: bool,
}

/// How a disk's requests travel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PathFacts {
    /// What was asked for: `bio`, `request`, `auto`.
    pub kind: String,
    /// What is in use: `bio`, `request`.
    pub in_use: String,
    /// How often that has changed.
    pub switches: u64,
    /// Completions were to be polled for, and the device has no queues for that.
    #[serde(default)]
    pub not_polled: bool,
}

impl PathFacts {
    /// `bio`, or `auto: bio` if it was chosen.
    pub fn words(&self) -> String {
        let chosen = match self.kind == self.in_use {
            true => self.kind.clone(),
            false => format!("{}: {}", self.kind, self.in_use),
        };
        chosen + if self.not_polled { ", not polled" } else { "" }
    }
}

/// What is wrong with what holds a disk's data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StorageFacts {
    /// Why its NBD server is away, if it is.
    pub server_away: Option<String>,
    /// Flushes fail, as one has before.
    pub flushes_fail: bool,
}

impl StorageFacts {
    /// What somebody should look at.
    pub fn words(&self) -> Vec<String> {
        let away = self.server_away.as_ref();
        let away =
            away.map(|why| format!("its NBD server is away, and requests wait for it: {why}"));
        let fail = self.flushes_fail.then(|| {
            "its flushes fail, as one has before or answered writes may be lost: the log says which, and what \
             ends that"
                .to_owned()
        });
        away.into_iter().chain(fail).collect()
    }
}

/// What a disk does with requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Takes them.
    #[default]
    Serving,
    /// Lets them wait.
    Paused,
    /// Requests of an ended connection are in flight: no queue starts before they are over.
    Stuck,
    /// Its image is not locked by this daemon: a migration brings its guest here, or has taken it away.
    Unlocked,
    /// It is being removed.
    Leaving,
    /// Its process has ended and is being started again.
    Restarting,
}

impl State {
    /// All there are.
    pub const ALL: [Self; 6] =
        [Self::Serving, Self::Paused, Self::Stuck, Self::Unlocked, Self::Leaving, Self::Restarting];

    pub fn word(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Paused => "paused",
            Self::Stuck => "stuck",
            Self::Unlocked => "unlocked",
            Self::Leaving => "leaving",
            Self::Restarting => "restarting",
        }
    }
}

/// `stats`. All counts begin with the daemon or the disk and only grow: two answers and the
/// difference of their `uptime_us` make rates.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Stats {
    pub uptime_us: u64,
    pub disks: Vec<DiskStatsOf>,
    pub workers: Vec<WorkerStatsOf>,
}

/// One disk.
#[derive(Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiskStatsOf {
    pub id: u64,
    pub image: String,
    pub size: u64,
    pub engine: String,
    #[serde(default)]
    pub cache: String,
    #[serde(default)]
    pub path: PathFacts,
    #[serde(default)]
    pub storage: StorageFacts,
    pub state: State,
    pub connected: bool,
    /// What is wrong with its front-end, as far as the daemon can see, if its queues do not run or nothing has come
    /// through them.
    #[serde(default)]
    pub front_end: Option<String>,
    /// How many front-ends have connected so far.
    #[serde(default)]
    pub connections: u64,
    /// The guest's write cache is on.
    pub write_cache: bool,
    /// Requests begun and not answered.
    pub in_flight: usize,
    /// Those of them that have been under way for longer than the daemon's `overdue`.
    #[serde(default)]
    pub overdue: usize,
    /// Those of them that wait because the disk has failed them.
    #[serde(default)]
    pub held: Option<HeldFacts>,
    /// All queues since the disk was added.
    pub counts: Counts,
    /// False while a queue is being stopped, or its worker does not answer: its part of the counts is
    /// missing.
    #[serde(default = "yes")]
    pub complete: bool,
    /// Times its guest has called, since it was added.
    #[serde(default)]
    pub kicks: u64,
    /// Kicks that never came although requests did.
    #[serde(default)]
    pub lost_kicks: u64,
    /// Times its guest was called.
    #[serde(default)]
    pub calls: u64,
    /// Requests that a predecessor had left in flight and that were carried out.
    #[serde(default)]
    pub recovered: u64,
    /// If histograms were asked for: how long timed requests took, since it was added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub durations: Vec<DurationsOf>,
    /// What the host's disk has failed since it was added.
    #[serde(default)]
    pub failures: Vec<FailuresOf>,
    /// Of the queues that run.
    pub latency: Option<Latencies>,
    /// The queues that run.
    pub queues: Vec<QueueStatsOf>,
}

fn yes() -> bool {
    true
}

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailuresOf {
    /// `read`, `write`, `flush`, `erase`.
    pub operation: String,
    pub count: u64,
    /// Of the latest one; `None` if the host told none.
    pub errno: Option<i32>,
    /// The same in words.
    pub error: String,
    /// Where that was; `None` of flushes.
    pub sector: Option<u64>,
}

/// One queue, since it was started.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueStatsOf {
    pub queue: usize,
    pub worker: String,
    pub queue_size: u16,
    pub in_flight: usize,
    #[serde(default)]
    pub overdue: usize,
    #[serde(default)]
    pub held: usize,
    /// Its guest has broken it; it takes no requests.
    pub broken: bool,
    /// Times its guest has called.
    #[serde(default)]
    pub kicks: u64,
    /// Times its guest was called.
    #[serde(default)]
    pub calls: u64,
    pub counts: Counts,
    pub latency: Option<Latencies>,
}

/// One worker.
#[derive(Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerStatsOf {
    /// `io_uring/0`
    pub worker: String,
    pub engine: String,
    /// False if it did not answer in time; all else is 0 then.
    pub answers: bool,
    pub age_us: u64,
    /// CPU time, spinning included.
    pub cpu_us: u64,
    /// Rounds of its loop.
    pub turns: u64,
    /// Rounds that found nothing and were followed by another one at once.
    pub spins: u64,
    /// The part of `cpu_us` that went to those.
    #[serde(default)]
    pub spin_us: u64,
    pub sleeps: u64,
    pub queues: usize,
    /// Chains taken from rings.
    pub requests: u64,
    /// Operations given to the engine.
    #[serde(default)]
    pub operations: u64,
    pub syscalls: u64,
    pub lost_calls: u64,
    /// Kicks that never came although requests did.
    #[serde(default)]
    pub lost_kicks: u64,
    /// Requests per submission.
    pub batches: Spread,
    /// Completions per harvest.
    pub harvests: Spread,
    /// If histograms were asked for: the same in few buckets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_buckets: Option<Buckets>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harvest_buckets: Option<Buckets>,
}

/// Counts of requests; sizes in bytes.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    pub flushes: u64,
    /// Of writes that had to be durable when they were done.
    #[serde(default)]
    pub durable_bytes: u64,
    /// Of the file.
    #[serde(default)]
    pub syncs: u64,
    pub erases: u64,
    pub errors: u64,
    /// The guest's mistakes among `errors`.
    #[serde(default)]
    pub refused: u64,
    /// The disk's failures among `errors`.
    #[serde(default)]
    pub failed: u64,
    pub bounced: u64,
    pub split: u64,
    pub continued: u64,
    #[serde(default)]
    pub plugged: u64,
    #[serde(default)]
    pub merged: u64,
    #[serde(default)]
    pub merged_split: u64,
    #[serde(default)]
    pub deadlines: u64,
    /// Requests that were found under way for longer than the daemon's `overdue`.
    #[serde(default)]
    pub overdue: u64,
    /// Requests that were held because the disk had failed them.
    #[serde(default)]
    pub held: u64,
    /// Times that requests were taken from a ring, one or more of them at a time.
    #[serde(default)]
    pub batches: u64,
    /// Times that requests of a queue began to wait for a limit.
    #[serde(default)]
    pub throttled: u64,
    /// Time in which requests waited for a limit, of all queues together.
    #[serde(default)]
    pub throttled_us: u64,
}

impl From<&DiskStats> for Counts {
    fn from(stats: &DiskStats) -> Self {
        Self {
            reads: stats.reads,
            read_bytes: stats.read_bytes,
            writes: stats.writes,
            written_bytes: stats.written_bytes,
            flushes: stats.flushes,
            durable_bytes: stats.durable_bytes,
            syncs: stats.syncs,
            erases: stats.erases,
            errors: stats.errors,
            refused: stats.refused,
            failed: stats.failed(),
            bounced: stats.bounced,
            split: stats.split,
            continued: stats.continued,
            plugged: stats.path.plugged,
            merged: stats.path.merged,
            merged_split: stats.path.split,
            deadlines: stats.path.expired,
            overdue: stats.overdue,
            held: stats.held,
            batches: stats.batches,
            throttled: stats.throttled,
            throttled_us: stats.throttled_ns / 1000,
        }
    }
}

/// `resize`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ResizedTo {
    pub id: u64,
    pub image: String,
    /// Bytes before.
    pub from: u64,
    /// Bytes now.
    pub to: u64,
    /// `yes`, `nobody-there`, `not-listening`, `undelivered`, `later`.
    pub guest_notice: String,
}

/// `drain`, `pause`, `resume`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Done {
    pub id: u64,
    pub image: String,
    pub state: State,
    pub took_us: u64,
}
