//! How the queues of a front-end are made, started, drained and let go.

use super::{QueuePlace, Refusal, Session};
use crate::host::{GrantMapping, Host};
use crate::keys::{FrontKeys, Saying};
use crate::queue::{Queue, QueueSetup};
use crate::record::{Identity, Record, RecordError};
use ringway_core::panic_point;
use ringway_export::{Notice, QueueLifecycle};
use ringway_ring::blkif::RingAt;
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

impl<H: Host> Session<'_, H> {
    /// Maps the rings of a front-end; with `adopt` goes on where a predecessor was.
    pub(super) fn make_queues(
        &mut self,
        keys: &FrontKeys,
        saying: &Saying,
        adopt: bool,
    ) -> Result<(), Refusal> {
        let offered = saying.offered();
        let mut queues = Vec::new();
        for (at, ring) in keys.rings.iter().enumerate() {
            let access = &self.options.access;
            let (host, ring_pages) =
                (self.connect)(&**access, self.at.domid, &ring.pages, ring.port)
                    .map_err(|error| Refusal::Ring(at, error))?;
            let place = RingAt { base: ring_pages.base(), order: keys.order, abi: keys.abi };
            let slots = place.slots().map_err(|error| Refusal::Queue(at, error.into()))?;
            let mut pages = [0; 16];
            pages.iter_mut().zip(&ring.pages).for_each(|(to, from)| *to = *from);
            let identity = Identity {
                domid: self.at.domid.into(),
                devid: self.at.devid,
                // At most 256 are offered.
                #[allow(clippy::cast_possible_truncation)]
                queue: at as u32,
                slots,
                pieces: offered.indirect_segments.into(),
                port: ring.port,
                pages,
            };
            let setup = QueueSetup {
                host,
                ring_pages,
                at: place,
                offered,
                movement: self.options.movement,
                persistent: keys.persistent,
            };
            let queue = if adopt {
                let record = Record::open_by(access, &identity);
                let record = record.map_err(|error| Refusal::Record(at, error))?;
                // SAFETY: the ring lies in the pages just mapped. A predecessor is gone: it held the
                // lock of the image, which is ours now.
                unsafe { Queue::adopt(setup, record) }
            } else {
                let record = self.new_record(&identity)?;
                // SAFETY: the ring lies in the pages just mapped, and the front-end has just begun it.
                unsafe { Queue::new(setup, record) }
            }
            .map_err(|error| Refusal::Queue(at, error))?;
            self.export.notice_backlog(at, queue.backlog());
            queues.push(QueuePlace::Here(Box::new(queue)));
        }
        self.queues = queues;
        Ok(())
    }

    /// A new record; one that nobody can go on from if there is no place for it.
    fn new_record(&self, identity: &Identity) -> Result<Record, Refusal> {
        let at = identity.queue as usize;
        match Record::create_by(&self.options.access, identity) {
            Ok(record) => Ok(record),
            Err(error @ RecordError::Host { .. }) => {
                if let Some(pass) = self.export.limits().retried.pass() {
                    warn!(
                        disk = self.export.disk().name(),
                        suppressed = pass.suppressed,
                        "if this process is killed its guests lose this disk: {error}"
                    );
                }
                let record = Record::unkept(identity);
                record.map_err(|error| Refusal::Queue(at, error.into()))
            }
            Err(error) => Err(Refusal::Record(at, error)),
        }
    }

    /// Starts all queues that are here.
    pub(super) fn start_stopped(&mut self) -> Result<(), Refusal> {
        if self.export.holds() {
            // They start when it is resumed.
            return Ok(());
        }
        if self.export.has_failed() {
            return Err(Refusal::Failed);
        }
        // Without a write cache, writes are durable before they are answered.
        let durable = !self.export.may_write_back();
        for (at, place) in self.queues.iter_mut().enumerate() {
            let QueuePlace::Here(_) = place else { continue };
            let QueuePlace::Here(mut queue) = std::mem::replace(place, QueuePlace::Lost) else {
                continue;
            };
            queue.resume();
            let (inbox, disk) = (Arc::clone(&self.inbox), Arc::clone(self.export.disk()));
            let alarm = Box::new(move |alarm| inbox.raise(at, alarm));
            let id = self.export.worker(at).add(*queue, disk, durable, alarm);
            let id = id.map_err(|refused| Refusal::Worker(at, refused.error))?;
            *place = QueuePlace::Running(id);
            self.export.started(at, id);
        }
        Ok(())
    }

    /// Stops all queues, and waits until nothing of theirs is in flight.
    pub(super) fn stop_all(&mut self) -> Result<(), Refusal> {
        let mut outcome = Ok(());
        for (at, place) in self.queues.iter_mut().enumerate() {
            let QueuePlace::Running(id) = *place else { continue };
            self.export.stopping(at, id);
            *place = match self.export.worker(at).stop(id) {
                Ok(promise) => QueuePlace::Stopping(promise),
                // Its worker has ended. Those of other workers still have to stop.
                Err(error) => {
                    outcome = Err(Refusal::Worker(at, error));
                    QueuePlace::Lost
                }
            };
        }
        panic_point!("stopping");
        let begun = Instant::now();
        for (at, place) in self.queues.iter_mut().enumerate() {
            let QueuePlace::Stopping(promise) = place else { continue };
            *place = match self.export.await_disk(begun, at, promise) {
                Ok(Some(stopped)) => {
                    self.export.stopped(&stopped);
                    QueuePlace::Here(Box::new(stopped.ring))
                }
                Ok(None) => {
                    self.abandon();
                    return Err(Refusal::Stuck(at));
                }
                Err(error) => {
                    outcome = Err(Refusal::Worker(at, error));
                    QueuePlace::Lost
                }
            };
        }
        outcome
    }

    /// Leaves queues that still stop to their workers, with all they have mapped, until the disk answers; nobody is
    /// served before that.
    pub(super) fn abandon(&mut self) {
        let mut promises = Vec::new();
        for place in &mut self.queues {
            match std::mem::replace(place, QueuePlace::Lost) {
                QueuePlace::Stopping(promise) => promises.push(promise),
                other => *place = other,
            }
        }
        self.export.fence(promises, None);
    }

    /// Lets the rings go as they are: what is in flight, or was not begun, stays in their records for whoever takes
    /// them next.
    pub(super) fn leave(&mut self) -> Result<(), Refusal> {
        let stopped = self.stop_all();
        self.queues.clear();
        stopped
    }

    /// Lets the rings of a front-end go. What the disk does not finish in time is finished later. Nothing is written
    /// to the memory of one that `has_gone`.
    pub(super) fn disconnect(&mut self, has_gone: bool) -> Result<(), Refusal> {
        for (at, place) in self.queues.iter().enumerate() {
            if let (QueuePlace::Running(id), true) = (place, has_gone) {
                // A worker that has ended serves nothing any more.
                let _ = self.export.worker(at).edit(*id, Queue::mute);
            }
        }
        let stopped = self.stop_all();
        for place in self.queues.drain(..) {
            if let QueuePlace::Here(queue) = place {
                queue.discard_record();
            }
        }
        self.export.notice(Notice::Disconnected { why: None });
        if let Some(pass) = self.export.limits().disconnected.pass() {
            let (disk, domain) = (self.export.disk().name(), self.at.domid);
            info!(disk, domain, suppressed = pass.suppressed, "front-end disconnected");
        }
        stopped
    }
}
