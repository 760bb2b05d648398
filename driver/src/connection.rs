//! The connection of a device, and all that is needed to make another one: the same memory, rings and
//! record of what is in flight.

use crate::info::DiskInfo;
use crate::link::Link;
use crate::memory::Memory;
use crate::vhost_user::{Client, Inflight, QueuePlace};
use crate::{Error, Options};
use ringway_ring::virtqueue::Areas;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

/// What the device keeps of each queue.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) at: Areas,
    /// Where the device goes on, as vhost-user's SET_VRING_BASE puts it.
    pub(crate) base: u32,
    pub(crate) link: Arc<Link>,
}

/// A connection, or the lack of one.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) options: Options,
    pub(crate) path: Option<PathBuf>,
    pub(crate) client: Option<Client>,
    /// The last connection ended with all queues stopped.
    clean: bool,
    pub(crate) features: u64,
    pub(crate) memory: Arc<Memory>,
    pub(crate) started: Vec<Started>,
    /// The record that outlives a server, if there is one.
    inflight: Option<Inflight>,
    /// Another server was found, and the device has not asked since what its disk is like.
    pub(crate) is_another: bool,
}

// SAFETY: the addresses in `started` lie in `memory`, which is kept alive.
unsafe impl Send for Connection {}

impl Connection {
    pub(crate) fn new(
        options: Options,
        path: Option<PathBuf>,
        features: u64,
        memory: Arc<Memory>,
    ) -> Self {
        let (client, started, inflight) = (None, Vec::new(), None);
        Self {
            options,
            path,
            client,
            clean: false,
            features,
            memory,
            started,
            inflight,
            is_another: false,
        }
    }

    /// Shares memory and starts all queues over a new connection.
    pub(crate) fn start(&mut self, mut client: Client) -> Result<(), Error> {
        let Self { memory, started, options, inflight, .. } = self;
        client.guarded(|client| {
            if options.keep.is_some() {
                if inflight.is_none() {
                    *inflight = Some(client.get_inflight(options.queues, options.queue_size)?);
                }
                if let Some(inflight) = inflight {
                    client.set_inflight(inflight)?;
                }
            }
            client.share(memory, options.one_table)?;
            for (index, queue) in started.iter().enumerate() {
                let place = QueuePlace {
                    size: options.queue_size,
                    desc: queue.at.desc,
                    driver: queue.at.driver,
                    device: queue.at.device,
                    base: queue.base,
                    kick: &queue.link.kick,
                    call: &queue.link.call,
                };
                client.start_queue(index, &place)?;
            }
            Ok(())
        })?;
        for queue in started {
            // Somebody else looks after the connection if it is to be kept.
            let watched = options.keep.is_none().then_some(client.stream());
            queue.link.connect(watched)?;
        }
        self.client = Some(client);
        Ok(())
    }

    /// Stops all queues and disconnects.
    pub(crate) fn stop(&mut self) -> Result<(), Error> {
        let Some(mut client) = self.client.take() else { return Ok(()) };
        let started = &mut self.started;
        let result = client.guarded(|client| {
            for (index, queue) in started.iter_mut().enumerate() {
                queue.base = client.stop_queue(index)?;
            }
            Ok(())
        });
        self.clean = result.is_ok();
        self.disconnect(&client);
        result
    }

    pub(crate) fn disconnect(&self, client: &Client) {
        for queue in &self.started {
            queue.link.disconnect(client.stream());
        }
    }

    /// The server has gone by itself.
    pub(crate) fn lost(&mut self) {
        self.client = None;
        self.clean = false;
        if self.options.packed {
            // A packed ring does not say where it is; the record does.
            return;
        }
        for queue in &mut self.started {
            // SAFETY: the used index, in memory that is kept; the server may have written it.
            #[allow(clippy::cast_ptr_alignment)]
            let used = unsafe { queue.at.device.add(2).cast::<u16>().read_volatile() };
            queue.base = used.into();
        }
    }

    /// Whether another server can go on: after a clean stop, or with a record of what is in flight.
    pub(crate) fn check_resumable(&self) -> Result<(), Error> {
        if self.clean || self.inflight.is_some() { Ok(()) } else { Err(Error::NotStopped) }
    }

    /// Goes on at another server.
    pub(crate) fn take_up(&mut self, stream: UnixStream) -> Result<DiskInfo, Error> {
        self.check_resumable()?;
        let client = Client::negotiate(stream, self.features, &self.options)?;
        let missing = self.features & !client.features;
        if missing != 0 {
            return Err(Error::FeaturesLost { missing });
        }
        let (wanted, max) = (self.options.queues, client.queues);
        if wanted > max {
            return Err(Error::TooManyQueues { wanted, max });
        }
        self.start(client)?;
        // Afterwards: the record says whether the write cache is on, and may be all that says it.
        let client = self.client.as_mut().ok_or(Error::NotConnected)?;
        Ok(DiskInfo::parse(&client.guarded(Client::config)?, self.features))
    }
}
