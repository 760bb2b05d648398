//! What few guests need: those behind an IOMMU, whose translations may be missing, and those that are
//! being migrated.

use super::Queue;
use crate::dirty_log::QueueLog;
use ringway_core::mem::Translator;
use ringway_ring::virtqueue::{Chain, Device, Head};

impl Queue {
    /// A request could not be understood. If that is because translations are missing it goes back
    /// into the ring, and they are asked for: true then.
    #[cold]
    pub(super) fn stalls_over(&mut self, head: Head) -> Result<(), Head> {
        let (Some(missed), Some(iommu)) = (self.memory.missed(), &mut self.iommu) else {
            return Err(head);
        };
        let faulty = missed.iter().any(|miss| iommu.faults.contains(miss))
            || (self.answers_all && self.ring.is_retaken());
        // The next request begins anew: what was no memory then may be by now.
        iommu.faults.clear();
        if faulty {
            missed.clear();
            return Err(head);
        }
        self.stalled = true;
        self.ring.put_back(head);
        iommu.inbox.miss(iommu.at, missed);
        missed.clear();
        Ok(())
    }

    /// Names all pages of a chain that are missing, so that they come together.
    #[cold]
    pub(super) fn note_misses(chain: &Chain, memory: &mut Translator) {
        if memory.missed().is_some() {
            chain.note_misses(memory);
        }
    }

    #[cold]
    pub(super) fn publish_logged(ring: &mut Device, log: &QueueLog) -> bool {
        let places = ring.unpublished();
        let wants_call = ring.publish();
        log.published(places);
        wants_call
    }

    pub(super) fn log_wish(&self) {
        if let Some(log) = &self.log {
            log.wished();
        }
    }
}
