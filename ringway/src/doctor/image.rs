//! What a disk is, and how it would be served.

use ringway_control::config::{CephArgs, DiskArgs, Place, cpus};
use ringway_disk::open::{Mount, Origin};
use ringway_disk::{CacheMode, EngineKind, ForeignFormat, OpenOptions, Qcow2, probe};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A disk as it was found. What is not known is `None`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Image {
    /// As it was named.
    pub(crate) name: String,
    /// `file`, `block device`, `null` or `simulation`.
    pub(crate) kind: Option<&'static str>,
    /// `qcow2` and others, in the words of `qemu-img`: what it begins or ends with. `None` for all that
    /// may be raw.
    pub(crate) looks_like: Option<&'static str>,
    pub(crate) bytes: Option<u64>,
    /// Bytes of a file that are really there.
    pub(crate) allocated_bytes: Option<u64>,
    pub(crate) sparse: Option<bool>,
    pub(crate) file_system: Option<FileSystem>,
    pub(crate) o_direct: Option<Direct>,
    pub(crate) logical_block: Option<u32>,
    pub(crate) physical_block: Option<u32>,
    /// 0 if it does not say.
    pub(crate) optimal_io: Option<u32>,
    pub(crate) discard: Option<bool>,
    pub(crate) discard_granularity: Option<u32>,
    /// What it is, or what holds its file system.
    pub(crate) device: Option<Device>,
    /// Who serves it now.
    pub(crate) in_use_by: Option<String>,
    /// Another program has locked parts of it in a way that is no hindrance.
    pub(crate) locked_otherwise: bool,
    /// What `auto` would choose.
    pub(crate) choice: Option<Choice>,
    /// Why it cannot be served.
    pub(crate) error: Option<String>,
}

/// The file system that holds an image.
#[derive(Debug, Serialize)]
pub(crate) struct FileSystem {
    pub(crate) name: String,
    pub(crate) mounted_at: String,
    pub(crate) source: String,
    pub(crate) free_bytes: u64,
}

/// Whether O_DIRECT works, and what it needs.
#[derive(Debug, Serialize)]
pub(crate) struct Direct {
    pub(crate) works: bool,
    pub(crate) memory_alignment: Option<u32>,
    pub(crate) offset_alignment: Option<u32>,
    /// Who says so: `statx`, `device limits` or `trial`.
    pub(crate) origin: Option<&'static str>,
    /// Why it does not work.
    pub(crate) why: Option<String>,
}

/// A block device.
#[derive(Debug, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) rotational: Option<bool>,
    /// `write back` or `write through`.
    pub(crate) write_cache: Option<String>,
    pub(crate) logical_block: Option<u64>,
    pub(crate) physical_block: Option<u64>,
    pub(crate) optimal_io: u64,
    /// 0 if it cannot discard.
    pub(crate) discard_granularity: u64,
    pub(crate) read_only: bool,
}

/// What `serve` would choose if told nothing.
#[derive(Debug, Serialize)]
pub(crate) struct Choice {
    pub(crate) engine: &'static str,
    pub(crate) engine_why: String,
    pub(crate) cache: &'static str,
    pub(crate) cache_why: String,
    pub(crate) queues: u16,
    pub(crate) queues_why: &'static str,
    pub(crate) workers: u16,
    pub(crate) workers_why: &'static str,
}

/// Looks at the disk that `image` names.
pub(crate) fn inspect(
    image: &Path,
    engines: &[(EngineKind, Result<String, String>)],
    qcow2: Option<Qcow2>,
    ceph: &CephArgs,
) -> Image {
    let name = image.display().to_string();
    // What serve would be told, but for the place.
    let CephArgs { ceph_conf, ceph_user } = ceph.clone();
    let words = DiskArgs { ceph_conf, ceph_user, ..DiskArgs::default() };
    let spec = match words.into_spec(image, Place::Socket(PathBuf::new())) {
        Ok(spec) => spec,
        Err(error) => return Image { name, error: Some(error), ..Image::default() },
    };
    let mut options = OpenOptions { engines: engines.to_vec(), ..OpenOptions::new(spec.source) };
    // As `serve` takes such an image.
    let is_qcow2 = qcow2.is_some();
    options.cache = is_qcow2.then_some(CacheMode::Writeback);
    options.qcow2 = qcow2;
    let found = probe(&options);
    let workers = spec.queues.min(cpus());
    let (choice, error) = match found.verdict {
        Ok(choice) => (
            Some(Choice {
                engine: choice.engine.name(),
                engine_why: choice.engine_why,
                cache: choice.cache.name(),
                cache_why: match is_qcow2 {
                    true => "qcow2 goes through the page cache".into(),
                    false => choice.cache_why,
                },
                queues: spec.queues,
                queues_why: "one per CPU, at most 16",
                workers,
                workers_why: "one per queue, at most one per CPU",
            }),
            None,
        ),
        Err(error) => (None, Some(error.to_string())),
    };
    Image {
        name,
        kind: found.kind,
        looks_like: found.looks_like.map(ForeignFormat::name),
        bytes: found.bytes,
        allocated_bytes: found.allocated,
        sparse: found.allocated.zip(found.bytes).map(|(allocated, bytes)| allocated < bytes),
        file_system: found.mount.map(file_system),
        // Nothing that matters to one that goes through the page cache.
        o_direct: found.direct.filter(|_| !is_qcow2).map(direct),
        logical_block: found.blocks.map(|blocks| blocks.logical),
        physical_block: found.blocks.map(|blocks| blocks.physical),
        optimal_io: found.blocks.map(|blocks| blocks.optimal_io),
        discard: found.blocks.and_then(|blocks| blocks.discard),
        discard_granularity: found.blocks.map(|blocks| blocks.discard_granularity),
        device: found.device.map(device),
        in_use_by: found.holder,
        locked_otherwise: found.locked_otherwise,
        choice,
        error,
    }
}

fn direct(found: Result<ringway_disk::open::Direct, String>) -> Direct {
    match found {
        Ok(direct) => Direct {
            works: true,
            memory_alignment: Some(direct.alignment.memory),
            offset_alignment: Some(direct.alignment.offset),
            origin: Some(match direct.origin {
                Origin::Statx => "statx",
                Origin::Device => "device limits",
                Origin::Trial => "trial",
            }),
            why: None,
        },
        Err(why) => Direct {
            works: false,
            memory_alignment: None,
            offset_alignment: None,
            origin: None,
            why: Some(why),
        },
    }
}

fn file_system(mount: Mount) -> FileSystem {
    FileSystem {
        name: mount.file_system,
        mounted_at: mount.mounted_at,
        source: mount.source,
        free_bytes: mount.free_bytes,
    }
}

fn device(device: ringway_disk::open::Device) -> Device {
    Device {
        name: device.name,
        rotational: device.rotational,
        write_cache: device.write_cache,
        logical_block: device.logical_block,
        physical_block: device.physical_block,
        optimal_io: device.optimal_io,
        discard_granularity: device.discard_granularity,
        read_only: device.read_only,
    }
}
