//! A virtqueue of a vhost-user guest, as a worker sees it (hot).

use super::dirty_log::QueueLog;
use super::inflight::Part;
use ringway_core::mem::{GuestMap, HostRange, MISSES_MAX, Miss, Translation, Translator};
use ringway_core::{Request, Status, kill_point};
use ringway_disk::Watcher;
use ringway_export::{
    AnswerDue, Armed, Broken, PeerEventfd, Pop, QueueLifecycle, RequestQueue, SessionInbox,
    SharedMemory,
};
use ringway_ring::virtio_blk::{self, StatusByte};
use ringway_ring::virtqueue::{self, Areas, Chain, Device, Format, Head, InflightError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The right to answer one virtio-blk request.
#[derive(Debug)]
pub struct Token {
    head: Head,
    status_at: StatusByte,
    due: AnswerDue,
}

impl Token {
    #[inline]
    fn new(head: Head, status_at: StatusByte) -> Self {
        Self { head, status_at, due: AnswerDue::default() }
    }
}

/// A virtqueue of either format, the guest memory it lies in, and its eventfds.
///
/// # Invariants
/// 1. `memory` keeps the map alive in which the ring and all resolved segments lie, and `inflight`
///    the mapping of the ring's record.
#[derive(Debug)]
pub struct Queue {
    ring: Device,
    memory: Translator,
    inflight: Option<Part>,
    kick: OwnedFd,
    call: Option<PeerEventfd>,
    calls: u64,
    /// Descriptors of the last chain.
    effort: u32,
    /// What the device writes is marked here while a guest is migrated.
    log: Option<Arc<QueueLog>>,
    /// Requests that were taken and stay unanswered in the record.
    left: usize,
    /// The next request needs translations that were asked for: it stays in the ring until they come.
    stalled: bool,
    /// What a queue behind an IOMMU has beside.
    iommu: Option<Box<BehindIommu>>,
}

#[derive(Debug)]
struct BehindIommu {
    /// Where to ask for translations, and as which queue.
    inbox: Arc<SessionInbox>,
    at: usize,
    /// Pages that the next request must not have: the front-end knows no translation.
    faults: Vec<Miss>,
}

impl Queue {
    /// A queue at `at`, which must lie in `map` with the lengths that `format` asks for. It goes on
    /// from `base`, if it was told one; with `inflight`, from what is recorded there.
    ///
    /// # Safety
    /// The addresses were resolved in `map`.
    pub(super) unsafe fn new(
        format: Format,
        at: Areas,
        base: Option<u32>,
        map: Arc<GuestMap>,
        inflight: Option<Part>,
        kick: OwnedFd,
        call: Option<PeerEventfd>,
    ) -> Result<Self, InflightError> {
        // SAFETY: the caller resolved the addresses in `map`, which `memory` keeps alive; a part is
        // mapped and aligned, belongs to this queue alone, and is kept as well.
        let ring = unsafe {
            match &inflight {
                None => Device::new(format, at, base)?,
                Some(part) => Device::tracked(format, at, base, part.at(), part.entries())?,
            }
        };
        let mut queue = Self {
            ring,
            memory: Translator::new(map),
            inflight,
            kick,
            call,
            calls: 0,
            effort: 0,
            log: None,
            left: 0,
            stalled: false,
            iommu: None,
        };
        if queue.inflight.is_some() {
            // A predecessor may have published answers and died before it called.
            let _ = queue.call();
        }
        Ok(queue)
    }

    /// The guest's addresses are I/O virtual addresses. Translations are asked for at `inbox`, as
    /// queue `at`, and come with [`Queue::learn`] or [`Queue::fault`].
    pub(super) fn put_behind_iommu(&mut self, inbox: Arc<SessionInbox>, at: usize) {
        self.memory = Translator::behind_iommu(Arc::clone(self.memory.map()));
        let faults = Vec::with_capacity(MISSES_MAX);
        self.iommu = Some(Box::new(BehindIommu { inbox, at, faults }));
    }

    /// These are the translations that were asked for: the request is tried again.
    pub(super) fn learn(&mut self, translations: &[Translation]) {
        translations.iter().for_each(|&translation| self.memory.learn(translation));
        self.stalled = false;
    }

    /// There is no such translation: a request that needs it fails.
    pub(super) fn fault(&mut self, miss: Miss) {
        if let Some(iommu) = &mut self.iommu
            && iommu.faults.len() < MISSES_MAX
        {
            iommu.faults.push(miss);
        }
        self.stalled = false;
    }

    /// From now on nothing is known of these I/O virtual addresses. Requests in flight go on.
    pub(super) fn forget(&mut self, first: u64, last: u64) {
        self.memory.forget(first, last);
    }

    /// A request could not be understood. If that is because translations are missing it goes back
    /// into the ring, and they are asked for: true then.
    #[cold]
    fn stalls_over(&mut self, head: Head) -> Result<(), Head> {
        let (Some(missed), Some(iommu)) = (self.memory.missed(), &mut self.iommu) else {
            return Err(head);
        };
        let faulty = missed.iter().any(|miss| iommu.faults.contains(miss));
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

    /// Where the queue got to, as GET_VRING_BASE puts it.
    pub(super) fn base(&self) -> u32 {
        self.ring.base()
    }

    /// True if its record says that nothing is in flight.
    pub(super) fn is_drained(&self) -> bool {
        self.ring.backlog() == 0 && self.left == 0
    }

    /// As [`Device::goes_on`].
    pub(super) fn goes_on(&self) -> bool {
        self.ring.goes_on()
    }

    /// Whom to call from now on. Calls once, because a call may have gone to the old place.
    pub(super) fn set_call(&mut self, call: Option<PeerEventfd>) {
        self.call = call;
        let _ = self.call();
    }

    /// Where to mark what the device writes from now on.
    pub(super) fn set_log(&mut self, log: Option<Arc<QueueLog>>) {
        self.log = log;
        // A predecessor may have written to the ring and died before it marked that, and starting
        // from a record may have written to it as well.
        if let (Some(log), Some(_)) = (&self.log, &self.inflight) {
            log.taken_over();
        }
    }

    fn log_wish(&self) {
        if let Some(log) = &self.log {
            log.wished();
        }
    }

    /// Gives the eventfds back.
    pub(super) fn into_fds(self) -> (OwnedFd, Option<PeerEventfd>) {
        (self.kick, self.call)
    }

    fn call(&mut self) -> io::Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        self.calls += 1;
        let rung = call.signal();
        kill_point!(Called);
        if rung.is_err() {
            // Whatever the peer has done to it, this one is done with. If it blocked, so are all others.
            self.call = None;
        }
        rung
    }
}

/// Names all pages of a chain that are missing, so that they come together.
#[cold]
fn note_misses(chain: &Chain, memory: &mut Translator) {
    if memory.missed().is_some() {
        chain.note_misses(memory);
    }
}

#[cold]
fn publish_logged(ring: &mut Device, log: &QueueLog) -> bool {
    let places = ring.unpublished();
    let wants_call = ring.publish();
    log.published(places);
    wants_call
}

impl RequestQueue for Queue {
    type Token = Token;

    #[inline]
    fn pop(&mut self, request: &mut Request) -> Result<Pop<Token>, Broken> {
        if self.stalled {
            return Ok(Pop::Empty);
        }
        let Some((head, chain)) = self.ring.pop(&mut self.memory).map_err(Broken::rule)? else {
            return Ok(Pop::Empty);
        };
        let (status_at, status) = match chain {
            Ok(chain) => {
                // A chain has less than 2^17 descriptors.
                #[allow(clippy::cast_possible_truncation)]
                let walked = chain.walked() as u32;
                self.effort = walked;
                let decoded = virtio_blk::decode(chain, &mut self.memory, request);
                match decoded.verdict {
                    Ok(()) => {
                        return Ok(Pop::Request(Token::new(head, decoded.status_at)));
                    }
                    Err(status) => {
                        note_misses(chain, &mut self.memory);
                        (decoded.status_at, status)
                    }
                }
            }
            // No place for a status is known: the chain goes back with nothing written.
            Err(_) => {
                self.effort = u32::try_from(self.ring.walked()).unwrap_or(u32::MAX);
                (StatusByte::NOWHERE, Status::IoError)
            }
        };
        Ok(match self.stalls_over(head) {
            Ok(()) => Pop::Empty,
            Err(head) => Pop::Refused(Token::new(head, status_at), status),
        })
    }

    #[inline]
    fn effort(&self) -> u32 {
        self.effort
    }

    #[inline]
    fn complete(&mut self, token: Token, status: Status, written: u32) {
        let Token { head, status_at, due } = token;
        due.settle();
        // SAFETY: the byte was resolved in the map that `memory` keeps alive (Queue invariant 1).
        let status_bytes = unsafe { status_at.write(status) };
        if let Some(log) = &self.log {
            log.answered(&status_at);
        }
        self.ring.push(head, written + status_bytes);
    }

    #[inline]
    fn publish(&mut self) -> io::Result<()> {
        let wants_call = match &self.log {
            None => self.ring.publish(),
            Some(log) => publish_logged(&mut self.ring, log),
        };
        if wants_call { self.call() } else { Ok(()) }
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.ring.has_work() && !self.stalled
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        let armed = self.ring.arm();
        self.log_wish();
        // Translations come with a command, which wakes the worker.
        match armed.map_err(Broken::rule)? {
            virtqueue::Armed::WorkArrived if !self.stalled => Ok(Armed::WorkArrived),
            _ => Ok(Armed::Quiet),
        }
    }

    fn disarm(&mut self) {
        self.ring.disarm();
        self.log_wish();
    }
}

impl QueueLifecycle for Queue {
    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        self.ring.size()
    }

    fn backlog(&self) -> usize {
        self.ring.backlog()
    }

    fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Not while the guest is being migrated: its next host may know nothing of the record.
    fn can_leave(&self) -> bool {
        self.inflight.is_some() && self.log.is_none()
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

    fn is_gone(&self) -> bool {
        self.memory.map().is_poisoned()
            || self.inflight.as_ref().is_some_and(Part::is_gone)
            || self.log.as_ref().is_some_and(|log| log.is_poisoned())
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
