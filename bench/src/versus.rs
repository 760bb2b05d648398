//! `--vs`: two targets measured in turn, medians beside each other, and their ratios.

use crate::measured::Measured;
use crate::outcome::Outcome;
use crate::units::micros;
use ringway_terminal::short::count;
use ringway_terminal::table;
use serde_json::{Value, json};

/// Something that is compared: its name, its unit in the JSON, how to get it, how to show it, and
/// whether more of it is better.
struct Figure {
    name: &'static str,
    key: &'static str,
    of: fn(&Outcome) -> Option<f64>,
    show: fn(f64) -> String,
}

const FIGURES: [Figure; 8] = [
    Figure { name: "IOPS", key: "iops", of: |o| Some(o.iops()), show: count },
    Figure {
        name: "MB/s",
        key: "mb_per_second",
        of: |o| Some(o.bytes() as f64 / o.seconds / 1e6),
        show: |x| format!("{x:.1}"),
    },
    Figure {
        name: "latency µs, mean",
        key: "lat_mean_ns",
        of: |o| o.latency_ns(None),
        show: micros,
    },
    Figure { name: "p50", key: "lat_p50_ns", of: |o| o.latency_ns(Some(50.0)), show: micros },
    Figure { name: "p99", key: "lat_p99_ns", of: |o| o.latency_ns(Some(99.0)), show: micros },
    Figure { name: "p99.9", key: "lat_p99_9_ns", of: |o| o.latency_ns(Some(99.9)), show: micros },
    Figure {
        name: "client CPU ns/IO",
        key: "client_ns_per_io",
        of: |o| Some(o.client_ns as f64 / o.done().max(1) as f64),
        show: |x| format!("{x:.0}"),
    },
    Figure {
        name: "server CPU ns/IO",
        key: "server_ns_per_io",
        of: |o| Some(o.server_ns? as f64 / o.done().max(1) as f64),
        show: |x| format!("{x:.0}"),
    },
];

/// The middle, or the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let high = *values.get(half)?;
    Some(if values.len() % 2 == 1 { high } else { f64::midpoint(values[half - 1], high) })
}

/// The rows of the comparison: name, each target's median and spread, ratio of the first to the
/// second.
pub(crate) fn rows(all: &[Measured]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for figure in &FIGURES {
        let mut row = vec![figure.name.to_owned()];
        let mut medians = Vec::new();
        for measured in all {
            let values: Vec<f64> = measured.rounds.iter().filter_map(figure.of).collect();
            let low = values.iter().copied().fold(f64::INFINITY, f64::min);
            let high = values.iter().copied().fold(0.0, f64::max);
            let show = figure.show;
            let Some(middle) = median(values) else {
                row.extend(["–".to_owned(), String::new()]);
                continue;
            };
            row.extend([show(middle), format!("{}–{}", show(low), show(high))]);
            medians.push(middle);
        }
        row.push(match medians[..] {
            [a, b] if b > 0.0 => format!("{:.3}", a / b),
            _ => "–".into(),
        });
        rows.push(row);
    }
    rows
}

/// The names of the columns.
pub(crate) fn head(all: &[Measured]) -> Vec<String> {
    let mut head = vec!["medians".to_owned()];
    for measured in all {
        head.extend([measured.name.clone(), "min–max".into()]);
    }
    head.push("ratio".into());
    head
}

/// The table.
pub(crate) fn text(all: &[Measured]) -> String {
    let head = head(all);
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let rounds = all.iter().map(|measured| measured.rounds.len()).min().unwrap_or(0);
    let table = table::text(&head, rows(all));
    let [a, b] = all else { return table + "\n" };
    let each = if rounds == 1 { "round" } else { "rounds" };
    format!("{table}\n{rounds} {each} in turn; ratio: {} ÷ {}\n", a.name, b.name)
}

/// Medians of each target and their ratios.
pub(crate) fn json(all: &[Measured]) -> Value {
    let figures = FIGURES.iter().map(|figure| {
        let of =
            |measured: &Measured| median(measured.rounds.iter().filter_map(figure.of).collect());
        let medians: Vec<_> = all.iter().map(of).collect();
        let ratio = match medians[..] {
            [Some(a), Some(b)] if b > 0.0 => Some(a / b),
            _ => None,
        };
        (figure.key.to_owned(), json!({ "targets": medians, "ratio": ratio }))
    });
    Value::Object(figures.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
