//! The workers of all disks: how many there are, and whether that is wise.

use super::super::served::lock;
use super::Disks;
use ringway_control::config::DiskSpec;
use ringway_disk::{Disk, EngineKind};
use ringway_export::Polling;
use std::sync::Arc;

impl Disks {
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

    pub(super) fn warn_of_crowd(&self, before: usize) {
        let workers = self.count_workers();
        if let Some(cpus) = &self.options.cpus
            && self.polling == Polling::Always
            && workers > before.max(cpus.numbers().len())
        {
            tracing::warn!(
                "{workers} workers that never sleep share CPUs {cpus}: each gets its turn only \
                 when the scheduler takes it from another. Give --cpus as many, or --workers fewer"
            );
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
