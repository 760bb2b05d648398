//! How a queue comes to its worker and leaves it, what changes meanwhile, and the memory it is in.

use super::{BehindIommu, Queue, Token};
use crate::dirty_log::QueueLog;
use crate::inflight::QueueInflight;
use crate::iommu::Answered;
use crate::ring_place::RingPlace;
use ringway_core::mem::{GuestMap, HostRange, MISSES_MAX, Translation, Translator};
use ringway_disk::Watcher;
use ringway_export::{PeerEventfd, QueueLifecycle, SessionInbox, SharedMemory};
use ringway_ring::virtqueue::{Areas, Device, Format, InflightError};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

impl Queue {
    /// The ring of a queue at `at`, which must lie in mapped memory with the lengths that `format` asks for.
    /// It goes on from `base`, if it was told one; with `inflight`, from what is recorded there.
    ///
    /// # Safety
    /// That memory stays mapped while the ring is used, and so does the part, which belongs to this queue
    /// alone.
    pub(crate) unsafe fn ring(
        format: Format,
        at: Areas,
        base: Option<u32>,
        inflight: Option<&QueueInflight>,
    ) -> Result<Device, InflightError> {
        // SAFETY: the caller vouches for the memory; a part is mapped and aligned.
        unsafe {
            match inflight {
                None => Ok(Device::new(format, at, base)?),
                Some(part) => Device::tracked(format, at, base, part.at(), part.entries()),
            }
        }
    }

    /// A queue with such a ring, which lies at `place` in `map` and is recorded in `inflight`.
    pub(crate) fn new(
        ring: Device,
        map: Arc<GuestMap>,
        place: Arc<RingPlace>,
        inflight: Option<QueueInflight>,
        kick: OwnedFd,
        call: Option<Arc<PeerEventfd>>,
    ) -> Self {
        Self {
            ring,
            memory: Translator::new(map),
            place,
            inflight,
            kick,
            call,
            calls: 0,
            effort: 0,
            log: None,
            left: 0,
            answers_all: false,
            mute: false,
            stalled: false,
            iommu: None,
        }
    }

    /// From now on nothing is left in the record when it stops: what the disk fails is reported, what waits for a
    /// limit is carried out, and what a predecessor left fails if translations of it are missing, of which these
    /// are `known`.
    pub(crate) fn answer_all(&mut self, known: Vec<Translation>) {
        self.answers_all = true;
        if self.stalled && self.ring.backlog() > 0 {
            self.go_on(&Answered { learned: known, denied: Vec::new() });
        }
    }

    /// Its front-end has gone while requests are with the disk: what comes of them is told to nobody. Its record,
    /// if it has one, names them to whoever serves the guest next.
    pub(crate) fn mute(&mut self) {
        self.mute = true;
    }

    /// The guest's addresses are I/O virtual addresses. Translations are asked for at `inbox`, as
    /// queue `at`, and come with [`Queue::go_on`].
    pub(crate) fn put_behind_iommu(&mut self, inbox: Arc<SessionInbox>, at: usize) {
        self.memory = Translator::behind_iommu(Arc::clone(self.memory.map()));
        let faults = Vec::with_capacity(MISSES_MAX);
        self.iommu = Some(Box::new(BehindIommu { inbox, at, faults }));
    }

    /// This is what there is of the translations that were asked for: the request is tried again, and fails
    /// if it needs one that is none.
    pub(crate) fn go_on(&mut self, answered: &Answered) {
        answered.learned.iter().for_each(|&translation| self.memory.learn(translation));
        if let Some(iommu) = &mut self.iommu {
            // Those that a request waits for, of which it has no more.
            iommu.faults.clone_from(&answered.denied);
        }
        self.stalled = false;
    }

    /// From now on nothing is known of these I/O virtual addresses. Requests in flight go on.
    pub(crate) fn forget(&mut self, first: u64, last: u64) {
        self.memory.forget(first, last);
    }

    /// Where the queue got to, as GET_VRING_BASE puts it.
    pub(crate) fn base(&self) -> u32 {
        self.ring.base()
    }

    /// True if its record says that nothing is in flight.
    pub(crate) fn is_drained(&self) -> bool {
        self.ring.backlog() == 0 && self.left == 0
    }

    /// As [`Device::goes_on`].
    pub(crate) fn goes_on(&self) -> bool {
        self.ring.goes_on()
    }

    /// Whom to call from now on. Calls once, because a call may have gone to the old place.
    pub(crate) fn set_call(&mut self, call: Option<Arc<PeerEventfd>>) {
        self.call = call;
        let _ = self.call();
    }

    /// Where to mark what the device writes from now on.
    pub(crate) fn set_log(&mut self, log: Option<Arc<QueueLog>>) {
        self.log = log;
        // A predecessor may have written to the ring and died before it marked that, and starting
        // from a record may have written to it as well.
        if let (Some(log), Some(_)) = (&self.log, &self.inflight) {
            log.taken_over();
        }
    }

    /// Gives back its doorbell, and its record if it has one.
    pub(crate) fn into_parts(self) -> (OwnedFd, Option<QueueInflight>) {
        (self.kick, self.inflight)
    }
}

impl QueueLifecycle for Queue {
    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        self.ring.size()
    }

    /// Of a front-end that has gone nothing more is begun: its record names it to a successor.
    fn backlog(&self) -> usize {
        if self.mute { 0 } else { self.ring.backlog() }
    }

    fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Not while the guest is being migrated, or stopped by its front-end: whoever it goes on with may know
    /// nothing of the record.
    fn can_leave(&self) -> bool {
        self.inflight.is_some() && self.log.is_none() && !self.answers_all
    }

    fn leave(&mut self, token: Token) {
        token.due.settle();
        self.left += 1;
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn shared_memory(&self) -> Option<&dyn SharedMemory<Token>> {
        Some(self)
    }
}

impl SharedMemory<Token> for Queue {
    fn map(&self) -> &Arc<GuestMap> {
        self.memory.map()
    }

    fn is_lost(&self) -> bool {
        self.memory.map().is_lost()
            || self.place.is_lost()
            || self.inflight.as_ref().is_some_and(QueueInflight::is_lost)
            || self.log.as_ref().is_some_and(|log| log.is_lost())
    }

    fn watcher(&self) -> Option<Watcher> {
        let log = Arc::clone(self.log.as_ref()?);
        Some(Watcher::new(move |segments| log.read_into(segments)))
    }

    fn answers_into(&self, token: &Token, ranges: &[HostRange]) -> bool {
        let at = token.status_at.address().map(|at| at.as_ptr() as usize);
        at.is_some_and(|at| ranges.iter().any(|&(first, last)| first <= at && at <= last))
    }
}
