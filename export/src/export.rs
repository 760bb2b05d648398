//! A disk, offered to guests. `change.rs` changes it while they use it, `report.rs` tells how it is.

mod change;
mod drain;
mod front_end;
mod guest_notice;
mod hold;
mod image_lock;
mod limits;
mod lock_owner;
mod lock_state;
mod offered;
mod report;

pub use change::{ChangeError, Resized};
pub use guest_notice::GuestNotice;
pub use hold::Retried;
pub use image_lock::LockWait;
pub use lock_owner::Names;
pub use offered::{Counts, Offered};
pub use report::{ExportReport, QueueReport};

use crate::command::{Handle, QueueId, Stopped};
use crate::front_end::FrontEnd;
use crate::limit::WarningLimits;
use crate::notice::{Listener, Notice, Notices};
use crate::penalty::Penalty;
use crate::quarantine::Quarantine;
use crate::queue::QueueLifecycle;
use crate::session_inbox::SessionInbox;
use crate::totals::QueueTotals;
use ringway_core::mem::GuestMap;
use ringway_disk::{CacheMode, Disk, DiskStats};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a disk may take to finish what is in flight. After that the connection ends without an
/// answer: a promise that no more memory will be written could not be kept.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// How a disk is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Number of request queues.
    pub queues: u16,
    /// The largest ring a guest may set up, in descriptors: a power of two.
    pub queue_size: u16,
}

/// A disk, how it is offered, and the workers that serve it over one transport.
pub struct Export<Q> {
    disk: Arc<Disk>,
    options: ExportOptions,
    workers: Vec<Handle<Q>>,
    /// Where this disk's queue 0 goes; the others follow round robin.
    first_worker: usize,
    drain_max: Duration,
    /// Queues of connections that ended while the disk was stuck. They count until they have come back. What
    /// overlaps a write of theirs waits (`ringway_disk`, `late.rs`).
    fenced: Mutex<Vec<Fenced<Q>>>,
    /// A worker of its queues has failed, or a session in the middle of stopping them: nobody knows
    /// whether what they had in flight is over.
    failed: AtomicBool,
    /// The connections that are open; a daemon has at most one of each disk.
    inboxes: Mutex<Vec<Arc<SessionInbox>>>,
    /// What is known of the present front-end, or the last one.
    front_end: Mutex<FrontEnd>,
    /// Queues that run: index, worker, and their name there.
    running: Mutex<Vec<(usize, usize, QueueId)>>,
    /// Counts of queues that were stopped.
    gone: Mutex<(DiskStats, QueueTotals)>,
    /// Queues that run no more, and whose counts are not among those yet.
    stopping: AtomicUsize,
    /// Requests that predecessors had left in flight.
    recovered: AtomicU64,
    notices: Notices,
    /// Held requests that were left unanswered, as far as the log knows.
    left_reported: AtomicU64,
    /// Takes no requests.
    paused: AtomicBool,
    /// All sessions have stopped their queues because of that, or have ended.
    rests: AtomicBool,
    /// How often the size has changed.
    resizes: AtomicU64,
    /// Whether the guest's write cache is on. It outlives connections, because a front-end that
    /// reconnects does not say it again (QEMU) and its guest goes on in the old belief.
    writeback: AtomicBool,
    /// The lock of the image: queues run only while it is held.
    image_lock: lock_owner::ImageLock,
    /// Held by whoever changes something; one change at a time.
    changing: Arc<Mutex<()>>,
    limits: WarningLimits,
    /// For front-ends that hold up other disks.
    penalty: Mutex<Penalty>,
    /// What its front-ends have sent and is not touched.
    quarantine: Arc<Quarantine>,
}

/// A queue of a connection that has ended, with requests in flight.
struct Fenced<Q> {
    promise: Receiver<Stopped<Q>>,
    /// Where the disk reads and writes for it, if its peer has shared that.
    memory: Option<Arc<GuestMap>>,
}

/// What is behind it is counters and lists, whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl<Q: QueueLifecycle> Export<Q> {
    /// Offers `disk`; queue *n* is served by worker `first_worker + n`, round robin.
    ///
    /// # Panics
    /// If there is no worker.
    #[must_use]
    pub fn new(
        disk: Arc<Disk>,
        options: ExportOptions,
        workers: Vec<Handle<Q>>,
        first_worker: usize,
    ) -> Self {
        assert!(!workers.is_empty(), "an export needs a worker");
        Self {
            limits: WarningLimits::new(disk.name()),
            writeback: AtomicBool::new(disk.cache() != CacheMode::Writethrough),
            paused: AtomicBool::new(disk.was_paused()),
            rests: AtomicBool::new(disk.was_paused()),
            image_lock: lock_owner::ImageLock::of(&disk),
            disk,
            options,
            workers,
            first_worker,
            drain_max: DRAIN_MAX,
            fenced: Mutex::default(),
            failed: AtomicBool::new(false),
            inboxes: Mutex::default(),
            front_end: Mutex::default(),
            running: Mutex::default(),
            gone: Mutex::default(),
            left_reported: AtomicU64::new(0),
            stopping: AtomicUsize::new(0),
            recovered: AtomicU64::new(0),
            notices: Notices::default(),
            resizes: AtomicU64::new(0),
            penalty: Mutex::default(),
            changing: Arc::default(),
            quarantine: Arc::default(),
        }
    }

    /// With another limit to how long a disk may take to finish what is in flight when a queue is
    /// to stop.
    #[must_use]
    pub fn with_drain_max(mut self, drain_max: Duration) -> Self {
        self.drain_max = drain_max;
        self
    }

    /// How long a disk may take to finish what is in flight when a queue is to stop.
    #[must_use]
    pub fn drain_max(&self) -> Duration {
        self.drain_max
    }

    /// Keeps queues that a stuck disk holds, and that have the memory of a guest.
    pub fn fence(&self, promises: Vec<Receiver<Stopped<Q>>>, memory: Option<&Arc<GuestMap>>) {
        let fenced =
            promises.into_iter().map(|promise| Fenced { promise, memory: memory.cloned() });
        lock(&self.fenced).extend(fenced);
    }

    /// True while the disk may read or write this memory for a connection that has ended.
    #[must_use]
    pub fn uses(&self, memory: &GuestMap) -> bool {
        if self.is_clear() {
            return false;
        }
        let shares = |it: &Fenced<Q>| it.memory.as_ref().is_some_and(|its| its.shares(memory));
        lock(&self.fenced).iter().any(shares)
    }

    /// How often there is a line in the log about its clients and its guest.
    #[must_use]
    pub fn limits(&self) -> &WarningLimits {
        &self.limits
    }

    /// A front-end has held up other disks: in how long the next one may be served.
    pub fn offended(&self) -> Duration {
        lock(&self.penalty).offended(Instant::now())
    }

    /// How long whoever accepts front-ends has to wait before it takes the next one, because the last
    /// ones have held up other disks; zero as a rule.
    #[must_use]
    pub fn pause_before_next(&self) -> Duration {
        lock(&self.penalty).left(Instant::now())
    }

    /// Where descriptors of its front-ends go that may be neither used nor closed.
    #[must_use]
    pub fn quarantine(&self) -> &Arc<Quarantine> {
        &self.quarantine
    }

    /// Its front-ends have sent so much that may neither be used nor closed that no more are taken.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.quarantine.is_full()
    }

    /// What was in flight for this disk is known no more: it serves nobody from now on (hazard E5).
    pub fn fail(&self) {
        self.failed.store(true, SeqCst);
    }

    /// True if it serves nobody any more ([`Export::fail`]), or a worker has left something in flight
    /// ([`Disk::abandon`]).
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(SeqCst) || self.disk.is_abandoned()
    }

    /// True once all queues of earlier connections have come back; never again after a worker has
    /// failed with one of them.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        if self.has_failed() {
            return false;
        }
        let mut fenced = lock(&self.fenced);
        fenced.retain(|it| match it.promise.try_recv() {
            Err(TryRecvError::Empty) => true,
            Ok(queue) => {
                self.stopped(&queue);
                false
            }
            Err(TryRecvError::Disconnected) => false,
        });
        // A worker says so before its promises are broken.
        fenced.is_empty() && !self.has_failed()
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// How it is offered.
    #[must_use]
    pub fn options(&self) -> ExportOptions {
        self.options
    }

    /// The worker of queue `index`.
    #[must_use]
    pub fn worker(&self, index: usize) -> &Handle<Q> {
        &self.workers[self.worker_index(index)]
    }

    fn worker_index(&self, queue: usize) -> usize {
        (self.first_worker + queue) % self.workers.len()
    }

    /// A connection has begun.
    pub fn enter(&self, inbox: Arc<SessionInbox>) {
        lock(&self.inboxes).push(inbox);
    }

    /// It has ended.
    pub fn leave(&self, inbox: &Arc<SessionInbox>) {
        lock(&self.inboxes).retain(|other| !Arc::ptr_eq(other, inbox));
        inbox.close();
    }

    /// A queue runs.
    pub fn started(&self, queue: usize, id: QueueId) {
        lock(&self.running).push((queue, self.worker_index(queue), id));
    }

    /// It is to stop: it is reported no more.
    pub fn stopping(&self, queue: usize, id: QueueId) {
        let worker = self.worker_index(queue);
        let mut all = lock(&self.running);
        let before = all.len();
        all.retain(|&running| running != (queue, worker, id));
        self.stopping.fetch_add(before - all.len(), SeqCst);
    }

    /// It has stopped, with these counts.
    pub fn stopped(&self, queue: &Stopped<Q>) {
        let mut gone = lock(&self.gone);
        gone.0.add(&queue.stats);
        gone.1.add(&queue.totals);
        let _ = self.stopping.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        drop(gone);
        self.tell_of_left();
    }

    /// Has notices heard from now on; only the first listener hears any.
    pub fn on_notice(&self, listener: Listener) {
        self.notices.listen(listener);
    }

    /// A session has noticed something.
    pub fn notice(&self, notice: Notice) {
        if let Notice::Recovered { requests, .. } = &notice {
            self.recovered.fetch_add(*requests as u64, Relaxed);
        }
        self.notices.tell(notice);
    }

    /// Queue number `queue` begins with so many requests that a predecessor left in flight.
    pub fn notice_backlog(&self, queue: usize, requests: usize) {
        if requests == 0 {
            return;
        }
        self.notice(Notice::Recovered { queue, requests });
        if let Some(pass) = self.limits.recovered.pass() {
            tracing::info!(
                disk = self.disk.name(),
                queue,
                requests,
                suppressed = pass.suppressed,
                "carrying out what a predecessor left in flight"
            );
        }
    }

    /// True while no requests are to be taken.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        let rests = self.holds() && self.rests.load(SeqCst) && self.is_clear();
        rests && self.stopping.load(SeqCst) == 0
    }

    /// No queue is to start: it is paused, or about to be.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.paused.load(SeqCst)
    }

    /// How often the size has changed.
    #[must_use]
    pub fn resizes(&self) -> u64 {
        self.resizes.load(SeqCst)
    }

    /// Whether the guest's write cache is on.
    #[must_use]
    pub fn writeback(&self) -> bool {
        self.writeback.load(SeqCst)
    }

    /// The guest has switched its write cache.
    pub fn set_writeback(&self, on: bool) {
        self.writeback.store(on, SeqCst);
    }

    /// True if a guest may switch the write cache on.
    #[must_use]
    pub fn may_write_back(&self) -> bool {
        self.disk.cache() != CacheMode::Writethrough
    }
}
