//! A disk with its NBD server, on threads of the test's own process.

use crate::rig::{RigOptions, open_patiently};
use crate::stalling::StallingStore;
use ringway_aio::Engine;
use ringway_disk::Disk;
use ringway_export::{ExportOptions, PoolOptions, WorkerOptions, WorkerStats};
use ringway_nbd::{Export, Listener, Pool, Portal, Server};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server that lives as long as the test. Its disk is called `disk`.
pub struct NbdRig {
    export: Arc<Export>,
    pool: Pool,
    stop: Arc<OwnedFd>,
    server: Option<JoinHandle<io::Result<()>>>,
    folder: tempfile::TempDir,
}

impl NbdRig {
    /// Opens the disk, starts the workers, listens. A queue is a connection.
    ///
    /// # Panics
    /// If anything of that fails.
    #[must_use]
    pub fn start(options: &RigOptions, handshake_max: Duration) -> Self {
        let disk = Arc::new(open_patiently(&options.disk).unwrap_or_else(|e| panic!("{e}")));
        let worker =
            WorkerOptions { polling: options.polling, pin_memory: false, sample_latency: false };
        let pool = PoolOptions::new(disk.engine(), options.workers);
        let pool = Pool::start(PoolOptions { worker, ..pool }).expect("workers start");
        Self::with_pool(disk, pool, options, handshake_max)
    }

    /// Serves `disk` with these workers.
    ///
    /// # Panics
    /// If the host has no socket for it.
    #[must_use]
    pub fn with_pool(
        disk: Arc<Disk>,
        pool: Pool,
        options: &RigOptions,
        handshake_max: Duration,
    ) -> Self {
        let shape = ExportOptions { queues: options.queues, queue_size: options.queue_size };
        let export =
            Export::new(disk, shape, pool.handles().to_vec(), 0).with_drain_max(options.drain_max);
        let export = Arc::new(export);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let folder = tempfile::tempdir().expect("a folder");
        let listener = UnixListener::bind(folder.path().join("nbd.sock")).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        let (its_export, its_stop) = (Arc::clone(&export), Arc::clone(&stop));
        let portal = Arc::new(Portal::new(Listener::Unix(listener)));
        let reservation = portal.reserve("disk").expect("the only one");
        let server = std::thread::spawn(move || {
            let server = Server::new(&its_export).with_handshake_max(handshake_max);
            server.serve(&reservation, its_stop.as_fd())
        });
        Self { export, pool, stop, server: Some(server), folder }
    }

    /// Serves storage of which writes may stall, on one worker for all connections.
    ///
    /// # Panics
    /// If the workers do not start.
    #[must_use]
    pub fn stalling(store: &StallingStore, disk: Disk, options: &RigOptions) -> Self {
        let store = store.clone();
        Self::with_engines(disk, options, move || store.engine())
    }

    /// Serves `disk` with engines of the test's own, one per worker. Of the options, `disk` counts for nothing.
    ///
    /// # Panics
    /// If the workers do not start, or the host has no socket for it.
    #[must_use]
    pub fn with_engines<E: Engine + 'static>(
        disk: Disk,
        options: &RigOptions,
        make: impl Fn() -> E + Clone + Send + 'static,
    ) -> Self {
        let worker = WorkerOptions { polling: options.polling, ..WorkerOptions::default() };
        let make = move |_| Ok(make());
        let pool = Pool::with_engines(options.workers, worker, Arc::new(|| {}), make);
        let (disk, pool) = (Arc::new(disk), pool.expect("workers start"));
        Self::with_pool(disk, pool, options, Duration::from_secs(20))
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// A new connection, of which nothing is said yet.
    ///
    /// # Panics
    /// If nobody listens.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).expect("somebody listens")
    }

    /// The disk as it is offered.
    #[must_use]
    pub fn export(&self) -> &Arc<Export> {
        &self.export
    }

    /// The counts of each worker.
    ///
    /// # Panics
    /// If a worker ended.
    #[must_use]
    pub fn stats(&self) -> Vec<WorkerStats> {
        self.pool.handles().iter().map(|worker| worker.stats().expect("a worker")).collect()
    }

    /// Has every worker look for what is overdue, by a clock of the test's own, in nanoseconds.
    ///
    /// # Panics
    /// If a worker ended.
    pub fn inspect(&self, now_ns: u64) {
        for worker in self.pool.handles() {
            let asked = worker.ask_inspect(now_ns, u64::MAX, None).expect("a worker");
            asked.recv().expect("a worker");
        }
    }

    /// Waits until so many connections have a queue.
    ///
    /// # Panics
    /// If that does not come about.
    pub fn wait_for_queues(&self, wanted: usize) {
        let begun = Instant::now();
        let queues = || self.stats().iter().map(|worker| worker.queues.len()).sum::<usize>();
        while queues() != wanted {
            assert!(begun.elapsed() < Duration::from_secs(20), "{} queues", queues());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Orders it to stop, as SIGTERM does; what the server says at its end.
    ///
    /// # Panics
    /// If it panicked.
    pub fn stop(&mut self) -> io::Result<()> {
        rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).expect("an eventfd");
        self.server.take().map_or(Ok(()), |server| server.join().expect("no panic"))
    }
}

impl Drop for NbdRig {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(server) = self.server.take() {
            let ended = server.join();
            if !std::thread::panicking() {
                ended.expect("no panic").expect("no failure");
            }
        }
    }
}
