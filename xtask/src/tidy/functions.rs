//! How long functions are, and by which way code is shared.

use super::source::Text;

/// The longest a function may be, in lines.
const MOST: usize = 100;

/// Code is shared by crates, not by the paths of its files.
const BY_PATH: &str = concat!("#[pa", "th =");
/// Nor is what nobody uses kept because somebody might.
const DEAD: &str = concat!("allow(dead_", "code)");
/// Functions are flat and short, but `longer` ones; code is shared by crates, and used, but in `unseen`.
pub(super) fn functions_of(
    file: &Text,
    longer: &[(&str, &str, usize)],
    unseen: &[&str],
    found: &mut Vec<String>,
) {
    let path = file.path.as_str();
    if !path.ends_with(".rs") {
        return;
    }
    let lines: Vec<_> = file.text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        if line.trim_start().starts_with(BY_PATH) {
            found.push(format!("{path}:{}: takes a file by its path", at + 1));
        }
        let unseen = unseen.contains(&path);
        if line.trim_start().starts_with('#') && line.contains(DEAD) && !unseen {
            found.push(format!("{path}:{}: keeps what nobody uses", at + 1));
        }
        let Some(name) = function_name(line) else { continue };
        let indent = line.len() - line.trim_start().len();
        let ends = |line: &&str| line.trim_end() == format!("{}}}", " ".repeat(indent));
        // One without a body ends before.
        let bodiless = lines[at..].iter().position(|line| line.ends_with(';'));
        let opens = lines[at..].iter().position(|line| line.ends_with('{'));
        let Some(length) = lines[at..].iter().position(ends) else { continue };
        if opens.is_none() || bodiless.is_some_and(|ended| Some(ended) < opens) {
            continue;
        }
        let most = longer.iter().find(|(of, long, _)| *of == path && *long == name);
        let most = most.map_or(MOST, |(_, _, most)| *most);
        if length + 1 > most {
            let length = length + 1;
            found.push(format!("{path}:{}: {name} has {length} lines, {most} is the most", at + 1));
        }
    }
}

/// True if there is a function of this name.
pub(super) fn has(file: &Text, name: &str) -> bool {
    file.text.lines().any(|line| function_name(line) == Some(name))
}

/// The name of the function that begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    if rest.starts_with("//") {
        return None;
    }
    loop {
        if let Some(name) = rest.strip_prefix("fn ") {
            return name.split(['(', '<']).next();
        }
        let (word, more) = rest.split_once(' ')?;
        let before = ["pub", "const", "async", "unsafe", "extern", "\"C\""];
        if !before.contains(&word) && !word.starts_with("pub(") {
            return None;
        }
        rest = more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_functions_and_what_is_shared_by_path_are_found() {
        let body = "        a();\n".repeat(MOST - 1);
        let text = format!(
            "trait T {{\n    fn none(&self);\n}}\nimpl T {{\n    pub(crate) const unsafe fn long(\n    \
             ) {{\n{body}    }}\n}}\n{BY_PATH} \"x.rs\"]\nmod x;\n#![{DEAD}]\n"
        );
        let mut found = Vec::new();
        functions_of(&Text::new("core/src/a.rs", text), &[], &[], &mut found);
        let want = [
            "core/src/a.rs:5: long has 102 lines, 100 is the most",
            "core/src/a.rs:108: takes a file by its path",
            "core/src/a.rs:110: keeps what nobody uses",
        ];
        assert_eq!(found, want);
    }
}
