//! The thread that kills: at moments of no choice, and at chosen points of the protocol.

use super::daemon::{Daemon, resize};
use super::faults::{Faults, SYNC};
use super::image;
use super::oracle::{SCRAMBLE, SECTOR};
use super::plan::{BYTES, End, Harm, Plan, Points, SECTORS, first_sector};
use super::shared::Shared;
use crate::Rng;
use anyhow::{Result, bail};
use hdrhistogram::Histogram;
use ringway_core::kill_points::Point;
use ringway_driver::Device;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

/// A blind kill comes within so many microseconds after traffic has resumed, or after the start.
const WITHIN_US: u64 = 30_000;
/// One blind kill in so many does not wait for traffic: it comes while the daemon starts or recovers.
const EARLY: u64 = 4;
/// One life in so many has its disk resized.
const RESIZED: u64 = 8;
/// A point that was not reached so long after traffic has resumed is given up.
const GIVEN_UP: Duration = Duration::from_millis(100);
/// How often to look whether a daemon has killed itself.
const POLL_EVERY: Duration = Duration::from_micros(200);

/// Points that are passed under traffic, and which time at most is the last.
const POINTS: [(Point, u64); 27] = [
    (Point::Locked, 1),
    (Point::Listening, 1),
    (Point::RecordTaken, 1),
    (Point::Judged, 2),
    (Point::Recovered, 2),
    (Point::QueueStarted, 2),
    (Point::Retaken, 40),
    (Point::Popped, 400),
    (Point::Marking, 400),
    (Point::Marked, 400),
    (Point::Submitting, 100),
    (Point::Submitted, 100),
    (Point::Completed, 400),
    (Point::Linking, 80),
    (Point::Linked, 80),
    (Point::Published, 80),
    (Point::Unmarking, 400),
    (Point::Unmarked, 80),
    (Point::Called, 40),
    (Point::Store, 4000),
    (Point::Grown, 1),
    (Point::Settled, 1),
    (Point::Resized, 1),
    (Point::CacheNoted, 1),
    (Point::CacheAnswered, 1),
    (Point::FlushFailing, 1),
    (Point::FlushFailed, 1),
];

/// As [`POINTS`], where requests are held.
const HOLD_POINTS: [(Point, u64); 10] = [
    (Point::Holding, 20),
    (Point::Held, 20),
    (Point::Retrying, 20),
    (Point::Releasing, 20),
    (Point::Judged, 2),
    (Point::Recovered, 2),
    (Point::Retaken, 40),
    (Point::Completed, 400),
    (Point::Linked, 80),
    (Point::Store, 4000),
];

/// How a daemon is to end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Strike {
    Blind { early: bool, delay: Duration, resized: bool },
    At(Point, u64),
}

impl Strike {
    pub(super) fn point(self) -> Option<(Point, u64)> {
        match self {
            Self::Blind { .. } => None,
            Self::At(point, count) => Some((point, count)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Killer<'a> {
    pub(super) plan: &'a Plan,
    pub(super) dir: &'a Path,
    pub(super) random: Rng,
    pub(super) shared: &'a Shared,
    pub(super) early: u64,
    pub(super) kills: u64,
    /// Kills that a point made.
    pub(super) at: BTreeMap<Point, u64>,
    /// Kills of daemons that did not come to their point.
    pub(super) missed: u64,
    /// Kills of a daemon together with its helper.
    pub(super) all: u64,
    pub(super) reattach: Histogram<u64>,
    /// When the last daemon was killed.
    pub(super) killed: Option<Instant>,
    /// What the guest has set its write cache to, if the daemon has acknowledged it.
    pub(super) cache: Option<bool>,
    pub(super) durable_lives: u64,
    pub(super) resizes: u64,
    pub(super) disconnects: u64,
    /// The device was stopped, and its daemon died before it was connected again.
    pub(super) stopped: bool,
}

impl Killer<'_> {
    /// Kills as often as planned; returns the last daemon once traffic has resumed. It dies at `last`.
    pub(super) fn work(
        &mut self,
        device: &mut Device,
        mut daemon: Daemon,
        last: Option<Point>,
    ) -> Result<Daemon> {
        let plan = self.plan;
        let (mut strike, mut forgotten) = (self.blind(1), false);
        for kill in 1..=plan.kills {
            if self.shared.fatal.load(Relaxed) {
                break;
            }
            let at = self.strike(device, daemon, strike)?;
            self.kills = kill;
            self.note();
            self.killed = Some(at);
            image::judge(plan, self.dir, kill)?;
            // From here on nothing is completed but by a successor.
            let life = self.shared.life.fetch_add(1, Relaxed) + 1;
            let harm = plan.harm.filter(|harm| match harm {
                // There has to be a failed flush to forget.
                Harm::Forgotten => !forgotten && self.shared.flush_failed.load(SeqCst),
                _ => kill == plan.kills.div_ceil(2),
            });
            forgotten |= harm == Some(Harm::Forgotten);
            self.spoil(harm)?;
            self.forget(harm)?;
            strike = self.next_strike(kill + 1);
            let dies = match last {
                _ if kill < plan.kills => strike.point(),
                last => last.map(|point| (point, 1)),
            };
            // The last one has no faults: it has to end well.
            let faults = Faults::in_life(plan, life, &mut self.random);
            if faults.as_ref().is_some_and(|faults| faults.contains(SYNC)) {
                self.shared.sync_fails.store(true, SeqCst);
            }
            daemon = Daemon::start(plan, self.dir, life, dies, faults)?;
            self.reconnect(device, &mut daemon)?;
            if harm == Some(Harm::Missing) {
                daemon.signal(libc::SIGSTOP)?;
            }
            if kill % 100 == 0 {
                (plan.progress)(plan, kill);
            }
        }
        self.resume(&mut daemon)?;
        self.note();
        Ok(daemon)
    }

    /// Connects a device that was stopped, as long as this daemon lives.
    fn reconnect(&mut self, device: &mut Device, daemon: &mut Daemon) -> Result<()> {
        let deadline = Instant::now() + self.plan.patience;
        while self.stopped && !daemon.has_died()? && Instant::now() < deadline {
            self.stopped = device.reconnect().is_err();
            std::thread::sleep(POLL_EVERY);
        }
        Ok(())
    }

    fn next_strike(&mut self, kill: u64) -> Strike {
        let at_point = match self.plan.points {
            Points::Never => false,
            Points::Half => self.random.below(2) == 0,
            Points::Always => true,
        };
        if !at_point {
            return self.blind(kill);
        }
        // The last ones are of what happens among other faults.
        let points = match self.plan {
            Plan { faults: true, .. } => &POINTS[..],
            Plan { hold: true, .. } => &HOLD_POINTS[..],
            // Such a disk keeps its size.
            Plan { qcow2: true, .. } => &POINTS[..20],
            _ => &POINTS[..23],
        };
        let (point, most) = self.random.pick(points);
        // Half of them soon: while the successor still carries out what was left.
        let most = if self.random.below(2) == 0 { most } else { most.div_ceil(20) };
        Strike::At(point, 1 + self.random.below(most))
    }

    fn blind(&mut self, kill: u64) -> Strike {
        Strike::Blind {
            early: kill > 1 && self.random.below(EARLY) == 0,
            delay: Duration::from_micros(self.random.below(WITHIN_US)),
            resized: self.random.below(RESIZED) == 0 && !self.plan.qcow2,
        }
    }

    /// Has a daemon end; says when it did.
    fn strike(
        &mut self,
        device: &mut Device,
        mut daemon: Daemon,
        strike: Strike,
    ) -> Result<Instant> {
        match strike {
            Strike::Blind { early, delay, resized } => {
                if !early {
                    self.resume(&mut daemon)?;
                    self.trouble(device);
                }
                let answer = (resized && !early).then(|| self.resize());
                std::thread::sleep(delay);
                // What is copied by others is whole: after a kill it waits for the next daemon.
                let copied = self.plan.qcow2 && image::copies(self.kills + 1);
                let end = if copied { End::Terminated } else { self.end() };
                let all = self.plan.qcow2 && end == End::Killed && self.random.below(4) == 0;
                self.all += u64::from(all);
                let ended = if all { daemon.kill_all() } else { daemon.end(end) };
                drop(answer);
                ended
            }
            Strike::At(point, _) => {
                if let Some(at) = self.dies_at(device, &mut daemon, point)? {
                    *self.at.entry(point).or_default() += 1;
                    return Ok(at);
                }
                self.missed += 1;
                daemon.end(End::Killed)
            }
        }
    }

    /// Waits until the daemon has killed itself; `None` if it does not come to the point.
    fn dies_at(
        &mut self,
        device: &mut Device,
        daemon: &mut Daemon,
        point: Point,
    ) -> Result<Option<Instant>> {
        let resizes = matches!(point, Point::Grown | Point::Settled | Point::Resized);
        let life = self.shared.life.load(Relaxed);
        let mut answers = Vec::new();
        let begun = Instant::now();
        loop {
            if daemon.has_died()? {
                return Ok(Some(Instant::now()));
            }
            let resumed = self.shared.wait_resumed(life, Duration::ZERO);
            let given_up = resumed.is_some_and(|at| at.elapsed() > GIVEN_UP);
            if given_up || self.shared.fatal.load(Relaxed) {
                return Ok(None);
            }
            if begun.elapsed() > self.plan.patience * 2 {
                bail!("traffic does not resume with daemon {life}, which was to die at {point:?}");
            }
            if resumed.is_some() && resizes && answers.len() < 16 {
                answers.push(self.resize());
            }
            if resumed.is_some() && matches!(point, Point::CacheNoted | Point::CacheAnswered) {
                self.switch_cache(device);
            }
            std::thread::sleep(POLL_EVERY);
        }
    }

    /// Gives the disk any size that holds what is written.
    fn resize(&mut self) -> Option<std::os::unix::net::UnixStream> {
        let asked = resize(self.dir, BYTES + (self.random.below(32) << 20));
        self.resizes += u64::from(asked.is_some());
        asked
    }

    /// Waits until traffic has resumed.
    pub(super) fn resume(&mut self, daemon: &mut Daemon) -> Result<()> {
        let life = self.shared.life.load(Relaxed);
        let deadline = Instant::now() + self.plan.patience * 2;
        while self.shared.wait_resumed(life, Duration::from_millis(100)).is_none() {
            if let Some(status) = daemon.0.try_wait()? {
                bail!("daemon {life} ended by itself: {status}");
            }
            if self.shared.fatal.load(Relaxed) || Instant::now() > deadline {
                // The queues have said, or will say, what they miss.
                bail!("traffic does not resume with daemon {life}");
            }
        }
        Ok(())
    }

    /// Notes whether traffic had resumed in this life, and how long that took.
    fn note(&mut self) {
        let life = self.shared.life.load(Relaxed);
        match (self.shared.wait_resumed(life, Duration::ZERO), self.killed.take()) {
            (None, _) => self.early += 1,
            (Some(_), None) => {}
            (Some(at), Some(killed)) => {
                let us = at.saturating_duration_since(killed).as_micros();
                // It grows as it has to.
                let _ = self.reattach.record(u64::try_from(us).unwrap_or(u64::MAX));
            }
        }
    }

    fn spoil(&self, harm: Option<Harm>) -> Result<()> {
        let byte = match harm {
            None | Some(Harm::Missing | Harm::Volatile | Harm::Forgotten) => return Ok(()),
            Some(Harm::Lost) => 0,
            Some(Harm::Replayed) => SCRAMBLE,
        };
        let image = File::options().write(true).open(self.dir.join("disk.img"))?;
        let bytes = vec![byte; SECTORS * SECTOR];
        Ok(image.write_all_at(&bytes, first_sector(0) * SECTOR as u64)?)
    }

    /// A successor that does not know what its predecessor knew.
    fn forget(&self, harm: Option<Harm>) -> Result<()> {
        match harm {
            Some(Harm::Forgotten) => {
                // The helper of the last daemon may be about to write it down.
                std::thread::sleep(Duration::from_millis(100));
                std::fs::remove_dir_all(self.dir.join("state"))?;
            }
            Some(Harm::Volatile) => {
                // The word of the region of what is in flight, wherever this process has it.
                for entry in std::fs::read_dir("/proc/self/fd")? {
                    let path = entry?.path();
                    let is_region = std::fs::read_link(&path).is_ok_and(|to| {
                        to.as_os_str().to_string_lossy().starts_with("/memfd:inflight")
                    });
                    if is_region {
                        if let Ok(file) = File::options().read(true).write(true).open(&path) {
                            let mut region = Vec::new();
                            (&file).read_to_end(&mut region)?;
                            let lines = region.chunks(64).zip(0..);
                            for (_, nth) in lines.filter(|(line, _)| line.starts_with(b"RWcache0"))
                            {
                                file.write_all_at(b"RWcache1", 64 * nth)?;
                            }
                        }
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}
