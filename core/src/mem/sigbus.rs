//! Survives a peer that cuts its shared memory short.
//!
//! Touching a page that lies beyond the end of its file raises SIGBUS. The handler here looks the
//! address up in a table of our mappings; if it is one of them, zeroed memory is put in the place
//! of the whole mapping, the mapping is marked, and the access is repeated. The owner sees the mark
//! and ends the connection. Any other SIGBUS keeps its usual meaning.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};

/// How many mappings can be watched at a time: 64 guests with all the 509 memory slots that
/// vhost-user allows; most have a handful. Half of what Linux lets a process map (65530,
/// vm.max_map_count), because at that limit the handler could not put memory in the place of any.
const WATCHED_MAX: usize = 32768;

struct Entry {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Grows with every change: `start` and `len` belong together only if it stood still while
    /// they were read.
    changes: AtomicUsize,
    lost: AtomicBool,
}

impl Entry {
    const fn free() -> Self {
        Self {
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            changes: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// The mapping that holds `address`, as start and length. The mapping of a running access never
    /// changes, so an entry that changes meanwhile is not the one.
    fn holds(&self, address: usize) -> Option<(usize, usize)> {
        let changes = self.changes.load(SeqCst);
        let (start, len) = (self.start.load(SeqCst), self.len.load(SeqCst));
        let inside = start != 0 && address >= start && address - start < len;
        (inside && self.changes.load(SeqCst) == changes).then_some((start, len))
    }
}

static TABLE: [Entry; WATCHED_MAX] = [const { Entry::free() }; WATCHED_MAX];

/// Free entries of the table; taken and given back by the control plane only.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
static mut PREVIOUS: std::mem::MaybeUninit<libc::sigaction> = std::mem::MaybeUninit::uninit();

/// Counts the mappings that were replaced, ever.
static EPOCH: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// A number that grows whenever a peer's memory vanishes: one cheap load tells whether it is worth
/// looking for the mapping.
#[inline]
#[must_use]
pub fn poison_epoch() -> u64 {
    EPOCH.load(std::sync::atomic::Ordering::Relaxed)
}

/// Watches one mapping until it is forgotten.
#[derive(Debug)]
pub(super) struct Guard(usize);

impl Guard {
    /// Starts to watch `len` bytes at `start`.
    pub(super) fn watch(start: usize, len: usize) -> io::Result<Self> {
        install()?;
        let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
        let index = free.pop().ok_or_else(|| {
            io::Error::other(format!("more than {WATCHED_MAX} memory regions are mapped"))
        })?;
        let entry = &TABLE[index];
        entry.lost.store(false, SeqCst);
        entry.changes.fetch_add(1, SeqCst);
        entry.len.store(len, SeqCst);
        entry.start.store(start, SeqCst);
        Ok(Self(index))
    }

    /// True once the mapping has been replaced.
    pub(super) fn lost(&self) -> bool {
        TABLE[self.0].lost.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Stops watching; call before the memory is unmapped. Later calls do nothing.
    pub(super) fn forget(&mut self) {
        TABLE[self.0].changes.fetch_add(1, SeqCst);
        if TABLE[self.0].start.swap(0, SeqCst) != 0 {
            FREE.lock().unwrap_or_else(|e| e.into_inner()).push(self.0);
        }
    }
}

/// Installs the handler, if it is not there yet. The first mapping of a file does so as well; a
/// process that is to lose the right to install handlers calls this before.
///
/// # Errors
/// What the host says.
pub fn install() -> io::Result<()> {
    INSTALLED
        .get_or_init(|| {
            FREE.lock().unwrap_or_else(|e| e.into_inner()).extend((0..WATCHED_MAX).rev());
            if cfg!(miri) {
                return Ok(());
            }
            // SAFETY: sigaction is a plain C struct for which zeroes are valid; the handler only
            // uses async-signal-safe calls; PREVIOUS is written once, before any handler runs.
            let rc = unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handler as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
                libc::sigaction(libc::SIGBUS, &action, (&raw mut PREVIOUS).cast())
            };
            if rc == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
            }
        })
        .map_err(io::Error::from_raw_os_error)
}

extern "C" fn handler(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS, which carries an address.
    let address = unsafe { (*info).si_addr() } as usize;
    for entry in &TABLE {
        let Some((start, len)) = entry.holds(address) else { continue };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the table names a mapping of ours that has not been unmapped (Guard::forget comes
        // first); replacing it in place keeps every pointer into it valid. mmap is a bare system
        // call and touches no lock of this process.
        let base = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if base != libc::MAP_FAILED {
            entry.lost.store(true, SeqCst);
            EPOCH.fetch_add(1, SeqCst);
            return;
        }
        break;
    }
    // Not ours: restore what was there before and let the access fault again.
    // SAFETY: PREVIOUS was filled when this handler was installed.
    unsafe { libc::sigaction(signal, (&raw const PREVIOUS).cast(), std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use crate::mem::Mapping;
    use std::fs::File;
    use std::os::fd::FromRawFd;

    #[test]
    #[cfg_attr(miri, ignore = "needs memfd and signals")]
    fn memory_that_vanishes_reads_as_zero_and_is_marked() {
        // SAFETY: memfd_create returns a new descriptor that nobody else owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"sigbus".as_ptr(), 0)) };
        file.set_len(8192).unwrap();
        let mapping = Mapping::of_file(&file, 0, 8192).unwrap();
        // SAFETY: both offsets lie in the mapping.
        unsafe {
            mapping.at(4096).write_volatile(7);
            assert!(!mapping.is_lost());
            file.set_len(0).unwrap();
            assert_eq!(mapping.at(4096).read_volatile(), 0);
            assert!(mapping.is_lost());
            mapping.at(0).write_volatile(9);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs memfd")]
    fn a_file_shorter_than_claimed_is_refused() {
        // SAFETY: memfd_create returns a new descriptor that nobody else owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"short".as_ptr(), 0)) };
        file.set_len(4096).unwrap();
        let error = Mapping::of_file(&file, 0, 8192).unwrap_err();
        assert_eq!(error.to_string(), "the file holds 4096 bytes but 8192 are claimed to be in it");
        assert!(Mapping::of_file(&file, u64::MAX, 2).is_err());
        assert!(Mapping::of_file(&file, 0, 0).is_err());
        assert!(Mapping::of_file(&file, 4096, 4096).is_err());
    }
}
