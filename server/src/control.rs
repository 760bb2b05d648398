//! The control socket: one thread that accepts, one for each client.
//!
//! A client can wait for the daemon, the daemon never waits for a client: lines are bounded, clients
//! are few, one that does not read is given up, and the one that has been silent longest makes room
//! for the next.

mod commands;
mod reports;

use super::connection::Connection;
use super::disks::Disks;
use super::events::Reader;
use super::host::{Host, SocketFile};
use super::service::Service;
use super::survive::survive;
use ringway_control::protocol::{Problem, ProblemKind, REQUEST_MAX, Reply, VERSION};
use ringway_control::request::ControlRequest;
use ringway_core::panic_point;
use ringway_export::WarningLimit;
use ringway_vhost_user::Access;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde_json::{Map, Value};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use commands::Taken;
pub(super) use commands::carry_out;
pub(super) use reports::{Detail, all_facts, facts, facts_apart, stats};

/// Clients at a time.
const CLIENTS_MAX: usize = 32;
/// How long a client may be in reading an answer.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// How long one that reads events may not read any.
const STALL_MAX: Duration = Duration::from_secs(600);
/// How long to leave the host alone when it has no descriptor for a new client.
const BREATH: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A control socket that is listened on.
pub(crate) struct Control {
    listener: UnixListener,
    file: SocketFile,
}

/// A control socket that is served; dropping it ends the thread and removes
/// the file. Clients that are there are heard until the process ends.
pub(crate) struct Running {
    _service: Service,
    _file: SocketFile,
}

impl Control {
    /// Listens at `path`; from the first moment only this user can connect.
    ///
    /// # Errors
    /// What is wrong with the path.
    pub(crate) fn listen(path: &Path, host: &Host) -> anyhow::Result<Self> {
        let (listener, file) = host.listen(path, true, Access::PRIVATE)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, file })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Serves clients until `Running` is dropped.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn run(self, disks: &Arc<Disks>) -> io::Result<Running> {
        let Self { listener, file } = self;
        // Clients that are there are not lost by a panic.
        let (disks, clients) = (Arc::clone(disks), Arc::default());
        let accept = move |stop: &OwnedFd| accept(&listener, &disks, &clients, stop);
        let service = Service::start("control", "the control socket", accept)?;
        Ok(Running { _service: service, _file: file })
    }
}

/// One client, as the others see it.
struct Client {
    /// Tells its thread to give it up.
    leave: Arc<OwnedFd>,
    /// `None` while a command of its is carried out.
    silent_since: Option<Instant>,
}

/// The clients that are there, by number.
#[derive(Default)]
struct Clients {
    /// The number of the next one.
    next: AtomicU64,
    list: Mutex<Vec<(u64, Client)>>,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Client)>> {
        self.list.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes room for one more. False if all are busy.
    fn make_room(&self) -> bool {
        let mut list = self.lock();
        if list.len() < CLIENTS_MAX {
            return true;
        }
        let silent = list.iter().enumerate().filter_map(|(at, (_, c))| Some((c.silent_since?, at)));
        let Some((_, at)) = silent.min() else { return false };
        let (_, client) = list.swap_remove(at);
        // One write can not fill the counter.
        let _ = rustix::io::write(&*client.leave, &1u64.to_ne_bytes());
        true
    }

    fn set_busy(&self, number: u64, busy: bool) {
        let since = (!busy).then(Instant::now);
        if let Some((_, client)) = self.lock().iter_mut().find(|(other, _)| *other == number) {
            client.silent_since = since;
        }
    }
}

fn accept(listener: &UnixListener, disks: &Arc<Disks>, clients: &Arc<Clients>, stop: &OwnedFd) {
    loop {
        let mut polled = [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // Interrupted is as good as woken: the descriptors say what there is.
        let _ = poll(&mut polled, None);
        if !polled[0].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => {
                panic_point!("control");
                let number = clients.next.fetch_add(1, Relaxed);
                if let Err(error) = attend(number, stream, disks, clients) {
                    tell("control client refused", &error);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tell("no control client accepted", &error);
                let stop = stop.as_fd();
                let _ = poll(&mut [PollFd::new(&stop, PollFlags::IN)], Some(&BREATH));
            }
        }
    }
}

/// Tells the log of a client that is not served.
fn tell(what: &str, error: &io::Error) {
    static WARNINGS: LazyLock<WarningLimit> =
        LazyLock::new(|| WarningLimit::warnings(None, "control clients that were not served"));
    if let Some(pass) = WARNINGS.pass() {
        tracing::warn!(suppressed = pass.suppressed, "{what}: {error}");
    }
}

/// Gives a client a thread of its own.
fn attend(
    number: u64,
    stream: UnixStream,
    disks: &Arc<Disks>,
    clients: &Arc<Clients>,
) -> io::Result<()> {
    let leave = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let line = Connection::new(stream, Arc::clone(&leave))?;
    if !clients.make_room() {
        let problem =
            Problem::new(ProblemKind::Busy, "too many clients are waiting: try again later");
        return write(&line, None, Err(problem));
    }
    let client = Client { leave, silent_since: Some(Instant::now()) };
    clients.lock().push((number, client));
    let (disks, all) = (Arc::clone(disks), Arc::clone(clients));
    let thread = std::thread::Builder::new().name("control-client".into()).spawn(move || {
        // A client that goes in the middle costs nobody else anything.
        survive("a control client's thread", || drop(serve(number, &line, &disks, &all)));
        all.lock().retain(|(other, _)| *other != number);
    });
    thread.map(drop).inspect_err(|_| clients.lock().retain(|(other, _)| *other != number))
}

fn serve(number: u64, stream: &Connection, disks: &Disks, clients: &Clients) -> io::Result<()> {
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        // One byte more than allowed tells a line that is too long from one that just fits.
        let got = (&mut lines).take(REQUEST_MAX + 1).read_until(b'\n', &mut line)?;
        if got == 0 {
            return Ok(());
        }
        if line.len() as u64 > REQUEST_MAX {
            let problem = format!("a request is one line of at most {REQUEST_MAX} bytes");
            return write(stream, None, Err(Problem::new(ProblemKind::Malformed, problem)));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        clients.set_busy(number, true);
        panic_point!("control-client");
        let (id, request) = ringway_control::request::parse(&line);
        // The daemon ends once whoever removes a disk has heard how that went.
        let removes = matches!(request, Ok(ControlRequest::Remove(_)));
        let _removing = removes.then(|| disks.removals.begin());
        match commands::take(disks, request) {
            Ok(Taken::Answer(answer)) => {
                clients.set_busy(number, false);
                write(stream, id, Ok(answer))?;
            }
            Ok(Taken::Events(reader)) => {
                write(stream, id, Ok(Value::Object(Map::new())))?;
                return tell_events(stream, &reader);
            }
            Err(problem) => {
                clients.set_busy(number, false);
                write(stream, id, Err(problem))?;
            }
        }
    }
}

/// Tells events until the client goes. It is busy all the time: no other one takes its place.
fn tell_events(stream: &Connection, reader: &Reader<'_>) -> io::Result<()> {
    loop {
        stream.wait_for(reader.bell())?;
        for event in reader.take() {
            let mut bytes = serde_json::to_vec(&event)?;
            bytes.push(b'\n');
            // What happens meanwhile waits, or is lost and reported as such.
            stream.write_within(&bytes, STALL_MAX)?;
        }
    }
}

fn write(
    stream: &Connection,
    id: Option<Value>,
    outcome: Result<Value, Problem>,
) -> io::Result<()> {
    let (answer, error) = match outcome {
        Ok(answer) => (Some(answer), None),
        Err(problem) => (None, Some(problem)),
    };
    let reply = Reply { version: VERSION, id, ok: error.is_none(), answer, error };
    let mut bytes = serde_json::to_vec(&reply)?;
    bytes.push(b'\n');
    stream.write_within(&bytes, WRITE_MAX)
}
