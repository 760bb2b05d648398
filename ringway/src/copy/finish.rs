//! What follows when all bytes have moved: durable, the same, told.

use super::args::{CompressArg, CopyArgs};
use super::end::End;
use super::flow::{Counters, DST, Halt, Mode, SRC};
use super::journal::sync_folder;
use super::open;
use super::report::Summary;
use super::{Copy, Outcome};
use anyhow::{Context, bail};
use ringway_control::config::Format;
use std::sync::atomic::AtomicUsize;

impl Copy {
    /// Compares the two ends; what came of it if that is not the best.
    pub(super) fn verify(
        &mut self,
        args: &CopyArgs,
        signal: &AtomicUsize,
    ) -> anyhow::Result<Option<Outcome>> {
        match self.flow(args, signal, Mode::Compare, "verify", 0)?.halt {
            None => {}
            Some(Halt::Differs(at)) => {
                // What is there is not to be trusted when it is resumed.
                if let Some(journal) = &mut self.journal {
                    journal.note(0)?;
                }
                return Ok(Some(Outcome::Differs(at)));
            }
            Some(Halt::Failed(error)) => return Err(error.context("verifying")),
            Some(Halt::Stopped) => {
                let what = if self.image.is_some() { "was not made" } else { "is not verified" };
                let line = format!("interrupted; {} {what}", args.destination);
                return Ok(Some(Outcome::Stopped(line)));
            }
        }
        self.check_source(args)?;
        Ok(None)
    }

    /// Makes everything durable: data, and that there is a file at all.
    pub(super) fn sync(&mut self, args: &CopyArgs, signal: &AtomicUsize) -> anyhow::Result<()> {
        let name = &args.destination;
        match &mut self.ends[DST] {
            End::File(file) => {
                file.file.sync_all().with_context(|| format!("cannot make {name} durable"))?;
                if file.regular {
                    sync_folder(name.path())
                        .with_context(|| format!("cannot make {name} durable"))?;
                }
                Ok(())
            }
            End::Disk(disk) => {
                disk.flush(signal).with_context(|| format!("cannot make {name} durable"))
            }
            End::Image(_) => {
                let Some(image) = &mut self.image else { return Ok(()) };
                self.ends[DST] = image.finish().with_context(|| format!("cannot finish {name}"))?;
                Ok(())
            }
        }
    }

    /// A source that was written meanwhile was not copied as it was at any time.
    pub(super) fn check_source(&self, args: &CopyArgs) -> anyhow::Result<()> {
        let now = match &self.ends[SRC] {
            End::File(file) => open::identity(args.source.path(), &file.file)?,
            End::Image(image) => open::identity_of_image(args.source.path(), image)?,
            End::Disk(_) => return Ok(()),
        };
        if now != self.source {
            bail!(
                "{} changed while it was copied, so {} is no copy of it: copy again with --force",
                args.source,
                args.destination
            );
        }
        Ok(())
    }

    /// Everything before `from` was shared, or there when it was resumed.
    pub(super) fn summary(
        &self,
        args: &CopyArgs,
        from: u64,
        counters: &Counters,
        seconds: f64,
    ) -> Summary {
        let name = |qcow2| if qcow2 { "qcow2" } else { "raw" };
        let compression = args.compress.map(|kind| match kind {
            CompressArg::Zlib => "zlib",
            CompressArg::Zstd => "zstd",
        });
        Summary {
            source: args.source.to_string(),
            destination: args.destination.to_string(),
            from_format: name(args.from_format == Some(Format::Qcow2)),
            to_format: name(self.image.is_some()),
            compression,
            bytes: self.source.bytes,
            resumed_at_bytes: self.start,
            shared_bytes: from - self.start,
            data_bytes: counters.written,
            zero_bytes: counters.zeroes,
            file_bytes: self.image.as_ref().map(|image| image.file_bytes),
            seconds,
            verified: args.verify,
            prealloc: self.prealloc,
        }
    }
}
