//! The transport: a queue, its engine, and a guest. The driver is that of TCP sockets, which says how many
//! bytes wait to be read; eight of them ask for a sector.

use ringway_aio::{
    BellId, Command, CommandRefused, Counters, Done, Engine, FileId, Full, Io, IoUring,
    IoUringSetup, Limits, Reaped,
};
use ringway_core::{ByteRange, Op, Request, Segment, Status};
use ringway_disk::{Disk, EngineKind};
use ringway_export::{
    Alarm, Armed, Broken, CommandSender, CommandSetup, Handle, Polling, Pool, Pop, QueueCommand,
    QueueId, QueueLifecycle, RequestQueue, WorkerOptions,
};
use ringway_testkit::rig::{RigOptions, open_patiently};
use ringway_testkit::{Need, skip};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// `SOCKET_URING_OP_SIOCINQ` of `linux/io_uring.h`: how many bytes wait to be read.
const BYTES_TO_READ: u32 = 0;
/// How long anything may take before a test fails: a loaded machine is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const SECTORS: u64 = 256;
pub(crate) const DEPTH: u16 = 16;

pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a test does to an engine, and sees of it and of a queue.
#[derive(Default)]
pub(crate) struct Shared {
    /// Results stay in the engine, as if their driver waited for a guest.
    pub(crate) holds: AtomicBool,
    pub(crate) held: AtomicU32,
    /// So many commands find no room.
    pub(crate) full: AtomicU32,
    /// Queues that were dropped.
    pub(crate) dropped: AtomicU32,
    pub(crate) breaks: AtomicBool,
    pub(crate) panics: AtomicBool,
}

/// An engine whose results of commands can be kept back.
struct Gate<E> {
    engine: E,
    shared: Arc<Shared>,
    held: Vec<Done>,
}

impl<E: Engine> Engine for Gate<E> {
    fn limits(&self) -> &Limits {
        self.engine.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.engine.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.engine.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.engine.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.engine.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { self.engine.queue(io) }
    }

    unsafe fn queue_command(&mut self, command: &Command<'_>) -> Result<(), CommandRefused> {
        if self.shared.full.load(SeqCst) > 0 {
            self.shared.full.fetch_sub(1, SeqCst);
            return Err(CommandRefused::Full);
        }
        // SAFETY: passed on to the caller.
        unsafe { self.engine.queue_command(command) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.engine.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        let found = self.engine.reap(out);
        self.held.append(&mut out.commands);
        if !self.shared.holds.load(SeqCst) {
            out.commands.append(&mut self.held);
        }
        self.shared.held.store(u32::try_from(self.held.len()).unwrap(), SeqCst);
        found
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.engine.wait(timeout)
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.engine.submit_and_wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.engine.counters()
    }
}

/// A queue of this transport.
pub(crate) struct Asking {
    stream: TcpStream,
    setup: Option<CommandSetup>,
    shared: Arc<Shared>,
    /// The tag of the command that is in flight, and of the next one.
    pub(crate) asked: Option<u32>,
    next: u32,
    /// There may be requests of which no result has said anything.
    wants: bool,
    stops: bool,
    /// Requests that the last result has brought.
    brought: usize,
    answers: Vec<u8>,
    pub(crate) refused: u32,
}

impl Asking {
    /// Nothing is popped while a command is in flight: its result would count that as well.
    fn may_ask(&self) -> bool {
        let may = self.wants && self.asked.is_none() && self.brought == 0 && !self.stops;
        may && self.setup.is_some()
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.shared.dropped.fetch_add(1, SeqCst);
    }
}

impl RequestQueue for Asking {
    type Token = Box<[u8; 512]>;

    fn pop(&mut self, request: &mut Request) -> Result<Pop<Self::Token>, Broken> {
        assert!(!self.shared.panics.load(SeqCst), "told to");
        if self.shared.breaks.load(SeqCst) {
            return Err(Broken::rule(io::Error::other("told to")));
        }
        if self.brought == 0 {
            return Ok(Pop::Empty);
        }
        self.brought -= 1;
        let mut sector = [0; 8];
        self.stream.read_exact(&mut sector).unwrap();
        let mut token = Box::new([0; 512]);
        request.op = Op::Read;
        request.range = ByteRange::from_sector(u64::from_le_bytes(sector), 512).unwrap();
        request.segments.clear();
        assert!(request.segments.push(Segment { base: token.as_mut_ptr(), len: 512 }));
        Ok(Pop::Request(token))
    }

    fn effort(&self) -> u32 {
        1
    }

    fn complete(&mut self, token: Self::Token, status: Status, _written: u32) {
        assert_eq!(status, Status::Ok);
        self.answers.extend(&token[..8]);
    }

    fn publish(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.answers)?;
        self.answers.clear();
        Ok(())
    }

    fn has_work(&self) -> bool {
        self.brought > 0
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        self.disarm();
        Ok(if self.has_work() || self.may_ask() { Armed::WorkArrived } else { Armed::Quiet })
    }

    fn disarm(&mut self) {
        self.wants |= rustix::io::ioctl_fionread(&self.stream).unwrap() >= 8;
    }
}

impl QueueLifecycle for Asking {
    const HAS_COMMANDS: bool = true;

    /// The socket rings for bytes; what is to be read there only a command says.
    fn doorbell(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        DEPTH
    }

    fn wind_down(&mut self) {
        self.stops = true;
    }

    fn command_setup(&self) -> Option<CommandSetup> {
        self.setup.clone()
    }

    fn send_commands<E: Engine>(&mut self, to: &mut CommandSender<'_, E>) {
        if !self.may_ask() {
            return;
        }
        let command = QueueCommand { tag: self.next, op: BYTES_TO_READ, addr: 0, data: &[] };
        // SAFETY: the command names no memory, and has one result.
        match unsafe { to.send(&command) } {
            Ok(()) => {
                self.asked = Some(self.next);
                self.next = self.next.wrapping_add(1);
                self.wants = false;
                // It has asked for one at a time.
                // SAFETY: as above.
                assert_eq!(unsafe { to.send(&command) }, Err(CommandRefused::Full));
            }
            Err(error) => {
                assert_eq!(error, CommandRefused::Full);
                self.refused += 1;
            }
        }
    }

    fn command_done(&mut self, tag: u32, result: i32) {
        assert_eq!(self.asked.take(), Some(tag), "another queue's, or an old one");
        self.brought = usize::try_from(result).expect("bytes") / 8;
    }
}

/// One worker, and a disk whose sectors are full of their numbers.
pub(crate) struct Scene {
    pub(crate) pool: Pool<Asking>,
    disk: Arc<Disk>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) failures: Arc<AtomicU32>,
    _folder: tempfile::TempDir,
}

/// A guest's end of a queue.
pub(crate) struct Guest {
    pub(crate) id: QueueId,
    pub(crate) stream: TcpStream,
    pub(crate) alarms: Receiver<Alarm>,
}

impl Guest {
    /// Asks for sectors, and judges what they hold.
    pub(crate) fn ask(&mut self, sectors: impl Iterator<Item = u64>) {
        let mut asked: Vec<_> = sectors.collect();
        let bytes: Vec<_> = asked.iter().flat_map(|sector| sector.to_le_bytes()).collect();
        self.stream.write_all(&bytes).unwrap();
        let mut answers = vec![0; bytes.len()];
        self.stream.read_exact(&mut answers).unwrap();
        let mut found: Vec<_> =
            answers.chunks(8).map(|eight| u64::from_le_bytes(eight.try_into().unwrap())).collect();
        asked.sort_unstable();
        found.sort_unstable();
        assert_eq!(asked, found);
    }
}

impl Scene {
    pub(crate) fn with<E: Engine + 'static>(
        make: impl Fn() -> io::Result<E> + Clone + Send + 'static,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.img");
        let sectors: Vec<u8> = (0..SECTORS).flat_map(|n| n.to_le_bytes().repeat(64)).collect();
        std::fs::write(&path, sectors).unwrap();
        let disk = RigOptions::buffered(&path, EngineKind::Threads).disk;
        let disk = Arc::new(open_patiently(&disk).unwrap());
        let (shared, failures) = (Arc::<Shared>::default(), Arc::<AtomicU32>::default());
        let (gate, failed) = (Arc::clone(&shared), Arc::clone(&failures));
        let on_failure = Arc::new(move || {
            failed.fetch_add(1, SeqCst);
        });
        let options = WorkerOptions { polling: Polling::Never, ..WorkerOptions::default() };
        let pool = Pool::with_engines(1, options, on_failure, move |_| {
            Ok(Gate { engine: make()?, shared: Arc::clone(&gate), held: Vec::new() })
        });
        Self { pool: pool.unwrap(), disk, shared, failures, _folder: folder }
    }

    /// With an io_uring that takes so many commands at a time; `None`, and the test is left out, if there
    /// is none here.
    pub(crate) fn uring(commands: u32) -> Option<Self> {
        let make = move || IoUring::new(IoUringSetup { commands, ..IoUringSetup::new(64) });
        let engine = match make() {
            Ok(engine) => engine,
            Err(e) => {
                skip(Need::IoUring, e);
                return None;
            }
        };
        if engine.limits().commands.is_none() || !sockets_take_commands(engine) {
            skip(Need::IoUringFeature, "sockets take no commands (they do since Linux 6.7)");
            return None;
        }
        Some(Self::with(make))
    }

    pub(crate) fn worker(&self) -> &Handle<Asking> {
        &self.pool.handles()[0]
    }

    /// A queue with room for `depth` commands of `bytes` bytes, or without any.
    pub(crate) fn add(&self, commands: Option<(u32, usize)>) -> io::Result<Guest> {
        let (guest, stream) = pair();
        let file = Arc::new(File::from(OwnedFd::from(stream.try_clone().unwrap())));
        let queue = Asking {
            stream,
            setup: commands.map(|(depth, bytes)| CommandSetup { file, depth, bytes }),
            shared: Arc::clone(&self.shared),
            asked: None,
            next: 7,
            wants: true,
            stops: false,
            brought: 0,
            answers: Vec::new(),
            refused: 0,
        };
        let (raise, alarms) = channel();
        let raise = Box::new(move |alarm| {
            let _ = raise.send(alarm);
        });
        let id = self.worker().add(queue, Arc::clone(&self.disk), false, raise);
        let id = id.map_err(|refused| refused.error)?;
        Ok(Guest { id, stream: guest, alarms })
    }

    /// A queue with a command that stays in flight.
    pub(crate) fn add_held(&self) -> Guest {
        self.shared.holds.store(true, SeqCst);
        let guest = self.add(Some((1, 0))).unwrap();
        until("its command has a result", || self.shared.held.load(SeqCst) == 1);
        guest
    }

    /// Stops a queue whose command is in flight: it comes back when the result has come, and not before.
    pub(crate) fn stop_held(&self, id: QueueId) {
        let stopped = self.worker().stop(id).unwrap();
        for _ in 0..5 {
            // Each is a turn, at whose end a queue is given back that may go.
            self.worker().stats().unwrap();
            assert!(matches!(stopped.try_recv(), Err(TryRecvError::Empty)), "in flight");
            assert_eq!(self.shared.dropped.load(SeqCst), 0);
        }
        self.shared.holds.store(false, SeqCst);
        self.worker().stats().unwrap();
        let ring = stopped.recv_timeout(PATIENCE).expect("it may go").ring;
        assert_eq!(ring.asked, None, "it was given the result");
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    guest.set_nodelay(true).unwrap();
    guest.set_read_timeout(Some(PATIENCE)).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nodelay(true).unwrap();
    (guest, ours)
}

fn sockets_take_commands(mut engine: IoUring) -> bool {
    let (_guest, socket) = pair();
    let file = engine.attach(&Arc::new(File::from(OwnedFd::from(socket)))).unwrap();
    let command = Command { tag: 1, file, op: BYTES_TO_READ, addr: 0, data: &[] };
    // SAFETY: the command names no memory.
    unsafe { engine.queue_command(&command) }.unwrap();
    let mut out = Reaped::default();
    while out.commands.is_empty() {
        engine.submit_and_wait(Some(PATIENCE)).unwrap();
        engine.reap(&mut out);
    }
    out.commands[0].result != -libc::EOPNOTSUPP
}
