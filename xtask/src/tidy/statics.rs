//! Which files keep something for the whole process: two daemons can live in one.

use super::source::{Text, code};

/// Crates that are no part of the product.
const OTHERS: &[&str] = &["testkit/", "e2e/", "fuzz/", "xtask/"];

/// Files, and the names of statics in them.
pub(super) type Places = &'static [(&'static str, &'static [&'static str])];

/// Looks for statics in the product that are not `allowed`, and for allowed ones that have gone. Each has a reason, its
/// files and their names.
pub(super) fn statics(files: &[Text], allowed: &[(&str, Places)], found: &mut Vec<String>) {
    let places = || allowed.iter().flat_map(|(_, places)| *places);
    let mut seen = Vec::new();
    for file in files.iter().filter(|file| is_judged(&file.path)) {
        for (line, name) in names(&file.text) {
            if places().any(|(path, names)| *path == file.path && names.contains(&name)) {
                seen.push((file.path.as_str(), name));
                continue;
            }
            found.push(format!(
                "{}:{line}: {name} is kept for the whole process: have a disk or a daemon own it, or say why not \
                 (STATICS)",
                file.path
            ));
        }
    }
    for (path, names) in places() {
        for name in names.iter().filter(|name| !seen.contains(&(*path, **name))) {
            found.push(format!(
                "{path} has no static {name} any more: take it off the list (STATICS)"
            ));
        }
    }
}

fn is_judged(path: &str) -> bool {
    let of_tests =
        path.ends_with("/tests.rs") || path.contains("/tests/") || path.contains("/contract/");
    path.contains("src/")
        && path.ends_with(".rs")
        && !of_tests
        && !OTHERS.iter().any(|of| path.starts_with(of))
}

/// The statics of a file, by line. Tests within it are its end.
fn names(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(code(text).lines()).filter_map(|(number, line)| {
        let line = line.trim_start();
        let line = line.strip_prefix("pub").map_or(line, |rest| {
            rest.strip_prefix("(crate)")
                .or(rest.strip_prefix("(super)"))
                .unwrap_or(rest)
                .trim_start()
        });
        let rest = line.strip_prefix("static ")?;
        let name = rest.strip_prefix("mut ").unwrap_or(rest);
        Some((number, name.split(':').next()?.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f55_what_is_kept_for_a_process_has_a_reason() {
        let text = "pub(crate) static ONE: Mutex<u8> = Mutex::new(0);\nfn f() {\n    static mut TWO: u8 = 0;\n}\n\
                    fn g(a: &'static str) {}\n#[cfg(test)]\nmod tests { static THREE: u8 = 0; }\n";
        let files = [
            Text::new("disk/src/one.rs", text),
            Text::new("disk/src/one/tests.rs", text),
            Text::new("testkit/src/one.rs", text),
        ];
        let mut found = Vec::new();
        statics(&files, &[("a reason", &[("disk/src/one.rs", &["ONE", "FOUR"])])], &mut found);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("disk/src/one.rs:3: TWO is kept"), "{found:?}");
        assert!(found[1].contains("no static FOUR"), "{found:?}");
    }
}
