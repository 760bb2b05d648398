//! GET_INFLIGHT_FD and SET_INFLIGHT_FD: where what is in flight is recorded.

use super::{Answer, Refusal, Session};
use crate::inflight::{Inflight, QueueInflight};
use crate::message::Message;
use crate::start::StartError;
use crate::vring::Vring;
use ringway_core::kill_point;
use ringway_ring::virtio_blk::VIRTIO_F_RING_PACKED;
use ringway_ring::virtqueue::Format;

impl Session {
    /// Makes a region. It is the front-end's: this back-end only uses one that comes back.
    pub(super) fn get_inflight_fd(&mut self, message: &Message) -> Result<Answer, Refusal> {
        let (payload, fd) = Inflight::make(message, self.export.options())?;
        kill_point!(RecordMade);
        Ok(Answer::ReplyWith(payload, fd))
    }

    pub(super) fn set_inflight_fd(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        if let Some(running) = self.vrings.iter().position(Vring::is_running) {
            return Err(Refusal::Running(running));
        }
        self.inflight = Some(Inflight::take(message, self.export.options(), &self.quota)?);
        self.write_cache_of_region();
        kill_point!(RecordTaken);
        self.start_ready()
    }

    /// The part of the region that belongs to queue `at`, if there is a region.
    pub(super) fn part_of(
        &self,
        at: usize,
        format: Format,
    ) -> Result<Option<QueueInflight>, StartError> {
        let Some(inflight) = &self.inflight else { return Ok(None) };
        inflight.part(at, format.packed).map(Some)
    }

    /// The front-end knows where a queue has stopped, and may begin anew anywhere. Until it knew,
    /// the record was the only one to say it.
    pub(super) fn forget_inflight(&mut self, index: u32) {
        let (at, packed) = (index as usize, self.has(VIRTIO_F_RING_PACKED));
        if let Some(inflight) = &self.inflight
            && let Some(vring) = self.vrings.get_mut(at)
            && !vring.is_running()
            && std::mem::take(&mut vring.drained)
            && let Ok(part) = inflight.part(at, packed)
        {
            kill_point!(BaseAnswered);
            part.renew(packed);
        }
    }
}
