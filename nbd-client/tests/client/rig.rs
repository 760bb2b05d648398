//! An engine with one export, asked one thing or many at a time.

use ringway_aio::{Done, Engine, FileId, Io, IoMemory, IoOp, Reaped};
use ringway_core::Segment;
use ringway_nbd_client::{Allocation, Nbd, Remote, Target, Timeouts, connect};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long anything may take before a test fails: a loaded machine is slow.
const LONG: Duration = Duration::from_secs(60);

pub(crate) struct Rig {
    pub(crate) engine: Nbd,
    pub(crate) remote: Remote,
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
        let remote = Remote::new("test", &connected);
        let allocation = remote.allocation().unwrap();
        remote.supervise(Box::new(move || Ok(connect(&target)?)), timeouts).unwrap();
        let mut engine = Nbd::new(64).unwrap();
        let file = engine.attach(&connected.socket).unwrap();
        let out = Reaped::with_capacity(64, 64);
        (Self { engine, remote, file, out, memory: Vec::new() }, allocation)
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
        let list = &self.memory.last().unwrap().0;
        let memory = if op.moves_data() { list[..].into() } else { IoMemory::NONE };
        let io = Io { tag, op, file: self.file, offset, len, memory };
        // SAFETY: list and memory stay in `self.memory`, untouched, until the rig is dropped, after the
        // engine.
        unsafe { self.engine.queue(&io) }.unwrap();
        tag
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
