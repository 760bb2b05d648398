//! Threads that do [`Job`]s for one owner, and tell it once per batch.
//!
//! ```text
//! owner:  send(jobs)   one lock, a wake-up per idle thread     take(out)   one lock, if anything is done
//! thread: next job     one lock                                done        one lock, a wake-up only if
//!                                                                          the owner sleeps
//! ```

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::bells::Waker;
use crate::engine::Done;
use crate::sys::Job;
use ringway_core::panic_point;
use ringway_core::thread::{DataThread, data_thread_starts};

/// A fixed number of threads. Dropping it forgets what has not begun and waits for what has.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    todo: Mutex<Todo>,
    work: Condvar,
    done: Mutex<Vec<Done>>,
    /// True if `done` may hold something; changes under its lock.
    any: AtomicBool,
    /// True while the owner sleeps, or is about to, and nobody has woken it.
    asleep: AtomicBool,
    /// A thread has ended although it was not told to: what it had in hand may never be done.
    broken: AtomicBool,
    waker: Waker,
}

#[derive(Debug)]
struct Todo {
    jobs: VecDeque<Job>,
    idle: usize,
    closed: bool,
}

impl Pool {
    /// Starts the threads. `depth` bounds the jobs sent and not yet taken back.
    pub(crate) fn new(threads: usize, depth: u32, waker: Waker) -> io::Result<Self> {
        let depth = depth as usize;
        let todo = Todo { jobs: VecDeque::with_capacity(depth), idle: 0, closed: false };
        let shared = Arc::new(Shared {
            todo: Mutex::new(todo),
            work: Condvar::new(),
            done: Mutex::new(Vec::with_capacity(depth)),
            any: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            waker,
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for i in 0..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let thread = thread::Builder::new().name(format!("io-{i}"));
            pool.threads.push(thread.spawn(move || {
                data_thread_starts(DataThread::Io);
                if catch_unwind(AssertUnwindSafe(|| shared.run())).is_err() {
                    shared.broken.store(true, Ordering::SeqCst);
                    shared.waker.wake();
                }
            })?);
        }
        Ok(pool)
    }

    /// Hands jobs over. Returns the number of threads woken, each by a system call.
    pub(crate) fn send(&self, jobs: impl ExactSizeIterator<Item = Job>) -> u64 {
        if jobs.len() == 0 {
            return 0;
        }
        let mut todo = lock(&self.shared.todo);
        let wakes = jobs.len().min(todo.idle);
        todo.jobs.extend(jobs);
        drop(todo);
        for _ in 0..wakes {
            self.shared.work.notify_one();
        }
        wakes as u64
    }

    /// Moves what is done to `out`.
    pub(crate) fn take(&self, out: &mut Vec<Done>) {
        if !self.shared.any.load(Ordering::Relaxed) {
            return;
        }
        let mut done = lock(&self.shared.done);
        self.shared.any.store(false, Ordering::Relaxed);
        out.append(&mut done);
    }

    /// Announces that the owner is going to sleep; false if there is something to take instead.
    ///
    /// # Errors
    /// That a thread has ended by a panic: something may never be done, so the owner is beyond use.
    ///
    /// Either the owner sees `any`, or the thread that set it sees `asleep`: each writes its own
    /// flag, then a full fence, then reads the other's.
    pub(crate) fn before_sleep(&self) -> io::Result<bool> {
        if self.shared.broken.load(Ordering::SeqCst) {
            return Err(io::Error::other("one of its threads has panicked"));
        }
        self.shared.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.shared.any.load(Ordering::Relaxed) {
            self.after_sleep();
            return Ok(false);
        }
        Ok(true)
    }

    /// Announces that the owner is awake.
    pub(crate) fn after_sleep(&self) {
        self.shared.asleep.store(false, Ordering::Relaxed);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.todo).closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has let go of its job's memory too.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(job) = self.next() {
            panic_point!("io-thread");
            // A panic must not lose a completion: how far the operation got is not known, which is
            // what EIO says. The panic hook has told of it.
            let performed = catch_unwind(AssertUnwindSafe(|| {
                panic_point!("io");
                // SAFETY: the owner's caller keeps the memory until the result is reaped or the
                // engine is dropped, which joins this thread.
                unsafe { job.perform(0) }
            }));
            self.finish(Done { tag: job.tag, result: performed.unwrap_or(-libc::EIO) });
        }
    }

    fn next(&self) -> Option<Job> {
        let mut todo = lock(&self.todo);
        loop {
            if todo.closed {
                return None;
            }
            if let Some(job) = todo.jobs.pop_front() {
                return Some(job);
            }
            todo.idle += 1;
            todo = self.work.wait(todo).unwrap_or_else(PoisonError::into_inner);
            todo.idle -= 1;
        }
    }

    fn finish(&self, result: Done) {
        let mut done = lock(&self.done);
        done.push(result);
        self.any.store(true, Ordering::Relaxed);
        drop(done);
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.waker.wake();
        }
    }
}

/// Nothing here panics while it holds a lock, so a poisoned one is as good as new.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
