//! Alert rules for Prometheus.

use ringway_control::metrics as list;
use std::fmt::Write as _;

/// One rule.
struct Alert {
    name: &'static str,
    expr: String,
    lasts: &'static str,
    severity: &'static str,
    summary: &'static str,
    what_to_do: &'static str,
}

/// The file.
pub(super) fn rules() -> String {
    let mut text = String::from(
        "# Made by `cargo xtask metrics`: alert rules for the metrics of ringway serve --metrics.\n\
         groups:\n  - name: ringway\n    rules:\n",
    );
    for Alert { name, expr, lasts, severity, summary, what_to_do } in &alerts() {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "      - alert: {name}\n        expr: {expr}\n        for: {lasts}\n        labels:\n          \
             severity: {severity}\n        annotations:\n          summary: '{summary}'\n          \
             description: '{what_to_do}'"
        );
    }
    text
}

fn alerts() -> Vec<Alert> {
    [of_host_disks(), of_disks(), of_limits(), of_the_daemon()].into_iter().flatten().collect()
}

/// How often something has happened lately.
fn increase(name: &str, time: &str) -> String {
    format!("increase({name}[{time}])")
}

fn of_host_disks() -> Vec<Alert> {
    let errors = |filter: &str| {
        let name = format!("{}{{error{filter}}}", list::DISK_HOST_ERRORS.name);
        format!("{} > 0", increase(&name, "5m"))
    };
    vec![
        Alert {
            name: "RingwayRequestsHeld",
            expr: format!("{} > 0", list::DISK_HELD.name),
            lasts: "0m",
            severity: "critical",
            summary: "{{ $labels.disk }}: {{ $value }} failed requests are held, and the guest waits",
            what_to_do: "Mend the host disk or make room. ringway ctl retry tries them again.",
        },
        Alert {
            name: "RingwayDiskNoSpace",
            expr: errors("=\"no-space\""),
            lasts: "0m",
            severity: "critical",
            summary: "{{ $labels.disk }}: its file system is full",
            what_to_do: "Writes of the guest have failed. Free space or grow the file system.",
        },
        Alert {
            name: "RingwayDiskFails",
            expr: errors("!=\"no-space\""),
            lasts: "0m",
            severity: "critical",
            summary: "{{ $labels.disk }}: the disk fails {{ $labels.operation }}s ({{ $labels.error }})",
            what_to_do: "The log of the daemon names error and sector. Look at the host disk.",
        },
    ]
}

fn of_disks() -> Vec<Alert> {
    let state = |state: &str| format!("{}{{state=\"{state}\"}} == 1", list::DISK_STATE.name);
    vec![
        Alert {
            name: "RingwayRequestsOverdue",
            expr: format!("{} > 0", list::DISK_OVERDUE.name),
            lasts: "1m",
            severity: "warning",
            summary: "{{ $labels.disk }}: {{ $value }} requests are not answered by the disk",
            what_to_do: "The disk is slow or has lost them. Look at the host disk and the log.",
        },
        Alert {
            name: "RingwayDiskStuck",
            expr: state("stuck"),
            lasts: "1m",
            severity: "critical",
            summary: "{{ $labels.disk }}: what overlaps old requests waits for them",
            what_to_do: "Requests of an ended connection are still in flight on the host disk.",
        },
        Alert {
            name: "RingwayDiskPaused",
            expr: state("paused"),
            lasts: "30m",
            severity: "warning",
            summary: "{{ $labels.disk }}: has been paused for half an hour",
            what_to_do: "Its guest waits. ringway ctl resume lets it go on.",
        },
        Alert {
            name: "RingwayQueueBroken",
            expr: format!("{} > 0", list::DISK_BROKEN_QUEUES.name),
            lasts: "1m",
            severity: "warning",
            summary: "{{ $labels.disk }}: its guest has broken {{ $value }} of its queues",
            what_to_do: "The log says how. The driver of the guest has to start again.",
        },
        Alert {
            name: "RingwayDiskRestarts",
            expr: format!("{} > 3", increase(list::DISK_RESTARTS.name, "15m")),
            lasts: "0m",
            severity: "warning",
            summary: "{{ $labels.disk }}: its process ends again and again",
            what_to_do: "The log of the daemon says how it ended.",
        },
        Alert {
            name: "RingwayWritesSlow",
            expr: format!(
                "histogram_quantile(0.99, sum by (instance, disk, le) \
                 (rate({}_bucket{{operation=\"write\"}}[10m]))) > 1",
                list::DISK_DURATION.name
            ),
            lasts: "10m",
            severity: "warning",
            summary: "{{ $labels.disk }}: one write of a hundred takes {{ $value | humanizeDuration }}",
            what_to_do: "Compare with the latency of the host disk (iostat -x).",
        },
    ]
}

/// Whether what passes a second comes near to one of the limits of these words. `within` are the labels that
/// a rate and its limit have in common; bursts and the size of requests are left out.
fn near(limit: &str, within: &str, rate: impl Fn(&str, &str) -> String) -> String {
    let word = |word: &str, metric: &list::Metric, operations: &str| {
        let passes = rate(metric.name, operations);
        format!("{passes} > on ({within}) group_right () 0.9 * {limit}{{limit=\"{word}\"}}")
    };
    let (requests, bytes) = (&list::DISK_REQUESTS, &list::DISK_BYTES);
    let all = [
        word("iops", requests, "!=\"flush\""),
        word("iops-read", requests, "=\"read\""),
        word("iops-write", requests, "=~\"write|erase\""),
        word("bps", bytes, "!=\"\""),
        word("bps-read", bytes, "=\"read\""),
        word("bps-write", bytes, "=\"write\""),
    ];
    all.join(" or ")
}

fn of_limits() -> Vec<Alert> {
    let what_to_do = "Its guests wait soon, or do already (ringway_disk_throttled_seconds_total). \
                      ringway ctl limit gives more.";
    let of_disk = |name: &str, operations: &str| {
        format!("sum by (instance, disk) (rate({name}{{operation{operations}}}[5m]))")
    };
    let of_group = |name: &str, operations: &str| {
        format!(
            "sum by (instance, group) (rate({name}{{operation{operations}}}[5m]) * on (instance, disk) \
             group_left (group) {})",
            list::DISK_LIMIT_GROUP.name
        )
    };
    vec![
        Alert {
            name: "RingwayDiskNearLimit",
            expr: near(list::DISK_LIMIT.name, "instance, disk", of_disk),
            lasts: "10m",
            severity: "info",
            summary: "{{ $labels.disk }}: uses nine tenths of its limit {{ $labels.limit }}",
            what_to_do,
        },
        Alert {
            name: "RingwayGroupNearLimit",
            expr: near(list::LIMIT_GROUP_LIMIT.name, "instance, group", of_group),
            lasts: "10m",
            severity: "info",
            summary: "limit group {{ $labels.group }}: uses nine tenths of its limit {{ $labels.limit }}",
            what_to_do,
        },
    ]
}

fn of_the_daemon() -> Vec<Alert> {
    vec![
        Alert {
            name: "RingwayWorkerSilent",
            expr: format!("{} == 0", list::WORKER_ANSWERS.name),
            lasts: "1m",
            severity: "critical",
            summary: "worker {{ $labels.worker }} does not answer",
            what_to_do: "The kernel holds it, and all disks of this worker wait.",
        },
        Alert {
            name: "RingwayKicksLost",
            expr: format!("{} > 10", increase(list::DISK_LOST_KICKS.name, "15m")),
            lasts: "0m",
            severity: "warning",
            summary: "{{ $labels.disk }}: kicks of its guest do not arrive",
            what_to_do: "Requests wait until the watchdog finds them. Look at the guest and its VMM.",
        },
        Alert {
            name: "RingwayDescriptorsRunOut",
            expr: format!(
                "{} / {} > 0.8 and on (instance) {}",
                list::PROCESS_FDS.name,
                list::PROCESS_MAX_FDS.name,
                list::BUILD_INFO.name
            ),
            lasts: "5m",
            severity: "warning",
            summary: "{{ $labels.instance }}: four of five descriptors are in use",
            what_to_do: "Raise LimitNOFILE of the service before disks cannot be added any more.",
        },
    ]
}
