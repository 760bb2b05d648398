//! A back-end in this process, for targets that are no files: null and simulated disks.

use crate::harvest_later;
use anyhow::{Context, Result};
use ringway_disk::Disk;
use ringway_export::{ExportOptions, PoolOptions, WorkerStats};
use ringway_vhost_user::{Ended, Export, Pool, Session};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Worker and session of one connection. Dropping it ends them.
pub(crate) struct Inside {
    pool: Pool,
    stop: Arc<OwnedFd>,
    session: Option<JoinHandle<Ended>>,
}

/// How a disk is served in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serving {
    pub queues: u16,
    pub queue_size: u16,
    pub workers: usize,
    /// Whether workers look for completions right after each submission (origin O2).
    pub harvest_at_once: bool,
}

impl Inside {
    /// Starts workers and a session; returns the other end of its socket.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn start(disk: Disk, serving: &Serving) -> Result<(Self, UnixStream)> {
        let Serving { queues, queue_size, workers, harvest_at_once } = *serving;
        let options = PoolOptions::new(disk.engine(), workers);
        let pool =
            if harvest_at_once { Pool::start(options) } else { harvest_later::pool(options) };
        let pool = pool.context("cannot start the workers")?;
        let options = ExportOptions { queues, queue_size };
        let export = Export::new(Arc::new(disk), options, pool.handles().to_vec(), 0);
        let export = Arc::new(export);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (ours, theirs) = UnixStream::pair()?;
        let its_stop = Arc::clone(&stop);
        let session =
            std::thread::Builder::new().name("session".into()).spawn(
                move || match Session::new(&export, theirs, &its_stop) {
                    Ok(session) => session.run(),
                    Err(error) => {
                        tracing::error!("the session in this process ends: {error}");
                        Ended::ByPeer
                    }
                },
            )?;
        Ok((Self { pool, stop, session: Some(session) }, ours))
    }

    /// The counts of all workers together.
    ///
    /// # Errors
    /// That a worker has ended.
    pub(crate) fn stats(&self) -> Result<WorkerStats> {
        let mut sum = WorkerStats::default();
        for worker in self.pool.handles() {
            sum.add(&worker.stats()?);
        }
        Ok(sum)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // One write cannot fill the counter.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(session) = self.session.take() {
            // It has said what was wrong.
            let _ = session.join();
        }
    }
}

/// True for the threads that serve, by their names.
pub(crate) fn serves(thread: &str) -> bool {
    ["worker-", "io-", "iou-", "session"].iter().any(|name| thread.starts_with(name))
}
