//! What a campaign is to do.

use super::oracle::SECTOR;
use ringway_driver::SchedulerMode;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const QUEUES: u16 = 2;
/// Bytes of the image.
pub(super) const BYTES: u64 = 64 << 20;
/// Sectors that each queue uses, few so that each is written often.
pub(super) const SECTORS: usize = 2048;
/// What each daemon begins with, so that what its predecessor left in flight meets a limit, too. A
/// tenth of a second's worth passes at once, and what is in flight at a time is more.
pub(super) const FIRST_LIMITS: [&str; 4] = ["--iops", "200", "--bps", "8M"];
/// How a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Terminated,
}

/// How many of the kills strike at a named point of the protocol
/// ([`kill_points`](ringway_core::kill_points)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Points {
    /// None: any daemon will do.
    Never,
    /// Every other one.
    Half,
    /// All but the first.
    Always,
}

impl Points {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Half => "half",
            Self::Always => "always",
        }
    }
}

/// A mistake made on purpose half-way, which has to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// The sectors of one queue are what they were in the beginning.
    Lost,
    /// The sectors of one queue are what memory given back holds.
    Replayed,
    /// A successor is stopped, and answers nothing.
    Missing,
    /// A successor takes the write cache to be on whatever it was.
    Volatile,
    /// A successor does not know that a flush has failed.
    Forgotten,
}

impl Harm {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Lost, Self::Replayed, Self::Missing, Self::Volatile, Self::Forgotten];
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program.
    pub ringway: PathBuf,
    pub engine: String,
    pub cache: String,
    pub packed: bool,
    /// Of the front-end.
    pub path: SchedulerMode,
    pub kills: u64,
    pub end: End,
    pub points: Points,
    /// Requests in flight on each of two queues.
    pub depth: u16,
    pub seed: u64,
    /// Where image and socket are put, in a folder of their own [temporary files' place].
    pub dir: Option<PathBuf>,
    /// How long anything may take.
    pub patience: Duration,
    pub harm: Option<Harm>,
    /// Other faults between kills: see `faults.rs`. Needs points.
    pub faults: bool,
    /// The disk is full now and then, and writes that find no space are held. Needs points.
    pub hold: bool,
    /// The disk has limits, which change all the time.
    pub limits: bool,
    /// The image is qcow2, judged after each kill by `ringway check`.
    pub qcow2: bool,
    /// And by `qemu-img check`.
    pub qemu: bool,
    /// Called now and then with the number of kills so far.
    pub progress: fn(&Plan, u64),
}

impl Plan {
    /// The name of the ring's format.
    pub fn ring(&self) -> &'static str {
        if self.packed { "packed" } else { "split" }
    }
}

/// The command that repeats it: the same requests and delays; where exactly a kill strikes depends
/// on the machine too.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, engine, cache, depth, seed, points, .. } = self;
        write!(
            f,
            "cargo run --release -p xtask -- kill --count {kills} --engine {engine} --ring {} \
             --cache {cache} --depth {depth} --seed {seed} --points {}",
            self.ring(),
            points.name()
        )?;
        if self.path != SchedulerMode::Bio {
            write!(f, " --path {}", self.path)?;
        }
        if self.faults {
            write!(f, " --faults")?;
        }
        if self.hold {
            write!(f, " --hold")?;
        }
        if self.limits {
            write!(f, " --limits")?;
        }
        if self.qcow2 {
            write!(f, " --format qcow2")?;
        }
        self.harm.map_or(Ok(()), |harm| write!(f, " --harm {harm:?}"))
    }
}

/// Where the sectors of a queue begin.
pub(super) const fn first_sector(queue: u64) -> u64 {
    queue * (BYTES / QUEUES as u64 / SECTOR as u64)
}
