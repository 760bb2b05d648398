//! The page of hazards and its tests.

use super::source::Text;
use anyhow::{Context, Result};
use std::collections::BTreeSet;

/// Every test that `docs/hazards.md` names exists, and every test with the number of a hazard is
/// named there.
pub(super) fn hazards(files: &[Text], found: &mut Vec<String>) -> Result<()> {
    const PAGE: &str = "docs/hazards.md";
    let page = files.iter().find(|file| file.path == PAGE).context(PAGE)?;
    let named: BTreeSet<&str> =
        page.text.split('`').skip(1).step_by(2).filter(|name| is_test_name(name)).collect();
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let exist: BTreeSet<&str> = rust.flat_map(|file| functions(&file.text)).collect();
    for name in named.difference(&exist) {
        found.push(format!("{PAGE}: there is no test {name}"));
    }
    // `e05_…` are all of that number.
    let is_named =
        |name: &&&str| named.contains(*name) || page.text.contains(&format!("`{}…`", &name[..4]));
    for name in exist.iter().filter(|name| is_hazard(name) && !is_named(name)) {
        found.push(format!("{PAGE}: does not name the test {name}"));
    }
    let mut rows = BTreeSet::new();
    for row in page.text.lines().filter_map(row).filter(|row| !rows.insert(*row)) {
        found.push(format!("{PAGE}: the row {row} is there twice"));
    }
    if named.len() < 30 {
        found.push(format!("{PAGE}: names only {} tests; has its form changed?", named.len()));
    }
    Ok(())
}

/// The number of a hazard that a line of the table is about.
fn row(line: &str) -> Option<&str> {
    let (number, _) = line.strip_prefix("| ")?.split_once(" |")?;
    let digits = number.strip_prefix(|c: char| c.is_ascii_uppercase())?;
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then_some(number)
}

/// A sentence in snake case, and not a path, a call or a constant.
fn is_test_name(word: &str) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    plain && (word.matches('_').count() >= 2 || is_hazard(word))
}

/// `a01_…`, `b12_…`, `e03_…`
fn is_hazard(name: &str) -> bool {
    matches!(name.as_bytes(), [b'a'..=b'g', b'0'..=b'9', b'0'..=b'9', b'_', _, ..])
}

/// The names that follow `fn` at the beginning of a line.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        // Cases of a suite are functions that its other files call.
        let line = line.trim_start();
        let name = line.strip_prefix("pub(super) ").unwrap_or(line).strip_prefix("fn ")?;
        name.split(['(', '<']).next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tests_are_told_from_other_words() {
        for yes in ["a01_descriptor_loop", "clients_come_and_go"] {
            assert!(is_test_name(yes));
        }
        for no in ["num_queues", "VIRTIO_BLK_T_IN", "docs/a_b_c.md", "a_b_c()", ""] {
            assert!(!is_test_name(no));
        }
        assert_eq!(row("| C18 | a disk | held |"), Some("C18"));
        assert_eq!(row("| date | what |"), None);
        let source = "    fn a01_loop() {\n    fn with<T>(t: T)\n// fn not_this()\n";
        assert_eq!(functions(source).collect::<Vec<_>>(), ["a01_loop", "with"]);
        assert!(
            is_hazard("b10_x") && !is_hazard("b1_x") && is_hazard("g10_x") && !is_hazard("h10_x")
        );
    }

    #[test]
    fn the_page_and_the_tests_name_each_other() {
        let names: Vec<_> = (10..50).map(|number| format!("a{number}_is_tested")).collect();
        let page: String = names.iter().map(|name| format!("`{name}`\n")).collect();
        let tests: String = names[1..].iter().map(|name| format!("fn {name}() {{}}\n")).collect();
        let files = [
            Text::new("docs/hazards.md", page),
            Text::new("a/tests/a.rs", tests + "fn b01_unnamed() {}\n"),
        ];
        let mut found = Vec::new();
        hazards(&files, &mut found).unwrap();
        let want = [
            "docs/hazards.md: there is no test a10_is_tested",
            "docs/hazards.md: does not name the test b01_unnamed",
        ];
        assert_eq!(found, want);
    }
}
