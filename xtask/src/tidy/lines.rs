//! The letters of a file.

use super::source::Text;

/// Words of one person's machine, split so that this file may hold them.
const FOREIGN: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("artif", "actory"),
];

/// How a test would leave itself out without being counted: only `ringway_testkit::skip` may.
const UNCOUNTED: &str = concat!("ln!(\"", "skipped");
const COUNTED: &str = "testkit/src/skip.rs";

pub(super) fn letters(file: &Text, found: &mut Vec<String>) {
    let path = &file.path;
    for (number, line) in (1..).zip(file.text.split('\n')) {
        let mut says = |what: &str| found.push(format!("{path}:{number}: {what}"));
        if line.ends_with([' ', '\t', '\r']) {
            says("ends with a blank");
        }
        if line.contains('\t') {
            says("has a tab");
        }
        if line.contains(UNCOUNTED) && path != COUNTED {
            says("leaves a test out uncounted: call ringway_testkit::skip");
        }
        for word in FOREIGN.iter().filter(|word| line.contains(**word)) {
            says(&format!("has {word:?}, which is of one machine"));
        }
    }
    if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
        found.push(format!("{path}: does not end with one newline"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untidy_text_is_found() {
        let path = "core/src/lib.rs".to_owned();
        let text = format!("fn a() {{}} \n\tx\n{}x\n{UNCOUNTED}\n{}", FOREIGN[0], "\n".repeat(70));
        let (file, mut found) = (Text { path, text }, Vec::new());
        letters(&file, &mut found);
        assert_eq!(found.len(), 5, "{found:?}");
    }
}
