//! The metrics of a daemon: one list. What `serve --metrics` tells, `docs/metrics.md`, the dashboard and
//! the alert rules below `contrib/` are made from it.

/// One metric; with its labels, a family of time series.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// As queries name it.
    pub name: &'static str,
    /// What it is.
    pub kind: MetricKind,
    /// What its value is counted in; empty for plain numbers.
    pub unit: &'static str,
    /// The names of its labels. Their values are disks, workers and the words of fixed lists.
    pub labels: &'static [&'static str],
    /// What it tells, in one line.
    pub help: &'static str,
}

/// What a metric is, to those who collect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, until its disk or worker is gone.
    Counter,
    /// Goes up and down.
    Gauge,
    /// How values are spread.
    Histogram,
}

impl MetricKind {
    /// The word of the text format.
    pub fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

macro_rules! metrics {
    ($($id:ident = $kind:ident $name:literal $unit:literal [$($label:literal),*] $help:literal;)*) => {
        $(#[doc = $help]
        pub const $id: Metric = Metric {
            name: $name,
            kind: MetricKind::$kind,
            unit: $unit,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// All of them, in the order in which they are told.
        pub const ALL: &[Metric] = &[$($id),*];
    };
}

metrics! {
    BUILD_INFO = Gauge "ringway_build_info" "" ["version"]
        "Always 1; the version of the daemon.";
    SCRAPE_SECONDS = Gauge "ringway_scrape_seconds" "seconds" []
        "How long it took to ask all workers for this answer.";
    EVENTS_LOST = Counter "ringway_events_lost_total" "events" []
        "Events that readers of ctl events were too slow for.";

    DISK_INFO = Gauge "ringway_disk_info" ""
        ["disk", "image", "serial", "engine", "cache", "mode"]
        "Always 1; what a disk is. mode: bio, request or auto, as was asked for.";
    DISK_SIZE = Gauge "ringway_disk_size_bytes" "bytes" ["disk"]
        "Size of the disk.";
    DISK_STATE = Gauge "ringway_disk_state" "" ["disk", "state"]
        "1 for the state that the disk is in, 0 for the others; as in ctl list.";
    DISK_CONNECTED = Gauge "ringway_disk_connected" "" ["disk"]
        "1 if a front-end is connected.";
    DISK_REQUESTS = Counter "ringway_disk_requests_total" "requests" ["disk", "operation"]
        "Requests completed; erase is discard and write-zeroes.";
    DISK_BYTES = Counter "ringway_disk_bytes_total" "bytes" ["disk", "operation"]
        "Bytes read and written.";
    DISK_ERRORS = Counter "ringway_disk_errors_total" "requests" ["disk", "kind"]
        "Requests that failed: refused for a mistake of the guest, or failed by the host's disk.";
    DISK_HOST_ERRORS = Counter "ringway_disk_host_errors_total" "operations"
        ["disk", "operation", "error"]
        "Operations that the host's disk failed, and whose errors the guest got, by error: no-space, io, \
         other, none (it took nothing). Held requests count once they are given up.";
    DISK_DURATION = Histogram "ringway_disk_request_duration_seconds" "seconds"
        ["disk", "operation"]
        "Time from the end of the batch with which a request was taken from its ring to its \
         answer. One request in 61 of each queue is timed: use it for quantiles, not to count.";
    DISK_IN_FLIGHT = Gauge "ringway_disk_in_flight_requests" "requests" ["disk"]
        "Requests begun and not answered.";
    DISK_OVERDUE = Gauge "ringway_disk_overdue_requests" "requests" ["disk"]
        "Those in flight for longer than --overdue when they were looked at last.";
    DISK_OVERDUES = Counter "ringway_disk_overdue_total" "requests" ["disk"]
        "Requests that were found in flight for longer than --overdue.";
    DISK_HELD = Gauge "ringway_disk_held_requests" "requests" ["disk"]
        "Requests that the host's disk has failed and that wait to be tried again.";
    DISK_HELD_ALL = Counter "ringway_disk_held_total" "requests" ["disk"]
        "Requests that were held, whatever became of them.";
    DISK_THROTTLED = Counter "ringway_disk_throttled_seconds_total" "seconds" ["disk"]
        "Time in which requests waited in their ring for a limit, of all queues together.";
    DISK_THROTTLES = Counter "ringway_disk_throttled_total" "" ["disk"]
        "Times that requests of a queue began to wait for a limit.";
    DISK_LIMIT = Gauge "ringway_disk_limit" "" ["disk", "limit"]
        "Limits of the disk alone that are set, by their words: requests or bytes a second (iops, bps, \
         iops-read, iops-max ...), seconds of a burst (-max-length), bytes of one request (iops-size).";
    DISK_LIMIT_GROUP = Gauge "ringway_disk_limit_group_info" "" ["disk", "group"]
        "Always 1; the group that the disk shares limits with, if there is one.";
    LIMIT_GROUP_LIMIT = Gauge "ringway_limit_group_limit" "" ["group", "limit"]
        "Limits of the group that are set, as of a disk.";
    DISK_BATCHES = Counter "ringway_disk_batches_total" "" ["disk"]
        "Times that requests were taken from a ring, one or more of them at a time: requests over \
         this are the size of a batch in the mean.";
    DISK_QUEUES = Gauge "ringway_disk_queues" "queues" ["disk"]
        "Queues that run.";
    DISK_QUEUE_DEPTH = Gauge "ringway_disk_queue_depth" "requests" ["disk"]
        "Descriptors of all rings that run: what a guest can have in flight at most.";
    DISK_BROKEN_QUEUES = Gauge "ringway_disk_broken_queues" "queues" ["disk"]
        "Queues that their guest has broken.";
    DISK_SYNCS = Counter "ringway_disk_syncs_total" "operations" ["disk"]
        "Times the image was made durable.";
    DISK_BOUNCED = Counter "ringway_disk_bounced_total" "requests" ["disk"]
        "Requests copied because the image does not take their memory as it is.";
    DISK_SPLIT = Counter "ringway_disk_split_total" "requests" ["disk"]
        "Requests taken apart because the image does not take them as they are.";
    DISK_MERGED = Counter "ringway_disk_merged_total" "requests" ["disk"]
        "Requests that went along in the operation of another one.";
    DISK_MERGES_SPLIT = Counter "ringway_disk_merged_split_total" "operations" ["disk"]
        "Merged operations that failed and were carried out request by request.";
    DISK_DEADLINES = Counter "ringway_disk_deadlines_total" "requests" ["disk"]
        "Requests that the scheduler sent first because they had waited too long.";
    DISK_PATH = Gauge "ringway_disk_path" "" ["disk", "path"]
        "1 for the path in use, 0 for the other one: bio or request.";
    DISK_PATH_SWITCHES = Counter "ringway_disk_path_switches_total" "" ["disk"]
        "Times the path in use has changed.";
    DISK_NOT_POLLED = Gauge "ringway_disk_not_polled" "" ["disk"]
        "1 if completions were to be polled for (--iopoll) and the device has no queues for that.";
    DISK_SERVER_AWAY = Gauge "ringway_disk_server_away" "" ["disk"]
        "1 if the NBD server of the disk, or of its base, is away.";
    DISK_FLUSHES_FAIL = Gauge "ringway_disk_flushes_fail" "" ["disk"]
        "1 if flushes fail, as one has before or answered writes may be lost.";
    DISK_RECOVERED = Counter "ringway_disk_recovered_requests_total" "requests" ["disk"]
        "Requests that a predecessor had left in flight and that were carried out.";
    DISK_KICKS = Counter "ringway_disk_kicks_total" "" ["disk"]
        "Times the guest has called.";
    DISK_LOST_KICKS = Counter "ringway_disk_lost_kicks_total" "" ["disk"]
        "Kicks of the guest that never came although requests did.";
    DISK_CALLS = Counter "ringway_disk_calls_total" "" ["disk"]
        "Times the guest was called.";
    DISK_RESTARTS = Counter "ringway_disk_restarts_total" "" ["disk"]
        "Times the disk's own process was started again (--isolate).";

    WORKER_ANSWERS = Gauge "ringway_worker_answers" "" ["worker"]
        "0 if the worker did not answer within a second: the kernel holds it. Its other metrics \
         are missing then.";
    WORKER_SECONDS = Counter "ringway_worker_seconds_total" "seconds" ["worker", "state"]
        "Time of the worker: working, spinning (looking for work), asleep (or waiting for a CPU).";
    WORKER_QUEUES = Gauge "ringway_worker_queues" "queues" ["worker"]
        "Queues that the worker serves.";
    WORKER_REQUESTS = Counter "ringway_worker_requests_total" "requests" ["worker"]
        "Requests taken from rings.";
    WORKER_OPERATIONS = Counter "ringway_worker_operations_total" "operations" ["worker"]
        "Operations given to the engine.";
    WORKER_SYSCALLS = Counter "ringway_worker_syscalls_total" "" ["worker"]
        "System calls of the engine.";
    WORKER_TURNS = Counter "ringway_worker_turns_total" "" ["worker"]
        "Rounds of the worker's loop.";
    WORKER_SLEEPS = Counter "ringway_worker_sleeps_total" "" ["worker"]
        "Times the worker slept.";
    WORKER_LOST_CALLS = Counter "ringway_worker_lost_calls_total" "" ["worker"]
        "Calls to guests that could not be delivered.";
    WORKER_BATCHES = Histogram "ringway_worker_batch_requests" "requests" ["worker"]
        "Requests per submission to the engine.";
    WORKER_HARVESTS = Histogram "ringway_worker_harvest_completions" "completions" ["worker"]
        "Completions found per look at the engine.";

    PROCESS_CPU = Counter "process_cpu_seconds_total" "seconds" []
        "CPU time of the daemon's process, of all its threads.";
    PROCESS_FDS = Gauge "process_open_fds" "" []
        "Open descriptors (Linux 6.2 and later).";
    PROCESS_MAX_FDS = Gauge "process_max_fds" "" []
        "The limit of open descriptors.";
    PROCESS_VIRTUAL = Gauge "process_virtual_memory_bytes" "bytes" []
        "Size of the address space; guest memory is in it.";
    PROCESS_RESIDENT = Gauge "process_resident_memory_bytes" "bytes" []
        "Resident memory; guest memory that was touched is in it.";
    PROCESS_START = Gauge "process_start_time_seconds" "seconds" []
        "When the daemon was started, in seconds since 1970.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_follow_the_rules_of_the_field() {
        let names: BTreeSet<_> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len());
        for Metric { name, kind, unit, labels, help } in ALL {
            assert_eq!(name.ends_with("_total"), *kind == MetricKind::Counter, "{name}");
            assert!(name.starts_with("ringway_") || name.starts_with("process_"), "{name}");
            assert!(!matches!(*unit, "seconds" | "bytes") || name.contains(unit), "{name}");
            assert!(help.ends_with('.') && !help.contains(['\n', '\\']), "{name}");
            let first = match name {
                name if name.contains("_disk_") => "disk",
                name if name.contains("_limit_group_") => "group",
                _ => "worker",
            };
            assert!(labels.first().is_none_or(|l| *l == first || *l == "version"), "{name}");
            // Counters lose their last word in OpenMetrics; what is left is nobody else's name.
            let family = name.strip_suffix("_total").filter(|family| names.contains(family));
            assert_eq!(family, None);
        }
    }
}
