//! Flushes of disks that no guest has asked for: only an engine can flush a disk of a server, a cluster or a
//! custom engine, and only its worker can ask it.

use super::Worker;
use super::control::Waiting;
use crate::queue::QueueLifecycle;
use crate::waiting::{Flush, FlushState};
use ringway_aio::{Engine, Io, IoMemory, IoOp};
use ringway_disk::Disk;
use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};

/// Tags from here on are of flushes: queue *n* has `n << 16 | slot` (Worker invariant 1).
const FLUSHES: u64 = 1 << 48;

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
            // First: whoever asked may let the disk go next, which is not for this thread to do.
            drop(disk);
            let _ = reply.send(Ok(()));
            return;
        }
        match disk.attach(&mut self.engine) {
            Ok(file) => {
                let taken = |tag| {
                    let is = |other: &Waiting<Q>| matches!(other, Waiting::Flush { flush, .. } if flush.tag == tag);
                    self.waiting.iter().any(is)
                };
                // No more wait than there are.
                let tag = (FLUSHES..).find(|&tag| !taken(tag)).unwrap_or(FLUSHES);
                let share = self.places.share(&disk);
                let flush = Flush { disk, file, share, tag, state: FlushState::Ready, tries: 0 };
                self.waiting.push(Waiting::Flush { flush, reply });
            }
            Err(error) => {
                drop(disk);
                let _ = reply.send(Err(error));
            }
        }
    }

    /// Hands the flush in place `at`, if it is one, to the engine, unless it has it.
    #[cold]
    pub(super) fn begin_flush(&mut self, at: usize) {
        let Waiting::Flush { flush, .. } = &mut self.waiting[at] else { return };
        if !matches!(flush.state, FlushState::Ready) || !flush.share.take() {
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
            flush.state = FlushState::InFlight;
            flush.tries += 1;
        } else {
            flush.share.give_back();
        }
    }

    /// What to tell of a flush that is over.
    #[cold]
    pub(super) fn end_flush(&mut self, flush: Flush) -> io::Result<()> {
        self.engine.detach(flush.file);
        match flush.state {
            FlushState::Over(result) if result < 0 => {
                let (disk, error) = (&flush.disk, io::Error::from_raw_os_error(-result));
                // What was never carried out has lost nothing.
                if matches!(-result, libc::ENOTCONN | libc::ENOMEM | libc::EAGAIN | libc::EINTR) {
                    tracing::error!(
                        disk = disk.name(),
                        "it cannot be flushed now: {error}. Ask again"
                    );
                } else {
                    disk.flush_has_failed();
                    tracing::error!(
                        disk = disk.name(),
                        "a flush has failed, and so will later ones until it is served anew: {error}"
                    );
                }
                Err(error)
            }
            _ => Ok(()),
        }
    }
}
