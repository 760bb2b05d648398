//! An end that is a qcow2 image: threads that read a chain, or that fill a new image.
//!
//! What a request costs here is a look into tables, decompression, compression; so each operation goes to
//! a thread, which answers through an eventfd that the flow's engine watches.

use super::operation::{Operation, Ticket, Verb};
use anyhow::{Context, anyhow};
use ringway_aio::Engine;
use ringway_image::{Filler, Layer, Reader};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// One thread waits for the disk while another compresses.
const THREADS_MIN: usize = 4;
/// More than this wait for the map of a new image.
const THREADS_MAX: usize = 32;

/// What a thread has to do.
struct Job {
    ticket: Ticket,
    write: bool,
    offset: u64,
    memory: *mut u8,
    len: usize,
}

// SAFETY: by contract of `ImageEnd::give` the memory is this job's until its ticket comes back.
unsafe impl Send for Job {}

/// What became of it: bytes, or an error number.
pub(super) type Answer = (Ticket, Result<u64, i32>);

/// What a thread works on.
enum Work {
    Read(Box<Reader>),
    Fill(Box<Filler>),
}

/// A chain that is read, or an image that is filled.
#[derive(Debug)]
pub(super) struct ImageEnd {
    jobs: Option<Sender<Job>>,
    answers: Receiver<Answer>,
    bell: Arc<OwnedFd>,
    in_flight: usize,
    threads: Vec<JoinHandle<()>>,
    /// Of a chain that is read.
    pub(super) source: Option<Source>,
}

/// A chain that is read.
#[derive(Debug)]
pub(super) struct Source {
    layers: Vec<Layer>,
    /// The first file of the chain.
    pub(super) top: Arc<File>,
    /// Bytes of disk.
    pub(super) bytes: u64,
    /// What of that is lost, because a file lacks its end: zeroes, if that is as it should be.
    pub(super) lost: Vec<Range<u64>>,
    salvages: bool,
}

impl Source {
    /// True if it is based on another image.
    pub(super) fn has_backing(&self) -> bool {
        self.layers.len() > 1
    }
}

impl ImageEnd {
    /// An end that is read; of each file of the chain there is at most one lock, which stays. What is lost of it
    /// is zeroes if `salvages`, else an error.
    ///
    /// # Errors
    /// What is wrong with the tables, or what the host says.
    pub(super) fn of_chain(layers: Vec<Layer>, salvages: bool) -> anyhow::Result<Self> {
        let top = layers.first().map(|layer| Arc::clone(&layer.file)).context("no image")?;
        let mut first = reader(&layers, salvages)?;
        let (bytes, lost) = (first.size(), first.lost()?);
        let mut work = vec![Work::Read(Box::new(first))];
        for _ in 1..threads() {
            work.push(Work::Read(Box::new(reader(&layers, salvages)?)));
        }
        let mut end = Self::start(work)?;
        end.source = Some(Source { layers, top, bytes, lost, salvages });
        Ok(end)
    }

    /// An end that is written.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn of_new(filler: impl Fn() -> Filler) -> anyhow::Result<Self> {
        Self::start((0..threads()).map(|_| Work::Fill(Box::new(filler()))).collect())
    }

    fn start(work: Vec<Work>) -> anyhow::Result<Self> {
        let (jobs, queue) = channel();
        let (answer, answers) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut end = Self {
            jobs: Some(jobs),
            answers,
            bell,
            in_flight: 0,
            threads: Vec::new(),
            source: None,
        };
        for mut work in work {
            let (queue, answer) = (Arc::clone(&queue), answer.clone());
            let bell = Arc::clone(&end.bell);
            let run = move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(job) = next else { break };
                    // A panic says what it is; its operation still has to come back.
                    let done = catch_unwind(AssertUnwindSafe(|| carry_out(&mut work, &job)));
                    let result = done.unwrap_or(Err(libc::EIO));
                    if answer.send((job.ticket, result)).is_err() {
                        break;
                    }
                    // It can only be full of rings that were not read, which is as good.
                    let _ = rustix::io::write(&*bell, &1_u64.to_ne_bytes());
                }
            };
            let thread = std::thread::Builder::new().name("image".into()).spawn(run);
            end.threads.push(thread.context("cannot start a thread")?);
        }
        Ok(end)
    }

    pub(super) fn attach(&self, engine: &mut dyn Engine, bell: u32) -> io::Result<()> {
        engine.watch(bell, self.bell.as_raw_fd())
    }

    /// Gives a transfer to the threads.
    ///
    /// # Safety
    /// `base` has room for the operation, and is not touched until its ticket comes back, or
    /// [`ImageEnd::quiesce`] has returned.
    pub(super) unsafe fn give(
        &mut self,
        operation: &Operation,
        base: *mut u8,
    ) -> anyhow::Result<()> {
        let job = Job {
            ticket: operation.ticket,
            write: operation.verb != Verb::Read,
            offset: operation.offset,
            memory: base,
            len: usize::try_from(operation.len)?,
        };
        let jobs = self.jobs.as_ref().context("the threads of the image have ended")?;
        jobs.send(job).map_err(|_| anyhow!("the threads of the image have ended"))?;
        self.in_flight += 1;
        Ok(())
    }

    /// The next answer, if one is there.
    pub(super) fn pop(&mut self) -> Option<Answer> {
        let answer = self.answers.try_recv().ok()?;
        self.in_flight -= 1;
        Some(answer)
    }

    /// Waits until no thread touches any memory of orders.
    pub(super) fn quiesce(&mut self) {
        while self.in_flight > 0 && self.answers.recv().is_ok() {
            self.in_flight -= 1;
        }
    }

    /// One more reader of the chain.
    ///
    /// # Errors
    /// What reading says.
    pub(super) fn reader(&self) -> io::Result<Option<Reader>> {
        let source = self.source.as_ref();
        source.map(|source| reader(&source.layers, source.salvages)).transpose()
    }
}

impl Drop for ImageEnd {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }
}

fn reader(layers: &[Layer], salvages: bool) -> io::Result<Reader> {
    let mut reader = Reader::open(layers.to_vec())?;
    if salvages {
        reader.salvage();
    }
    Ok(reader)
}

fn threads() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    cpus.clamp(THREADS_MIN, THREADS_MAX)
}

fn carry_out(work: &mut Work, job: &Job) -> Result<u64, i32> {
    // SAFETY: the memory is this job's (Job).
    let memory = unsafe { std::slice::from_raw_parts_mut(job.memory, job.len) };
    let done = match (work, job.write) {
        (Work::Read(reader), false) => reader.read(job.offset, memory),
        (Work::Fill(filler), true) => filler.write(job.offset, memory),
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    match done {
        Ok(()) => Ok(job.len as u64),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}
