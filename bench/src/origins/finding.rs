//! What an origin finds: a table beside the published one.

use ringway_terminal::table;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A table with the published rows first, and what to draw of it.
#[derive(Debug, Default)]
pub(super) struct Finding {
    pub(super) title: String,
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    pub(super) notes: Vec<String>,
    /// What the bars show, and the bars; those that begin with `published` stand back.
    pub(super) bars: (&'static str, Vec<(String, f64)>),
    /// The value of a bar that says: as good as before.
    pub(super) even: f64,
    /// Every round.
    pub(super) data: Value,
    /// Rounds, and seconds of each.
    pub(super) how: (usize, f64),
}

impl Finding {
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n{}\n", self.title, table::text(&self.head, self.rows.clone()));
        for note in &self.notes {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{note}");
        }
        text + "\n"
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "title": self.title, "head": self.head, "rows": self.rows, "notes": self.notes,
            "data": self.data, "rounds": self.how.0, "runtime_s": self.how.1,
        })
    }
}
