//! `xtask tidy`: style as a test. It also runs as a unit test of this crate.
//!
//! What rustfmt and clippy cannot know: how long functions may get, which crate may know
//! which, which files use each other in a circle, which ask what kind of storage a disk has, what is kept for a whole
//! process, what is public for nobody, that every hazard has its test, that what can be simulated asks nothing of the host otherwise, that files
//! which pages name exist, that packages carry their licences, that nothing of one
//! person's machine is in the tree.

mod circles;
mod door;
mod floors;
mod functions;
mod hazards;
mod kinds;
mod lines;
mod modules;
mod pages;
mod source;
mod statics;
mod unused;

use anyhow::{Result, bail};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Functions that are longer than all may be, each with its own bound.
const LONGER_FUNCTIONS: &[(&str, &str, usize)] = &[("testkit/src/kill/mod.rs", "run_in", 117)];

/// But where the compiler cannot see who uses it: each test takes its part of what is shared by those
/// of a crate; a macro of another crate decides by a feature of that crate.
const DEAD_ALLOWED: &[&str] = &["ringway/tests/common/mod.rs"];

/// Which crates of the workspace a crate may use (dev-dependencies are free): arrows go down only.
const FLOORS: &[(&str, &[&str])] = &[
    ("ringway-core", &[]),
    ("ringway-ring", &["core"]),
    ("ringway-aio", &["core"]),
    ("ringway-nbd-words", &[]),
    ("ringway-nbd-tls", &[]),
    ("ringway-nbd-client", &["core", "aio", "nbd-words", "nbd-tls"]),
    ("ringway-rbd", &["core", "aio"]),
    ("ringway-scheduler", &["core"]),
    ("ringway-throttle", &["core"]),
    ("ringway-image", &["core"]),
    (
        "ringway-disk",
        &["core", "aio", "nbd-words", "nbd-client", "rbd", "scheduler", "throttle", "image"],
    ),
    ("ringway-export", &["core", "aio", "nbd-client", "throttle", "disk"]),
    ("ringway-vhost-user", &["core", "ring", "disk", "export"]),
    ("ringway-xen-blkback", &["core", "ring", "disk", "export"]),
    ("ringway-nbd", &["core", "nbd-words", "nbd-tls", "image", "disk", "export"]),
    ("ringway-driver", &["core", "ring", "scheduler"]),
    ("ringway-control", &["core", "aio", "nbd-client", "rbd", "throttle", "disk", "export"]),
    ("ringway-terminal", &["control"]),
    (
        "ringway-bench",
        &[
            "core",
            "aio",
            "nbd-client",
            "rbd",
            "disk",
            "export",
            "vhost-user",
            "driver",
            "control",
            "terminal",
        ],
    ),
    (
        "ringway-server",
        &[
            "core",
            "aio",
            "nbd-client",
            "rbd",
            "throttle",
            "image",
            "disk",
            "export",
            "vhost-user",
            "xen-blkback",
            "nbd",
            "control",
            "terminal",
        ],
    ),
    (
        "ringway",
        &[
            "core", "aio", "image", "disk", "export", "driver", "control", "terminal", "bench",
            "server",
        ],
    ),
];
/// For development; no crate of the floors may use them but in its tests.
const DEV_ONLY: &[&str] = &["ringway-testkit", "ringway-ring-oracle", "ringway-e2e", "xtask"];

/// How many files of a crate are in a circle of files that use each other. These numbers only shrink.
const CIRCLES: &[(&str, usize)] = &[];

/// Folders of what can be simulated, and files of them that cannot be.
const THROUGH_THE_DOOR: &[&str] = &["image/src/"];
const STRANGERS_TO_IT: &[&str] = &["image/src/fuzz_case.rs"];

/// Public items that nothing in the workspace uses, each with the reason why it is offered.
const FOR_STRANGERS: &[(&str, &str)] =
    &[("of_bytes", "the judgement alone, for bytes that came another way")];

/// Where what belongs to one kind of storage is, within the crates that are to know none: its own files, and the tables.
const OWN_KINDS: &[&str] = &[
    "control/src/config/source.rs",
    "disk/src/storage/",
    "disk/src/open/nbd.rs",
    "disk/src/open/nvme",
    "disk/src/open/rbd.rs",
];

/// Files that ask what kind of storage a disk has, though the storage could be asked. This list only shrinks.
const STILL_KINDS: &[&str] = &[
    "bench/src/elsewhere.rs",
    "bench/src/file_backend.rs",
    "control/src/config/ceph.rs",
    "control/src/config/nbd_server.rs",
    "disk/src/choices.rs",
    "disk/src/open.rs",
    "disk/src/open/engine.rs",
    "disk/src/open/options.rs",
    "disk/src/open/report.rs",
    "export/src/pool.rs",
    "export/src/ring_pool.rs",
    "ringway/src/copy/open.rs",
    "ringway/src/info/elsewhere.rs",
    "server/src/daemon.rs",
    "server/src/host.rs",
    "server/src/host/addresses.rs",
    "server/src/host/addresses/resolver.rs",
    "server/src/host/duties.rs",
    "server/src/host/facts_message.rs",
    "server/src/host/helper.rs",
    "server/src/host/known_exports.rs",
    "server/src/host/protocol.rs",
    "server/src/host/remote.rs",
    "server/src/host/remote_message.rs",
    "server/src/host/state.rs",
    "server/src/sizing.rs",
];

/// What is kept for a whole process, by the reason: two daemons in one process share it. This list only shrinks.
#[rustfmt::skip]
const STATICS: &[(&str, statics::Places)] = &[
    ("never changes once it is known", &[
        ("control/src/config/plan.rs", &["CPUS"]),
        ("core/src/file.rs", &["NO_PATH"]),
        ("core/src/host/real.rs", &["BOOT"]),
        ("disk/src/storage/table.rs", &["DRIVERS"]),
        ("export/src/clock.rs", &["BEGUN"]),
        ("image/src/file.rs", &["ZEROES"]),
        ("server/src/sandbox/mod.rs", &["DATA_FILTERS"]),
    ]),
    ("a process has one log: what it is written in, how often a line may come, which it has", &[
        ("export/src/limit.rs", &["UNREPORTED"]),
        ("export/src/pinned.rs", &["WARNINGS"]),
        ("image/src/layer.rs", &["TOLD"]),
        ("server/src/control.rs", &["WARNINGS"]),
        ("server/src/host.rs", &["WARNINGS"]),
        ("server/src/isolate/inside.rs", &["WARNINGS"]),
        ("terminal/src/logging/mod.rs", &["JSON", "LINES"]),
    ]),
    ("a process has one address space, one handler of each signal", &[
        ("core/src/mem/quota.rs", &["MAPPED"]),
        ("core/src/mem/sigbus.rs", &["TABLE", "FREE", "INSTALLED", "PREVIOUS", "EPOCH"]),
        ("core/src/thread.rs", &["ON_START"]),
        ("export/src/peer_eventfd.rs", &["ASLEEP", "WATCHING", "MARKS", "HANDLER", "WATCHDOG"]),
        ("rbd/src/library.rs", &["LOADED"]),
    ]),
    ("of a thread", &[
        ("core/src/thread.rs", &["CARRIES_DATA"]),
        ("export/src/answer.rs", &["ABANDONS"]),
        ("export/src/peer_eventfd.rs", &["MARK"]),
    ]),
    ("for tests", &[
        ("core/src/host/simulated/world.rs", &["HERE"]),
        ("core/src/kill_points.rs", &["POINT", "LEFT", "FAULTY", "SYNCS", "WRITES", "PANIC"]),
        ("ring/src/shared.rs", &["$atomics"]),
    ]),
];

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

fn check(root: &Path) -> Result<Vec<String>> {
    let files = source::collect(root)?;
    let mut found = Vec::new();
    for file in &files {
        lines::letters(file, &mut found);
        functions::functions_of(file, LONGER_FUNCTIONS, DEAD_ALLOWED, &mut found);
    }
    for (path, name, _) in LONGER_FUNCTIONS {
        let file = files.iter().find(|file| file.path == *path);
        if !file.is_some_and(|file| functions::has(file, name)) {
            found.push(format!("xtask/src/tidy.rs: there is no {name} in {path} to allow more to"));
        }
    }
    hazards::hazards(&files, &mut found)?;
    kinds::kinds(&files, OWN_KINDS, STILL_KINDS, &mut found);
    statics::statics(&files, STATICS, &mut found);
    pages::paths(root, &files, &mut found);
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    pages::licences(root, &manifest, &mut found);
    pages::reasons(&manifest, &files, &mut found);
    floors::floors(root, FLOORS, DEV_ONLY, &mut found)?;
    circles::circles(&files, CIRCLES, &mut found)?;
    door::door(&files, THROUGH_THE_DOOR, STRANGERS_TO_IT, &mut found)?;
    unused::unused(&files, FOR_STRANGERS, &mut found)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let found = check(&root()).unwrap();
        assert!(found.is_empty(), "\n{}", found.join("\n"));
    }
}
