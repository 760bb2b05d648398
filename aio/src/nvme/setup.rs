//! How a ring for namespaces begins and ends, and the files that it knows.

use super::namespace::no_namespace;
use super::{Flights, Namespace, Nvme, table_index};
use crate::engine::{Counters, Engine, FileId, Files, Handle, Limits, Reaped};
use crate::io_uring::doorbells::Doorbells;
use crate::io_uring::features::{FILES, Feature, set_up_for};
use io_uring::opcode;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// Room in the ring for doorbells, beside `depth` operations.
const BELLS: u32 = 64;

/// What the ring takes: nothing reads or writes a file, whatever is written into the ring.
const OPS: [u8; 3] = [opcode::UringCmd80::CODE, opcode::PollAdd::CODE, opcode::PollRemove::CODE];

impl Nvme {
    /// An engine for `depth` operations at a time.
    ///
    /// # Errors
    /// Says why this host has no such io_uring for us: too old, switched off, or out of memory.
    pub fn new(depth: u32) -> io::Result<Self> {
        let too_old = || {
            let why = "NVMe passthrough needs an io_uring of Linux 5.19 or newer";
            io::Error::new(io::ErrorKind::Unsupported, why)
        };
        let entries = depth.max(1) + BELLS;
        let (ring, features) = set_up_for(entries, 0, &[], &OPS).map_err(|error| {
            if error.raw_os_error() == Some(libc::EINVAL) { too_old() } else { error }
        })?;
        if !features.has(Feature::Commands) {
            return Err(too_old());
        }
        if let Some(why) = features.why_not(Feature::RegisteredFiles) {
            return Err(io::Error::other(format!("the ring takes no files: {why}")));
        }
        Ok(Self {
            limits: Limits::new("nvme", depth),
            ring,
            files: Files::new(),
            flights: Flights::new(depth),
            refused: Vec::with_capacity(depth as usize),
            submitted: 0,
            doorbells: Doorbells::new(BELLS as usize),
            enabled: false,
            counters: Counters::default(),
        })
    }

    /// As [`Engine::attach_handle`]. The kernel keeps both devices open until the ring's last command is done.
    pub(super) fn attach_namespace(
        &mut self,
        file: &Arc<File>,
        handle: &Handle,
    ) -> io::Result<FileId> {
        let namespace: Arc<Namespace> =
            Arc::clone(handle).downcast().map_err(|_| no_namespace())?;
        let at = table_index(self.files.next());
        if at + 1 >= FILES {
            return Err(io::Error::other("one worker serves 128 NVMe namespaces at most"));
        }
        let devices = [file.as_raw_fd(), namespace.block.as_raw_fd()];
        self.ring.submitter().register_files_update(at, &devices)?;
        Ok(self.files.attach(file, namespace))
    }

    /// As [`Engine::detach`].
    pub(super) fn detach_namespace(&mut self, file: FileId) {
        if self.files.detach(file).is_some() {
            // If this fails the kernel keeps the files open until the ring is gone.
            let _ = self.ring.submitter().register_files_update(table_index(file), &[-1, -1]);
        }
    }

    /// Completes what is in the kernel, without a caller to hear of it.
    fn drain(&mut self) -> io::Result<()> {
        let mut out = Reaped::default();
        while self.flights.count() > 0 {
            if self.reap(&mut out) == 0 {
                self.wait(Some(Duration::from_secs(1)))?;
            }
            out.clear();
        }
        Ok(())
    }
}

impl Drop for Nvme {
    fn drop(&mut self) {
        if let Err(e) = self.drain() {
            // Only on a thread that does not own the ring. To go on would let the device write
            // into memory that is somebody else's by now.
            // Told as panics are: standard error may be of no use.
            let _abort = Abort;
            panic!("NVMe ring dropped with {} commands in flight: {e}", self.flights.count());
        }
        // Closing a ring lets go of its files some time later; their locks must not live on.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// Ends the process when it is dropped.
struct Abort;

impl Drop for Abort {
    fn drop(&mut self) {
        std::process::abort();
    }
}
