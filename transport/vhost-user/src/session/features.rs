//! The messages that negotiate: virtio and protocol features.

use super::{Answer, F_PROTOCOL_FEATURES, PROTOCOL, Refusal, Session};
use crate::device;
use crate::vring::Vring;
use ringway_ring::virtio_blk::VIRTIO_F_ACCESS_PLATFORM;
use tracing::warn;
use vhost::vhost_user::message::{VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures};

/// The transport's own feature bit: written guest memory is logged while it is set.
const F_LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

impl Session {
    /// What GET_FEATURES answers: the disk's features and the transport's.
    pub(super) fn offered_features(&self) -> u64 {
        device::features(self.export.disk())
            | F_PROTOCOL_FEATURES
            | F_LOG_ALL
            | 1 << VIRTIO_F_ACCESS_PLATFORM
    }

    pub(super) fn set_features(&mut self, features: u64) -> Result<Answer, Refusal> {
        let unknown = features & !self.offered_features();
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        let changed = features ^ self.features;
        // A migration begins and ends while queues run.
        if changed & !F_LOG_ALL != 0 {
            if let Some(running) = self.vrings.iter().position(Vring::is_running) {
                return Err(Refusal::Running(running));
            }
        }
        let before = std::mem::replace(&mut self.features, features);
        if changed & F_LOG_ALL != 0 {
            self.pass_log_on().inspect_err(|_| self.features = before)?;
            self.may_leave();
        }
        if changed != 0 {
            self.forget_failures(|_| true);
        }
        if self.vrings.iter().all(|vring| !vring.is_running()) {
            self.renew_iommu();
        }
        // Without protocol features there is no SET_VRING_ENABLE: queues are enabled by the start.
        if features & F_PROTOCOL_FEATURES == 0 {
            for vring in &mut self.vrings {
                vring.enabled = true;
            }
        }
        self.start_ready()
    }

    /// While written memory is logged the guest is about to go on elsewhere, where nobody finds what waits in our
    /// journal for a flush: the image has none.
    fn may_leave(&mut self) {
        if !self.logs() {
            self.without_journal = None;
            return;
        }
        let disk = self.export.disk();
        let (without_journal, left) = disk.without_journal();
        self.without_journal = Some(without_journal);
        // They are written once more before the guest is told that its last ring has stopped.
        if let Err(error) = left {
            if let Some(pass) = self.export.limits().refused.pass() {
                let (disk, suppressed) = (disk.name(), pass.suppressed);
                warn!(
                    disk,
                    suppressed,
                    "a migration begins, and not all that was answered is in its image: {error}"
                );
            }
        }
    }

    pub(super) fn has(&self, bit: u32) -> bool {
        self.features & (1 << bit) != 0
    }

    /// True if written guest memory is to be logged, once there is a log.
    pub(super) fn logs(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    pub(super) fn set_protocol_features(&mut self, features: u64) -> Result<Answer, Refusal> {
        let unknown = features & !PROTOCOL.bits();
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(Answer::Ack)
    }
}
