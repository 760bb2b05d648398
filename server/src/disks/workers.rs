//! The workers of all disks: how many there are, and whether that is wise.

use super::super::pools::{Engine, Pools};
use super::super::served::lock;
use super::super::sizing::workers;
use super::super::spread::Spread;
use super::super::stats::Workers;
use super::Disks;
use anyhow::{Context, bail};
use ringway_control::config::DiskSpec;
use ringway_disk::{Disk, EngineKind};
use ringway_export::{OnFailure, Polling, PoolOptions, WorkerOptions};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Disks {
    /// The workers of all disks, to ask for their counts.
    pub(crate) fn workers(&self) -> Workers {
        let disks = self.list().into_iter().map(|served| Arc::clone(served.export.disk()));
        let engines = lock(&self.engines);
        let pools = engines.iter().map(|engine| (engine.kind, engine.pool.counts()));
        Workers::new(pools, disks)
    }

    /// One pool of workers for each engine in use.
    pub(super) fn start_pools(&self, opened: &[(Arc<Disk>, DiskSpec)]) -> anyhow::Result<()> {
        for (disk, _) in opened {
            let kind = disk.engine();
            let of_this = opened.iter().filter(|(disk, _)| disk.engine() == kind);
            let queues = of_this.map(|(_, spec)| usize::from(spec.queues)).sum();
            self.provide(kind, queues)?;
        }
        Ok(())
    }

    /// Workers with engine `kind` for `queues` queues; as many as there are already, at least.
    pub(super) fn provide(&self, kind: EngineKind, queues: usize) -> anyhow::Result<()> {
        let wanted = workers(&self.options, queues);
        let context = || format!("cannot start {wanted} workers with engine {kind}");
        let mut engines = lock(&self.engines);
        let there = engines.iter().find(|engine| engine.kind == kind);
        let there = there.map_or(0, |engine| engine.pool.len());
        // Queues share the workers that there can be.
        let left = self.rings.as_ref().and_then(|rings| rings.left(kind));
        let wanted = left.map_or(wanted, |left| wanted.min(there + left));
        if wanted == 0 {
            bail!(
                "there is no io_uring for this disk: none was set up when the daemon started, and in \
                 the sandbox none can be later. Use another engine, or start the daemon anew"
            );
        }
        if let Some(engine) = engines.iter_mut().find(|engine| engine.kind == kind) {
            engine.pool.grow(wanted).with_context(context)?;
            engine.spread.grow(engine.pool.len());
            return Ok(());
        }
        let options = PoolOptions {
            engine: kind,
            workers: wanted,
            iopoll: self.options.iopoll,
            worker: WorkerOptions {
                polling: self.polling,
                pin_memory: self.options.pin_memory,
                sample_latency: self.options.is_watched() || self.sampled,
            },
        };
        let bell = Arc::clone(&self.bell);
        let on_failure: OnFailure = Arc::new(move || {
            bell.worker_failed.store(true, SeqCst);
            bell.ring();
        });
        let rings = self.rings.clone();
        let care = (self.pins.clone(), on_failure, rings);
        let pool = Pools::start(self.guests, options, care);
        let pool = pool.with_context(context)?;
        let mut spread = Spread::new();
        spread.grow(pool.len());
        engines.push(Engine { kind, pool, spread });
        Ok(())
    }

    /// Ends all workers; the disks must have been stopped.
    pub(crate) fn end_workers(&self) {
        let engines = std::mem::take(&mut *lock(&self.engines));
        drop(engines);
    }

    pub(super) fn warn_of_crowd(&self, before: usize) {
        let workers = self.count_workers();
        if let Some(cpus) = &self.options.cpus {
            if self.polling == Polling::Always && workers > before.max(cpus.numbers().len()) {
                tracing::warn!(
                    "{workers} workers that never sleep share CPUs {cpus}: each gets its turn only \
                     when the scheduler takes it from another. Give --cpus as many, or --workers fewer"
                );
            }
        }
    }

    pub(super) fn count_workers(&self) -> usize {
        lock(&self.engines).iter().map(|engine| engine.pool.len()).sum()
    }

    pub(super) fn queues_now(&self, kind: EngineKind) -> usize {
        let list = lock(&self.list);
        let same = list.iter().filter(|served| served.export.disk().engine() == kind);
        same.map(|served| usize::from(served.export.options().queues)).sum()
    }
}
