//! A hypervisor and a guest's memory in the test's own process.
//!
//! Guest memory is a file in memory. Its pages are mapped a second time where the back-end maps a
//! grant, so that both sides really share them, page by page.

use super::host::{Direction, GrantCopy, GrantMapping, Host, PAGE};
use ringway_core::mem::Mapping;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// What a grant allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) page: usize,
    pub(crate) writable: bool,
}

/// A guest: its memory, its grant table, and what the back-end has done to them.
pub(crate) struct FakeGuest {
    file: File,
    pub(crate) memory: Mapping,
    grants: Mutex<HashMap<u32, Grant>>,
    /// Pages mapped by back-ends now.
    pub(crate) mapped: AtomicUsize,
    /// Calls that map or copy.
    pub(crate) calls: AtomicUsize,
    pub(crate) rung: AtomicUsize,
}

impl FakeGuest {
    pub(crate) fn new(pages: usize) -> Arc<Self> {
        let file = tempfile_in_memory(pages * PAGE);
        let memory = Mapping::of_file(&file, 0, (pages * PAGE) as u64).unwrap();
        let grants = Mutex::default();
        let zero = AtomicUsize::default;
        Arc::new(Self { file, memory, grants, mapped: zero(), calls: zero(), rung: zero() })
    }

    pub(crate) fn grant(&self, grant: u32, page: usize, writable: bool) {
        self.grants.lock().unwrap().insert(grant, Grant { page, writable });
    }

    pub(crate) fn revoke(&self, grant: u32) {
        self.grants.lock().unwrap().remove(&grant);
    }

    fn find(&self, grant: u32, writable: bool) -> Option<usize> {
        let found = self.grants.lock().unwrap().get(&grant).copied()?;
        (found.writable || !writable).then_some(found.page)
    }

    /// The bytes of a page, for tests in which nobody else uses them now.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn page(&self, page: usize) -> &mut [u8] {
        // SAFETY: the page lies in the mapping; tests look at pages while no request uses them.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(page * PAGE), PAGE) }
    }
}

fn tempfile_in_memory(len: usize) -> File {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(len as u64).unwrap();
    file
}

/// One queue's access to a guest.
pub(crate) struct FakeHost {
    guest: Arc<FakeGuest>,
    pub(crate) bell: Arc<OwnedFd>,
}

impl FakeHost {
    pub(crate) fn new(guest: &Arc<FakeGuest>) -> Self {
        let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
        let bell = Arc::new(rustix::event::eventfd(0, flags).unwrap());
        Self { guest: Arc::clone(guest), bell }
    }
}

pub(crate) struct FakeMapped {
    base: *mut u8,
    pages: usize,
    guest: Arc<FakeGuest>,
}

// SAFETY: plain shared memory.
unsafe impl Send for FakeMapped {}

impl GrantMapping for FakeMapped {
    fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for FakeMapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
        self.guest.mapped.fetch_sub(self.pages, SeqCst);
    }
}

impl Host for FakeHost {
    type Mapped = FakeMapped;

    unsafe fn copy(&mut self, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.guest.calls.fetch_add(1, SeqCst);
        for copy in copies {
            assert!(usize::from(copy.offset) + usize::from(copy.len) <= PAGE);
            let to_guest = copy.direction == Direction::ToGuest;
            let Some(page) = self.guest.find(copy.grant, to_guest) else { continue };
            let theirs = self.guest.memory.at(page * PAGE + usize::from(copy.offset));
            let (from, to) = if to_guest { (copy.local, theirs) } else { (theirs, copy.local) };
            // SAFETY: the guest's page lies in its mapping, and the caller vouches for the rest.
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len.into()) };
            copy.done = true;
        }
        Ok(())
    }

    fn map(&mut self, grants: &[u32], writable: bool) -> io::Result<FakeMapped> {
        self.guest.calls.fetch_add(1, SeqCst);
        let pages: Option<Vec<usize>> =
            grants.iter().map(|&grant| self.guest.find(grant, writable)).collect();
        let pages = pages.ok_or(io::ErrorKind::InvalidInput)?;
        let (len, none) = (pages.len() * PAGE, std::ptr::null_mut());
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { libc::mmap(none, len, libc::PROT_NONE, anonymous, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let protection =
            if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        for (at, page) in pages.iter().enumerate() {
            let place = base.wrapping_byte_add(at * PAGE);
            let (flags, fd) = (libc::MAP_SHARED | libc::MAP_FIXED, self.guest.file.as_raw_fd());
            let offset = libc::off_t::try_from(page * PAGE).unwrap();
            // SAFETY: the place lies in the mapping just made.
            let mapped = unsafe { libc::mmap(place, PAGE, protection, flags, fd, offset) };
            assert_ne!(mapped, libc::MAP_FAILED);
        }
        self.guest.mapped.fetch_add(pages.len(), SeqCst);
        let guest = Arc::clone(&self.guest);
        Ok(FakeMapped { base: base.cast(), pages: pages.len(), guest })
    }

    fn notify(&mut self) -> io::Result<()> {
        self.guest.rung.fetch_add(1, SeqCst);
        Ok(())
    }

    fn doorbell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    fn hush(&mut self) {}
}
