//! Storage in memory of which reads, chosen writes, or syncs and erasures stall until they are let go, or writes fail.

use ringway_aio::bells::Bells;
use ringway_aio::{BellId, Counters, Done, Engine, FileId, Files, Full, Io, IoOp, Limits, Reaped};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often an engine looks whether a write that stalls is let go.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long a test waits for anything.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Shared {
    bytes: Vec<u8>,
    /// Writes that begin with this byte stall.
    stalls: Option<u8>,
    /// Reads stall.
    stalls_reads: bool,
    /// Syncs and erasures stall.
    stalls_others: bool,
    /// How many of these were asked for.
    others: usize,
    /// With which error writes fail, if with any.
    fails: Option<i32>,
    stalled: usize,
    /// First bytes of the writes that were asked for, in their order.
    asked: Vec<u8>,
}

/// What is stored. Every engine made of it has the same.
#[derive(Clone, Debug)]
pub struct StallingStore(Arc<Mutex<Shared>>);

impl StallingStore {
    /// Zeroes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let (bytes, asked) = (vec![0; bytes], Vec::new());
        let (stalls, stalls_reads, stalls_others, fails) = (None, false, false, None);
        let (stalled, others) = (0, 0);
        let shared =
            Shared { bytes, stalls, stalls_reads, stalls_others, others, fails, stalled, asked };
        Self(Arc::new(Mutex::new(shared)))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on writes that begin with this byte stall. Without one none does, and those that did land.
    pub fn stall(&self, byte: Option<u8>) {
        self.lock().stalls = byte;
    }

    /// From now on reads stall, or not any more; those that did are carried out then.
    pub fn stall_reads(&self, stall: bool) {
        self.lock().stalls_reads = stall;
    }

    /// From now on syncs and erasures stall, or not any more; those that did are carried out then.
    pub fn stall_others(&self, stall: bool) {
        self.lock().stalls_others = stall;
    }

    /// How many syncs and erasures were asked for.
    #[must_use]
    pub fn others(&self) -> usize {
        self.lock().others
    }

    /// With which error each write that does not stall fails from now on, if with any.
    pub fn fail(&self, errno: Option<i32>) {
        self.lock().fails = errno;
    }

    /// The byte at `at`.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn byte(&self, at: usize) -> u8 {
        self.lock().bytes[at]
    }

    /// How many writes that begin with `byte` were asked for.
    #[must_use]
    pub fn asked(&self, byte: u8) -> usize {
        self.lock().asked.iter().filter(|&&asked| asked == byte).count()
    }

    /// Waits until `wanted` requests stall.
    ///
    /// # Panics
    /// If they do not come.
    pub fn wait_stalled(&self, wanted: usize) {
        let begun = Instant::now();
        while self.lock().stalled != wanted {
            assert!(begun.elapsed() < PATIENCE, "{} requests stall", self.lock().stalled);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// An engine of this storage.
    ///
    /// # Panics
    /// If the process is out of descriptors.
    #[must_use]
    pub fn engine(&self) -> Stalling {
        self.engine_of(2048)
    }

    /// One that takes no more than so many requests at a time.
    ///
    /// # Panics
    /// If the process is out of descriptors.
    #[must_use]
    pub fn engine_of(&self, depth: u32) -> Stalling {
        Stalling {
            store: self.clone(),
            limits: Limits::new("stalling", depth),
            files: Files::new(),
            bells: Bells::new().expect("descriptors"),
            stalled: Vec::new(),
            done: Vec::new(),
            counters: Counters::default(),
        }
    }
}

/// A request that stalls.
#[derive(Debug)]
struct Stalled {
    tag: u64,
    offset: usize,
    /// Of a write.
    data: Vec<u8>,
    /// Where a read puts what it finds, and how much.
    into: Vec<(*mut u8, usize)>,
    /// How much an erasure, or a sync, makes zeroes.
    erases: Option<usize>,
}

// SAFETY: the memory is the request's until its result is told (`Engine::queue`).
unsafe impl Send for Stalled {}

/// An engine of a [`StallingStore`].
#[derive(Debug)]
pub struct Stalling {
    store: StallingStore,
    limits: Limits,
    files: Files<()>,
    bells: Bells,
    stalled: Vec<Stalled>,
    done: Vec<Done>,
    counters: Counters,
}

impl Stalling {
    fn let_go(&mut self) {
        let mut shared = self.store.lock();
        let (stalls, stalls_reads, fails) = (shared.stalls, shared.stalls_reads, shared.fails);
        let stalls_others = shared.stalls_others;
        let goes_on = |it: &Stalled| match it.data.first() {
            Some(&byte) => stalls != Some(byte),
            None if it.erases.is_some() => !stalls_others,
            None => !stalls_reads,
        };
        let stalled = std::mem::take(&mut self.stalled);
        let (released, rest): (Vec<_>, _) = stalled.into_iter().partition(goes_on);
        self.stalled = rest;
        for Stalled { tag, mut offset, data, into, erases } in released {
            shared.stalled -= 1;
            shared.bytes[offset..offset + erases.unwrap_or(0)].fill(0);
            let len = data.len() + into.iter().map(|(_, len)| len).sum::<usize>();
            let mut result = i32::try_from(len).expect("a short request");
            for (base, len) in into {
                let from = &shared.bytes[offset..offset + len];
                // SAFETY: the caller of `queue` vouches for the memory until the result is told.
                unsafe { base.copy_from_nonoverlapping(from.as_ptr(), len) };
                offset += len;
            }
            match fails {
                Some(errno) if !data.is_empty() => result = -errno,
                _ => shared.bytes[offset..offset + data.len()].copy_from_slice(&data),
            }
            self.done.push(Done { tag, result });
        }
    }
}

impl Engine for Stalling {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        Ok(self.files.attach(file, ()))
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        self.bells.unwatch(fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.done.len() + self.stalled.len() == self.limits.depth as usize {
            return Err(Full);
        }
        let (tag, op) = (io.tag, io.op);
        let offset = usize::try_from(io.offset).expect("within memory");
        let len = usize::try_from(io.len).expect("within memory");
        let mut shared = self.store.lock();
        let is_other = !op.moves_data();
        shared.others += usize::from(is_other);
        if is_other && shared.stalls_others {
            shared.stalled += 1;
            let (data, into, erases) = (Vec::new(), Vec::new(), Some(len));
            self.stalled.push(Stalled { tag, offset, data, into, erases });
            return Ok(());
        }
        let result = match op {
            IoOp::Sync => 0,
            IoOp::Read if shared.stalls_reads => {
                shared.stalled += 1;
                let into = io.memory.segments().iter().map(|it| (it.base, it.len)).collect();
                self.stalled.push(Stalled { tag, offset, data: Vec::new(), into, erases: None });
                return Ok(());
            }
            IoOp::Read => {
                let mut at = offset;
                for segment in io.memory.segments() {
                    let from = &shared.bytes[at..at + segment.len];
                    // SAFETY: the caller of `queue` vouches for the segments.
                    unsafe { segment.base.copy_from_nonoverlapping(from.as_ptr(), segment.len) };
                    at += segment.len;
                }
                i32::try_from(len).expect("a short read")
            }
            IoOp::Write | IoOp::WriteDurable => {
                let mut data = Vec::with_capacity(len);
                for segment in io.memory.segments() {
                    // SAFETY: as above.
                    data.extend(unsafe {
                        std::slice::from_raw_parts(segment.base.cast_const(), segment.len)
                    });
                }
                shared.asked.push(data[0]);
                if shared.stalls == Some(data[0]) {
                    shared.stalled += 1;
                    self.stalled.push(Stalled {
                        tag,
                        offset,
                        data,
                        into: Vec::new(),
                        erases: None,
                    });
                    return Ok(());
                } else if let Some(errno) = shared.fails {
                    -errno
                } else {
                    shared.bytes[offset..offset + len].copy_from_slice(&data);
                    i32::try_from(len).expect("a short write")
                }
            }
            IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard => {
                shared.bytes[offset..offset + len].fill(0);
                0
            }
        };
        drop(shared);
        self.done.push(Done { tag, result });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.take(&mut out.rung);
        self.let_go();
        out.done.append(&mut self.done);
        out.done.len()
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.bells.poll(&mut self.counters)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.done.is_empty() {
            return Ok(());
        }
        let timeout = match self.stalled.is_empty() {
            true => timeout,
            false => Some(timeout.map_or(LOOK_EVERY, |timeout| timeout.min(LOOK_EVERY))),
        };
        self.bells.wait(timeout, &mut self.counters)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for Stalling {
    /// An engine waits for what it was given.
    fn drop(&mut self) {
        let begun = Instant::now();
        while !self.stalled.is_empty() && begun.elapsed() < PATIENCE {
            self.let_go();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
