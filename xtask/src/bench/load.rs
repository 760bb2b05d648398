//! What is asked for of a server.

use crate::bench::lab::Lab;
use crate::bench::options::{Client, Waiting};
use anyhow::{Result, bail};
use ringway_bench::{AccessArgs, Outcome, Rw, Sizes, Target, measure};
use ringway_control::config::{Choice, Format};
use ringway_disk::EngineKind;
use std::path::Path;
use std::time::Duration;

/// How long a server may take until it listens.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What is asked for: requests of one size, anywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Requests in flight per queue.
    pub(crate) depth: u32,
    /// Bytes of a request.
    pub(crate) size: u32,
    /// Writes instead of reads.
    pub(crate) write: bool,
    /// How the client waits.
    pub(crate) waiting: Waiting,
}

impl Load {
    /// 4 KiB random reads.
    pub(crate) const fn reads(depth: u32, waiting: Waiting) -> Self {
        Self { depth, size: 4096, write: false, waiting }
    }

    /// The kind, in fio's word.
    pub(crate) const fn rw(&self) -> Rw {
        if self.write { Rw::Randwrite } else { Rw::Randread }
    }

    /// The same for the load generator. Whoever polls has a thread for each core, which looks after its
    /// queues in turn; whoever sleeps has a thread for each queue.
    pub(crate) fn of(&self, lab: &Lab, queues: u16) -> Result<ringway_bench::Load> {
        let polling = self.waiting == Waiting::Polling;
        let cpus = &lab.common.client_cpus;
        let jobs = if polling { queues.min(u16::try_from(cpus.len())?) } else { queues };
        if jobs == 0 || queues % jobs != 0 {
            bail!("{queues} queues cannot be shared evenly by {jobs} cores that poll");
        }
        Ok(ringway_bench::Load {
            jobs,
            queues: queues / jobs,
            runtime: Some(Duration::from_secs_f64(lab.seconds)),
            ramp: Duration::from_secs_f64(lab.common.warmup),
            timed: false,
            polling,
            cpus: cpus.clone(),
            ..ringway_bench::Load::new(self.rw(), Sizes::one(self.size), self.depth)
        })
    }
}

/// Connects, loads, measures. `boundary` is called right before and right after the measurement.
pub(crate) fn measure_server(
    client: Client,
    lab: &Lab,
    socket: &Path,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let load = load.of(lab, queues)?;
    if client == Client::Blkio {
        #[cfg(feature = "blkio")]
        return crate::bench::blkio::measure_server(lab, socket, &load, boundary);
        #[cfg(not(feature = "blkio"))]
        bail!("this xtask was built without the client blkio: add --features blkio");
    }
    let access = AccessArgs {
        allow_write: true,
        queue_size: Some(lab.common.queue_size),
        packed: lab.common.packed,
        indirect: Some(lab.common.indirect),
        ..AccessArgs::default()
    };
    let target = target(&format!("vhost-user:{}", socket.display()))?;
    let opened = target.open_within(TIMEOUT, &load, &access, || Ok(()))?;
    measure(opened, &load, boundary)
}

/// The bare file through an engine of `ringway-aio`: no device, no ring, no second process.
pub(crate) fn measure_file(
    engine: Choice<EngineKind>,
    lab: &Lab,
    path: &Path,
    load: &Load,
) -> Result<Outcome> {
    let load = Load { waiting: Waiting::Sleeping, ..*load }.of(lab, 1)?;
    let access = AccessArgs {
        allow_write: true,
        format: Some(Format::Raw),
        engine: Some(engine),
        ..AccessArgs::default()
    };
    let opened = target(&format!("file:{}", path.display()))?.open(&load, &access)?;
    measure(opened, &load, &mut || Ok(()))
}

fn target(name: &str) -> Result<Target> {
    name.parse().map_err(anyhow::Error::msg)
}
