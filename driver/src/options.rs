//! How to open a device.

use crate::error::Error;
use ringway_ring::virtqueue::QUEUE_SIZE_MAX;
use ringway_scheduler::SchedulerMode;
use std::time::Duration;

/// When requests use an indirect table (VIRTIO 1.2 §2.7.5.3) instead of descriptors of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Indirect {
    /// Never; INDIRECT_DESC is not negotiated.
    Never,
    /// Always.
    Always,
    /// For requests with several buffers, and when more than half of the ring is taken: short
    /// chains in the ring cost the server one memory access less.
    #[default]
    WhenScarce,
}

/// How to open a device. All have sensible defaults; the last group is for tests.
///
/// ```no_run
/// let device = ringway_driver::Options::new()
///     .queues(4)
///     .queue_size(512)
///     .memory(256 << 20)
///     .connect("/run/ringway/disk.sock")?;
/// # Ok::<(), ringway_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) memory: usize,
    pub(crate) huge_pages: bool,
    pub(crate) max_buffers: u16,
    pub(crate) watch_config: bool,
    pub(crate) timeout: Duration,
    pub(crate) patience: Duration,
    pub(crate) keep: Option<Duration>,
    pub(crate) path: SchedulerMode,
    pub(crate) indirect: Indirect,
    pub(crate) event_idx: bool,
    pub(crate) packed: bool,
    pub(crate) regions: usize,
    pub(crate) one_table: bool,
    pub(crate) first_index: u16,
    pub(crate) without: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 256,
            memory: 64 << 20,
            huge_pages: false,
            max_buffers: 126,
            watch_config: false,
            timeout: Duration::from_secs(30),
            patience: Duration::ZERO,
            keep: None,
            path: SchedulerMode::Bio,
            indirect: Indirect::default(),
            event_idx: true,
            packed: false,
            regions: 1,
            one_table: false,
            first_index: 0,
            without: 0,
        }
    }
}

impl Options {
    /// One queue of 256 descriptors and 64 MiB for buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of queues; default 1, and 0 means all the server has.
    #[must_use]
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// Descriptors of each queue, from 4 to 32768, and a power of two unless packed; default 256. Some
    /// servers take no more than 1024.
    #[must_use]
    pub fn queue_size(mut self, size: u16) -> Self {
        self.queue_size = size;
        self
    }

    /// Bytes of shared memory for buffers; default 64 MiB.
    #[must_use]
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Takes the shared memory from huge pages of 2 MiB, which the host must have reserved.
    #[must_use]
    pub fn huge_pages(mut self, yes: bool) -> Self {
        self.huge_pages = yes;
        self
    }

    /// The most buffers of one vectored request, if the server takes as many; default 126.
    #[must_use]
    pub fn max_buffers(mut self, count: u16) -> Self {
        self.max_buffers = count;
        self
    }

    /// Lets the server announce changes (of the capacity, say); ask with
    /// [`Device::config_changed`](crate::Device::config_changed), because the server may wait for the
    /// answer.
    #[must_use]
    pub fn watch_config(mut self, yes: bool) -> Self {
        self.watch_config = yes;
        self
    }

    /// How long the server may take to answer before the connection is given up; default 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long to try to connect while no server is there yet; default 0.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Survives the end of the server: if the connection is lost, however many requests are in
    /// flight, connects again in the background for up to `patience` each time. The next server
    /// gets the same memory and rings, and the record of what is in flight, and completes that.
    /// Nobody who waits for completions notices, but for the time it takes.
    ///
    /// Opening fails with [`Error::NoInflight`] at a server that keeps no such record; a connection
    /// that cannot be taken up again ends with [`Error::GivenUp`]. Requests are never sent a second
    /// time without a record that says they were not done. Default: a lost connection is lost.
    #[must_use]
    pub fn reconnect(mut self, patience: Duration) -> Self {
        self.keep = Some(patience);
        self
    }

    /// How requests travel to the server. Default [`SchedulerMode::Bio`]: each by itself, at once.
    ///
    /// With [`SchedulerMode::Request`] what is queued until [`BlkQueue::submit`](crate::BlkQueue::submit)
    /// is sorted, and neighbours of one kind become one request, as far as the server and 1 MiB go.
    /// At most 32 of these are in flight; others wait and may meet more neighbours. Each request has
    /// its own completion; of a merged one that fails, each is tried again by itself. Flushes,
    /// discards and zeroing are not overtaken. Good where the server pays for each operation and the
    /// requests are small and adjacent.
    ///
    /// With [`SchedulerMode::Auto`] both are tried under load, and what carries more bytes is used.
    #[must_use]
    pub fn path(mut self, path: SchedulerMode) -> Self {
        self.path = path;
        self
    }

    /// When to use indirect tables.
    #[must_use]
    pub fn indirect(mut self, when: Indirect) -> Self {
        self.indirect = when;
        self
    }

    /// Whether to negotiate EVENT_IDX; default yes.
    #[must_use]
    pub fn event_idx(mut self, yes: bool) -> Self {
        self.event_idx = yes;
        self
    }

    /// Asks for packed rings (VIRTIO_F_RING_PACKED); default no. A server that has only split ones
    /// makes opening fail, so that nobody measures the wrong thing.
    #[must_use]
    pub fn packed(mut self, yes: bool) -> Self {
        self.packed = yes;
        self
    }

    /// Announces the memory as so many regions that adjoin in guest addresses, so that buffers may
    /// straddle them; default 1.
    #[must_use]
    pub fn regions(mut self, count: usize) -> Self {
        self.regions = count;
        self
    }

    /// Shares memory with SET_MEM_TABLE even where ADD_MEM_REG is offered; default no.
    #[must_use]
    pub fn one_table(mut self, yes: bool) -> Self {
        self.one_table = yes;
        self
    }

    /// Where the ring indices start; 65530, say, to see them wrap. Default 0.
    #[must_use]
    pub fn first_index(mut self, index: u16) -> Self {
        self.first_index = index;
        self
    }

    /// Feature bits not to negotiate.
    #[must_use]
    pub fn without_features(mut self, bits: u64) -> Self {
        self.without = bits;
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let (size, kind) = (self.queue_size, if self.packed { "number" } else { "power of two" });
        if !(4..=QUEUE_SIZE_MAX).contains(&size) || !(self.packed || size.is_power_of_two()) {
            return Err(Error::Options(format!(
                "queue size {size} is not a {kind} from 4 to 32768"
            )));
        }
        if self.max_buffers == 0 || self.regions == 0 || self.regions > 64 {
            return Err(Error::Options(
                "a device needs 1 to 64 memory regions and at least one buffer per request".into(),
            ));
        }
        Ok(())
    }
}
