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
    let of_this = opened.iter().filter(|(disk, _)| disk.engine() == EngineKind::IoUring);
    let queues: usize = of_this.map(|(_, spec)| usize::from(spec.queues)).sum();
    let now = if queues == 0 { 0 } else { workers(options, queues) };
    let comes_later = options.control.is_some() || host.xen().is_some() || host.has_configuration();
    let later =
        if comes_later && host.has_io_uring() { workers(options, RINGS_IN_STORE) } else { 0 };
    let wanted = now.max(later);
    let rings = RingPool::set_up(now, wanted, options.iopoll)
        .with_context(|| format!("cannot set {now} rings of io_uring up"))?;
    if rings.left() < wanted {
        tracing::warn!(
            "this host has memory for {} rings of io_uring and not for {wanted}: disks that are \
             added later share workers",
            rings.left()
        );
    }
    Ok(Some(rings))
}
