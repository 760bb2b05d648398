//! The messages about the dirty log: SET_LOG_BASE, SET_LOG_FD; and how running queues learn of it.

use super::queues::check_eventfd;
use super::{Answer, Refusal, Session};
use crate::dirty_log::{LogArea, LogError, Logged, QueueLog, check_memory};
use crate::message::Message;
use crate::ring_place::RingPlace;
use crate::vring::Vring;
use ringway_core::mem::GuestMap;
use ringway_export::PeerEventfd;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

impl Session {
    /// A new log takes the place of an older one. The answer means that nothing is marked in the old
    /// one any more.
    pub(super) fn set_log_base(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        if !self.protocol.contains(Protocol::LOG_SHMFD) {
            return Err(LogError::NotShared.into());
        }
        let area = Arc::new(LogArea::of(message, &self.quota)?);
        let before = self.log.replace(area);
        self.pass_log_on().inspect_err(|_| self.log = before)?;
        // Queues that had to wait for a log of this size can start now.
        self.forget_failures(|_| true);
        self.start_ready()?;
        // Always answered; QEMU reads no more than the header.
        Ok(Answer::u64(0))
    }

    pub(super) fn set_log_fd(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let bell = message.take_fd().ok_or(Refusal::NotAnEventfd("log"))?;
        check_eventfd(&bell, "log")?;
        self.log_bell = Some(Arc::new(PeerEventfd::new(bell, &self.inbox)));
        self.pass_log_on()?;
        Ok(Answer::Ack)
    }

    /// Where writes to the used ring of queue `at` are logged from now on, if they are.
    pub(super) fn set_log_address(
        &mut self,
        at: usize,
        log_at: Option<u64>,
    ) -> Result<(), Refusal> {
        let before = std::mem::replace(&mut self.vrings[at].log_at, log_at);
        let place = self.vrings[at].place.clone().filter(|_| self.vrings[at].is_running());
        let Some(place) = place.filter(|_| before != log_at) else { return Ok(()) };
        match self.queue_log(at, &place) {
            Ok(log) => self.give_log(at, log),
            Err(refusal) => {
                self.vrings[at].log_at = before;
                Err(refusal)
            }
        }
    }

    /// Checks that the log in use has a bit for every page of `map`.
    pub(super) fn check_log(&self, map: &GuestMap) -> Result<(), Refusal> {
        match &self.log {
            Some(area) if self.logs() => Ok(check_memory(area, map)?),
            _ => Ok(()),
        }
    }

    /// What queue `at`, whose ring is at `place`, needs to log its writes, if it has to.
    pub(super) fn queue_log(
        &self,
        at: usize,
        place: &RingPlace,
    ) -> Result<Option<Arc<QueueLog>>, Refusal> {
        let Some(area) = self.log.as_ref().filter(|_| self.logs()) else { return Ok(None) };
        let about = Logged {
            map: &self.map,
            format: self.format(self.vrings[at].size),
            place,
            log_at: self.vrings[at].log_at,
            behind_iommu: self.iommu.is_some(),
            bell: self.log_bell.clone(),
        };
        Ok(Some(Arc::new(QueueLog::new(area, about)?)))
    }

    /// Tells all running queues of a change; requests in flight are logged as it says now. Changes
    /// nothing if a queue cannot have it.
    pub(super) fn pass_log_on(&self) -> Result<(), Refusal> {
        let running = |(at, vring): (usize, &Vring)| {
            let place = vring.place.as_ref().filter(|_| vring.is_running())?;
            Some(self.queue_log(at, place).map(|log| (at, log)))
        };
        let logs = self.vrings.iter().enumerate().filter_map(running);
        let logs = logs.collect::<Result<Vec<_>, _>>()?;
        logs.into_iter().try_for_each(|(at, log)| self.give_log(at, log))
    }

    fn give_log(&self, at: usize, log: Option<Arc<QueueLog>>) -> Result<(), Refusal> {
        let Some(id) = self.vrings[at].worker_queue else { return Ok(()) };
        let worker = self.export.worker(at);
        worker.edit(id, move |queue| queue.set_log(log)).map_err(Refusal::Worker)
    }
}
