//! One thread of the client: its queues, in a closed loop (hot).

use crate::bench::load::{Load, Outcome};
use crate::bench::options::Waiting;
use crate::bench::phases::{Counting, Next};
use anyhow::{Context, Result, bail};
use fastrand::Rng;
use ringway_driver::{BlkQueue, Buffer};
use std::sync::atomic::AtomicU8;
use std::time::{Duration, Instant};

/// Answers that are replaced by new requests before these are shown to the server: it goes on while
/// the client takes the rest.
const SUBMIT_EVERY: usize = 8;

/// Keeps all requests of `queues` in flight until told to stop.
pub(crate) fn work(
    mut queues: Vec<QueueLoad>,
    waiting: Waiting,
    phase: &AtomicU8,
) -> Result<Outcome> {
    for queue in &mut queues {
        queue.begin()?;
    }
    let (mut counting, mut idle) = (Counting::default(), 0u32);
    loop {
        let mut found = 0;
        for queue in &mut queues {
            found += queue.turn()?;
        }
        match counting.look(phase) {
            Next::GoOn => {}
            Next::Begin => queues.iter_mut().for_each(QueueLoad::forget),
            Next::End(took, cpu) => {
                let (seconds, cpu_ns) = (took.as_secs_f64(), nanos(cpu));
                let mut sum = Outcome { seconds, cpu_ns, ..Outcome::default() };
                queues.iter_mut().for_each(|queue| sum.add(queue.counted()));
                for queue in queues {
                    queue.end()?;
                }
                return Ok(sum);
            }
        }
        if found > 0 {
            idle = 0;
        } else if waiting == Waiting::Sleeping {
            queues[0].queue.wait(None)?;
        } else {
            idle = idle.wrapping_add(1);
            if idle.is_multiple_of(1 << 22) && !queues[0].queue.is_connected() {
                bail!("the server is gone");
            }
            std::hint::spin_loop();
        }
    }
}

/// One queue under load.
pub(crate) struct QueueLoad {
    queue: BlkQueue<u32>,
    /// Before they are sent for the first time.
    buffers: Vec<Buffer>,
    load: Load,
    units: u64,
    next: u64,
    random: Rng,
    /// Queued since the last submission.
    fresh: Vec<u32>,
    /// When each slot's request was queued, and submitted.
    queued: Vec<Instant>,
    sent: Vec<Instant>,
    counted: Outcome,
    kicks: u64,
    sleeps: u64,
}

impl QueueLoad {
    pub(crate) fn new(
        queue: BlkQueue<u32>,
        buffers: Vec<Buffer>,
        load: Load,
        bytes: u64,
        seed: u64,
    ) -> Self {
        let now = vec![Instant::now(); buffers.len()];
        let unit = if load.mix.is_empty() { load.size } else { 512 };
        Self {
            queue,
            fresh: Vec::with_capacity(buffers.len()),
            buffers,
            load,
            units: (bytes.saturating_sub(u64::from(load.size)) / u64::from(unit)).max(1),
            next: seed << 16,
            random: Rng::with_seed(seed),
            sent: now.clone(),
            queued: now,
            counted: Outcome::default(),
            kicks: 0,
            sleeps: 0,
        }
    }

    #[inline(always)]
    fn start(&mut self, slot: u32, mut buffer: Buffer) -> Result<()> {
        let mut unit = u64::from(self.load.size);
        if !self.load.mix.is_empty() {
            let dice = self.random.u64(..100);
            let size = self.load.mix.iter().find(|(up_to, _)| dice < *up_to);
            buffer.set_len(size.map_or(512, |&(_, size)| size as usize));
            unit = 512;
        }
        let offset = if self.load.sequential {
            self.next = if self.next + 1 < self.units { self.next + 1 } else { 0 };
            self.next * unit
        } else {
            self.random.u64(..self.units) * unit
        };
        if self.load.timed {
            self.queued[slot as usize] = Instant::now();
            self.fresh.push(slot);
        }
        let queued = if self.load.write {
            self.queue.write(offset, buffer, slot)
        } else {
            self.queue.read(offset, buffer, slot)
        };
        Ok(queued.map_err(|rejected| rejected.why)?)
    }

    #[inline(always)]
    fn submit(&mut self) -> Result<()> {
        self.queue.submit()?;
        if self.load.timed {
            let now = Instant::now();
            for slot in self.fresh.drain(..) {
                self.sent[slot as usize] = now;
                self.counted.submit_ns += nanos(now - self.queued[slot as usize]);
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        for (slot, mut buffer) in (0..).zip(std::mem::take(&mut self.buffers)) {
            buffer.fill(0x5a);
            self.start(slot, buffer)?;
        }
        self.submit()
    }

    /// Takes what is there and asks for as much again.
    #[inline(always)]
    fn turn(&mut self) -> Result<usize> {
        let mut found = 0;
        while let Some(done) = self.queue.pop()? {
            found += 1;
            self.counted.errors += u64::from(!done.is_ok());
            let slot = done.ctx;
            if self.load.timed {
                let now = Instant::now();
                self.counted.complete_ns += nanos(now - self.sent[slot as usize]);
                self.counted.latency.saturating_record(nanos(now - self.queued[slot as usize]));
            }
            let buffer = done.into_buffer().context("a buffer is lost")?;
            self.counted.done += 1;
            self.counted.bytes += buffer.len() as u64;
            self.start(slot, buffer)?;
            if found % SUBMIT_EVERY == 0 {
                self.submit()?;
            }
        }
        if found % SUBMIT_EVERY > 0 {
            self.submit()?;
        }
        Ok(found)
    }

    fn forget(&mut self) {
        self.counted = Outcome { errors: self.counted.errors, ..Outcome::default() };
        let stats = self.queue.stats();
        (self.kicks, self.sleeps) = (stats.kicks, stats.sleeps);
    }

    fn counted(&mut self) -> &Outcome {
        let stats = self.queue.stats();
        self.counted.kicks = Some(stats.kicks - self.kicks);
        self.counted.sleeps = Some(stats.sleeps - self.sleeps);
        &self.counted
    }

    /// Waits for what is in flight.
    fn end(mut self) -> Result<()> {
        while self.queue.in_flight() > 0 {
            if !self.queue.wait(Some(Duration::from_secs(10)))? {
                bail!("{} requests were never answered", self.queue.in_flight());
            }
            self.queue.completions().for_each(drop);
        }
        Ok(())
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
