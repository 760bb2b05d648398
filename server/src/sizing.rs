//! How many workers a daemon has, and how many rings it sets up for them.

use super::host::Host;
use crate::sandbox;
use anyhow::Context;
use ringway_control::config::{CpuList, DaemonArgs, DiskSpec, cpus};
use ringway_disk::{Disk, EngineKind};
use ringway_export::RingPool;
use std::sync::Arc;

/// Rings that are set up at the start for disks that are added later, unless --workers says how many
/// workers there are to be: at 400 KiB each.
const RINGS_IN_STORE: usize = 32;

/// The same for disks with --engine nvme, if there is one at the start.
const NVME_RINGS_IN_STORE: usize = 4;

/// Workers for so many queues.
pub(super) fn workers(options: &DaemonArgs, queues: usize) -> usize {
    let listed = options.cpus.as_ref().map_or(&[][..], CpuList::numbers);
    let most = if listed.is_empty() { cpus().into() } else { listed.len() };
    options.workers.map_or(queues.min(most), usize::from)
}

/// The rings that workers will need, if none can be set up later.
pub(super) fn rings(
    opened: &[(Arc<Disk>, DiskSpec)],
    options: &DaemonArgs,
    host: &Host,
) -> anyhow::Result<Option<RingPool>> {
    if !sandbox::filters(options.sandbox.unwrap_or_default()) {
        return Ok(None);
    }
    let rings_of = |kind| workers_now(opened, options, kind);
    let now = rings_of(EngineKind::IoUring) + rings_of(EngineKind::IoUringNbd);
    let comes_later = options.control.is_some() || host.xen().is_some() || host.has_configuration();
    let later =
        if comes_later && host.has_io_uring() { workers(options, RINGS_IN_STORE) } else { 0 };
    let wanted = now.max(later);
    let rings = RingPool::set_up(now, wanted, options.iopoll)
        .with_context(|| format!("cannot set {now} rings of io_uring up"))?;
    let left = rings.left(EngineKind::IoUring).unwrap_or(wanted);
    if left < wanted {
        tracing::warn!(
            "this host has memory for {} rings of io_uring and not for {wanted}: disks that are \
             added later share workers",
            left
        );
    }
    // Without such a disk now there is none later: see `HelperNeeds`.
    let now = workers_now(opened, options, EngineKind::Nvme);
    let later = if comes_later && now > 0 { workers(options, NVME_RINGS_IN_STORE) } else { 0 };
    rings
        .set_up_nvme(now, now.max(later))
        .with_context(|| format!("cannot set {now} rings for NVMe up"))?;
    Ok(Some(rings))
}

/// Workers with this engine that the first disks need.
fn workers_now(
    opened: &[(Arc<Disk>, DiskSpec)],
    options: &DaemonArgs,
    engine: EngineKind,
) -> usize {
    let of_this = opened.iter().filter(|(disk, _)| disk.engine() == engine);
    let queues: usize = of_this.map(|(_, spec)| usize::from(spec.queues)).sum();
    if queues == 0 { 0 } else { workers(options, queues) }
}
