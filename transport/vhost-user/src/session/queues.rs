//! The messages about queues: SET_VRING_*, GET_VRING_BASE; how queues start, drain and stop.

use super::turns::LOOK_EVERY;
use super::{Answer, Refusal, Session, fresh_vrings};
use crate::message::{Message, VRING_NO_FD};
use crate::queue::Queue;
use crate::start::{StartError, UserAddresses};
use crate::vring::Vring;
use ringway_core::{kill_point, panic_point};
use ringway_export::{Lack, NotAdded, PeerEventfd, QueueLifecycle};
use ringway_ring::virtio_blk::{
    VIRTIO_F_RING_PACKED, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use ringway_ring::virtqueue::{Format, LayoutError, PackedBase, check_packed_size, check_size};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// VHOST_VRING_F_LOG, a flag of SET_VRING_ADDR: writes to the used ring are logged.
const VRING_F_LOG: u32 = 1;

/// How often to say that a disk keeps a front-end waiting.
const WAIT_REPORT: Duration = Duration::from_secs(5);

/// How long a disk may take to finish what a front-end has in flight that has gone.
const LEAVE_AFTER: Duration = Duration::from_millis(100);

/// When to try again to start a queue that its worker could not take: the host had no descriptor or no memory for it.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// What became of a queue that was to start.
enum Start {
    Runs,
    /// It may not yet, and no other one may.
    Waits,
    /// Translations of its ring are missing, and were asked for.
    Misses,
}

impl Session {
    pub(super) fn vring(&mut self, index: u32) -> Result<(usize, &mut Vring), Refusal> {
        let at = index as usize;
        match self.vrings.get_mut(at) {
            Some(vring) => Ok((at, vring)),
            None => Err(Refusal::NoSuchQueue(index)),
        }
    }

    pub(super) fn stopped_vring(&mut self, index: u32) -> Result<&mut Vring, Refusal> {
        let (at, vring) = self.vring(index)?;
        if vring.is_running() { Err(Refusal::Running(at)) } else { Ok(vring) }
    }

    pub(super) fn set_vring_num(&mut self, index: u32, size: u32) -> Result<Answer, Refusal> {
        let max = self.export.options().queue_size;
        let packed = self.has(VIRTIO_F_RING_PACKED);
        let vring = self.stopped_vring(index)?;
        let size = if packed { check_packed_size(size)? } else { check_size(size)? };
        if size > max {
            return Err(Refusal::QueueTooLarge(size, max));
        }
        vring.failed &= vring.size == size;
        vring.size = size;
        self.start_ready_for(index as usize)
    }

    pub(super) fn set_vring_addr(&mut self, message: &Message) -> Result<Answer, Refusal> {
        // struct vhost_vring_addr: index, flags, descriptor, used, available, log.
        let addresses =
            UserAddresses { desc: message.u64(8), used: message.u64(16), avail: message.u64(24) };
        let (at, vring) = self.vring(message.u32(0))?;
        if vring.is_running() && vring.addresses != Some(addresses) {
            return Err(Refusal::Running(at));
        }
        // Logging may be switched while the queue runs.
        let log_at = (message.u32(4) & VRING_F_LOG != 0).then(|| message.u64(32));
        let moved = vring.addresses.replace(addresses) != Some(addresses);
        vring.failed &= !moved && vring.log_at == log_at;
        if let Some(iommu) = self.iommu.as_mut().filter(|_| moved) {
            // Nobody needs the translations of where the ring was.
            iommu.unwant(at);
        }
        self.set_log_address(at, log_at)?;
        self.start_ready_for(at)
    }

    pub(super) fn set_vring_base(&mut self, index: u32, base: u32) -> Result<Answer, Refusal> {
        let packed = self.has(VIRTIO_F_RING_PACKED);
        let vring = self.stopped_vring(index)?;
        if !packed && base > u32::from(u16::MAX) {
            return Err(LayoutError::SplitBase(base).into());
        }
        // Whether a packed ring can be there is judged when it starts and its size is known.
        vring.base = Some(base);
        Ok(Answer::Ack)
    }

    /// Stops the queue: after the answer no byte of guest memory is written on its behalf, and its record
    /// names nothing. The guest may go on anywhere then, and its record need not go with it.
    pub(super) fn get_vring_base(&mut self, index: u32) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(index)?;
        if self.vrings[at].stopping.is_some() {
            // By a pause, which lets it leave requests in its record.
            self.stop_some(|i| i == at)?;
        }
        let start = if self.owes(at) { self.start(at)? } else { Start::Runs };
        match start {
            Start::Runs => {}
            // The front-end cannot tell where the ring is while it waits for this answer.
            Start::Misses => return Err(Refusal::Start(at, StartError::Unreachable)),
            Start::Waits => {
                if let Some(pass) = self.export.limits().waiting.pass() {
                    let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                    warn!(
                        disk,
                        queue = at,
                        suppressed,
                        "the front-end stops a queue, as for a migration, of which requests are unanswered, \
                         while the disk is paused or its image is with another daemon: it is answered once \
                         they were carried out (ringway ctl resume)"
                    );
                }
                return Ok(Answer::Later);
            }
        }
        self.leave_nothing(at)?;
        self.stop_some(|i| i == at)?;
        let start = self.start_base();
        let vring = &mut self.vrings[at];
        // It starts again with a new kick descriptor.
        vring.kick = None;
        let base = vring.base.unwrap_or(start);
        if !self.vrings.iter().any(Vring::is_running) {
            self.forget_translations();
        }
        self.rings_may_have_stopped(self.logs());
        let mut payload = index.to_ne_bytes().to_vec();
        payload.extend_from_slice(&base.to_ne_bytes());
        kill_point!(Drained);
        Ok(Answer::Reply(payload))
    }

    /// Where a queue begins that nobody has used.
    fn start_base(&self) -> u32 {
        if self.has(VIRTIO_F_RING_PACKED) { PackedBase::START.0 } else { 0 }
    }

    pub(super) fn set_vring_kick(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(vring_index(message))?;
        let kick = message.take_fd().ok_or(Refusal::NoKick)?;
        check_eventfd(&kick, "kick")?;
        self.stop_some(|i| i == at)?;
        self.vrings[at].kick = Some(kick);
        self.vrings[at].failed = false;
        self.start_ready_for(at)
    }

    pub(super) fn set_vring_call(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(vring_index(message))?;
        let call = message.take_fd();
        if let Some(call) = &call {
            check_eventfd(call, "call")?;
        }
        let call = call.map(|call| Arc::new(PeerEventfd::new(call, &self.inbox)));
        self.vrings[at].call.clone_from(&call);
        // QEMU changes this while the queue runs, whenever the guest masks an interrupt.
        if let Some(id) = self.vrings[at].worker_queue {
            let worker = self.export.worker(at);
            worker.edit(id, move |queue| queue.set_call(call)).map_err(Refusal::Worker)?;
        }
        Ok(Answer::Ack)
    }

    pub(super) fn set_vring_err(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let index = vring_index(message);
        let err = message.take_fd();
        if let Some(err) = &err {
            check_eventfd(err, "error")?;
        }
        let err = err.map(|err| PeerEventfd::new(err, &self.inbox));
        self.vring(index)?.1.err = err;
        Ok(Answer::Ack)
    }

    pub(super) fn set_vring_enable(&mut self, index: u32, enable: u32) -> Result<Answer, Refusal> {
        let (at, vring) = self.vring(index)?;
        vring.enabled = enable != 0;
        vring.failed = false;
        if enable == 0 {
            // QEMU says so before it asks where the queue has stopped.
            self.leave_nothing(at)?;
            self.stop_some(|i| i == at)?;
            self.rings_may_have_stopped(self.logs());
        }
        self.start_ready_for(at)
    }

    /// The front-end has stopped a queue. With the last one an image that goes elsewhere (`leaving`) is
    /// given up: while written memory is logged a guest is being migrated.
    pub(super) fn rings_may_have_stopped(&mut self, leaving: bool) {
        if !self.vrings.iter().any(|vring| vring.is_running() || vring.is_ready()) {
            self.lock_wait = None;
            self.export.rings_stopped(leaving);
        }
    }

    /// What was negotiated about queues.
    pub(super) fn format(&self, size: u16) -> Format {
        Format {
            packed: self.has(VIRTIO_F_RING_PACKED),
            size,
            event_idx: self.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: self.has(VIRTIO_RING_F_INDIRECT_DESC),
        }
    }

    /// Starts every queue that has all it needs. One that cannot start is no reason to refuse what was asked for
    /// all of them: the log says so.
    ///
    /// # Errors
    /// Why no queue can.
    pub(super) fn start_ready(&mut self) -> Result<Answer, Refusal> {
        let outcome = self.try_to_start();
        self.tell_failures();
        outcome
    }

    /// The same after a message about queue `at`, which is refused if that one cannot start.
    pub(super) fn start_ready_for(&mut self, at: usize) -> Result<Answer, Refusal> {
        let outcome = self.try_to_start();
        let own = self.failures.iter().position(|(queue, _)| *queue == at);
        let own = own.map(|own| self.failures.remove(own));
        self.tell_failures();
        own.map_or(outcome, |(_, refusal)| Err(refusal))
    }

    fn tell_failures(&mut self) {
        for (at, refusal) in std::mem::take(&mut self.failures) {
            if let Some(pass) = self.export.limits().refused.pass() {
                let disk = self.export.disk().name();
                warn!(disk, queue = at, suppressed = pass.suppressed, "{refusal}");
            }
            if let Some(err) = &self.vrings[at].err {
                // Best effort: the front-end may not listen.
                let _ = err.signal();
            }
        }
    }

    /// One that cannot start keeps no other one from it, keeps its descriptors, and is tried again after a message
    /// that changes something for it.
    fn try_to_start(&mut self) -> Result<Answer, Refusal> {
        self.collect_stopped();
        self.behind_others = false;
        let (mut started, mut outcome) = (false, Ok(Answer::Ack));
        for at in 0..self.vrings.len() {
            if !self.vrings[at].is_ready() || self.map.regions().is_empty() {
                continue;
            }
            match self.start(at) {
                Ok(Start::Runs) => started = true,
                Ok(Start::Waits) => break,
                Ok(Start::Misses) => {}
                Err(refusal @ (Refusal::Start(..) | Refusal::Log(_))) => {
                    self.vrings[at].failed = true;
                    self.failures.push((at, refusal));
                }
                Err(refusal) => outcome = outcome.and(Err(refusal)),
            }
        }
        if started {
            self.announce_what_was_missed();
        }
        self.note_what_is_missing();
        outcome
    }

    /// What keeps all queues from running that only the front-end can change.
    fn note_what_is_missing(&self) {
        let start = self.start_base();
        let mut running = self.vrings.iter().filter(|vring| vring.is_running()).peekable();
        if running.peek().is_some() {
            let new = running.all(|vring| vring.base.is_none_or(|base| base == start));
            return self.export.front_end_gets_on(new);
        }
        let set_up = |vring: &&Vring| vring.addresses.is_some() && vring.kick.is_some();
        let (queues, no_memory) =
            (self.vrings.iter().filter(set_up), self.map.regions().is_empty());
        let enabled: Vec<bool> = queues.map(|vring| vring.enabled).collect();
        self.export.front_end_lacks(match enabled[..] {
            [] => None,
            _ if !enabled.contains(&true) => Some(Lack::Enabled),
            _ => no_memory.then_some(Lack::Memory),
        });
    }

    /// Has queues tried again that a worker could not take some time ago.
    pub(super) fn try_refused_again(&mut self) {
        if self.try_again.take_if(|at| *at <= Instant::now()).is_some() {
            self.forget_failures(|_| true);
        }
    }

    /// What queues need has changed: those are tried again that could not start.
    pub(super) fn forget_failures(&mut self, which: impl Fn(usize) -> bool) {
        for (at, vring) in self.vrings.iter_mut().enumerate() {
            vring.failed &= !which(at);
        }
    }

    /// Starts queue `at`, which has all it needs.
    fn start(&mut self, at: usize) -> Result<Start, Refusal> {
        if self.export.holds() {
            // It starts when the disk is resumed.
            return Ok(Start::Waits);
        }
        if self.export.has_failed() {
            return Err(Refusal::Failed);
        }
        self.behind_others = self.export.uses(&self.map) || !self.export.disk().may_outlive();
        if self.behind_others {
            // It starts when enough of that is over, and all that is in its memory.
            return Ok(Start::Waits);
        }
        if !self.export.may_run(&mut self.lock_wait) {
            // It starts when the image's lock is ours.
            return Ok(Start::Waits);
        }
        let format = self.format(self.vrings[at].size);
        let place = self.ring_place(at, format).map_err(|error| Refusal::Start(at, error))?;
        // It starts when they have come.
        let Some(place) = place else { return Ok(Start::Misses) };
        let log = self.queue_log(at, &place)?;
        let part = self.part_of(at, format);
        let found = Arc::clone(&place);
        // SAFETY: `found` was just resolved in `map`.
        let made = unsafe { self.vrings[at].make_queue(&self.map, format, found, part) };
        let mut queue = made.map_err(|error| Refusal::Start(at, error))?;
        if self.iommu.is_some() {
            queue.put_behind_iommu(Arc::clone(&self.inbox), at);
        }
        queue.set_log(log);
        if let Err(refusal) = self.settle_write_cache(at, queue.goes_on()) {
            self.vrings[at].take_back(queue);
            return Err(refusal);
        }
        let durable = self.durable_writes();
        let backlog = queue.backlog();
        let inbox = Arc::clone(&self.inbox);
        let alarm = Box::new(move |alarm| inbox.raise(at, alarm));
        let disk = Arc::clone(self.export.disk());
        let id = self.export.worker(at).add(queue, disk, durable, alarm);
        let id = match id {
            Ok(id) => id,
            Err(NotAdded { error, ring }) => {
                if let Some(queue) = ring {
                    // Another try needs nothing of the front-end, which may have nothing more to say.
                    self.vrings[at].take_back(queue);
                    self.try_again = Some(Instant::now() + TRY_AGAIN);
                }
                return Err(Refusal::Start(at, StartError::Worker(error)));
            }
        };
        (self.vrings[at].worker_queue, self.vrings[at].place) = (Some(id), Some(place));
        self.export.started(at, id);
        self.export.notice_backlog(at, backlog);
        kill_point!(QueueStarted);
        debug!(disk = self.export.disk().name(), queue = at, "queue started");
        Ok(Start::Runs)
    }

    /// True if queue `at` does not run and its record names requests: left when it was stopped without its
    /// front-end having asked for that, or by a daemon that was killed.
    pub(super) fn owes(&mut self, at: usize) -> bool {
        let vring = &self.vrings[at];
        let complete = vring.size != 0 && vring.addresses.is_some() && vring.kick.is_some();
        if vring.is_running() || !complete || self.map.regions().is_empty() {
            return false;
        }
        if vring.owes || vring.has_run {
            return vring.owes;
        }
        let format = self.format(vring.size);
        let Some(part) = self.inflight.as_ref().and_then(|region| region.part(at, format)) else {
            return false;
        };
        // The ring tells more; without it nothing can be answered that the record may name.
        let Ok(Some(place)) = self.ring_place(at, format) else { return part.may_name_requests() };
        // Where it is follows from its record, too. One that is damaged says nothing.
        // SAFETY: `place` was just resolved in `map`.
        let made = unsafe { self.vrings[at].make_queue(&self.map, format, place, Some(part)) };
        if let Ok(queue) = made {
            self.vrings[at].take_back(queue);
        }
        self.vrings[at].owes
    }

    /// The front-end stops queue `at`: nothing stays in its record.
    pub(super) fn leave_nothing(&self, at: usize) -> Result<(), Refusal> {
        let Some(id) = self.vrings[at].worker_queue else { return Ok(()) };
        // Nobody tells of more before the queue has stopped.
        let known = self.iommu.as_ref().map(|iommu| iommu.known_of(at)).unwrap_or_default();
        let worker = self.export.worker(at);
        worker.edit(id, move |queue| queue.answer_all(known)).map_err(Refusal::Worker)
    }

    /// As [`Session::stop_some`], of all.
    pub(super) fn stop_all(&mut self) -> Result<(), Refusal> {
        self.stop_some(|_| true)
    }

    /// Stops queues, all at once, and waits until nothing of theirs is in flight: as long as the disk takes,
    /// if the front-end waits for that. It would go on without an answer, if the connection ended, and what
    /// storage does later would be done to what has the guest's memory by then.
    pub(super) fn stop_some(&mut self, which: impl Fn(usize) -> bool) -> Result<(), Refusal> {
        self.stop_queues(which, true)
    }

    /// Stops all queues of a front-end that has gone. Nothing is told to it any more, and its record names what was in
    /// flight; what the disk does not finish at once stays with its workers, so that the front-end, or another
    /// one, may come back.
    pub(super) fn leave(&mut self) -> Result<(), Refusal> {
        for at in 0..self.vrings.len() {
            if let Some(id) = self.vrings[at].worker_queue {
                // A worker that has ended serves nothing any more.
                let _ = self.export.worker(at).edit(id, Queue::mute);
            }
        }
        let outcome = self.begin_stop(|_| true);
        panic_point!("stopping");
        let deadline = Instant::now() + LEAVE_AFTER;
        for at in 0..self.vrings.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Err(RecvTimeoutError::Timeout) = self.look_for_stopped(at, left) {
                self.abandon_queues();
                return Err(Refusal::Stuck(at));
            }
        }
        outcome
    }

    /// Stops all queues, and waits for the disk no longer than it may take
    /// ([`Export::drain_max`](ringway_export::Export::drain_max)).
    pub(super) fn stop_in_time(&mut self) -> Result<(), Refusal> {
        self.stop_queues(|_| true, false)
    }

    fn stop_queues(&mut self, which: impl Fn(usize) -> bool, patient: bool) -> Result<(), Refusal> {
        let mut outcome = self.begin_stop(&which);
        panic_point!("stopping");
        let begun = Instant::now();
        for at in (0..self.vrings.len()).filter(|&at| which(at)) {
            if self.vrings[at].stopping.is_none() {
                continue;
            }
            let look = |session: &mut Self, time| session.look_for_stopped(at, time);
            match self.await_disk(begun, at, patient, look) {
                Ok(Some(())) => {}
                Ok(None) => {
                    self.abandon_queues();
                    return Err(Refusal::Stuck(at));
                }
                Err(gone) => outcome = Err(Refusal::Worker(gone)),
            }
        }
        outcome
    }

    /// Has queues stop that run.
    pub(super) fn begin_stop(&mut self, which: impl Fn(usize) -> bool) -> Result<(), Refusal> {
        let mut outcome = Ok(());
        for (at, vring) in self.vrings.iter_mut().enumerate() {
            let running = vring.worker_queue.filter(|_| vring.stopping.is_none() && which(at));
            let Some(id) = running else { continue };
            self.export.stopping(at, id);
            match self.export.worker(at).stop(id) {
                Ok(promise) => vring.stopping = Some(promise),
                // Its worker has ended. Those of other workers still have to stop.
                Err(error) => {
                    vring.worker_queue = None;
                    outcome = Err(Refusal::Worker(error));
                }
            }
        }
        outcome
    }

    /// Takes back queues that have stopped; true if there were some.
    pub(super) fn collect_stopped(&mut self) -> bool {
        let mut came_back = false;
        for at in 0..self.vrings.len() {
            if self.vrings[at].stopping.is_some() {
                // A worker that has ended has told why in the log.
                came_back |= self.look_for_stopped(at, Duration::ZERO).is_ok();
            }
        }
        came_back
    }

    /// Takes queue `at` back, which was told to stop, if it does within `time`.
    fn look_for_stopped(&mut self, at: usize, time: Duration) -> Result<(), RecvTimeoutError> {
        let Some(promise) = self.vrings[at].stopping.take() else { return Ok(()) };
        match promise.recv_timeout(time) {
            Ok(stopped) => {
                self.export.stopped(&stopped);
                self.vrings[at].take_back(stopped.ring);
                if let Some(iommu) = &mut self.iommu {
                    iommu.unwant(at);
                }
                debug!(disk = self.export.disk().name(), queue = at, "queue stopped");
                Ok(())
            }
            Err(RecvTimeoutError::Timeout) => {
                self.vrings[at].stopping = Some(promise);
                Err(RecvTimeoutError::Timeout)
            }
            Err(gone) => {
                self.vrings[at].worker_queue = None;
                Err(gone)
            }
        }
    }

    /// Waits for something of queue `at` that depends on the disk: as long as it may take
    /// ([`Export::drain_max`](ringway_export::Export::drain_max)), and if `patient` as long as the connection
    /// may go on. `None` if it did not come.
    fn await_disk<T>(
        &mut self,
        begun: Instant,
        at: usize,
        patient: bool,
        mut look: impl FnMut(&mut Self, Duration) -> Result<T, RecvTimeoutError>,
    ) -> io::Result<Option<T>> {
        let most = self.export.drain_max();
        let mut report_at = WAIT_REPORT;
        loop {
            match look(self, LOOK_EVERY.min(most)) {
                Ok(came) => return Ok(Some(came)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(gone) => return Err(io::Error::other(gone)),
            }
            let waited = begun.elapsed();
            if waited >= report_at {
                report_at = waited + WAIT_REPORT;
                if let Some(pass) = self.export.limits().waiting.pass() {
                    let (disk, seconds) = (self.export.disk().name(), waited.as_secs());
                    let suppressed = pass.suppressed;
                    warn!(
                        disk,
                        queue = at,
                        seconds,
                        suppressed,
                        "still waiting for the disk to finish what is in flight"
                    );
                }
            }
            if patient && self.channel.is_closed() {
                // Nobody waits for an answer, and the memory may be somebody else's.
                return Ok(None);
            }
            if waited >= most && !(patient && self.may_wait_on()) {
                return Ok(None);
            }
        }
    }

    /// Waits until each of these queues uses some memory no more.
    pub(super) fn await_unused(
        &mut self,
        promises: Vec<(usize, Receiver<()>)>,
    ) -> Result<(), Refusal> {
        let begun = Instant::now();
        for (at, promise) in promises {
            let look = |_: &mut Self, time| promise.recv_timeout(time);
            if self.await_disk(begun, at, true, look).map_err(Refusal::Worker)?.is_none() {
                self.abandon_queues();
                return Err(Refusal::Stuck(at));
            }
        }
        Ok(())
    }

    /// Leaves queues to their workers, which keep them and their memory until the disk answers, and tell
    /// nobody: the connection ends, and no other one with this memory starts before that.
    pub(super) fn abandon_queues(&mut self) {
        let mut promises = Vec::new();
        for (at, vring) in self.vrings.iter_mut().enumerate() {
            let Some(id) = vring.worker_queue.take() else { continue };
            let worker = self.export.worker(at);
            // A worker that has ended serves nothing any more.
            let _ = worker.edit(id, Queue::mute);
            match vring.stopping.take() {
                Some(promise) => promises.push(promise),
                None => {
                    self.export.stopping(at, id);
                    promises.extend(worker.stop(id));
                }
            }
        }
        self.export.fence(promises, Some(&self.map));
        self.vrings = fresh_vrings(&self.export);
        self.stuck = true;
    }
}

/// The queue index of SET_VRING_KICK, CALL and ERR: the low eight bits.
fn vring_index(message: &Message) -> u32 {
    // Masked to eight bits.
    #[allow(clippy::cast_possible_truncation)]
    let index = (message.u64(0) & (VRING_NO_FD - 1)) as u32;
    index
}

/// Notifications write and poll these descriptors from worker threads, so anything that could
/// block or behave otherwise is refused, and the descriptor made non-blocking.
pub(super) fn check_eventfd(fd: &OwnedFd, name: &'static str) -> Result<(), Refusal> {
    if !is_eventfd(fd) {
        return Err(Refusal::NotAnEventfd(name));
    }
    rustix::io::ioctl_fionbio(fd, true).map_err(|_| Refusal::NotAnEventfd(name))
}

/// Asks the descriptor itself, because in the sandbox there is no /proc to ask.
///
/// An eventfd has no file type, as all descriptors of the kernel's own. Of these only an eventfd
/// and few others can be written at all (the rest answer EINVAL); a write from address zero tells
/// (EFAULT), and changes nothing because nothing can be read there. Of those an eventfd alone takes
/// eight bytes of zeroes, which add nothing to its counter (fanotify finds no answer in them). What
/// is asked here is of this kernel: a file of any file system has a type.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let no_type = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == 0);
    // SAFETY: the kernel checks the address and reads nothing from it.
    let written = no_type.then(|| unsafe { libc::write(fd.as_raw_fd(), std::ptr::null(), 8) });
    let error = std::io::Error::last_os_error().raw_os_error();
    written.is_some_and(|written| written < 0 && error == Some(libc::EFAULT))
        && rustix::io::write(fd, &0u64.to_ne_bytes()) == Ok(8)
}
