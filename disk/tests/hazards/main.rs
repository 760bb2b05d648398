//! The disk under failure and abuse: rows of the table in docs/hazards.md, each a test of its name.

mod again;
mod auto;
mod bench;
mod custom;
mod faults;
mod formats;
mod held;
mod image;
mod merging;
mod metadata;
mod overdue;
mod parts;
mod power_cut;
mod state;
mod storages;
mod syncs;
