//! What was measured, in tables and as JSON.

use crate::backend::Effort;
use crate::counters::Side;
use crate::load::Load;
use crate::measured::Measured;
use crate::outcome::Outcome;
use crate::units::micros;
use crate::verifier::Judged;
use crate::versus;
use hdrhistogram::Histogram;
use ringway_control::size::Size;
use ringway_driver::SchedulerStats;
use ringway_terminal::short::count;
use ringway_terminal::table;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The percentiles of the JSON, as fio names them.
const PERCENTILES: [f64; 15] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 50.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.99, 99.999];

/// The percentiles of the table.
const SHOWN: [(f64, &str); 5] =
    [(50.0, "p50"), (90.0, "p90"), (99.0, "p99"), (99.9, "p99.9"), (99.99, "p99.99")];

/// All that is printed.
pub(crate) fn text(load: &Load, all: &[Measured]) -> String {
    let mut text = String::new();
    for measured in all {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}  {}", measured.name, measured.facts);
    }
    let _ = writeln!(text, "{}", load.describe());
    if let Some((_, outcome)) = only(all) {
        text.push_str(&single(outcome));
    } else {
        text.push_str(&versus::text(all));
        let rounds = all.iter().flat_map(|measured| &measured.rounds).map(|round| &round.host);
        if let Some(worst) = rounds.max_by(|a, b| a.disturbance().total_cmp(&b.disturbance())) {
            let _ = writeln!(text, "the most disturbed round: {}", worst.words());
        }
    }
    text
}

/// The target and the measurement, if there was only one of each.
fn only(all: &[Measured]) -> Option<(&Measured, &Outcome)> {
    let [one] = all else { return None };
    let [outcome] = &one.rounds[..] else { return None };
    Some((one, outcome))
}

/// One target, one measurement.
fn single(outcome: &Outcome) -> String {
    let sides = sides(outcome);
    let speed = sides.iter().map(|(name, side)| {
        vec![
            (*name).to_owned(),
            count(side.done as f64 / outcome.seconds),
            format!("{:.1}", side.bytes as f64 / outcome.seconds / 1e6),
            side.done.to_string(),
        ]
    });
    let mut text = table::text(&["", "IOPS", "MB/s", "requests"], speed.collect()) + "\n";
    let (head, rows) = latency_table(outcome);
    if !rows.is_empty() {
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        text.push_str(&table::text(&head, rows));
    }
    let total = outcome.tick.total();
    if total.unsent > 0 {
        let (late, unsent) = (total.late, total.unsent);
        let _ = writeln!(
            text,
            "\n{late} requests were in flight at the end, {unsent} were due and not sent: the target kept all \
             places. They are in the latencies, not in IOPS."
        );
    }
    let _ = writeln!(text, "\n{}\n{}", effort(outcome), outcome.host.words());
    if let Some(travel) = travel(outcome) {
        let _ = writeln!(text, "{travel}");
    }
    if let Some(verified) = verified(outcome) {
        let _ = writeln!(text, "verify: {verified}");
    }
    text
}

/// What `--verify` has found, in words; nothing without it.
pub(crate) fn verified(outcome: &Outcome) -> Option<String> {
    let Judged { right, unwritten, covered, whole } = outcome.judged;
    if right + unwritten + whole == 0 {
        return None;
    }
    let mut text = format!("{right} sectors are right");
    if unwritten > 0 {
        text.push_str(&format!("; {unwritten} were never written by a run with this --seed"));
    }
    if covered < whole {
        text.push_str(&format!(
            "; {} of {} were written, which --rw read --verify knows",
            Size(covered),
            Size(whole)
        ));
    }
    Some(text)
}

/// Submission, completion and both, of each direction, in microseconds. No rows if no time was taken.
pub(crate) fn latency_table(outcome: &Outcome) -> (Vec<String>, Vec<Vec<String>>) {
    let mut rows = Vec::new();
    for (name, side) in &sides(outcome) {
        for (kind, histogram) in [("slat", &side.slat), ("clat", &side.clat), ("lat", &side.lat)] {
            if !histogram.is_empty() {
                rows.push(latency_row(&format!("{name} {kind}"), histogram));
            }
        }
    }
    let mut head = vec!["µs", "mean", "stdev", "min"];
    head.extend(SHOWN.map(|(_, name)| name));
    head.push("max");
    (head.into_iter().map(str::to_owned).collect(), rows)
}

fn latency_row(name: &str, histogram: &Histogram<u64>) -> Vec<String> {
    let mut row = vec![name.to_owned()];
    row.extend([histogram.mean(), histogram.stdev(), histogram.min() as f64].map(micros));
    row.extend(SHOWN.map(|(p, _)| micros(histogram.value_at_percentile(p) as f64)));
    row.push(micros(histogram.max() as f64));
    row
}

/// CPU time, notifications: one line.
pub(crate) fn effort(outcome: &Outcome) -> String {
    let done = outcome.tick.done().max(1) as f64;
    let mut parts =
        vec![format!("CPU per I/O: this process {:.0} ns", outcome.client_ns as f64 / done)];
    if let Some(server_ns) = outcome.server_ns {
        parts.push(format!("server {:.0} ns", server_ns as f64 / done));
    }
    if let Some(effort) = &outcome.effort {
        for (what, number) in [("kicks", effort.kicks), ("sleeps", effort.sleeps)] {
            parts.push(format!("{what} per I/O {:.4}", number as f64 / done));
        }
    }
    parts.join(", ")
}

/// What became of the requests on their way from this front-end, if they may be merged.
fn travel(outcome: &Outcome) -> Option<String> {
    let Effort { path, in_use: Some((in_use, switches)), .. } = outcome.effort? else {
        return None;
    };
    let SchedulerStats { plugged, merged, runs, split, expired } = path;
    let times = if switches == 1 { "once" } else { &format!("{switches} times") };
    Some(format!(
        "path: {in_use} at the end, changed {times}; {plugged} requests plugged, {merged} merged, \
         {runs} sent; {split} merged ones failed and were split, {expired} requests past their deadline"
    ))
}

/// Those that anything was done of, and all together if there are both.
pub(crate) fn sides(outcome: &Outcome) -> Vec<(&'static str, Side)> {
    let [read, write] = &outcome.tick.sides;
    match (read.all(), write.all()) {
        (_, 0) => vec![("read", read.clone())],
        (0, _) => vec![("write", write.clone())],
        _ => vec![("read", read.clone()), ("write", write.clone()), ("both", outcome.tick.total())],
    }
}

/// All that is known, histograms included.
pub(crate) fn json(load: &Load, all: &[Measured]) -> Value {
    let options = json!({
        "rw": load.rw.name(),
        "rwmixread": load.rwmixread,
        "bs": load.sizes.describe(),
        "iodepth": load.depth,
        "jobs": load.jobs,
        "seed": load.seed,
        "polling": load.polling,
        "gtod_reduce": !load.timed,
        "verify": load.verify,
    });
    let version = env!("CARGO_PKG_VERSION");
    if let Some((one, outcome)) = only(all) {
        let mut value = outcome_json(outcome);
        let head = json!({
            "ringway": version, "target": one.name, "facts": one.facts, "load": options,
        });
        if let (Value::Object(value), Value::Object(head)) = (&mut value, head) {
            value.extend(head);
        }
        return value;
    }
    let targets = all.iter().map(|measured| {
        let rounds: Vec<_> = measured.rounds.iter().map(outcome_json).collect();
        json!({ "target": measured.name, "facts": measured.facts, "rounds": rounds })
    });
    json!({
        "ringway": version,
        "load": options,
        "targets": targets.collect::<Vec<_>>(),
        "medians": versus::json(all),
    })
}

fn outcome_json(outcome: &Outcome) -> Value {
    let done = outcome.tick.done().max(1) as f64;
    let [read, write] = &outcome.tick.sides;
    let frames = &outcome.frames;
    let over_time = frames.all.iter().enumerate().map(|(at, frame)| {
        json!({
            "seconds": at as f64 * frames.seconds,
            "iops": frame.done as f64 / frames.seconds,
            "bytes_per_second": frame.bytes as f64 / frames.seconds,
        })
    });
    json!({
        "seconds": outcome.seconds,
        "requests": outcome.tick.done(),
        "iops": outcome.tick.done() as f64 / outcome.seconds,
        "bytes_per_second": outcome.tick.bytes() as f64 / outcome.seconds,
        "read": side_json(read, outcome.seconds),
        "write": side_json(write, outcome.seconds),
        "cpu_ns_per_io": {
            "client": outcome.client_ns as f64 / done,
            "server": outcome.server_ns.map(|ns| ns as f64 / done),
        },
        "host": outcome.host,
        "kicks": outcome.effort.map(|effort| effort.kicks),
        "sleeps": outcome.effort.map(|effort| effort.sleeps),
        "path": outcome.effort.and_then(|effort| path_json(&effort)),
        "verified_sectors": outcome.judged.right,
        "unwritten_sectors": outcome.judged.unwritten,
        "written_once_bytes": outcome.judged.covered,
        "over_time": over_time.collect::<Vec<_>>(),
    })
}

/// What became of the requests on their way from this front-end; null if that is bio by order.
fn path_json(effort: &Effort) -> Option<Value> {
    let (in_use, switches) = effort.in_use?;
    let SchedulerStats { plugged, merged, runs, split, expired } = effort.path;
    Some(json!({
        "in_use": in_use.name(),
        "switches": switches,
        "plugged": plugged,
        "merged": merged,
        "sent": runs,
        "split": split,
        "deadlines": expired,
    }))
}

fn side_json(side: &Side, seconds: f64) -> Value {
    json!({
        "requests": side.done,
        "bytes": side.bytes,
        "in_flight_at_end": side.late,
        "unsent": side.unsent,
        "iops": side.done as f64 / seconds,
        "bytes_per_second": side.bytes as f64 / seconds,
        "slat_ns": latency_json(&side.slat),
        "clat_ns": latency_json(&side.clat),
        "lat_ns": latency_json(&side.lat),
    })
}

fn latency_json(histogram: &Histogram<u64>) -> Value {
    if histogram.is_empty() {
        return Value::Null;
    }
    let percentiles: serde_json::Map<_, _> = PERCENTILES
        .iter()
        .map(|&p| (format!("{p:.6}"), json!(histogram.value_at_percentile(p))))
        .collect();
    let bins: Vec<_> = histogram
        .iter_recorded()
        .map(|value| (value.value_iterated_to(), value.count_since_last_iteration()))
        .collect();
    json!({
        "min": histogram.min(),
        "max": histogram.max(),
        "mean": histogram.mean(),
        "stddev": histogram.stdev(),
        "percentile": percentiles,
        "histogram": bins,
    })
}
