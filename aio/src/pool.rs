//! Threads that do [`Job`]s for one owner, and tell it once per batch.
//!
//! ```text
//! owner:  send(jobs)   one lock, a wake-up per idle thread     take(out)   one lock, if anything is done
//! thread: next job     one lock                                done        one lock, a wake-up only if
//!                                                                          the owner sleeps
//! ```
//!
//! Jobs that block for good take their threads with them, so each file has few threads at a time, and whose jobs wait
//! without need gets another one: files that hang leave the others theirs. Who starts threads is one of them, as the
//! owner's sandbox may allow it none.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::bells::Waker;
use crate::engine::{Done, FileId};
use crate::sys::Job;
use ringway_core::panic_point;
use ringway_core::thread::{DataThread, data_thread_starts};

/// The most threads of a pool. Only files that hang make it have so many.
const THREADS_MAX: usize = 512;

/// Threads that each file gets whatever others do, as long as there are enough for all.
const OWN: usize = 2;

/// No place in a list.
const NONE: usize = usize::MAX;

/// Threads, more of them as jobs need it. Dropping it forgets what has not begun and waits for what has.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    todo: Mutex<Todo>,
    work: Condvar,
    /// Jobs may have too few threads.
    short: Condvar,
    done: Mutex<Vec<Done>>,
    /// True if `done` may hold something; changes under its lock.
    any: AtomicBool,
    /// True while the owner sleeps, or is about to, and nobody has woken it.
    asleep: AtomicBool,
    /// A thread has ended although it was not told to: what it had in hand may never be done.
    broken: AtomicBool,
    waker: Waker,
}

/// What waits for a thread, and who has one.
///
/// # Invariants
/// 1. `taken` is the sum of what each file has beyond `own`.
/// 2. A file that has waiting jobs and may have a thread is in `ready`, once.
#[derive(Debug)]
struct Todo {
    /// Jobs in lists, one for each file and one of free places.
    jobs: Vec<Waiting>,
    free: usize,
    /// By [`FileId`].
    files: Vec<OfFile>,
    ready: VecDeque<usize>,
    /// The most threads of one file, and how many of these nobody else gets.
    most: usize,
    own: usize,
    /// Threads that any file may have beside its own, and how many of them are busy.
    shared: usize,
    taken: usize,
    /// Threads that wait, that have a job, and all, with one that has not come yet.
    idle: usize,
    busy: usize,
    threads: usize,
    closed: bool,
}

#[derive(Debug)]
struct Waiting {
    job: Job,
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct OfFile {
    first: usize,
    last: usize,
    /// Threads that are at it.
    busy: usize,
    attached: bool,
    is_ready: bool,
}

impl Todo {
    fn new(threads: usize, depth: usize) -> Self {
        let mut todo = Self {
            jobs: Vec::with_capacity(depth),
            free: NONE,
            files: Vec::new(),
            ready: VecDeque::new(),
            most: threads,
            own: 0,
            shared: 0,
            taken: 0,
            idle: 0,
            busy: 0,
            threads,
            closed: false,
        };
        todo.divide();
        todo
    }

    /// Divides the threads among files that are there by now. Control plane: allocates.
    fn divide(&mut self) {
        let files = self.files.iter().filter(|file| file.attached).count().max(1);
        self.own = (THREADS_MAX / files).clamp(1, OWN.min(self.most));
        self.shared = THREADS_MAX.saturating_sub(self.own * files);
        self.taken = self.files.iter().map(|file| file.busy.saturating_sub(self.own)).sum();
        self.ready.reserve(self.files.len());
        (0..self.files.len()).for_each(|file| self.offer(file));
    }

    fn attach(&mut self, file: usize, attached: bool) {
        if file >= self.files.len() {
            let none =
                OfFile { first: NONE, last: NONE, busy: 0, attached: false, is_ready: false };
            self.files.resize(file + 1, none);
        }
        self.files[file].attached = attached;
        self.divide();
    }

    fn may_begin(&self, file: usize) -> bool {
        let busy = self.files[file].busy;
        busy < self.own || busy < self.most && self.taken < self.shared
    }

    /// Has a job of the file wait for a thread, if it may have one.
    fn offer(&mut self, file: usize) {
        let may = self.may_begin(file);
        let of_file = &mut self.files[file];
        if may && of_file.first != NONE && !of_file.is_ready {
            of_file.is_ready = true;
            self.ready.push_back(file);
        }
    }

    fn push(&mut self, job: Job) {
        let (file, waiting) = (job.file, Waiting { job, next: NONE });
        let at = match self.free {
            NONE => {
                self.jobs.push(waiting);
                self.jobs.len() - 1
            }
            at => {
                self.free = std::mem::replace(&mut self.jobs[at], waiting).next;
                at
            }
        };
        let of_file = &mut self.files[file];
        match std::mem::replace(&mut of_file.last, at) {
            NONE => of_file.first = at,
            last => self.jobs[last].next = at,
        }
        self.offer(file);
    }

    /// The files take turns.
    fn pop(&mut self) -> Option<Job> {
        loop {
            let file = self.ready.pop_front()?;
            self.files[file].is_ready = false;
            // What it could have had may be another one's by now.
            if !self.may_begin(file) {
                continue;
            }
            let own = self.own;
            let of_file = &mut self.files[file];
            let at = of_file.first;
            let Waiting { job, next } = self.jobs[at];
            of_file.first = next;
            if next == NONE {
                of_file.last = NONE;
            }
            of_file.busy += 1;
            self.busy += 1;
            self.taken += usize::from(of_file.busy > own);
            self.jobs[at].next = std::mem::replace(&mut self.free, at);
            self.offer(file);
            return Some(job);
        }
    }

    /// A thread has done a job of the file.
    fn leave(&mut self, file: usize) {
        let all_taken = self.taken >= self.shared;
        let own = self.own;
        let of_file = &mut self.files[file];
        self.taken -= usize::from(of_file.busy > own);
        of_file.busy -= 1;
        self.busy -= 1;
        self.offer(file);
        if all_taken {
            (0..self.files.len()).for_each(|file| self.offer(file));
        }
    }

    /// Whether a job waits for nothing but a thread.
    fn is_short(&self) -> bool {
        !self.ready.is_empty() && self.busy == self.threads && self.threads < THREADS_MAX
    }
}

impl Pool {
    /// Starts `threads` threads: what one file gets at most. `depth` bounds the jobs sent and not yet taken back.
    pub(crate) fn new(threads: usize, depth: u32, waker: Waker) -> io::Result<Self> {
        let (threads, depth) = (threads.clamp(1, THREADS_MAX), depth as usize);
        let shared = Arc::new(Shared {
            todo: Mutex::new(Todo::new(threads, depth)),
            work: Condvar::new(),
            short: Condvar::new(),
            done: Mutex::new(Vec::with_capacity(depth)),
            any: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            waker,
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for i in 0..threads {
            pool.threads.push(spawn(&pool.shared, i)?);
        }
        let shared = Arc::clone(&pool.shared);
        let start = thread::Builder::new().name("io-start".into());
        pool.threads.push(start.spawn(move || start_more(&shared))?);
        Ok(pool)
    }

    /// A file is known from now on, or is not any more. Control plane: allocates.
    pub(crate) fn attach(&self, file: FileId, attached: bool) {
        lock(&self.shared.todo).attach(file.0 as usize, attached);
        // There may be more to do by now.
        self.shared.work.notify_all();
        self.shared.short.notify_one();
    }

    /// Hands jobs over. Returns the number of threads woken, each by a system call.
    pub(crate) fn send(&self, jobs: impl ExactSizeIterator<Item = Job>) -> u64 {
        if jobs.len() == 0 {
            return 0;
        }
        let mut todo = lock(&self.shared.todo);
        let wakes = jobs.len().min(todo.idle);
        jobs.for_each(|job| todo.push(job));
        let is_short = todo.is_short();
        drop(todo);
        for _ in 0..wakes {
            self.shared.work.notify_one();
        }
        if is_short {
            self.shared.short.notify_one();
        }
        wakes as u64 + u64::from(is_short)
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
        self.shared.short.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has let go of its job's memory too.
            let _ = thread.join();
        }
    }
}

fn spawn(shared: &Arc<Shared>, number: usize) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    thread::Builder::new().name(format!("io-{number}")).spawn(move || {
        data_thread_starts(DataThread::Io);
        if catch_unwind(AssertUnwindSafe(|| shared.run())).is_err() {
            shared.broken.store(true, Ordering::SeqCst);
            shared.waker.wake();
        }
    })
}

/// Starts threads for jobs that wait for nothing else, one after another: the last one says if there are too few still.
fn start_more(shared: &Arc<Shared>) {
    let mut threads = Vec::new();
    let mut todo = lock(&shared.todo);
    loop {
        while !todo.closed && !todo.is_short() {
            todo = shared.short.wait(todo).unwrap_or_else(PoisonError::into_inner);
        }
        if todo.closed {
            break;
        }
        let number = todo.threads;
        todo.threads += 1;
        drop(todo);
        let started = spawn(shared, number);
        todo = lock(&shared.todo);
        match started {
            Ok(thread) => threads.push(thread),
            // The host has no more: they wait for those that there are, or until it is tried again.
            Err(_) => {
                todo.threads = number;
                if !todo.closed {
                    todo = shared.short.wait(todo).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
    drop(todo);
    for thread in threads {
        let _ = thread.join();
    }
}

impl Shared {
    fn run(&self) {
        let mut todo = lock(&self.todo);
        while let Some(job) = self.next(todo) {
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
            todo = lock(&self.todo);
            todo.leave(job.file);
        }
    }

    fn next(&self, mut todo: MutexGuard<'_, Todo>) -> Option<Job> {
        loop {
            if todo.closed {
                return None;
            }
            if let Some(job) = todo.pop() {
                if todo.is_short() {
                    self.short.notify_one();
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bells::Bells;
    use crate::engine::{Io, IoMemory, IoOp};
    use crate::sys::hanging::Hang;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    /// Sends syncs of a file, by tags that begin with `first`.
    fn sync(pool: &Pool, file: FileId, fd: &File, tags: std::ops::Range<u64>) {
        let job = |tag| {
            let io = Io { op: IoOp::Sync, file, offset: 0, len: 0, memory: IoMemory::NONE, tag };
            // SAFETY: there is no memory.
            unsafe { Job::new(&io, fd.as_raw_fd()) }
        };
        let jobs: Vec<_> = tags.map(job).collect();
        pool.send(jobs.into_iter());
    }

    fn wait_for(pool: &Pool, count: usize) -> Vec<Done> {
        let (begun, mut done) = (Instant::now(), Vec::new());
        while done.len() < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "{} of {count}", done.len());
            pool.take(&mut done);
            thread::sleep(Duration::from_millis(1));
        }
        done
    }

    /// Half of the files hang, with all that the engine takes; what is asked of the others is done.
    #[test]
    fn e57_files_that_hang_leave_the_others_threads() {
        for (threads, count) in [(1, 2), (16, 4), (16, 64), (4, 300)] {
            let bells = Bells::new().unwrap();
            let pool = Pool::new(threads, 1 << 16, bells.waker()).unwrap();
            let files: Vec<_> = (0..count).map(|_| tempfile::tempfile().unwrap()).collect();
            let ids: Vec<_> = (0..count).map(|id| FileId(id.try_into().unwrap())).collect();
            ids.iter().for_each(|&id| pool.attach(id, true));
            let gates: Vec<_> =
                files[..count / 2].iter().map(|file| Hang::new(file.as_raw_fd())).collect();
            for (at, file) in files[..count / 2].iter().enumerate() {
                let first = 1000 + at as u64 * 100;
                sync(&pool, ids[at], file, first..first + 100);
            }
            for round in 0..20 {
                for at in count / 2..count {
                    sync(&pool, ids[at], &files[at], round..round + 1);
                }
                let done = wait_for(&pool, count - count / 2);
                assert!(done.iter().all(|done| done.tag == round), "{threads} {count}");
            }
            let todo = lock(&pool.shared.todo);
            assert!(todo.files.iter().all(|file| file.busy <= threads), "{threads} {count}");
            assert!(todo.threads <= THREADS_MAX, "{threads} {count}");
            drop(todo);
            drop(gates);
            wait_for(&pool, count / 2 * 100);
            let mut todo = lock(&pool.shared.todo);
            while todo.files.iter().any(|file| file.busy > 0) {
                drop(todo);
                thread::yield_now();
                todo = lock(&pool.shared.todo);
            }
            assert_eq!((todo.taken, todo.ready.len()), (0, 0), "{threads} {count}");
        }
    }

    /// A file alone has the threads of the beginning, and each job is done once, in turn.
    #[test]
    fn one_file_makes_no_more_threads() {
        let bells = Bells::new().unwrap();
        let pool = Pool::new(3, 256, bells.waker()).unwrap();
        let file = tempfile::tempfile().unwrap();
        pool.attach(FileId(0), true);
        for round in 0..50 {
            sync(&pool, FileId(0), &file, round * 200..round * 200 + 200);
            let mut tags: Vec<_> = wait_for(&pool, 200).iter().map(|done| done.tag).collect();
            tags.sort_unstable();
            assert!(tags.into_iter().eq(round * 200..round * 200 + 200));
        }
        assert_eq!(lock(&pool.shared.todo).threads, 3);
    }
}
