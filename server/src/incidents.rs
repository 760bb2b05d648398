//! Says in the log what went wrong on disks: the errors of the host, and requests that go a costly
//! way. Once a minute for each disk and kind, with the count since. Also when a disk begins to hold
//! requests, and when none is held any more; and to readers of events when its NBD server has gone, and is back.
//!
//! Workers only write counters and ring: a daemon whose disks are well sleeps here for ever. Lines that
//! were left out of the log are counted here, too, if no line of their kind does.

use super::bell::event;
use super::events::Events;
use super::held::Spell;
use super::served::lock;
use ringway_control::protocol::Happened;
use ringway_disk::{Disk, Failures, Incidents as Record};
use ringway_export::{on_suppressed, report_suppressed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A kind of failure of one disk is reported once in this time.
const QUIET: Duration = Duration::from_secs(60);

/// A disk's costly requests are reported once in this time: they go on until the guest is changed.
const QUIET_DETOURS: Duration = Duration::from_secs(3600);

/// That a server has gone or is back is told this long after the last time: of shorter outages only what came of them.
const QUIET_SERVER: Duration = Duration::from_secs(6);

/// The thread that reports them. It ends when this is dropped.
pub(crate) struct Incidents {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    bell: Arc<OwnedFd>,
    stop: AtomicBool,
    disks: Mutex<Vec<Watched>>,
    events: Arc<Events>,
}

/// A disk that is listened to, and when each kind was reported last; the last place is for detours.
struct Watched {
    id: u64,
    disk: Weak<Disk>,
    reported: [Option<Instant>; Record::KINDS + 1],
    /// When it was reported last that the disk is at its limit.
    limit_reported: Option<Instant>,
    /// Its guest has reached it again since, and that was not told yet.
    limit_waits: bool,
    spell: Spell,
    /// Whether its server was away, and when, as far as that was told.
    away: (bool, Option<Instant>),
}

impl Incidents {
    /// Starts the thread.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn start(events: &Arc<Events>) -> io::Result<Self> {
        let (stop, disks) = (AtomicBool::new(false), Mutex::default());
        let (bell, events) = (Arc::new(event()?), Arc::clone(events));
        let shared = Arc::new(Shared { bell, stop, disks, events });
        let (all, bell) = (Arc::clone(&shared), Arc::clone(&shared.bell));
        on_suppressed(Arc::new(move || ring(&bell)));
        let thread = std::thread::Builder::new().name("incidents".into());
        let thread = Some(thread.spawn(move || all.run())?);
        Ok(Self { shared, thread })
    }

    /// Listens to one more disk.
    pub(super) fn listen(&self, id: u64, disk: &Arc<Disk>) {
        let reported = [None; Record::KINDS + 1];
        lock(&self.shared.disks).push(Watched {
            id,
            disk: Arc::downgrade(disk),
            reported,
            limit_reported: None,
            limit_waits: false,
            spell: Spell::default(),
            away: (false, None),
        });
        let bell = Arc::clone(&self.shared.bell);
        disk.on_server_away(move || ring(&bell));
        let bell = Arc::clone(&self.shared.bell);
        disk.incidents().on_incident(Box::new(move || ring(&bell)));
        if disk.server_away().is_some() {
            // Before anybody listened.
            ring(&self.shared.bell);
        }
    }

    /// Reports what is left to be reported of a disk, and forgets it.
    pub(super) fn forget(&self, disk: &Arc<Disk>) {
        self.shared.forget(disk, &mut |failures| tell(disk, failures));
    }
}

impl Drop for Incidents {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        ring(&self.shared.bell);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ring(bell: &OwnedFd) {
    // A full counter rings too.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

impl Shared {
    fn run(&self) {
        while !self.stop.load(SeqCst) {
            let now = Instant::now();
            let waits = [self.tell_what_is_due(now, &mut tell), report_suppressed(now, false)];
            let wait = waits.into_iter().flatten().min().map(|wait| Timespec {
                tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: wait.subsec_nanos().into(),
            });
            // Interrupted is as good as woken.
            let _ = poll(&mut [PollFd::new(&self.bell, PollFlags::IN)], wait.as_ref());
            let mut counter = [0; 8];
            let _ = rustix::io::read(&self.bell, &mut counter);
        }
    }

    /// Reports what may be reported now; in how long there is more, if there is.
    fn tell_what_is_due(
        &self,
        now: Instant,
        tell: &mut dyn FnMut(&Disk, &Failures),
    ) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let mut disks = lock(&self.disks);
        for watched in disks.iter_mut() {
            let Some(disk) = watched.disk.upgrade() else { continue };
            match watched.spell.changes(&disk, now) {
                Err(left) => next = Some(next.map_or(left, |next| next.min(left))),
                Ok((changes, times)) => {
                    for change in changes {
                        change.tell(&disk, times);
                        self.events.tell(Some((watched.id, disk.name())), change.happened());
                    }
                }
            }
            let why = disk.server_away();
            if why.is_some() != watched.away.0 {
                match left(watched.away.1, now, QUIET_SERVER) {
                    Some(left) => next = Some(next.map_or(left, |next| next.min(left))),
                    None => {
                        watched.away = (why.is_some(), Some(now));
                        let happened =
                            why.map_or(Happened::ServerBack, |why| Happened::ServerAway { why });
                        self.events.tell(Some((watched.id, disk.name())), happened);
                    }
                }
            }
            if disk.has_reached_limit() {
                match left(watched.limit_reported, now, QUIET) {
                    Some(left) => {
                        watched.limit_waits = true;
                        next = Some(next.map_or(left, |next| next.min(left)));
                    }
                    None => {
                        disk.take_limit_reached();
                        // It may be over, by a guest that rests or a limit that was lifted.
                        if !std::mem::take(&mut watched.limit_waits) || disk.is_at_limit() {
                            watched.limit_reported = Some(now);
                            tracing::info!(disk = disk.name(), "its guest has reached a limit");
                            let of = Some((watched.id, disk.name()));
                            self.events.tell(of, Happened::LimitReached);
                        }
                    }
                }
            }
            let record = disk.incidents();
            for kind in (0..Record::KINDS).filter(|&kind| record.has_unreported(kind)) {
                let reported = &mut watched.reported[kind];
                if let Some(left) = left(*reported, now, QUIET) {
                    next = Some(next.map_or(left, |next| next.min(left)));
                } else if let Some(failures) = record.take(kind) {
                    *reported = Some(now);
                    tell(&disk, &failures);
                    self.events.tell(Some((watched.id, disk.name())), happened(&failures));
                }
            }
            let reported = &mut watched.reported[Record::KINDS];
            if reported
                .is_none_or(|reported| now.saturating_duration_since(reported) >= QUIET_DETOURS)
                && tell_detours(&disk)
            {
                *reported = Some(now);
            }
        }
        next
    }

    fn forget(&self, disk: &Arc<Disk>, tell: &mut dyn FnMut(&Failures)) {
        lock(&self.disks).retain(|watched| watched.disk.as_ptr() != Arc::as_ptr(disk));
        let record = disk.incidents();
        let rest = (0..Record::KINDS).filter_map(|kind| record.take(kind));
        rest.for_each(|failures| tell(&failures));
    }
}

/// How long something that was `reported` is not reported again; `None` if it may be.
fn left(reported: Option<Instant>, now: Instant, quiet: Duration) -> Option<Duration> {
    let since = reported.map(|reported| now.saturating_duration_since(reported));
    since.filter(|&since| since < quiet).map(|since| quiet - since)
}

fn tell(disk: &Disk, failures: &Failures) {
    let Failures { op, errno, sector, count } = *failures;
    tracing::error!(
        disk = disk.name(),
        count,
        errno = (errno != 0).then_some(errno),
        sector,
        "{} failed: {}",
        op.name(),
        failures.reason()
    );
}

fn happened(failures: &Failures) -> Happened {
    Happened::Failed {
        operation: failures.op.name().into(),
        count: failures.count,
        errno: (failures.errno != 0).then_some(failures.errno),
        error: failures.reason(),
        sector: failures.sector,
    }
}

/// False if there is nothing to tell.
fn tell_detours(disk: &Disk) -> bool {
    let Some(detours) = disk.incidents().take_detours() else { return false };
    let alignment = disk.alignment();
    tracing::warn!(
        disk = disk.name(),
        detours = detours.count,
        requests = detours.requests,
        "many requests are bounced or split: the file takes memory aligned to {} and offsets aligned \
         to {} bytes; a guest with block size 4096, or --cache writeback, avoids the copies",
        alignment.memory,
        alignment.offset
    );
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_core::Op;
    use ringway_disk::{FailedOp, OpenOptions, Source, open};

    fn disk() -> Arc<Disk> {
        Arc::new(open(&OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 })).unwrap())
    }

    /// Reported at `seconds` after the beginning: disk, operation, error, sector and count of each; and in
    /// how many seconds there is more.
    type Logged = (Vec<(usize, FailedOp, i32, Option<u64>, u64)>, Option<u64>);

    struct Scene {
        incidents: Incidents,
        disks: [Arc<Disk>; 2],
        begun: Instant,
    }

    impl Scene {
        /// No thread tells anything here.
        fn new() -> Self {
            let (bell, stop) = (Arc::new(event().unwrap()), AtomicBool::new(false));
            let (disks, events) = Default::default();
            let shared = Arc::new(Shared { bell, stop, disks, events });
            let incidents = Incidents { shared, thread: None };
            let disks = [disk(), disk()];
            disks.iter().for_each(|disk| incidents.listen(0, disk));
            Self { incidents, disks, begun: Instant::now() }
        }

        fn at(&self, seconds: u64) -> Logged {
            let mut reported = Vec::new();
            let now = self.begun + Duration::from_secs(seconds);
            let next = self.incidents.shared.tell_what_is_due(now, &mut |disk, failures| {
                let same = |other: &Arc<Disk>| std::ptr::eq(Arc::as_ptr(other), disk);
                let Failures { op, errno, sector, count } = *failures;
                reported.push((
                    self.disks.iter().position(same).unwrap(),
                    op,
                    errno,
                    sector,
                    count,
                ));
            });
            (reported, next.map(|wait| wait.as_secs()))
        }

        /// How often the bell was rung since this was asked last.
        fn rung(&self) -> u64 {
            let mut counter = [0; 8];
            match rustix::io::read(&self.incidents.shared.bell, &mut counter) {
                Ok(_) => u64::from_ne_bytes(counter),
                Err(_) => 0,
            }
        }
    }

    #[test]
    fn e07_each_kind_is_told_at_once_and_then_once_a_minute_with_the_count() {
        use FailedOp::{Flush, Read, Write};
        let scene = Scene::new();
        let [one, other] = &scene.disks;
        let fail = |disk: &Disk, op, errno, sectors: std::ops::Range<u64>| {
            sectors.for_each(|sector| disk.incidents().failed(op, Some(errno), 512 * sector));
        };
        assert_eq!(scene.at(0), (vec![], None));
        fail(one, Op::Write, libc::ENOSPC, 8..72);
        assert_eq!(scene.rung(), 1);
        assert_eq!(scene.at(5), (vec![(0, Write, libc::ENOSPC, Some(71), 64)], None));
        fail(one, Op::Write, libc::ENOSPC, 80..90);
        assert_eq!(scene.rung(), 1, "or nobody would sleep until the minute is over");
        assert_eq!(scene.at(6), (vec![], Some(59)), "told in this minute");
        fail(one, Op::Write, libc::ENOSPC, 90..91);
        assert_eq!(scene.rung(), 0);
        // Another operation, another error, another disk: each has a line of its own.
        fail(one, Op::Read, libc::EIO, 7..8);
        fail(one, Op::Write, libc::EIO, 9..10);
        fail(other, Op::Flush, libc::EIO, 0..3);
        let reported = [
            (0, Read, libc::EIO, Some(7), 1),
            (0, Write, libc::EIO, Some(9), 1),
            (1, Flush, libc::EIO, None, 3),
        ];
        assert_eq!(scene.at(20), (reported.to_vec(), Some(45)));
        fail(other, Op::Flush, libc::EIO, 0..1);
        assert_eq!(scene.at(64), (vec![], Some(1)), "the next one is due, not the last one");
        let rest = (0, Write, libc::ENOSPC, Some(90), 11);
        assert_eq!(scene.at(65), (vec![rest], Some(15)));
        assert_eq!(scene.at(80), (vec![(1, Flush, libc::EIO, None, 1)], None));
        assert_eq!(scene.at(1000), (vec![], None), "nothing more has failed");
    }

    #[test]
    fn a_limit_that_nobody_is_at_any_more_is_not_told() {
        let scene = Scene::new();
        let reader = scene.incidents.shared.events.read().unwrap().unwrap();
        let reported = || reader.take().len();
        let one = &scene.disks[0];
        let second = 1_000_000_000;
        one.set_now(second);
        one.mark_at_limit();
        assert_eq!((scene.at(1), reported()), ((vec![], None), 1));
        one.set_now(2 * second);
        one.mark_at_limit();
        assert_eq!((scene.at(2), reported()), ((vec![], Some(59)), 0));
        one.set_now(61 * second);
        assert_eq!((scene.at(61), reported()), ((vec![], None), 0), "it is over for a minute");
        assert_eq!(scene.rung(), 2, "for the two of before");
        one.mark_at_limit();
        assert_eq!(scene.rung(), 1);
        // However late that is looked at.
        one.set_now(70 * second);
        assert_eq!((scene.at(70), reported()), ((vec![], None), 1), "told at once");
        // Still so when the minute is over.
        one.mark_at_limit();
        assert_eq!((scene.at(80), reported()), ((vec![], Some(50)), 0));
        one.set_now(130 * second);
        one.mark_at_limit();
        assert_eq!((scene.at(130), reported()), ((vec![], None), 1));
    }

    #[test]
    fn a_disk_at_its_limit_is_told_of_once_a_minute() {
        let scene = Scene::new();
        let events = Arc::clone(&scene.incidents.shared.events);
        let reader = events.read().unwrap().unwrap();
        let reported = || reader.take().len();
        let [one, other] = &scene.disks;
        (0..100).for_each(|_| one.mark_at_limit());
        assert_eq!((scene.rung(), scene.at(0), reported()), (1, (vec![], None), 1));
        (0..100).for_each(|_| one.mark_at_limit());
        assert_eq!((scene.rung(), scene.at(1), reported()), (1, (vec![], Some(59)), 0));
        other.mark_at_limit();
        assert_eq!((scene.at(30), reported()), ((vec![], Some(30)), 1), "another disk");
        assert_eq!((scene.at(60), reported()), ((vec![], None), 1), "what came meanwhile");
        assert_eq!((scene.at(500), reported()), ((vec![], None), 0), "it waits no more");
    }

    #[test]
    fn e07_what_was_not_told_is_told_at_a_disks_end() {
        let scene = Scene::new();
        let [one, other] = &scene.disks;
        let fail = |disk: &Disk| disk.incidents().failed(Op::Read, Some(libc::EIO), 512);
        fail(one);
        assert_eq!(scene.at(0).0.len(), 1);
        (0..4).for_each(|_| fail(one));
        fail(other);
        let mut reported = Vec::new();
        scene.incidents.shared.forget(one, &mut |failures| reported.push(failures.count));
        assert_eq!(reported, [4]);
        fail(one);
        assert_eq!(scene.at(60).0, [(1, FailedOp::Read, libc::EIO, Some(1), 1)], "it is forgotten");
    }
}
