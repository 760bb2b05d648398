//! A disk that is elsewhere: what an NBD server or a Ceph cluster says of it.

use crate::io::target::Target;
use ringway_bench::elsewhere::{self, Allocation};
use ringway_control::config::CephArgs;
use ringway_disk::{Disk, Source};
use serde::Serialize;

/// What is said of it. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    pub(super) target: String,
    /// `NBD export` or `RBD image`.
    pub(super) kind: &'static str,
    pub(super) bytes: u64,
    /// It cannot be written, whoever asks.
    pub(super) read_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nbd: Option<Export>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rbd: Option<Image>,
}

/// What the server of an export offers. Sizes in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Export {
    pub(super) abilities: Vec<&'static str>,
    pub(super) structured_replies: bool,
    pub(super) min_block: u32,
    pub(super) preferred_block: u32,
    pub(super) max_block: u32,
    /// What may be something else than zeroes, if the server tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data_bytes: Option<u64>,
}

/// What the cluster says of an image.
#[derive(Debug, Serialize)]
pub(super) struct Image {
    /// Of each object that it consists of.
    pub(super) object_bytes: u64,
    pub(super) features: Vec<String>,
    /// Who has its exclusive lock.
    pub(super) lock: Option<Lock>,
    /// Why it cannot be served for writing now.
    pub(super) not_writable: Option<String>,
}

/// The exclusive lock of an image.
#[derive(Debug, Serialize)]
pub(super) struct Lock {
    /// The address of the client that has it.
    pub(super) address: String,
    /// The cluster has heard of it within the last half minute.
    pub(super) lives: bool,
}

/// Asks, without taking a lock.
///
/// # Errors
/// One that is not there.
pub(super) fn inspect(target: &Target, source: &Source, ceph: &CephArgs) -> anyhow::Result<Facts> {
    let (disk, allocation) = elsewhere::open_with_allocation(source, ceph)?;
    let nbd = disk.remote().map(|remote| {
        let facts = remote.negotiated();
        Export {
            abilities: facts.abilities().collect(),
            structured_replies: facts.structured,
            min_block: facts.min_block,
            preferred_block: facts.preferred_block,
            max_block: facts.max_block,
            data_bytes: allocation.as_ref().and_then(Allocation::data_bytes),
        }
    });
    let rbd = image(&disk)?;
    let read_only = match (&nbd, disk.cluster_image()) {
        (Some(nbd), _) => nbd.abilities.contains(&"read-only"),
        (None, Some(image)) => image.target().snapshot.is_some(),
        (None, None) => false,
    };
    let kind = if nbd.is_some() { "NBD export" } else { "RBD image" };
    Ok(Facts { target: target.to_string(), kind, bytes: disk.capacity(), read_only, nbd, rbd })
}

fn image(disk: &Disk) -> anyhow::Result<Option<Image>> {
    let Some(image) = disk.cluster_image() else { return Ok(None) };
    let facts = image.facts()?;
    let is_snapshot = image.target().snapshot.is_some();
    Ok(Some(Image {
        object_bytes: facts.object_bytes,
        features: facts.features,
        lock: facts.holder.map(|holder| Lock { address: holder.address, lives: holder.lives }),
        not_writable: match image.may_be_written() {
            Err(error) if !is_snapshot => Some(error.to_string()),
            _ => None,
        },
    }))
}
