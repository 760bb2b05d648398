//! What `events` tells: one line for each thing that happens.

use super::lossy;
use super::{HeldFacts, Reloaded};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One line of `events`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Event {
    pub version: u32,
    /// Rises by one with each event of this daemon: a gap is what this reader has lost.
    pub number: u64,
    /// Microseconds since 1970.
    pub time_us: u64,
    /// The disk, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(flatten)]
    pub happened: Happened,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Happened {
    /// A disk is served from now on.
    Added,
    /// It is served no more.
    Removed {
        /// False if something was still in flight.
        drained: bool,
        /// As `remove` answers it.
        #[serde(default)]
        held: u64,
    },
    /// A front-end is there.
    Connected,
    /// It has gone.
    Disconnected {
        /// Why its connection was ended; `None` if it ended by itself.
        why: Option<String>,
    },
    /// A guest has broken a queue, which takes no more requests.
    Broken { queue: usize, why: String },
    /// Requests that a predecessor left in flight are carried out.
    Recovered { queue: usize, requests: usize },
    /// A disk has another size.
    Resized {
        /// Bytes before.
        from: u64,
        /// Bytes now.
        to: u64,
        /// As `resize` answers it.
        guest_notice: String,
    },
    /// What was written so far is a read-only image now.
    SnapshotTaken {
        #[serde(serialize_with = "lossy::path")]
        snapshot: PathBuf,
        /// For how long no requests were taken.
        blackout_us: u64,
    },
    /// Something that takes its time has begun with the image of a disk.
    JobStarted {
        /// As `list` has it: `flatten`, `commit`.
        job: String,
        /// Bytes of the disk.
        total_bytes: u64,
    },
    /// It is done.
    JobDone {
        job: String,
        copied_bytes: u64,
        /// For how long no requests were taken.
        blackout_us: u64,
    },
    /// It was told to stop, or the disk ends. What was copied stays.
    JobCancelled { job: String, copied_bytes: u64 },
    /// It could not go on. What was copied stays, and the disk is served as before.
    JobFailed { job: String, copied_bytes: u64, error: String },
    /// No requests are taken.
    Paused,
    /// They are again.
    Resumed,
    /// Requests travel in another way.
    PathChanged {
        /// `bio`, `request`.
        path: String,
    },
    /// The host's disk has failed operations; each kind once a minute at most.
    Failed {
        /// `read`, `write`, `flush`, `erase`.
        operation: String,
        /// How many since this was told last.
        count: u64,
        /// Of the latest one.
        errno: Option<i32>,
        error: String,
        sector: Option<u64>,
    },
    /// The NBD server of a disk, or of its base, is away. Short outages that follow each other are told as one.
    ServerAway { why: String },
    /// It is back.
    ServerBack,
    /// Requests that the host's disk has failed are held: their guest waits.
    Held {
        /// `None` where they were held for a moment only.
        held: Option<HeldFacts>,
    },
    /// None is held any more.
    Released,
    /// `limit` has changed those of the disk, or of the group if it is about no disk.
    LimitsChanged {
        /// As `limit` answers them.
        limits: BTreeMap<String, u64>,
        /// The group itself, or that of the disk.
        limit_group: Option<String>,
    },
    /// `limit` has taken away a group that no disk shared any more.
    LimitGroupRemoved {
        /// Its name.
        limit_group: String,
    },
    /// Requests wait for a limit of their disk or its group; once a minute at most.
    LimitReached,
    /// Requests are in flight for longer than the daemon's `overdue`.
    Overdue { requests: usize },
    /// None is any more.
    InTime,
    /// The process of a disk that has one of its own has ended.
    ProcessEnded { process: u32, why: String },
    /// Another one serves the disk.
    Restarted { process: u32 },
    /// The configuration file was read again.
    Reloaded(Reloaded),
    /// It was not: nothing has changed.
    ReloadFailed { why: String },
    /// A worker has failed: the daemon ends.
    WorkerFailed,
    /// The process that starts those of disks has ended: disks are served on, but one whose own process
    /// ends is not served again.
    SpawnerEnded,
    /// The process that opens files for the daemon has ended: disks are served on, but nothing that has a name is reached
    /// any more.
    HelperEnded,
    /// This reader was too slow.
    Lost {
        /// How many events it does not get.
        events: u64,
    },
}
