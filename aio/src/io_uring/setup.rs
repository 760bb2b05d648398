//! How a ring begins, and the files and the memory that it knows.

use super::buffers::Buffers;
use super::commands::COMMAND_BYTES;
use super::copies::{self, Copies};
use super::doorbells::Doorbells;
use super::features::{FILES, Feature, Features, IoUringSetup, set_up};
use super::polled::Polled;
use super::{IoUring, Note};
use crate::engine::{CommandPort, Counters, Engine, FileId, Files, IoOp, Limits, OpSet};
use crate::sys;
use io_uring::squeue::Flags;
use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Room in the ring for doorbells, beside `depth` operations. More are fine: a submission queue
/// that is full is submitted, and what a completion queue cannot hold the kernel keeps.
const BELLS: u32 = 64;

impl IoUring {
    /// Sets a ring up, with all features that the kernel has.
    ///
    /// # Errors
    /// Says why this host has no io_uring for us: too old, switched off, or out of memory.
    pub fn new(setup: IoUringSetup<'_>) -> io::Result<Self> {
        let IoUringSetup { depth, without, iopoll, buffers, commands } = setup;
        if iopoll && buffers > 0 {
            let why = "a polled ring has no registered buffers";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let entries = depth.max(1) + BELLS + commands;
        let (ring, features) = set_up(entries, buffers, without)?;
        let mut limits = Limits::new("io_uring", depth);
        if !features.has(Feature::Discard) {
            limits.ops = OpSet::ALL.without(IoOp::Discard);
        }
        if features.has(Feature::RegisteredBuffers) {
            limits.registered_buffers = buffers;
        }
        if commands > 0 && features.has(Feature::Commands) {
            limits.commands = Some(CommandPort { depth: commands, bytes: COMMAND_BYTES });
        }
        Ok(Self {
            buffers: Buffers::new(limits.registered_buffers),
            limits,
            ring,
            features,
            files: Files::new(),
            polled: iopoll.then(|| Polled::new(depth.max(1))).transpose()?,
            copies: Copies::new(depth),
            doorbells: Doorbells::new(BELLS as usize),
            enabled: false,
            bell: None,
            in_flight: 0,
            commands: 0,
            counters: Counters::default(),
        })
    }

    /// What of io_uring is in use here, and why the rest is not.
    #[must_use]
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// As [`Engine::attach`].
    pub(super) fn attach_file(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        if sys::is_in_memory(file) {
            sys::mark_nonblocking(file)?;
        }
        let id = self.files.next();
        let fixed = self.features.has(Feature::RegisteredFiles) && id.0 < FILES;
        let flags = if fixed { Flags::FIXED_FILE } else { Flags::empty() };
        // No ring is set up to try it: a worker in its sandbox may not. What cannot be is found out by and by.
        let polled = self.polled.is_some() && sys::is_direct(file)?;
        let copied = self.limits.registered_buffers == 0 && copies::concern(file)?;
        let id = self.files.attach(file, Note { flags, polled, cannot_poll: false, copied });
        if fixed {
            let fd = self.files.get(id).fd;
            let updated = self.ring.submitter().register_files_update(id.0, &[fd]);
            if let Err(e) = updated {
                self.files.detach(id);
                return Err(e);
            }
        }
        Ok(id)
    }

    /// As [`Engine::detach`].
    pub(super) fn detach_file(&mut self, file: FileId) {
        let known = self.files.detach(file);
        if known.is_some_and(|known| known.note.flags.contains(Flags::FIXED_FILE)) {
            // If this fails the kernel keeps the file open until the ring is gone.
            let _ = self.ring.submitter().register_files_update(file.0, &[-1]);
        }
    }

    /// As [`Engine::map_memory`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn register_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        if self.in_flight > 0 {
            let submitted = self.submit();
            if submitted.is_err() || !self.ring.submission().is_empty() {
                self.buffers.forget();
                let why = "the kernel does not take now what is queued for other memory";
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
            }
        }
        // SAFETY: passed on to the caller. What is in flight keeps the pages of its buffer (Linux 5.13).
        unsafe { self.buffers.register(&self.ring.submitter(), &mut self.features, regions) }
    }
}
