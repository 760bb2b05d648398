//! The load: our front-end on its own core, in a closed loop.

use crate::bench::lab::Lab;
use crate::bench::load::{Load, Outcome};
use crate::bench::options::{Client, IndirectArg, Waiting};
use crate::bench::phases::measure;
use crate::bench::queue_load::{QueueLoad, work};
use anyhow::{Context, Result, bail};
use ringway_driver::{Device, Error, Indirect, Options};
use std::path::Path;
use std::time::Duration;

/// Connects, loads, measures. `boundary` is called right before and right after the measurement.
pub(crate) fn attack_by(
    client: Client,
    lab: &Lab,
    socket: &Path,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    if client == Client::Blkio {
        #[cfg(feature = "blkio")]
        return crate::bench::blkio::attack(lab, socket, queues, load, boundary);
        #[cfg(not(feature = "blkio"))]
        bail!("this xtask was built without the client blkio: add --features blkio");
    }
    let connect = |options: &Options| options.connect(socket);
    attack_over(lab, connect, queues, load, boundary)
}

/// As [`attack_by`], over any connection.
pub(crate) fn attack_over(
    lab: &Lab,
    connect: impl FnOnce(&Options) -> Result<Device, Error>,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let room = u64::from(load.depth) * u64::from(queues) * u64::from(load.size.max(4096));
    let mut device = connect(
        &Options::new()
            .queues(queues)
            .queue_size(lab.common.queue_size)
            .packed(lab.common.packed)
            .indirect(match lab.common.indirect {
                IndirectArg::Scarce => Indirect::WhenScarce,
                IndirectArg::Never => Indirect::Never,
                IndirectArg::Always => Indirect::Always,
            })
            .memory(usize::try_from(room + (1 << 20))?)
            .patience(Duration::from_secs(5)),
    )?;
    let (capacity, pool) = (device.capacity(), device.pool());
    let mut queues = Vec::new();
    for (index, queue) in device.queues()?.into_iter().enumerate() {
        let buffers = (0..load.depth).map(|_| pool.alloc(load.size as usize));
        let buffers: Option<Vec<_>> = buffers.collect();
        let buffers = buffers.context("out of shared memory")?;
        queues.push(QueueLoad::new(queue, buffers, *load, capacity, index as u64));
    }
    // Whoever polls serves all its queues in turn; whoever sleeps has a thread per queue.
    let cpus = &lab.common.client_cpus;
    let threads = if load.waiting == Waiting::Polling { cpus.len() } else { queues.len() };
    let mut threads: Vec<Vec<QueueLoad>> =
        (0..threads.min(queues.len())).map(|_| Vec::new()).collect();
    let count = threads.len();
    for (index, queue) in queues.into_iter().enumerate() {
        threads[index % count].push(queue);
    }
    measure(lab, threads, boundary, |queues, phase| work(queues, load.waiting, phase))
}
