//! Figures: what the answers of a daemon say together. Counts only grow, so that two answers make
//! rates; latencies are of the last [`WINDOW`] answers, because few requests are timed.

use super::buckets::{Buckets, Percentiles};
use ringway_control::protocol::{
    Counts, DaemonFacts, DiskFacts, DiskStatsOf, HeldFacts, Latencies, List, PathFacts,
    QueueStatsOf, Spread, State, Stats, StorageFacts, WorkerStatsOf,
};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

/// Answers that latencies are told from.
const WINDOW: usize = 10;

/// What a daemon answered at one moment.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) list: List,
    /// With buckets.
    pub(super) stats: Stats,
}

/// The last answers of one daemon.
#[derive(Debug, Default)]
pub(super) struct Samples(VecDeque<Sample>);

/// All that is shown. The names of the fields are the keys of the JSON and stay as they are; `null`
/// is what cannot be told yet.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) daemon: DaemonFacts,
    /// Between the two answers that rates are told from.
    pub(super) seconds: Option<f64>,
    /// Between the two that latencies are told from.
    pub(super) latency_window_seconds: Option<f64>,
    pub(super) disks: Vec<DiskFigures>,
    pub(super) workers: Vec<WorkerFigures>,
}

/// A disk.
#[derive(Debug, Serialize)]
pub(super) struct DiskFigures {
    pub(super) id: u64,
    pub(super) image: String,
    pub(super) socket: Option<PathBuf>,
    /// Its folder in xenstore.
    pub(super) device: Option<String>,
    pub(super) size: u64,
    pub(super) read_only: bool,
    pub(super) state: State,
    pub(super) connected: bool,
    /// What is wrong with its front-end, if its queues do not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) front_end: Option<String>,
    /// What is wrong with what holds its data.
    pub(super) storage: StorageFacts,
    /// How many front-ends have connected so far.
    pub(super) connections: u64,
    pub(super) engine: String,
    pub(super) engine_why: String,
    pub(super) cache: String,
    pub(super) cache_why: String,
    pub(super) write_cache: bool,
    pub(super) path: PathFacts,
    /// Its own limits, by their words.
    pub(super) limits: BTreeMap<String, u64>,
    pub(super) limit_group: Option<String>,
    pub(super) in_flight: usize,
    /// Those of them that have been under way for too long.
    pub(super) overdue: usize,
    /// Requests that the disk has failed, and that wait.
    pub(super) held: u64,
    /// Why, for how long, and what becomes of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holding: Option<HeldFacts>,
    pub(super) rates: Option<Rates>,
    /// Of reads and writes together.
    pub(super) latency: Percentiles,
    pub(super) reads: Percentiles,
    pub(super) writes: Percentiles,
    /// Of flushes, discards, write-zeroes.
    pub(super) others: Percentiles,
    /// Of the workers that serve its queues; they may serve others too.
    pub(super) effort: Option<Effort>,
    pub(super) queues: Vec<QueueFigures>,
}

/// A queue that runs.
#[derive(Debug, Serialize)]
pub(super) struct QueueFigures {
    pub(super) queue: usize,
    pub(super) worker: String,
    pub(super) queue_size: u16,
    pub(super) in_flight: usize,
    pub(super) overdue: usize,
    pub(super) held: usize,
    pub(super) broken: bool,
    pub(super) rates: Option<Rates>,
    pub(super) latency: Percentiles,
    /// Of its worker, which may serve others too.
    pub(super) effort: Option<Effort>,
}

/// A worker.
#[derive(Debug, Serialize)]
pub(super) struct WorkerFigures {
    pub(super) worker: String,
    pub(super) answers: bool,
    pub(super) queues: usize,
    pub(super) requests_s: Option<f64>,
    pub(super) sleeps_s: Option<f64>,
    #[serde(flatten)]
    pub(super) effort: Option<Effort>,
    pub(super) batches: Percentiles,
    pub(super) harvests: Percentiles,
}

/// Per second; megabytes are 10^6 bytes.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Rates {
    pub(super) iops: f64,
    pub(super) reads_s: f64,
    pub(super) writes_s: f64,
    pub(super) flushes_s: f64,
    pub(super) erases_s: f64,
    pub(super) errors_s: f64,
    pub(super) read_mb_s: f64,
    pub(super) write_mb_s: f64,
    pub(super) bounced_s: f64,
    pub(super) split_s: f64,
    pub(super) merged_s: f64,
    pub(super) kicks_s: f64,
    pub(super) calls_s: f64,
    /// The part of the time in which a queue had requests that waited for a limit.
    pub(super) throttled: f64,
}

/// What the requests cost.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Effort {
    pub(super) requests_per_submit: Option<f64>,
    pub(super) completions_per_harvest: Option<f64>,
    pub(super) syscalls_per_io: Option<f64>,
    /// Parts of the workers' time, together 1. Asleep is also who waits for a CPU.
    pub(super) working: f64,
    pub(super) spinning: f64,
    pub(super) asleep: f64,
}

impl Samples {
    /// Takes the next answer in.
    pub(super) fn push(&mut self, sample: Sample) {
        let daemon = |sample: &Sample| sample.list.daemon.pid;
        if self.0.back().is_some_and(|last| {
            daemon(last) != daemon(&sample) || last.stats.uptime_us >= sample.stats.uptime_us
        }) {
            // Another daemon has begun to count.
            self.0.clear();
        }
        while self.0.len() > WINDOW {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// The last answer, the one before it, and the oldest one that latencies are told from.
    pub(super) fn span(&self) -> Option<(&Sample, Option<&Sample>, Option<&Sample>)> {
        let then = self.0.iter().rev().nth(1);
        Some((self.0.back()?, then, self.0.front().filter(|_| then.is_some())))
    }

    /// What the answers so far say; `None` if there are none.
    pub(super) fn figures(&self) -> Option<Figures> {
        let (now, then, oldest) = self.span()?;
        let seconds = |then: &Sample| {
            let us = now.stats.uptime_us.saturating_sub(then.stats.uptime_us);
            us as f64 / 1e6
        };
        let eras =
            Eras { seconds: then.map(seconds), then: then.map(stats), oldest: oldest.map(stats) };
        let disks = now.stats.disks.iter().filter_map(|disk| {
            let facts = now.list.disks.iter().find(|facts| facts.id == disk.id)?;
            Some(disk_figures(disk, facts, &now.stats, &eras))
        });
        Some(Figures {
            daemon: now.list.daemon.clone(),
            seconds: eras.seconds,
            latency_window_seconds: oldest.map(seconds),
            disks: disks.collect(),
            workers: now.stats.workers.iter().map(|worker| eras.worker(worker)).collect(),
        })
    }
}

fn stats(sample: &Sample) -> &Stats {
    &sample.stats
}

/// Earlier answers.
struct Eras<'a> {
    /// Since `then`.
    seconds: Option<f64>,
    then: Option<&'a Stats>,
    oldest: Option<&'a Stats>,
}

fn disk_figures(
    now: &DiskStatsOf,
    facts: &DiskFacts,
    stats: &Stats,
    eras: &Eras<'_>,
) -> DiskFigures {
    let of = |stats: Option<&'_ Stats>| -> Option<usize> {
        stats?.disks.iter().position(|disk| disk.id == now.id)
    };
    let then = eras.then.zip(of(eras.then)).map(|(stats, at)| &stats.disks[at]);
    let oldest = eras.oldest.zip(of(eras.oldest)).map(|(stats, at)| &stats.disks[at]);
    let queues: Vec<_> =
        now.queues.iter().map(|queue| eras.queue(queue, then, oldest, stats)).collect();
    let rates = then.zip(eras.seconds).map(|(then, seconds)| {
        // The sum of nothing would be -0.0.
        let sum = |of: fn(&Rates) -> f64| {
            queues.iter().flat_map(|queue| &queue.rates).map(of).fold(0.0, |sum, rate| sum + rate)
        };
        Rates {
            kicks_s: sum(|rates| rates.kicks_s),
            calls_s: sum(|rates| rates.calls_s),
            throttled: sum(|rates| rates.throttled) / queues.len().max(1) as f64,
            ..rates(&now.counts, &then.counts, seconds)
        }
    });
    let spread = |of: &[fn(&Latencies) -> &Spread]| {
        let buckets =
            |disk: Option<&DiskStatsOf>| Buckets::of(disk.and_then(|d| d.latency.as_ref()), of);
        buckets(Some(now)).since(&buckets(oldest)).percentiles()
    };
    let serves = |worker: &&WorkerStatsOf| now.queues.iter().any(|q| q.worker == worker.worker);
    let workers: Vec<_> = stats.workers.iter().filter(serves).collect();
    DiskFigures {
        id: now.id,
        image: now.image.clone(),
        socket: facts.socket.clone(),
        device: facts.device.clone(),
        size: now.size,
        read_only: facts.read_only,
        state: now.state,
        connected: now.connected,
        front_end: now.front_end.clone(),
        storage: now.storage.clone(),
        connections: now.connections,
        engine: now.engine.clone(),
        engine_why: facts.engine_why.clone(),
        cache: facts.cache.clone(),
        cache_why: facts.cache_why.clone(),
        write_cache: now.write_cache,
        path: now.path.clone(),
        limits: facts.limits.clone(),
        limit_group: facts.limit_group.clone(),
        in_flight: now.in_flight,
        overdue: now.overdue,
        held: now.held.as_ref().map_or(0, |held| held.count),
        holding: now.held.clone(),
        rates,
        latency: spread(&[|l| &l.reads, |l| &l.writes]),
        reads: spread(&[|l| &l.reads]),
        writes: spread(&[|l| &l.writes]),
        others: spread(&[|l| &l.others]),
        effort: eras.effort(&workers),
        queues,
    }
}

impl Eras<'_> {
    fn queue(
        &self,
        now: &QueueStatsOf,
        then: Option<&DiskStatsOf>,
        oldest: Option<&DiskStatsOf>,
        stats: &Stats,
    ) -> QueueFigures {
        fn of(disk: &DiskStatsOf, queue: usize) -> Option<&QueueStatsOf> {
            disk.queues.iter().find(|other| other.queue == queue)
        }
        // One that was not there before has begun with nothing.
        let nothing = Counts::default();
        let rates = then.zip(self.seconds).map(|(then, seconds)| {
            let (counts, kicks, calls) =
                of(then, now.queue).map_or((&nothing, 0, 0), |q| (&q.counts, q.kicks, q.calls));
            Rates {
                kicks_s: grown(now.kicks, kicks) / seconds,
                calls_s: grown(now.calls, calls) / seconds,
                ..rates(&now.counts, counts, seconds)
            }
        });
        let buckets = |queue: Option<&QueueStatsOf>| {
            Buckets::of(queue.and_then(|q| q.latency.as_ref()), &[|l| &l.reads, |l| &l.writes])
        };
        let oldest = buckets(oldest.and_then(|disk| of(disk, now.queue)));
        let workers: Vec<_> = stats.workers.iter().filter(|w| w.worker == now.worker).collect();
        QueueFigures {
            queue: now.queue,
            worker: now.worker.clone(),
            queue_size: now.queue_size,
            in_flight: now.in_flight,
            overdue: now.overdue,
            held: now.held,
            broken: now.broken,
            rates,
            latency: buckets(Some(now)).since(&oldest).percentiles(),
            effort: self.effort(&workers),
        }
    }

    fn worker(&self, now: &WorkerStatsOf) -> WorkerFigures {
        let then = self.before(now);
        let per_second = |of: fn(&WorkerStatsOf) -> u64| {
            then.zip(self.seconds).map(|(then, seconds)| grown(of(now), of(then)) / seconds)
        };
        let spread = |of: fn(&WorkerStatsOf) -> &Spread| {
            let then = then.map(|then| Buckets::spread(of(then))).unwrap_or_default();
            Buckets::spread(of(now)).since(&then).percentiles()
        };
        WorkerFigures {
            worker: now.worker.clone(),
            answers: now.answers,
            queues: now.queues,
            requests_s: per_second(|worker| worker.requests),
            sleeps_s: per_second(|worker| worker.sleeps),
            effort: self.effort(&[now]),
            batches: spread(|worker| &worker.batches),
            harvests: spread(|worker| &worker.harvests),
        }
    }

    fn before(&self, now: &WorkerStatsOf) -> Option<&WorkerStatsOf> {
        let then = self.then?.workers.iter().find(|worker| worker.worker == now.worker)?;
        (then.answers && now.answers).then_some(then)
    }

    /// Of several workers together; `None` if there was none before.
    fn effort(&self, workers: &[&WorkerStatsOf]) -> Option<Effort> {
        let pairs: Vec<_> =
            workers.iter().filter_map(|now| Some((*now, self.before(now)?))).collect();
        let sum = |of: fn(&WorkerStatsOf) -> u64| -> f64 {
            pairs.iter().map(|(now, then)| grown(of(now), of(then))).sum()
        };
        let age = sum(|worker| worker.age_us);
        if age <= 0.0 {
            return None;
        }
        let ratio = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
        let cpu = (sum(|worker| worker.cpu_us) / age).min(1.0);
        let spinning = (sum(|worker| worker.spin_us) / age).min(cpu);
        let requests = sum(|worker| worker.requests);
        let mean = |of: fn(&WorkerStatsOf) -> &Spread| {
            let tallies = pairs
                .iter()
                .map(|(now, then)| Buckets::spread(of(now)).since(&Buckets::spread(of(then))));
            tallies.reduce(Buckets::and).and_then(|buckets| buckets.mean())
        };
        Some(Effort {
            requests_per_submit: mean(|worker| &worker.batches),
            completions_per_harvest: mean(|worker| &worker.harvests),
            syscalls_per_io: ratio(sum(|worker| worker.syscalls), requests),
            working: cpu - spinning,
            spinning,
            asleep: 1.0 - cpu,
        })
    }
}

/// What came to a count. One that became smaller has begun anew.
fn grown(now: u64, then: u64) -> f64 {
    (if now >= then { now - then } else { now }) as f64
}

fn rates(now: &Counts, then: &Counts, seconds: f64) -> Rates {
    let rate = |of: fn(&Counts) -> u64| grown(of(now), of(then)) / seconds;
    let (reads_s, writes_s) = (rate(|c| c.reads), rate(|c| c.writes));
    let (flushes_s, erases_s) = (rate(|c| c.flushes), rate(|c| c.erases));
    let errors_s = rate(|c| c.errors);
    Rates {
        iops: reads_s + writes_s + flushes_s + erases_s + errors_s,
        reads_s,
        writes_s,
        flushes_s,
        erases_s,
        errors_s,
        read_mb_s: rate(|c| c.read_bytes) / 1e6,
        write_mb_s: rate(|c| c.written_bytes) / 1e6,
        bounced_s: rate(|c| c.bounced),
        split_s: rate(|c| c.split),
        merged_s: rate(|c| c.merged),
        kicks_s: 0.0,
        calls_s: 0.0,
        throttled: (rate(|c| c.throttled_us) / 1e6).min(1.0),
    }
}

#[cfg(test)]
mod tests;
