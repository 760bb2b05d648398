//! GET_INFLIGHT_FD and SET_INFLIGHT_FD: where what is in flight is recorded.

use super::{Answer, Refusal, Session};
use crate::inflight::{Inflight, QueueInflight};
use crate::message::Message;
use crate::vring::Vring;
use ringway_core::kill_point;
use ringway_ring::virtqueue::Format;
use tracing::warn;

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
        self.forget_failures(|_| true);
        self.write_cache_of_region();
        kill_point!(RecordTaken);
        self.start_ready()
    }

    /// The part of the region that belongs to queue `at`, if there is a region. One that is too small, as
    /// those of earlier versions are for QEMU 10, does not cost the guest its disk.
    pub(super) fn part_of(&mut self, at: usize, format: Format) -> Option<QueueInflight> {
        let region = self.inflight.as_mut()?;
        let part = region.part(at, format);
        if part.is_none() && !std::mem::replace(&mut region.said_small, true) {
            if let Some(pass) = self.export.limits().offered.pass() {
                let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                warn!(
                    disk,
                    queue = at,
                    suppressed,
                    "the front-end's region for requests in flight has no room for this queue of {} \
                 descriptors: it is served, and not recorded. If the daemon is killed, requests in \
                 flight are lost and their guest waits for them for ever; an ordinary stop loses none. \
                 A reset of the guest gives it a region that is large enough",
                    format.size
                );
            }
        }
        part
    }

    /// The front-end knows where a queue has stopped, and may begin anew anywhere. Until it knew,
    /// the record was the only one to say it.
    pub(super) fn forget_inflight(&mut self, index: u32) {
        if let Some(vring) = self.vrings.get_mut(index as usize) {
            if !vring.is_running() {
                if let Some(record) = vring.drained.take() {
                    kill_point!(BaseAnswered);
                    record.renew();
                }
            }
        }
    }

    /// The front-end begins all queues anew, with the same region if it likes: none of them runs, and nobody
    /// goes on from what is recorded. To be done before that is answered, because what was recorded would keep a
    /// new ring waiting where the old one was.
    pub(super) fn renew_records(&mut self) {
        for at in 0..self.vrings.len() {
            let format = self.format(self.vrings[at].size);
            let drained = self.vrings[at].drained.take();
            let part = || self.inflight.as_ref()?.part(at, format).filter(|_| format.size != 0);
            if let Some(record) = drained.or_else(part) {
                record.renew();
            }
        }
    }
}
