//! Tables on standard output, aligned or as Markdown, and everything as JSON.

use crate::bench::contest::Series;
use crate::bench::fio;
use crate::bench::lab::Lab;
use anyhow::{Context, Result};
use ringway_terminal::short::count;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// What a benchmark has found.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The subcommand.
    pub(crate) name: &'static str,
    pub(crate) tables: Vec<Table>,
    /// Everything, every round.
    pub(crate) data: Value,
}

/// A table with its title and what to know about it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) head: Vec<&'static str>,
    pub(crate) rows: Vec<Vec<String>>,
    pub(crate) notes: Vec<String>,
}

impl Report {
    /// Prints the tables; writes the JSON if it was asked for.
    pub(crate) fn deliver(&self, lab: &Lab) -> Result<()> {
        let (cpu, cores, kernel) = ringway_bench::usage::machine();
        let command: Vec<_> = std::env::args().skip(1).collect();
        let command = format!("cargo run --release -p xtask -- {}", command.join(" "));
        let qsd = fio::said(&lab.common.qsd.to_string_lossy());
        let machine = format!("{cpu}, {cores} cores, Linux {kernel}; {}; {qsd}", fio::version());
        let how = format!(
            "{} rounds, {} s each after {} s of warm-up, medians; server on core {}, client on {}",
            lab.common.rounds,
            lab.seconds,
            lab.common.warmup,
            lab.server_list(),
            crate::bench::options::cpu_list(&lab.common.client_cpus),
        );
        let mut text = String::new();
        if lab.common.markdown {
            let _ = writeln!(text, "```\n{command}\n```\n{machine}.\n{how}.");
        } else {
            let _ = writeln!(text, "{command}\n{machine}\n{how}");
        }
        for table in &self.tables {
            text.push('\n');
            text.push_str(&table.text(lab.common.markdown));
        }
        print!("{text}");
        let Some(path) = &lab.common.json else { return Ok(()) };
        let json = json!({
            "benchmark": self.name,
            "command": command,
            "machine": { "cpu": cpu, "cores": cores, "kernel": kernel },
            "rounds": lab.common.rounds,
            "seconds": lab.seconds,
            "data": self.data,
        });
        let text = serde_json::to_string_pretty(&json)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Table {
    fn text(&self, markdown: bool) -> String {
        let columns = self.head.len();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(String::as_str);
            let widths = cells.chain([self.head[column]]).map(|cell| cell.chars().count());
            widths.max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        // Numbers stand on the right, words on the left.
        let numeric: Vec<_> = (0..columns).map(|column| self.is_numeric(column)).collect();
        let line = |cells: &[&str]| {
            let mut line = String::new();
            for (column, &width) in widths.iter().enumerate() {
                let cell = cells.get(column).copied().unwrap_or("");
                line.push_str(if markdown { "| " } else { "" });
                let _ = if numeric[column] {
                    write!(line, "{cell:>width$}")
                } else {
                    write!(line, "{cell:<width$}")
                };
                line.push_str(if markdown { " " } else { "  " });
            }
            let line = line.trim_end();
            if markdown { format!("{line} |\n") } else { format!("{line}\n") }
        };
        let mut text =
            if markdown { format!("### {}\n\n", self.title) } else { format!("{}\n", self.title) };
        text.push_str(&line(&self.head));
        if markdown {
            let rule = |column: usize| if numeric[column] { "---:|" } else { "---|" };
            text.push('|');
            (0..columns).for_each(|column| text.push_str(rule(column)));
            text.push('\n');
        }
        for row in &self.rows {
            text.push_str(&line(&row.iter().map(String::as_str).collect::<Vec<_>>()));
        }
        if markdown && !self.notes.is_empty() {
            text.push('\n');
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        text
    }

    fn is_numeric(&self, column: usize) -> bool {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let mut cells = cells.filter(|cell| !cell.is_empty() && *cell != "–").peekable();
        cells.peek().is_some()
            && cells.all(|cell| {
                cell.starts_with(|first: char| first.is_ascii_digit() || "+-".contains(first))
            })
    }
}

/// The columns that show one series of a cell beside `base`, another one of the same cell.
pub(crate) const SERIES_HEAD: [&str; 9] = [
    "server",
    "IOPS",
    "min–max",
    "ratio",
    "CPU ns/IO",
    "kicks/IO",
    "calls/IO",
    "switches/IO",
    "latency us",
];

/// Cells for [`SERIES_HEAD`].
pub(crate) fn series_row(series: &Series, base: Option<&Series>, in_flight: u32) -> Vec<String> {
    let Some(iops) = series.iops() else {
        // Why was said when it happened, and is in the JSON.
        return vec![series.name.clone(), "failed".into()];
    };
    let (low, high) = series.spread();
    let ratio = base.and_then(Series::iops).map(|base| format!("{:.3}", iops / base));
    let small = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.4}"));
    vec![
        series.name.clone(),
        count(iops),
        format!("{}–{}", count(low), count(high)),
        ratio.unwrap_or_default(),
        series.median(|s| s.server_ns).map_or("–".into(), |ns| format!("{ns:.0}")),
        small(series.median(|s| s.kicks)),
        small(series.median(|s| s.calls)),
        small(series.median(|s| s.switches)),
        format!("{:.2}", f64::from(in_flight) * 1e6 / iops),
    ]
}
