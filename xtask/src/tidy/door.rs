//! What a crate that can be simulated asks of the host goes through one module, `core/src/host.rs`.

use super::modules::flatten;
use super::source::{Text, without_tests};
use anyhow::Result;
use syn::Item;

/// What that module has. A path that ends there, or goes on behind it.
const FORBIDDEN: &[&str] = &[
    "std::fs::File",
    "std::os::unix::fs::FileExt",
    "std::sync::Condvar",
    "std::sync::Mutex",
    "std::sync::MutexGuard",
    "std::sync::RwLock",
    "std::sync::mpsc",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::hash::RandomState",
];

/// Looks at the files in folders of `through`, but those of `strangers`, which a simulation has not.
pub(super) fn door(
    files: &[Text],
    through: &[&str],
    strangers: &[&str],
    found: &mut Vec<String>,
) -> Result<()> {
    let is_looked_at = |file: &&Text| {
        let path = file.path.as_str();
        file.is_rust()
            && through.iter().any(|folder| path.starts_with(folder))
            && !path.ends_with("/tests.rs")
            && !strangers.contains(&path)
    };
    for file in files.iter().filter(is_looked_at) {
        let tokens = without_tests(file.tokens()?);
        let code: String = tokens.to_string().chars().filter(|c| !c.is_whitespace()).collect();
        let parsed: syn::File = syn::parse2(tokens)?;
        let uses = parsed.items.iter().filter_map(|item| match item {
            Item::Use(of) => Some(flatten(&of.tree)),
            _ => None,
        });
        let used: Vec<String> = uses.flatten().map(|(path, _)| path.join("::")).collect();
        for forbidden in FORBIDDEN {
            let on = format!("{forbidden}::");
            let is_used = used.iter().any(|path| path == forbidden || path.starts_with(&on));
            if is_used || code.contains(&on) {
                found.push(format!("{}: {forbidden} is to come from core/src/host.rs", file.path));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_around_the_door_are_found() {
        let text = "use std::sync::{Arc, Mutex};\nfn f() { std::thread::park(); }\n\
                    #[cfg(test)]\nmod tests { use std::fs::File; }\n";
        let fine = "use ringway_core::host::{File, sync::Mutex};\nuse std::sync::Arc;\n";
        let files = [
            Text::new("image/src/one.rs", text),
            Text::new("image/src/fine.rs", fine),
            Text::new("image/src/other.rs", text),
            Text::new("image/src/one/tests.rs", text),
            Text::new("disk/src/one.rs", text),
        ];
        let mut found = Vec::new();
        door(&files, &["image/src/"], &["image/src/other.rs"], &mut found).unwrap();
        let of = |what: &str| format!("image/src/one.rs: {what} is to come from core/src/host.rs");
        assert_eq!(found, [of("std::sync::Mutex"), of("std::thread")]);
    }
}
