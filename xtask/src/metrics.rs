//! Writes what is made from the list of metrics: the table of `docs/metrics.md`, the alert rules and the
//! dashboard below `contrib/`. A test compares them with what is there.

mod alerts;
mod dashboard;

use anyhow::{Context, ensure};
use ringway_control::metrics::{ALL, Metric};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The table is between these lines.
const BEGIN: &str = "<!-- made by cargo xtask metrics -->\n";
const END: &str = "<!-- end -->\n";

/// Writes the files.
///
/// # Errors
/// What the host says, or that the page has no place for the table.
pub(crate) fn run() -> anyhow::Result<()> {
    for (path, text) in files()? {
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

fn files() -> anyhow::Result<[(PathBuf, String); 3]> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = root.join("docs/metrics.md");
    let text = std::fs::read_to_string(&page).context("docs/metrics.md")?;
    let around = text.split_once(BEGIN).zip(text.split_once(END));
    let ((before, _), (_, after)) = around.context("docs/metrics.md has no place for the table")?;
    ensure!(!after.contains(BEGIN), "docs/metrics.md: the end of the table comes first");
    Ok([
        (page, format!("{before}{BEGIN}{}{END}{after}", table())),
        (root.join("contrib/prometheus/alerts.yml"), alerts::rules()),
        (root.join("contrib/grafana/ringway.json"), dashboard::dashboard()?),
    ])
}

fn table() -> String {
    let mut text = String::from("| metric | kind | labels | |\n|---|---|---|---|\n");
    for Metric { name, kind, labels, help, .. } in ALL {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {} | {} | {help} |", kind.word(), labels.join(" "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_from_the_list_of_metrics_is_up_to_date() {
        for (path, text) in files().unwrap() {
            let there = std::fs::read_to_string(&path).unwrap();
            assert!(there == text, "{}: run cargo xtask metrics", path.display());
        }
    }

    #[test]
    fn every_word_of_a_query_is_a_metric_of_the_list() {
        let [_, (_, rules), (_, dashboard)] = files().unwrap();
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for word in rules.split(|c| !is_word(c)).chain(dashboard.split(|c| !is_word(c))) {
            let base = word.strip_suffix("_bucket").unwrap_or(word);
            if word.starts_with("ringway_") || word.starts_with("process_") {
                assert!(ALL.iter().any(|metric| metric.name == base), "{word}");
            }
        }
    }
}
