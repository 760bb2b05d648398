//! Metrics for whoever collects them: a thread that answers HTTP and asks the workers.
//!
//! Nothing is counted for it: an answer is made of what `ctl stats` tells. A client can cost itself
//! alone: connections are few, their requests bounded, their time limited, and however often they ask,
//! workers are asked for a tenth of the time at most.

mod clients;
mod encode;
mod http;
mod names;
mod process;
mod snapshot;
mod text;

use super::control::{Detail, all_facts, stats};
use super::disks::Disks;
use super::host::{Host, SocketFile};
use super::service::Service;
use anyhow::anyhow;
use clients::Clients;
use names::Names;
use process::ProcessFigures;
use ringway_control::config::MetricsAt;
use ringway_core::panic_point;
use ringway_vhost_user::Access;
use snapshot::Snapshot;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A new answer is made after so many times the time that the last one took.
const REST: u32 = 9;
/// How long to leave the host alone when it has no descriptor for a new client.
const BREATH: Duration = Duration::from_millis(100);

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

/// Why nobody can listen there, and what to do.
fn refused(error: &io::Error) -> anyhow::Error {
    let what_to_do = match error.kind() {
        io::ErrorKind::AddrInUse => ": another process listens there. Choose another port",
        io::ErrorKind::AddrNotAvailable => ": this host has no such address",
        io::ErrorKind::PermissionDenied => {
            ": ports below 1024 are for root. Choose a higher one, or start the daemon as root"
        }
        _ => "",
    };
    anyhow!("{error}{what_to_do}")
}

/// A place for metrics that is listened on.
pub(crate) struct Metrics {
    listener: Listener,
    at: MetricsAt,
    names: Names,
    process: ProcessFigures,
}

impl Metrics {
    /// Listens. Before the sandbox: no port can be had in it.
    ///
    /// # Errors
    /// What is wrong with the address.
    pub(crate) fn listen(at: &MetricsAt, names: &[String], host: &Host) -> anyhow::Result<Self> {
        let names = match at {
            MetricsAt::Tcp(_) => Names::Known(names.to_vec()),
            MetricsAt::Unix(_) => Names::Any,
        };
        let (listener, at) = match at {
            MetricsAt::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(|e| refused(&e))?;
                listener.set_nonblocking(true)?;
                // Port 0 is any that is free.
                let at = MetricsAt::Tcp(listener.local_addr()?);
                (Listener::Tcp(listener), at)
            }
            MetricsAt::Unix(path) => {
                let (listener, file) = host.listen(path, true, Access::PRIVATE)?;
                listener.set_nonblocking(true)?;
                let at = MetricsAt::Unix(file.path().into());
                (Listener::Unix(listener, file), at)
            }
        };
        Ok(Self { listener, at, names, process: ProcessFigures::open() })
    }

    /// Where it is.
    pub(crate) fn at(&self) -> &MetricsAt {
        &self.at
    }

    /// Answers until that is dropped.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn run(self, disks: &Arc<Disks>) -> io::Result<Service> {
        let Self { listener, at, names, process } = self;
        if at.is_public() {
            tracing::warn!("metrics at {at}: whoever can reach this address can read them");
        }
        let mut gather = Gather { disks: Arc::clone(disks), process, last: None };
        let mut clients = Clients::new(names);
        let serve = move |stop: &OwnedFd| serve(&listener, &mut clients, &mut gather, stop);
        Service::start("metrics", "the thread that tells metrics", serve)
    }
}

fn serve(listener: &Listener, clients: &mut Clients, gather: &mut Gather, stop: &OwnedFd) {
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
                Err(_) => out_of_breath = Some(Instant::now() + BREATH),
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
    /// As OpenMetrics.
    text: Arc<String>,
    /// In Prometheus' own older format, once somebody has asked for that.
    plain: Option<Arc<String>>,
}

impl Gathered {
    fn text(&mut self, format: text::Format) -> Arc<String> {
        match format {
            text::Format::OpenMetrics => Arc::clone(&self.text),
            text::Format::Plain => {
                let plain = self.plain.get_or_insert_with(|| Arc::new(text::plain(&self.text)));
                Arc::clone(plain)
            }
        }
    }
}

impl Gather {
    fn answer(&mut self, format: text::Format) -> Arc<String> {
        let fresh = |last: &&Gathered| last.at.elapsed() < last.took * REST;
        if self.last.as_ref().filter(fresh).is_none() {
            // Nobody who still reads it has its text, as a rule: its memory has the next one.
            let last = self.last.take().and_then(|last| Arc::into_inner(last.text));
            self.last = Some(self.gather(last.unwrap_or_default()));
        }
        self.last.as_mut().map(|last| last.text(format)).unwrap_or_default()
    }

    fn gather(&self, memory: String) -> Gathered {
        let begun = Instant::now();
        let detail = Detail { buckets: false, histograms: true };
        let stats = stats(&self.disks, None, detail);
        let facts = all_facts(&self.disks);
        let groups = self.disks.limit_group_facts();
        let took = begun.elapsed();
        let (process, lost) = (self.process.now(), self.disks.events.lost());
        let snapshot = Snapshot::new(stats, facts, groups, process, took, lost);
        let text = Arc::new(text::open_metrics(snapshot, memory));
        Gathered { at: Instant::now(), took: begun.elapsed(), text, plain: None }
    }
}
