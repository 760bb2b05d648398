//! Keeps queues busy: a thread each, so many requests in flight.

use anyhow::{Context, anyhow, bail};
use ringway_driver::{BlkQueue, Buffer, BufferPool, Rejected};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long a request may take before the demo gives up.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How often to look whether the demo is to end while nothing completes.
const POLL_EVERY: Duration = Duration::from_millis(100);

/// What comes back with each completion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    /// First byte on the disk.
    pub(super) offset: u64,
    /// When it was queued.
    pub(super) at: Instant,
}

/// A queue of the demo.
pub(super) type Queue = BlkQueue<Sent>;

/// The demo was told to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted;

/// All queues of the device.
pub(super) struct Queues<'a> {
    queues: Vec<Queue>,
    pool: BufferPool,
    capacity: u64,
    signal: &'a AtomicUsize,
}

/// One thread's part.
pub(super) struct PumpThread<'a> {
    /// Its queue.
    pub(super) queue: &'a mut Queue,
    /// Which one, from 0.
    pub(super) index: usize,
    /// The bytes of the disk that are its alone.
    pub(super) range: Range<u64>,
    pool: BufferPool,
    signal: &'a AtomicUsize,
}

impl<'a> Queues<'a> {
    /// All `queues` of a device of `capacity` bytes; `signal` is not 0 once the demo is to end.
    pub(super) fn new(
        queues: Vec<Queue>,
        pool: BufferPool,
        capacity: u64,
        signal: &'a AtomicUsize,
    ) -> Self {
        Self { queues, pool, capacity, signal }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.queues.len()
    }

    /// Size of the disk in bytes.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Runs `work` on each of the first `count` queues at the same time, on disjoint ranges of the
    /// disk that begin on multiples of `align`.
    ///
    /// # Errors
    /// The first one's.
    pub(super) fn each<T: Send>(
        &mut self,
        count: usize,
        align: u64,
        work: impl Fn(PumpThread<'_>) -> anyhow::Result<T> + Sync,
    ) -> anyhow::Result<Vec<T>> {
        let Self { queues, pool, capacity, signal } = self;
        let count = count.min(queues.len());
        let share = (*capacity / count as u64).next_multiple_of(align);
        std::thread::scope(|scope| {
            let threads: Vec<_> = queues[..count]
                .iter_mut()
                .zip(0..)
                .map(|(queue, index)| {
                    let start = (share * index as u64).min(*capacity);
                    let range = start..(start + share).min(*capacity);
                    let part = PumpThread { queue, index, range, pool: pool.clone(), signal };
                    let work = &work;
                    scope.spawn(move || work(part))
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<T>>| {
                thread.join().map_err(|_| anyhow!("a thread of the demo panicked"))?
            };
            // All are joined before the first error is reported.
            threads.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
        })
    }
}

impl PumpThread<'_> {
    /// Keeps up to `depth` requests of up to `len` bytes in flight, until `start` has no more and
    /// all are done. `start` queues one request with the buffer, or gives the buffer back; `done`
    /// sees each completion.
    ///
    /// # Errors
    /// Theirs; a failed request; a daemon that has gone or does not answer; a signal.
    pub(super) fn pump(
        &mut self,
        depth: usize,
        len: usize,
        mut start: impl FnMut(&mut Queue, Buffer) -> Result<Option<Buffer>, Rejected<Sent>>,
        mut done: impl FnMut(Sent, &mut Buffer) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let buffers = std::iter::repeat_with(|| self.pool.alloc(len)).take(depth);
        let mut free =
            buffers.collect::<Option<Vec<_>>>().context("the demo's shared memory is too small")?;
        let mut progress = Instant::now();
        loop {
            while let Some(buffer) = free.pop() {
                if let Some(back) = start(self.queue, buffer).map_err(|no| anyhow!("{no}"))? {
                    free.push(back);
                    break;
                }
            }
            if self.queue.in_flight() == 0 {
                return Ok(());
            }
            if self.queue.wait(Some(POLL_EVERY))? {
                progress = Instant::now();
            } else if progress.elapsed() > TIMEOUT {
                bail!("the daemon has completed nothing for {} s", TIMEOUT.as_secs());
            }
            if self.signal.load(Relaxed) != 0 {
                bail!(Interrupted);
            }
            while let Some(completion) = self.queue.pop()? {
                let (sent, status) = (completion.ctx, completion.status);
                if !completion.is_ok() {
                    bail!("the request at byte {} failed: {status:?}", sent.offset);
                }
                if let Some(mut buffer) = completion.into_buffer() {
                    done(sent, &mut buffer)?;
                    free.push(buffer);
                }
            }
        }
    }

    /// Waits until all writes completed so far are durable.
    ///
    /// # Errors
    /// A failed flush, or a daemon that has gone.
    pub(super) fn flush(&mut self) -> anyhow::Result<()> {
        let sent = Sent { offset: 0, at: Instant::now() };
        self.queue.flush(sent).map_err(|no| anyhow!("{no}"))?;
        if !self.queue.wait(Some(TIMEOUT))? {
            bail!("a flush took more than {} s", TIMEOUT.as_secs());
        }
        match self.queue.pop()? {
            Some(done) if done.is_ok() => Ok(()),
            _ => bail!("a flush failed"),
        }
    }
}
