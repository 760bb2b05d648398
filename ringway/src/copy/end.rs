//! One end of a copy: a file through an engine, a disk through a queue of our front-end, or a qcow2
//! image through threads.
//!
//! All take the same three operations (read, write, zero) and answer by a ticket. An operation may be
//! carried out in part; the flow asks for the rest.

use super::args::Prealloc;
use super::image::ImageEnd;
pub(super) use super::operation::{Operation, Ticket, Verb};
use anyhow::{Context, anyhow, ensure};
use ringway_aio::{Engine, FileId, Io, IoMemory, IoOp};
use ringway_bench::ServedHere;
use ringway_bench::elsewhere::{Allocated, Allocation};
use ringway_core::{Segment, Status};
use ringway_driver::{BlkQueue, Buffer, Data, Device, Refusal, Rejected};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What transfers around the page cache need of offsets, lengths and memory.
pub(super) const DIRECT: u64 = 4096;

/// What became of an operation that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// As much of it as the end takes at once is under way, in this way.
    Sent(Method),
    /// No room now: try again after a completion.
    Full,
    /// Zeroes have to be written.
    CannotZero,
}

/// How an operation was given. Several are in flight when the first one of them is refused: each that
/// comes back is judged by the way it went, not by the one that is in use since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// In the only way there is.
    Only,
    /// Around the page cache.
    Direct,
    Punching,
    ZeroRange,
}

/// How a file takes zeroes; each is tried until it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroBy {
    Punching,
    ZeroRange,
    Writing,
}

/// A file or block device.
#[derive(Debug)]
pub(super) struct FileEnd {
    pub(super) file: Arc<File>,
    pub(super) regular: bool,
    direct: Option<Arc<File>>,
    ids: Option<(FileId, Option<FileId>)>,
    zero_by: ZeroBy,
    may_be_cached: bool,
}

impl FileEnd {
    /// `file` goes through the page cache, `direct` around it. A file that is only read may be taken
    /// from the page cache where it is there already.
    pub(super) fn new(file: File, direct: Option<File>, regular: bool, source: bool) -> Self {
        Self {
            file: Arc::new(file),
            regular,
            direct: direct.map(Arc::new),
            ids: None,
            zero_by: ZeroBy::Punching,
            may_be_cached: source && regular,
        }
    }

    /// From now on no space is given back where zeroes are written.
    pub(super) fn keep_space(&mut self, how: Prealloc) {
        self.zero_by = match how {
            Prealloc::Off => ZeroBy::Punching,
            Prealloc::Falloc => ZeroBy::ZeroRange,
            Prealloc::Full => ZeroBy::Writing,
        };
    }

    fn attach(&mut self, engine: &mut dyn Engine) -> io::Result<()> {
        let direct = self.direct.as_ref().map(|file| engine.attach(file)).transpose()?;
        self.ids = Some((engine.attach(&self.file)?, direct));
        Ok(())
    }

    /// The descriptor for a transfer: around the page cache if that can be, unless what is asked
    /// for is in it.
    fn pick(&self, operation: &Operation, memory: *mut u8) -> (FileId, Method) {
        let (cached, direct) = self.ids.expect("the end is attached");
        let words = operation.offset | operation.len | memory as u64;
        match direct {
            Some(direct) if words % DIRECT == 0 => {
                let read = operation.verb == Verb::Read && self.may_be_cached;
                if read && is_cached(&self.file, operation.offset, operation.len) {
                    return (cached, Method::Only);
                }
                (direct, Method::Direct)
            }
            _ => (cached, Method::Only),
        }
    }

    /// True if an operation that was given by `method` is worth giving again: in another way, which is
    /// that of all later ones.
    pub(super) fn adapt(&mut self, method: Method, errno: i32) -> bool {
        let refused =
            matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS | libc::ENODEV);
        match method {
            _ if matches!(errno, libc::EAGAIN | libc::EINTR) => true,
            Method::Punching if refused => {
                if self.zero_by == ZeroBy::Punching {
                    self.zero_by = ZeroBy::ZeroRange;
                }
                true
            }
            Method::ZeroRange if refused => {
                self.zero_by = ZeroBy::Writing;
                true
            }
            // Less than we ask for is what O_DIRECT needs of some files.
            Method::Direct if errno == libc::EINVAL => {
                if let Some((_, direct)) = &mut self.ids {
                    *direct = None;
                }
                true
            }
            _ => false,
        }
    }
}

/// True if all of a range lies in the page cache, by cachestat(2), since Linux 6.5.
fn is_cached(file: &File, offset: u64, len: u64) -> bool {
    /// The same number on all architectures.
    const CACHESTAT: libc::c_long = 451;
    let range = [offset, len];
    // struct cachestat: cached, dirty, writeback, evicted, recently evicted, in pages.
    let mut pages = [0u64; 5];
    let fd = file.as_raw_fd();
    // SAFETY: the kernel reads two words and writes five; unknown to old kernels, it does nothing.
    let rc = unsafe { libc::syscall(CACHESTAT, fd, &raw const range, &raw mut pages, 0u32) };
    rc == 0 && pages[0] * ringway_core::mem::page_size() as u64 >= len
}

/// A disk behind a socket.
#[derive(Debug)]
pub(super) struct DiskEnd {
    pub(super) device: Device,
    pub(super) queue: BlkQueue<Flight>,
    /// Bytes of each buffer of a request.
    pub(super) piece: usize,
    zeroes: Option<u64>,
    flush: bool,
    /// Of a source whose server tells.
    pub(super) allocation: Option<Allocation>,
    /// Who serves it, if that is this process; ends after `device`.
    _served: Option<ServedHere>,
}

/// How long what is in flight is waited for once the program is to end: a disk that is slow answers by
/// then, and who sent the signal does not wait for a server that never will.
const GRACE: Duration = Duration::from_secs(5);

/// How often to look for signals and servers that have gone while nothing completes.
pub(super) const POLL_EVERY: Duration = Duration::from_millis(100);

/// Knows when servers are waited for no more.
#[derive(Debug)]
pub(super) struct Patience<'a> {
    signal: &'a AtomicUsize,
    asked: Option<Instant>,
}

impl<'a> Patience<'a> {
    /// `signal` is not 0 once the program is to end.
    pub(super) fn new(signal: &'a AtomicUsize) -> Self {
        Self { signal, asked: None }
    }

    /// True once the program is to end.
    pub(super) fn is_asked(&self) -> bool {
        self.signal.load(Relaxed) != 0
    }

    /// True if that was so some time ago.
    pub(super) fn is_over(&mut self) -> bool {
        self.is_asked() && self.asked.get_or_insert_with(Instant::now).elapsed() >= GRACE
    }
}

/// What a request carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) ticket: Ticket,
    /// Of the slot's pieces.
    first: usize,
    pub(super) len: u64,
}

impl Flight {
    /// Of a request that belongs to no slot.
    pub(super) const NONE: Self = Self { ticket: Ticket::SYNC, first: 0, len: 0 };
}

impl DiskEnd {
    pub(super) fn new(
        mut device: Device,
        served: Option<ServedHere>,
        allocation: Option<Allocation>,
    ) -> Result<Self, ringway_driver::Error> {
        let queue = device.queue()?;
        let info = device.info();
        // As large as zeroes are looked for, unless the server takes less in one piece.
        let most = info.size_max.map_or(usize::MAX, |max| max as usize).max(512);
        let piece = super::zero::UNIT.min(1 << most.ilog2());
        let zeroes = info.max_write_zeroes_sectors.map(|sectors| u64::from(sectors) * 512);
        let flush = info.flush;
        Ok(Self { queue, piece, zeroes, flush, allocation, device, _served: served })
    }

    /// The most bytes of one request.
    pub(super) fn chunk(&self) -> usize {
        self.piece * self.queue.max_buffers().max(1)
    }

    /// Makes all that was written durable, however long that takes; `signal` is not 0 once the program
    /// is to end.
    ///
    /// # Errors
    /// A server that fails it, or has gone, or has not answered what it was given before; one that is
    /// silent, once the program is to end.
    pub(super) fn flush(&mut self, signal: &AtomicUsize) -> anyhow::Result<()> {
        ensure!(self.queue.in_flight() == 0, "its server has not answered what it was given");
        if !self.flush {
            return Ok(());
        }
        self.queue.flush(Flight::NONE).map_err(|rejected| rejected.why)?;
        let mut patience = Patience::new(signal);
        let done = loop {
            self.queue.wait(Some(POLL_EVERY))?;
            if let Some(done) = self.queue.pop()? {
                break done;
            }
            ensure!(!patience.is_over(), "its server does not answer the flush");
        };
        if done.is_ok() { Ok(()) } else { Err(anyhow!("its server fails the flush")) }
    }

    fn transfer(
        &mut self,
        operation: &Operation,
        pieces: &mut [Option<Buffer>],
    ) -> anyhow::Result<Given> {
        let first = operation.at / self.piece;
        debug_assert!(operation.at % self.piece == 0);
        let most = (self.piece * self.queue.max_buffers()) as u64;
        let len = operation.len.min(most);
        let mut left = usize::try_from(len.next_multiple_of(512))?;
        let mut buffers = Vec::with_capacity(left.div_ceil(self.piece));
        for place in &mut pieces[first..] {
            if left == 0 {
                break;
            }
            let mut buffer = place.take().expect("a piece is in one request at a time");
            buffer.set_len(left.min(self.piece));
            left -= buffer.len();
            buffers.push(buffer);
        }
        let flight = Flight { ticket: operation.ticket, first, len };
        let queued = match operation.verb {
            Verb::Read => self.queue.read_vectored(operation.offset, buffers, flight),
            _ => self.queue.write_vectored(operation.offset, buffers, flight),
        };
        match queued {
            Ok(()) => Ok(Given::Sent(Method::Only)),
            Err(Rejected { why, data, .. }) => {
                give(&mut pieces[first..], data.into_buffers());
                if why == Refusal::Full { Ok(Given::Full) } else { Err(why.into()) }
            }
        }
    }

    fn zero(&mut self, operation: &Operation) -> anyhow::Result<Given> {
        let Some(max) = self.zeroes.filter(|&max| max > 0) else { return Ok(Given::CannotZero) };
        let len = operation.len.min(max);
        let flight = Flight { ticket: operation.ticket, first: 0, len };
        let whole = len.next_multiple_of(512);
        match self.queue.write_zeroes(operation.offset, whole, true, flight) {
            Ok(()) => Ok(Given::Sent(Method::Only)),
            Err(rejected) if rejected.why == Refusal::Full => Ok(Given::Full),
            Err(rejected) => Err(rejected.why.into()),
        }
    }

    /// Zeroes that were refused are written from now on; false if nothing else can be tried.
    pub(super) fn adapt(&mut self, verb: Verb, status: Status) -> bool {
        let refused = verb == Verb::Zero && status == Status::Unsupported;
        if refused {
            self.zeroes = None;
        }
        refused
    }
}

/// Gives buffers back to the pieces of their slot.
pub(super) fn put_back(pieces: &mut [Option<Buffer>], flight: &Flight, data: Data) {
    let first = flight.first.min(pieces.len());
    give(&mut pieces[first..], data.into_buffers());
}

fn give(places: &mut [Option<Buffer>], buffers: Vec<Buffer>) {
    for (place, mut buffer) in places.iter_mut().zip(buffers) {
        buffer.set_len(buffer.capacity());
        *place = Some(buffer);
    }
}

/// One end of a copy.
#[derive(Debug)]
pub(super) enum End {
    File(FileEnd),
    Disk(Box<DiskEnd>),
    Image(Box<ImageEnd>),
}

/// The memory of a slot at one end: `base`, and for a disk the buffers it consists of.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) base: *mut u8,
    pub(super) pieces: Vec<Option<Buffer>>,
}

impl End {
    /// Makes the end known to the engine: its files, or the doorbell of its queue.
    pub(super) fn attach(&mut self, engine: &mut dyn Engine, bell: u32) -> io::Result<()> {
        match self {
            Self::File(file) => file.attach(engine),
            Self::Disk(disk) => engine.watch(bell, disk.queue.call_fd().as_raw_fd()),
            Self::Image(image) => image.attach(engine, bell),
        }
    }

    /// True if it is known that all of it reads as zeroes: an image of a cluster that has no data.
    pub(super) fn is_known_to_be_empty(&self) -> bool {
        let Self::Disk(disk) = self else { return false };
        let Some(Allocation::Cluster(image)) = &disk.allocation else { return false };
        // A cluster that cannot tell is one that has not told.
        let data = Allocated::new(image).and_then(|mut image| image.next_data(0));
        data.is_ok_and(|data| data.is_none())
    }

    /// Gives an operation. `segment` is the place for what the engine needs of it until it is done.
    ///
    /// # Safety
    /// Until the ticket comes back, or the engine is gone and [`End::quiesce`] done: `memory` has room
    /// for the operation, and neither it nor `segment` is touched.
    pub(super) unsafe fn give(
        &mut self,
        engine: &mut dyn Engine,
        operation: &Operation,
        memory: &mut Memory,
        segment: &mut Segment,
    ) -> anyhow::Result<Given> {
        let file = match (self, operation.verb) {
            (Self::Disk(disk), Verb::Zero) => return disk.zero(operation),
            (Self::Disk(disk), _) => return disk.transfer(operation, &mut memory.pieces),
            // What was never written of a new image reads as zeroes.
            (Self::Image(_), Verb::Zero) => return Ok(Given::CannotZero),
            (Self::Image(image), _) => {
                let base = memory.base.wrapping_add(operation.at);
                // SAFETY: passed on to the caller.
                unsafe { image.give(operation, base)? };
                return Ok(Given::Sent(Method::Only));
            }
            (Self::File(file), _) => file,
        };
        let base = memory.base.wrapping_add(operation.at);
        *segment = Segment { base, len: usize::try_from(operation.len).unwrap_or(usize::MAX) };
        let (cached, _) = file.ids.context("not attached")?;
        let (op, (id, method)) = match (operation.verb, file.zero_by) {
            (Verb::Read, _) => (IoOp::Read, file.pick(operation, base)),
            (Verb::Write, _) => (IoOp::Write, file.pick(operation, base)),
            (Verb::Zero, ZeroBy::Punching) => (IoOp::PunchHole, (cached, Method::Punching)),
            (Verb::Zero, ZeroBy::ZeroRange) => (IoOp::ZeroRange, (cached, Method::ZeroRange)),
            (Verb::Zero, ZeroBy::Writing) => return Ok(Given::CannotZero),
        };
        let segments: &[Segment] =
            if operation.verb == Verb::Zero { &[] } else { std::slice::from_ref(segment) };
        let (tag, offset, len) = (operation.ticket.tag(), operation.offset, operation.len);
        let io = Io { tag, op, file: id, offset, len, memory: segments.into() };
        // SAFETY: passed on to the caller; the file is attached, the length is a chunk's.
        match unsafe { engine.queue(&io) } {
            Ok(()) => Ok(Given::Sent(method)),
            Err(ringway_aio::Full) => Ok(Given::Full),
        }
    }

    /// Begins to make all that was written durable. False if it is already.
    pub(super) fn sync(&mut self, engine: &mut dyn Engine) -> anyhow::Result<bool> {
        match self {
            Self::Disk(disk) if !disk.flush => Ok(false),
            // It becomes durable as a whole, or not at all.
            Self::Image(_) => Ok(false),
            Self::Disk(disk) => {
                disk.queue.flush(Flight::NONE).map_err(|rejected| anyhow!(rejected.why))?;
                Ok(true)
            }
            Self::File(file) => {
                let (id, _) = file.ids.context("not attached")?;
                let (tag, op) = (Ticket::SYNC.tag(), IoOp::Sync);
                let io = Io { tag, op, file: id, offset: 0, len: 0, memory: IoMemory::NONE };
                // SAFETY: no memory takes part, and the file is attached.
                unsafe { engine.queue(&io) }.map_err(|_| anyhow!("the engine is full"))?;
                Ok(true)
            }
        }
    }

    /// True while a server has requests that it has not answered.
    pub(super) fn awaits_server(&self) -> bool {
        matches!(self, Self::Disk(disk) if disk.queue.in_flight() > 0)
    }

    /// Waits until nobody but the engine and a server touches the memory of operations.
    pub(super) fn quiesce(&mut self) {
        if let Self::Image(image) = self {
            image.quiesce();
        }
    }
}
