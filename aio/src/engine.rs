//! The contract of every engine: queue, submit, reap.
//!
//! ```text
//! engine.queue(&io)?      // no system call; the memory stays untouched until reap yields io.tag
//! engine.submit()?        // one system call for everything queued
//! engine.reap(&mut out)   // never blocks: completions and doorbells that rang
//! engine.wait(until)?     // sleeps for completions *and* doorbells, in one system call
//! ```

use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// What an engine can do to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IoOp {
    /// `preadv2`.
    Read,
    /// `pwritev2`.
    Write,
    /// `pwritev2` with RWF_DSYNC: durable when it completes.
    WriteDurable,
    /// `fdatasync`.
    Sync,
    /// `fallocate` PUNCH_HOLE | KEEP_SIZE: gives the space back; the range reads as zeroes.
    PunchHole,
    /// `fallocate` ZERO_RANGE | KEEP_SIZE: the range reads as zeroes, its space stays reserved.
    ZeroRange,
    /// BLKDISCARD on a block device: the range may read as anything.
    Discard,
}

impl IoOp {
    /// All operations, for tables and tests.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteDurable,
        Self::Sync,
        Self::PunchHole,
        Self::ZeroRange,
        Self::Discard,
    ];

    /// True if bytes move between memory and the file.
    #[must_use]
    pub const fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::WriteDurable)
    }
}

/// A set of [`IoOp`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSet(u16);

impl OpSet {
    /// Every operation.
    pub const ALL: Self = Self((1 << IoOp::ALL.len()) - 1);

    /// The set without `op`.
    #[must_use]
    pub const fn without(self, op: IoOp) -> Self {
        Self(self.0 & !(1 << op as u16))
    }

    /// True if `op` is in the set.
    #[must_use]
    pub const fn has(self, op: IoOp) -> bool {
        self.0 & (1 << op as u16) != 0
    }
}

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
}

/// A file that an engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// One operation on a file.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// Comes back with the result. The top bit must be clear: engines use it for doorbells.
    pub tag: u64,
    /// What to do.
    pub op: IoOp,
    /// To which file.
    pub file: FileId,
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes. For data the sum of the segments; 0 for [`IoOp::Sync`].
    pub len: u64,
    /// The memory; empty unless [`IoOp::moves_data`]. The list itself must live as long as the
    /// operation: engines hand it to the kernel without copying it.
    pub segments: &'a [Segment],
}

/// The only refusal of [`Engine::queue`]: nothing was queued, try again after a reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What became of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag of its [`Io`].
    pub tag: u64,
    /// Bytes moved (0 for operations that move none), or a negative `errno`, as the kernel says it.
    pub result: i32,
}

/// Names a doorbell to its owner.
pub type BellId = u32;

/// What a reap found. Its memory is taken once.
#[derive(Debug, Default)]
pub struct Reaped {
    /// Completed operations.
    pub done: Vec<Done>,
    /// Doorbells that rang, possibly more than once each.
    pub rung: Vec<BellId>,
}

impl Reaped {
    /// Room for `depth` completions and `bells` doorbells. Allocates; call at start only.
    #[must_use]
    pub fn with_capacity(depth: usize, bells: usize) -> Self {
        Self { done: Vec::with_capacity(depth), rung: Vec::with_capacity(bells) }
    }

    /// Forgets what was found.
    pub fn clear(&mut self) {
        self.done.clear();
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
/// Every engine passes `contract::suite`. The rules it checks:
/// - each queued operation yields exactly one [`Done`], never from within `queue` or `submit`;
/// - a result may be short; the caller continues;
/// - a doorbell that rings before `wait` makes `wait` return at once; none is lost;
/// - dropping an engine waits until the kernel has let go of all memory.
pub trait Engine: Send {
    /// What it takes.
    fn limits(&self) -> &Limits;

    /// Makes a file known. Control plane: may allocate and block.
    ///
    /// # Errors
    /// What the host says.
    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId>;

    /// Names the memory that operations will use, so that the engine may prepare it; replaces what
    /// was named before. A hint: operations may use other memory too, and an engine that gains
    /// nothing by it does nothing. io_uring pins the memory, all of it, which halves the cost of
    /// large transfers: not for memory that its owner may give back page by page (a balloon, free
    /// page reporting), as the kernel would go on using the old pages. Control plane.
    ///
    /// # Errors
    /// What the host says; operations work all the same.
    ///
    /// # Safety
    /// Nothing is in flight. The memory stays mapped as it is, and no page of it is given back,
    /// until other memory (or none) is named or the engine has been dropped.
    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        let _ = regions;
        Ok(())
    }

    /// Forgets a file; no operation on it may be in flight.
    fn detach(&mut self, file: FileId);

    /// Listens to `fd`, an eventfd; its ringing shows in [`Reaped::rung`] as `bell`. The counter of
    /// the eventfd need not be read by the caller. Control plane.
    ///
    /// # Errors
    /// What the host says, for example if `fd` cannot be polled.
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
    /// is one of `limits().ops` and within its limits.
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full>;

    /// Starts everything queued, with one system call at most, and returns.
    ///
    /// # Errors
    /// Only if the engine is beyond use; failures of operations are results.
    fn submit(&mut self) -> io::Result<()>;

    /// Appends what completed and which doorbells rang to `out`, without blocking.
    /// Returns the number of completions appended.
    fn reap(&mut self, out: &mut Reaped) -> usize;

    /// Looks at the doorbells without sleeping, for engines that only see them through a system
    /// call; busy workers call it every so often.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    fn look(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Sleeps until there is something to reap, or for at most `timeout`. May return early.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

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

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).map_memory(regions) }
    }

    fn detach(&mut self, file: FileId) {
        (**self).detach(file);
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

    fn submit(&mut self) -> io::Result<()> {
        (**self).submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        (**self).reap(out)
    }

    fn look(&mut self) -> io::Result<()> {
        (**self).look()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        (**self).wait(timeout)
    }

    fn counters(&self) -> Counters {
        (**self).counters()
    }
}
