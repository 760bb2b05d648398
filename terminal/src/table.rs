//! Small tables.

use crate::output;
use comfy_table::{CellAlignment, Table, presets};

/// Prints a table on standard output; all columns but the first hold numbers.
///
/// # Errors
/// As of [`output::print`].
pub fn print(header: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    output::print(&(text(header, rows) + "\n"))
}

/// The lines of a table; all columns but the first hold numbers.
pub fn text(header: &[&str], rows: Vec<Vec<String>>) -> String {
    with_words(1, header, rows)
}

/// The lines of a table; all columns but the first `words` hold numbers.
pub fn with_words(words: usize, header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.style_mut().row_separator = Default::default();
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
