//! The load: our front-end on its own core, in a closed loop.

use crate::bench::Lab;
use crate::bench::lane::{Lane, work};
use crate::bench::options::{Client, IndirectArg, Waiting, pin};
use anyhow::{Context, Result, anyhow, bail};
use hdrhistogram::Histogram;
use ringway_driver::{Device, Error, Indirect, Options};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests in flight per queue.
    pub(crate) depth: u32,
    /// Bytes of a request, or of the largest one of a mix.
    pub(crate) size: u32,
    /// Other sizes, each with the percentile up to which it goes.
    pub(crate) mix: &'static [(u64, u32)],
    /// Writes instead of reads.
    pub(crate) write: bool,
    /// One after another instead of anywhere.
    pub(crate) sequential: bool,
    /// How the client waits.
    pub(crate) waiting: Waiting,
    /// Whether each request's latency is taken, which costs some 50 ns.
    pub(crate) timed: bool,
}

impl Load {
    /// 4 KiB random reads.
    pub(crate) const fn reads(depth: u32, waiting: Waiting) -> Self {
        let (mix, write, sequential) = (&[] as &[_], false, false);
        Self { depth, size: 4096, mix, write, sequential, waiting, timed: false }
    }
}

/// When to begin counting and when to end: the main thread says so.
const WARM: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// What was seen of a load while it was measured.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) seconds: f64,
    pub(crate) done: u64,
    pub(crate) bytes: u64,
    pub(crate) errors: u64,
    /// Of clients that count them.
    pub(crate) kicks: Option<u64>,
    pub(crate) sleeps: Option<u64>,
    /// Sums, in nanoseconds, of timed loads.
    pub(crate) submit_ns: u64,
    pub(crate) complete_ns: u64,
    /// CPU time of the client's threads, in nanoseconds.
    pub(crate) cpu_ns: u64,
    /// From before the submission to after the completion, in nanoseconds.
    pub(crate) latency: Histogram<u64>,
}

impl Default for Outcome {
    fn default() -> Self {
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("sound bounds");
        let (done, bytes, errors, kicks, sleeps) = (0, 0, 0, None, None);
        let (submit_ns, complete_ns, cpu_ns, seconds) = (0, 0, 0, 0.0);
        Self {
            seconds,
            done,
            bytes,
            errors,
            kicks,
            sleeps,
            submit_ns,
            complete_ns,
            cpu_ns,
            latency,
        }
    }
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Self) {
        self.seconds = self.seconds.max(other.seconds);
        self.done += other.done;
        self.bytes += other.bytes;
        self.errors += other.errors;
        let sum = |a: Option<u64>, b: Option<u64>| a.map_or(b, |a| Some(a + b.unwrap_or(0)));
        self.kicks = sum(self.kicks, other.kicks);
        self.sleeps = sum(self.sleeps, other.sleeps);
        self.submit_ns += other.submit_ns;
        self.complete_ns += other.complete_ns;
        self.cpu_ns += other.cpu_ns;
        // Both have the same bounds.
        let _ = self.latency.add(&other.latency);
    }
}

/// Connects, loads, measures. `boundary` is called right before and right after the measurement.
pub(crate) fn attack_by(
    client: Client,
    lab: &Lab,
    socket: &Path,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    if client == Client::Blkio {
        #[cfg(feature = "blkio")]
        return crate::bench::blkio::attack(lab, socket, queues, load, boundary);
        #[cfg(not(feature = "blkio"))]
        bail!("this xtask was built without the client blkio: add --features blkio");
    }
    let connect = |options: &Options| options.connect(socket);
    attack_over(lab, connect, queues, load, boundary)
}

/// As [`attack_by`], over any connection.
pub(crate) fn attack_over(
    lab: &Lab,
    connect: impl FnOnce(&Options) -> Result<Device, Error>,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let room = u64::from(load.depth) * u64::from(queues) * u64::from(load.size.max(4096));
    let mut device = connect(
        &Options::new()
            .queues(queues)
            .queue_size(lab.common.queue_size)
            .packed(lab.common.packed)
            .indirect(match lab.common.indirect {
                IndirectArg::Scarce => Indirect::WhenScarce,
                IndirectArg::Never => Indirect::Never,
                IndirectArg::Always => Indirect::Always,
            })
            .memory(usize::try_from(room + (1 << 20))?)
            .patience(Duration::from_secs(5)),
    )?;
    let (capacity, pool) = (device.capacity(), device.pool());
    let mut lanes = Vec::new();
    for (index, queue) in device.queues()?.into_iter().enumerate() {
        let buffers = (0..load.depth).map(|_| pool.alloc(load.size as usize));
        let buffers: Option<Vec<_>> = buffers.collect();
        let buffers = buffers.context("out of shared memory")?;
        lanes.push(Lane::new(queue, buffers, *load, capacity, index as u64));
    }
    // Whoever polls serves all its queues in turn; whoever sleeps has a thread per queue.
    let cpus = &lab.common.client_cpus;
    let threads = if load.waiting == Waiting::Polling { cpus.len() } else { lanes.len() };
    let mut crews: Vec<Vec<Lane>> = (0..threads.min(lanes.len())).map(|_| Vec::new()).collect();
    let count = crews.len();
    for (index, lane) in lanes.into_iter().enumerate() {
        crews[index % count].push(lane);
    }
    measure(lab, crews, boundary, |crew, phase| work(crew, load.waiting, phase))
}

/// Runs one thread per crew and tells all of them when to count.
pub(crate) fn measure<C: Send>(
    lab: &Lab,
    crews: Vec<C>,
    boundary: &mut dyn FnMut() -> Result<()>,
    work: impl Fn(C, &AtomicU8) -> Result<Outcome> + Sync,
) -> Result<Outcome> {
    let phase = AtomicU8::new(WARM);
    let cpus = &lab.common.client_cpus;
    let (alive, watched) = channel::<()>();
    let limit = Duration::from_secs_f64(lab.common.warmup + lab.seconds + 30.0);
    std::thread::spawn(move || {
        if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("the server has stopped answering: giving up");
            std::process::exit(1);
        }
    });
    let outcome = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, crew) in crews.into_iter().enumerate() {
            let (phase, work, cpu) = (&phase, &work, cpus[index % cpus.len()]);
            threads.push(scope.spawn(move || {
                pin(&[cpu])?;
                work(crew, phase)
            }));
        }
        std::thread::sleep(Duration::from_secs_f64(lab.common.warmup));
        let before = boundary();
        phase.store(MEASURE, Relaxed);
        std::thread::sleep(Duration::from_secs_f64(lab.seconds));
        phase.store(STOP, Relaxed);
        let after = boundary();
        let mut sum = Outcome::default();
        for thread in threads {
            sum.add(&thread.join().map_err(|_| anyhow!("a client's thread panicked"))??);
        }
        before.and(after).map(|()| sum)
    })?;
    drop(alive);
    if outcome.errors > 0 {
        bail!("{} of {} requests failed", outcome.errors, outcome.done);
    }
    Ok(outcome)
}

/// Decides when to count.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    /// When, and with how much CPU time of this thread.
    begun: Option<(Instant, Duration)>,
}

/// What a thread should do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    GoOn,
    /// Forget what was counted.
    Begin,
    /// Take what was counted: so much time, and so much CPU time of this thread.
    End(Duration, Duration),
}

impl Counting {
    /// Looks at the phase, once per turn.
    #[inline]
    pub(crate) fn look(&mut self, phase: &AtomicU8) -> Next {
        match (phase.load(Relaxed), self.begun) {
            (MEASURE, None) => {
                self.begun = Some((Instant::now(), cpu_time()));
                Next::Begin
            }
            // A thread that slept through the measurement has counted nothing.
            (STOP, begun) => begun
                .map_or(Next::End(Duration::ZERO, Duration::ZERO), |(at, cpu)| {
                    Next::End(at.elapsed(), cpu_time().saturating_sub(cpu))
                }),
            _ => Next::GoOn,
        }
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists since Linux 2.6.12, the struct is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    // Neither is negative.
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
