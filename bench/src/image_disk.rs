//! Disks that are served in this process: images, and how.

use crate::elsewhere;
use crate::inside::Serving;
use crate::load::{AccessArgs, Load};
use anyhow::{Result, bail};
use ringway_control::config::{Choice, cpus};
use ringway_disk::{Disk, OpenOptions, Qcow2, Source};
use ringway_export::usable_engines;
use std::path::Path;

/// Opens a qcow2 image, with all that it is based on.
///
/// # Errors
/// That it is not to be written, or what is wrong with it.
pub(crate) fn open(path: &Path, load: &Load, access: &AccessArgs) -> Result<Disk> {
    if load.rw.writes() && !access.allow_write {
        bail!(
            "{}: it is an image, whose data writing destroys. Add --allow-write if that is what you \
             want",
            path.display()
        );
    }
    let mut options = OpenOptions::new(Source::Path(path.into()));
    options.read_only = !load.rw.writes();
    options.engine = access.engine.and_then(Choice::given);
    options.engines = usable_engines();
    options.qcow2 = Some(Qcow2 { backing_root: access.backing_root.clone(), ..Qcow2::default() });
    Ok(ringway_disk::open(&options)?)
}

/// Opens what is no file, and says what it is.
///
/// # Errors
/// What is wrong with it, or that it is not to be written.
pub(crate) fn no_file(
    name: &str,
    source: &Source,
    load: &Load,
    access: &AccessArgs,
) -> Result<(Disk, &'static str)> {
    let facts = match source {
        Source::Sim { .. } => "a simulation, served in this process",
        Source::Null { .. } => "no data moves; served in this process",
        _ => {
            let disk = elsewhere::open_for(name, source, load, access)?;
            return Ok((disk, "served in this process"));
        }
    };
    Ok((ringway_disk::open(&OpenOptions::new(source.clone()))?, facts))
}

/// As a daemon would serve it to such a load.
pub(crate) fn serving(
    disk: &Disk,
    load: &Load,
    access: &AccessArgs,
    harvest_at_once: bool,
) -> Serving {
    let mut workers = usize::from(cpus().min(load.all_queues()));
    if let Some(most) = disk.storage().engines_most() {
        workers = workers.min(most);
        disk.storage().share_among(workers);
    }
    Serving {
        queues: load.all_queues(),
        queue_size: access.queue_size.unwrap_or(ring_size(load.depth)),
        workers,
        harvest_at_once,
    }
}

/// Descriptors for `depth` requests.
pub(crate) fn ring_size(depth: u32) -> u16 {
    // At most 4096 requests.
    u16::try_from((depth * 2).next_power_of_two().max(256)).unwrap_or(8192)
}
