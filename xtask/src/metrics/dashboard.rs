//! A dashboard for Grafana.

use ringway_control::metrics as list;
use serde_json::{Value, json};

/// What one panel shows.
struct Panel {
    title: &'static str,
    unit: &'static str,
    /// Queries, and what each of their lines is called.
    queries: Vec<(String, &'static str)>,
}

/// The file.
///
/// # Errors
/// That it is no JSON.
pub(super) fn dashboard() -> anyhow::Result<String> {
    let sections = [("Disks", disks()), ("Trouble", trouble()), ("Workers and process", workers())];
    let (mut panels, mut y) = (Vec::new(), 0);
    for (title, section) in sections {
        let id = panels.len() + 1;
        let at = json!({"h": 1, "w": 24, "x": 0, "y": y});
        panels.push(json!({"id": id, "type": "row", "title": title, "gridPos": at, "panels": []}));
        y += 1;
        let rows = section.len().div_ceil(2);
        for (place, panel) in section.into_iter().enumerate() {
            let at = json!({"h": 8, "w": 12, "x": place % 2 * 12, "y": y + place / 2 * 8});
            panels.push(self::panel(&panel, panels.len() + 1, &at));
        }
        y += rows * 8;
    }
    let source = json!({
        "name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"
    });
    let dashboard = json!({
        "title": "Ringway",
        "uid": "ringway",
        "description": "Made by cargo xtask metrics.",
        "tags": ["ringway", "storage", "virtualization"],
        "schemaVersion": 39,
        "editable": true,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, variable("instance", ""), variable("disk", "instance")]},
        "panels": panels,
    });
    Ok(serde_json::to_string_pretty(&dashboard)? + "\n")
}

/// A list to choose from; of disks only those of the chosen instances.
fn variable(label: &str, within: &str) -> Value {
    let filter = match within {
        "" => String::new(),
        within => format!("{{{within}=~\"${within}\"}}"),
    };
    json!({
        "name": label,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": format!("label_values({}{filter}, {label})", list::DISK_INFO.name),
        "refresh": 2,
        "includeAll": true,
        "multi": true,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    })
}

fn panel(panel: &Panel, id: usize, at: &Value) -> Value {
    let source = json!({"type": "prometheus", "uid": "${source}"});
    let targets = panel.queries.iter().zip('A'..).map(|((expr, legend), letter)| {
        json!({
            "refId": letter.to_string(), "datasource": source, "expr": expr, "legendFormat": legend
        })
    });
    json!({
        "id": id,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets.collect::<Vec<_>>(),
    })
}

const DISK: &str = "instance=~\"$instance\",disk=~\"$disk\"";
const DAEMON: &str = "instance=~\"$instance\"";

fn rate(metric: &list::Metric, labels: &str) -> String {
    format!("rate({}{{{labels}}}[$__rate_interval])", metric.name)
}

fn now(metric: &list::Metric, labels: &str) -> String {
    format!("{}{{{labels}}}", metric.name)
}

fn quantile(part: &str, operation: &str) -> String {
    let labels = format!("{DISK},operation=\"{operation}\"");
    let name = list::DISK_DURATION.name;
    format!(
        "histogram_quantile({part}, sum by (disk, le) \
         (rate({name}_bucket{{{labels}}}[$__rate_interval])))"
    )
}

/// The limits that a disk has in the long run, beside what it does.
fn limits(word: &str) -> (String, &'static str) {
    let labels = format!("{DISK},limit=~\"{word}(-read|-write)?\"");
    (now(&list::DISK_LIMIT, &labels), "{{disk}} limit {{limit}}")
}

fn disks() -> Vec<Panel> {
    let by_operation = "{{disk}} {{operation}}";
    let mut all = vec![
        Panel {
            title: "Requests per second",
            unit: "iops",
            queries: vec![(rate(&list::DISK_REQUESTS, DISK), by_operation), limits("iops")],
        },
        Panel {
            title: "Bytes per second",
            unit: "Bps",
            queries: vec![(rate(&list::DISK_BYTES, DISK), by_operation), limits("bps")],
        },
    ];
    for (title, operation) in [
        ("Latency of reads", "read"),
        ("Latency of writes", "write"),
        ("Latency of flushes", "flush"),
    ] {
        let queries = vec![
            (quantile("0.5", operation), "{{disk}} p50"),
            (quantile("0.99", operation), "{{disk}} p99"),
        ];
        all.push(Panel { title, unit: "s", queries });
    }
    all.push(Panel {
        title: "Waiting for a limit (queues at a time)",
        unit: "short",
        queries: vec![(rate(&list::DISK_THROTTLED, DISK), "{{disk}}")],
    });
    all.push(Panel {
        title: "In flight",
        unit: "short",
        queries: vec![
            (now(&list::DISK_IN_FLIGHT, DISK), "{{disk}}"),
            (now(&list::DISK_QUEUE_DEPTH, DISK), "{{disk}} at most"),
        ],
    });
    all
}

fn trouble() -> Vec<Panel> {
    let not_serving = format!("{DISK},state!=\"serving\"");
    vec![
        Panel {
            title: "Errors per second",
            unit: "ops",
            queries: vec![
                (rate(&list::DISK_ERRORS, DISK), "{{disk}} {{kind}}"),
                (rate(&list::DISK_HOST_ERRORS, DISK), "{{disk}} host: {{operation}} {{error}}"),
            ],
        },
        Panel {
            title: "Held and overdue requests, broken queues",
            unit: "short",
            queries: vec![
                (now(&list::DISK_HELD, DISK), "{{disk}} held"),
                (now(&list::DISK_OVERDUE, DISK), "{{disk}} overdue"),
                (now(&list::DISK_BROKEN_QUEUES, DISK), "{{disk}} broken"),
            ],
        },
        Panel {
            title: "Disks that are not serving",
            unit: "short",
            queries: vec![(now(&list::DISK_STATE, &not_serving) + " == 1", "{{disk}} {{state}}")],
        },
        Panel {
            title: "Copied, taken apart and merged requests per second",
            unit: "ops",
            queries: vec![
                (rate(&list::DISK_BOUNCED, DISK), "{{disk}} bounced"),
                (rate(&list::DISK_SPLIT, DISK), "{{disk}} split"),
                (rate(&list::DISK_MERGED, DISK), "{{disk}} merged"),
            ],
        },
    ]
}

fn workers() -> Vec<Panel> {
    let batch = format!(
        "histogram_quantile(0.5, sum by (worker, le) \
         (rate({}_bucket{{{DAEMON}}}[$__rate_interval])))",
        list::WORKER_BATCHES.name
    );
    vec![
        Panel {
            title: "Time of workers",
            unit: "percentunit",
            queries: vec![(rate(&list::WORKER_SECONDS, DAEMON), "{{worker}} {{state}}")],
        },
        Panel {
            title: "System calls per request",
            unit: "short",
            queries: vec![(
                format!(
                    "{} / {}",
                    rate(&list::WORKER_SYSCALLS, DAEMON),
                    rate(&list::WORKER_REQUESTS, DAEMON)
                ),
                "{{worker}}",
            )],
        },
        Panel {
            title: "Requests per submission (median)",
            unit: "short",
            queries: vec![(batch, "{{worker}}")],
        },
        Panel {
            title: "Memory of the process",
            unit: "bytes",
            queries: vec![(now(&list::PROCESS_RESIDENT, DAEMON), "{{instance}} resident")],
        },
    ]
}
