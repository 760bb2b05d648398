//! Flushes of disks that no guest has asked for: only an engine can flush a disk of a server, a cluster or a
//! custom engine, and only its worker can ask it.

use super::Worker;
use super::control::Waiting;
use crate::queue::QueueLifecycle;
use ringway_aio::{Engine, FileId, Io, IoMemory, IoOp};
use ringway_disk::Disk;
use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};

/// Tags from here on are of flushes: queue *n* has `n << 16 | slot` (Worker invariant 1).
const FLUSHES: u64 = 1 << 48;

/// How often one is tried again that an engine could not carry out just then.
const RETRIES_MAX: u32 = 16;

/// One flush, from a worker's command to its answer. The worker has attached the file for it.
#[derive(Debug)]
pub(crate) struct Flush {
    disk: Arc<Disk>,
    file: FileId,
    tag: u64,
    state: State,
    tries: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The engine has had no room for it yet.
    Ready,
    InFlight,
    /// With the engine's result.
    Over(i32),
}

impl Flush {
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over(_))
    }
}

/// A result that is of no queue.
#[cold]
pub(super) fn note<Q>(waiting: &mut [Waiting<Q>], tag: u64, result: i32) {
    for waiting in waiting {
        let Waiting::Flush { flush, .. } = waiting else { continue };
        if flush.tag == tag {
            let again = matches!(-result, libc::EINTR | libc::EAGAIN) && flush.tries < RETRIES_MAX;
            flush.state = if again { State::Ready } else { State::Over(result) };
        }
    }
}

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// A queue of this disk was added.
    #[cold]
    pub(super) fn knows(&mut self, disk: &Arc<Disk>) {
        self.known.retain(|known| known.strong_count() > 0);
        if !self.has_known(disk) {
            self.known.push(Arc::downgrade(disk));
        }
    }

    fn has_known(&self, disk: &Arc<Disk>) -> bool {
        self.known.iter().any(|known| Weak::as_ptr(known) == Arc::as_ptr(disk))
    }

    /// Begins the flush of a disk. What this worker never had a queue of has nothing to flush here, and is not
    /// attached: a connection to a server would be taken from whoever is to serve it.
    #[cold]
    pub(super) fn flush(&mut self, disk: Arc<Disk>, reply: SyncSender<io::Result<()>>) {
        if !self.has_known(&disk) {
            let _ = reply.send(Ok(()));
            return;
        }
        match self.engine.attach(&disk.file()) {
            Ok(file) => {
                let taken = |tag| {
                    let is = |other: &Waiting<Q>| matches!(other, Waiting::Flush { flush, .. } if flush.tag == tag);
                    self.waiting.iter().any(is)
                };
                // No more wait than there are.
                let tag = (FLUSHES..).find(|&tag| !taken(tag)).unwrap_or(FLUSHES);
                let flush = Flush { disk, file, tag, state: State::Ready, tries: 0 };
                self.waiting.push(Waiting::Flush { flush, reply });
            }
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    /// Hands the flush in place `at`, if it is one, to the engine, unless it has it.
    #[cold]
    pub(super) fn begin_flush(&mut self, at: usize) {
        let Waiting::Flush { flush, .. } = &mut self.waiting[at] else { return };
        if !matches!(flush.state, State::Ready) {
            return;
        }
        let io = Io {
            tag: flush.tag,
            op: IoOp::Sync,
            file: flush.file,
            offset: 0,
            len: 0,
            memory: IoMemory::NONE,
        };
        // SAFETY: it names no memory; the file is attached. A full engine rings when there is room again.
        if unsafe { self.engine.queue(&io) }.is_ok() {
            flush.state = State::InFlight;
            flush.tries += 1;
        }
    }

    /// What to tell of a flush that is over.
    #[cold]
    pub(super) fn end_flush(&mut self, flush: Flush) -> io::Result<()> {
        self.engine.detach(flush.file);
        match flush.state {
            State::Over(result) if result < 0 => {
                flush.disk.flush_has_failed();
                let error = io::Error::from_raw_os_error(-result);
                tracing::error!(
                    disk = flush.disk.name(),
                    "it could not be flushed, and later flushes fail: {error}"
                );
                Err(error)
            }
            _ => Ok(()),
        }
    }
}
