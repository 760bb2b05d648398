//! An engine of another crate: a copy of the tutorial, with what is public only.

// As in a library, where others would use it.
#[allow(unreachable_pub)]
mod null;

use ringway_aio::contract::{Mode, Suite};
use std::path::Path;

#[test]
fn a_copy_of_the_tutorial_passes_the_suite() {
    Suite {
        make: &|depth| Box::new(null::Null::new(depth).unwrap()),
        dir: Path::new(env!("CARGO_TARGET_TMPDIR")),
        modes: &[Mode::Cached],
        moves_data: false,
        syscalls_per_io_max: 0.0,
        block_device: None,
    }
    .run();
}

#[test]
fn the_copy_is_the_tutorial() {
    let ours = include_str!("null.rs");
    let tutorial = include_str!("../../src/null.rs");
    assert_eq!(ours, tutorial.replace("use crate::", "use ringway_aio::"), "copy it again");
}
