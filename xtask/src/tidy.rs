//! `xtask tidy`: style as a test. It also runs as a unit test of this crate.
//!
//! What rustfmt and clippy cannot know: how long files may get, which crate may know which, that
//! every hazard has its test, that nothing of one person's machine is in the tree.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The longest a source file may be, in lines before its tests.
const LINES: usize = 400;
/// `lib.rs` says what a crate is; it does nothing.
const LIB_LINES: usize = 60;

/// Files that are longer, each with its own bound. Bounds may go down, and up only with a reason.
const LONGER: &[(&str, usize)] = &[
    ("aio/src/io_uring/mod.rs", 440), // one engine in the order of its trait
    ("aio/src/sim.rs", 401),          // one engine, three models
    ("disk/src/bounce.rs", 460),      // one predicate, two copies, their fault cases
    ("disk/src/open.rs", 660),        // the only place that probes the host and chooses
    ("disk/src/queue.rs", 415),       // slots from acquire to finish
    ("driver/src/queue.rs", 510),     // a queue from submission to completion
    ("driver/src/lib.rs", 63),        // its front page is a doc test
    ("driver/src/device.rs", 440),    // set-up and teardown of one connection
    ("driver/src/vhost_user.rs", 410), // one function per message
    ("e2e/src/guest.rs", 840),        // a test tool
    ("export/src/export/lock_state/model.rs", 430), // a model with all its players
    ("transport/vhost-user/src/message.rs", 435), // what is read, and by when
    ("transport/vhost-user/src/session.rs", 450), // one match arm per message
    ("ring/src/virtqueue/inflight/packed.rs", 405), // each step of one protocol
    ("ring/src/virtqueue/packed.rs", 410), // one ring, all its verbs on private fields
    ("ring/src/virtqueue/split_driver.rs", 415), // one ring, all its verbs on private fields
    ("ring/src/virtqueue/sides.rs", 420), // one match for each verb of both formats
    ("control/src/protocol.rs", 440), // each word of the control socket
    ("server/src/isolate.rs", 401),   // one process for each disk
    ("server/src/disks.rs", 420),     // the life of a list
    ("testkit/oracle/src/blkif.rs", 560), // an oracle: a ring and its two sides
    ("testkit/oracle/src/inflight.rs", 405), // an oracle
    ("testkit/oracle/src/packed.rs", 465), // an oracle
    ("testkit/src/raw.rs", 530),      // a test tool
    ("testkit/src/session_case.rs", 440), // a test tool
];

/// The longest a function may be, in lines, and those that are longer, each with its own bound.
const FUNCTION_LINES: usize = 70;
const LONGER_FUNCTIONS: &[(&str, &str, usize)] = &[
    ("bench/src/crew.rs", "run", 90),
    ("bench/src/origins/o2.rs", "findings", 74),
    ("bench/src/origins/o4.rs", "run", 78),
    ("disk/src/bounce.rs", "finish_rare", 85),
    ("driver/tests/qemu_storage_daemon.rs", "every_operation_on_a_file_with_verified_content", 71),
    ("e2e/tests/migration_of_an_image.rs", "migrated", 75),
    ("transport/vhost-user/tests/two_drivers.rs", "theirs", 86),
    ("ring/src/blkif/tests.rs", "a09_front_and_back_agree_for_ever", 90),
    ("ring/src/blkif/tests.rs", "slots_are_those_of_blkif_h", 83),
    ("ring/src/blkif/tests/hostile.rs", "a03_a04_b13_malformed_requests_are_refused_alone", 72),
    ("ring/src/virtqueue/tests.rs", "a09_driver_and_device_agree_for_ever", 95),
    ("ringway/src/copy.rs", "prepare", 77),
    ("ringway/src/doctor/image.rs", "look", 71),
    ("ringway/src/top/case.rs", "sample", 94),
    ("ringway/tests/fence.rs", "fence_once", 93),
    ("ringway/tests/isolate.rs", "e06_isolated_disks_are_reached_as_others_are", 77),
    ("ringway/tests/sandbox.rs", "another_user_has_none_of_roots_rights", 80),
    ("server/src/daemon.rs", "start", 73),
    ("testkit/oracle/src/chain.rs", "pop", 73),
    ("testkit/src/kill/mod.rs", "run_in", 115),
    ("testkit/src/xenstore.rs", "serve", 89),
];

/// Code is shared by crates, not by the paths of its files.
const BY_PATH: &str = concat!("#[pa", "th =");
/// Nor is what nobody uses kept because somebody might.
const DEAD: &str = concat!("allow(dead_", "code)");
/// But where the compiler cannot see who uses it: each test takes its part of what is shared by those
/// of a crate; a macro of another crate decides by a feature of that crate.
const DEAD_ALLOWED: &[&str] = &["disk/src/stats.rs", "ringway/tests/common/mod.rs"];

/// Which crates of the workspace a crate may use (dev-dependencies are free): arrows go down only.
const FLOORS: &[(&str, &[&str])] = &[
    ("ringway-core", &[]),
    ("ringway-ring", &["core"]),
    ("ringway-aio", &["core"]),
    ("ringway-scheduler", &["core"]),
    ("ringway-disk", &["core", "aio", "scheduler"]),
    ("ringway-export", &["core", "ring", "aio", "scheduler", "disk"]),
    ("ringway-vhost-user", &["core", "ring", "disk", "export"]),
    ("ringway-xen-blkback", &["core", "ring", "disk", "export"]),
    ("ringway-driver", &["core", "ring", "scheduler"]),
    ("ringway-control", &["core", "aio", "disk", "export"]),
    ("ringway-terminal", &["control"]),
    (
        "ringway-bench",
        &["core", "aio", "disk", "export", "vhost-user", "driver", "control", "terminal"],
    ),
    (
        "ringway-server",
        &["core", "aio", "disk", "export", "vhost-user", "xen-blkback", "control", "terminal"],
    ),
    (
        "ringway",
        &["core", "aio", "disk", "export", "driver", "control", "terminal", "bench", "server"],
    ),
];
/// For development; no crate of the floors may use them but in its tests.
const DEV_ONLY: &[&str] = &["ringway-testkit", "ringway-ring-oracle", "ringway-e2e", "xtask"];
/// `ring` is memory and nothing else: no way to a system call.
const NO_SYSTEM: (&str, &[&str]) = ("ringway-ring", &["libc", "rustix", "nix", "vmm-sys-util"]);

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

/// Text that is looked at: by extension, or by name.
const TEXT: &[&str] = &["rs", "toml", "md", "sh", "lock", "yml", "yaml"];
const SCRIPTS: &[&str] = &["demo", "test", ".ci/run", "e2e/guest/init"];
const SKIPPED: &[&str] = &[".git", "target", "corpus", "artifacts", "coverage"];

/// Looks at the whole tree and prints what it finds.
pub(crate) fn run() -> Result<()> {
    let found = check(&root())?;
    if found.is_empty() {
        println!("tidy");
        return Ok(());
    }
    let mut list = String::new();
    for line in &found {
        writeln!(list, "  {line}")?;
    }
    bail!("{} findings:\n{list}", found.len());
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// One file: its path from the root, and its text.
struct Text {
    path: String,
    text: String,
}

fn check(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    collect(root, root, &mut files)?;
    let mut found = Vec::new();
    for file in &files {
        letters(file, &mut found);
        length(file, &mut found);
        functions_of(file, &mut found);
    }
    for (path, _) in LONGER {
        if !files.iter().any(|file| file.path == *path) {
            found.push(format!("xtask/src/tidy.rs: there is no {path} to allow more lines to"));
        }
    }
    hazards(&files, &mut found)?;
    floors(root, &mut found)?;
    Ok(found)
}

fn collect(root: &Path, dir: &Path, files: &mut Vec<Text>) -> Result<()> {
    let mut entries: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let from_root = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            collect(root, &path, files)?;
        } else if kind.is_file()
            && (SCRIPTS.contains(&from_root.as_str())
                || path.extension().is_some_and(|end| TEXT.iter().any(|text| end == *text)))
        {
            let text = fs::read_to_string(&path).with_context(|| from_root.clone())?;
            files.push(Text { path: from_root, text });
        }
    }
    Ok(())
}

fn letters(file: &Text, found: &mut Vec<String>) {
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

fn length(file: &Text, found: &mut Vec<String>) {
    let path = file.path.as_str();
    if !path.ends_with(".rs") || !path.contains("/src/") || path.ends_with("/tests.rs") {
        return;
    }
    let lines = without_tests(&file.text).len();
    let most = match LONGER.iter().find(|(longer, _)| *longer == path) {
        Some((_, most)) => *most,
        None if path.ends_with("/lib.rs") => LIB_LINES,
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

/// Functions are flat and short; code is shared by crates.
fn functions_of(file: &Text, found: &mut Vec<String>) {
    let path = file.path.as_str();
    if !path.ends_with(".rs") {
        return;
    }
    let lines: Vec<_> = file.text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        if line.trim_start().starts_with(BY_PATH) {
            found.push(format!("{path}:{}: takes a file by its path", at + 1));
        }
        let unseen = DEAD_ALLOWED.contains(&path);
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
        let most = LONGER_FUNCTIONS.iter().find(|(of, longer, _)| *of == path && *longer == name);
        let most = most.map_or(FUNCTION_LINES, |(_, _, most)| *most);
        if length + 1 > most {
            let length = length + 1;
            found.push(format!("{path}:{}: {name} has {length} lines, {most} is the most", at + 1));
        }
    }
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

/// Every test that `docs/hazards.md` names exists, and every test with the number of a hazard is
/// named there.
fn hazards(files: &[Text], found: &mut Vec<String>) -> Result<()> {
    const PAGE: &str = "docs/hazards.md";
    let page = files.iter().find(|file| file.path == PAGE).context(PAGE)?;
    let named: BTreeSet<&str> =
        page.text.split('`').skip(1).step_by(2).filter(|name| is_test_name(name)).collect();
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let exist: BTreeSet<&str> = rust.flat_map(|file| functions(&file.text)).collect();
    for name in named.difference(&exist) {
        found.push(format!("{PAGE}: there is no test {name}"));
    }
    for name in exist.iter().filter(|name| is_hazard(name) && !named.contains(*name)) {
        found.push(format!("{PAGE}: does not name the test {name}"));
    }
    if named.len() < 30 {
        found.push(format!("{PAGE}: names only {} tests; has its form changed?", named.len()));
    }
    Ok(())
}

/// A sentence in snake case, and not a path, a call or a constant.
fn is_test_name(word: &str) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    plain && (word.matches('_').count() >= 2 || is_hazard(word))
}

/// `a01_…`, `b12_…`, `c03_…`
fn is_hazard(name: &str) -> bool {
    matches!(name.as_bytes(), [b'a'..=b'c', b'0'..=b'9', b'0'..=b'9', b'_', _, ..])
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

fn floors(root: &Path, found: &mut Vec<String>) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    let metadata: Value = serde_json::from_slice(&out.stdout)?;
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("name")?;
        let Some((_, allowed)) = FLOORS.iter().find(|(floor, _)| *floor == name) else {
            if !DEV_ONLY.contains(&name) {
                found.push(format!("{name}: on which floor is it? (xtask/src/tidy.rs)"));
            }
            continue;
        };
        let needs = package["dependencies"].as_array().context("dependencies")?;
        for need in needs.iter().filter(|need| need["kind"] != "dev") {
            let need = need["name"].as_str().context("dependency")?;
            let floor = need.strip_prefix("ringway-");
            let upward = need == "ringway" || floor.is_some_and(|floor| !allowed.contains(&floor));
            if upward || need == "xtask" {
                found.push(format!("{name} may not use {need}: arrows go down only"));
            }
            if name == NO_SYSTEM.0 && NO_SYSTEM.1.contains(&need) {
                found.push(format!("{name} may not use {need}: it is memory and nothing else"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let found = check(&root()).unwrap();
        assert!(found.is_empty(), "\n{}", found.join("\n"));
    }

    #[test]
    fn untidy_text_is_found() {
        let path = "core/src/lib.rs".to_owned();
        let text = format!("fn a() {{}} \n\tx\n{}x\n{UNCOUNTED}\n{}", FOREIGN[0], "\n".repeat(70));
        let (file, mut found) = (Text { path, text }, Vec::new());
        letters(&file, &mut found);
        length(&file, &mut found);
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
        length(&Text { path, text }, &mut found);
        assert_eq!(found, ["core/src/long.rs: 401 lines without its tests, 400 is the most"]);
    }

    #[test]
    fn long_functions_and_what_is_shared_by_path_are_found() {
        let body = "        a();\n".repeat(FUNCTION_LINES - 1);
        let text = format!(
            "trait T {{\n    fn none(&self);\n}}\nimpl T {{\n    pub(crate) const unsafe fn long(\n    \
             ) {{\n{body}    }}\n}}\n{BY_PATH} \"x.rs\"]\nmod x;\n#![{DEAD}]\n"
        );
        let mut found = Vec::new();
        functions_of(&Text { path: "core/src/a.rs".into(), text }, &mut found);
        let want = [
            "core/src/a.rs:5: long has 72 lines, 70 is the most",
            "core/src/a.rs:78: takes a file by its path",
            "core/src/a.rs:80: keeps what nobody uses",
        ];
        assert_eq!(found, want);
    }

    #[test]
    fn names_of_tests_are_told_from_other_words() {
        for yes in ["a01_descriptor_loop", "clients_come_and_go"] {
            assert!(is_test_name(yes));
        }
        for no in ["num_queues", "VIRTIO_BLK_T_IN", "docs/a_b_c.md", "a_b_c()", ""] {
            assert!(!is_test_name(no));
        }
        let source = "    fn a01_loop() {\n    fn with<T>(t: T)\n// fn not_this()\n";
        assert_eq!(functions(source).collect::<Vec<_>>(), ["a01_loop", "with"]);
        assert!(is_hazard("b10_x") && !is_hazard("b1_x") && !is_hazard("d10_x"));
    }
}
