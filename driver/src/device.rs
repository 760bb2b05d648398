//! An opened device: its queues, its memory, its connection.

use crate::connection::{Connection, Started};
use crate::headers::Headers;
use crate::info::DiskInfo;
use crate::layout::{Layout, chain_max};
use crate::link::Link;
use crate::memory::Memory;
use crate::queue::{DevicePolicy, QueueLimits};
use crate::reconnector::Reconnector;
use crate::vhost_user::Client;
use crate::{BlkQueue, BufferPool, Error, Indirect, Options};
use ringway_ring::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, WRITEBACK_OFFSET,
    feature_bits,
};
use ringway_ring::virtqueue::{Areas, Driver, Format, Tables};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The features this front-end understands.
const FEATURES: u64 = feature_bits(&[
    VIRTIO_F_VERSION_1,
    VIRTIO_F_RING_PACKED,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_GEOMETRY,
    VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_CONFIG_WCE,
    VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_DISCARD,
    VIRTIO_BLK_F_WRITE_ZEROES,
]);

/// A disk behind a vhost-user-blk server.
///
/// Opening it connects, negotiates, shares memory and starts the queues; dropping it stops them and
/// disconnects. The queues and buffers stay valid memory whatever happens to device and server.
#[derive(Debug)]
pub struct Device {
    options: Options,
    offered: (u64, u64),
    features: u64,
    protocol: u64,
    server_queues: u16,
    info: DiskInfo,
    memory: Arc<Memory>,
    links: Vec<Arc<Link>>,
    /// Not taken yet.
    rings: Vec<(Driver, Headers)>,
    /// Before `connection`: ends before the connection does.
    reconnector: Option<Reconnector>,
    connection: Arc<Mutex<Connection>>,
}

// SAFETY: the addresses in `rings` lie in `memory`, which is kept alive.
unsafe impl Send for Device {}

impl Device {
    /// Opens the device whose server listens at `path`, with one queue. See [`Options`] for more.
    ///
    /// # Errors
    /// [`Error`] says what is wrong and what to do.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        Options::new().connect(path)
    }

    pub(crate) fn open(
        options: &Options,
        stream: UnixStream,
        path: Option<PathBuf>,
    ) -> Result<Self, Error> {
        options.check()?;
        let mut options = options.clone();
        let mut wanted = FEATURES & !options.without;
        if options.indirect == Indirect::Never {
            wanted &= !feature_bits(&[VIRTIO_RING_F_INDIRECT_DESC]);
        }
        if !options.event_idx {
            wanted &= !feature_bits(&[VIRTIO_RING_F_EVENT_IDX]);
        }
        if !options.packed {
            wanted &= !feature_bits(&[VIRTIO_F_RING_PACKED]);
        }
        if options.keep.is_some() && path.is_none() {
            return Err(Error::NoPath);
        }
        let mut client = Client::negotiate(stream, wanted, &options)?;
        let features = client.features;
        let info = DiskInfo::parse(&client.guarded(Client::config)?, features);
        let max = client.queues.min(info.num_queues);
        if options.queues == 0 {
            options.queues = max;
        } else if options.queues > max {
            return Err(Error::TooManyQueues { wanted: options.queues, max });
        }
        let has = |bit: u32| features & (1 << bit) != 0;
        let entries = if has(VIRTIO_RING_F_INDIRECT_DESC) { chain_max(&options, &info) } else { 0 };
        if options.packed && !has(VIRTIO_F_RING_PACKED) {
            return Err(Error::Lacks("packed rings (RING_PACKED)"));
        }
        let format = Format {
            packed: options.packed,
            size: options.queue_size,
            event_idx: has(VIRTIO_RING_F_EVENT_IDX),
            indirect: has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        let layout = Layout::new(format, entries);
        let queues = usize::from(options.queues);
        let memory = Memory::new(
            layout.bytes * queues,
            options.memory,
            options.huge_pages,
            options.regions,
        )?;
        let connection = Connection::new(options.clone(), path, features, Arc::clone(&memory));
        let mut device = Self {
            offered: (client.offered, client.offered_protocol),
            features,
            protocol: client.protocol.bits(),
            server_queues: client.queues,
            info,
            memory,
            links: Vec::with_capacity(queues),
            rings: Vec::with_capacity(queues),
            options,
            reconnector: None,
            connection: Arc::new(Mutex::new(connection)),
        };
        for index in 0..queues {
            device.make_queue(format, layout.bytes * index, &layout, entries)?;
        }
        device.connection().start(client)?;
        device.keep()?;
        Ok(device)
    }

    fn make_queue(
        &mut self,
        format: Format,
        offset: usize,
        layout: &Layout,
        entries: u16,
    ) -> Result<(), Error> {
        let Options { indirect, first_index, .. } = self.options;
        let host = |part: usize| self.memory.at(offset + part);
        let guest = |part: usize| (host(part) as u64).wrapping_add(self.memory.guest_delta());
        let at = Areas { desc: host(0), driver: host(layout.driver), device: host(layout.device) };
        let tables = (entries > 0).then(|| Tables {
            host: host(layout.tables),
            guest: guest(layout.tables),
            entries,
            when_scarce: indirect == Indirect::WhenScarce,
        });
        // SAFETY: `Layout` gives each part of each queue its own place in the control part of the
        // memory, which whoever holds the queue keeps alive. The server does not know it yet.
        let (ring, headers) = unsafe {
            let ring = Driver::new(format, at, first_index, tables)?;
            (ring, Headers::new(host(layout.headers), guest(layout.headers), format.size))
        };
        let (base, link) = (ring.base(), Arc::new(Link::new()?));
        self.connection().started.push(Started { at, base, link: Arc::clone(&link) });
        self.links.push(link);
        self.rings.push((ring, headers));
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the connection looked after, if that was asked for.
    fn keep(&mut self) -> Result<(), Error> {
        if let Some(patience) = self.options.keep {
            self.reconnector = Some(Reconnector::start(&self.connection, patience)?);
        }
        Ok(())
    }

    /// Takes the queues, in order. `C` is the context that each request carries and its completion
    /// hands back.
    ///
    /// # Errors
    /// [`Error::QueuesTaken`] the second time.
    pub fn queues<C>(&mut self) -> Result<Vec<BlkQueue<C>>, Error> {
        let rings = std::mem::take(&mut self.rings);
        if rings.is_empty() {
            return Err(Error::QueuesTaken);
        }
        let (limits, policy) = (self.limits(), Arc::new(DevicePolicy::new(self.options.path)));
        let links = self.links.iter().map(Arc::clone);
        Ok(rings
            .into_iter()
            .zip(links)
            .map(|((ring, headers), link)| {
                let (memory, policy) = (Arc::clone(&self.memory), Arc::clone(&policy));
                BlkQueue::new(ring, headers, limits, memory, link, policy)
            })
            .collect())
    }

    /// Takes the only queue of a device that was opened with one.
    ///
    /// # Errors
    /// [`Error::QueuesTaken`] if it was taken, [`Error::Options`] if there are several.
    pub fn queue<C>(&mut self) -> Result<BlkQueue<C>, Error> {
        if self.links.len() != 1 {
            let count = self.links.len();
            return Err(Error::Options(format!("this device has {count} queues: take them all")));
        }
        self.queues()?.pop().ok_or(Error::QueuesTaken)
    }

    fn limits(&self) -> QueueLimits {
        let max = |features: u32, limit| if self.has(features) { limit } else { None };
        let seg_max = usize::from(chain_max(&self.options, &self.info)) - 2;
        let quarter = usize::from(self.options.queue_size / 4);
        QueueLimits {
            seg_max,
            // Without tables a merged request must not take the ring from all others.
            merge_max: if self.has(VIRTIO_RING_F_INDIRECT_DESC) {
                seg_max
            } else {
                seg_max.min(quarter)
            },
            size_max: self.info.size_max.unwrap_or(u32::MAX).max(1),
            flush: self.info.flush,
            discard_sectors: max(VIRTIO_BLK_F_DISCARD, self.info.max_discard_sectors),
            write_zeroes_sectors: max(
                VIRTIO_BLK_F_WRITE_ZEROES,
                self.info.max_write_zeroes_sectors,
            ),
        }
    }

    fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }

    /// Where buffers come from.
    #[must_use]
    pub fn pool(&self) -> BufferPool {
        BufferPool::new(Arc::clone(&self.memory))
    }

    /// What the server said about the disk when last asked.
    #[must_use]
    pub fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.info.capacity
    }

    /// The unit requests should be made of, in bytes.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.info.block_size
    }

    /// Virtio feature bits in use.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Vhost-user protocol feature bits in use.
    #[must_use]
    pub fn protocol_features(&self) -> u64 {
        self.protocol
    }

    /// What the server offers: virtio feature bits, and protocol features that `vhost` names.
    #[must_use]
    pub fn offered(&self) -> (u64, u64) {
        self.offered
    }

    /// Queues the server has; this device may use fewer.
    #[must_use]
    pub fn server_queues(&self) -> u16 {
        self.server_queues
    }

    /// True unless the device was stopped or the server has gone.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connection().client.is_some() && self.links.iter().all(|link| link.is_connected())
    }

    fn with_client<T>(
        &mut self,
        messages: impl FnOnce(&mut Client) -> Result<T, Error>,
    ) -> Result<T, Error> {
        messages(self.connection().client.as_mut().ok_or(Error::NotConnected)?)
    }

    /// Reads the configuration space again.
    ///
    /// # Errors
    /// [`Error`] if the server does not answer.
    pub fn refresh(&mut self) -> Result<&DiskInfo, Error> {
        let bytes = self.with_client(|client| client.guarded(Client::config))?;
        self.info = DiskInfo::parse(&bytes, self.features);
        Ok(&self.info)
    }

    /// True if the server announced a change since the last call, with [`Options::watch_config`], or if
    /// another server was found ([`Options::reconnect`]) whose disk is not as it was; [`Device::info`] is
    /// up to date then. Never blocks otherwise.
    ///
    /// # Errors
    /// [`Error`] if the server is gone.
    pub fn config_changed(&mut self) -> Result<bool, Error> {
        let announced = self.with_client(Client::config_changed)?;
        if !std::mem::take(&mut self.connection().is_another) && !announced {
            return Ok(false);
        }
        let before = self.info.clone();
        self.refresh()?;
        Ok(announced || self.info != before)
    }

    /// With [`Options::watch_config`]: readable when there is something for
    /// [`Device::config_changed`] to take, for programs that wait for several things. Another one
    /// after a reconnection, when it is asked once in any case.
    #[must_use]
    pub fn config_events(&self) -> Option<OwnedFd> {
        self.connection().client.as_ref()?.config_events()?.try_clone_to_owned().ok()
    }

    /// Switches the write cache: with `false`, writes are durable before they complete.
    ///
    /// # Errors
    /// [`Error::Lacks`] without CONFIG_WCE; [`Error`] if the server does not answer.
    pub fn set_writeback(&mut self, writeback: bool) -> Result<(), Error> {
        if !self.has(VIRTIO_BLK_F_CONFIG_WCE) {
            return Err(Error::Lacks("a switch for its write cache (CONFIG_WCE)"));
        }
        // 32.
        #[allow(clippy::cast_possible_truncation)]
        let offset = WRITEBACK_OFFSET as u32;
        let value = [u8::from(writeback)];
        self.with_client(|client| client.guarded(|client| client.set_config(offset, &value)))?;
        self.refresh().map(drop)
    }

    /// Stops all queues and disconnects. When this returns the server touches the shared memory no
    /// more, and what it has completed can still be popped. Does nothing the second time.
    ///
    /// # Errors
    /// [`Error`] if the server does not answer; the connection is closed all the same.
    pub fn stop(&mut self) -> Result<(), Error> {
        // Nobody may connect again behind our back.
        self.reconnector = None;
        self.connection().stop()
    }

    /// Resets the device (RESET_DEVICE) and disconnects. Requests in flight may be lost; to go on,
    /// open the device anew.
    ///
    /// # Errors
    /// [`Error::Lacks`] if the server cannot; [`Error`] if it does not answer.
    pub fn reset(mut self) -> Result<(), Error> {
        self.reconnector = None;
        self.with_client(|client| client.guarded(Client::reset))?;
        let mut connection = self.connection();
        if let Some(client) = connection.client.take() {
            connection.disconnect(&client);
        }
        Ok(())
    }

    /// Stops cleanly if still connected, then connects again to the same path. The queues and
    /// buffers go on being used, wherever they are.
    ///
    /// # Errors
    /// [`Error::NotStopped`] if the last connection was lost without a clean stop and without
    /// [`Options::reconnect`], [`Error::FeaturesLost`] if the server came back with less; others as
    /// for opening.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        let path = self.connection().path.clone().ok_or(Error::NoPath)?;
        self.stop()?;
        // Nobody is waited for in vain.
        self.connection().check_resumable()?;
        self.take_up(crate::vhost_user::connect(&path, self.options.patience)?)
    }

    /// As [`Device::reconnect`], over a new socket.
    ///
    /// # Errors
    /// As [`Device::reconnect`].
    pub fn reconnect_over(&mut self, stream: UnixStream) -> Result<(), Error> {
        self.stop()?;
        self.take_up(stream)
    }

    fn take_up(&mut self, stream: UnixStream) -> Result<(), Error> {
        let info = self.connection().take_up(stream)?;
        self.info = info;
        self.keep()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Whoever wants to know the outcome calls `stop` first.
        let _ = self.stop();
    }
}
