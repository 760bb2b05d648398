//! An engine with one export, asked one thing or many at a time.

use ringway_aio::{Done, Engine, FileId, Io, IoMemory, IoOp, Reaped};
use ringway_core::Segment;
use ringway_nbd_client::{Allocation, Connections, Nbd, Remote, Target, Timeouts, connect};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long anything may take before a test fails: a loaded machine is slow.
const LONG: Duration = Duration::from_secs(60);

pub(crate) struct Rig {
    pub(crate) engine: Nbd,
    pub(crate) remote: Arc<Remote>,
    socket: Arc<File>,
    file: FileId,
    out: Reaped,
    /// What operations in flight use: their lists and their memory.
    memory: Vec<(Box<[Segment]>, Vec<u8>)>,
}

pub(crate) fn target(path: &Path) -> Target {
    format!("nbd:unix:{}", path.display()).parse().unwrap()
}

impl Rig {
    pub(crate) fn new(path: &Path, timeouts: Timeouts) -> Self {
        Self::after_questions(path, timeouts).0
    }

    /// Also where the server says that it has data, which is asked before the engine has the connection.
    pub(crate) fn after_questions(path: &Path, timeouts: Timeouts) -> (Self, Option<Allocation>) {
        let target = target(path);
        let connected = connect(&target.with_block_status()).unwrap();
        let remote = Arc::new(Remote::new("test", &connected));
        let allocation = remote.allocation().unwrap();
        remote.supervise(Box::new(move || Ok(connect(&target)?)), timeouts).unwrap();
        (Self::of(remote, connected.socket), allocation)
    }

    /// After something is done with the export before an engine uses it.
    pub(crate) fn kept(path: &Path, before: impl FnOnce(&Remote)) -> Self {
        let connected = connect(&target(path)).unwrap();
        let remote = Arc::new(Remote::new("test", &connected));
        before(&remote);
        Self::of(remote, connected.socket)
    }

    /// Engines that share up to `most` connections, one after the other.
    pub(crate) fn several(path: &Path, most: u16, engines: usize) -> Vec<Self> {
        Self::several_within(path, most, engines, Timeouts::default())
    }

    /// The same with limits of its own.
    pub(crate) fn several_within(
        path: &Path,
        most: u16,
        engines: usize,
        timeouts: Timeouts,
    ) -> Vec<Self> {
        let target = target(path).with_connections(Connections { most, asked: true });
        let connected = connect(&target).unwrap();
        let remote = Arc::new(Remote::new("test", &connected));
        remote.share_among(engines);
        let again = move || Ok(connect(&target)?);
        remote.supervise(Box::new(again), timeouts).unwrap();
        let one = |_| Self::of(Arc::clone(&remote), Arc::clone(&connected.socket));
        (0..engines).map(one).collect()
    }

    fn of(remote: Arc<Remote>, socket: Arc<File>) -> Self {
        let mut engine = Nbd::new(64).unwrap();
        let file = engine.attach_handle(&socket, &remote.handle()).unwrap();
        let out = Reaped::with_capacity(64, 64);
        Self { engine, remote, socket, file, out, memory: Vec::new() }
    }

    /// Another queue on the export; what it is called.
    pub(crate) fn attach(&mut self) -> FileId {
        self.engine.attach_handle(&self.socket, &self.remote.handle()).unwrap()
    }

    /// What is queued from now on is of this queue.
    pub(crate) fn use_queue(&mut self, file: FileId) {
        self.file = file;
    }

    pub(crate) fn queue_in_use(&self) -> FileId {
        self.file
    }

    /// Another engine that wants connections.
    pub(crate) fn another_engine(&self) -> std::io::Result<FileId> {
        Nbd::new(4).unwrap().attach_handle(&self.socket, &self.remote.handle())
    }

    /// Queues an operation; its tag is its number. Data goes by segments of odd lengths.
    pub(crate) fn queue(&mut self, op: IoOp, offset: u64, len: u64, bytes: &[u8]) -> u64 {
        let mut memory = bytes.to_vec();
        if op == IoOp::Read {
            memory = vec![0xee; usize::try_from(len).unwrap()];
        }
        let list: Vec<Segment> = memory
            .chunks_mut(1000)
            .map(|piece| Segment { base: piece.as_mut_ptr(), len: piece.len() })
            .collect();
        self.memory.push((list.into(), memory));
        let tag = self.memory.len() as u64 - 1;
        self.queue_last(op, offset, len);
        tag
    }

    /// Queues a write of memory that is not there any more.
    pub(crate) fn queue_vanished(&mut self, offset: u64, len: usize) -> u64 {
        // Nothing is mapped there, in any process.
        let nowhere = Segment { base: std::ptr::without_provenance_mut(4096), len };
        self.memory.push(([nowhere].into(), Vec::new()));
        self.queue_last(IoOp::Write, offset, len as u64);
        self.memory.len() as u64 - 1
    }

    fn queue_last(&mut self, op: IoOp, offset: u64, len: u64) {
        let tag = self.memory.len() as u64 - 1;
        let list = &self.memory.last().unwrap().0;
        let memory = if op.moves_data() { list[..].into() } else { IoMemory::NONE };
        let io = Io { tag, op, file: self.file, offset, len, memory };
        // SAFETY: list and memory stay in `self.memory`, untouched, until the rig is dropped, after the
        // engine. Where there is none, the kernel alone looks, and says so.
        unsafe { self.engine.queue(&io) }.unwrap();
    }

    pub(crate) fn submit(&mut self) {
        self.engine.submit().unwrap();
    }

    /// The next `count` results, by their tags.
    pub(crate) fn reap(&mut self, count: usize) -> Vec<(u64, i32)> {
        let begun = Instant::now();
        self.out.clear();
        while self.out.done.len() < count {
            assert!(begun.elapsed() < LONG, "{} of {count} results", self.out.done.len());
            self.engine.reap(&mut self.out);
            if self.out.done.len() < count {
                self.engine.submit_and_wait(Some(Duration::from_millis(50))).unwrap();
            }
        }
        let mut done: Vec<_> =
            self.out.done.iter().map(|&Done { tag, result }| (tag, result)).collect();
        done.sort_unstable();
        done
    }

    /// What has been answered, by its tag, after one look.
    pub(crate) fn reap_now(&mut self) -> Vec<(u64, i32)> {
        self.out.clear();
        self.engine.reap(&mut self.out);
        self.out.done.iter().map(|&Done { tag, result }| (tag, result)).collect()
    }

    /// What has been answered after a moment, by its tag.
    pub(crate) fn reap_soon(&mut self) -> Vec<(u64, i32)> {
        self.out.clear();
        self.engine.reap(&mut self.out);
        self.engine.submit_and_wait(Some(Duration::from_millis(20))).unwrap();
        self.engine.reap(&mut self.out);
        self.out.done.iter().map(|&Done { tag, result }| (tag, result)).collect()
    }

    /// One operation, to its end.
    pub(crate) fn one(&mut self, op: IoOp, offset: u64, len: u64, bytes: &[u8]) -> i32 {
        let tag = self.queue(op, offset, len, bytes);
        let done = self.reap(1);
        assert_eq!(done[0].0, tag);
        done[0].1
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> i32 {
        self.one(IoOp::Write, offset, bytes.len() as u64, bytes)
    }

    pub(crate) fn flush(&mut self) -> i32 {
        self.one(IoOp::Sync, 0, 0, &[])
    }

    pub(crate) fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, i32> {
        let done = self.one(IoOp::Read, offset, len, &[]);
        let got = usize::try_from(done).map_err(|_| -done)?;
        Ok(self.memory.last().unwrap().1[..got].to_vec())
    }

    /// What a read with this tag has got.
    pub(crate) fn bytes(&self, tag: u64) -> &[u8] {
        &self.memory[usize::try_from(tag).unwrap()].1
    }
}
