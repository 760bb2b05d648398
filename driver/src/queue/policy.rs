//! The policy of a device, and the clock of its queues.

use ringway_scheduler::{SchedulerMode, SharedPolicy};
use std::time::Instant;

/// The policy of one device, shared by its queues, and its clock.
#[derive(Debug)]
pub(crate) struct DevicePolicy {
    pub(super) shared: SharedPolicy,
    /// When the clock began.
    begun: Instant,
}

impl DevicePolicy {
    pub(crate) fn new(mode: SchedulerMode) -> Self {
        Self { shared: SharedPolicy::new(mode), begun: Instant::now() }
    }

    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
