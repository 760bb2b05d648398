//! `xtask tidy`: style as a test. It also runs as a unit test of this crate.
//!
//! What rustfmt and clippy cannot know: how long files and functions may get, which crate may know
//! which, which files use each other in a circle, what is public for nobody, that every hazard has its
//! test, that files which pages name exist, that packages carry their licences, that nothing of one
//! person's machine is in the tree.

mod circles;
mod floors;
mod functions;
mod hazards;
mod lines;
mod modules;
mod pages;
mod source;
mod unused;

use anyhow::{Result, bail};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Files that are longer, each with its own bound. Bounds may go down, and up only with a reason.
const LONGER: &[(&str, usize)] = &[
    ("aio/src/io_uring/mod.rs", 440), // one engine in the order of its trait
    ("driver/src/queue.rs", 510),     // a queue from submission to completion
    ("nbd-words/src/lib.rs", 145),    // the numbers of one protocol, and a doc test
    ("nbd-client/src/lib.rs", 101),   // its front page is a doc test
    ("disk/src/lib.rs", 91),          // its front page is a doc test
    ("scheduler/src/lib.rs", 85),     // its front page is a doc test
    ("driver/src/lib.rs", 67),        // its front page is a doc test
    ("bench/src/lib.rs", 66),         // its front page is a doc test
    ("bench/src/target.rs", 406),
    ("server/src/lib.rs", 82),         // its front page is a doc test
    ("driver/src/device.rs", 440),     // set-up and teardown of one connection
    ("driver/src/vhost_user.rs", 410), // one function per message
    ("e2e/src/guest.rs", 825),         // a test tool
    ("export/src/export/lock_state/model.rs", 430), // a model with all its players
    ("transport/vhost-user/src/message.rs", 435), // what is read, and by when
    ("ring/src/virtqueue/inflight/packed.rs", 405), // each step of one protocol
    ("ring/src/virtqueue/split_driver.rs", 415), // one ring, all its verbs on private fields
    ("control/src/protocol.rs", 482),  // each word of the control socket
    ("control/src/config/disk.rs", 540), // each word of a disk
    ("image/src/lib.rs", 67),          // its front page is a doc test
    ("ringway/src/ctl.rs", 430),       // every word of `ctl`
    ("server/src/isolate.rs", 410),    // one process for each disk
    ("testkit/oracle/src/blkif.rs", 560), // an oracle: a ring and its two sides
    ("testkit/oracle/src/inflight.rs", 405), // an oracle
    ("testkit/oracle/src/packed.rs", 465), // an oracle
    ("testkit/src/raw.rs", 530),       // a test tool
    ("testkit/src/session_fuzz_case.rs", 440), // a test tool
];

/// Functions that are longer than all may be, each with its own bound.
const LONGER_FUNCTIONS: &[(&str, &str, usize)] = &[
    ("bench/src/runner.rs", "run", 90),
    ("bench/src/origins/o2.rs", "findings", 74),
    ("bench/src/origins/o4.rs", "run", 78),
    ("driver/tests/qemu_storage_daemon.rs", "every_operation_on_a_file_with_verified_content", 71),
    ("e2e/tests/migration_of_an_image.rs", "migrated", 75),
    ("transport/vhost-user/tests/two_drivers.rs", "theirs", 86),
    ("ring/src/blkif/tests.rs", "a09_front_and_back_agree_for_ever", 90),
    ("ring/src/blkif/tests.rs", "slots_are_those_of_blkif_h", 83),
    ("ring/src/blkif/tests/hostile.rs", "a03_a04_b13_malformed_requests_are_refused_alone", 72),
    ("ring/src/virtqueue/tests.rs", "a09_driver_and_device_agree_for_ever", 95),
    ("ringway/src/copy.rs", "prepare", 76),
    ("ringway/src/top/fixture.rs", "sample", 98),
    ("ringway/tests/fence.rs", "fence_once", 93),
    ("ringway/tests/isolate.rs", "e06_isolated_disks_are_reached_as_others_are", 77),
    ("ringway/tests/sandbox.rs", "another_user_has_none_of_roots_rights", 80),
    ("server/src/disks.rs", "start", 81),
    ("server/src/daemon.rs", "start", 79),
    ("testkit/oracle/src/chain.rs", "pop", 73),
    ("testkit/src/kill/mod.rs", "run_in", 117),
    ("testkit/src/xenstore.rs", "serve", 89),
];

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
    ("ringway-export", &["core", "aio", "nbd-client", "rbd", "throttle", "disk"]),
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

/// Public items that nothing in the workspace uses, each with the reason why it is offered.
const FOR_STRANGERS: &[(&str, &str)] =
    &[("of_bytes", "the judgement alone, for bytes that came another way")];

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
        lines::length(file, LONGER, &mut found);
        functions::functions_of(file, LONGER_FUNCTIONS, DEAD_ALLOWED, &mut found);
    }
    for (path, _) in LONGER {
        if !files.iter().any(|file| file.path == *path) {
            found.push(format!("xtask/src/tidy.rs: there is no {path} to allow more lines to"));
        }
    }
    for (path, name, _) in LONGER_FUNCTIONS {
        let file = files.iter().find(|file| file.path == *path);
        if !file.is_some_and(|file| functions::has(file, name)) {
            found.push(format!("xtask/src/tidy.rs: there is no {name} in {path} to allow more to"));
        }
    }
    hazards::hazards(&files, &mut found)?;
    pages::paths(root, &files, &mut found);
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    pages::licences(root, &manifest, &mut found);
    pages::reasons(&manifest, &files, &mut found);
    floors::floors(root, FLOORS, DEV_ONLY, &mut found)?;
    circles::circles(&files, CIRCLES, &mut found)?;
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
