//! What metrics are at one moment: the answers of `list` and `stats`, by the names of the one list.

use super::process::Process;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabel, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use ringway_control::metrics::{self as list, Kind, Metric};
use ringway_control::protocol::{
    Buckets, DiskFacts, DiskStatsOf, FailuresOf, State, Stats, WorkerStatsOf,
};
use ringway_export::OPERATIONS;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// One disk, under the name that its metrics have.
#[derive(Debug)]
struct Disk {
    name: String,
    facts: DiskFacts,
    stats: DiskStatsOf,
}

/// All metrics, to be told once.
#[derive(Debug)]
pub(super) struct Snapshot {
    disks: Vec<Disk>,
    workers: Vec<WorkerStatsOf>,
    process: Process,
    took: Duration,
    events_lost: u64,
}

/// The name of a disk that stays the same when its daemon is started again, and that no other one has:
/// its socket, or its device in xenstore; of an inherited socket, the image.
fn name(facts: &DiskFacts) -> String {
    match (&facts.socket, &facts.device) {
        (Some(socket), _) => socket.display().to_string(),
        (None, Some(device)) => device.clone(),
        (None, None) => facts.image.clone(),
    }
}

impl Snapshot {
    /// Of what was asked for in the time that it took.
    pub(super) fn new(
        stats: Stats,
        facts: Vec<DiskFacts>,
        process: Process,
        took: Duration,
        events_lost: u64,
    ) -> Self {
        let mut facts: BTreeMap<u64, DiskFacts> = facts.into_iter().map(|f| (f.id, f)).collect();
        let disk = |stats: DiskStatsOf| {
            // One that came in between is told next time.
            let facts = facts.remove(&stats.id)?;
            Some(Disk { name: name(&facts), facts, stats })
        };
        let disks = stats.disks.into_iter().filter_map(disk).collect();
        Self { disks, workers: stats.workers, process, took, events_lost }
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut Families(&mut encoder);
        self.daemon(to)?;
        self.disks(to)?;
        self.requests(to)?;
        self.costs(to)?;
        self.guests(to)?;
        self.workers(to)?;
        self.process(to)
    }
}

impl Snapshot {
    fn daemon(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        let version = env!("CARGO_PKG_VERSION");
        to.family(&list::BUILD_INFO, |family| family.put(&[version], 1))?;
        to.family(&list::SCRAPE_SECONDS, |family| family.put_time(&[], self.took))?;
        to.family(&list::EVENTS_LOST, |family| family.put(&[], self.events_lost))
    }

    /// One value of each disk.
    fn each(
        &self,
        to: &mut Families<'_, '_>,
        metric: &Metric,
        value: impl Fn(&Disk) -> u64,
    ) -> fmt::Result {
        to.family(metric, |family| {
            let mut disks = self.disks.iter();
            disks.try_for_each(|disk| family.put(&[&disk.name], value(disk)))
        })
    }

    /// One count of each disk whose counts are all there: one that went back would look like a restart.
    fn count(
        &self,
        to: &mut Families<'_, '_>,
        metric: &Metric,
        value: impl Fn(&DiskStatsOf) -> u64,
    ) -> fmt::Result {
        to.family(metric, |family| {
            let mut disks = self.complete();
            disks.try_for_each(|disk| family.put(&[&disk.name], value(&disk.stats)))
        })
    }

    fn complete(&self) -> impl Iterator<Item = &Disk> {
        self.disks.iter().filter(|disk| disk.stats.complete)
    }

    fn disks(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::DISK_INFO, |family| {
            self.disks.iter().try_for_each(|Disk { name, facts, .. }| {
                let DiskFacts { image, serial, engine, cache, path, .. } = facts;
                family.put(&[name, image, serial, engine, cache, &path.kind], 1)
            })
        })?;
        self.each(to, &list::DISK_SIZE, |disk| disk.stats.size)?;
        to.family(&list::DISK_STATE, |family| {
            self.disks.iter().try_for_each(|disk| {
                let is = |state: State| u64::from(disk.stats.state == state);
                let mut all = State::ALL.into_iter();
                all.try_for_each(|state| family.put(&[&disk.name, state.word()], is(state)))
            })
        })?;
        self.each(to, &list::DISK_CONNECTED, |disk| disk.stats.connected.into())?;
        self.each(to, &list::DISK_IN_FLIGHT, |disk| disk.stats.in_flight as u64)?;
        self.each(to, &list::DISK_OVERDUE, |disk| disk.stats.overdue as u64)?;
        self.each(to, &list::DISK_HELD, |disk| {
            disk.stats.held.as_ref().map_or(0, |held| held.count)
        })?;
        self.each(to, &list::DISK_QUEUES, |disk| disk.stats.queues.len() as u64)?;
        self.each(to, &list::DISK_QUEUE_DEPTH, |disk| {
            disk.stats.queues.iter().map(|queue| u64::from(queue.queue_size)).sum()
        })?;
        self.each(to, &list::DISK_BROKEN_QUEUES, |disk| {
            disk.stats.queues.iter().filter(|queue| queue.broken).count() as u64
        })?;
        to.family(&list::DISK_PATH, |family| {
            self.disks.iter().try_for_each(|disk| {
                ["bio", "request"].into_iter().try_for_each(|path| {
                    family.put(&[&disk.name, path], (disk.stats.path.in_use == path).into())
                })
            })
        })
    }

    fn requests(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::DISK_REQUESTS, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                let counts = &stats.counts;
                family.put(&[name, "read"], counts.reads)?;
                family.put(&[name, "write"], counts.writes)?;
                family.put(&[name, "flush"], counts.flushes)?;
                family.put(&[name, "erase"], counts.erases)
            })
        })?;
        to.family(&list::DISK_BYTES, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                family.put(&[name, "read"], stats.counts.read_bytes)?;
                family.put(&[name, "write"], stats.counts.written_bytes)
            })
        })?;
        to.family(&list::DISK_ERRORS, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                family.put(&[name, "refused"], stats.counts.refused)?;
                family.put(&[name, "failed"], stats.counts.failed)
            })
        })?;
        to.family(&list::DISK_HOST_ERRORS, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                // Those that never came, too: otherwise nobody would see the first one as an increase.
                let all = OPERATIONS.into_iter().flat_map(|op| ERRORS.map(|error| (op, error)));
                all.into_iter().try_for_each(|(operation, error)| {
                    let is_it =
                        |one: &&FailuresOf| one.operation == operation && class(one.errno) == error;
                    let count = stats.failures.iter().find(is_it).map_or(0, |one| one.count);
                    if count == 0 && !can_come(operation, error) {
                        return Ok(());
                    }
                    family.put(&[name, operation, error], count)
                })
            })
        })?;
        to.family(&list::DISK_DURATION, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                // An operation that was never timed would be twenty lines of nothing.
                let mut timed = stats.durations.iter().filter(|one| one.nanoseconds.count > 0);
                timed.try_for_each(|one| {
                    family.put_buckets(&[name, &one.operation], &one.nanoseconds, 1e9)
                })
            })
        })
    }

    fn costs(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        self.count(to, &list::DISK_HELD_ALL, |disk| disk.counts.held)?;
        to.family(&list::DISK_THROTTLED, |family| {
            self.complete().try_for_each(|Disk { name, stats, .. }| {
                family.put_time(&[name], Duration::from_micros(stats.counts.throttled_us))
            })
        })?;
        self.count(to, &list::DISK_THROTTLES, |disk| disk.counts.throttled)?;
        self.count(to, &list::DISK_BATCHES, |disk| disk.counts.batches)?;
        self.count(to, &list::DISK_OVERDUES, |disk| disk.counts.overdue)?;
        self.count(to, &list::DISK_SYNCS, |disk| disk.counts.syncs)?;
        self.count(to, &list::DISK_BOUNCED, |disk| disk.counts.bounced)?;
        self.count(to, &list::DISK_SPLIT, |disk| disk.counts.split)?;
        self.count(to, &list::DISK_MERGED, |disk| disk.counts.merged)?;
        self.count(to, &list::DISK_MERGES_SPLIT, |disk| disk.counts.merged_split)?;
        self.count(to, &list::DISK_DEADLINES, |disk| disk.counts.deadlines)?;
        self.count(to, &list::DISK_PATH_SWITCHES, |disk| disk.path.switches)
    }

    fn guests(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        self.count(to, &list::DISK_RECOVERED, |disk| disk.recovered)?;
        self.count(to, &list::DISK_KICKS, |disk| disk.kicks)?;
        self.count(to, &list::DISK_LOST_KICKS, |disk| disk.lost_kicks)?;
        self.count(to, &list::DISK_CALLS, |disk| disk.calls)?;
        self.each(to, &list::DISK_RESTARTS, |disk| disk.facts.restarts)
    }

    /// One count of each worker that has answered.
    fn work(
        &self,
        to: &mut Families<'_, '_>,
        metric: &Metric,
        value: impl Fn(&WorkerStatsOf) -> u64,
    ) -> fmt::Result {
        to.family(metric, |family| {
            self.answering().try_for_each(|one| family.put(&[&one.worker], value(one)))
        })
    }

    fn answering(&self) -> impl Iterator<Item = &WorkerStatsOf> {
        self.workers.iter().filter(|worker| worker.answers)
    }

    fn workers(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::WORKER_ANSWERS, |family| {
            let mut all = self.workers.iter();
            all.try_for_each(|one| family.put(&[&one.worker], one.answers.into()))
        })?;
        to.family(&list::WORKER_SECONDS, |family| {
            self.answering().try_for_each(|one| {
                let mut put = |state, micros| {
                    family.put_time(&[&one.worker, state], Duration::from_micros(micros))
                };
                put("working", one.cpu_us.saturating_sub(one.spin_us))?;
                put("spinning", one.spin_us)?;
                put("asleep", one.age_us.saturating_sub(one.cpu_us))
            })
        })?;
        self.work(to, &list::WORKER_QUEUES, |one| one.queues as u64)?;
        self.work(to, &list::WORKER_REQUESTS, |one| one.requests)?;
        self.work(to, &list::WORKER_OPERATIONS, |one| one.operations)?;
        self.work(to, &list::WORKER_SYSCALLS, |one| one.syscalls)?;
        self.work(to, &list::WORKER_TURNS, |one| one.turns)?;
        self.work(to, &list::WORKER_SLEEPS, |one| one.sleeps)?;
        self.work(to, &list::WORKER_LOST_CALLS, |one| one.lost_calls)?;
        let put = |family: &mut Family<'_>, one: &WorkerStatsOf, buckets: &Option<Buckets>| {
            let mut values = buckets.iter();
            values.try_for_each(|buckets| family.put_buckets(&[&one.worker], buckets, 1.0))
        };
        to.family(&list::WORKER_BATCHES, |family| {
            self.answering().try_for_each(|one| put(family, one, &one.batch_buckets))
        })?;
        to.family(&list::WORKER_HARVESTS, |family| {
            self.answering().try_for_each(|one| put(family, one, &one.harvest_buckets))
        })
    }

    fn process(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        let process = &self.process;
        to.family(&list::PROCESS_CPU, |family| family.put_time(&[], process.cpu))?;
        for (metric, value) in [
            (&list::PROCESS_FDS, process.open_fds),
            (&list::PROCESS_MAX_FDS, process.max_fds),
            (&list::PROCESS_VIRTUAL, process.virtual_bytes),
            (&list::PROCESS_RESIDENT, process.resident_bytes),
        ] {
            to.family(metric, |family| value.map_or(Ok(()), |value| family.put(&[], value)))?;
        }
        to.family(&list::PROCESS_START, |family| family.put_time(&[], process.started))
    }
}

/// The classes of errors.
const ERRORS: [&str; 4] = ["no-space", "io", "other", "none"];

/// Whether an operation is expected to fail so at all: reads need no space, and only what moves data can
/// move none.
fn can_come(operation: &str, error: &str) -> bool {
    match error {
        "no-space" => operation != "read",
        "none" => matches!(operation, "read" | "write"),
        _ => true,
    }
}

/// The class of an error of the host, as `ringway_disk` counts them.
fn class(errno: Option<i32>) -> &'static str {
    match errno {
        None => "none",
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => "no-space",
        Some(libc::EIO) => "io",
        Some(_) => "other",
    }
}

/// Where families go.
struct Families<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Families<'_, '_> {
    fn family(
        &mut self,
        metric: &Metric,
        fill: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let (name, kind) = match metric.kind {
            // Its last word is added to each of its lines.
            Kind::Counter => (metric.name.trim_end_matches("_total"), MetricType::Counter),
            Kind::Gauge => (metric.name, MetricType::Gauge),
            Kind::Histogram => (metric.name, MetricType::Histogram),
        };
        let encoder = self.0.encode_descriptor(name, metric.help, None, kind)?;
        fill(&mut Family { encoder, kind: metric.kind, labels: metric.labels })
    }
}

/// The time series of one metric.
struct Family<'a> {
    encoder: MetricEncoder<'a>,
    kind: Kind,
    labels: &'static [&'static str],
}

impl Family<'_> {
    fn with(
        &mut self,
        values: &[&str],
        tell: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        debug_assert_eq!(values.len(), self.labels.len(), "{values:?} {:?}", self.labels);
        match values {
            [] => tell(&mut self.encoder),
            _ => tell(&mut self.encoder.encode_family(&Labels(self.labels, values))?),
        }
    }

    fn put(&mut self, values: &[&str], value: u64) -> fmt::Result {
        let kind = self.kind;
        self.with(values, |encoder| match kind {
            Kind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&value, None),
            // A gauge of the library is signed, or has a point: exact up to 2^53.
            _ => match i64::try_from(value) {
                Ok(value) => encoder.encode_gauge(&value),
                Err(_) => encoder.encode_gauge(&f64::INFINITY),
            },
        })
    }

    fn put_time(&mut self, values: &[&str], time: Duration) -> fmt::Result {
        let (kind, seconds) = (self.kind, time.as_secs_f64());
        self.with(values, |encoder| match kind {
            Kind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&seconds, None),
            _ => encoder.encode_gauge(&seconds),
        })
    }

    /// Values are told in parts of `unit`.
    #[allow(clippy::cast_precision_loss)]
    fn put_buckets(&mut self, values: &[&str], counted: &Buckets, unit: f64) -> fmt::Result {
        let within: u64 = counted.buckets.iter().map(|(_, count)| count).sum();
        let beyond = (f64::INFINITY, counted.count.saturating_sub(within));
        let bounded = counted.buckets.iter().map(|&(bound, count)| (bound as f64 / unit, count));
        let buckets: Vec<_> = bounded.chain([beyond]).collect();
        let sum = counted.sum as f64 / unit;
        self.with(values, |encoder| {
            encoder.encode_histogram::<NoLabelSet>(sum, counted.count, &buckets, None)
        })
    }
}

/// Names and values.
struct Labels<'a>(&'a [&'static str], &'a [&'a str]);

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let mut pairs = self.0.iter().zip(self.1);
        pairs.try_for_each(|(name, value)| (*name, *value).encode(encoder.encode_label()))
    }
}
