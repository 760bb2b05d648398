//! A back-end in the test's own process: disk, workers and sessions, reached over socket pairs.

use ringway_aio::Engine;
use ringway_disk::{CacheMode, Disk, EngineKind, OpenError, OpenOptions, Source, open};
use ringway_export::{
    ExportOptions, Handle, Polling, PoolOptions, QueueFindings, WorkerOptions, WorkerStats,
};
use ringway_vhost_user::{Ended, Export, Pool, Session};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a [`Rig`] serves, and how.
#[derive(Clone, Debug)]
pub struct RigOptions {
    /// The disk.
    pub disk: OpenOptions,
    /// Number of queues.
    pub queues: u16,
    /// Number of workers.
    pub workers: usize,
    /// Largest ring.
    pub queue_size: u16,
    /// How workers wait.
    pub polling: Polling,
    /// How long a disk may keep a stopping queue.
    pub drain_max: Duration,
}

impl RigOptions {
    /// A disk on `source` with `engine`, one queue, one worker.
    #[must_use]
    pub fn new(source: Source, engine: EngineKind) -> Self {
        let mut disk = OpenOptions::new(source);
        disk.engines = ringway_export::usable_engines();
        disk.engine = Some(engine);
        Self {
            disk,
            queues: 1,
            workers: 1,
            queue_size: 1024,
            polling: Polling::default(),
            drain_max: Duration::from_secs(30),
        }
    }

    /// An image file at `path` through the page cache, which works on every file system.
    #[must_use]
    pub fn buffered(path: &Path, engine: EngineKind) -> Self {
        let mut options = Self::new(Source::Path(path.into()), engine);
        options.disk.cache = Some(CacheMode::Writeback);
        options
    }

    /// With this many queues and workers.
    #[must_use]
    pub fn queues(mut self, queues: u16, workers: usize) -> Self {
        (self.queues, self.workers) = (queues, workers);
        self
    }

    fn worker(&self) -> WorkerOptions {
        WorkerOptions { polling: self.polling, pin_memory: false, sample_latency: true }
    }
}

/// A back-end that lives as long as the test.
pub struct Rig {
    export: Arc<Export>,
    pool: Pool,
    stop: Arc<OwnedFd>,
    sessions: Vec<JoinHandle<Ended>>,
}

impl Rig {
    /// Opens the disk and starts the workers.
    ///
    /// # Panics
    /// If anything of that fails.
    #[must_use]
    pub fn start(options: &RigOptions) -> Self {
        let disk = Arc::new(open_patiently(&options.disk).unwrap_or_else(|e| panic!("{e}")));
        let pool = PoolOptions::new(disk.engine(), options.workers);
        let pool = Pool::start(PoolOptions { worker: options.worker(), ..pool });
        let pool = pool.expect("workers start");
        Self::with_pool(disk, pool, options)
    }

    /// Serves `disk` with engines of the test's own, one per worker. Of the options, `disk` counts
    /// for nothing.
    ///
    /// # Panics
    /// If the workers do not start.
    #[must_use]
    pub fn with_engines<E: Engine + 'static>(
        disk: Disk,
        options: &RigOptions,
        make: impl Fn() -> E + Clone + Send + 'static,
    ) -> Self {
        let pool =
            Pool::with_engines(options.workers, options.worker(), Arc::new(|| {}), move |_| {
                Ok(make())
            })
            .expect("workers start");
        Self::with_pool(Arc::new(disk), pool, options)
    }

    fn with_pool(disk: Arc<Disk>, pool: Pool, options: &RigOptions) -> Self {
        let export_options =
            ExportOptions { queues: options.queues, queue_size: options.queue_size };
        let export = Export::new(disk, export_options, pool.handles().to_vec(), 0)
            .with_drain_max(options.drain_max);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        Self { export: Arc::new(export), pool, stop: Arc::new(stop), sessions: Vec::new() }
    }

    /// A new connection, with a session of its own behind it.
    ///
    /// # Panics
    /// If the host has no socket for it.
    pub fn connect(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let (export, stop) = (Arc::clone(&self.export), Arc::clone(&self.stop));
        self.sessions.push(std::thread::spawn(move || {
            Session::new(&export, theirs, &stop).expect("a session").run()
        }));
        ours
    }

    /// Listens at `path` for one connection, for clients that take nothing but paths.
    ///
    /// # Panics
    /// If the host has no socket for it.
    pub fn listen(&mut self, path: &Path) {
        let listener = UnixListener::bind(path).expect("a socket");
        let (export, stop) = (Arc::clone(&self.export), Arc::clone(&self.stop));
        self.sessions.push(std::thread::spawn(move || {
            let mut fds =
                [PollFd::new(&*stop, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            poll(&mut fds, None).expect("poll");
            if fds[0].revents().contains(PollFlags::IN) {
                return Ended::ByOrder;
            }
            let (theirs, _) = listener.accept().expect("a connection");
            Session::new(&export, theirs, &stop).expect("a session").run()
        }));
    }

    /// Orders all sessions to end, as SIGTERM does.
    ///
    /// # Panics
    /// If the eventfd is broken.
    pub fn order_to_stop(&self) {
        rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).expect("an eventfd");
    }

    /// Waits for the sessions to end by themselves: for tests whose client has gone.
    ///
    /// # Panics
    /// If a session panicked.
    pub fn join_sessions(&mut self) -> Vec<Ended> {
        self.sessions.drain(..).map(|session| session.join().expect("no panic")).collect()
    }

    /// Waits for all sessions but the first: those whose clients have gone.
    ///
    /// # Panics
    /// If a session panicked.
    pub fn join_some(&mut self) {
        for session in self.sessions.drain(1..) {
            session.join().expect("no panic");
        }
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        self.export.disk()
    }

    /// The disk as it is offered, for tests that change it.
    #[must_use]
    pub fn export(&self) -> &Arc<Export> {
        &self.export
    }

    /// Has every worker look for what is overdue and for lost kicks, by a clock of the test's own, in
    /// nanoseconds.
    ///
    /// # Panics
    /// If a worker ended.
    #[must_use]
    pub fn inspect(&self, now_ns: u64, limit_ns: u64) -> Vec<QueueFindings> {
        let ask =
            |worker: &Handle<_>| worker.ask_inspect(now_ns, limit_ns, None).expect("a worker");
        let asked: Vec<_> = self.pool.handles().iter().map(ask).collect();
        asked.into_iter().flat_map(|promise| promise.recv().expect("a worker").queues).collect()
    }

    /// The counts of each worker.
    ///
    /// # Panics
    /// If a worker ended.
    #[must_use]
    pub fn stats(&self) -> Vec<WorkerStats> {
        self.pool.handles().iter().map(|worker| worker.stats().expect("a worker")).collect()
    }

    /// The counts of worker `index`; `None` if it has ended.
    #[must_use]
    pub fn stats_of(&self, index: usize) -> Option<WorkerStats> {
        self.pool.handles()[index].stats().ok()
    }

    /// Waits until `wanted` requests are begun and not answered.
    ///
    /// # Panics
    /// If they do not come.
    pub fn wait_in_flight(&self, wanted: usize) {
        let begun = Instant::now();
        let in_flight = || {
            let queues = self.stats().into_iter().flat_map(|worker| worker.queues);
            queues.map(|queue| queue.in_flight).sum::<usize>()
        };
        while in_flight() != wanted {
            assert!(begun.elapsed() < Duration::from_secs(30), "{} in flight", in_flight());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        for session in self.sessions.drain(..) {
            if session.join().is_err() && !std::thread::panicking() {
                panic!("a session panicked");
            }
        }
    }
}

/// Opens a disk that was closed a moment ago: a process that another test is about to start still
/// has the file, and its lock, until it runs its own program.
///
/// # Errors
/// As [`open()`].
pub fn open_patiently(options: &OpenOptions) -> Result<Disk, OpenError> {
    let begun = Instant::now();
    loop {
        match open(options) {
            Err(OpenError::InUse { .. }) if begun.elapsed() < Duration::from_secs(30) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}

/// A sparse image of `bytes` bytes in `folder`.
///
/// # Panics
/// If it cannot be made.
#[must_use]
pub fn image(folder: &Path, bytes: u64) -> std::path::PathBuf {
    let path = folder.join("disk.img");
    File::create(&path).and_then(|file| file.set_len(bytes)).expect("an image");
    path
}
