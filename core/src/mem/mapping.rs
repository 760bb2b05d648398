//! Memory shared with another process, mapped here.

use super::error::MappingError;
use super::page::page_size;
use super::quota::{Kind, Quota, Taken};
use super::sigbus;
use crate::file::FileShape;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// A shared mapping of a part of a file, writable, unmapped when dropped.
///
/// If the file is cut short later, reads and writes of the lost pages do not end the process: they
/// hit zeroed memory of our own, and [`Mapping::is_lost`] tells.
///
/// # Invariants
/// 1. `whole..whole+whole_len` is a mapping of ours; `start..start+len` lies in it.
/// 2. `guard` watches exactly that mapping for SIGBUS, unless no file is behind it.
/// 3. It can be mapped and unmapped in units of `unit` bytes.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    whole: NonNull<u8>,
    whole_len: usize,
    unit: usize,
    guard: Option<sigbus::Guard>,
    /// Device and number of the file that is mapped, if one is.
    inode: Option<(u64, u64)>,
    /// Its part of a quota, until it is unmapped.
    _taken: Option<Taken>,
}

// SAFETY: a mapping is plain shared memory; all access goes through raw pointers whose users
// answer for races with the other process.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`. The file must be long enough already.
    ///
    /// # Errors
    /// [`MappingError`]: a range that cannot be, a file that is too short, a refusal of the kernel.
    pub fn of_file(file: &File, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::shared(None, file, offset, len)
    }

    /// The same for the file of a peer, who decides how much of it there is.
    ///
    /// # Errors
    /// As [`Mapping::of_file`], and that it would be more than the peer may have mapped.
    pub fn of_peer(
        quota: &Arc<Quota>,
        file: &File,
        offset: u64,
        len: u64,
    ) -> Result<Self, MappingError> {
        Self::shared(Some(quota), file, offset, len)
    }

    fn shared(
        quota: Option<&Arc<Quota>>,
        file: &File,
        offset: u64,
        len: u64,
    ) -> Result<Self, MappingError> {
        let bad = MappingError::BadRange { offset, len };
        let Some(need) = offset.checked_add(len).filter(|_| len > 0) else { return Err(bad) };
        let shape = FileShape::of(file)?;
        if shape.bytes < need {
            return Err(MappingError::FileTooShort { have: shape.bytes, need });
        }
        // Files of huge pages can only be mapped and unmapped in whole huge pages, which is what they
        // report as their block size. Ordinary files report at most 64 KiB.
        let unit = if shape.block > 64 * 1024 { shape.block } else { page_size() as u64 };
        let skip = offset % unit;
        let (Ok(from), Ok(skip), Ok(len), Ok(unit)) = (
            libc::off_t::try_from(offset - skip),
            usize::try_from(skip),
            usize::try_from(len),
            usize::try_from(unit),
        ) else {
            return Err(bad);
        };
        let Some(whole_len) = skip.checked_add(len).and_then(|n| n.checked_next_multiple_of(unit))
        else {
            return Err(bad);
        };
        let taken = quota.map(|quota| quota.take(Kind::Bytes, whole_len as u64)).transpose()?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let mut mapping = Self::map(whole_len, flags, file.as_raw_fd(), from)?;
        (mapping._taken, mapping.unit, mapping.inode) = (taken, unit, Some(shape.inode));
        Ok(mapping.narrowed(skip, len))
    }

    /// Maps `len` bytes of zeroed memory that no other process sees.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    fn map(len: usize, flags: i32, fd: i32, offset: libc::off_t) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        let (unit, guard) = (page_size(), None);
        let (inode, whole) = (None, base);
        let mut mapping =
            Self { start: base, len, whole, whole_len: len, unit, guard, inode, _taken: None };
        // Memory of our own cannot be cut short.
        if fd >= 0 {
            mapping.watch()?;
        }
        Ok(mapping)
    }

    /// A file is behind it, which may be cut short.
    fn watch(&mut self) -> io::Result<()> {
        let watched = sigbus::Guard::watch(self.whole.as_ptr() as usize, self.whole_len);
        self.guard = Some(watched?);
        Ok(())
    }

    /// Pages of other mappings of files, which adjoin here: each is the address of the first and how many
    /// bytes there are.
    ///
    /// # Safety
    /// They are pages of ours of [`Mapping::of_peer`] or [`Mapping::of_file`], whose unit is a page.
    pub(super) unsafe fn of_pages(
        quota: &Arc<Quota>,
        pages: &[(usize, usize)],
    ) -> Result<Self, MappingError> {
        let len = pages.iter().map(|&(_, bytes)| bytes).sum::<usize>();
        let taken = quota.take(Kind::Bytes, len as u64)?;
        let mut mapping = Self::anonymous(len)?;
        let mut at = mapping.whole.as_ptr();
        for &(first, bytes) in pages {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: an old length of 0 maps the same pages of the file once more and leaves the old mapping as
            // it is (mremap(2)); what is there until now is memory of ours that nobody has seen.
            let here = unsafe {
                libc::mremap(first as *mut _, 0, bytes, flags, at.cast::<libc::c_void>())
            };
            if here == libc::MAP_FAILED {
                return Err(io::Error::last_os_error().into());
            }
            at = at.wrapping_add(bytes);
        }
        mapping.watch()?;
        mapping._taken = Some(taken);
        Ok(mapping)
    }

    fn narrowed(mut self, skip: usize, len: usize) -> Self {
        debug_assert!(skip + len <= self.whole_len);
        // SAFETY: `skip` is within the mapping (Mapping invariant 1).
        self.start = unsafe { self.whole.add(skip) };
        self.len = len;
        self
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A mapping is never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The address of the byte at `offset`.
    ///
    /// # Panics
    /// If `offset` is beyond the end.
    #[must_use]
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} is beyond a mapping of {} bytes", self.len);
        self.start.as_ptr().wrapping_add(offset)
    }

    /// How many bytes of it can be mapped by themselves.
    pub(super) fn unit(&self) -> usize {
        self.unit
    }

    /// True if both are of one file, whoever has opened it: what is written here may be seen there.
    #[must_use]
    pub fn is_of_the_file_of(&self, other: &Self) -> bool {
        self.inode.is_some() && self.inode == other.inode
    }

    /// True once a part of the memory vanished because its file was cut short.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(sigbus::Guard::lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.forget();
        }
        // SAFETY: the mapping is ours (Mapping invariant 1), and `&mut self` proves that no one
        // holds it any more.
        unsafe { libc::munmap(self.whole.as_ptr().cast(), self.whole_len) };
    }
}
