//! The grant device, `/dev/xen/gntdev`: pages that another domain has granted.
//!
//! Source: `xen/include/public/io` and `include/sys/gntdev.h` of Xen (MIT): numbers and layouts.

use super::access::{Access, Named, need};
use super::host::{Direction, GrantCopy, GrantMapping, PAGE};
use super::sys::{ioctl, request};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The most pages of one mapping: those of a request, or of the largest ring.
pub(super) const MAP_MAX: usize = 256;
/// The most pieces of one copy; longer lists go in parts.
const COPY_MAX: usize = 1024;

/// `struct ioctl_gntdev_grant_ref`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct GrantRef {
    domid: u32,
    grant: u32,
}

/// `struct ioctl_gntdev_map_grant_ref`, with room for `MAP_MAX` references.
#[repr(C)]
struct Map {
    count: u32,
    pad: u32,
    index: u64,
    refs: [GrantRef; MAP_MAX],
}

/// `struct ioctl_gntdev_unmap_grant_ref`.
#[repr(C)]
struct Unmap {
    index: u64,
    count: u32,
    pad: u32,
}

/// `struct ioctl_gntdev_unmap_notify`.
#[repr(C)]
struct UnmapNotify {
    index: u64,
    action: u32,
    port: u32,
}

/// `UNMAP_NOTIFY_SEND_EVENT`.
const SEND_EVENT: u32 = 2;

/// The foreign half of `struct ioctl_gntdev_grant_copy_segment`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Foreign {
    grant: u32,
    offset: u16,
    domid: u16,
}

/// One end of a copy.
#[repr(C)]
#[derive(Clone, Copy)]
union End {
    local: *mut u8,
    foreign: Foreign,
}

/// `struct ioctl_gntdev_grant_copy_segment`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Segment {
    source: End,
    dest: End,
    len: u16,
    flags: u16,
    status: i16,
}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
struct Copy {
    count: u32,
    segments: *mut Segment,
}

const _: () = assert!(size_of::<Map>() == 16 + 8 * MAP_MAX);
const _: () = assert!(size_of::<Segment>() == 24 && size_of::<Copy>() == 16);

/// `GNTCOPY_source_gref`, `GNTCOPY_dest_gref`.
const SOURCE_GRANT: u16 = 1;
const DEST_GRANT: u16 = 2;

/// The numbers are made with the size of one reference.
pub(super) const MAP_GRANT_REF: u64 = request(b'G', 0, 24);
pub(super) const UNMAP_GRANT_REF: u64 = request(b'G', 1, size_of::<Unmap>());
pub(super) const SET_UNMAP_NOTIFY: u64 = request(b'G', 7, size_of::<UnmapNotify>());
pub(super) const GRANT_COPY: u64 = request(b'G', 8, size_of::<Copy>());

/// Granted pages of one domain.
pub(super) struct GrantDevice {
    file: Arc<OwnedFd>,
    domid: u16,
    map: Box<Map>,
    segments: Box<[Segment]>,
}

// SAFETY: the pointers in `segments` are scratch of one call.
unsafe impl Send for GrantDevice {}

impl std::fmt::Debug for GrantDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrantDevice").field("domid", &self.domid).finish_non_exhaustive()
    }
}

impl GrantDevice {
    /// The pages of domain `domid`. Allocates; nothing else does.
    ///
    /// # Errors
    /// What the host says to the device.
    pub(super) fn open(access: &dyn Access, domid: u16) -> io::Result<Self> {
        let file = need(access, Named::Grants)?;
        let map = Map { count: 0, pad: 0, index: 0, refs: [GrantRef::default(); MAP_MAX] };
        let nothing = End { local: std::ptr::null_mut() };
        let segment = Segment { source: nothing, dest: nothing, len: 0, flags: 0, status: 0 };
        Ok(Self {
            file: Arc::new(file),
            domid,
            map: Box::new(map),
            segments: vec![segment; COPY_MAX].into(),
        })
    }

    /// Maps pages one after the other.
    ///
    /// # Errors
    /// That there are too many, or that one of them cannot be mapped.
    pub(super) fn map(&mut self, grants: &[u32], writable: bool) -> io::Result<Mapped> {
        if grants.is_empty() || grants.len() > MAP_MAX {
            return Err(io::Error::other(format!("a mapping has 1 to {MAP_MAX} pages")));
        }
        for (place, &grant) in self.map.refs.iter_mut().zip(grants) {
            *place = GrantRef { domid: self.domid.into(), grant };
        }
        // At most MAP_MAX.
        #[allow(clippy::cast_possible_truncation)]
        let count = grants.len() as u32;
        (self.map.count, self.map.pad) = (count, 0);
        // SAFETY: the structure is as the driver wants it, with `count` references.
        unsafe { ioctl(self.file.as_raw_fd(), MAP_GRANT_REF, &raw mut *self.map) }?;
        let (index, len) = (self.map.index, grants.len() * PAGE);
        let protection =
            if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let Ok(offset) = libc::off_t::try_from(index) else {
            return Err(io::Error::other("the grant device gave an offset that no file has"));
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset)
        };
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            forget(fd, index, count);
            return Err(error);
        }
        Ok(Mapped { base: base.cast(), count, index, file: Arc::clone(&self.file) })
    }

    /// Copies all pieces.
    ///
    /// # Errors
    /// That none was copied.
    ///
    /// # Safety
    /// As of [`super::host::Host::copy`].
    pub(super) unsafe fn copy(&mut self, copies: &mut [GrantCopy]) -> io::Result<()> {
        for part in copies.chunks_mut(COPY_MAX) {
            for (segment, copy) in self.segments.iter_mut().zip(part.iter()) {
                let foreign = Foreign { grant: copy.grant, offset: copy.offset, domid: self.domid };
                let (foreign, local) = (End { foreign }, End { local: copy.local });
                let (source, dest, flags) = match copy.direction {
                    Direction::FromGuest => (foreign, local, SOURCE_GRANT),
                    Direction::ToGuest => (local, foreign, DEST_GRANT),
                };
                *segment = Segment { source, dest, len: copy.len, flags, status: -1 };
            }
            // At most COPY_MAX.
            #[allow(clippy::cast_possible_truncation)]
            let count = part.len() as u32;
            let mut copy = Copy { count, segments: self.segments.as_mut_ptr() };
            // SAFETY: `count` segments, whose local memory the caller vouches for.
            unsafe { ioctl(self.file.as_raw_fd(), GRANT_COPY, &raw mut copy) }?;
            for (segment, copy) in self.segments.iter().zip(part) {
                copy.done = segment.status == 0;
            }
        }
        Ok(())
    }
}

/// Takes references out of the device's table; their pages are not mapped any more.
fn forget(fd: RawFd, index: u64, count: u32) {
    let mut unmap = Unmap { index, count, pad: 0 };
    // SAFETY: the structure is as the driver wants it. A refusal leaves the table longer until the
    // device is closed, and nothing else.
    let _ = unsafe { ioctl(fd, UNMAP_GRANT_REF, &raw mut unmap) };
}

/// Pages of another domain, mapped here until this is dropped.
///
/// # Invariants
/// 1. `base..base + count * PAGE` is a mapping of ours.
#[derive(Debug)]
pub struct Mapped {
    base: *mut u8,
    count: u32,
    index: u64,
    file: Arc<OwnedFd>,
}

// SAFETY: a mapping is plain shared memory, on whatever thread.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Has `port`, bound by this process, ring at the other side when the mapping goes, also if that
    /// is because this process was killed.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn notify_when_gone(&self, port: u32) -> io::Result<()> {
        let mut notify = UnmapNotify { index: self.index, action: SEND_EVENT, port };
        // SAFETY: the structure is as the driver wants it.
        unsafe { ioctl(self.file.as_raw_fd(), SET_UNMAP_NOTIFY, &raw mut notify) }
    }
}

impl GrantMapping for Mapped {
    fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours (invariant 1) and nobody uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.count as usize * PAGE) };
        forget(self.file.as_raw_fd(), self.index, self.count);
    }
}
