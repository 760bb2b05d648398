//! One connection of a vhost-user front-end: an explicit state machine over its messages.
//!
//! Any message may come at any time. A message whose form is wrong ends the connection. One that
//! makes no sense now is answered with a failure if an answer was asked for (REPLY_ACK) and ends
//! the connection otherwise, because the front-end would go on under a wrong belief.

mod config;
mod dirty_log;
mod features;
mod inbox;
mod inflight;
mod iommu;
mod queues;
mod turns;
mod write_cache;
mod write_cache_known;

use super::dirty_log::{LogArea, LogError};
use super::inflight::{Inflight, InflightRefusal};
use super::iommu::{Iommu, IommuError, is_invalidation};
use super::memory::{self, MemoryError};
use super::message::{Channel, Message, MessageError};
use super::start::StartError;
use super::vring::Vring;
use crate::Export;
use ringway_core::mem::{GuestMap, Quota};
use ringway_core::panic_point;
use ringway_disk::WithoutJournal;
use ringway_export::{LockWait, Notice, PeerEventfd, SessionInbox};
use ringway_ring::virtqueue::LayoutError;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, warn};
pub use turns::Wakes;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};
use write_cache_known::Known;

/// Refused messages after which a connection ends.
const REFUSALS_MAX: u32 = 1000;

/// The transport's own feature bit: there are protocol features to negotiate.
const F_PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// What this back-end offers of the protocol.
const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::LOG_SHMFD)
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::INFLIGHT_SHMFD);

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
    #[error(transparent)]
    Inflight(#[from] InflightRefusal),
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Iommu(#[from] IommuError),
    #[error("queue {0} cannot start: {1}")]
    Start(usize, StartError),
    #[error("queue {0}: the disk does not finish what is in flight")]
    Stuck(usize),
    #[error(
        "a worker of this disk has failed: what was in flight is not known, and nobody is served"
    )]
    Failed,
    #[error("a worker ended: {0}")]
    Worker(io::Error),
    #[error("the write cache is off, but what was written before cannot be made durable: {0}")]
    Sync(io::Error),
}

/// What an accepted message is answered with.
enum Answer {
    /// Nothing, or an acknowledgement if one was asked for.
    Ack,
    /// This.
    Reply(Vec<u8>),
    /// This, with a descriptor.
    ReplyWith(Vec<u8>, OwnedFd),
    /// Nothing yet: the message is carried out again once something has changed.
    Later,
}

impl Answer {
    fn u64(value: u64) -> Self {
        Self::Reply(value.to_ne_bytes().to_vec())
    }
}

/// One connection.
pub struct Session {
    export: Arc<Export>,
    channel: Channel,
    stop: Arc<OwnedFd>,
    features: u64,
    protocol: Protocol,
    /// Whether the guest's write cache is on; known beyond the connection by the export.
    writeback: bool,
    cache_known: Known,
    /// The front-end has read the configuration space, not because it was told of a change.
    has_asked: bool,
    /// A queue of this connection was used before it. Of all, and for good: what becomes of a guest that goes on, a
    /// reset of its device included, shows in no queue.
    goes_on: bool,
    /// Its guest was taken for one that begins, and a failed flush forgiven.
    forgave: bool,
    /// What is known of the write cache ends with the connection.
    forgets_cache: bool,
    /// The guest's write cache goes on once that was answered.
    switching_on: bool,
    /// The front-end was told of a change of the configuration space.
    announced: bool,
    map: Arc<GuestMap>,
    /// What it has mapped: guest memory, dirty log, record of what is in flight.
    quota: Arc<Quota>,
    /// Where to record what is in flight, if the front-end has given a place.
    inflight: Option<Inflight>,
    vrings: Vec<Vring>,
    inbox: Arc<SessionInbox>,
    /// Where written guest memory is marked while VHOST_F_LOG_ALL is set.
    log: Option<Arc<LogArea>>,
    log_bell: Option<Arc<PeerEventfd>>,
    /// Held while written memory is logged.
    without_journal: Option<WithoutJournal>,
    /// Addresses are I/O virtual addresses (ACCESS_PLATFORM), and what is known of them.
    iommu: Option<Box<Iommu>>,
    /// What was known when they were not any more.
    idle_iommu: Option<Box<Iommu>>,
    /// Where the front-end listens (SET_BACKEND_REQ_FD).
    backend_channel: Option<UnixStream>,
    /// How often the disk had changed its size when the front-end last learned of it. `None`: not in
    /// this connection, so what it knows may be of an earlier process.
    resizes_known: Option<u64>,
    refusals: u32,
    /// A message that was answered with [`Answer::Later`]: no other one is read before it is.
    owed: Option<Message>,
    /// Queues are ready, and another daemon has the image.
    lock_wait: Option<LockWait>,
    /// When to ask for the image again.
    ask_again: Option<Instant>,
    /// Queues are ready, and wait for what connections before this one have in flight.
    behind_others: bool,
    /// A disk kept a queue from stopping: the connection has to end.
    stuck: bool,
    /// Queues that could not start, and why: nobody was told yet.
    failures: Vec<(usize, Refusal)>,
    /// When queues that a worker could not take are tried again.
    try_again: Option<Instant>,
}

impl Session {
    /// A session on a fresh connection. It ends when `stop` becomes readable.
    ///
    /// # Errors
    /// What the host says to the socket or an eventfd.
    pub fn new(export: &Arc<Export>, socket: UnixStream, stop: &Arc<OwnedFd>) -> io::Result<Self> {
        let inbox = Arc::new(SessionInbox::new()?);
        let session = Self {
            export: Arc::clone(export),
            channel: Channel::new(socket, Arc::clone(export.quarantine()))?,
            stop: Arc::clone(stop),
            features: 0,
            protocol: Protocol::empty(),
            writeback: export.may_write_back() && export.writeback(),
            cache_known: Known::Offered,
            has_asked: false,
            goes_on: false,
            forgave: false,
            forgets_cache: false,
            switching_on: false,
            announced: false,
            map: Arc::new(GuestMap::default()),
            quota: Arc::default(),
            inflight: None,
            vrings: fresh_vrings(export),
            inbox: Arc::clone(&inbox),
            log: None,
            log_bell: None,
            without_journal: None,
            iommu: None,
            idle_iommu: None,
            backend_channel: None,
            resizes_known: None,
            refusals: 0,
            owed: None,
            lock_wait: None,
            ask_again: None,
            behind_others: false,
            stuck: false,
            failures: Vec::new(),
            try_again: None,
        };
        export.enter(inbox);
        export.front_end_came();
        export.notice(Notice::Connected);
        Ok(session)
    }

    /// Says why the connection ends.
    fn tell_end(&self, why: fmt::Arguments<'_>) {
        if let Some(pass) = self.export.limits().ended.pass() {
            let disk = self.export.disk().name();
            warn!(disk, suppressed = pass.suppressed, "connection ended: {why}");
        }
    }

    /// Carries out one message and answers it. False if the connection must end.
    fn take(&mut self, mut message: Message) -> Result<bool, MessageError> {
        debug!(code = message.code, name = ?message.request, "message");
        let code = message.code;
        let wants_ack = message.need_reply && self.protocol.contains(Protocol::REPLY_ACK);
        // Those that had all the time they needed.
        let came_back = self.collect_stopped();
        let outcome = self.handle_message(&mut message);
        if came_back {
            if let Err(refusal) = self.start_ready() {
                // No message need come that has them start again.
                self.tell_end(format_args!("{refusal}"));
                return Ok(false);
            }
        }
        match outcome {
            Ok(Answer::Later) if self.export.has_failed() => {
                // What it waits for is over at a time that nobody knows.
                self.tell_end(format_args!("{}", Refusal::Failed));
                return Ok(false);
            }
            Ok(Answer::Later) => self.owed = Some(message),
            Ok(Answer::Reply(payload)) => {
                self.channel.reply(code, &payload, None, self.stop.as_fd())?;
                if message.request == Some(FrontendReq::GET_VRING_BASE) {
                    self.forget_inflight(message.u32(0));
                }
            }
            Ok(Answer::ReplyWith(payload, fd)) => {
                self.channel.reply(code, &payload, Some(fd.as_fd()), self.stop.as_fd())?;
            }
            Ok(Answer::Ack) => {
                if wants_ack {
                    self.channel.reply(code, &0u64.to_ne_bytes(), None, self.stop.as_fd())?;
                }
                if message.request == Some(FrontendReq::SET_CONFIG) {
                    // A worker that has ended has told why in the log.
                    return Ok(self.write_cache_was_set().is_ok());
                }
            }
            Err(refusal) => {
                self.refusals += 1;
                if let Some(pass) = self.export.limits().refused.pass() {
                    let (disk, request) = (self.export.disk().name(), message.request);
                    warn!(disk, ?request, suppressed = pass.suppressed, "refused: {refusal}");
                }
                if self.refusals == REFUSALS_MAX {
                    self.tell_end(format_args!("{REFUSALS_MAX} messages were refused"));
                    return Ok(false);
                }
                // No answer to these could be told from a refusal.
                let answered = matches!(
                    message.request,
                    Some(FrontendReq::GET_VRING_BASE | FrontendReq::GET_INFLIGHT_FD)
                );
                // The message was right and is kept; it is the disk that serves nobody any more.
                let over = matches!(refusal, Refusal::Failed | Refusal::Worker(_));
                if !wants_ack || self.stuck || answered || over {
                    return Ok(false);
                }
                self.channel.reply(code, &1u64.to_ne_bytes(), None, self.stop.as_fd())?;
            }
        }
        Ok(true)
    }

    fn handle_message(&mut self, message: &mut Message) -> Result<Answer, Refusal> {
        use FrontendReq as R;
        panic_point!("session");
        let Some(request) = message.request else {
            return Err(Refusal::NotOffered(message.code));
        };
        let takes_memory = matches!(
            request,
            R::GET_VRING_BASE | R::RESET_DEVICE | R::SET_MEM_TABLE | R::REM_MEM_REG
        ) || (request == R::IOTLB_MSG && is_invalidation(message));
        // Its image goes with it, and what an earlier connection has left would land there later.
        let leaves = request == R::GET_VRING_BASE && self.logs();
        if (takes_memory && self.export.uses(&self.map)) || (leaves && !self.export.is_clear()) {
            // Whoever is answered may use it otherwise.
            return Ok(Answer::Later);
        }
        match request {
            R::GET_FEATURES => Ok(Answer::u64(self.offered_features())),
            R::SET_FEATURES => self.set_features(message.u64(0)),
            R::GET_PROTOCOL_FEATURES => Ok(Answer::u64(PROTOCOL.bits())),
            R::SET_PROTOCOL_FEATURES => self.set_protocol_features(message.u64(0)),
            R::SET_OWNER | R::RESET_OWNER => Ok(Answer::Ack),
            R::GET_QUEUE_NUM => Ok(Answer::u64(self.vrings.len() as u64)),
            R::GET_MAX_MEM_SLOTS => Ok(Answer::u64(memory::SLOTS_MAX as u64)),
            R::SET_MEM_TABLE => {
                let map = memory::table(message, &self.quota)?;
                self.change_memory(map)
            }
            R::ADD_MEM_REG => {
                let map = memory::with_region(&self.map, message, &self.quota)?;
                self.change_memory(map)
            }
            R::REM_MEM_REG => {
                let map = memory::without_region(&self.map, message)?;
                self.change_memory(map)
            }
            R::SET_LOG_BASE => self.set_log_base(message),
            R::SET_LOG_FD => self.set_log_fd(message),
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
                self.set_backend_channel(message.take_fd().map(UnixStream::from));
                self.forget_failures(|_| true);
                Ok(Answer::Ack)
            }
            R::IOTLB_MSG => self.iotlb_msg(message),
            R::RESET_DEVICE => self.reset_device(),
            R::GET_INFLIGHT_FD => self.get_inflight_fd(message),
            R::SET_INFLIGHT_FD => self.set_inflight_fd(message),
            _ => Err(Refusal::NotOffered(message.code)),
        }
    }

    // ---- memory ----

    /// Drain, swap, resume. A queue whose ring is in none of it waits for memory that has it: front-ends take a
    /// region away and add its parts.
    fn change_memory(&mut self, map: GuestMap) -> Result<Answer, Refusal> {
        if self.vrings.iter().any(Vring::is_running) {
            self.check_log(&map)?;
        }
        self.stop_all()?;
        self.map = Arc::new(map);
        self.forget_translations();
        self.forget_failures(|_| true);
        self.start_ready()
    }

    /// The guest begins anew: nobody waits for what its queues were doing.
    fn reset_device(&mut self) -> Result<Answer, Refusal> {
        (0..self.vrings.len()).try_for_each(|at| self.leave_nothing(at))?;
        self.stop_all()?;
        self.renew_records();
        self.inflight = None;
        self.vrings = fresh_vrings(&self.export);
        (self.features, self.log, self.log_bell, self.without_journal) = (0, None, None, None);
        self.renew_iommu();
        // This front-end goes on telling its guest what it has read (QEMU keeps a copy of the
        // configuration space over a reset), so its cache stays as it is. The next one asks anew.
        self.forgets_cache = true;
        self.rings_may_have_stopped(false);
        Ok(Answer::Ack)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.set_backend_channel(None);
        self.export.leave(&self.inbox);
    }
}

fn fresh_vrings(export: &Export) -> Vec<Vring> {
    (0..export.options().queues).map(|_| Vring::default()).collect()
}

#[cfg(test)]
mod tests;
