//! Worker threads: one engine each, made on the thread that uses it.

use crate::command::{Handle, command_channel};
use crate::peer_eventfd;
use crate::queue::QueueLifecycle;
pub use crate::ring_pool::ENGINE_DEPTH;
use crate::ring_pool::{self, NVME_DEPTH, RingPool, ring};
use crate::worker::Worker;
pub use crate::worker_options::WorkerOptions;
use ringway_aio::sim::{Model, Sim, SimSetup};
use ringway_aio::{Engine, LinuxAio, Null, Nvme, Pair, Second, Threads, ThreadsSetup};
use ringway_core::mem::install_sigbus_handler;
use ringway_core::thread::{DataThread, data_thread_starts};
use ringway_disk::{EngineKind, SimModel};
use ringway_nbd_client::Nbd;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads of one `threads` engine: enough to keep a fast disk busy from one worker.
const THREADS: usize = 16;

/// How the workers of one engine are made.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// The engine.
    pub engine: EngineKind,
    /// How many.
    pub workers: usize,
    /// Whether io_uring polls devices for completions, of disks that can be polled.
    pub iopoll: bool,
    /// How each of them works.
    pub worker: WorkerOptions,
}

impl PoolOptions {
    /// Workers of this engine as they are unless somebody asks for something else.
    #[must_use]
    pub fn new(engine: EngineKind, workers: usize) -> Self {
        Self { engine, workers, iopoll: false, worker: WorkerOptions::default() }
    }
}

/// What is done when a worker ends because its engine failed or it panicked.
pub type OnFailure = Arc<dyn Fn() + Send + Sync>;

/// The workers of one engine, for queues of one transport. Dropping it ends them.
pub struct Pool<Q: QueueLifecycle + 'static> {
    /// `None` if the engines are the caller's own.
    options: Option<PoolOptions>,
    cpus: Cpus,
    on_failure: OnFailure,
    rings: Option<RingPool>,
    handles: Vec<Handle<Q>>,
    threads: Vec<JoinHandle<()>>,
}

impl<Q: QueueLifecycle + 'static> Pool<Q> {
    /// Starts workers; returns once each has its engine.
    ///
    /// # Errors
    /// What the host says to an engine or a thread.
    pub fn start(options: PoolOptions) -> io::Result<Self> {
        Self::start_watched(options, Cpus::default(), Arc::new(|| {}), None)
    }

    /// As [`Pool::start`], with workers that are pinned to `cpus`; `on_failure` is called by a worker
    /// whose engine fails, or that panics, after it has told the sessions of its queues and the log.
    /// Workers with io_uring take theirs from `rings`, if given.
    ///
    /// # Errors
    /// As [`Pool::start`], and what the host says to a CPU.
    pub fn start_watched(
        options: PoolOptions,
        cpus: Cpus,
        on_failure: OnFailure,
        rings: Option<RingPool>,
    ) -> io::Result<Self> {
        let (handles, threads) = (Vec::new(), Vec::new());
        let mut pool = Self { options: Some(options), cpus, on_failure, rings, handles, threads };
        pool.grow(options.workers)?;
        Ok(pool)
    }

    /// Starts more workers until there are `workers`; queues that run stay where they are.
    ///
    /// # Errors
    /// As [`Pool::start_watched`]; those that were there go on. [`io::ErrorKind::Unsupported`] for a
    /// pool of [`Pool::with_engines`], and for [`EngineKind::Custom`].
    pub fn grow(&mut self, workers: usize) -> io::Result<()> {
        let Some(options) = self.options else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let worker = options.worker;
        // Here, because workers may not start threads themselves.
        peer_eventfd::watch();
        for index in self.handles.len()..workers {
            let setup = WorkerSetup::new(&self.cpus, &self.on_failure);
            let (handle, thread) = match options.engine {
                EngineKind::Null => spawn(index, worker, setup, || Null::new(ENGINE_DEPTH)),
                EngineKind::NullAfter(micros) => spawn(index, worker, setup, move || {
                    Ok(Sim::new(Null::new(ENGINE_DEPTH)?, SimSetup::new(fixed_latency(micros))))
                }),
                EngineKind::Sim(model) => spawn(index, worker, setup, move || {
                    Ok(Sim::new(Threads::new(threads())?, SimSetup::new(model_of(model))))
                }),
                EngineKind::LinuxAio => spawn(index, worker, setup, || LinuxAio::new(ENGINE_DEPTH)),
                EngineKind::IoUringNbd => {
                    let rings = self.rings.clone();
                    spawn(index, worker, setup, move || {
                        let ring = rings.map_or_else(|| ring(false), |rings| rings.take())?;
                        nbd_with(ring, options.engine)
                    })
                }
                EngineKind::ThreadsNbd => spawn(index, worker, setup, move || {
                    nbd_with(Threads::new(threads())?, options.engine)
                }),
                EngineKind::Own(own) => {
                    spawn(index, worker, setup, move || (own.make)(ENGINE_DEPTH))
                }
                EngineKind::Threads => spawn(index, worker, setup, || Threads::new(threads())),
                EngineKind::IoUring => {
                    let rings = self.rings.clone();
                    spawn(index, worker, setup, move || match rings {
                        Some(rings) => rings.take(),
                        None => ring(options.iopoll),
                    })
                }
                EngineKind::Nvme => {
                    let rings = self.rings.clone();
                    spawn(index, worker, setup, move || match rings {
                        Some(rings) => rings.take_nvme(),
                        None => Nvme::new(NVME_DEPTH),
                    })
                }
                EngineKind::Custom => Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "only its owner can make this engine: see Pool::with_engines",
                )),
            }?;
            self.handles.push(handle);
            self.threads.push(thread);
        }
        Ok(())
    }

    /// So many workers with engines of the caller's own, for disks that such engines serve
    /// ([`ringway_disk::CustomDisk`]). `make` is called on the thread of each worker, with its number;
    /// `on_failure` as for [`Pool::start_watched`].
    ///
    /// # Errors
    /// As [`Pool::start`].
    pub fn with_engines<E, F>(
        workers: usize,
        worker: WorkerOptions,
        on_failure: OnFailure,
        make: F,
    ) -> io::Result<Self>
    where
        E: Engine + 'static,
        F: Fn(usize) -> io::Result<E> + Clone + Send + 'static,
    {
        let (handles, threads) = (Vec::new(), Vec::new());
        let mut pool = Self {
            options: None,
            cpus: Cpus::default(),
            on_failure,
            rings: None,
            handles,
            threads,
        };
        for index in 0..workers {
            let (make, setup) = (make.clone(), WorkerSetup::new(&pool.cpus, &pool.on_failure));
            let (handle, thread) = spawn(index, worker, setup, move || make(index))?;
            pool.handles.push(handle);
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// How to talk to the workers.
    #[must_use]
    pub fn handles(&self) -> &[Handle<Q>] {
        &self.handles
    }
}

impl<Q: QueueLifecycle + 'static> Drop for Pool<Q> {
    fn drop(&mut self) {
        for handle in &self.handles {
            // An error means that it has ended already.
            let _ = handle.exit();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Installs the handlers of signals that serving needs. It happens by itself when the first is
/// needed; a process that is to lose the right to install handlers calls this before.
///
/// # Errors
/// What the host says.
pub fn install_handlers() -> io::Result<()> {
    peer_eventfd::prepare();
    install_sigbus_handler()
}

/// CPUs for workers: each is pinned to one, in turn. Helper threads of an engine may use all of
/// them. Pools that have clones of it share the turn, so that no CPU has two workers before all have
/// one.
#[derive(Clone, Debug, Default)]
pub struct Cpus {
    /// Empty: anywhere.
    list: Arc<[usize]>,
    next: Arc<AtomicUsize>,
}

impl Cpus {
    /// These, by number; with none of them workers run anywhere.
    #[must_use]
    pub fn new(list: &[usize]) -> Self {
        Self { list: list.into(), next: Arc::default() }
    }

    fn pin(&self) -> Pin {
        let own = self.next.fetch_add(1, Relaxed) % self.list.len().max(1);
        Pin { cpus: Arc::clone(&self.list), own }
    }
}

/// What a worker's thread needs around its work.
struct WorkerSetup {
    pin: Pin,
    on_failure: OnFailure,
}

impl WorkerSetup {
    fn new(cpus: &Cpus, on_failure: &OnFailure) -> Self {
        Self { pin: cpus.pin(), on_failure: Arc::clone(on_failure) }
    }
}

/// Where a worker runs.
struct Pin {
    /// Empty: anywhere.
    cpus: Arc<[usize]>,
    /// The index of the worker's own CPU.
    own: usize,
}

impl Pin {
    /// For the time the engine is made: its helper threads inherit this.
    fn to_all(&self) -> io::Result<()> {
        pin_to(&self.cpus)
    }

    fn to_own(&self) -> io::Result<()> {
        pin_to(self.cpus.get(self.own..=self.own).unwrap_or_default())
    }
}

/// Lets this thread run on these CPUs only; on any if there are none.
fn pin_to(cpus: &[usize]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set)
        .map_err(|error| io::Error::other(format!("CPUs {cpus:?} cannot be used: {error}")))
}

/// An engine for exports that images are based on, with one for the images.
fn nbd_with<E: Second>(images: E, kind: EngineKind) -> io::Result<Pair<Nbd, E>> {
    Pair::new(kind.name(), Nbd::new(ENGINE_DEPTH)?, images)
}

/// Any number of operations at a time, each taking as long.
fn fixed_latency(micros: u32) -> Model {
    let latency = Duration::from_micros(micros.into());
    Model::Parallel {
        channels: ENGINE_DEPTH as usize,
        read: latency,
        write: latency,
        sync: latency,
        bytes_per_second: 1 << 50,
    }
}

fn model_of(model: SimModel) -> Model {
    match model {
        SimModel::Ram => Model::RAM,
        SimModel::Ssd => Model::SSD,
        SimModel::Hdd => Model::HDD,
    }
}

fn threads() -> ThreadsSetup {
    ThreadsSetup { depth: ENGINE_DEPTH, threads: THREADS, cached_inline: true }
}

fn spawn<E, Q, F>(
    index: usize,
    options: WorkerOptions,
    setup: WorkerSetup,
    make: F,
) -> io::Result<(Handle<Q>, JoinHandle<()>)>
where
    E: Engine + 'static,
    Q: QueueLifecycle + 'static,
    F: FnOnce() -> io::Result<E> + Send + 'static,
{
    let (handle, inbox) = command_channel()?;
    let (ready, is_ready) = sync_channel(1);
    let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
        // A timer that ends a sleep comes when it is due, not up to 50 us later. Refused, it comes late.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let started = setup.pin.to_all().and_then(|()| make()).and_then(|engine| {
            setup.pin.to_own()?;
            let name = engine.limits().name;
            Ok((Worker::new(engine, inbox, &options)?, name))
        });
        let (worker, engine) = match started {
            Ok(worker) => worker,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        data_thread_starts(DataThread::Worker);
        let _ = ready.send(Ok(()));
        worker.run_to_end(|failure| {
            tracing::error!("worker {engine}/{index} ends: {failure}");
            (setup.on_failure)();
        });
    })?;
    is_ready.recv().map_err(|_| io::Error::other("a worker died while it started"))??;
    Ok((handle, thread))
}

/// The engines for files, best first: the ones that work here with the reason to take them, the
/// others with the reason not to.
#[must_use]
pub fn usable_engines() -> Vec<(EngineKind, Result<String, String>)> {
    [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads]
        .map(|engine| (engine, try_engine(engine)))
        .into()
}

/// As [`usable_engines`], for a daemon that is about to start workers: one that is `asked` for is left
/// to them, and only the best one otherwise. To end a context of Linux AIO takes 10 to 40 ms, which
/// guests of a daemon that is started anew would wait.
#[must_use]
pub fn engines_to_choose(asked: Option<EngineKind>) -> Vec<(EngineKind, Result<String, String>)> {
    if let Some(engine) = asked {
        return vec![(engine, Ok("as asked".to_owned()))];
    }
    let uring = try_engine(EngineKind::IoUring);
    if uring.is_ok() {
        return vec![(EngineKind::IoUring, uring)];
    }
    usable_engines()
}

/// Why to take an engine for files, or why not.
fn try_engine(engine: EngineKind) -> Result<String, String> {
    let tried = match engine {
        EngineKind::IoUring => ring_pool::probe(),
        EngineKind::LinuxAio => LinuxAio::new(4).map(drop),
        EngineKind::Nvme => Nvme::new(4).map(drop),
        _ => return Ok("works everywhere".to_owned()),
    };
    let why = if engine == EngineKind::IoUring {
        "the first choice, and works here"
    } else {
        "works here"
    };
    tried.map(|()| why.to_owned()).map_err(|error| error.to_string())
}
