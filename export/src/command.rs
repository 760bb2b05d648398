//! What the control plane asks of a worker, and how it gets there.

use crate::queue::{Broken, QueueLifecycle};
pub use crate::queue_id::QueueId;
use crate::stats::WorkerStats;
use crate::totals::QueueTotals;
use ringway_core::mem::HostRange;
use ringway_disk::{Disk, DiskStats, ImageClient, Overdue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::Pid;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// A queue that was taken off its worker: nothing is in flight, nothing will be written.
#[derive(Debug)]
pub struct Stopped<Q> {
    /// The ring, as far as it got.
    pub ring: Q,
    /// What it had counted.
    pub stats: DiskStats,
    /// The same beside requests.
    pub totals: QueueTotals,
}

/// Why a worker does not serve a queue.
pub struct NotAdded<Q> {
    /// What the host says, or that the worker has ended.
    pub error: io::Error,
    /// The queue as it was, unless it has gone with its worker.
    pub ring: Option<Q>,
}

// Written by hand: a queue need not say what it is.
impl<Q> std::fmt::Debug for NotAdded<Q> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

/// What a look has found in one queue.
#[derive(Clone, Debug)]
pub struct QueueFindings {
    /// The disk it belongs to.
    pub disk: Arc<Disk>,
    /// Its requests that are in flight for too long.
    pub overdue: Overdue,
    /// Kicks that were found lost.
    pub lost_kicks: u64,
}

/// What a look has found on one worker.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Its queues.
    pub queues: Vec<QueueFindings>,
    /// Nothing is in flight, and nothing was asked for since the look before: the worker calls whoever
    /// looked as soon as that changes.
    pub quiet: bool,
    /// The thread of the worker.
    pub thread: Option<Pid>,
}

/// How a worker calls whoever found it quiet. It must not block.
pub type Rouse = Arc<dyn Fn() + Send + Sync>;

/// What a worker tells a session about one of its queues.
#[derive(Debug)]
pub enum Alarm {
    /// The guest broke it.
    Broken(Broken),
    /// The worker ends because its engine failed or it panicked: nothing of the queue will be
    /// answered any more.
    WorkerFailed,
}

/// How a worker raises an alarm. It must not block.
pub type Raise = Box<dyn Fn(Alarm) + Send>;

/// What a worker can be asked for, between turns.
pub(crate) enum Command<Q> {
    /// Serve a queue.
    Add {
        ring: Q,
        disk: Arc<Disk>,
        /// To the disk's image, if that has a map.
        client: Option<ImageClient>,
        durable: bool,
        alarm: Raise,
        reply: SyncSender<Result<QueueId, NotAdded<Q>>>,
    },
    /// Take no more requests from a queue; answer once nothing is in flight.
    Stop { id: QueueId, reply: SyncSender<Stopped<Q>> },
    /// Answer once nothing of `disk` is in flight beyond `end` bytes; new requests are taken.
    Settle { disk: Arc<Disk>, end: u64, reply: SyncSender<()> },
    /// Answer once no request of a queue is in flight that uses memory in one of these ranges; new
    /// requests are taken.
    Unused { id: QueueId, ranges: Vec<HostRange>, reply: SyncSender<()> },
    /// Make durable what this worker's engine has answered of `disk`.
    Flush { disk: Arc<Disk>, reply: SyncSender<io::Result<()>> },
    /// Try held requests of `disk` again, or have them fail; the reply says how many.
    Retry { disk: Arc<Disk>, fail: bool, reply: SyncSender<usize> },
    /// Change something about a ring, for example whom to call.
    Edit { id: QueueId, edit: Box<dyn FnOnce(&mut Q) + Send>, reply: SyncSender<()> },
    /// Whether writes must be durable before they complete.
    SetDurable { id: QueueId, durable: bool, reply: SyncSender<()> },
    /// Take over the limits of a disk, which have changed.
    AdoptLimits { disk: Arc<Disk>, reply: SyncSender<()> },
    /// Report on one queue.
    QueueStats { id: QueueId, reply: SyncSender<DiskStats> },
    /// Report, with the spreads of latencies if asked for: they are large.
    Stats { spreads: bool, reply: SyncSender<WorkerStats> },
    /// Look for requests that are overdue and kicks that were lost.
    Inspect { now_ns: u64, limit_ns: u64, rouse: Option<Rouse>, reply: SyncSender<Findings> },
    /// Leave the loop.
    Exit,
}

/// Looked at by its worker in every turn. On lines of its own (two, because neighbouring lines are
/// fetched in pairs), so that nothing that others write comes with it (ADR 0010).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Pending(AtomicBool);

const _: () = assert!(size_of::<Pending>() == 128 && align_of::<Pending>() == 128);

/// A worker's end of its command channel.
pub struct Inbox<Q> {
    commands: Receiver<Command<Q>>,
    pending: Arc<Pending>,
    bell: Arc<OwnedFd>,
}

/// The other end: how the control plane talks to a worker.
pub struct Handle<Q> {
    commands: Sender<Command<Q>>,
    pending: Arc<Pending>,
    bell: Arc<OwnedFd>,
}

// Written by hand: a handle can be copied whatever Q is.
impl<Q> Clone for Handle<Q> {
    fn clone(&self) -> Self {
        Self {
            commands: self.commands.clone(),
            pending: Arc::clone(&self.pending),
            bell: Arc::clone(&self.bell),
        }
    }
}

/// A new command channel.
///
/// # Errors
/// What the host says to an eventfd.
pub fn command_channel<Q>() -> io::Result<(Handle<Q>, Inbox<Q>)> {
    let (sender, receiver) = channel();
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let pending = Arc::new(Pending::default());
    let handle =
        Handle { commands: sender, pending: Arc::clone(&pending), bell: Arc::clone(&bell) };
    Ok((handle, Inbox { commands: receiver, pending, bell }))
}

impl<Q> Inbox<Q> {
    pub(crate) fn doorbell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// Has the worker wake and take a turn, from any thread.
    pub(crate) fn ringer(&self) -> impl Fn() + Send + Sync + use<Q> + 'static {
        let (pending, bell) = (Arc::clone(&self.pending), Arc::clone(&self.bell));
        move || {
            // A bell that is heard after this turn's look at the queues is not slept over.
            pending.0.store(true, SeqCst);
            // It counts, and cannot be full.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
    }

    /// One load: cheap enough for every turn.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.0.load(SeqCst)
    }

    pub(crate) fn next(&self) -> Option<Command<Q>> {
        // First the mark, then the look: a command sent in between sets the mark again.
        self.pending.0.store(false, SeqCst);
        let command = self.commands.try_recv().ok();
        if command.is_some() {
            self.pending.0.store(true, SeqCst);
        }
        command
    }
}

impl<Q: QueueLifecycle> Handle<Q> {
    fn send(&self, command: Command<Q>) -> io::Result<()> {
        self.commands.send(command).map_err(|_| io::Error::other("the worker has ended"))?;
        self.pending.0.store(true, SeqCst);
        rustix::io::write(&*self.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command<Q>) -> io::Result<T> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| io::Error::other("the worker has ended"))
    }

    /// Hands a queue to the worker.
    ///
    /// # Errors
    /// [`NotAdded`], with the queue.
    pub fn add(
        &self,
        ring: Q,
        disk: Arc<Disk>,
        durable: bool,
        alarm: Raise,
    ) -> Result<QueueId, NotAdded<Q>> {
        // Here, because workers may not start threads themselves.
        let client = match disk.image_client(ring.depth()) {
            Ok(client) => client,
            Err(error) => return Err(NotAdded { error, ring: Some(ring) }),
        };
        let added = self.ask(|reply| Command::Add { ring, disk, client, durable, alarm, reply });
        added.unwrap_or_else(|error| Err(NotAdded { error, ring: None }))
    }

    /// Takes a queue off the worker. Returns a promise: the caller may wait for several.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn stop(&self, id: QueueId) -> io::Result<Receiver<Stopped<Q>>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Stop { id, reply })?;
        Ok(answer)
    }

    /// Asks to be told once no request of `disk` is in flight that reaches beyond `end` bytes. What
    /// was stored before this call is seen by every request taken after the promise was kept.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn settle(&self, disk: Arc<Disk>, end: u64) -> io::Result<Receiver<()>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Settle { disk, end, reply })?;
        Ok(answer)
    }

    /// Asks to be told once no request of the queue is in flight whose data or answer lies in one of
    /// these ranges of our memory.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn unused(&self, id: QueueId, ranges: Vec<HostRange>) -> io::Result<Receiver<()>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Unused { id, ranges, reply })?;
        Ok(answer)
    }

    /// Has the worker's engine make durable what it has answered of `disk`; nothing where the worker never had a
    /// queue of it. Returns a promise. Where the engine fails, the disk knows it before
    /// ([`Disk::flush_has_failed`]).
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn flush(&self, disk: Arc<Disk>) -> io::Result<Receiver<io::Result<()>>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Flush { disk, reply })?;
        Ok(answer)
    }

    /// Has held requests of `disk` tried again, or fail. Returns a promise of how many they are: the
    /// caller may ask several workers.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn retry(&self, disk: Arc<Disk>, fail: bool) -> io::Result<Receiver<usize>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Retry { disk, fail, reply })?;
        Ok(answer)
    }

    /// Changes something about a running queue's ring; returns once it is done, so that a client
    /// can have no more than one change under way.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn edit(&self, id: QueueId, edit: impl FnOnce(&mut Q) + Send + 'static) -> io::Result<()> {
        self.ask(|reply| Command::Edit { id, edit: Box::new(edit), reply })
    }

    /// Sets whether a queue's writes must be durable before they complete; returns once requests
    /// are taken in that way.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn set_durable(&self, id: QueueId, durable: bool) -> io::Result<()> {
        self.ask(|reply| Command::SetDurable { id, durable, reply })
    }

    /// Has the queues of `disk` take over its limits ([`Disk::limits`]). Returns a promise: the caller
    /// may tell several workers at once.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn adopt_limits(&self, disk: Arc<Disk>) -> io::Result<Receiver<()>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::AdoptLimits { disk, reply })?;
        Ok(answer)
    }

    /// Asks for one queue's counts.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn queue_stats(&self, id: QueueId) -> io::Result<DiskStats> {
        self.ask(|reply| Command::QueueStats { id, reply })
    }

    /// Asks for the worker's counts.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn stats(&self) -> io::Result<WorkerStats> {
        self.ask(|reply| Command::Stats { spreads: true, reply })
    }

    /// As [`Handle::stats`], as a promise: the caller may ask several workers at once. Without `spreads`
    /// no queue tells its latencies, which are most of what is copied.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn ask_stats(&self, spreads: bool) -> io::Result<Receiver<WorkerStats>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Stats { spreads, reply })?;
        Ok(answer)
    }

    /// Asks for a look at all queues: which requests are in flight for `limit_ns` or longer, by a
    /// clock that says `now_ns` now, and whether a ring holds requests of which no kick told. Those
    /// are taken. Best every second or so, see [`ringway_disk::DiskQueue::scan_overdue`], until it
    /// says that the worker is quiet: from then on `rouse` is called, once, when a request is taken or
    /// a queue added.
    ///
    /// # Errors
    /// That the worker has ended.
    pub fn ask_inspect(
        &self,
        now_ns: u64,
        limit_ns: u64,
        rouse: Option<Rouse>,
    ) -> io::Result<Receiver<Findings>> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Inspect { now_ns, limit_ns, rouse, reply })?;
        Ok(answer)
    }

    /// Tells the worker to end.
    ///
    /// # Errors
    /// That it has ended already.
    pub fn exit(&self) -> io::Result<()> {
        self.send(Command::Exit)
    }
}
