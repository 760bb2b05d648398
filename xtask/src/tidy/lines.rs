//! The letters of a file, and how many lines it has.

use super::source::Text;

/// The longest a source file may be, in lines before its tests.
const LINES: usize = 400;
/// `lib.rs` says what a crate is; it does nothing.
const LIB_LINES: usize = 64;

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

/// Finds a file that is longer than all may be, or than `longer` lets it be.
pub(super) fn length(file: &Text, longer: &[(&str, usize)], found: &mut Vec<String>) {
    let path = file.path.as_str();
    if !path.ends_with(".rs") || !path.contains("/src/") || path.ends_with("/tests.rs") {
        return;
    }
    let counted = without_tests(&file.text);
    let is_lib = path.ends_with("/lib.rs");
    // The first page of a crate has an example, which may be long.
    let lines = counted.iter().filter(|line| !(is_lib && line.starts_with("//!"))).count();
    let most = match longer.iter().find(|(longer, _)| *longer == path) {
        Some((_, most)) => *most,
        None if is_lib => LIB_LINES,
        None => LINES,
    };
    if lines > most {
        found.push(format!("{path}: {lines} lines without its tests, {most} is the most"));
    }
}

/// The lines of a file but those of what is built for tests only: `#[cfg(test)]` and the item that follows.
fn without_tests(text: &str) -> Vec<&str> {
    let mut lines = text.lines();
    let mut kept = Vec::new();
    while let Some(line) = lines.next() {
        let tests = line.trim_start().strip_prefix("#[cfg(").is_some_and(|condition| {
            condition.split(|c: char| !c.is_alphanumeric()).any(|word| word == "test")
                && !condition.contains("not(test")
        });
        if !tests {
            kept.push(line);
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let mut head = true;
        for line in lines.by_ref() {
            let (deep, word) = (line.len() - line.trim_start().len(), line.trim());
            // Of one line, or to the bracket that closes it; attributes may come between.
            let single = head && word.ends_with([';', ',']);
            if single || (deep == indent && word.starts_with(['}', ')', ']'])) {
                break;
            }
            head &= word.starts_with("#[");
        }
    }
    kept
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
        length(&file, &[], &mut found);
        assert_eq!(found.len(), 6, "{found:?}");
    }

    #[test]
    fn whole_files_are_counted_but_their_tests() {
        let text = "use a;\n#[cfg(test)]\nmod tests;\n#[cfg(any(test, fuzzing))]\n#[derive(Debug)]\n\
                    struct A {\n    a: u8,\n}\nfn b() {\n    #[cfg(not(test))]\n    c();\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn d() {}\n}\nfn e() {}\n";
        let kept = without_tests(text);
        assert_eq!(
            kept,
            ["use a;", "fn b() {", "    #[cfg(not(test))]", "    c();", "}", "fn e() {}"]
        );
        let path = "core/src/long.rs".to_owned();
        let text = format!("#[cfg(test)]\nmod tests;\n{}", "// x\n".repeat(LINES + 1));
        let mut found = Vec::new();
        length(&Text { path, text }, &[], &mut found);
        assert_eq!(found, ["core/src/long.rs: 401 lines without its tests, 400 is the most"]);
    }
}
