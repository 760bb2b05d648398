//! Files, and how their calls fail.

use super::super::identity::Identity;
use super::inode::{Inode, SECTOR};
use super::world::{Faults, Inner, World, here};
use std::fmt;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What becomes of a call.
enum Fate {
    Done,
    /// So much of it is done.
    Part(usize),
    /// So much is done, and it fails.
    Fails(usize, i32),
    /// So much is done, and the process is killed.
    Killed(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Punch,
    Size,
    Sync,
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) world: Arc<World>,
    pub(super) inode: usize,
    pub(super) unit: u32,
}

/// An open file.
pub struct File {
    stored: Stored,
    /// Failed syncs of which this has heard.
    seen: AtomicU64,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({})", self.stored.inode)
    }
}

/// What is known of a file.
#[derive(Clone, Copy, Debug)]
pub struct Metadata(u64);

impl Metadata {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// None is anything else.
    #[must_use]
    pub fn is_file(&self) -> bool {
        true
    }
}

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn number(value: u64) -> io::Result<usize> {
    // Files are small here.
    usize::try_from(value).ok().filter(|at| *at < 1 << 30).ok_or_else(|| errno(libc::EFBIG))
}

/// A part of a call that is done when it ends early: whole sectors, all or nothing within one.
fn part(inner: &mut Inner, at: usize, len: usize) -> usize {
    let first = SECTOR - at % SECTOR;
    if len <= first {
        return if inner.below(2) == 0 { 0 } else { len };
    }
    let ends = (len - first) / SECTOR + 1;
    let nth = usize::try_from(inner.below(ends as u64 + 1)).unwrap_or(0);
    if nth == 0 { 0 } else { (first + (nth - 1) * SECTOR).min(len) }
}

impl World {
    /// A file by its name, which is made if there is none. I/O is in multiples of `unit` bytes.
    pub fn open(self: &Arc<Self>, name: &str, unit: u32) -> File {
        let mut inner = self.lock();
        let next = inner.files.len();
        let inode = *inner.names.entry(name.into()).or_insert(next);
        if inode == next {
            inner.files.push(Inode::default());
        }
        let seen = inner.files[inode].error_count();
        drop(inner);
        File::new(Stored { world: Arc::clone(self), inode, unit: unit.max(1) }, seen)
    }
}

impl File {
    pub(super) fn new(stored: Stored, seen: u64) -> Self {
        Self { stored, seen: AtomicU64::new(seen) }
    }

    /// Another handle of it, which hears of failed syncs by itself.
    ///
    /// # Errors
    /// None here.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::new(self.stored.clone(), self.seen.load(Relaxed)))
    }

    /// What becomes of a call. Only those of threads of the world fail.
    fn fate(&self, inner: &mut Inner, kind: Kind, at: usize, len: usize) -> Fate {
        if here().is_none() {
            return Fate::Done;
        }
        inner.calls += 1;
        if kind == Kind::Sync {
            let sync = inner.calls;
            inner.syncs.push(sync);
        }
        let Faults { nth, errno, kill_in, full, per_mille, syncs_per_mille, .. } = inner.faults;
        let short_per_mille = inner.faults.short_per_mille;
        let grows = kind == Kind::Write || kind == Kind::Size || kind == Kind::Punch;
        if kill_in == Some(inner.calls) {
            return Fate::Killed(part(inner, at, len));
        }
        let hit = nth.is_some_and(|(nth, ever)| inner.calls == nth || ever && inner.calls > nth);
        let is_full = full.is_some_and(|(from, to)| (from..=to).contains(&inner.calls));
        if is_full && grows {
            inner.failed_calls += 1;
            let done = if kind == Kind::Write { part(inner, at, len) } else { 0 };
            return Fate::Fails(done, libc::ENOSPC);
        }
        let errno = if hit { errno } else { libc::EIO };
        let by_chance = kind != Kind::Sync && inner.below(1000) < per_mille;
        let sync_fails = kind == Kind::Sync && inner.below(1000) < syncs_per_mille;
        if hit && (errno != libc::ENOSPC || grows) || by_chance || sync_fails {
            let full = grows && by_chance && inner.below(2) == 0;
            inner.failed_calls += 1;
            inner.failed_syncs += u64::from(kind == Kind::Sync);
            let done = if kind == Kind::Write { part(inner, at, len) } else { 0 };
            return Fate::Fails(done, if full { libc::ENOSPC } else { errno });
        }
        if matches!(kind, Kind::Read | Kind::Write) && inner.below(1000) < short_per_mille {
            let done = part(inner, at, len);
            return match done {
                0 => Fate::Fails(0, libc::EINTR),
                done => Fate::Part(done),
            };
        }
        Fate::Done
    }

    /// A call: `act` does so many bytes of it.
    fn call<T>(
        &self,
        kind: Kind,
        at: usize,
        len: usize,
        act: impl FnOnce(&mut Inode, usize) -> T,
    ) -> io::Result<T> {
        let (world, inode) = (&self.stored.world, self.stored.inode);
        let here = here();
        if let Some((world, me)) = &here {
            world.event(*me, format_args!("{kind:?} {inode} {at} {len}"));
            world.stall(*me);
        }
        let mut inner = world.lock();
        let fate = self.fate(&mut inner, kind, at, len);
        let file = &mut inner.files[inode];
        let done = match fate {
            Fate::Done => Ok(act(file, len)),
            Fate::Part(done) => Ok(act(file, done)),
            Fate::Fails(done, code) => {
                if matches!(kind, Kind::Write) {
                    act(file, done);
                }
                if kind == Kind::Sync && code != libc::EINTR {
                    self.lose(&mut inner);
                }
                inner.note(format_args!("fails with {code} after {done}"));
                Err(errno(code))
            }
            Fate::Killed(done) => {
                if matches!(kind, Kind::Write) {
                    act(file, done);
                }
                // It may fail all the same, and there is nobody to be told.
                if kind == Kind::Sync && inner.below(2) == 0 {
                    inner.failed_syncs += 1;
                    self.lose(&mut inner);
                }
                if let Some((world, me)) = &here {
                    world.kill(inner, *me);
                }
                return Err(errno(libc::EIO));
            }
        };
        drop(inner);
        if let Some((world, me)) = &here {
            world.event(*me, format_args!("over"));
        }
        done
    }

    /// What is not written back is lost, and this one is told.
    fn lose(&self, inner: &mut Inner) {
        let mut file = std::mem::take(&mut inner.files[self.stored.inode]);
        file.lose(&mut |end| inner.below(end));
        // What does not go through the cache is not there.
        if self.stored.unit > 1 {
            file.evict();
        }
        self.seen.store(file.errors, Relaxed);
        inner.files[self.stored.inode] = file;
    }

    pub(super) fn read(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        self.judge(memory.as_ptr(), memory.len(), at)?;
        let at = number(at)?;
        let len = memory.len();
        self.call(Kind::Read, at, len, |file, len| {
            let from = at.min(file.cache.len());
            let len = len.min(file.cache.len() - from);
            memory[..len].copy_from_slice(&file.cache[from..from + len]);
            len
        })
    }

    pub(super) fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.judge(bytes.as_ptr(), bytes.len(), at)?;
        let at = number(at)?;
        self.call(Kind::Write, at, bytes.len(), |file, len| {
            file.write(&bytes[..len], at);
            len
        })
    }

    /// What direct I/O wants.
    fn judge(&self, memory: *const u8, len: usize, at: u64) -> io::Result<()> {
        let mask = self.stored.unit as usize - 1;
        let is_aligned = (memory as usize | len) & mask == 0 && at & mask as u64 == 0;
        if is_aligned { Ok(()) } else { Err(errno(libc::EINVAL)) }
    }

    pub(super) fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        let (at, len) = (number(at)?, number(len)?);
        self.call(Kind::Punch, at, len, |file, len| {
            let len = len.min(file.cache.len().saturating_sub(at));
            file.write(&vec![0; len], at);
        })
    }

    pub(super) fn forget(&self) {
        if let Some((world, me)) = here() {
            world.event(me, format_args!("forget {}", self.stored.inode));
        }
        self.stored.world.lock().files[self.stored.inode].evict();
    }

    pub(super) fn identity(&self) -> Identity {
        let inner = self.stored.world.lock();
        let written = inner.files[self.stored.inode].written;
        let place = (0, self.stored.inode as u64, 0);
        Identity { place, written: (0, written), direct: self.stored.unit > 1 }
    }

    /// What is known of it.
    ///
    /// # Errors
    /// None.
    pub fn metadata(&self) -> io::Result<Metadata> {
        let inner = self.stored.world.lock();
        Ok(Metadata(inner.files[self.stored.inode].cache.len() as u64))
    }

    /// Gives it another length.
    ///
    /// # Errors
    /// As is wished.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        let len = number(len)?;
        self.call(Kind::Size, len, 0, |file, _| file.resize(len))
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// As is wished; and if another one's sync has failed since.
    pub fn sync_data(&self) -> io::Result<()> {
        let errors = self.call(Kind::Sync, 0, 0, |file, _| {
            file.synced();
            file.errors
        })?;
        if self.seen.swap(errors, Relaxed) == errors { Ok(()) } else { Err(errno(libc::EIO)) }
    }
}

impl Seek for &File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        assert_eq!(to, SeekFrom::End(0), "only the size is asked for");
        Ok(self.metadata()?.len())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        (&*self).seek(to)
    }
}

// What is opened by a path is not simulated.
impl From<OwnedFd> for File {
    fn from(_: OwnedFd) -> Self {
        panic!("no path leads to a simulated file")
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        panic!("a simulated file has no descriptor")
    }
}

/// As of std.
#[allow(clippy::missing_errors_doc)]
pub trait FileExt {
    /// As of std.
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize>;
    /// As of std.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;

    /// As of std.
    fn read_exact_at(&self, memory: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < memory.len() {
            match self.read_at(&mut memory[done..], at + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// As of std.
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.write_at(&bytes[done..], at + done as u64) {
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl FileExt for File {
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        self.read(memory, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.write(bytes, at)
    }
}
