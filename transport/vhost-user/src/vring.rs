//! What a connection knows of one queue, running or not.

use super::inflight::QueueInflight;
use super::queue::Queue;
use super::ring_place::{AREAS, RingPlace};
use super::start::{StartError, UserAddresses};
use ringway_core::mem::GuestMap;
use ringway_export::{PeerEventfd, QueueId, Stopped};
use ringway_ring::virtqueue::{Areas, Format};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// One queue.
#[derive(Debug, Default)]
pub(super) struct Vring {
    /// 0 until SET_VRING_NUM.
    pub(super) size: u16,
    pub(super) addresses: Option<UserAddresses>,
    /// Where the queue goes on, while it does not run; `None` at the start.
    pub(super) base: Option<u32>,
    pub(super) kick: Option<OwnedFd>,
    /// Whom to call. The worker has it, too: what is said while a queue stops holds when it starts again.
    pub(super) call: Option<Arc<PeerEventfd>>,
    pub(super) err: Option<PeerEventfd>,
    pub(super) enabled: bool,
    /// Guest address under which writes to the used ring are logged, if they are.
    pub(super) log_at: Option<u64>,
    /// The record of the queue that was stopped, if it says that nothing is in flight.
    pub(super) drained: Option<QueueInflight>,
    /// It has run in this connection: what it goes on with is this connection's own.
    pub(super) has_run: bool,
    /// Its record names requests that nobody has answered.
    pub(super) owes: bool,
    /// The kick descriptor is with the worker while this is `Some`.
    pub(super) worker_queue: Option<QueueId>,
    /// Where the ring was found when it started, while it runs.
    pub(super) place: Option<Arc<RingPlace>>,
    /// It could not start, and nothing has changed for it since.
    pub(super) failed: bool,
    /// It was told to stop, and the worker gives it back here.
    pub(super) stopping: Option<Receiver<Stopped<Queue>>>,
}

impl Vring {
    pub(super) fn is_running(&self) -> bool {
        self.worker_queue.is_some()
    }

    /// True once everything is known that a queue needs to run.
    pub(super) fn is_ready(&self) -> bool {
        !self.is_running()
            && !self.failed
            && self.enabled
            && self.size != 0
            && self.addresses.is_some()
            && self.kick.is_some()
    }

    /// Where the ring is in our address space.
    pub(super) fn place(&self, map: &GuestMap, format: Format) -> Result<RingPlace, StartError> {
        let [desc, driver, device] = AREAS;
        let user = self.addresses.ok_or(StartError::NotShared(desc))?;
        let find = |name, address, len: usize| {
            map.user_to_host(address, len as u64).ok_or(StartError::NotShared(name))
        };
        let bytes = format.area_bytes();
        Ok(RingPlace::whole(Areas {
            desc: find(desc, user.desc, bytes.0)?,
            driver: find(driver, user.avail, bytes.1)?,
            device: find(device, user.used, bytes.2)?,
        }))
    }

    /// The queue for a worker, whose ring was found at `place` in `map`. Takes the kick descriptor.
    ///
    /// # Safety
    /// `place` was resolved in `map`, each area with the length it needs.
    pub(super) unsafe fn make_queue(
        &mut self,
        map: &Arc<GuestMap>,
        format: Format,
        place: Arc<RingPlace>,
        inflight: Option<QueueInflight>,
    ) -> Result<Queue, StartError> {
        // SAFETY: the caller vouches for the addresses; the queue keeps the map, the place and the part.
        let ring = unsafe { Queue::ring(format, place.areas, self.base, inflight.as_ref())? };
        let kick = self.kick.take().ok_or(StartError::NotShared("doorbell"))?;
        // A predecessor may have published answers and died before it called; this one may have called where nobody
        // listens any more.
        let may_have_missed = inflight.is_some() || self.has_run;
        let mut queue = Queue::new(ring, Arc::clone(map), place, inflight, kick, self.call.clone());
        if may_have_missed {
            let _ = queue.call();
        }
        Ok(queue)
    }

    /// Takes back what the worker had.
    pub(super) fn take_back(&mut self, queue: Queue) {
        (self.worker_queue, self.place) = (None, None);
        self.base = Some(queue.base());
        let drained = queue.is_drained();
        self.owes = !drained;
        let (kick, record) = queue.into_parts();
        self.drained = record.filter(|_| drained);
        self.kick = Some(kick);
    }
}
