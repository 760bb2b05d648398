//! What is asked for of a server, and what was seen of it.

use crate::bench::options::Waiting;
use hdrhistogram::Histogram;

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
