//! The vhost-user client: messages over the socket, nothing of the rings.

use crate::backoff::retry_after;
use crate::memory::Memory;
use crate::{Error, Options};
use ringway_ring::virtio_blk::{CONFIG_BYTES, VIRTIO_F_VERSION_1};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
};
use vhost::vhost_user::{
    Error as Wire, Frontend, FrontendReqHandler, VhostUserFrontend, VhostUserFrontendReqHandler,
    VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Most regions of one SET_MEM_TABLE message.
const TABLE_REGIONS: usize = 8;

/// Connects to `path`, trying again for `timeout` while no server is there yet.
pub(crate) fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, Error> {
    let begun = Instant::now();
    loop {
        let error = match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let path = path.to_path_buf();
        let is_socket = path.metadata().map(|meta| meta.file_type().is_socket());
        let error = match (error.kind(), is_socket) {
            (io::ErrorKind::NotFound, _) => Error::NoSocket { path },
            (_, Ok(false)) => return Err(Error::NotASocket { path }),
            (io::ErrorKind::ConnectionRefused, _) => Error::NoListener { path },
            _ => return Err(Error::Connect { path, source: error }),
        };
        let waited = begun.elapsed();
        if waited >= timeout {
            return Err(error);
        }
        std::thread::sleep(retry_after(waited));
    }
}

/// Where one queue lies and how it is notified.
#[derive(Debug)]
pub(crate) struct QueuePlace<'a> {
    pub(crate) size: u16,
    pub(crate) desc: *const u8,
    pub(crate) driver: *const u8,
    pub(crate) device: *const u8,
    pub(crate) base: u32,
    pub(crate) kick: &'a EventFd,
    pub(crate) call: &'a EventFd,
}

/// The record of what is in flight: made by a server, kept here for the next one. This side never
/// looks into it.
pub(crate) struct Inflight {
    about: VhostUserInflight,
    file: File,
}

impl std::fmt::Debug for Inflight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inflight").field("bytes", &self.about.mmap_size).finish_non_exhaustive()
    }
}

/// Notes that the server announced a change of the configuration space.
#[derive(Debug, Default)]
struct ConfigWatch(AtomicBool);

impl VhostUserFrontendReqHandler for ConfigWatch {
    fn handle_config_change(&self) -> io::Result<u64> {
        self.0.store(true, SeqCst);
        Ok(0)
    }
}

/// One connection, features negotiated.
pub(crate) struct Client {
    frontend: Frontend,
    stream: UnixStream,
    /// Feature bits the server has.
    pub(crate) offered: u64,
    /// Protocol features the server has, also those unknown here.
    pub(crate) offered_protocol: u64,
    /// Feature bits in use.
    pub(crate) features: u64,
    /// Protocol features in use.
    pub(crate) protocol: Protocol,
    /// Queues the server has.
    pub(crate) queues: u16,
    watch: Option<(Arc<ConfigWatch>, FrontendReqHandler<ConfigWatch>)>,
    timeout: Duration,
}

impl Client {
    /// Takes the connection to where memory can be shared: features and protocol features that both
    /// sides know, ownership, number of queues.
    pub(crate) fn negotiate(
        stream: UnixStream,
        wanted: u64,
        options: &Options,
    ) -> Result<Self, Error> {
        let own = stream
            .try_clone()
            .map_err(|source| Error::Host { what: "cannot copy the socket", source })?;
        let mut client = Self {
            frontend: Frontend::from_stream(stream, 1),
            stream: own,
            offered: 0,
            offered_protocol: 0,
            features: 0,
            protocol: Protocol::empty(),
            queues: 1,
            watch: None,
            timeout: options.timeout,
        };
        client.guarded(|client| client.negotiate_features(wanted, options))?;
        Ok(client)
    }

    fn negotiate_features(&mut self, wanted: u64, options: &Options) -> Result<(), Error> {
        let offered = self.ask("GET_FEATURES", |f| f.get_features())?;
        let vhost_user = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        if offered & vhost_user == 0 {
            return Err(Error::Lacks("protocol features"));
        }
        if offered & (1 << VIRTIO_F_VERSION_1) == 0 {
            return Err(Error::Lacks("VIRTIO 1.0 (VERSION_1)"));
        }
        let mut useful = Protocol::MQ
            | Protocol::CONFIG
            | Protocol::REPLY_ACK
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::RESET_DEVICE;
        useful.set(Protocol::BACKEND_REQ, options.watch_config);
        useful.set(Protocol::INFLIGHT_SHMFD, options.keep.is_some());
        let known = self.ask("GET_PROTOCOL_FEATURES", |f| f.get_protocol_features())?;
        (self.offered, self.offered_protocol) = (offered, known.bits());
        self.protocol = known & useful;
        if !known.contains(Protocol::CONFIG) {
            return Err(Error::Lacks("its configuration space (CONFIG)"));
        }
        if options.keep.is_some() && !known.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(Error::NoInflight);
        }
        let protocol = self.protocol;
        self.ask("SET_PROTOCOL_FEATURES", |f| f.set_protocol_features(protocol))?;
        if protocol.contains(Protocol::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        if protocol.contains(Protocol::MQ) {
            let queues = self.ask("GET_QUEUE_NUM", |f| f.get_queue_num())?;
            self.queues = u16::try_from(queues).unwrap_or(u16::MAX);
        }
        self.ask("SET_OWNER", |f| f.set_owner())?;
        self.features = offered & (wanted | vhost_user);
        let features = self.features;
        self.ask("SET_FEATURES", |f| f.set_features(features))?;
        if protocol.contains(Protocol::BACKEND_REQ) {
            self.watch_config()?;
        }
        Ok(())
    }

    fn watch_config(&mut self) -> Result<(), Error> {
        let state = Arc::new(ConfigWatch::default());
        let mut handler = FrontendReqHandler::new(Arc::clone(&state))
            .map_err(|e| failed("SET_BACKEND_REQ_FD", &e))?;
        handler.set_reply_ack_flag(self.protocol.contains(Protocol::REPLY_ACK));
        let fd = handler.get_tx_raw_fd();
        self.ask("SET_BACKEND_REQ_FD", |f| f.set_backend_request_fd(&fd))?;
        self.watch = Some((state, handler));
        Ok(())
    }

    /// Readable when the server has announced something.
    pub(crate) fn config_events(&self) -> Option<BorrowedFd<'_>> {
        let (_, handler) = self.watch.as_ref()?;
        // SAFETY: the descriptor belongs to the handler, which lives as long as `self` is borrowed.
        Some(unsafe { BorrowedFd::borrow_raw(handler.as_raw_fd()) })
    }

    /// Takes what the server announced; true if the configuration space has changed.
    pub(crate) fn config_changed(&mut self) -> Result<bool, Error> {
        let Some((state, handler)) = &mut self.watch else { return Ok(false) };
        loop {
            let mut poll =
                libc::pollfd { fd: handler.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd of ours.
            if unsafe { libc::poll(&raw mut poll, 1, 0) } <= 0 {
                return Ok(state.0.swap(false, SeqCst));
            }
            handler.handle_request().map_err(|e| failed("CONFIG_CHANGE_MSG", &e))?;
        }
    }

    /// Shares the memory, region by region if the server knows memory slots.
    pub(crate) fn share(&mut self, memory: &Memory, one_table: bool) -> Result<(), Error> {
        let regions: Vec<_> = memory
            .regions()
            .iter()
            .map(|region| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.guest,
                memory_size: region.len,
                userspace_addr: region.user,
                mmap_offset: region.offset,
                mmap_handle: memory.file().as_raw_fd(),
            })
            .collect();
        let slots = self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS) && !one_table;
        let max = if slots {
            let max = self.ask("GET_MAX_MEM_SLOTS", |f| f.get_max_mem_slots())?;
            usize::try_from(max).unwrap_or(usize::MAX)
        } else {
            TABLE_REGIONS
        };
        if regions.len() > max {
            let have = regions.len();
            return Err(Error::Options(format!(
                "{have} memory regions were asked for but the server takes {max}: ask for fewer"
            )));
        }
        if !slots {
            return self.ask("SET_MEM_TABLE", |f| f.set_mem_table(&regions)).map(drop);
        }
        for region in &regions {
            self.ask("ADD_MEM_REG", |f| f.add_mem_region(region))?;
        }
        Ok(())
    }

    /// Hands a queue to the server and starts it.
    pub(crate) fn start_queue(&mut self, index: usize, at: &QueuePlace) -> Result<(), Error> {
        let address = VringConfigData {
            queue_max_size: at.size,
            queue_size: at.size,
            flags: 0,
            desc_table_addr: at.desc as u64,
            used_ring_addr: at.device as u64,
            avail_ring_addr: at.driver as u64,
            log_addr: None,
        };
        self.ask("SET_VRING_NUM", |f| f.set_vring_num(index, at.size))?;
        match u16::try_from(at.base) {
            Ok(base) => self.ask("SET_VRING_BASE", |f| f.set_vring_base(index, base))?,
            Err(_) => self.set_wide_base(index, at.base)?,
        }
        self.ask("SET_VRING_ADDR", |f| f.set_vring_addr(index, &address))?;
        self.ask("SET_VRING_CALL", |f| f.set_vring_call(index, at.call))?;
        self.ask("SET_VRING_KICK", |f| f.set_vring_kick(index, at.kick))?;
        self.ask("SET_VRING_ENABLE", |f| f.set_vring_enable(index, true))
    }

    /// SET_VRING_BASE of a packed queue: 32 bits, where the `vhost` crate takes 16.
    fn set_wide_base(&mut self, index: usize, base: u32) -> Result<(), Error> {
        const MESSAGE: &str = "SET_VRING_BASE";
        let ack = self.protocol.contains(Protocol::REPLY_ACK);
        let flags = 1 | if ack { VhostUserHeaderFlag::NEED_REPLY.bits() } else { 0 };
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let words = [FrontendReq::SET_VRING_BASE as u32, flags, 8, index, base];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut answer = [0; 20];
        let mut stream = &self.stream;
        let done = stream.write_all(&bytes).and_then(|()| match ack {
            true => stream.read_exact(&mut answer),
            false => Ok(()),
        });
        done.map_err(|_| Error::Disconnected { during: MESSAGE })?;
        // Header, then 0 for success.
        match answer[12..] {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            _ => Err(Error::Refused { message: MESSAGE }),
        }
    }

    /// Stops a queue; the server touches its memory no more. Returns where it had got to, as
    /// SET_VRING_BASE puts it.
    pub(crate) fn stop_queue(&mut self, index: usize) -> Result<u32, Error> {
        self.ask("GET_VRING_BASE", |f| f.get_vring_base(index))
    }

    /// Reads the configuration space.
    pub(crate) fn config(&mut self) -> Result<[u8; CONFIG_BYTES], Error> {
        let mut bytes = [0; CONFIG_BYTES];
        // 60.
        #[allow(clippy::cast_possible_truncation)]
        let len = CONFIG_BYTES as u32;
        let flags = VhostUserConfigFlags::empty();
        let (_, reply) =
            self.ask("GET_CONFIG", |f| f.get_config(0, len, flags, &[0; CONFIG_BYTES]))?;
        bytes.copy_from_slice(&reply);
        Ok(bytes)
    }

    /// Writes to the configuration space.
    pub(crate) fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.ask("SET_CONFIG", |f| f.set_config(offset, flags, bytes))
    }

    /// Has the server make a record of what is in flight.
    pub(crate) fn get_inflight(&mut self, queues: u16, size: u16) -> Result<Inflight, Error> {
        let wanted = VhostUserInflight::new(0, 0, queues, size);
        let (about, file) = self.ask("GET_INFLIGHT_FD", |f| f.get_inflight_fd(&wanted))?;
        Ok(Inflight { about, file })
    }

    /// Gives the server the record of its predecessor, or its own.
    pub(crate) fn set_inflight(&mut self, inflight: &Inflight) -> Result<(), Error> {
        let fd = inflight.file.as_raw_fd();
        self.ask("SET_INFLIGHT_FD", |f| f.set_inflight_fd(&inflight.about, fd))
    }

    /// Resets the device: all queues stop and lose their state.
    pub(crate) fn reset(&mut self) -> Result<(), Error> {
        if !self.protocol.contains(Protocol::RESET_DEVICE) {
            return Err(Error::Lacks("RESET_DEVICE"));
        }
        self.ask("RESET_DEVICE", |f| f.reset_device())
    }

    /// The socket, for watching whether the server is still there.
    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn ask<T>(
        &mut self,
        message: &'static str,
        send: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, Error> {
        send(&mut self.frontend).map_err(|error| match error {
            vhost::Error::VhostUserProtocol(error) => failed(message, &error),
            error => Error::Protocol { message, reason: error.to_string() },
        })
    }

    /// Runs some messages under a watchdog: a server that does not answer in time loses the
    /// connection, so that the caller gets an error and does not wait for ever.
    pub(crate) fn guarded<T>(
        &mut self,
        messages: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let stream = self
            .stream
            .try_clone()
            .map_err(|source| Error::Host { what: "cannot copy the socket", source })?;
        let (done, is_done) = mpsc::channel::<()>();
        let timeout = self.timeout;
        let watchdog = std::thread::spawn(move || {
            let barked = is_done.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout);
            if barked {
                let _ = stream.shutdown(Shutdown::Both);
            }
            barked
        });
        let result = messages(self);
        drop(done);
        let barked = watchdog.join().unwrap_or(false);
        match result {
            Err(Error::Disconnected { during }) if barked => {
                Err(Error::Silent { during, seconds: timeout.as_secs() })
            }
            result => result,
        }
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("features", &format_args!("{:#x}", self.features))
            .field("protocol", &self.protocol)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

#[cold]
fn failed(message: &'static str, error: &Wire) -> Error {
    let gone = |e: &io::Error| {
        let kind = e.kind();
        matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
    };
    match error {
        Wire::Disconnected | Wire::PartialMessage => Error::Disconnected { during: message },
        Wire::SocketError(e) | Wire::SocketBroken(e) if gone(e) => {
            Error::Disconnected { during: message }
        }
        Wire::BackendInternalError => Error::Refused { message },
        error => Error::Protocol { message, reason: error.to_string() },
    }
}
