//! What it costs to wake a thread of another core: what a client that sleeps adds to every request,
//! whoever serves it.

use crate::bench::lab::Lab;
use crate::bench::options::pin;
use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// How often a thread is woken, and how long it has slept then: as long as a disk takes.
const TIMES: usize = 4_000;
const ASLEEP: Duration = Duration::from_micros(50);

/// All of it takes a second.
const LATEST: Duration = Duration::from_secs(60);

/// Medians and tenths, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Wake {
    /// From the call to wake it until the thread runs: a tenth of all take less, the median, and a
    /// tenth take more.
    latency_ns: [u64; 3],
    /// Of the call itself, on the core that makes it.
    call_ns: u64,
}

impl Wake {
    /// From the first core of the server to the first of the client, by an eventfd, as a device calls
    /// its driver. `None` if they are the same.
    pub(crate) fn measure(lab: &Lab) -> Result<Option<Self>> {
        let first = |cpus: &[usize]| cpus.first().copied().context("no cores");
        let (from, to) = (first(&lab.common.server_cpus)?, first(&lab.common.client_cpus)?);
        if from == to {
            return Ok(None);
        }
        let call = eventfd(0, EventfdFlags::SEMAPHORE)?;
        let (begun, seen) = (Instant::now(), AtomicU64::new(0));
        let now = || u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let (mut latencies, mut calls) = (Vec::with_capacity(TIMES), Vec::with_capacity(TIMES));
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| -> Result<()> {
                pin(&[to])?;
                for _ in 0..TIMES {
                    read(&call, &mut [0; 8])?;
                    seen.store(now(), SeqCst);
                }
                Ok(())
            });
            let waker = scope.spawn(|| -> Result<()> {
                pin(&[from])?;
                for _ in 0..TIMES {
                    let due = Instant::now() + ASLEEP;
                    while Instant::now() < due {
                        std::hint::spin_loop();
                    }
                    seen.store(0, SeqCst);
                    let before = now();
                    write(&call, &1u64.to_ne_bytes())?;
                    calls.push(now() - before);
                    let at = loop {
                        match seen.load(SeqCst) {
                            0 => ensure!(begun.elapsed() < LATEST, "nobody wakes up"),
                            at => break at,
                        }
                    };
                    latencies.push(at.saturating_sub(before));
                }
                Ok(())
            });
            let woken = waker.join().expect("it does not panic");
            // Whatever became of the waker, the other does not wait for ever.
            write(&call, &(TIMES as u64).to_ne_bytes())?;
            woken.and(sleeper.join().expect("it does not panic"))
        })?;
        latencies.sort_unstable();
        calls.sort_unstable();
        let latency_ns = [TIMES / 10, TIMES / 2, TIMES * 9 / 10].map(|at| latencies[at]);
        Ok(Some(Self { latency_ns, call_ns: calls[TIMES / 2] }))
    }

    /// A sentence.
    pub(crate) fn words(&self) -> String {
        let [low, middle, high] = self.latency_ns.map(|ns| ns as f64 / 1e3);
        format!(
            "A thread that has slept for {} µs on the client's core runs {middle:.1} µs after it was called \
             from the server's (a tenth before {low:.1}, a tenth after {high:.1}), and the call takes {:.1} µs: \
             of what any server adds for a client that sleeps, so much is the host's.",
            ASLEEP.as_micros(),
            self.call_ns as f64 / 1e3
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_has_microseconds() {
        let wake = Wake { latency_ns: [20_190, 21_883, 26_855], call_ns: 6_860 };
        let words = wake.words();
        assert!(words.contains("runs 21.9 µs"), "{words}");
        assert!(words.contains("before 20.2, a tenth after 26.9"), "{words}");
        assert!(words.contains("the call takes 6.9 µs"), "{words}");
    }
}
