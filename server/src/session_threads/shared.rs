//! What the threads share: tasks, whose turn it is, and how many act.

use ringway_aio::bells::Waker;
use ringway_core::thread::panic_message;
use ringway_vhost_user::Wakes;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Threads that act, while none of them is held up.
pub(super) const THREADS: usize = 4;
/// A thread that has been at one step for so long is held up: by a disk that drains, a client that does
/// not read, or by a busy host.
pub(super) const HELD_UP: Duration = Duration::from_millis(20);
/// How long a thread that has had something to do waits for more. The last one stays.
pub(super) const IDLE: Duration = Duration::from_secs(1);
/// How long a turn waits for its client's next message: a handshake has some forty.
pub(super) const LINGER: Duration = Duration::from_millis(1);

/// Asked before a turn waits for more: for how long it may.
pub(crate) type Linger<'a> = &'a dyn Fn() -> Option<Duration>;

/// What comes after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The task has more of them.
    Waits,
    /// This was its last.
    Over,
}

/// Something that waits most of the time.
pub(crate) trait Task: Send {
    /// When its next turn is due. The descriptors stay open, and are the same, until that is taken. A
    /// turn may come too early.
    fn wakes(&self) -> Wakes<'_>;

    /// Does what there is to do.
    ///
    /// # Errors
    /// Why the task ends.
    fn turn(&mut self, linger: Linger<'_>) -> io::Result<Turn>;

    /// There are no more turns, because of this: an order, an error or a panic.
    fn end(self: Box<Self>, outcome: std::thread::Result<io::Result<()>>);
}

/// What the threads share.
pub(super) struct Shared {
    queues: Mutex<Queues>,
    /// Something is ready.
    pub(super) work: Condvar,
    /// Of the thread that waits.
    pub(super) waker: Waker,
}

#[derive(Default)]
pub(super) struct Queues {
    /// Their turn is due, since then.
    pub(super) ready: VecDeque<(Box<dyn Task>, Instant)>,
    /// They are to be waited for.
    pub(super) quiet: Vec<Box<dyn Task>>,
    /// All that have not ended.
    pub(super) tasks: usize,
    /// Threads, and those of them that wait for something ready.
    pub(super) threads: usize,
    pub(super) idle: usize,
    /// Which threads take a turn, and when they began the present step of it.
    pub(super) steps: Vec<(usize, Instant)>,
    /// When there last were more threads because of who waited.
    pub(super) grew: Option<Instant>,
    /// Threads that there ever were.
    pub(super) numbers: usize,
    pub(super) ending: bool,
}

impl Queues {
    /// How many threads to start: as many as there is something to do for, up to four and two more for
    /// each one that is held up, so that many that are do not have the next one wait for long. Where
    /// somebody waits for long all the same, as behind many that are held up often and for a moment each,
    /// there are half as many again, and once more after as long. No more than there are tasks.
    pub(super) fn missing(&mut self, now: Instant) -> usize {
        let is_held_up = |(_, began): &&(usize, Instant)| now >= *began + HELD_UP;
        let held_up = self.steps.iter().filter(is_held_up).count();
        let mut most = THREADS + 2 * held_up;
        let waits = self.ready.front().is_some_and(|(_, since)| now >= *since + HELD_UP);
        if waits && self.grew.is_none_or(|grew| now >= grew + HELD_UP) {
            self.grew = Some(now);
            most = most.max(self.threads + self.threads.div_ceil(2));
        }
        let wanted = self.ready.len().saturating_sub(self.idle);
        wanted.min(most.min(self.tasks).saturating_sub(self.threads))
    }

    /// Thread `number` begins a step.
    fn step(&mut self, number: usize) {
        self.step_ends(number);
        self.steps.push((number, Instant::now()));
    }

    fn step_ends(&mut self, number: usize) {
        self.steps.retain(|(other, _)| *other != number);
    }

    /// How long a turn may wait for more.
    fn linger(&self) -> Duration {
        if self.ready.is_empty() { LINGER } else { Duration::ZERO }
    }
}

impl Shared {
    /// Nothing to do yet.
    pub(super) fn new(waker: Waker) -> Self {
        Self { queues: Mutex::default(), work: Condvar::new(), waker }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queues> {
        // What is behind it is whole at any time.
        self.queues.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// One thread of those that act.
    pub(super) fn act(&self, number: usize) {
        while let Some(mut task) = self.next(number) {
            let linger = || {
                let mut queues = self.lock();
                queues.step(number);
                Some(queues.linger())
            };
            let outcome = match catch_unwind(AssertUnwindSafe(|| task.turn(&linger))) {
                Ok(Ok(Turn::Waits)) => {
                    let mut queues = self.lock();
                    queues.step_ends(number);
                    queues.quiet.push(task);
                    drop(queues);
                    self.waker.wake();
                    continue;
                }
                Ok(Ok(Turn::Over)) => Ok(Ok(())),
                Ok(Err(error)) => Ok(Err(error)),
                Err(panic) => Err(panic),
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task.end(outcome))) {
                tracing::error!("the end of a disk panicked: {}", panic_message(&*panic));
            }
            let mut queues = self.lock();
            queues.step_ends(number);
            queues.tasks -= 1;
        }
    }

    /// Waits for a task whose turn is due; `None` if the thread is to end.
    fn next(&self, number: usize) -> Option<Box<dyn Task>> {
        let mut queues = self.lock();
        let begun = Instant::now();
        loop {
            if let Some((task, _)) = queues.ready.pop_front() {
                queues.step(number);
                return Some(task);
            }
            let is_last = queues.threads == 1;
            if queues.ending || (!is_last && begun.elapsed() >= IDLE) {
                queues.threads -= 1;
                return None;
            }
            queues.idle += 1;
            queues = if is_last {
                self.work.wait(queues).unwrap_or_else(|e| e.into_inner())
            } else {
                let waited = self.work.wait_timeout(queues, IDLE);
                waited.unwrap_or_else(|e| e.into_inner()).0
            };
            queues.idle -= 1;
        }
    }
}
