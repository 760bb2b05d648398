//! How a worker begins and takes queues in, and whose memory they use.

use super::queue::WorkerQueue;
use super::{IMAGE_BELL, INBOX_BELL, Worker};
use crate::command::{Alarm, Inbox, NotAdded, QueueId, Raise};
use crate::cpu::GuestCalls;
use crate::memory::SharedMemory;
use crate::pinned::Pinned;
use crate::polling::{Idle, Spins};
use crate::pool::WorkerOptions;
use crate::queue::{Broken, QueueLifecycle};
use crate::queue_commands::QueueCommands;
use crate::sampler::Sampler;
use crate::small_counts::SmallCounts;
use crate::stats::WorkerStats;
use ringway_aio::{Engine, Reaped};
use ringway_core::mem::poison_epoch;
use ringway_disk::{DiskQueue, ImageClient, Places};
use std::io;
use std::time::Instant;

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// A worker without queues.
    ///
    /// # Errors
    /// What the host says to listening to the inbox.
    pub fn new(mut engine: E, inbox: Inbox<Q>, options: &WorkerOptions) -> io::Result<Self> {
        engine.watch(INBOX_BELL, inbox.doorbell())?;
        let limits = engine.limits().clone();
        let (depth, port) = (limits.depth as usize, limits.commands.filter(|_| Q::HAS_COMMANDS));
        Ok(Self {
            engine,
            queues: Vec::new(),
            active: Vec::with_capacity(64),
            waiting: Vec::new(),
            taken_in: 0,
            known: Vec::new(),
            places: Places::new(limits.depth),
            inbox,
            reaped: Reaped::with_capacity(depth, 256)
                .with_commands(port.map_or(0, |port| port.depth as usize)),
            idle: Idle::new(options.polling),
            unsubmitted: false,
            pinned: options.pin_memory.then(Pinned::default),
            sample_latency: options.sample_latency,
            turns: 0,
            unlooked: 0,
            spins: Spins::default(),
            guest_calls: GuestCalls::default(),
            begun: Instant::now(),
            poison_seen: poison_epoch(),
            stats: WorkerStats::default(),
            batches: SmallCounts::default(),
            harvests: SmallCounts::default(),
            exit: false,
            rouse: None,
            requests_looked: 0,
        })
    }

    #[cold]
    pub(super) fn add(
        &mut self,
        ring: Q,
        disk: std::sync::Arc<ringway_disk::Disk>,
        client: Option<ImageClient>,
        durable: bool,
        alarm: Raise,
    ) -> Result<QueueId, NotAdded<Q>> {
        let at = self.queues.iter().position(Option::is_none).unwrap_or(self.queues.len());
        let (id, mut disk, commands) = match self.prepare(at, &ring, disk, client, durable) {
            Ok(prepared) => prepared,
            Err(error) => return Err(NotAdded { error, ring: Some(ring) }),
        };
        disk.take_places_of(self.places.share(disk.disk()));
        self.knows(disk.disk());
        self.queues.resize_with(self.queues.len().max(at + 1), || None);
        self.make_room();
        let name = QueueId { place: id, number: self.taken_in };
        self.taken_in += 1;
        let sampler = Sampler::new(self.sample_latency);
        let mut queue = WorkerQueue::new(name, ring, disk, alarm, sampler);
        queue.commands = commands;
        queue.adopt_limits();
        self.queues[at] = Some(queue);
        self.name_memory();
        self.rouse();
        // Requests may have been there before the doorbell was watched.
        self.activate(id);
        // And its memory may have vanished while the control plane held it.
        self.check_memory();
        Ok(name)
    }

    /// Makes a queue's hand on its disk, and listens for it; nothing is left of that if it fails.
    #[cold]
    fn prepare(
        &mut self,
        at: usize,
        ring: &Q,
        disk: std::sync::Arc<ringway_disk::Disk>,
        client: Option<ImageClient>,
        durable: bool,
    ) -> io::Result<(u32, DiskQueue<Q::Token>, QueueCommands)> {
        let id = u32::try_from(at).map_err(io::Error::other)?;
        let file = disk.attach(&mut self.engine)?;
        let limits = self.engine.limits().clone();
        let mut disk = DiskQueue::new(disk, &limits, file, u64::from(id) << 16, ring.depth())
            .inspect_err(|_| self.engine.detach(file))?;
        disk.set_durable_writes(durable);
        disk.set_peer_may_vanish(ring.peer_may_vanish());
        disk.wake_by(self.inbox.ringer());
        disk.watch_memory(ring.shared_memory().and_then(SharedMemory::watcher));
        let listening = client
            .map_or(Ok(()), |client| disk.attach_image(&mut self.engine, client, IMAGE_BELL | id))
            .and_then(|()| self.listen(id, ring));
        let commands = match listening {
            Ok(commands) => commands,
            Err(error) => {
                disk.detach_image(&mut self.engine, IMAGE_BELL | id);
                self.engine.detach(file);
                return Err(error);
            }
        };
        Ok((id, disk, commands))
    }

    /// Listens to whatever brings the requests of a queue: its doorbell, and commands if it has some.
    #[cold]
    fn listen(&mut self, id: u32, ring: &Q) -> io::Result<QueueCommands> {
        let commands =
            if Q::HAS_COMMANDS { self.attach_commands(ring)? } else { QueueCommands::default() };
        self.engine
            .watch(id + 1, ring.doorbell())
            .inspect_err(|_| self.detach_commands(&commands))?;
        Ok(commands)
    }

    /// All of them may be active, and all bells ring: an engine may look twice before it tells.
    #[cold]
    fn make_room(&mut self) {
        let (queues, bells) = (self.queues.len(), 1 + 2 * self.queues.len());
        self.active.reserve(queues.saturating_sub(self.active.len()));
        self.reaped.rung.reserve((2 * bells).saturating_sub(self.reaped.rung.len()));
    }

    /// Tells the engine which guests' memory the present queues use, if it is to be pinned.
    #[cold]
    pub(super) fn name_memory(&mut self) {
        if let Some(pinned) = &mut self.pinned {
            let memory =
                self.queues.iter().flatten().filter_map(|queue| queue.ring.shared_memory());
            let maps = memory.map(SharedMemory::map);
            pinned.update(&mut self.engine, maps);
        }
    }

    /// Some peer cut its memory short: find out whose queue it was.
    #[cold]
    pub(super) fn check_memory(&mut self) {
        self.poison_seen = poison_epoch();
        for queue in self.queues.iter_mut().flatten() {
            if queue.ring.shared_memory().is_some_and(SharedMemory::is_lost) {
                // Told even if the queue was broken before: the whole connection must go.
                queue.state = queue.state.broken();
                (queue.alarm)(Alarm::Broken(Broken::MemoryGone));
            }
        }
    }
}
