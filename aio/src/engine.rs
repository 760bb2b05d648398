//! The contract of every engine: queue, submit, reap.
//!
//! ```text
//! engine.queue(&io)?      // no system call; the memory stays untouched until reap yields io.tag
//! engine.submit()?        // one system call for everything queued
//! engine.reap(&mut out)   // never blocks: completions and doorbells that rang
//! engine.wait(until)?     // sleeps for completions *and* doorbells, in one system call
//! ```
//!
//! Whoever has nothing else to do after `queue` calls `submit_and_wait`, which is one system call
//! where the engine can do both at once.

pub use crate::command::{Command, CommandRefused};
pub use crate::op_set::OpSet;
pub use crate::operation::{Done, FileId, Files, Full, Io, IoMemory, IoOp};
use ringway_core::Segment;
use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// What an engine takes. Ask this, never the engine's name.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The name users know the engine by, as in `--engine`.
    pub name: &'static str,
    /// How many operations may be queued or in flight at a time.
    pub depth: u32,
    /// The most segments of one operation.
    pub max_segments: usize,
    /// The most bytes of one operation that moves data.
    pub max_bytes: u32,
    /// The operations it offers.
    pub ops: OpSet,
    /// How many buffers may have a number, for [`IoMemory::Registered`]; 0: segments only.
    pub registered_buffers: u16,
    /// Whether it takes commands, and which: `None` has [`Engine::queue_command`] refuse them all.
    pub commands: Option<CommandPort>,
}

impl Limits {
    /// `UIO_MAXIOV`: the most segments the kernel takes in one operation.
    const MAX_SEGMENTS: usize = 1024;
    /// `MAX_RW_COUNT` for 4 KiB pages, and less than it for larger ones: the most bytes the kernel
    /// moves in one operation.
    const MAX_BYTES: u32 = 0x7fff_f000;

    /// All operations, `depth` of them at a time, each as large as the kernel takes it; no registered
    /// buffers and no commands.
    #[must_use]
    pub const fn new(name: &'static str, depth: u32) -> Self {
        Self {
            name,
            depth,
            max_segments: Self::MAX_SEGMENTS,
            max_bytes: Self::MAX_BYTES,
            ops: OpSet::ALL,
            registered_buffers: 0,
            commands: None,
        }
    }
}

/// The commands that an engine takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandPort {
    /// How many may be queued or in flight at a time, beside [`Limits::depth`] operations.
    pub depth: u32,
    /// The most bytes of [`Command::data`].
    pub bytes: usize,
}

/// What a storage of a kind of its own is to engines of that kind, see [`Engine::attach_handle`].
pub type Handle = Arc<dyn Any + Send + Sync>;

/// Names a doorbell to its owner.
pub type BellId = u32;

/// What a reap found. Its memory is taken once.
#[derive(Debug, Default)]
pub struct Reaped {
    /// Completed operations.
    pub done: Vec<Done>,
    /// Completed commands.
    pub commands: Vec<Done>,
    /// Doorbells that rang, possibly more than once each.
    pub rung: Vec<BellId>,
}

impl Reaped {
    /// Room for `depth` completions and `bells` doorbells. Allocates; call at start only.
    #[must_use]
    pub fn with_capacity(depth: usize, bells: usize) -> Self {
        let (done, rung) = (Vec::with_capacity(depth), Vec::with_capacity(bells));
        Self { done, commands: Vec::new(), rung }
    }

    /// The same, with room for `commands` completed commands.
    #[must_use]
    pub fn with_commands(mut self, commands: usize) -> Self {
        self.commands.reserve_exact(commands);
        self
    }

    /// Forgets what was found.
    pub fn clear(&mut self) {
        self.done.clear();
        self.commands.clear();
        self.rung.clear();
    }
}

/// System calls made and completions found: what batching is judged by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations queued.
    pub queued: u64,
    /// System calls of the worker's thread on behalf of the engine.
    pub syscalls: u64,
    /// Times the engine slept.
    pub sleeps: u64,
}

/// Asynchronous operations on files. One instance per worker, owned by one thread.
///
/// An implementation of ten lines is [`crate::null`]: copy it to begin another engine.
///
/// Every engine passes the suite in the feature `contract`. The rules it checks:
/// - each queued operation yields exactly one [`Done`], never from within `queue` or `submit`;
/// - a result may be short; the caller continues;
/// - a doorbell that rings before `wait` makes `wait` return at once; none is lost;
/// - a command, if the engine takes any, yields one [`Done`] in [`Reaped::commands`];
/// - dropping an engine waits until the kernel has let go of all memory of operations. It does not
///   wait for commands: some never end while their device lives.
pub trait Engine: Send {
    /// What it takes.
    fn limits(&self) -> &Limits;

    /// Makes a file known. Control plane: may allocate and block.
    ///
    /// # Errors
    /// What the host says.
    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId>;

    /// Makes known what only engines of its kind can use: a namespace, connections to a server, an image of a cluster.
    /// `handle` is what these know it by, and `file` stands for it. Control plane, as [`Engine::attach`].
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is of another kind, and what the host says.
    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        let _ = (file, handle);
        let why = format!("the engine {} is for files", self.limits().name);
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    /// Names the memory that operations will use, so that the engine may prepare it; replaces what
    /// was named before. A hint: operations may use other memory too, and an engine that gains
    /// nothing by it does nothing. io_uring pins the memory, all of it, which halves the cost of
    /// large transfers: not for memory that its owner may give back page by page (a balloon, free
    /// page reporting), as the kernel would go on using the old pages. Control plane.
    ///
    /// Operations may be in flight. What is queued is started first, because it was prepared for the
    /// memory named before; what is in flight keeps that memory until it is done.
    ///
    /// # Errors
    /// What the host says, or that it does not take now what is queued. No memory is named then, and
    /// operations work all the same.
    ///
    /// # Safety
    /// The memory stays mapped as it is, and no page of it is given back, until the next call or until
    /// the engine has been dropped. ([`Engine::queue`] asks for the memory of operations in flight
    /// besides, whatever is named here.)
    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        let _ = regions;
        Ok(())
    }

    /// Gives a buffer the number `number`, or with `None` takes it from the one that has it. What is
    /// in flight keeps the buffer it was queued with. Control plane.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if the engine has no [`Limits::registered_buffers`],
    /// [`io::ErrorKind::InvalidInput`] for a number beyond them, and what the host says.
    ///
    /// # Safety
    /// As [`Engine::map_memory`], for this buffer.
    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        let _ = (number, buffer);
        Err(io::Error::new(io::ErrorKind::Unsupported, "the engine has no registered buffers"))
    }

    /// Forgets a file; no operation on it may be in flight.
    fn detach(&mut self, file: FileId);

    /// True if completions of `file` were to be polled for, and its device has turned out to have no queues for that.
    fn cannot_poll(&self, file: FileId) -> bool {
        let _ = file;
        false
    }

    /// Listens to `fd`, which may be any descriptor that polls: an eventfd, a socket that is connected
    /// or listens, a pipe. It rings, which shows in [`Reaped::rung`] as `bell`,
    /// - at once if it is readable when it is watched,
    /// - whenever something arrives later: a write to an eventfd, bytes, a connection, the end of the
    ///   other side.
    ///
    /// So it rings for what arrives (an edge), not as long as something lies there (a level). The engine
    /// reads nothing. Whoever watches an eventfd need not read it either: each write rings. Whoever
    /// watches a socket or a pipe reads until it would block (`EAGAIN`) each time it rings; what is left
    /// unread may not ring again. It may ring more often than that, and with nothing to read. Control
    /// plane.
    ///
    /// # Errors
    /// What the host says, for example if `fd` is not open.
    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()>;

    /// Stops listening; `bell` may still show in the next reap. `fd` must still be open. Control plane.
    fn unwatch(&mut self, bell: BellId, fd: RawFd);

    /// Takes an operation in; no system call.
    ///
    /// # Errors
    /// [`Full`] if `limits().depth` operations are queued or in flight.
    ///
    /// # Safety
    /// The segments and the memory they name stay valid, and the memory is not touched, until
    /// `reap` yields the tag or the engine has been dropped. `io.file` is attached. The operation
    /// is one of `limits().ops` and within its limits: it names no registered buffer unless
    /// `limits().registered_buffers` has its number.
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full>;

    /// Takes a command in; no system call. [`Engine::submit`] starts it together with operations, and
    /// its result comes out of [`Engine::reap`], in [`Reaped::commands`].
    ///
    /// # Errors
    /// [`CommandRefused`]; engines without a port refuse every command.
    ///
    /// # Safety
    /// `command.file` is attached. Memory that the command names stays valid, and is used as the driver
    /// asks, until the command's result is reaped. If the engine is dropped before, until the driver
    /// has let go of it, which the file's last descriptor being closed or the driver's own words tell.
    unsafe fn queue_command(&mut self, command: &Command<'_>) -> Result<(), CommandRefused> {
        let _ = command;
        Err(CommandRefused::NoPort)
    }

    /// Starts everything queued, with one system call at most, and returns.
    ///
    /// # Errors
    /// Only if the engine is beyond use; failures of operations are results.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends what completed and which doorbells rang to `out`, without blocking.
    /// Returns the number of operations appended.
    fn reap(&mut self, out: &mut Reaped) -> usize;

    /// Looks at the doorbells without sleeping, for engines that only see them through a system
    /// call; busy workers call it every so often.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    fn poll_doorbells(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Sleeps until there is something to reap, or for at most `timeout`. May return early.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// [`Engine::submit`] and [`Engine::wait`], in one system call if the engine can do that.
    ///
    /// # Errors
    /// As these.
    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        self.wait(timeout)
    }

    /// What it has counted.
    fn counters(&self) -> Counters;
}

/// For engines chosen at run time, and for wrapping them in others.
impl<E: Engine + ?Sized> Engine for Box<E> {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        (**self).attach(file)
    }

    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        (**self).attach_handle(file, handle)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).map_memory(regions) }
    }

    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).set_buffer(number, buffer) }
    }

    fn detach(&mut self, file: FileId) {
        (**self).detach(file);
    }

    fn cannot_poll(&self, file: FileId) -> bool {
        (**self).cannot_poll(file)
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        (**self).watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        (**self).unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).queue(io) }
    }

    unsafe fn queue_command(&mut self, command: &Command<'_>) -> Result<(), CommandRefused> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).queue_command(command) }
    }

    fn submit(&mut self) -> io::Result<()> {
        (**self).submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        (**self).reap(out)
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        (**self).poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        (**self).wait(timeout)
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        (**self).submit_and_wait(timeout)
    }

    fn counters(&self) -> Counters {
        (**self).counters()
    }
}
