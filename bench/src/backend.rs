//! What a job talks to: a queue of a device, or an engine on a file (hot).
//!
//! ```text
//! backend.start(slot, &ask)?;                     // as many as there are slots; nothing is visible yet
//! backend.submit()?;                              // shows all of them at once
//! while let Some((slot, ok)) = backend.pop()? {}  // never blocks
//! backend.wait(timeout)?;                         // sleeps until there is something to pop
//! ```

use anyhow::{Context, Result, bail};
use ringway_driver::{BlkQueue, Buffer, Policy, SchedulerStats, Status};
use std::time::Duration;

/// One request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// A write, or a read.
    pub write: bool,
    /// First byte on the target.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Slots, each with memory for one request, over some way to the data. It is used by one thread.
pub trait Backend {
    /// Queues the request of a slot that is not in flight.
    ///
    /// # Errors
    /// That the target does not take such a request.
    fn start(&mut self, slot: u32, ask: &Ask) -> Result<()>;

    /// Shows what was queued.
    ///
    /// # Errors
    /// That the target is beyond use.
    fn submit(&mut self) -> Result<()>;

    /// The next completion: its slot, and whether it went well.
    ///
    /// # Errors
    /// That the target is beyond use.
    fn pop(&mut self) -> Result<Option<(u32, bool)>>;

    /// Why the completion popped last did not go well.
    fn complaint(&self) -> String;

    /// Sleeps until there is something to pop, or for about `timeout`.
    ///
    /// # Errors
    /// That the target is gone.
    fn wait(&mut self, timeout: Duration) -> Result<()>;

    /// Looks whether the target is still there; for clients that poll.
    ///
    /// # Errors
    /// That it is gone.
    fn check(&self) -> Result<()>;

    /// The memory of a slot that is not in flight: all of it, enough for the longest request.
    fn memory(&mut self, slot: u32) -> &mut [u8];

    /// What a queue has counted, if the backend has one.
    fn counted(&self) -> Option<Effort>;
}

/// What a queue has counted since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Effort {
    /// Notifications to the server.
    pub kicks: u64,
    /// Sleeps of the client.
    pub sleeps: u64,
    /// Requests that went along with others, and so on.
    pub(crate) path: SchedulerStats,
    /// The path in use, and how often it has changed; `None` if it is bio by order.
    pub(crate) in_use: Option<(Policy, u64)>,
}

impl Effort {
    /// What was counted since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let (now, then) = (&self.path, &before.path);
        Self {
            kicks: self.kicks - before.kicks,
            sleeps: self.sleeps - before.sleeps,
            path: SchedulerStats {
                plugged: now.plugged - then.plugged,
                runs: now.runs - then.runs,
                merged: now.merged - then.merged,
                split: now.split - then.split,
                expired: now.expired - then.expired,
            },
            in_use: self.in_use,
        }
    }

    /// Adds what another queue of the same device has counted.
    pub(crate) fn add(&mut self, other: &Self) {
        self.kicks += other.kicks;
        self.sleeps += other.sleeps;
        self.path.add(&other.path);
        self.in_use = self.in_use.or(other.in_use);
    }
}

/// A queue of a device, through our driver.
///
/// # Invariants
/// 1. `buffers[slot]` is `None` exactly while the slot is in flight.
pub(crate) struct RingBackend {
    queue: BlkQueue<u32>,
    buffers: Vec<Option<Buffer>>,
    failed: Status,
    /// Requests may travel in other ways than bio.
    merges: bool,
}

impl RingBackend {
    pub(crate) fn new(queue: BlkQueue<u32>, buffers: Vec<Buffer>, merges: bool) -> Self {
        let buffers = buffers.into_iter().map(Some).collect();
        Self { queue, buffers, failed: Status::Ok, merges }
    }
}

impl Backend for RingBackend {
    #[inline(always)]
    fn start(&mut self, slot: u32, ask: &Ask) -> Result<()> {
        let mut buffer = self.buffers[slot as usize].take().expect("invariant 1");
        if buffer.len() != ask.len as usize {
            buffer.set_len(ask.len as usize);
        }
        let queued = if ask.write {
            self.queue.write(ask.offset, buffer, slot)
        } else {
            self.queue.read(ask.offset, buffer, slot)
        };
        match queued {
            Ok(()) => Ok(()),
            Err(rejected) => {
                let why = rejected.why;
                self.buffers[slot as usize] = rejected.data.into_buffer();
                bail!("the target does not take a request of {} bytes: {why}", ask.len)
            }
        }
    }

    #[inline(always)]
    fn submit(&mut self) -> Result<()> {
        Ok(self.queue.submit()?)
    }

    #[inline(always)]
    fn pop(&mut self) -> Result<Option<(u32, bool)>> {
        let Some(done) = self.queue.pop()? else { return Ok(None) };
        let (slot, ok) = (done.ctx, done.is_ok());
        if !ok {
            self.failed = done.status;
        }
        self.buffers[slot as usize] = done.into_buffer();
        Ok(Some((slot, ok)))
    }

    #[cold]
    fn complaint(&self) -> String {
        match self.failed {
            Status::Unsupported => "the server does not support it".into(),
            _ => "the server reports an I/O error".into(),
        }
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        self.queue.wait(Some(timeout)).context("the server is gone")?;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if !self.queue.is_connected() {
            bail!("the server is gone: its log should say why");
        }
        Ok(())
    }

    #[inline(always)]
    fn memory(&mut self, slot: u32) -> &mut [u8] {
        let Some(buffer) = &mut self.buffers[slot as usize] else { return &mut [] };
        if buffer.len() != buffer.capacity() {
            buffer.set_len(buffer.capacity());
        }
        buffer
    }

    fn counted(&self) -> Option<Effort> {
        let stats = self.queue.stats();
        let in_use = self.merges.then(|| (self.queue.policy(), self.queue.policy_switches()));
        Some(Effort { kicks: stats.kicks, sleeps: stats.sleeps, path: stats.path, in_use })
    }
}
