//! What pages name, and what packages carry.

use super::source::Text;
use std::path::Path;

/// Every file that a page names by its whole path exists. Decisions (`docs/adr`) and the change log tell
/// of what was.
pub(super) fn paths(root: &Path, files: &[Text], found: &mut Vec<String>) {
    let is_of_now = |path: &str| !path.starts_with("docs/adr/") && path != "CHANGELOG.md";
    for page in files.iter().filter(|file| file.path.ends_with(".md") && is_of_now(&file.path)) {
        for (number, line) in (1..).zip(page.text.lines()) {
            for name in missing(root, line) {
                found.push(format!("{}:{number}: there is no {name}", page.path));
            }
        }
    }
}

/// The paths within `line` that begin with a folder of the tree, end in `.rs` and lead nowhere.
fn missing<'a>(root: &Path, line: &'a str) -> Vec<&'a str> {
    let is_of_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let words = line.split(|c| !is_of_path(c)).filter(|word| word.ends_with(".rs"));
    let leads_nowhere = |word: &&str| {
        let Some((first, _)) = word.split_once('/') else { return false };
        // A page may be about one crate: `export/change.rs` is in `export/src`.
        let there = [root.join(word), root.join(first).join("src").join(word)];
        !first.is_empty()
            && first != ".."
            && root.join(first).is_dir()
            && !there.iter().any(|path| path.exists())
    };
    words.filter(leads_nowhere).collect()
}

/// Every crate that is for users has both licences in its folder, so that they are in its package.
pub(super) fn licences(root: &Path, manifest: &str, found: &mut Vec<String>) {
    let members = manifest.lines().find_map(|line| line.strip_prefix("default-members = "));
    let members: Vec<_> = members.unwrap_or_default().split('"').skip(1).step_by(2).collect();
    if members.is_empty() {
        found.push("Cargo.toml: has no default-members".to_owned());
    }
    for (member, licence) in
        members.iter().flat_map(|member| ["APACHE", "MIT"].map(|licence| (member, licence)))
    {
        let path = format!("{member}/LICENSE-{licence}");
        let text = |path: &str| std::fs::read(root.join(path)).ok();
        // A link that became a file of its own holds the other's name.
        match (text(&path), text(&format!("LICENSE-{licence}"))) {
            (None, _) => {
                found.push(format!("there is no {path}: its package would have no such text"))
            }
            (its, ours) if its != ours => found.push(format!("{path} is not LICENSE-{licence}")),
            _ => {}
        }
    }
}

/// Every dependency has its reason in a decision, where it stands as `` `name` ``.
pub(super) fn reasons(manifest: &str, files: &[Text], found: &mut Vec<String>) {
    let rest = manifest.split_once("[workspace.dependencies]\n").map_or("", |(_, rest)| rest);
    let lines = rest.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split_once([' ', '.']).map(|(name, _)| name));
    let is_foreign = |name: &&str| {
        name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.starts_with("ringway")
    };
    let is_named = |name: &str| {
        let name = format!("`{name}`");
        let mut decisions = files.iter().filter(|file| file.path.starts_with("docs/adr/"));
        decisions.any(|page| page.text.contains(&name))
    };
    for name in names.filter(|name| is_foreign(name)) {
        if !is_named(name) {
            found.push(format!("Cargo.toml: no page of docs/adr says why there is `{name}`"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_nowhere_and_licences_that_lack_are_found() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("disk/src")).unwrap();
        std::fs::write(root.path().join("disk/src/open.rs"), "").unwrap();
        let line =
            "`disk/src/open.rs` `disk/src/close.rs`, open.rs, other/src/x.rs (disk/tests/y.rs)";
        assert_eq!(missing(root.path(), line), ["disk/src/close.rs", "disk/tests/y.rs"]);

        let manifest = "members = [\"a\"]\ndefault-members = [\"disk\"]\n";
        let mut found = Vec::new();
        for path in ["LICENSE-MIT", "disk/LICENSE-MIT", "LICENSE-APACHE"] {
            std::fs::write(root.path().join(path), "the text").unwrap();
        }
        licences(root.path(), manifest, &mut found);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("no disk/LICENSE-APACHE"), "{found:?}");
        found.clear();
        std::fs::write(root.path().join("disk/LICENSE-APACHE"), "../LICENSE-APACHE").unwrap();
        licences(root.path(), manifest, &mut found);
        assert_eq!(found, ["disk/LICENSE-APACHE is not LICENSE-APACHE"]);

        let manifest = "[workspace.dependencies]\nringway-core = 1\nclap = \"4\"\nserde.x = 1\n\n[profile]\na = 1";
        let text = "`clap` is the usual choice".to_owned();
        let page = Text { path: "docs/adr/0001-x.md".to_owned(), text };
        found.clear();
        reasons(manifest, &[page], &mut found);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("`serde`"), "{found:?}");
    }
}
