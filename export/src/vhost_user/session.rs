//! One connection of a vhost-user front-end: an explicit state machine over its messages.
//!
//! Any message may come at any time. A message whose form is wrong ends the connection. One that
//! makes no sense now is answered with a failure if an answer was asked for (REPLY_ACK) and ends
//! the connection otherwise, because the front-end would go on under a wrong belief.

use super::memory::{self, MemoryError};
use super::message::{CONFIG_BYTES_MAX, Channel, Event, Message, MessageError, VRING_NO_FD};
use super::queue::Queue;
use super::vring::{StartError, UserAddresses, Vring};
use crate::command::Stopped;
use crate::export::Export;
use crate::ring_bell::ring_bell;
use ringway_core::mem::GuestMap;
use ringway_disk::DiskStats;
use ringway_ring::virtio_blk::{
    VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_F_RING_PACKED, VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_RING_F_INDIRECT_DESC, WRITEBACK_OFFSET,
};
use ringway_ring::virtqueue::{
    Broken, Format, LayoutError, PackedBase, check_packed_size, check_size,
};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};

/// How often to say that a disk keeps a stopping queue waiting.
const DRAIN_REPORT: Duration = Duration::from_secs(5);

/// A queue that a worker will give back.
type Promise = Receiver<Stopped<Queue>>;

/// How often to look whether requests are bounced, until that was told.
const BOUNCE_CHECK: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Refused messages that are logged, of one connection.
const REFUSALS_TOLD: u32 = 10;
/// Refused messages after which a connection ends.
const REFUSALS_MAX: u32 = 1000;

/// The transport's own feature bit: there are protocol features to negotiate.
const F_PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// What this back-end offers of the protocol.
const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::RESET_DEVICE);

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The front-end closed it, or broke the protocol: another one may connect.
    ByPeer,
    /// The daemon was told to stop.
    ByOrder,
}

/// Why a message was refused, with the connection still in a known state.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("message {0} is not one this back-end offers")]
    NotOffered(u32),
    #[error("features {0:#x} were never offered")]
    Features(u64),
    #[error("there is no queue {0}")]
    NoSuchQueue(u32),
    #[error("queue {0} is running; stop it first")]
    Running(usize),
    #[error(transparent)]
    QueueSize(#[from] LayoutError),
    #[error("queue size {0} is above the {1} offered")]
    QueueTooLarge(u16, u16),
    #[error("a queue without a kick descriptor would have to be polled for ever")]
    NoKick,
    #[error("the {0} descriptor is not an eventfd")]
    NotAnEventfd(&'static str),
    #[error("configuration space: {0} bytes at {1} can not be accessed like this")]
    Config(u32, u32),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("queue {0} cannot start: {1}")]
    Start(usize, StartError),
    #[error("queue {0}: the disk does not finish what is in flight")]
    Stuck(usize),
    #[error("requests of an earlier connection are still in flight: their writes could land later")]
    Fenced,
    #[error("a worker ended: {0}")]
    Worker(io::Error),
}

/// What an accepted message is answered with.
enum Answer {
    /// Nothing, or an acknowledgement if one was asked for.
    Ack,
    /// This.
    Reply(Vec<u8>),
}

impl Answer {
    fn u64(value: u64) -> Self {
        Self::Reply(value.to_ne_bytes().to_vec())
    }
}

/// Queues that a guest has broken, told by workers.
#[derive(Debug)]
struct Alarms {
    bell: OwnedFd,
    raised: Mutex<Vec<(usize, Broken)>>,
}

/// One connection.
pub struct Session<'a> {
    export: &'a Export,
    channel: Channel,
    stop: BorrowedFd<'a>,
    features: u64,
    protocol: Protocol,
    writeback: bool,
    map: Arc<GuestMap>,
    vrings: Vec<Vring>,
    alarms: Arc<Alarms>,
    backend_channel: Option<UnixStream>,
    /// Counts of queues that were stopped.
    stopped_stats: DiskStats,
    bounce_told: bool,
    refusals: u32,
    /// A disk kept a queue from stopping: the connection has to end.
    stuck: bool,
}

impl<'a> Session<'a> {
    /// A session on a fresh connection. It ends when `stop` becomes readable.
    ///
    /// # Errors
    /// What the host says to the socket or an eventfd.
    pub fn new(export: &'a Export, socket: UnixStream, stop: BorrowedFd<'a>) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            export,
            channel: Channel::new(socket)?,
            stop,
            features: 0,
            protocol: Protocol::empty(),
            writeback: export.may_write_back(),
            map: Arc::new(GuestMap::default()),
            vrings: fresh_vrings(export),
            alarms: Arc::new(Alarms { bell, raised: Mutex::new(Vec::new()) }),
            backend_channel: None,
            stopped_stats: DiskStats::default(),
            bounce_told: false,
            refusals: 0,
            stuck: false,
        })
    }

    /// Serves the connection until it ends; all queues are drained and stopped then.
    pub fn run(mut self) -> Ended {
        let disk = self.export.disk().name();
        let ended = match self.serve() {
            Err(MessageError::Closed) => {
                info!(disk, "front-end disconnected");
                Ended::ByPeer
            }
            Err(MessageError::Stopped) => Ended::ByOrder,
            Err(error) => {
                warn!(disk, "connection ended: {error}");
                Ended::ByPeer
            }
            Ok(()) => Ended::ByPeer,
        };
        if let Err(error) = self.stop_all() {
            warn!(disk, "could not stop all queues: {error}");
        }
        self.tell_of_bounces();
        ended
    }

    fn serve(&mut self) -> Result<(), MessageError> {
        loop {
            let patience = (!self.bounce_told).then_some(&BOUNCE_CHECK);
            match self.channel.wait(self.stop, self.alarms.bell.as_fd(), patience)? {
                Event::Silence => self.tell_of_bounces(),
                Event::Stop => return Err(MessageError::Stopped),
                Event::Alarm => {
                    if self.hear_alarms() {
                        return Ok(());
                    }
                }
                Event::Message => {
                    let message = self.channel.receive(self.stop)?;
                    if !self.take(message)? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Tells of queues that their guest has broken. True if the connection must end.
    fn hear_alarms(&mut self) -> bool {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.alarms.bell, &mut counter);
        let raised =
            std::mem::take(&mut *self.alarms.raised.lock().unwrap_or_else(|e| e.into_inner()));
        let mut fatal = false;
        for (index, broken) in raised {
            warn!(disk = self.export.disk().name(), queue = index, "queue stopped: {broken}");
            if let Some(err) = self.vrings.get(index).and_then(|vring| vring.err.as_ref()) {
                // Best effort: the front-end may not listen.
                let _ = ring_bell(err);
            }
            fatal |= broken == Broken::MemoryGone;
        }
        // Vanished memory may show as a broken queue first.
        fatal || self.map.is_poisoned()
    }

    /// Says once, with the counts, that requests of this guest do not go the straight way.
    fn tell_of_bounces(&mut self) {
        let mut stats = self.stopped_stats;
        for (at, vring) in self.vrings.iter().enumerate() {
            // A worker that has ended has told why in the log.
            if let Some(Ok(lane)) = vring.lane.map(|lane| self.export.worker(at).lane_stats(lane)) {
                stats.add(&lane);
            }
        }
        if self.bounce_told || stats.bounced + stats.split == 0 {
            return;
        }
        self.bounce_told = true;
        let alignment = self.export.disk().alignment();
        warn!(
            disk = self.export.disk().name(),
            bounced = stats.bounced,
            split = stats.split,
            requests = stats.reads + stats.writes,
            "requests are bounced or split: the file takes memory aligned to {} and offsets aligned \
             to {} bytes; a guest with block size 4096, or --cache writeback, avoids the copies",
            alignment.memory,
            alignment.offset
        );
    }

    /// Carries out one message and answers it. False if the connection must end.
    fn take(&mut self, mut message: Message) -> Result<bool, MessageError> {
        debug!(code = message.code, name = ?message.request, "message");
        let code = message.code;
        let wants_ack = message.need_reply && self.protocol.contains(Protocol::REPLY_ACK);
        match self.obey(&mut message) {
            Ok(Answer::Reply(payload)) => self.channel.reply(code, &payload, self.stop)?,
            Ok(Answer::Ack) if wants_ack => {
                self.channel.reply(code, &0u64.to_ne_bytes(), self.stop)?;
            }
            Ok(Answer::Ack) => {}
            Err(refusal) => {
                self.refusals += 1;
                if self.refusals <= REFUSALS_TOLD {
                    warn!(disk = self.export.disk().name(), request = ?message.request, "refused: {refusal}");
                }
                if self.refusals == REFUSALS_MAX {
                    warn!(
                        disk = self.export.disk().name(),
                        "{REFUSALS_MAX} messages refused: enough"
                    );
                    return Ok(false);
                }
                // The answer to GET_VRING_BASE has the same form as a refusal: no refusal then.
                if !wants_ack || self.stuck || message.request == Some(FrontendReq::GET_VRING_BASE)
                {
                    return Ok(false);
                }
                self.channel.reply(code, &1u64.to_ne_bytes(), self.stop)?;
            }
        }
        Ok(true)
    }

    fn obey(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        use FrontendReq as R;
        let Some(request) = message.request else {
            return Err(Refusal::NotOffered(message.code));
        };
        match request {
            R::GET_FEATURES => Ok(Answer::u64(self.export.features() | F_PROTOCOL_FEATURES)),
            R::SET_FEATURES => self.set_features(message.u64(0)),
            R::GET_PROTOCOL_FEATURES => Ok(Answer::u64(PROTOCOL.bits())),
            R::SET_PROTOCOL_FEATURES => self.set_protocol_features(message.u64(0)),
            R::SET_OWNER | R::RESET_OWNER => Ok(Answer::Ack),
            R::GET_QUEUE_NUM => Ok(Answer::u64(self.vrings.len() as u64)),
            R::GET_MAX_MEM_SLOTS => Ok(Answer::u64(memory::SLOTS_MAX as u64)),
            R::SET_MEM_TABLE => {
                let map = memory::table(message)?;
                self.change_memory(map)
            }
            R::ADD_MEM_REG => {
                let map = memory::with_region(&self.map, message)?;
                self.change_memory(map)
            }
            R::REM_MEM_REG => {
                let map = memory::without_region(&self.map, message)?;
                self.change_memory(map)
            }
            R::SET_VRING_NUM => self.set_vring_num(message.u32(0), message.u32(4)),
            R::SET_VRING_ADDR => self.set_vring_addr(message),
            R::SET_VRING_BASE => self.set_vring_base(message.u32(0), message.u32(4)),
            R::GET_VRING_BASE => self.get_vring_base(message.u32(0)),
            R::SET_VRING_KICK => self.set_vring_kick(message),
            R::SET_VRING_CALL => self.set_vring_call(message),
            R::SET_VRING_ERR => self.set_vring_err(message),
            R::SET_VRING_ENABLE => self.set_vring_enable(message.u32(0), message.u32(4)),
            R::GET_CONFIG => Ok(self.get_config(message)),
            R::SET_CONFIG => self.set_config(message),
            R::SET_BACKEND_REQ_FD => {
                self.backend_channel = message.take_fd().map(UnixStream::from);
                Ok(Answer::Ack)
            }
            R::RESET_DEVICE => self.reset_device(),
            _ => Err(Refusal::NotOffered(message.code)),
        }
    }

    // ---- features ----

    fn set_features(&mut self, features: u64) -> Result<Answer, Refusal> {
        let unknown = features & !(self.export.features() | F_PROTOCOL_FEATURES);
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        if features != self.features
            && let Some(running) = self.vrings.iter().position(Vring::is_running)
        {
            return Err(Refusal::Running(running));
        }
        self.features = features;
        // Without protocol features there is no SET_VRING_ENABLE: queues are enabled by the start.
        if features & F_PROTOCOL_FEATURES == 0 {
            for vring in &mut self.vrings {
                vring.enabled = true;
            }
        }
        self.start_ready()
    }

    fn has(&self, bit: u32) -> bool {
        self.features & (1 << bit) != 0
    }

    /// VIRTIO 1.2 §5.2.6.2: without a write cache, or without a way to flush it, every write is
    /// durable before it completes.
    fn durable_writes(&self) -> bool {
        !self.export.may_write_back()
            || !self.has(VIRTIO_BLK_F_FLUSH)
            || (self.has(VIRTIO_BLK_F_CONFIG_WCE) && !self.writeback)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<Answer, Refusal> {
        let unknown = features & !PROTOCOL.bits();
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        self.protocol = Protocol::from_bits_truncate(features);
        Ok(Answer::Ack)
    }

    // ---- memory ----

    /// Drain, swap, resume.
    fn change_memory(&mut self, map: GuestMap) -> Result<Answer, Refusal> {
        self.stop_all()?;
        self.map = Arc::new(map);
        self.start_ready()
    }

    // ---- queues ----

    fn vring(&mut self, index: u32) -> Result<(usize, &mut Vring), Refusal> {
        let at = index as usize;
        match self.vrings.get_mut(at) {
            Some(vring) => Ok((at, vring)),
            None => Err(Refusal::NoSuchQueue(index)),
        }
    }

    fn stopped_vring(&mut self, index: u32) -> Result<&mut Vring, Refusal> {
        let (at, vring) = self.vring(index)?;
        if vring.is_running() { Err(Refusal::Running(at)) } else { Ok(vring) }
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<Answer, Refusal> {
        let max = self.export.options().queue_size;
        let packed = self.has(VIRTIO_F_RING_PACKED);
        let vring = self.stopped_vring(index)?;
        let size = if packed { check_packed_size(size)? } else { check_size(size)? };
        if size > max {
            return Err(Refusal::QueueTooLarge(size, max));
        }
        vring.size = size;
        self.start_ready()
    }

    fn set_vring_addr(&mut self, message: &Message) -> Result<Answer, Refusal> {
        // struct vhost_vring_addr: index, flags, descriptor, used, available, log.
        let addresses =
            UserAddresses { desc: message.u64(8), used: message.u64(16), avail: message.u64(24) };
        let (at, vring) = self.vring(message.u32(0))?;
        if vring.is_running() && vring.addresses != Some(addresses) {
            return Err(Refusal::Running(at));
        }
        vring.addresses = Some(addresses);
        self.start_ready()
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<Answer, Refusal> {
        let packed = self.has(VIRTIO_F_RING_PACKED);
        let vring = self.stopped_vring(index)?;
        if !packed && base > u32::from(u16::MAX) {
            return Err(LayoutError::SplitBase(base).into());
        }
        // Whether a packed ring can be there is judged when it starts and its size is known.
        vring.base = Some(base);
        Ok(Answer::Ack)
    }

    /// Stops the queue: after the answer no byte of guest memory is written on its behalf.
    fn get_vring_base(&mut self, index: u32) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(index)?;
        self.stop_some(|i| i == at)?;
        let start = if self.has(VIRTIO_F_RING_PACKED) { PackedBase::START.0 } else { 0 };
        let vring = &mut self.vrings[at];
        // It starts again with a new kick descriptor.
        vring.kick = None;
        let mut payload = index.to_ne_bytes().to_vec();
        payload.extend_from_slice(&vring.base.unwrap_or(start).to_ne_bytes());
        Ok(Answer::Reply(payload))
    }

    fn set_vring_kick(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(vring_index(message))?;
        let kick = message.take_fd().ok_or(Refusal::NoKick)?;
        check_eventfd(&kick, "kick")?;
        self.stop_some(|i| i == at)?;
        self.vrings[at].kick = Some(kick);
        self.start_ready()
    }

    fn set_vring_call(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let (at, _) = self.vring(vring_index(message))?;
        let call = message.take_fd();
        if let Some(call) = &call {
            check_eventfd(call, "call")?;
        }
        // QEMU changes this while the queue runs, whenever the guest masks an interrupt.
        match self.vrings[at].lane {
            Some(lane) => self
                .export
                .worker(at)
                .edit(lane, move |queue| queue.set_call(call))
                .map_err(Refusal::Worker)?,
            None => self.vrings[at].call = call,
        }
        Ok(Answer::Ack)
    }

    fn set_vring_err(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        let index = vring_index(message);
        let err = message.take_fd();
        if let Some(err) = &err {
            check_eventfd(err, "error")?;
        }
        self.vring(index)?.1.err = err;
        Ok(Answer::Ack)
    }

    fn set_vring_enable(&mut self, index: u32, enable: u32) -> Result<Answer, Refusal> {
        let (at, vring) = self.vring(index)?;
        vring.enabled = enable != 0;
        if enable == 0 {
            self.stop_some(|i| i == at)?;
        }
        self.start_ready()
    }

    /// What was negotiated about queues.
    fn format(&self, size: u16) -> Format {
        Format {
            packed: self.has(VIRTIO_F_RING_PACKED),
            size,
            event_idx: self.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: self.has(VIRTIO_RING_F_INDIRECT_DESC),
        }
    }

    /// Starts every queue that has all it needs.
    fn start_ready(&mut self) -> Result<Answer, Refusal> {
        let durable = self.durable_writes();
        for at in 0..self.vrings.len() {
            if !self.vrings[at].is_ready() || self.map.regions().is_empty() {
                continue;
            }
            if !self.export.is_clear() {
                return Err(Refusal::Fenced);
            }
            let format = self.format(self.vrings[at].size);
            let queue = self.vrings[at]
                .make_queue(&self.map, format)
                .map_err(|error| Refusal::Start(at, error))?;
            let alarms = Arc::clone(&self.alarms);
            let alarm = Box::new(move |broken| alarms.raise(at, broken));
            let disk = Arc::clone(self.export.disk());
            let lane = self
                .export
                .worker(at)
                .add(queue, disk, durable, alarm)
                .map_err(|error| Refusal::Start(at, StartError::Worker(error)))?;
            self.vrings[at].lane = Some(lane);
            debug!(disk = self.export.disk().name(), queue = at, "queue started");
        }
        Ok(Answer::Ack)
    }

    fn stop_all(&mut self) -> Result<(), Refusal> {
        self.stop_some(|_| true)
    }

    /// Stops queues, all at once, and waits until nothing of theirs is in flight.
    fn stop_some(&mut self, which: impl Fn(usize) -> bool) -> Result<(), Refusal> {
        let mut stopping = Vec::new();
        for (at, vring) in self.vrings.iter().enumerate() {
            if let Some(lane) = vring.lane.filter(|_| which(at)) {
                let promise = self.export.worker(at).stop(lane).map_err(Refusal::Worker)?;
                stopping.push((at, promise));
            }
        }
        let begun = Instant::now();
        let mut stopping = stopping.into_iter();
        while let Some((at, promise)) = stopping.next() {
            let stopped = loop {
                let left = self.export.drain_max().saturating_sub(begun.elapsed());
                match promise.recv_timeout(left.min(DRAIN_REPORT)) {
                    Ok(stopped) => break stopped,
                    Err(RecvTimeoutError::Timeout) if begun.elapsed() < self.export.drain_max() => {
                        warn!(
                            disk = self.export.disk().name(),
                            queue = at,
                            "still waiting for the disk to finish what is in flight"
                        );
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        let rest = std::iter::once((at, promise)).chain(stopping);
                        self.abandon_queues(rest.collect());
                        return Err(Refusal::Stuck(at));
                    }
                    Err(gone) => return Err(Refusal::Worker(io::Error::other(gone))),
                }
            };
            self.stopped_stats.add(&stopped.stats);
            self.vrings[at].take_back(stopped.ring);
            debug!(disk = self.export.disk().name(), queue = at, "queue stopped");
        }
        Ok(())
    }

    /// Leaves queues to their workers, which keep them and their memory until the disk answers: the
    /// connection ends, and no other one starts before that.
    fn abandon_queues(&mut self, stopping: Vec<(usize, Promise)>) {
        let mut promises = Vec::new();
        for (at, promise) in stopping {
            self.vrings[at].lane = None;
            promises.push(promise);
        }
        for (at, vring) in self.vrings.iter_mut().enumerate() {
            if let Some(lane) = vring.lane.take() {
                // A worker that has ended serves nothing any more.
                promises.extend(self.export.worker(at).stop(lane));
            }
        }
        self.export.fence(promises);
        self.vrings = fresh_vrings(self.export);
        self.stuck = true;
    }

    fn reset_device(&mut self) -> Result<Answer, Refusal> {
        self.stop_all()?;
        self.vrings = fresh_vrings(self.export);
        self.features = 0;
        self.writeback = self.export.may_write_back();
        Ok(Answer::Ack)
    }

    // ---- configuration space ----

    /// An empty answer says that there is no such part (vhost-user, GET_CONFIG).
    fn get_config(&self, message: &Message) -> Answer {
        let (offset, size) = (message.u32(0), message.u32(4));
        let Ok(range) = config_range(offset, size) else { return Answer::Reply(Vec::new()) };
        let mut space = [0; CONFIG_BYTES_MAX];
        let config = self.export.config(self.writeback).to_bytes();
        space[..config.len()].copy_from_slice(&config);
        let mut payload = message.payload()[..12].to_vec();
        payload.extend_from_slice(&space[range]);
        Answer::Reply(payload)
    }

    /// Only `writeback` can be written, with CONFIG_WCE.
    fn set_config(&mut self, message: &Message) -> Result<Answer, Refusal> {
        let (offset, size) = (message.u32(0), message.u32(4));
        let range = config_range(offset, size)?;
        if range != (WRITEBACK_OFFSET..WRITEBACK_OFFSET + 1) || !self.has(VIRTIO_BLK_F_CONFIG_WCE) {
            return Err(Refusal::Config(size, offset));
        }
        self.writeback = message.payload()[12] != 0 && self.export.may_write_back();
        let durable = self.durable_writes();
        for (at, vring) in self.vrings.iter().enumerate() {
            if let Some(lane) = vring.lane {
                self.export.worker(at).set_durable(lane, durable).map_err(Refusal::Worker)?;
            }
        }
        Ok(Answer::Ack)
    }
}

impl Alarms {
    fn raise(&self, queue: usize, broken: Broken) {
        self.raised.lock().unwrap_or_else(|e| e.into_inner()).push((queue, broken));
        // A full counter rings too.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

fn fresh_vrings(export: &Export) -> Vec<Vring> {
    (0..export.options().queues).map(|_| Vring::default()).collect()
}

/// The queue index of SET_VRING_KICK, CALL and ERR: the low eight bits.
fn vring_index(message: &Message) -> u32 {
    // Masked to eight bits.
    #[allow(clippy::cast_possible_truncation)]
    let index = (message.u64(0) & (VRING_NO_FD - 1)) as u32;
    index
}

fn config_range(offset: u32, size: u32) -> Result<std::ops::Range<usize>, Refusal> {
    let (start, len) = (offset as usize, size as usize);
    match start.checked_add(len) {
        Some(end) if end <= CONFIG_BYTES_MAX && len > 0 => Ok(start..end),
        _ => Err(Refusal::Config(size, offset)),
    }
}

/// Notifications write and poll these descriptors from worker threads, so anything that could
/// block or behave otherwise is refused, and the descriptor made non-blocking.
fn check_eventfd(fd: &OwnedFd, name: &'static str) -> Result<(), Refusal> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    if !link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]") {
        return Err(Refusal::NotAnEventfd(name));
    }
    rustix::io::ioctl_fionbio(fd, true).map_err(|_| Refusal::NotAnEventfd(name))
}
