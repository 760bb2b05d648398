//! Small tables.

use crate::output;
use comfy_table::{CellAlignment, Table, TableComponent, presets};
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
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    for between_rows in [TableComponent::HorizontalLines, TableComponent::MiddleIntersections] {
        table.remove_style(between_rows);
    }
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// As [`text`], but the first `words` columns hold words, and where there is too little room (on a narrow
/// terminal, or within `COLUMNS` elsewhere) without the columns `least`, as many of them as it takes,
/// from the first one on. What was left out is said below.
pub fn fitting(words: usize, header: &[&str], rows: Vec<Vec<String>>, least: &[&str]) -> String {
    let terminal = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    let columns = std::env::var("COLUMNS").ok();
    let width = width(terminal.map(|(width, _)| width.0), columns.as_deref());
    within(width, words, header, rows, least)
}

/// How many characters a line may have: as many as the terminal has. Elsewhere whoever wants lines that
/// fit says so in `COLUMNS`; scripts that do not get all columns.
fn width(terminal: Option<u16>, columns: Option<&str>) -> usize {
    let asked = || columns?.trim().parse().ok().filter(|&width| width > 0);
    terminal.map(usize::from).or_else(asked).unwrap_or(usize::MAX)
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
            None => return format!("{text}\n{}", no_room_for(&left_out, width)),
        }
    }
}

/// The columns that were left out, in lines of at most `width` characters where words allow it.
fn no_room_for(left_out: &[&str], width: usize) -> String {
    let (mut text, mut line) = (String::new(), "(no room for:".to_owned());
    for (at, name) in left_out.iter().enumerate() {
        let end = if at + 1 < left_out.len() { ',' } else { ')' };
        if line.chars().count() + name.chars().count() + 2 > width {
            text += &line;
            text.push('\n');
            line.clear();
        }
        line = format!("{line} {name}{end}");
    }
    text + &line
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
        assert!(least.ends_with("(no room for:\n more,\n count)"), "{least}");
    }

    #[test]
    fn what_was_left_out_is_said_within_the_width() {
        let names = ["cache", "engine", "calls/s", "spinning", "done/harvest"];
        let text = no_room_for(&names, 30);
        assert_eq!(text, "(no room for: cache, engine,\n calls/s, spinning,\n done/harvest)");
        assert!(text.lines().all(|line| line.len() <= 30), "{text}");
        assert_eq!(no_room_for(&names[..2], 28), "(no room for: cache, engine)");
    }

    #[test]
    fn a_terminal_says_how_wide_it_is_and_elsewhere_the_environment_may() {
        assert_eq!(width(Some(80), Some("200")), 80);
        assert_eq!(width(None, Some("80")), 80);
        for columns in [None, Some(""), Some("0"), Some("wide")] {
            assert_eq!(width(None, columns), usize::MAX, "{columns:?}");
        }
    }
}
