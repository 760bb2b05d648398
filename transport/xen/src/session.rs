//! One disk of one guest: its folders in xenstore, its rings, its queues.
//!
//! The thread sleeps until the store, a worker or the control plane has something to say, looks at
//! what the store says now, and does what `xenbus.rs` decides, until there is nothing to do.

mod inbox;
mod queues;

use super::Queue;
use super::access::Access;
use super::domain::Domain;
use super::host::Host;
use super::keys::{self, Address, FrontKeys, KeyError, Saying};
use super::limits::GuestLimits;
use super::movement::Movement;
use super::queue::AdoptError;
use super::record::RecordError;
use super::xenbus::{self, Action, State};
use super::xenstore::{StoreError, Tx, Xenstore};
use ringway_core::thread::panic_message;
use ringway_export::{Export, Notice, QueueId, SessionInbox, Stopped};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use tracing::{debug, error, info, warn};

/// How long to wait before a store that was lost is tried again.
const BREATH: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Changes of state that are made before the store is heard again. A front-end that keeps changing
/// its mind has its turns, and no more.
const TURNS_MAX: u32 = 16;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The toolstack has removed the disk.
    Removed,
    /// The daemon was told to stop. The front-end stays as it is, for the next daemon.
    ByOrder,
    /// It cannot go on; the log says why.
    Failed,
}

/// How disks are served to Xen's guests.
#[derive(Clone)]
pub struct SessionOptions {
    /// How data moves.
    pub movement: Movement,
    /// Who opens devices, the store, and records of what is in flight. These are in a folder that
    /// stays in memory when this process is killed, and that only its user can write to.
    pub access: Arc<dyn Access>,
}

/// Why a front-end is not served.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("ring {0} cannot be mapped: {1}")]
    Ring(usize, io::Error),
    #[error("ring {0}: {1}")]
    Queue(usize, AdoptError),
    #[error("ring {0} cannot be taken over: {1}")]
    Record(usize, RecordError),
    #[error("the worker refuses ring {0}: {1}")]
    Worker(usize, io::Error),
    #[error("ring {0}: the disk does not finish what is in flight")]
    Stuck(usize),
    #[error("a worker of this disk has failed: what was in flight is not known")]
    Failed,
    #[error("requests of an earlier connection are still in flight: their writes could land later")]
    Fenced,
}

/// Maps the ring of a queue and binds its event channel, as [`Domain::connect`].
type Connect<H> =
    dyn Fn(&dyn Access, u16, &[u32], u32) -> io::Result<(H, <H as Host>::Mapped)> + Send + Sync;

/// One queue: with its worker, or with us.
enum QueuePlace<H: Host> {
    /// It runs on its worker under this name.
    Running(QueueId),
    /// It was told to stop, and the worker gives it back here.
    Stopping(Receiver<Stopped<Queue<H>>>),
    /// It is stopped.
    Here(Box<Queue<H>>),
    /// It is lost to a disk that is stuck, or to a worker that ended.
    Lost,
}

/// One disk of one guest.
pub struct Session<'a, H: Host = Domain> {
    export: &'a Export<Queue<H>>,
    connect: Box<Connect<H>>,
    options: SessionOptions,
    store: Xenstore,
    at: Address,
    stop: BorrowedFd<'a>,
    inbox: Arc<SessionInbox>,
    queues: Vec<QueuePlace<H>>,
    /// How often the disk had changed its size when the front-end was last told.
    resizes_announced: u64,
}

impl<'a> Session<'a, Domain> {
    /// A session for the disk at `at`, over a connection of its own. It ends when `stop` becomes
    /// readable.
    ///
    /// # Errors
    /// What the host says to an eventfd.
    pub fn new(
        export: &'a Export<Queue>,
        options: SessionOptions,
        store: Xenstore,
        at: Address,
        stop: BorrowedFd<'a>,
    ) -> io::Result<Self> {
        Self::over(export, options, store, at, stop, Box::new(Domain::connect))
    }
}

impl<'a, H: Host> Session<'a, H> {
    /// The same, with another way to the guest's memory.
    fn over(
        export: &'a Export<Queue<H>>,
        options: SessionOptions,
        store: Xenstore,
        at: Address,
        stop: BorrowedFd<'a>,
        connect: Box<Connect<H>>,
    ) -> io::Result<Self> {
        let inbox = Arc::new(SessionInbox::new()?);
        inbox.attend(false);
        let session = Self {
            export,
            connect,
            options,
            store,
            at,
            stop,
            inbox: Arc::clone(&inbox),
            queues: Vec::new(),
            resizes_announced: export.resizes(),
        };
        export.enter(inbox);
        Ok(session)
    }

    /// Serves the disk until it is removed or `stop` rings.
    pub fn run(mut self) -> Ended {
        let disk = self.export.disk().name();
        loop {
            let served = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(|panic| {
                // Without its session nobody hears the guest any more.
                error!(disk, "a session panicked: {}", panic_message(&*panic));
                Ok(Ended::Failed)
            });
            match served {
                Ok(ended) => {
                    self.stop_for_good();
                    return ended;
                }
                // Rings go on without a store.
                Err(error) => {
                    if let Some(pass) = self.export.limits().retried.pass() {
                        warn!(disk, suppressed = pass.suppressed, "{error}; trying again");
                    }
                }
            }
            if let Some(ended) = self.breathe() {
                self.stop_for_good();
                return ended;
            }
            if let Ok(store) = Xenstore::open(&*self.options.access) {
                self.store = store;
            }
        }
    }

    fn stop_for_good(&mut self) {
        let stopped = catch_unwind(AssertUnwindSafe(|| self.stop_all()));
        let stopped = stopped.unwrap_or_else(|panic| {
            // Some may still run, and what they have in flight is known to nobody.
            self.export.fail();
            let disk = self.export.disk().name();
            let said = panic_message(&*panic);
            error!(disk, "stopping queues panicked, the disk is served no more: {said}");
            Ok(())
        });
        if let Err(refusal) = stopped {
            if let Some(pass) = self.export.limits().ended.pass() {
                let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                warn!(disk, suppressed, "could not stop all queues: {refusal}");
            }
        }
    }

    /// Waits a moment, or until somebody has something to say: whoever pauses the disk waits for an answer. How the
    /// session is to end, if it is.
    fn breathe(&mut self) -> Option<Ended> {
        let inbox = self.inbox.bell();
        let fds = [self.stop.as_fd(), inbox.as_fd()];
        let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        // Interrupted is as good as waited.
        let heard = poll(&mut polled, Some(&BREATH)).is_ok();
        let [stop, inbox] = polled.map(|fd| heard && !fd.revents().is_empty());
        if stop {
            return Some(Ended::ByOrder);
        }
        // The store is tried anew in any case.
        (inbox && self.handle_inbox().unwrap_or(false)).then_some(Ended::Failed)
    }

    fn serve(&mut self) -> Result<Ended, Refusal> {
        self.store.watch(&self.at.back, "back")?;
        self.store.watch(&format!("{}/state", self.at.front), "front")?;
        loop {
            // Whatever has changed, and however often: what counts is how it is now (hazard B14).
            self.store.events()?;
            if let Some(ended) = self.act()? {
                return Ok(ended);
            }
            let (store, inbox) = (self.store.fd(), self.inbox.bell());
            let fds = [self.stop.as_fd(), inbox.as_fd(), store.as_fd()];
            let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
            // Events that came between answers are in no socket any more.
            let timeout = self.store.has_events().then_some(&NOT_AT_ALL);
            match poll(&mut polled, timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(StoreError::Broken(error.into()).into()),
            }
            let [stop, inbox, _] = polled.map(|fd| !fd.revents().is_empty());
            if stop {
                return Ok(Ended::ByOrder);
            }
            if inbox && self.handle_inbox()? {
                return Ok(Ended::Failed);
            }
        }
    }

    /// Does all there is to do; the way the session ended, if it did.
    fn act(&mut self) -> Result<Option<Ended>, Refusal> {
        for _ in 0..TURNS_MAX {
            let seen = keys::read(&mut self.store, &self.at)?;
            let has_rings = !self.queues.is_empty();
            self.inbox.attend(has_rings && seen.is_connected());
            let Some(action) = xenbus::next(seen, has_rings) else { break };
            debug!(disk = self.export.disk().name(), ?seen, ?action, "xenbus");
            match action {
                Action::Forget => return Ok(Some(Ended::Removed)),
                Action::Offer => self.offer(seen.back)?,
                Action::Switch(state) => self.say(&[], seen.back, state)?,
                Action::Connect => self.connect_or_close(seen.back, false)?,
                Action::Adopt => self.connect_or_close(seen.back, true)?,
                Action::Disconnect => {
                    if let Err(refusal) = self.disconnect(xenbus::has_gone(seen.front)) {
                        if let Some(pass) = self.export.limits().ended.pass() {
                            let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                            warn!(disk, suppressed, "disconnected: {refusal}");
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    fn saying(&self) -> Saying {
        let persistent = self.options.movement.offers_persistent();
        Saying {
            queues: self.export.options().queues,
            geometry: self.export.disk().geometry(),
            write_cache: self.export.may_write_back(),
            persistent,
            limits: GuestLimits::all(persistent),
        }
    }

    /// Says what is offered.
    fn offer(&mut self, from: State) -> Result<(), StoreError> {
        self.resizes_announced = self.export.resizes();
        let mut saying = self.saying();
        // Whoever asks for persistent grants by name gets them.
        let memory = match self.options.movement {
            Movement::Auto => keys::guest_memory(&mut self.store, self.at.domid)?,
            _ => None,
        };
        saying.limits = GuestLimits::bearable(saying.queues, saying.persistent, memory);
        if saying.limits != GuestLimits::all(saying.persistent) {
            if let Some(pass) = self.export.limits().offered.pass() {
                info!(
                    disk = self.export.disk().name(),
                    domain = self.at.domid,
                    memory_mib = memory.map(|bytes| bytes >> 20),
                    ring_pages_max = 1 << saying.limits.ring_order,
                    indirect_segments = saying.limits.indirect_segments,
                    persistent = saying.limits.persistent,
                    suppressed = pass.suppressed,
                    "less is offered than there is: the guest has not the memory for it"
                );
            }
        }
        let keys = saying.keys();
        self.say(&keys, from, State::InitWait)
    }

    /// Writes keys and the state at once; nothing if the toolstack has removed the disk meanwhile,
    /// because that would bring back a part of it, or has written a state that is not the one seen (`from`): it would
    /// wait in vain for a disk to go that it has told to. What it has written is seen by the next look.
    fn say(
        &mut self,
        keys: &[(&str, String)],
        from: State,
        state: State,
    ) -> Result<(), StoreError> {
        let back = &self.at.back;
        let at = format!("{back}/state");
        self.store.transaction(|store, tx| {
            let is = store.read(tx, &at)?.map_or(State::Unknown, |text| State::parse(&text));
            if is != from || store.read(tx, &format!("{back}/params"))?.is_none() {
                return Ok(());
            }
            for (key, value) in keys {
                store.write(tx, &format!("{back}/{key}"), value)?;
            }
            store.write(tx, &at, state.digit())
        })
    }

    /// Serves the front-end's rings. If that cannot be, the front-end is told to close, unless it has been
    /// served before: it would lose its disk for good, and whatever is missing may come. So may the end of what
    /// an earlier connection has in flight.
    fn connect_or_close(&mut self, from: State, adopt: bool) -> Result<(), Refusal> {
        let disk = self.export.disk().name();
        match self.take_rings(adopt) {
            Ok(keys) => {
                self.export.notice(Notice::Connected);
                if let Some(pass) = self.export.limits().connected.pass() {
                    info!(
                        disk,
                        domain = self.at.domid,
                        device = self.at.devid,
                        queues = keys.rings.len(),
                        ring_pages = 1 << keys.order,
                        abi = keys.abi.name(),
                        persistent = keys.persistent,
                        adopted = adopt,
                        suppressed = pass.suppressed,
                        "front-end connected"
                    );
                }
                // What was known when it was offered may have changed.
                Ok(self.tell_size(from, State::Connected)?)
            }
            Err(Refusal::Store(error) | Refusal::Keys(KeyError::Store(error)))
                if error.is_final() =>
            {
                Err(error.into())
            }
            Err(refusal) if adopt || matches!(refusal, Refusal::Fenced) => Err(refusal),
            Err(refusal) => {
                if let Some(pass) = self.export.limits().refused.pass() {
                    let (domain, suppressed) = (self.at.domid, pass.suppressed);
                    warn!(disk, domain, suppressed, "front-end refused: {refusal}");
                }
                let error = format!("error/{}/error", self.at.back);
                // Where the toolstack looks; best effort.
                let _ = self.store.write(Tx::NONE, &error, &format!("22 {refusal}"));
                Ok(self.say(&[], from, State::Closing)?)
            }
        }
    }

    /// Writes the size and the state at once: front-ends look at the size whenever the state is
    /// written, also if it is the same.
    fn tell_size(&mut self, from: State, state: State) -> Result<(), StoreError> {
        self.resizes_announced = self.export.resizes();
        let sectors = self.export.disk().geometry().sectors();
        self.say(&[("sectors", sectors.to_string())], from, state)
    }

    fn take_rings(&mut self, adopt: bool) -> Result<FrontKeys, Refusal> {
        if self.export.has_failed() {
            return Err(Refusal::Failed);
        }
        // A queue that is still with its worker has the ring and the record.
        if !self.export.is_clear() {
            return Err(Refusal::Fenced);
        }
        let mut saying = self.saying();
        if adopt {
            // As many as the predecessor had offered.
            saying.queues = u16::MAX;
        }
        let keys = FrontKeys::read(&mut self.store, &self.at.front, &self.at.back, &saying)?;
        self.make_queues(&keys, &saying, adopt)?;
        if let Err(refusal) = self.start_stopped() {
            let _ = if adopt { self.leave() } else { self.disconnect(false) };
            return Err(refusal);
        }
        Ok(keys)
    }
}

impl<H: Host> Drop for Session<'_, H> {
    fn drop(&mut self) {
        self.abandon();
        self.export.leave(&self.inbox);
    }
}

#[cfg(test)]
mod tests;
