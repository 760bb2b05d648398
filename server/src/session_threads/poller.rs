//! The thread that waits for all tasks.

use super::shared::{HELD_UP, Shared, Task};
use crate::survive::survive;
use ringway_aio::bells::Bells;
use ringway_aio::{BellId, Counters};
use ringway_core::panic_point;
use ringway_export::WarningLimit;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to leave the host alone when it refuses to wait for a descriptor.
const BREATH: Duration = Duration::from_millis(100);

/// The thread's own.
///
/// # Invariants
/// 1. `bells` watches the descriptors of tasks in `parked`, under their numbers, and no others.
pub(super) struct Poller {
    bells: Bells,
    shared: Arc<Shared>,
    /// By numbers that are used once.
    parked: HashMap<BellId, Parked>,
    /// When some of them are due.
    times: BTreeSet<(Instant, BellId)>,
    last: BellId,
    /// What the host refuses.
    unwatched: WarningLimit,
    not_started: WarningLimit,
}

struct Parked {
    task: Box<dyn Task>,
    at: Option<Instant>,
}

impl Poller {
    pub(super) fn new(bells: Bells, shared: Arc<Shared>) -> Self {
        let (parked, times) = Default::default();
        let unwatched = WarningLimit::warnings(None, "front-ends that could not be waited for");
        let not_started = WarningLimit::warnings(None, "threads that could not be started");
        Self { bells, shared, parked, times, last: 0, unwatched, not_started }
    }

    /// Waits until all is to end. A panic is logged and costs what it happened in.
    pub(super) fn run(&mut self) {
        while survive("the thread that waits for front-ends", || while self.turn() {}).is_none() {
            // Not too fast, if it does so over all it hears.
            std::thread::park_timeout(BREATH);
        }
    }

    /// False at the end.
    fn turn(&mut self) -> bool {
        panic_point!("sessions");
        let (mut rung, mut counters) = (Vec::new(), Counters::default());
        if let Err(error) = self.bells.wait(self.timeout(), &mut counters) {
            tracing::error!("cannot wait for front-ends: {error}");
            std::thread::park_timeout(BREATH);
        }
        self.bells.take(&mut rung);
        let mut ready: Vec<_> = rung.into_iter().filter_map(|number| self.unpark(number)).collect();
        let now = Instant::now();
        while let Some(&(_, number)) = self.times.first().filter(|&&(at, _)| at <= now) {
            self.times.pop_first();
            ready.extend(self.unpark(number));
        }
        let mut queues = self.shared.lock();
        queues.ready.extend(ready.into_iter().map(|task| (task, now)));
        let (quiet, ending) = (std::mem::take(&mut queues.quiet), queues.ending);
        drop(queues);
        quiet.into_iter().for_each(|task| self.park(task));
        self.provide();
        !ending
    }

    /// Until when it sleeps if nothing comes.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        // Whoever is ready, and not taken, may need one more thread.
        let held_up = (!self.shared.lock().ready.is_empty()).then_some(HELD_UP);
        let due = self.times.first().map(|(at, _)| at.saturating_duration_since(now));
        [held_up, due].into_iter().flatten().min()
    }

    /// Waits for a task.
    fn park(&mut self, task: Box<dyn Task>) {
        let (number, wakes) = (self.last.wrapping_add(1), task.wakes());
        self.last = number;
        let mut at = wakes.at;
        for fd in &wakes.readable {
            // What is readable already rings at once.
            if let Err(error) = self.bells.watch(number, fd.as_raw_fd()) {
                if let Some(pass) = self.unwatched.pass() {
                    tracing::warn!(
                        suppressed = pass.suppressed,
                        "a front-end cannot be waited for, and is looked at ten times a second: {error}"
                    );
                }
                at = Some(Instant::now() + BREATH);
            }
        }
        self.times.extend(at.map(|at| (at, number)));
        self.parked.insert(number, Parked { task, at });
    }

    /// Waits for it no more; `None` if that is so already.
    fn unpark(&mut self, number: BellId) -> Option<Box<dyn Task>> {
        let Parked { task, at } = self.parked.remove(&number)?;
        task.wakes().readable.iter().for_each(|fd| self.bells.unwatch(fd.as_raw_fd()));
        if let Some(at) = at {
            self.times.remove(&(at, number));
        }
        Some(task)
    }

    /// Has threads for what is ready.
    fn provide(&mut self) {
        let mut queues = self.shared.lock();
        let missing = queues.missing(Instant::now());
        let waiting = queues.ready.len().min(queues.idle);
        queues.threads += missing;
        let first = queues.numbers;
        queues.numbers += missing;
        drop(queues);
        for _ in 0..waiting {
            self.shared.work.notify_one();
        }
        for number in first..first + missing {
            self.start(number);
        }
    }

    fn start(&mut self, number: usize) {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(format!("session-{number}"));
        if let Err(error) = thread.spawn(move || shared.act(number)) {
            self.shared.lock().threads -= 1;
            if let Some(pass) = self.not_started.pass() {
                let suppressed = pass.suppressed;
                tracing::warn!(suppressed, "no thread to serve front-ends, trying again: {error}");
            }
        }
    }
}
