//! Linux AIO as the kernel has it: its structures, and a context with its completion ring.

use std::ffi::{c_int, c_long, c_void};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// `IOCB_CMD_*` of `linux/aio_abi.h`.
pub(super) const PREAD: u16 = 0;
pub(super) const PWRITE: u16 = 1;
pub(super) const FDSYNC: u16 = 3;
pub(super) const POLL: u16 = 5;
pub(super) const PREADV: u16 = 7;
pub(super) const PWRITEV: u16 = 8;

/// `struct iocb` of `linux/aio_abi.h`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Iocb {
    pub(super) data: u64,
    #[cfg(target_endian = "little")]
    pub(super) key: u32,
    pub(super) rw_flags: c_int,
    #[cfg(target_endian = "big")]
    pub(super) key: u32,
    pub(super) opcode: u16,
    pub(super) reqprio: i16,
    pub(super) fildes: RawFd,
    pub(super) buf: u64,
    pub(super) nbytes: u64,
    pub(super) offset: i64,
    pub(super) reserved: u64,
    pub(super) flags: u32,
    pub(super) resfd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64);

/// `struct io_event` of `linux/aio_abi.h`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Event {
    pub(super) data: u64,
    obj: u64,
    pub(super) res: i64,
    res2: i64,
}

const _: () = assert!(size_of::<Event>() == 32);

/// `struct aio_ring` of `fs/aio.c`, which the kernel maps where the context's number points.
#[repr(C)]
struct Ring {
    id: u32,
    /// Number of events that follow the header.
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

const _: () = assert!(size_of::<Ring>() == 32);
const MAGIC: u32 = 0xa10a_10a1;

/// An AIO context. Dropping it waits for what is in flight.
///
/// # Invariants
/// 1. `id` is a context of this process; if `ring_is_known`, it points to a [`Ring`] that stays
///    mapped as long as the context lives.
/// 2. Only the thread that has the engine takes events, so nobody else moves `head`.
#[derive(Debug)]
pub(super) struct Context {
    id: usize,
    pub(super) ring_is_known: bool,
    /// Events that a system call fetched, last one first; older than all in the ring.
    fetched: Vec<Event>,
}

impl Context {
    pub(super) fn new(requests: u32) -> io::Result<Self> {
        let mut id = 0usize;
        // SAFETY: the kernel writes one word to `id`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut id) };
        if made < 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::ENOSYS) => {
                    io::Error::new(io::ErrorKind::Unsupported, "this kernel has no Linux AIO")
                }
                Some(libc::EAGAIN) => io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    "no more Linux AIO requests on this host (sysctl fs.aio-max-nr)",
                ),
                _ => error,
            });
        }
        let fetched = Vec::with_capacity(requests as usize);
        let mut context = Self { id, ring_is_known: true, fetched };
        let ring = context.ring();
        context.ring_is_known = ring.magic == MAGIC
            && ring.incompat_features == 0
            && ring.header_length as usize == size_of::<Ring>();
        Ok(context)
    }

    /// Starts requests; how many, or the `errno` of the first.
    pub(super) fn submit(&self, batch: &[*const Iocb]) -> Result<usize, i32> {
        // SAFETY: each pointer leads to a filled-in request (LinuxAio invariant 2), whose memory
        // the caller of `queue` vouches for.
        let taken =
            unsafe { libc::syscall(libc::SYS_io_submit, self.id, batch.len(), batch.as_ptr()) };
        usize::try_from(taken)
            .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    fn ring(&self) -> &Ring {
        let ring = std::ptr::with_exposed_provenance::<Ring>(self.id);
        // SAFETY: invariant 1; the fields that change are atomic.
        unsafe { &*ring }
    }

    /// The events, which follow the header.
    fn events(&self) -> *const Event {
        std::ptr::with_exposed_provenance(self.id + size_of::<Ring>())
    }

    /// True if an event can be taken.
    pub(super) fn any(&self) -> bool {
        if !self.fetched.is_empty() {
            return true;
        }
        let ring = self.ring();
        self.ring_is_known && ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
    }

    /// Takes an event, in user space if possible.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        if !self.ring_is_known || !self.fetched.is_empty() {
            return self.fetch();
        }
        let ring = self.ring();
        // Acquire: the kernel moves the tail after it has written the events before it.
        let (head, tail) = (ring.head.load(Ordering::Relaxed), ring.tail.load(Ordering::Acquire));
        if head == tail {
            return None;
        }
        // SAFETY: `head` is below `nr`; the event was written before the tail passed it, and the
        // kernel leaves it alone until the head has.
        let event = unsafe { self.events().add(head as usize).read() };
        let next = if head + 1 == ring.nr { 0 } else { head + 1 };
        // Release: the event is read before its place is given back.
        ring.head.store(next, Ordering::Release);
        Some(event)
    }

    #[cold]
    fn fetch(&mut self) -> Option<Event> {
        if self.fetched.is_empty() && !self.ring_is_known {
            // If the context is beyond use, `wait` says so.
            let _ = self.get_events(0, Some(Duration::ZERO));
        }
        self.fetched.pop()
    }

    /// Sleeps until there is an event or the time is over; what it finds is taken next.
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.get_events(1, timeout)
    }

    fn get_events(&mut self, least: c_long, timeout: Option<Duration>) -> io::Result<()> {
        let until = timeout.map(|t| libc::timespec {
            tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let until = until.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let room = self.fetched.capacity();
        debug_assert!(self.fetched.is_empty());
        let to: *mut c_void = self.fetched.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `room` events to `fetched`, which has that capacity.
        let got = unsafe { libc::syscall(libc::SYS_io_getevents, self.id, least, room, to, until) };
        match usize::try_from(got) {
            Ok(got) => {
                // SAFETY: the kernel has written so many.
                unsafe { self.fetched.set_len(got) };
                self.fetched.reverse();
                Ok(())
            }
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => Ok(()),
                e => Err(e),
            },
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: invariant 1. The call returns when nothing is in flight any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}
