//! Images of QEMU's programs served by this crate, and images that it wrote judged by them.

// Content is bytes of larger numbers.
#![allow(clippy::cast_possible_truncation)]

mod bases;
mod commit;
mod disk;
mod entries;
mod fences;
mod flatten;
mod journal;
mod kills;
mod matrix;
mod merge_cuts;
mod missing;
mod nth_call;
mod portions;
mod power_cuts;
mod qemu;
mod record;
mod several;
mod shrink;
