//! A virtqueue of a vhost-user guest, as a worker sees it (hot).

use super::dirty_log::QueueLog;
use super::inflight::Part;
use crate::queue::{Broken, Pop, RequestQueue};
use crate::ring_bell::ring_bell;
use ringway_core::mem::{GuestMap, Translator};
use ringway_core::{Request, Status, kill_point};
use ringway_disk::Watcher;
use ringway_ring::virtio_blk::{self, StatusByte};
use ringway_ring::virtqueue::{Areas, Armed, Device, Format, Head, InflightError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The right to answer one virtio-blk request.
#[derive(Debug)]
pub struct Token {
    head: Head,
    status_at: StatusByte,
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
    call: Option<OwnedFd>,
    calls: u64,
    /// Descriptors of the last chain.
    effort: u32,
    /// What the device writes is marked here while a guest is migrated.
    log: Option<Arc<QueueLog>>,
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
        call: Option<OwnedFd>,
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
        };
        if queue.inflight.is_some() {
            // A predecessor may have published answers and died before it called.
            let _ = queue.call();
        }
        Ok(queue)
    }

    /// Where the queue got to, as GET_VRING_BASE puts it.
    pub(super) fn base(&self) -> u32 {
        self.ring.base()
    }

    /// As [`Device::goes_on`].
    pub(super) fn goes_on(&self) -> bool {
        self.ring.goes_on()
    }

    /// Whom to call from now on. Calls once, because a call may have gone to the old place.
    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) {
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
    pub(super) fn into_fds(self) -> (OwnedFd, Option<OwnedFd>) {
        (self.kick, self.call)
    }

    fn call(&mut self) -> io::Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        self.calls += 1;
        let rung = ring_bell(call);
        kill_point!(Called);
        if rung.is_err() {
            // Whatever the peer has done to it, it is done to itself.
            self.call = None;
        }
        rung
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
        let Some((head, chain)) = self.ring.pop(&mut self.memory)? else { return Ok(Pop::Empty) };
        let Ok(chain) = chain else {
            self.effort = u32::try_from(self.ring.walked()).unwrap_or(u32::MAX);
            // No place for a status is known: the chain goes back with nothing written.
            let token = Token { head, status_at: StatusByte::NOWHERE };
            return Ok(Pop::Refused(token, Status::IoError));
        };
        // A chain has less than 2^17 descriptors.
        #[allow(clippy::cast_possible_truncation)]
        let walked = chain.walked() as u32;
        self.effort = walked;
        let decoded = virtio_blk::decode(chain, &mut self.memory, request);
        let token = Token { head, status_at: decoded.status_at };
        Ok(match decoded.verdict {
            Ok(()) => Pop::Request(token),
            Err(status) => Pop::Refused(token, status),
        })
    }

    #[inline]
    fn effort(&self) -> u32 {
        self.effort
    }

    #[inline]
    fn complete(&mut self, token: Token, status: Status, written: u32) {
        // SAFETY: the byte was resolved in the map that `memory` keeps alive (Queue invariant 1).
        let status_bytes = unsafe { token.status_at.write(status) };
        if let Some(log) = &self.log {
            log.answered(&token.status_at);
        }
        self.ring.push(token.head, written + status_bytes);
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
        self.ring.has_work()
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        let armed = self.ring.arm();
        self.log_wish();
        Ok(armed?)
    }

    fn disarm(&mut self) {
        self.ring.disarm();
        self.log_wish();
    }

    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn memory(&self) -> &Arc<GuestMap> {
        self.memory.map()
    }

    fn memory_gone(&self) -> bool {
        self.memory.map().is_poisoned()
            || self.inflight.as_ref().is_some_and(Part::is_gone)
            || self.log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    fn backlog(&self) -> usize {
        self.ring.backlog()
    }

    fn watcher(&self) -> Option<Watcher> {
        let log = Arc::clone(self.log.as_ref()?);
        Some(Watcher::new(move |segments| log.read_into(segments)))
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn depth(&self) -> u16 {
        self.ring.size()
    }
}
