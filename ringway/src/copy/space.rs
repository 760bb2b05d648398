//! What becomes of a destination that is a file before bytes are moved: blocks that are shared, its
//! size, its space.

use super::Copy;
use super::args::{CopyArgs, Prealloc, Reflink};
use super::end::End;
use super::flow::{DST, SRC};
use super::guard::discard_if_new;
use super::share::{self, Shared};
use super::watch::bar;
use anyhow::{Context, bail};
use ringway_control::size::Size;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

impl Copy {
    /// What is done with a file before bytes are moved: its blocks are shared, it gets its size and
    /// its space.
    pub(super) fn prepare_file(
        &mut self,
        args: &CopyArgs,
        signal: &AtomicUsize,
    ) -> anyhow::Result<Option<Shared>> {
        let (bytes, name) = (self.source.bytes, &args.destination);
        let End::File(to) = &self.ends[DST] else { return Ok(None) };
        let room = to.file.metadata()?.len();
        if !to.regular {
            return Ok(None);
        }
        let mut shared = None;
        let may_share = args.reflink != Reflink::Never && self.prealloc == Prealloc::Off;
        if let End::File(from) = &self.ends[SRC] {
            if from.regular && may_share {
                let bar = bar("share", self.start, bytes, self.quiet);
                let found = share::share(&from.file, &to.file, self.start, bytes, &mut |done| {
                    bar.set_position(done);
                    signal.load(Relaxed) != 0
                });
                bar.finish_and_clear();
                let cut = to.file.metadata()?.len() < room;
                self.untouched &= self.is_new || (found.to == 0 && !cut);
                match found.end {
                    share::End::Refused(errno) if args.reflink == Reflink::Always => bail!(
                        "{name} cannot share the blocks of {} ({}, {errno}): copy with --reflink auto",
                        args.source,
                        share::why(errno)
                    ),
                    share::End::Failed(errno) => {
                        let error = io::Error::from(errno);
                        return Err(error).with_context(|| {
                            format!("{name} cannot share the blocks of {}", args.source)
                        });
                    }
                    _ => shared = Some(found),
                }
            }
        }
        if self.start == 0 {
            self.untouched &= self.is_new;
            let keep = shared.as_ref().map_or(0, |shared| shared.to);
            set_size(&to.file, keep, bytes).with_context(|| format!("cannot size {name}"))?;
        }
        reserve(&to.file, self.prealloc, bytes)
            .with_context(|| format!("cannot reserve {} for {name}", Size(bytes)))?;
        Ok(shared)
    }

    /// Leaves nothing of a copy that could not begin, with the destination untouched.
    pub(super) fn undo(&mut self, args: &CopyArgs) {
        // Best effort: the error that brought us here is the one worth telling.
        if self.is_new {
            if let End::File(to) = &self.ends[DST] {
                let _ = to.file.set_len(0);
                discard_if_new(&args.destination, false);
            }
        }
        if let Some(journal) = self.journal.take() {
            let _ = journal.remove();
        }
    }
}

/// Makes the file one hole of the right size behind its first `keep` bytes.
fn set_size(file: &File, keep: u64, bytes: u64) -> io::Result<()> {
    file.set_len(keep)?;
    file.set_len(bytes)
}

/// Reserves the space of `bytes` bytes, so that no write fails for want of it later. What is there
/// stays as it is.
///
/// # Errors
/// No space, or a file system that cannot reserve any.
fn reserve(file: &File, how: Prealloc, bytes: u64) -> anyhow::Result<()> {
    if how == Prealloc::Off || bytes == 0 {
        return Ok(());
    }
    let reserved = loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::INTR) => {}
            reserved => break reserved,
        }
    };
    match (reserved, how) {
        (Ok(()), _) => Ok(()),
        // It is written anyway.
        (Err(Errno::OPNOTSUPP | Errno::NOSYS), Prealloc::Full) => Ok(()),
        (Err(Errno::OPNOTSUPP | Errno::NOSYS), _) => {
            bail!("its file system cannot reserve space: --prealloc full writes zeroes instead")
        }
        (Err(error), _) => Err(io::Error::from(error).into()),
    }
}
