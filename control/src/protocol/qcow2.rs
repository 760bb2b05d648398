//! Words about disks whose images are qcow2.

#![allow(missing_docs, reason = "docs/control.md says what each field means, for all programs")]

use super::lossy;
use ringway_disk::Disk;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What is known of a qcow2 image that is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Qcow2Facts {
    /// What it is a clone of, if that was said.
    #[serde(default, serialize_with = "lossy::maybe")]
    pub base: Option<PathBuf>,
    /// The clone goes with the disk.
    #[serde(default)]
    pub ephemeral: bool,
    /// Memory for tables, in bytes: of this image, and of what it is based on.
    pub table_bytes: u64,
    pub base_table_bytes: u64,
    /// How many disks share the latter, this one among them.
    pub base_disks: usize,
}

impl Qcow2Facts {
    /// `None` for a disk of another format.
    pub fn of(disk: &Disk, base: Option<PathBuf>, ephemeral: bool) -> Option<Self> {
        let memory = disk.image()?.memory();
        Some(Self {
            base,
            ephemeral,
            table_bytes: memory.own_bytes,
            base_table_bytes: memory.base_bytes,
            base_disks: memory.base_images,
        })
    }
}

/// `snapshot`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Snapshotted {
    pub id: u64,
    pub image: String,
    /// The image that is read-only from now on, with its whole path.
    #[serde(serialize_with = "lossy::path")]
    pub snapshot: PathBuf,
    /// For how long no requests were taken.
    pub blackout_us: u64,
    /// Of how many images the disk is made now.
    pub images: usize,
}
