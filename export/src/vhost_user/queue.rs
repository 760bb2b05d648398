//! A virtqueue of a vhost-user guest, as a worker sees it (hot).

use super::dirty_log::QueueLog;
use crate::queue::{Pop, RequestQueue};
use crate::ring_bell::ring_bell;
use ringway_core::mem::{GuestMap, Translator};
use ringway_core::{Request, Status};
use ringway_disk::Watcher;
use ringway_ring::virtio_blk::{self, StatusByte};
use ringway_ring::virtqueue::{Areas, Armed, Broken, Device, Format, Head, LayoutError};
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
/// 1. `memory` keeps the map alive in which the ring and all resolved segments lie.
#[derive(Debug)]
pub struct Queue {
    ring: Device,
    memory: Translator,
    kick: OwnedFd,
    call: Option<OwnedFd>,
    /// What the device writes is marked here while a guest is migrated.
    log: Option<Arc<QueueLog>>,
}

impl Queue {
    /// A queue at `at`, which must lie in `map` with the lengths that `format` asks for. It goes on
    /// from `base`, if it was told one.
    ///
    /// # Safety
    /// The addresses were resolved in `map`.
    pub(super) unsafe fn new(
        format: Format,
        at: Areas,
        base: Option<u32>,
        map: Arc<GuestMap>,
        kick: OwnedFd,
        call: Option<OwnedFd>,
    ) -> Result<Self, LayoutError> {
        // SAFETY: the caller resolved the addresses in `map`, which `memory` keeps alive.
        let ring = unsafe { Device::new(format, at, base)? };
        Ok(Self { ring, memory: Translator::new(map), kick, call, log: None })
    }

    /// Where the queue got to, as GET_VRING_BASE puts it.
    pub(super) fn base(&self) -> u32 {
        self.ring.base()
    }

    /// Whom to call from now on. Calls once, because a call may have gone to the old place.
    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        let _ = self.call();
    }

    /// Where to mark what the device writes from now on.
    pub(super) fn set_log(&mut self, log: Option<Arc<QueueLog>>) {
        self.log = log;
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
        let rung = ring_bell(call);
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
            // No place for a status is known: the chain goes back with nothing written.
            let token = Token { head, status_at: StatusByte::NOWHERE };
            return Ok(Pop::Refused(token, Status::IoError));
        };
        let decoded = virtio_blk::decode(chain, &mut self.memory, request);
        let token = Token { head, status_at: decoded.status_at };
        Ok(match decoded.verdict {
            Ok(()) => Pop::Request(token),
            Err(status) => Pop::Refused(token, status),
        })
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
        armed
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
        self.memory.map().is_poisoned() || self.log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    fn watcher(&self) -> Option<Watcher> {
        let log = Arc::clone(self.log.as_ref()?);
        Some(Watcher::new(move |segments| log.read_into(segments)))
    }

    fn depth(&self) -> u16 {
        self.ring.size()
    }
}
