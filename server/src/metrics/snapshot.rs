//! What metrics are at one moment: the answers of `list` and `stats`, by the names of the one list.

use super::encode::{Families, Family, labels};
use super::process::Process;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use ringway_control::metrics::{self as list, Metric};
use ringway_control::protocol::{
    Buckets, DiskFacts, DiskStatsOf, FailuresOf, LimitGroupFacts, State, Stats, WorkerStatsOf,
};
use ringway_export::OPERATIONS;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// One disk, under the name that its metrics have.
#[derive(Debug)]
struct Disk {
    name: String,
    /// The same as a label.
    label: String,
    facts: DiskFacts,
    stats: DiskStatsOf,
}

/// All metrics, to be written once.
#[derive(Debug)]
pub(super) struct Snapshot {
    disks: Vec<Disk>,
    groups: Vec<LimitGroupFacts>,
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
        groups: Vec<LimitGroupFacts>,
        process: Process,
        took: Duration,
        events_lost: u64,
    ) -> Self {
        let mut facts: BTreeMap<u64, DiskFacts> = facts.into_iter().map(|f| (f.id, f)).collect();
        let disk = |stats: DiskStatsOf| {
            // One that came in between is reported next time.
            let facts = facts.remove(&stats.id)?;
            let name = name(&facts);
            Some(Disk { label: labels(&["disk"], &[&name]), name, facts, stats })
        };
        let disks = stats.disks.into_iter().filter_map(disk).collect();
        Self { disks, groups, workers: stats.workers, process, took, events_lost }
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut Families(&mut encoder);
        self.daemon(to)?;
        self.disks(to)?;
        self.limits(to)?;
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
        to.family(&list::BUILD_INFO, |family| family.put(&[&family.labels(&[version])], 1))?;
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
            disks.try_for_each(|disk| family.put(&[&disk.label], value(disk)))
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
            disks.try_for_each(|disk| family.put(&[&disk.label], value(&disk.stats)))
        })
    }

    fn complete(&self) -> impl Iterator<Item = &Disk> {
        self.disks.iter().filter(|disk| disk.stats.complete)
    }

    fn disks(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::DISK_INFO, |family| {
            self.disks.iter().try_for_each(|Disk { name, facts, .. }| {
                let DiskFacts { image, serial, engine, cache, path, .. } = facts;
                let labels = [name, image, serial, engine, cache, &path.kind];
                family.put(&[&family.labels(&labels.map(String::as_str))], 1)
            })
        })?;
        self.each(to, &list::DISK_SIZE, |disk| disk.stats.size)?;
        to.family(&list::DISK_STATE, |family| {
            let states = State::ALL.map(|state| (state, family.further(&[state.word()])));
            self.disks.iter().try_for_each(|disk| {
                let is = |state: State| u64::from(disk.stats.state == state);
                let mut all = states.iter();
                all.try_for_each(|(state, label)| family.put(&[&disk.label, label], is(*state)))
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
            let paths = ["bio", "request"].map(|path| (path, family.further(&[path])));
            self.disks.iter().try_for_each(|Disk { label, stats, .. }| {
                paths.iter().try_for_each(|(path, further)| {
                    family.put(&[label, further], (stats.path.in_use == *path).into())
                })
            })
        })
    }

    fn limits(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::DISK_LIMIT, |family| {
            self.disks.iter().try_for_each(|Disk { label, facts, .. }| {
                let mut limits = facts.limits.iter();
                limits.try_for_each(|(limit, amount)| {
                    family.put(&[label, &family.further(&[limit])], *amount)
                })
            })
        })?;
        to.family(&list::DISK_LIMIT_GROUP, |family| {
            self.disks.iter().try_for_each(|Disk { label, facts, .. }| {
                let mut group = facts.limit_group.iter();
                group.try_for_each(|group| family.put(&[label, &family.further(&[group])], 1))
            })
        })?;
        to.family(&list::LIMIT_GROUP_LIMIT, |family| {
            self.groups.iter().try_for_each(|LimitGroupFacts { name, limits, .. }| {
                limits.iter().try_for_each(|(limit, amount)| {
                    family.put(&[&family.labels(&[name, limit])], *amount)
                })
            })
        })
    }

    fn requests(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::DISK_REQUESTS, |family| {
            let operations = OPERATIONS.map(|operation| family.further(&[operation]));
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                let counts = &stats.counts;
                let counts = [counts.reads, counts.writes, counts.flushes, counts.erases];
                let mut all = operations.iter().zip(counts);
                all.try_for_each(|(operation, count)| family.put(&[label, operation], count))
            })
        })?;
        to.family(&list::DISK_BYTES, |family| {
            let [read, write] = ["read", "write"].map(|operation| family.further(&[operation]));
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                family.put(&[label, &read], stats.counts.read_bytes)?;
                family.put(&[label, &write], stats.counts.written_bytes)
            })
        })?;
        to.family(&list::DISK_ERRORS, |family| {
            let [refused, failed] = ["refused", "failed"].map(|kind| family.further(&[kind]));
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                family.put(&[label, &refused], stats.counts.refused)?;
                family.put(&[label, &failed], stats.counts.failed)
            })
        })?;
        to.family(&list::DISK_HOST_ERRORS, |family| {
            // Those that never came, too: otherwise nobody would see the first one as an increase.
            let all = OPERATIONS.into_iter().flat_map(|op| ERRORS.map(|error| (op, error)));
            let all: Vec<_> =
                all.map(|(op, error)| (op, error, family.further(&[op, error]))).collect();
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                all.iter().try_for_each(|(operation, error, further)| {
                    let is_it = |one: &&FailuresOf| {
                        one.operation == *operation && class(one.errno) == *error
                    };
                    let count = stats.failures.iter().find(is_it).map_or(0, |one| one.count);
                    if count == 0 && !can_come(operation, error) {
                        return Ok(());
                    }
                    family.put(&[label, further], count)
                })
            })
        })?;
        to.family(&list::DISK_DURATION, |family| {
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                // An operation that was never timed would be twenty lines of nothing.
                let mut timed = stats.durations.iter().filter(|one| one.nanoseconds.count > 0);
                timed.try_for_each(|one| {
                    let operation = family.further(&[&one.operation]);
                    family.put_buckets(&[label, &operation], &one.nanoseconds, 1e9)
                })
            })
        })
    }

    fn costs(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        self.count(to, &list::DISK_HELD_ALL, |disk| disk.counts.held)?;
        to.family(&list::DISK_THROTTLED, |family| {
            self.complete().try_for_each(|Disk { label, stats, .. }| {
                family.put_time(&[label], Duration::from_micros(stats.counts.throttled_us))
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
        self.count(to, &list::DISK_PATH_SWITCHES, |disk| disk.path.switches)?;
        self.each(to, &list::DISK_NOT_POLLED, |disk| disk.stats.path.not_polled.into())?;
        let away = |disk: &Disk| disk.stats.storage.server_away.is_some().into();
        self.each(to, &list::DISK_SERVER_AWAY, away)?;
        self.each(to, &list::DISK_FLUSHES_FAIL, |disk| disk.stats.storage.flushes_fail.into())
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
            self.answering()
                .try_for_each(|one| family.put(&[&family.labels(&[&one.worker])], value(one)))
        })
    }

    fn answering(&self) -> impl Iterator<Item = &WorkerStatsOf> {
        self.workers.iter().filter(|worker| worker.answers)
    }

    fn workers(&self, to: &mut Families<'_, '_>) -> fmt::Result {
        to.family(&list::WORKER_ANSWERS, |family| {
            let mut all = self.workers.iter();
            all.try_for_each(|one| {
                family.put(&[&family.labels(&[&one.worker])], one.answers.into())
            })
        })?;
        to.family(&list::WORKER_SECONDS, |family| {
            self.answering().try_for_each(|one| {
                let mut put = |state, micros| {
                    let labels = family.labels(&[&one.worker, state]);
                    family.put_time(&[&labels], Duration::from_micros(micros))
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
            values.try_for_each(|buckets| {
                family.put_buckets(&[&family.labels(&[&one.worker])], buckets, 1.0)
            })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::text::open_metrics;
    use serde_json::json;

    /// The metrics of one disk, every value of it another one.
    fn written() -> String {
        let disk = json!({
            "id": 1, "image": "image", "size": 101, "engine": "threads", "state": "serving",
            "path": {"kind": "auto", "in_use": "request", "switches": 102},
            "connected": true, "write_cache": true, "in_flight": 103, "overdue": 104,
            "counts": {
                "reads": 201, "read_bytes": 202, "writes": 203, "written_bytes": 204, "flushes": 205,
                "durable_bytes": 206, "syncs": 207, "erases": 208, "errors": 209, "refused": 210,
                "failed": 211, "bounced": 212, "split": 213, "continued": 214, "plugged": 215,
                "merged": 216, "merged_split": 217, "deadlines": 218, "overdue": 219, "held": 220,
                "batches": 221, "throttled": 222, "throttled_us": 2_500_000,
            },
            "kicks": 105, "lost_kicks": 106, "calls": 107, "recovered": 108,
            "failures": [
                {"operation": "write", "count": 301, "errno": libc::EIO, "error": "", "sector": 0},
                {"operation": "write", "count": 302, "errno": libc::ENOSPC, "error": "", "sector": 0},
                {"operation": "read", "count": 303, "errno": libc::EIO, "error": "", "sector": 0},
            ],
            "latency": null, "queues": [],
        });
        let disk = serde_json::from_value(disk).unwrap();
        let stats = Stats { uptime_us: 0, disks: vec![disk], workers: Vec::new() };
        let facts = json!({
            "id": 1, "image": "image", "socket": "socket", "size": 101, "read_only": false,
            "serial": "", "block_size": 512, "queues": 1, "queue_size": 128, "workers": 1,
            "engine": "threads", "engine_why": "", "cache": "", "cache_why": "", "state": "serving",
            "connected": true, "restarts": 109,
        });
        let facts = serde_json::from_value(facts).unwrap();
        let process = Process::default();
        let snapshot =
            Snapshot::new(stats, vec![facts], Vec::new(), process, Duration::from_millis(3), 110);
        open_metrics(snapshot, String::new())
    }

    /// No metric has the value of its neighbour.
    #[test]
    fn each_count_has_its_own_name() {
        let text = written();
        let value = |series: &str| {
            let mut lines = text.lines().filter_map(|line| line.strip_prefix(series));
            let value = lines.next().unwrap_or_else(|| panic!("no {series}: {text}"));
            assert_eq!(lines.next(), None, "{series} twice");
            value.trim().to_owned()
        };
        for (name, expected) in [
            ("size_bytes", "101"),
            ("path_switches_total", "102"),
            ("in_flight_requests", "103"),
            ("overdue_requests", "104"),
            ("kicks_total", "105"),
            ("lost_kicks_total", "106"),
            ("calls_total", "107"),
            ("recovered_requests_total", "108"),
            ("restarts_total", "109"),
            ("syncs_total", "207"),
            ("bounced_total", "212"),
            ("split_total", "213"),
            ("merged_total", "216"),
            ("merged_split_total", "217"),
            ("deadlines_total", "218"),
            ("batches_total", "221"),
            ("throttled_total", "222"),
            ("overdue_total", "219"),
            ("held_total", "220"),
            ("held_requests", "0"),
            ("throttled_seconds_total", "2.5"),
        ] {
            assert_eq!(
                value(&format!("ringway_disk_{name}{{disk=\"socket\"}}")),
                expected,
                "{name}"
            );
        }
        for (name, label, expected) in [
            ("requests_total", "operation=\"read\"", "201"),
            ("requests_total", "operation=\"write\"", "203"),
            ("requests_total", "operation=\"flush\"", "205"),
            ("requests_total", "operation=\"erase\"", "208"),
            ("bytes_total", "operation=\"read\"", "202"),
            ("bytes_total", "operation=\"write\"", "204"),
            ("errors_total", "kind=\"refused\"", "210"),
            ("errors_total", "kind=\"failed\"", "211"),
            ("host_errors_total", "operation=\"write\",error=\"io\"", "301"),
            ("host_errors_total", "operation=\"write\",error=\"no-space\"", "302"),
            ("host_errors_total", "operation=\"read\",error=\"io\"", "303"),
            ("host_errors_total", "operation=\"read\",error=\"other\"", "0"),
            ("path", "path=\"request\"", "1"),
            ("path", "path=\"bio\"", "0"),
        ] {
            let series = format!("ringway_disk_{name}{{disk=\"socket\",{label}}}");
            assert_eq!(value(&series), expected, "{series}");
        }
        assert_eq!(value("ringway_events_lost_total"), "110");
        assert_eq!(value("ringway_scrape_seconds"), "0.003");
    }
}
