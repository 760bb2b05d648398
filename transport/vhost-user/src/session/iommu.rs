//! IOTLB_MSG, and what queues behind an IOMMU ask for.

use super::{Answer, Protocol, Refusal, Session};
use crate::iommu::{self, Iommu, IommuError, IotlbChange};
use crate::message::Message;
use crate::received;
use crate::ring_place::RingPlace;
use crate::start::StartError;
use crate::vring::Vring;
use ringway_core::mem::{HostRange, Miss, Translation};
use ringway_ring::virtio_blk::VIRTIO_F_ACCESS_PLATFORM;
use ringway_ring::virtqueue::Format;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tracing::{info, warn};
use vhost::vhost_user::message::{BackendReq, VhostUserHeaderFlag};

/// Bytes of an answer on the back-end's channel: header and a u64.
const ANSWER_BYTES: usize = 20;

impl Session {
    /// The features were negotiated anew: what was known of the IOMMU is not any more.
    pub(super) fn renew_iommu(&mut self) {
        // Kept, because it knows of answers that are on their way.
        self.idle_iommu = self.iommu.take().or(self.idle_iommu.take());
        if self.has(VIRTIO_F_ACCESS_PLATFORM) {
            let new = || Box::new(Iommu::new(self.vrings.len()));
            self.iommu = self.idle_iommu.take().or_else(|| Some(new()));
        }
        self.forget_translations();
    }

    /// SET_BACKEND_REQ_FD.
    pub(super) fn set_backend_channel(&mut self, channel: Option<UnixStream>) {
        if let Some(old) = std::mem::replace(&mut self.backend_channel, channel) {
            received::empty(old.as_fd(), self.export.quarantine());
        }
        for iommu in [&mut self.iommu, &mut self.idle_iommu].into_iter().flatten() {
            iommu.renew_channel();
        }
        self.ask_front_end();
    }

    /// Nothing of the guest's memory is where it was, or the front-end may not have told what
    /// changed while no queue ran: translations are asked for anew.
    pub(super) fn forget_translations(&mut self) {
        if let Some(iommu) = &mut self.iommu {
            iommu.restart();
        }
    }

    /// Where the ring of queue `at` is: `None` if translations of it are missing and were asked for.
    pub(super) fn ring_place(
        &mut self,
        at: usize,
        format: Format,
    ) -> Result<Option<Arc<RingPlace>>, StartError> {
        let Some(iommu) = &mut self.iommu else {
            return self.vrings[at].place(&self.map, format).map(Arc::new).map(Some);
        };
        let addresses = self.vrings[at].addresses;
        let addresses = addresses.ok_or(StartError::NotShared("descriptor ring"))?;
        let needed = Protocol::BACKEND_REQ | Protocol::REPLY_ACK;
        if !self.protocol.contains(needed) || self.backend_channel.is_none() {
            return Err(StartError::NoChannel);
        }
        let place = iommu.ring_place(at, addresses, format, &self.map, &self.quota)?;
        self.ask_front_end();
        Ok(place.map(Arc::new))
    }

    /// IOTLB_MSG. The answer to an invalidation means that no request uses the memory any more.
    pub(super) fn iotlb_msg(&mut self, message: &Message) -> Result<Answer, Refusal> {
        let Some(iommu) = &mut self.iommu else { return Err(IommuError::NotNegotiated.into()) };
        iommu.translation_came();
        match iommu::read(message, &self.map)? {
            IotlbChange::Update(new) => self.learn(new)?,
            IotlbChange::Invalidate(first, last) => self.invalidate(first, last)?,
        }
        // Rings may be where they can be reached by now, or where they cannot.
        if self.vrings.iter().any(Vring::is_ready) {
            self.start_ready()?;
        }
        Ok(Answer::Ack)
    }

    fn learn(&mut self, new: Translation) -> Result<(), Refusal> {
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        if iommu.table.contradicts(&new) {
            // A front-end that keeps to the protocol has invalidated it before.
            self.invalidate(new.first, new.last)?;
        } else if iommu.table.is_full() {
            // In a full table there is no telling which memory requests in flight use.
            self.stop_all()?;
        }
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        iommu.table.insert(new);
        iommu.ring_fault_logged = false;
        self.pass_answers_on()
    }

    /// Queues that waited for translations go on with what there is.
    fn pass_answers_on(&mut self) -> Result<(), Refusal> {
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        for (at, answered) in iommu.satisfied() {
            if let Some(id) = self.vrings[at].worker_queue {
                let worker = self.export.worker(at);
                worker.edit(id, move |queue| queue.go_on(&answered)).map_err(Refusal::Worker)?;
            }
        }
        Ok(())
    }

    /// Queues whose ring is in the range stop; the others go on, without those translations. Returns
    /// once no request in flight uses the memory.
    fn invalidate(&mut self, first: u64, last: u64) -> Result<(), Refusal> {
        let format = |vring: &Vring| self.format(vring.size);
        let lost: Vec<bool> = self
            .vrings
            .iter()
            .map(|vring| {
                vring
                    .addresses
                    .is_some_and(|at| iommu::ring_overlaps(at, format(vring), first, last))
            })
            .collect();
        self.stop_some(|at| lost[at])?;
        self.forget_failures(|at| lost[at]);
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        let hosts = iommu.forget(first, last);
        if iommu.table.is_full() {
            // Ranges that were cut in two.
            self.stop_all()?;
            self.forget_translations();
        }
        self.ask_front_end();
        if hosts.is_empty() { Ok(()) } else { self.leave_memory(first, last, &hosts) }
    }

    fn leave_memory(&mut self, first: u64, last: u64, at: &[HostRange]) -> Result<(), Refusal> {
        let mut promises = Vec::new();
        for (queue, vring) in self.vrings.iter().enumerate() {
            let Some(id) = vring.worker_queue else { continue };
            let worker = self.export.worker(queue);
            worker.edit(id, move |ring| ring.forget(first, last)).map_err(Refusal::Worker)?;
            let unused = worker.unused(id, at.to_vec()).map_err(Refusal::Worker)?;
            promises.push((queue, unused));
        }
        self.await_unused(promises)
    }

    /// What queues have asked for: known already, or the front-end is asked.
    pub(super) fn answer_misses(&mut self) {
        let misses = self.inbox.take_misses();
        let Some(iommu) = &mut self.iommu else { return };
        for (at, miss) in misses {
            if self.vrings.get(at).is_some_and(Vring::is_running) {
                iommu.want(at, miss);
                iommu.ask(at, miss);
            }
        }
        // A worker that has ended has told so.
        let _ = self.pass_answers_on();
        self.ask_front_end();
    }

    /// Sends what is to be asked, as far as the front-end takes it now: nobody waits here. Where there is nobody
    /// to ask, who waits for what is not known fails.
    fn ask_front_end(&mut self) {
        if let (None, Some(iommu)) = (&self.backend_channel, &mut self.iommu) {
            iommu.deny_all();
            // A worker that has ended has told so.
            let _ = self.pass_answers_on();
        }
        while let (Some(channel), Some(iommu)) = (&self.backend_channel, &mut self.iommu) {
            let Some(miss) = iommu.next_question() else { break };
            let question = iommu::question(miss);
            let flags = 1 | VhostUserHeaderFlag::NEED_REPLY.bits();
            let words = [BackendReq::IOTLB_MSG as u32, flags, iommu::QUESTION_BYTES];
            let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            bytes.extend_from_slice(&question);
            let mut none = SendAncillaryBuffer::default();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(channel, &[IoSlice::new(&bytes)], &mut none, flags) {
                Ok(sent) if sent == bytes.len() => iommu.was_sent(),
                Err(Errno::INTR) => {}
                // It has not read what it was asked: its next answer brings us back.
                Err(Errno::AGAIN) => return,
                sent => return self.lose_channel(&format!("{sent:?}")),
            }
        }
    }

    fn lose_channel(&mut self, why: &str) {
        let disk = self.export.disk().name();
        if let Some(pass) = self.export.limits().undelivered.pass() {
            let suppressed = pass.suppressed;
            info!(
                disk,
                suppressed, "the front-end cannot be asked for translations any more: {why}"
            );
        }
        self.set_backend_channel(None);
    }

    /// The channel on which answers come, if there are any to come.
    pub(super) fn is_asking(&self) -> bool {
        self.iommu.as_ref().is_some_and(|iommu| iommu.is_asking())
    }

    /// Reads answers to what was asked: as many as there can be questions. A front-end that goes on
    /// answering is heard again after its messages, and after an order to stop.
    pub(super) fn hear_answers(&mut self) -> Result<(), Refusal> {
        for _ in 0..iommu::ASKED_MAX {
            let (Some(channel), Some(iommu)) = (&self.backend_channel, &mut self.iommu) else {
                break;
            };
            let mut room = [0; ANSWER_BYTES];
            let have = iommu.answer.len();
            match received::receive(channel.as_fd(), &mut room[have..]) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Ok(got) if got.bytes > 0 && got.fds.is_empty() => {
                    let new = &room[have..have + got.bytes];
                    iommu.answer.extend_from_slice(new);
                }
                Ok(got) if !got.fds.is_empty() => {
                    received::put_aside_or_close(got.fds, self.export.quarantine());
                    self.lose_channel("it sends descriptors, which are no answer");
                    return Ok(());
                }
                _ => {
                    self.lose_channel("it has closed the channel");
                    return Ok(());
                }
            }
            if iommu.answer.len() == ANSWER_BYTES {
                let answer = std::mem::take(&mut iommu.answer);
                self.hear_answer(&answer)?;
            }
        }
        Ok(())
    }

    fn hear_answer(&mut self, answer: &[u8]) -> Result<(), Refusal> {
        let word = |at: usize| answer[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let is_reply = word(4) & VhostUserHeaderFlag::REPLY.bits() != 0;
        if word(0) != BackendReq::IOTLB_MSG as u32 || !is_reply || word(8) != 8 {
            self.lose_channel("what it answers is not understood");
            return Ok(());
        }
        let found = answer[12..] == [0; 8];
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        match iommu.was_answered(found) {
            Ok(Some(miss)) => self.deny(miss)?,
            // What was told may be taken back by now. Of queues that run the table knows what they
            // wait for; the others ask again when they try to start.
            Ok(None) if self.vrings.iter().any(Vring::is_ready) => drop(self.start_ready()?),
            Ok(None) => {}
            Err(nonsense) => self.lose_channel(&nonsense.to_string()),
        }
        self.ask_front_end();
        Ok(())
    }

    /// The front-end knows no translation of a page: whoever waits for it fails, once it is known where to
    /// tell that.
    fn deny(&mut self, miss: Miss) -> Result<(), Refusal> {
        let Some(iommu) = &mut self.iommu else { return Ok(()) };
        let for_a_ring =
            iommu.who_wants(miss).is_empty() && self.vrings.iter().any(Vring::is_ready);
        if for_a_ring && !std::mem::replace(&mut iommu.ring_fault_logged, true) {
            if let Some(pass) = self.export.limits().refused.pass() {
                let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                warn!(
                    disk,
                    suppressed,
                    "a ring cannot be reached: the front-end has no translation of {:#x}",
                    miss.page
                );
            }
        }
        iommu.deny(miss);
        self.pass_answers_on()
    }
}
