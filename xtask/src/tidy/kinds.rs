//! Which files ask what kind of storage a disk has, outside of what belongs to one kind.

use super::source::{Text, code};

/// What only one kind of storage has, split so that this file may hold it.
const NAMES: &[&str] = &[
    concat!("ringway_nbd", "_client"),
    concat!("ringway", "_rbd"),
    concat!("aio::", "nvme"),
    concat!("::", "Nvme"),
    concat!("::", "Rbd"),
    concat!("IoUring", "Nbd"),
    concat!("Threads", "Nbd"),
    concat!("with", "_nbd("),
    concat!("Source::", "Nbd"),
    concat!(".remote", "()"),
    concat!(".remote", "_base()"),
    concat!(".cluster", "_image()"),
    concat!("\"nbd", ":"),
    concat!("\"rbd", ":"),
];

/// The crates that are to know no kind.
const CRATES: &[&str] =
    &["disk/src/", "export/src/", "control/src/", "server/src/", "bench/src/", "ringway/src/"];

/// Looks for files that name a kind. `own` are the places of the kinds and of the table; `still` may do it until
/// somebody has them ask the storage.
pub(super) fn kinds(files: &[Text], own: &[&str], still: &[&str], found: &mut Vec<String>) {
    for file in files.iter().filter(|file| is_judged(&file.path, own)) {
        let path = file.path.as_str();
        match (first_name(&file.text), still.contains(&path)) {
            (Some((line, name)), false) => found.push(format!(
                "{path}:{line}: {name} is of one kind of storage: ask the storage (disk/src/storage.rs)"
            )),
            (None, true) => {
                found.push(format!("{path} names no kind of storage any more: take it off the list (STILL_KINDS)"));
            }
            _ => {}
        }
    }
    for path in still.iter().filter(|path| !files.iter().any(|file| file.path == **path)) {
        found.push(format!("{path} is gone: take it off the list (STILL_KINDS)"));
    }
}

fn is_judged(path: &str, own: &[&str]) -> bool {
    let test = path.ends_with("/tests.rs") || path.contains("/tests/");
    path.ends_with(".rs")
        && !test
        && CRATES.iter().any(|of| path.starts_with(of))
        && !own.iter().any(|of| path.starts_with(of))
}

/// The first line of its code that names a kind. Tests within the file are its end.
fn first_name(text: &str) -> Option<(usize, &'static str)> {
    let lines =
        (1..).zip(code(text).lines()).filter(|(_, line)| !line.trim_start().starts_with("//"));
    let mut named = lines.filter_map(|(number, line)| {
        NAMES.iter().find(|name| line.contains(**name)).map(|name| (number, *name))
    });
    named.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_can_only_shrink() {
        let asks = format!("// {0}\nif disk{0}.is_some() {{}}\n", NAMES[9]);
        let none = format!("// {0}\n#[cfg(test)]\nmod tests {{ use {0}; }}\n", NAMES[0]);
        let files = [
            Text::new("disk/src/storage/nbd.rs", asks.clone()),
            Text::new("nbd-client/src/lib.rs", asks.clone()),
            Text::new("server/src/tests.rs", asks.clone()),
            Text::new("server/src/known.rs", asks.clone()),
            Text::new("server/src/new.rs", asks),
            Text::new("server/src/better.rs", none.clone()),
            Text::new("server/src/good.rs", none),
        ];
        let still = ["server/src/known.rs", "server/src/better.rs", "server/src/gone.rs"];
        let mut found = Vec::new();
        kinds(&files, &["disk/src/storage/"], &still, &mut found);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("server/src/new.rs:2: "), "{found:?}");
        assert!(
            found[1].starts_with("server/src/better.rs") && found[2].contains("gone"),
            "{found:?}"
        );
    }
}
