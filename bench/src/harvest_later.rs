//! An engine that tells of completions only once there is nothing to submit: what origin O2 compares
//! with a worker that looks for them right after each submission.

use ringway_aio::{
    BellId, Counters, Engine, FileId, Full, Io, IoUring, IoUringSetup, Limits, LinuxAio, Reaped,
};
use ringway_core::Segment;
use ringway_disk::EngineKind;
use ringway_export::{ENGINE_DEPTH, PoolOptions};
use ringway_vhost_user::Pool;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Workers with such engines.
///
/// # Errors
/// What the host says, and that there is none of the kind that is asked for.
pub(crate) fn pool(options: PoolOptions) -> io::Result<Pool> {
    let nobody = Arc::new(|| {});
    match options.engine {
        EngineKind::LinuxAio => Pool::with_engines(options.workers, options.worker, nobody, |_| {
            LinuxAio::new(ENGINE_DEPTH).map(later)
        }),
        EngineKind::IoUring => {
            let setup = IoUringSetup { iopoll: options.iopoll, ..IoUringSetup::new(ENGINE_DEPTH) };
            Pool::with_engines(options.workers, options.worker, nobody, move |_| {
                IoUring::new(setup).map(later)
            })
        }
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

fn later<E: Engine>(inner: E) -> HarvestLater<E> {
    HarvestLater { inner, submitted: false, queued: false }
}

struct HarvestLater<E> {
    inner: E,
    /// Something was queued since the last submission.
    queued: bool,
    /// The last submission had something.
    submitted: bool,
}

impl<E: Engine> Engine for HarvestLater<E> {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.inner.attach(file)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.map_memory(regions) }
    }

    fn detach(&mut self, file: FileId) {
        self.inner.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.inner.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.inner.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        self.queued = true;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.queue(io) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.submitted = std::mem::take(&mut self.queued);
        self.inner.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        if std::mem::take(&mut self.submitted) { 0 } else { self.inner.reap(out) }
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.inner.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_aio::{IoOp, Null};

    #[test]
    fn completions_wait_until_nothing_was_submitted() {
        let mut engine = later(Null::new(4).unwrap());
        let file = engine.attach(&Arc::new(tempfile::tempfile().unwrap())).unwrap();
        let mut out = Reaped::with_capacity(4, 4);
        for tag in 1..3 {
            let io =
                Io { tag, file, op: IoOp::Sync, offset: 0, len: 0, memory: [].as_slice().into() };
            // SAFETY: there is no memory.
            unsafe { engine.queue(&io) }.unwrap();
            engine.submit().unwrap();
            assert_eq!(engine.reap(&mut out), 0, "right after the submission");
        }
        engine.submit().unwrap();
        assert_eq!(engine.reap(&mut out), 2, "nothing was submitted");
    }
}
