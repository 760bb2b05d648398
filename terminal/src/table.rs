//! Small tables.

use crate::output;
use comfy_table::{CellAlignment, Table, presets};
use std::io::IsTerminal;

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
fn with_words(words: usize, header: &[&str], rows: Vec<Vec<String>>) -> String {
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

/// As [`text`], but the first `words` columns hold words, and on a terminal that is too narrow without
/// the columns `least`, as many of them as it takes, from the first one on. What was left out is said
/// below.
pub fn fitting(words: usize, header: &[&str], rows: Vec<Vec<String>>, least: &[&str]) -> String {
    let width = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    let width = width.map_or(usize::MAX, |(width, _)| usize::from(width.0));
    within(width, words, header, rows, least)
}

fn within(
    width: usize,
    mut words: usize,
    header: &[&str],
    mut rows: Vec<Vec<String>>,
    least: &[&str],
) -> String {
    let mut header = header.to_vec();
    let mut left_out = Vec::new();
    let mut least = least.iter();
    loop {
        let text = with_words(words, &header, rows.clone());
        let wide = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        let next = least.find_map(|name| header.iter().position(|title| title == name));
        match next.filter(|_| wide > width) {
            Some(at) => {
                left_out.push(header.remove(at));
                rows.iter_mut().filter(|row| at < row.len()).for_each(|row| drop(row.remove(at)));
                words -= usize::from(at < words);
            }
            None if left_out.is_empty() => return text,
            None => return format!("{text}\n(no room for: {})", left_out.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_gets_fewer_columns() {
        let rows = || vec![vec!["a.img".to_owned(), "words".into(), "1".into(), "22".into()]];
        let header = ["image", "more", "count", "size"];
        let all = within(usize::MAX, 2, &header, rows(), &["more", "count"]);
        assert_eq!(all, with_words(2, &header, rows()));
        let wide = all.lines().next().unwrap().chars().count();
        let fewer = within(wide - 1, 2, &header, rows(), &["none such", "more", "count"]);
        assert!(!fewer.contains("words") && fewer.contains("22"), "{fewer}");
        assert!(fewer.ends_with("\n(no room for: more)"), "{fewer}");
        // What matters stays, however narrow it is.
        let least = within(1, 2, &header, rows(), &["more", "count"]);
        assert!(least.contains("a.img") && least.contains("22"), "{least}");
        assert!(least.ends_with("(no room for: more, count)"), "{least}");
    }
}
