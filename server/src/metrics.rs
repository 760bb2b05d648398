//! Metrics for whoever collects them: a thread that answers HTTP and asks the workers.
//!
//! Nothing is counted for it: an answer is made of what `ctl stats` tells. A client can cost itself
//! alone: connections are few, their requests bounded, their time limited, and however often they ask,
//! workers are asked for a tenth of the time at most.

mod clients;
mod http;
mod process;
mod snapshot;
mod text;

use super::control::{Detail, all_facts, stats};
use super::disks::Disks;
use super::host::{Host, SocketFile};
use super::survive::survive;
use anyhow::Context;
use clients::Clients;
use process::ProcessFigures;
use ringway_control::config::MetricsAt;
use ringway_core::panic_point;
use ringway_vhost_user::Access;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use snapshot::Snapshot;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A new answer is made after so many times the time that the last one took.
const REST: u32 = 9;
/// How long to leave the host alone when it has no descriptor for a new client.
const BREATH: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Where clients come in.
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, #[allow(dead_code, reason = "removes the file")] SocketFile),
}

impl Listener {
    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(stream.into())
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(stream.into())
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }
}

/// A place for metrics that is listened on.
pub(crate) struct Metrics {
    listener: Listener,
    at: MetricsAt,
    process: ProcessFigures,
}

/// Metrics that are told; dropping it ends the thread.
pub(crate) struct Running {
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // One write can not fill the counter.
        let _ = rustix::io::write(&*self.end, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Metrics {
    /// Listens. Before the sandbox: no port can be had in it.
    ///
    /// # Errors
    /// What is wrong with the address.
    pub(crate) fn listen(at: &MetricsAt, host: &Host) -> anyhow::Result<Self> {
        let (listener, at) = match at {
            MetricsAt::Tcp(address) => {
                let listener =
                    TcpListener::bind(address).with_context(|| format!("--metrics {address}"))?;
                listener.set_nonblocking(true)?;
                // Port 0 is any that is free.
                let at = MetricsAt::Tcp(listener.local_addr()?);
                (Listener::Tcp(listener), at)
            }
            MetricsAt::Unix(path) => {
                let (listener, file) = host
                    .listen(path, true, Access::PRIVATE)
                    .with_context(|| format!("--metrics {at}"))?;
                listener.set_nonblocking(true)?;
                let at = MetricsAt::Unix(file.path().into());
                (Listener::Unix(listener, file), at)
            }
        };
        Ok(Self { listener, at, process: ProcessFigures::open() })
    }

    /// Where it is.
    pub(crate) fn at(&self) -> &MetricsAt {
        &self.at
    }

    /// Answers until `Running` is dropped.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn run(self, disks: &Arc<Disks>) -> io::Result<Running> {
        let Self { listener, at, process } = self;
        if at.is_public() {
            tracing::warn!("metrics at {at}: whoever can reach this address can read them");
        }
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stop = Arc::clone(&end);
        let mut gather = Gather { disks: Arc::clone(disks), process, last: None };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(move || {
            while survive("the thread that tells metrics", || serve(&listener, &mut gather, &stop))
                .is_none()
            {
                // Not too fast, if it panics over all it hears.
                let _ = poll(&mut [PollFd::new(&*stop, PollFlags::IN)], Some(&BREATH));
            }
        })?;
        Ok(Running { end, thread: Some(thread) })
    }
}

fn serve(listener: &Listener, gather: &mut Gather, stop: &OwnedFd) {
    let mut clients = Clients::default();
    // Until then the host has no descriptor for one more.
    let mut out_of_breath: Option<Instant> = None;
    loop {
        let accepts = out_of_breath.is_none_or(|until| Instant::now() >= until);
        let (stopped, comes) = clients.wait(stop.as_fd(), accepts.then_some(listener.as_fd()));
        if stopped {
            return;
        }
        if comes {
            out_of_breath = None;
            match listener.accept() {
                Ok(stream) => {
                    panic_point!("metrics");
                    clients.add(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => out_of_breath = Some(Instant::now() + Duration::from_millis(100)),
            }
        }
        clients.attend(&mut |wanted| gather.answer(wanted));
    }
}

/// Makes answers.
struct Gather {
    disks: Arc<Disks>,
    process: ProcessFigures,
    last: Option<Gathered>,
}

struct Gathered {
    at: Instant,
    took: Duration,
    /// As OpenMetrics, and in Prometheus' own older format.
    texts: [Arc<str>; 2],
}

impl Gather {
    fn answer(&mut self, format: text::Format) -> Arc<str> {
        let fresh = |last: &&Gathered| last.at.elapsed() < last.took * REST;
        if self.last.as_ref().filter(fresh).is_none() {
            self.last = Some(self.gather());
        }
        let last = self.last.as_ref().map(|last| Arc::clone(&last.texts[format as usize]));
        last.unwrap_or_else(|| "".into())
    }

    fn gather(&self) -> Gathered {
        let begun = Instant::now();
        let detail = Detail { buckets: false, histograms: true };
        let stats = stats(&self.disks, None, detail);
        let facts = all_facts(&self.disks);
        let took = begun.elapsed();
        let snapshot =
            Snapshot::new(stats, facts, self.process.now(), took, self.disks.events.lost());
        let text = text::open_metrics(snapshot);
        let plain = text::plain(&text);
        let at = Instant::now();
        Gathered { at, took: begun.elapsed(), texts: [text.into(), plain.into()] }
    }
}
