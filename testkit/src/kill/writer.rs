//! One queue's traffic: writes, reads that are judged at once, and flushes, in varied sizes so that
//! they complete out of order.

use super::faults::Faults;
use super::oracle::{Findings, Oracle, SCRAMBLE, SECTOR, UNREAD, Wrong};
use super::shared::Shared;
use crate::Rng;
use anyhow::Result;
use ringway_driver::{BlkQueue, Buffer, Device, Error};
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

/// How long to wait before a device that is stopped is looked at again.
const STOPPED: Duration = Duration::from_millis(1);

/// Sectors of one request.
const SIZES: [usize; 8] = [1, 1, 2, 3, 8, 8, 16, MOST];
const MOST: usize = 32;
/// All sectors of the queue are read back once in so many lives.
const LIVES: u64 = 4;
/// What a buffer holds that is not in flight.
const SCRAMBLED: [u8; MOST * SECTOR] = [SCRAMBLE; MOST * SECTOR];

#[derive(Clone, Debug)]
enum What {
    Write(Range<usize>, u64),
    Read(Range<usize>),
    Flush,
}

/// The context of a request in flight.
#[derive(Clone, Debug)]
pub(super) struct Request {
    what: What,
    /// Its place in the order of issue.
    number: u64,
    /// Which daemon was the last when it was issued.
    life: u64,
    /// A flush had failed by then.
    after_failure: bool,
}

/// The end of a queue: nothing more can be asked of it.
pub(super) struct Over;

#[derive(Debug)]
pub(super) struct Writer {
    queue: BlkQueue<Request>,
    /// Buffers not in flight, full of [`SCRAMBLE`].
    stock: Vec<Buffer>,
    pub(super) oracle: Oracle,
    random: Rng,
    depth: u16,
    patience: Duration,
    issued: u64,
    newest: u64,
    resumed: u64,
    read_back: u64,
    /// Requests completed, and how many of them after one that was issued later.
    pub(super) done: u64,
    pub(super) overtaken: u64,
    /// Requests that failed as they had to.
    pub(super) refused: u64,
    pub(super) flushes_failed: u64,
    /// What goes wrong besides kills.
    pub(super) faults: Option<Faults>,
}

impl Writer {
    pub(super) fn new(
        queue: BlkQueue<Request>,
        device: &Device,
        oracle: Oracle,
        random: Rng,
        (depth, patience): (u16, Duration),
    ) -> Option<Self> {
        let pool = device.pool();
        let stock: Option<Vec<_>> = (0..depth).map(|_| pool.alloc(MOST * SECTOR)).collect();
        let mut stock = stock?;
        stock.iter_mut().for_each(|buffer| buffer.fill(SCRAMBLE));
        let (issued, newest, resumed, read_back, done, overtaken) = (0, 0, 0, 0, 0, 0);
        Some(Self {
            queue,
            stock,
            oracle,
            random,
            depth,
            patience,
            issued,
            newest,
            resumed,
            read_back,
            done,
            overtaken,
            refused: 0,
            flushes_failed: 0,
            faults: None,
        })
    }

    /// Works until told to stop, then reads everything back.
    pub(super) fn run(&mut self, shared: &Shared) {
        if self.work(shared).is_err() {
            shared.fatal.store(true, Relaxed);
        }
    }

    fn work(&mut self, shared: &Shared) -> Result<(), Over> {
        while !shared.stop.load(Relaxed) {
            let life = shared.life.load(Relaxed);
            if life >= self.read_back + LIVES {
                self.read_back = life;
                self.read_all(shared)?;
            }
            while self.queue.in_flight() < self.depth {
                self.issue(shared)?;
                if self.random.below(8) == 0 {
                    self.check(shared, BlkQueue::submit)?;
                }
            }
            self.complete(shared)?;
        }
        self.read_all(shared)
    }

    /// Issues a request of any kind.
    fn issue(&mut self, shared: &Shared) -> Result<(), Over> {
        let kind = self.random.below(100);
        if kind < 3 {
            // Without FLUSH every write is durable anyway.
            return self.add(shared, What::Flush);
        }
        loop {
            let count = self.random.pick(&SIZES);
            let room = (self.oracle.len() - count + 1) as u64;
            let first = usize::try_from(self.random.below(room)).unwrap_or(0);
            let at = first..first + count;
            if kind < 25 && self.oracle.is_readable(&at) {
                return self.add(shared, What::Read(at));
            }
            if kind >= 25 && self.oracle.is_writable(&at) {
                return self.add(shared, What::Write(at, 0));
            }
        }
    }

    fn add(&mut self, shared: &Shared, mut what: What) -> Result<(), Over> {
        let at = match &what {
            What::Flush => 0..0,
            What::Read(at) | What::Write(at, _) => at.clone(),
        };
        let (offset, bytes) = (self.oracle.offset(&at), at.len() * SECTOR);
        let mut buffer = None;
        if !at.is_empty() {
            let mut taken = self.stock.pop().expect("a buffer for each request");
            if taken[..] != SCRAMBLED {
                let mut found = shared.findings();
                found.add(Wrong::Replayed, 1, "the server wrote to memory that was given back");
            }
            taken.set_len(bytes);
            match &mut what {
                What::Write(_, sequence) => *sequence = self.oracle.write(&at, &mut taken),
                _ => {
                    self.oracle.read(&at);
                    taken.fill(UNREAD);
                }
            }
            buffer = Some(taken);
        }
        self.issued += 1;
        let is_write = matches!(what, What::Write(..));
        let after_failure = shared.flush_failed.load(SeqCst);
        let life = shared.life.load(Relaxed);
        let request = Request { what, number: self.issued, life, after_failure };
        let added = match buffer {
            None => self.queue.flush(request),
            Some(buffer) if is_write => self.queue.write(offset, buffer, request),
            Some(buffer) => self.queue.read(offset, buffer, request),
        };
        added.map_err(|rejected| {
            shared.findings().add(Wrong::Failed, 1, format_args!("not queued: {rejected}"));
            Over
        })
    }

    /// Waits for completions and takes all that are there.
    fn complete(&mut self, shared: &Shared) -> Result<(), Over> {
        if self.queue.in_flight() == 0 {
            return Ok(());
        }
        let patience = self.patience;
        if !self.check(shared, |queue| queue.wait(Some(patience)))? {
            let (missing, words) = (self.queue.in_flight(), "no answer, and no more patience");
            shared.findings().add(Wrong::Missing, missing.into(), words);
            return Err(Over);
        }
        while let Some(done) = self.check(shared, BlkQueue::pop)? {
            let (status, request) = (done.status, done.ctx.clone());
            let Request { what, number, life, after_failure } = request;
            let is_ok = done.is_ok();
            self.done += 1;
            self.overtaken += u64::from(number < self.newest);
            self.newest = self.newest.max(number);
            if life > self.resumed {
                self.resumed = life;
                shared.resumed(life);
            }
            let buffer = done.into_buffer();
            let mut found = Findings::default();
            if let Err(wrong) = self.judge(&what, is_ok, (life, after_failure), shared) {
                found.add(wrong, 1, format_args!("{what:?}: {status:?}"));
            }
            match &what {
                What::Write(at, sequence) if is_ok => {
                    self.oracle.written(at, *sequence, &mut found)
                }
                What::Write(at, _) => self.oracle.unknown(at),
                What::Read(at) => {
                    self.oracle.was_read(at);
                    if let Some(bytes) = buffer.as_deref().filter(|_| is_ok) {
                        self.oracle.judge(at, bytes, &mut found);
                    }
                }
                What::Flush => {}
            }
            if !found.is_empty() {
                shared.findings().append(found);
            }
            if let Some(mut buffer) = buffer {
                // Whoever carries the request out once more writes this, or writes over it.
                buffer.set_len(MOST * SECTOR);
                buffer.fill(SCRAMBLE);
                self.stock.push(buffer);
            }
        }
        Ok(())
    }

    /// Whether this was the right answer.
    fn judge(
        &mut self,
        what: &What,
        is_ok: bool,
        (life, after_failure): (u64, bool),
        shared: &Shared,
    ) -> Result<(), Wrong> {
        let now = shared.life.load(Relaxed);
        let Some(faults) = self.faults else {
            return if is_ok { Ok(()) } else { Err(Wrong::Failed) };
        };
        self.refused += u64::from(!is_ok);
        match what {
            What::Read(_) if is_ok => Ok(()),
            What::Read(_) => Err(Wrong::Failed),
            What::Write(at, _) => {
                let start = self.oracle.offset(at);
                let bytes = start..start + (at.len() * SECTOR) as u64;
                match faults.write_fails(bytes, life, now) {
                    Some(false) if !is_ok && faults.durable_may_fail(now, shared) => Ok(()),
                    Some(fails) if fails == is_ok => Err(Wrong::Failed),
                    _ => Ok(()),
                }
            }
            What::Flush if is_ok && after_failure => Err(Wrong::Forgotten),
            What::Flush if is_ok => Ok(()),
            What::Flush => {
                self.flushes_failed += 1;
                shared.flush_failed.store(true, SeqCst);
                if faults.flush_may_fail(now, shared) { Ok(()) } else { Err(Wrong::Failed) }
            }
        }
    }

    /// Lets everything come back, then reads every sector.
    fn read_all(&mut self, shared: &Shared) -> Result<(), Over> {
        while self.queue.in_flight() > 0 {
            self.complete(shared)?;
        }
        for first in (0..self.oracle.len()).step_by(MOST) {
            while self.queue.in_flight() >= self.depth {
                self.complete(shared)?;
            }
            self.add(shared, What::Read(first..first + MOST))?;
        }
        while self.queue.in_flight() > 0 {
            self.complete(shared)?;
        }
        Ok(())
    }

    /// Does something with the queue; whatever it says against the server ends it.
    fn check<T>(
        &mut self,
        shared: &Shared,
        mut step: impl FnMut(&mut BlkQueue<Request>) -> Result<T, Error>,
    ) -> Result<T, Over> {
        let deadline = Instant::now() + self.patience;
        let mut outcome = step(&mut self.queue);
        // The campaign stops the device at times, and connects it again.
        while matches!(outcome, Err(Error::NotConnected)) && Instant::now() < deadline {
            std::thread::sleep(STOPPED);
            outcome = step(&mut self.queue);
        }
        outcome.map_err(|error| {
            let (wrong, count) = match error {
                // A completion of no request in flight.
                Error::Device(_) => (Wrong::Duplicate, 1),
                _ => (Wrong::Missing, self.queue.in_flight().into()),
            };
            shared.findings().add(wrong, count, error);
            Over
        })
    }
}
