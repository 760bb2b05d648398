//! The engine: files are images (hot).
//!
//! ```text
//! queue ─► queued ─ submit ─► librbd ─ its threads ─► landed ─ reap ─► done
//!                      ▲                                         │
//!                      └── the next part; the flush of a write ──┘
//! ```

use crate::image::Image;
use crate::landed::Landed;
use crate::library::{Library, THICK_PROVISION};
use ringway_aio::bells::Bells;
use ringway_aio::{BellId, Counters, Done, Engine, FileId, Full, Handle, Io, IoOp, Limits, Reaped};
use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes of one operation that moves data: eight objects of the usual size.
const BYTES_MAX: u32 = 32 << 20;
/// The most bytes that are discarded or zeroed at a time.
const ERASE_MAX: u64 = 1 << 30;

/// Asks Ceph clusters. Its files are those of [`Image`]s.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap`, at most `limits.depth`; each is in `ready`, or
///    has a place in `operations`, which is in `queued` or with the library.
/// 2. `begun` counts those that are with the library. Each of them lands once.
#[derive(Debug)]
pub struct Rbd {
    limits: Limits,
    bells: Bells,
    images: Vec<Option<Attached>>,
    operations: Box<[Operation]>,
    free: Vec<u32>,
    queued: Vec<u32>,
    ready: Vec<Done>,
    landed: Arc<Landed>,
    begun: u32,
    in_flight: u32,
    counters: Counters,
}

#[derive(Debug)]
struct Attached {
    image: Arc<Image>,
    users: u32,
}

#[derive(Clone, Copy, Debug)]
struct Operation {
    tag: u64,
    op: IoOp,
    image: u32,
    /// The part that is asked for now.
    offset: u64,
    len: u64,
    /// Of what moves no data: where all of it ends.
    end: u64,
    segments: *const Segment,
    count: i32,
    /// The write is done; now it is made durable.
    flushing: bool,
}

// SAFETY: the segments are followed while the operation is in flight, for which time the caller of
// `Engine::queue` vouches for them, on whatever thread has the engine.
unsafe impl Send for Operation {}

const FREE: Operation = Operation {
    tag: 0,
    op: IoOp::Sync,
    image: 0,
    offset: 0,
    len: 0,
    end: 0,
    segments: std::ptr::null(),
    count: 0,
    flushing: false,
};

impl Rbd {
    /// An engine for `depth` operations at a time.
    ///
    /// # Errors
    /// That librbd is not here, or that the process is out of descriptors.
    pub fn new(depth: u32) -> io::Result<Self> {
        let library = Library::load().map_err(io::Error::other)?;
        let bells = Bells::new()?;
        let mut limits = Limits::new("rbd", depth);
        limits.max_bytes = BYTES_MAX;
        let room = depth as usize;
        Ok(Self {
            landed: Landed::new(library, depth, bells.waker()),
            limits,
            bells,
            images: Vec::new(),
            operations: vec![FREE; room].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            queued: Vec::with_capacity(room),
            ready: Vec::with_capacity(room),
            begun: 0,
            in_flight: 0,
            counters: Counters::default(),
        })
    }

    /// Gives the library all that is queued.
    #[inline]
    fn begin_all(&mut self) {
        for at in 0..self.queued.len() {
            let slot = self.queued[at];
            match self.begin(slot) {
                0.. => self.begun += 1,
                error => self.done(slot, error),
            }
        }
        self.queued.clear();
    }

    /// Gives the library an operation. Below zero if it does not take it.
    #[inline]
    fn begin(&mut self, slot: u32) -> i32 {
        let entry = &mut self.operations[slot as usize];
        let Some(Some(attached)) = self.images.get(entry.image as usize) else {
            return -libc::EBADF;
        };
        let Some(completion) = self.landed.completion(slot) else { return -libc::ENOMEM };
        let opened = &attached.image.opened;
        let (library, image, offset) = (opened.library, opened.image, entry.offset);
        let (iov, count) = (entry.segments.cast::<libc::iovec>(), entry.count);
        entry.len = entry.len.min(if entry.op.moves_data() { u64::MAX } else { ERASE_MAX });
        let len = entry.len;
        // SAFETY: the image is open as long as it is attached; segments are laid out as `iovec`, and they and
        // their memory are valid until the operation is done, by the contract of `queue`.
        let rc = unsafe {
            match entry.op {
                IoOp::Sync => (library.rbd_aio_flush)(image, completion),
                _ if entry.flushing => (library.rbd_aio_flush)(image, completion),
                IoOp::Read => (library.rbd_aio_readv)(image, iov, count, offset, completion),
                IoOp::Write | IoOp::WriteDurable => {
                    (library.rbd_aio_writev)(image, iov, count, offset, completion)
                }
                IoOp::Discard => (library.rbd_aio_discard)(image, offset, len, completion),
                IoOp::PunchHole | IoOp::ZeroRange => {
                    let thick = entry.op == IoOp::ZeroRange;
                    let flags = if thick { THICK_PROVISION } else { 0 };
                    // At most ERASE_MAX.
                    #[allow(clippy::cast_possible_truncation)]
                    let len = len as usize;
                    (library.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0)
                }
            }
        };
        if rc < 0 {
            self.landed.forget(completion);
        }
        rc.min(0)
    }

    /// What has landed, and what follows from that.
    #[inline]
    fn collect(&mut self) {
        let landed = Arc::clone(&self.landed);
        landed.take(|slot, result| {
            self.begun -= 1;
            let entry = &mut self.operations[slot as usize];
            if result < 0 {
                let error = i32::try_from(result).unwrap_or(-libc::EIO);
                self.done(slot, error);
                return;
            }
            match entry.op {
                // The library says how much it has read, and of a write that it is done.
                IoOp::Read => {
                    let got = i32::try_from(result).unwrap_or(i32::MAX);
                    self.done(slot, got);
                }
                // Beside other flushes: without a cache what was answered is durable, and none hears of lost data.
                IoOp::WriteDurable if !entry.flushing => {
                    entry.flushing = true;
                    self.queued.push(slot);
                }
                IoOp::Write | IoOp::WriteDurable => {
                    let written = i32::try_from(entry.len).unwrap_or(i32::MAX);
                    self.done(slot, written);
                }
                IoOp::Sync => self.done(slot, 0),
                IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard => {
                    entry.offset += entry.len;
                    entry.len = entry.end.saturating_sub(entry.offset);
                    match entry.len {
                        0 => self.done(slot, 0),
                        _ => self.queued.push(slot),
                    }
                }
            }
        });
        if !self.queued.is_empty() {
            self.begin_all();
        }
    }

    #[inline]
    fn done(&mut self, slot: u32, result: i32) {
        let tag = self.operations[slot as usize].tag;
        self.ready.push(Done { tag, result });
        self.free.push(slot);
    }
}

#[cold]
fn no_image() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no RBD image")
}

impl Engine for Rbd {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, _: &Arc<File>) -> io::Result<FileId> {
        Err(no_image())
    }

    fn attach_handle(&mut self, _: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        let image: Arc<Image> = Arc::clone(handle).downcast().map_err(|_| no_image())?;
        let here = |known: &Option<Attached>| {
            known.as_ref().is_some_and(|known| Arc::ptr_eq(&known.image, &image))
        };
        let at = match self.images.iter().position(here) {
            Some(at) => at,
            None => {
                let free = self.images.iter().position(Option::is_none);
                let at = free.unwrap_or(self.images.len());
                self.images.resize_with(self.images.len().max(at + 1), || None);
                self.images[at] = Some(Attached { image, users: 0 });
                at
            }
        };
        if let Some(attached) = &mut self.images[at] {
            attached.users += 1;
        }
        u32::try_from(at).map(FileId).map_err(io::Error::other)
    }

    fn detach(&mut self, file: FileId) {
        let Some(place) = self.images.get_mut(file.0 as usize) else { return };
        if let Some(attached) = place {
            attached.users -= 1;
            if attached.users == 0 {
                *place = None;
            }
        }
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        self.bells.unwatch(fd);
    }

    #[inline]
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        let slot = self.free.pop().ok_or(Full)?;
        // SAFETY: our limits have no registered buffers, to which the caller keeps.
        let segments = unsafe { io.memory.segments_unchecked() };
        // At most `limits.max_segments`.
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
        let count = segments.len() as i32;
        self.operations[slot as usize] = Operation {
            tag: io.tag,
            op: io.op,
            image: io.file.0,
            offset: io.offset,
            len: io.len,
            end: io.offset.saturating_add(io.len),
            segments: segments.as_ptr(),
            count,
            flushing: false,
        };
        self.queued.push(slot);
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        if !self.queued.is_empty() {
            self.begin_all();
        }
        Ok(())
    }

    #[inline]
    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.take(&mut out.rung);
        if self.landed.any() {
            self.collect();
        }
        let found = self.ready.len();
        out.done.append(&mut self.ready);
        // At most `depth` are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = found as u32;
        self.in_flight -= fewer;
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.bells.poll(&mut self.counters)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = match self.ready.is_empty() && self.landed.may_sleep() {
            true => self.bells.wait(timeout, &mut self.counters),
            false => Ok(()),
        };
        self.landed.awake();
        slept
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// Waits until the library has let go of all memory.
impl Drop for Rbd {
    fn drop(&mut self) {
        self.queued.clear();
        while self.begun > 0 {
            let (landed, begun) = (Arc::clone(&self.landed), &mut self.begun);
            landed.take(|_, _| *begun -= 1);
            if *begun > 0 && self.wait(None).is_err() {
                // The memory is not ours to give back.
                std::process::abort();
            }
        }
    }
}
