//! Worker threads: one engine each, made on the thread that uses it.

use crate::command::{Handle, command_channel};
use crate::polling::Polling;
use crate::vhost_user::Queue;
use crate::worker::Worker;
use ringway_aio::sim::{Model, Sim, SimSetup};
use ringway_aio::{Engine, IoUring, IoUringSetup, LinuxAio, Null, Threads, ThreadsSetup};
use ringway_disk::{EngineKind, SimModel};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

/// Operations one engine may have in flight. More wait in their queues' backlog.
const DEPTH: u32 = 2048;

/// Threads of one `threads` engine: enough to keep a fast disk busy from one worker.
const THREADS: usize = 16;

/// How the workers of one engine are made.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// The engine.
    pub engine: EngineKind,
    /// How many.
    pub workers: usize,
    /// Whether they spin before they sleep.
    pub polling: Polling,
    /// Whether they look for completions right after each submission (origin O2). Only a benchmark
    /// has a reason to say no.
    pub harvest_at_once: bool,
    /// Whether guest memory is pinned for engines that gain by it. Only for guests without a
    /// balloon and without free page reporting.
    pub pin_memory: bool,
    /// Whether io_uring polls devices for completions, of disks that can be polled.
    pub iopoll: bool,
}

/// The workers of one engine. Dropping it ends them.
pub struct Pool {
    handles: Vec<Handle<Queue>>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts workers; returns once each has its engine.
    ///
    /// # Errors
    /// What the host says to an engine or a thread.
    pub fn start(options: PoolOptions) -> io::Result<Self> {
        Self::start_on(options, &[], 0)
    }

    /// Starts workers, each pinned to one CPU of `cpus` in turn, from the one at `first` modulo
    /// their number on; to none if there are none. Helper threads of an engine may use all of
    /// `cpus`.
    ///
    /// # Errors
    /// As [`Pool::start`], and what the host says to a CPU.
    pub fn start_on(options: PoolOptions, cpus: &[usize], first: usize) -> io::Result<Self> {
        let mut pool = Self { handles: Vec::new(), threads: Vec::new() };
        for index in 0..options.workers {
            let pin = Pin { cpus: cpus.into(), own: (first + index) % cpus.len().max(1) };
            let (handle, thread) = match options.engine {
                EngineKind::Null => spawn(index, options, pin, || Null::new(DEPTH)),
                EngineKind::NullAfter(micros) => spawn(index, options, pin, move || {
                    Ok(Sim::new(Null::new(DEPTH)?, SimSetup::new(fixed_latency(micros))))
                }),
                EngineKind::Sim(model) => spawn(index, options, pin, move || {
                    Ok(Sim::new(Threads::new(threads())?, SimSetup::new(model_of(model))))
                }),
                EngineKind::LinuxAio => spawn(index, options, pin, || LinuxAio::new(DEPTH)),
                EngineKind::Threads => spawn(index, options, pin, || Threads::new(threads())),
                EngineKind::IoUring => {
                    spawn(index, options, pin, move || IoUring::new(io_uring(options.iopoll)))
                }
            }?;
            pool.handles.push(handle);
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// As [`Pool::start`], with engines of the caller's own instead of `options.engine`: for
    /// simulations. `make` is called on the thread of each worker, with its number.
    ///
    /// # Errors
    /// As [`Pool::start`].
    pub fn with_engines<E, F>(options: PoolOptions, make: F) -> io::Result<Self>
    where
        E: Engine + 'static,
        F: Fn(usize) -> io::Result<E> + Clone + Send + 'static,
    {
        let mut pool = Self { handles: Vec::new(), threads: Vec::new() };
        for index in 0..options.workers {
            let make = make.clone();
            let nowhere = Pin { cpus: Vec::new(), own: 0 };
            let (handle, thread) = spawn(index, options, nowhere, move || make(index))?;
            pool.handles.push(handle);
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// How to talk to the workers.
    #[must_use]
    pub fn handles(&self) -> &[Handle<Queue>] {
        &self.handles
    }
}

impl Drop for Pool {
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

/// Where a worker runs.
struct Pin {
    /// Empty: anywhere.
    cpus: Vec<usize>,
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

/// Any number of operations at a time, each taking as long.
fn fixed_latency(micros: u32) -> Model {
    let latency = Duration::from_micros(micros.into());
    Model::Parallel {
        channels: DEPTH as usize,
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
    ThreadsSetup { depth: DEPTH, threads: THREADS, cached_inline: true }
}

fn io_uring(iopoll: bool) -> IoUringSetup<'static> {
    IoUringSetup { depth: DEPTH, without: &[], iopoll }
}

fn spawn<E, F>(
    index: usize,
    options: PoolOptions,
    pin: Pin,
    make: F,
) -> io::Result<(Handle<Queue>, JoinHandle<()>)>
where
    E: Engine + 'static,
    F: FnOnce() -> io::Result<E> + Send + 'static,
{
    let (handle, inbox) = command_channel()?;
    let (ready, is_ready) = sync_channel(1);
    let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
        let started = pin.to_all().and_then(|()| make()).and_then(|engine| {
            pin.to_own()?;
            Worker::new(engine, inbox, &options)
        });
        let mut worker = match started {
            Ok(worker) => worker,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let _ = ready.send(Ok(()));
        if let Err(error) = worker.run() {
            tracing::error!("worker {index} ends, its engine failed: {error}");
        }
    })?;
    is_ready.recv().map_err(|_| io::Error::other("a worker died while it started"))??;
    Ok((handle, thread))
}

/// The engines for files, best first: the ones that work here with the reason to take them, the
/// others with the reason not to.
#[must_use]
pub fn usable_engines() -> Vec<(EngineKind, Result<String, String>)> {
    let uring = match IoUring::new(IoUringSetup { depth: 4, without: &[], iopoll: false }) {
        Ok(_) => Ok("the fastest that works here".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let aio = match LinuxAio::new(4) {
        Ok(_) => Ok("the fastest that works here".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    vec![
        (EngineKind::IoUring, uring),
        (EngineKind::LinuxAio, aio),
        (EngineKind::Threads, Ok("works everywhere".to_owned())),
    ]
}
