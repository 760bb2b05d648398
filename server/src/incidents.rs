//! Says in the log what went wrong on disks: the errors of the host, and requests that go a costly
//! way. Once a minute for each disk and kind, with the count since.
//!
//! Workers only write counters and ring: a daemon whose disks are well sleeps here for ever. Lines that
//! were left out of the log are told of here, too, if no line of their kind does.

use super::bell::event;
use super::served::lock;
use ringway_disk::{Disk, Failures, Incidents as Record};
use ringway_export::{on_suppressed, tell_suppressed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A kind of failure of one disk is told once in this time.
const QUIET: Duration = Duration::from_secs(60);

/// A disk's costly requests are told once in this time: they go on until the guest is changed.
const QUIET_DETOURS: Duration = Duration::from_secs(3600);

/// The thread that tells. It ends when this is dropped.
pub(crate) struct Incidents {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    bell: Arc<OwnedFd>,
    stop: AtomicBool,
    disks: Mutex<Vec<Watched>>,
}

/// A disk that is listened to, and when each kind was told last; the last place is for detours.
struct Watched {
    disk: Weak<Disk>,
    told: [Option<Instant>; Record::KINDS + 1],
}

impl Incidents {
    /// Starts the thread.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn start() -> io::Result<Self> {
        let (stop, disks) = (AtomicBool::new(false), Mutex::default());
        let shared = Arc::new(Shared { bell: Arc::new(event()?), stop, disks });
        let (all, bell) = (Arc::clone(&shared), Arc::clone(&shared.bell));
        on_suppressed(Arc::new(move || ring(&bell)));
        let thread = std::thread::Builder::new().name("incidents".into());
        let thread = Some(thread.spawn(move || all.run())?);
        Ok(Self { shared, thread })
    }

    /// Listens to one more disk.
    pub(super) fn listen(&self, disk: &Arc<Disk>) {
        let told = [None; Record::KINDS + 1];
        lock(&self.shared.disks).push(Watched { disk: Arc::downgrade(disk), told });
        let bell = Arc::clone(&self.shared.bell);
        disk.incidents().on_incident(Box::new(move || ring(&bell)));
    }

    /// Tells what is left to be told of a disk, and forgets it.
    pub(super) fn forget(&self, disk: &Arc<Disk>) {
        lock(&self.shared.disks).retain(|watched| watched.disk.as_ptr() != Arc::as_ptr(disk));
        let record = disk.incidents();
        let rest = (0..Record::KINDS).filter_map(|kind| record.take(kind));
        rest.for_each(|failures| tell(disk, &failures));
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
            let waits = [self.tell_what_is_due(now), tell_suppressed(now, false)];
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

    /// Tells what may be told now; in how long there is more, if there is.
    fn tell_what_is_due(&self, now: Instant) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let mut disks = lock(&self.disks);
        for watched in disks.iter_mut() {
            let Some(disk) = watched.disk.upgrade() else { continue };
            let record = disk.incidents();
            for kind in (0..Record::KINDS).filter(|&kind| record.has_untold(kind)) {
                let told = &mut watched.told[kind];
                let since = told.map(|told| now.saturating_duration_since(told));
                if let Some(since) = since.filter(|&since| since < QUIET) {
                    let left = QUIET - since;
                    next = Some(next.map_or(left, |next| next.min(left)));
                } else if let Some(failures) = record.take(kind) {
                    *told = Some(now);
                    tell(&disk, &failures);
                }
            }
            let told = &mut watched.told[Record::KINDS];
            if told.is_none_or(|told| now.saturating_duration_since(told) >= QUIET_DETOURS)
                && tell_detours(&disk)
            {
                *told = Some(now);
            }
        }
        next
    }
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
