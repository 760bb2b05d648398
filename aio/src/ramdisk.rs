//! A ramdisk: an engine that copies between the memory of requests and the memory that holds the
//! disk, on the worker's own thread and without a system call, as the block driver of a ramdisk does.
//!
//! The disk is a memfd that cannot become shorter (`F_SEAL_SHRINK`), mapped for as long as it is
//! attached. Of any other file, and of what it has grown by since, transfers are system calls.

use ringway_core::Segment;
use ringway_core::mem::Mapping;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{BellId, Counters, Engine, FileId, Files, Full, Io, IoOp, Limits, Reaped};
use crate::null::Null;
use crate::sys::Job;

/// Copies at once, while an operation is queued.
pub struct Ramdisk {
    limits: Limits,
    files: Files<Option<Mapping>>,
    /// Has the tags in flight, and the doorbells.
    tags: Null,
    /// Of each tag in flight, in the same order.
    results: Vec<i32>,
    /// Of transfers of what is not mapped, and of all that is no transfer.
    syscalls: u64,
}

impl Ramdisk {
    /// An engine for `depth` operations at a time.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(depth: u32) -> io::Result<Self> {
        Ok(Self {
            limits: Limits::new("ramdisk", depth),
            files: Files::new(),
            tags: Null::new(depth)?,
            results: Vec::with_capacity(depth as usize),
            syscalls: 0,
        })
    }
}

impl Engine for Ramdisk {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        let mapping = if stays_as_long(file) { Some(whole(file)?) } else { None };
        Ok(self.files.attach(file, mapping))
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.tags.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.tags.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { self.tags.queue(io) }?;
        let file = self.files.get(io.file);
        // SAFETY: passed on to the caller; the engine has no registered buffers.
        let copied = file.note.as_ref().and_then(|disk| unsafe { copy(disk, io) });
        let result = copied.unwrap_or_else(|| {
            self.syscalls += 1;
            // SAFETY: as above; it is over when this returns.
            unsafe { Job::new(io, file.fd).perform(0) }
        });
        self.results.push(result);
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.tags.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        let found = self.tags.reap(out);
        let from = out.done.len() - found;
        for (done, result) in out.done[from..].iter_mut().zip(self.results.drain(..found)) {
            done.result = result;
        }
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.tags.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.tags.wait(timeout)
    }

    fn counters(&self) -> Counters {
        let counters = self.tags.counters();
        Counters { syscalls: counters.syscalls + self.syscalls, ..counters }
    }
}

/// True if nobody can cut the file short: then its mapping is good for as long as it is open.
fn stays_as_long(file: &File) -> bool {
    // SAFETY: no memory is involved. Files that take no seals answer EINVAL.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

fn whole(file: &File) -> io::Result<Mapping> {
    Mapping::of_file(file, 0, file.metadata()?.len()).map_err(io::Error::other)
}

/// What a transfer moved, or `None` if it is none, or not all of it is mapped.
///
/// # Safety
/// The rules of [`Engine::queue`], and the memory is no registered buffer.
#[inline]
unsafe fn copy(disk: &Mapping, io: &Io<'_>) -> Option<i32> {
    let from = usize::try_from(io.offset).ok()?;
    let end = from.checked_add(usize::try_from(io.len).ok()?)?;
    if end > disk.len() || !io.op.moves_data() {
        return None;
    }
    let mut at = disk.at(from);
    // SAFETY: passed on to the caller.
    for &Segment { base, len } in unsafe { io.memory.segments_unchecked() } {
        // SAFETY: the segments are `io.len` bytes in all, which lie in the mapping from `at` on; the
        // caller vouches for their memory, which is not the disk's.
        unsafe {
            match io.op {
                IoOp::Read => std::ptr::copy_nonoverlapping(at, base, len),
                _ => std::ptr::copy_nonoverlapping(base, at, len),
            }
        }
        at = at.wrapping_add(len);
    }
    i32::try_from(io.len).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::IoMemory;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;

    fn sealed(bytes: u64) -> Arc<File> {
        // SAFETY: the name is a C string; the descriptor is new and nobody else's.
        let file = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            File::from_raw_fd(libc::memfd_create(c"ramdisk".as_ptr(), flags))
        };
        file.set_len(bytes).unwrap();
        // SAFETY: no memory is involved.
        let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        assert_eq!(set, 0);
        Arc::new(file)
    }

    /// The result of one operation on the `bytes` from `skip` on, in two segments that change places.
    fn one(engine: &mut Ramdisk, file: FileId, op: IoOp, offset: u64, bytes: &mut [u8]) -> i32 {
        let half = bytes.len() / 2;
        let (first, second) = bytes.split_at_mut(half);
        let list = [first, second].map(|part| Segment { base: part.as_mut_ptr(), len: part.len() });
        let len = (list[0].len + list[1].len) as u64;
        let memory = if op.moves_data() { IoMemory::Segments(&list) } else { IoMemory::NONE };
        let mut out = Reaped::with_capacity(1, 0);
        // SAFETY: `bytes` and `list` live until the result is reaped below.
        unsafe { engine.queue(&Io { tag: 9, op, file, offset, len, memory }) }.unwrap();
        assert_eq!(engine.reap(&mut out), 0, "nothing is done before it is submitted");
        engine.submit().unwrap();
        assert_eq!(engine.reap(&mut out), 1);
        assert_eq!(out.done[0].tag, 9);
        out.done[0].result
    }

    #[test]
    fn what_is_mapped_is_copied_and_the_rest_is_asked_for() {
        let file = sealed(1 << 20);
        let mut engine = Ramdisk::new(4).unwrap();
        let id = engine.attach(&file).unwrap();
        let mut bytes: Vec<u8> = (0..8192_u32).map(|i| (i % 251) as u8).collect();
        let expected = bytes.clone();
        assert_eq!(one(&mut engine, id, IoOp::Write, 4096, &mut bytes), 8192);
        assert_eq!(one(&mut engine, id, IoOp::WriteDurable, (1 << 20) - 8192, &mut bytes), 8192);
        let mut found = vec![0; 8192];
        for at in [4096, (1 << 20) - 8192] {
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found == expected, "the file holds it at {at}");
            found.fill(0);
            assert_eq!(one(&mut engine, id, IoOp::Read, at, &mut found), 8192);
            assert!(found == expected, "and it is read at {at}");
        }
        assert_eq!(engine.counters().syscalls, 0);
        // What it has grown by since, and what reaches into it, and beyond its end.
        file.set_len(2 << 20).unwrap();
        for at in [(1 << 20) - 4096, 1 << 20] {
            assert_eq!(one(&mut engine, id, IoOp::Write, at, &mut bytes), 8192);
            found.fill(0);
            assert_eq!(one(&mut engine, id, IoOp::Read, at, &mut found), 8192);
            assert!(found == expected, "at {at}");
        }
        assert_eq!(one(&mut engine, id, IoOp::Read, (2 << 20) - 512, &mut found), 512);
        assert_eq!(one(&mut engine, id, IoOp::Read, u64::MAX, &mut found), -libc::EINVAL);
        assert_eq!(one(&mut engine, id, IoOp::PunchHole, 4096, &mut [0; 4096]), 0);
        assert_eq!(one(&mut engine, id, IoOp::Read, 4096, &mut found), 8192);
        assert!(found[..4096].iter().all(|&byte| byte == 0) && found[4096..] == expected[4096..]);
        assert!(engine.counters().syscalls > 4);
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
}
