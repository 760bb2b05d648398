//! Threads that warm up, are measured and stop together.

use crate::bench::lab::Lab;
use crate::bench::load::Outcome;
use crate::bench::options::pin;
use anyhow::{Result, anyhow, bail};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// When to begin counting and when to end: the main thread says so.
const WARM: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// Runs one thread for each load and tells all of them when to count.
pub(crate) fn measure<C: Send>(
    lab: &Lab,
    loads: Vec<C>,
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
        for (index, load) in loads.into_iter().enumerate() {
            let (phase, work, cpu) = (&phase, &work, cpus[index % cpus.len()]);
            threads.push(scope.spawn(move || {
                pin(&[cpu])?;
                work(load, phase)
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
