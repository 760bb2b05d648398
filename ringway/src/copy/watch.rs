//! What a copy runs on, and what is shown of it.

use super::args::EngineArg;
use super::flow::Watcher;
use super::journal::Journal;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use ringway_aio::{Engine, IoUring, IoUringSetup, Threads, ThreadsSetup};

pub(super) fn engine(wanted: EngineArg) -> anyhow::Result<Box<dyn Engine>> {
    /// Enough for all parts of all pieces in flight; more of them wait.
    const DEPTH: u32 = 1024;
    let uring = || IoUring::new(IoUringSetup::new(DEPTH));
    let threads = || Threads::new(ThreadsSetup { depth: DEPTH, threads: 16, cached_inline: false });
    Ok(match wanted {
        EngineArg::Auto => match uring() {
            Ok(engine) => Box::new(engine),
            Err(_) => Box::new(threads()?),
        },
        EngineArg::IoUring => Box::new(uring().context("io_uring does not work here")?),
        EngineArg::Threads => Box::new(threads()?),
    })
}

/// On a terminal only: indicatif sees to that.
pub(crate) fn bar(name: &'static str, start: u64, bytes: u64, quiet: bool) -> ProgressBar {
    let style = "{prefix:>7} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(bytes) };
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.with_prefix(name).with_position(start)
}

pub(super) struct Watch<'a> {
    pub(super) bar: ProgressBar,
    pub(super) journal: Option<&'a mut Journal>,
}

impl Watcher for Watch<'_> {
    fn progress(&mut self, done: u64) {
        self.bar.set_position(done);
    }

    fn durable(&mut self, done: u64) -> anyhow::Result<()> {
        self.journal.as_mut().map_or(Ok(()), |journal| journal.note(done))
    }
}
