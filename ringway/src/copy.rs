//! `ringway copy`: a disk from one place to another.
//!
//! `open.rs` opens the two ends and makes sure that nobody else uses them, `journal.rs` keeps what
//! an interrupted copy needs to go on, `flow.rs` moves the bytes (`extents.rs` what to read, `zero.rs`
//! what to leave out, `end.rs` how each end takes it), `share.rs` does without moving them.

pub(crate) mod args;
mod end;
mod extents;
mod flow;
mod guard;
mod journal;
mod open;
mod share;
mod space;
mod zero;

use crate::io::target::Target;
use anyhow::{Context, bail};
use args::{CopyArgs, EngineArg, Prealloc};
use end::{DIRECT, End};
use flow::{Counters, Course, DST, Flow, Halt, Mode, SRC, Watcher};
use guard::{discard_if_new, is_same, journal_path, may_write, mode_of};
use indicatif::{ProgressBar, ProgressStyle};
use journal::{Identity, Journal, sync_folder};
use open::Buffers;
use ringway_aio::{Engine, IoUring, IoUringSetup, Threads, ThreadsSetup};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_terminal::logging;
use share::Shared;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Bytes of a request, if the ends take so many.
const CHUNK: usize = 1 << 20;

/// Carries out `ringway copy`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &CopyArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP] {
        // The second one does not ask.
        let status = 128 + number;
        let asked = Arc::new(std::sync::atomic::AtomicBool::new(false));
        signal_hook::flag::register_conditional_shutdown(number, status, Arc::clone(&asked))?;
        signal_hook::flag::register(number, asked)?;
        signal_hook::flag::register_usize(number, Arc::clone(&signal), usize::try_from(number)?)?;
    }
    let mut copy = Copy::prepare(args, log.quiet)?;
    match copy.carry_out(args, &signal)? {
        Outcome::Done(line) => {
            if !log.quiet {
                ringway_terminal::output::print(&(line + "\n"))
                    .context("the copy is complete, but")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Differs(at) => {
            ringway_terminal::logging::complain(&anyhow::anyhow!(
                "{} differs from {} at byte {at}: the copy is not good",
                args.destination,
                args.source
            ));
            Ok(ExitCode::from(3))
        }
        Outcome::Stopped(line) => {
            eprintln!("{line}");
            Ok(ExitCode::from(u8::try_from(128 + signal.load(Relaxed)).unwrap_or(1)))
        }
    }
}

/// How it ended.
enum Outcome {
    /// With what to say.
    Done(String),
    Differs(u64),
    Stopped(String),
}

/// A copy, ends opened.
struct Copy {
    ends: [End; 2],
    source: Identity,
    journal: Option<Journal>,
    /// Where to begin.
    start: u64,
    /// The destination was not there before.
    is_new: bool,
    /// It holds nothing of a copy yet: it is as it was, or new.
    untouched: bool,
    prealloc: Prealloc,
    mode: Mode,
    chunk: usize,
    quiet: bool,
}

impl Copy {
    fn prepare(args: &CopyArgs, quiet: bool) -> anyhow::Result<Self> {
        let (from, to) = (&args.source, &args.destination);
        if is_same(from, to) {
            bail!("{from} and {to} are the same: nothing to copy");
        }
        for target in [from, to] {
            guard::is_disk(target)?;
        }
        let buffers = Buffers { slots: args.in_flight.into(), chunk: CHUNK };
        let source = open::source(from, buffers)?;
        guard::is_raw(args, &source)?;
        let path = journal_path(args);
        let story = path.as_deref().map(Journal::read).transpose();
        let story = if args.force { None } else { story?.flatten() };
        let there = match to {
            Target::VhostUser(_) => true,
            Target::Path(path) => path.symlink_metadata().is_ok(),
        };
        may_write(args, there, story.as_ref(), &source.identity)?;
        let story = story.filter(|_| there);
        let prealloc = guard::space(args, story.as_ref())?;
        // Before it is touched, know that the source fits.
        let destination = open::destination(to, buffers, mode_of(&source))?;
        let regular = destination.identity.kind == "file";
        let (bytes, room) = (source.identity.bytes, destination.identity.bytes);
        if !regular && bytes > room {
            bail!("{from} ({bytes} bytes) does not fit on {to} ({room} bytes)");
        }
        let start = match &story {
            None => 0,
            Some(story) => {
                let same = story.destination.is_same_place(&destination.identity);
                if !same || (regular && story.done > 0 && room != bytes) || story.done > bytes {
                    bail!("{to} is not what was being written: begin anew with --force");
                }
                story.done
            }
        };
        // The journal is durable before anything else changes.
        let (src, dst) = (&source.identity, &destination.identity);
        let journal = match (&path, &story) {
            (None, _) => Ok(None),
            (Some(path), Some(story)) => Journal::resume(path, story).map(Some),
            (Some(path), None) => Journal::begin(path, src, dst, prealloc).map(Some),
        };
        let journal = match journal {
            Err(error) if regular => {
                discard_if_new(to, there);
                return Err(error);
            }
            Err(error) => {
                if !quiet {
                    eprintln!("without a journal the copy cannot be resumed: {error:#}");
                }
                None
            }
            Ok(journal) => journal,
        };
        let mut ends = [source.end, destination.end];
        if let End::File(file) = &mut ends[DST] {
            file.keep_space(prealloc);
        }
        let chunk = ends.iter().map(|end| match end {
            End::Disk(disk) => disk.chunk().next_multiple_of(usize::try_from(DIRECT).unwrap_or(1)),
            End::File(_) => CHUNK,
        });
        let chunk = chunk.fold(CHUNK, usize::min);
        let fresh = start == 0 && (regular || args.target_is_zero);
        let mode = match prealloc {
            Prealloc::Full => Mode::Copy { fresh: false, find_zeroes: false },
            _ => Mode::Copy { fresh, find_zeroes: !args.keep_zeroes },
        };
        let source = source.identity;
        // What was begun before has been written to, even if nothing of it is durable.
        let (is_new, untouched) = (!there, story.is_none());
        Ok(Self { ends, source, journal, start, is_new, untouched, prealloc, mode, chunk, quiet })
    }

    fn carry_out(&mut self, args: &CopyArgs, signal: &AtomicUsize) -> anyhow::Result<Outcome> {
        let begin = Instant::now();
        let bytes = self.source.bytes;
        let unfinished = |journal: bool, done: u64| {
            let hint = if journal { "go on with --resume" } else { "begin anew with --force" };
            let percent = 100 * u128::from(done) / u128::from(bytes.max(1));
            format!("{} is unfinished ({percent} %): {hint}", args.destination)
        };
        let shared = match self.prepare_file(args, signal) {
            Ok(shared) => shared,
            Err(error) if self.untouched => {
                self.undo(args);
                return Err(error);
            }
            Err(error) => {
                return Err(error.context(unfinished(self.journal.is_some(), self.start)));
            }
        };
        let from = shared.as_ref().map_or(0, |shared| shared.to).max(self.start);
        let (done, counters, halt) = match shared {
            Some(Shared { end: share::End::Stopped, .. }) => {
                (from, Counters::default(), Some(Halt::Stopped))
            }
            _ if from == bytes => (from, Counters::default(), None),
            _ => self.flow(args, signal, self.mode, "copy", from)?,
        };
        if let Some(halt) = halt {
            let durable = done > 0 && self.sync(args).is_ok();
            if durable && let Some(journal) = &mut self.journal {
                journal.note(done)?;
            }
            let unfinished = unfinished(self.journal.is_some(), done);
            return match halt {
                Halt::Failed(error) => Err(error.context(unfinished)),
                _ => Ok(Outcome::Stopped(format!("interrupted; {unfinished}"))),
            };
        }
        self.sync(args)?;
        self.check_source(args)?;
        let took = begin.elapsed().as_secs_f64();
        if args.verify {
            let (_, _, halt) = self.flow(args, signal, Mode::Compare, "verify", 0)?;
            match halt {
                None => {}
                Some(Halt::Differs(at)) => {
                    // What is there is not to be trusted when it is resumed.
                    if let Some(journal) = &mut self.journal {
                        journal.note(0)?;
                    }
                    return Ok(Outcome::Differs(at));
                }
                Some(Halt::Failed(error)) => return Err(error.context("verifying")),
                Some(Halt::Stopped) => {
                    let line = format!("interrupted; {} is not verified", args.destination);
                    return Ok(Outcome::Stopped(line));
                }
            }
            self.check_source(args)?;
        }
        if let Some(journal) = self.journal.take() {
            journal.remove()?;
        }
        Ok(Outcome::Done(self.summary(args, from, &counters, took)))
    }

    fn flow(
        &mut self,
        args: &CopyArgs,
        signal: &AtomicUsize,
        mode: Mode,
        name: &'static str,
        start: u64,
    ) -> anyhow::Result<(u64, Counters, Option<Halt>)> {
        let course = Course {
            mode,
            start,
            end: self.source.bytes,
            slots: args.in_flight.into(),
            chunk: self.chunk,
            holes: true,
        };
        let journal = self.journal.as_mut();
        let mut watch =
            Watch { bar: bar(name, start, self.source.bytes, self.quiet), signal, journal };
        let flow = Flow::new(engine(args.engine)?, &mut self.ends, &course)?;
        let result = flow.run(&mut watch);
        watch.bar.finish_and_clear();
        Ok(result)
    }

    /// Makes everything durable: data, and that there is a file at all.
    fn sync(&mut self, args: &CopyArgs) -> anyhow::Result<()> {
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
            End::Disk(disk) => disk.flush().with_context(|| format!("cannot make {name} durable")),
        }
    }

    /// A source that was written meanwhile was not copied as it was at any time.
    fn check_source(&self, args: &CopyArgs) -> anyhow::Result<()> {
        if let End::File(file) = &self.ends[SRC]
            && open::identity(args.source.path(), &file.file)? != self.source
        {
            bail!(
                "{} changed while it was copied, so {} is no copy of it: copy again with --force",
                args.source,
                args.destination
            );
        }
        Ok(())
    }

    /// Everything before `from` was shared, or there when it was resumed.
    fn summary(&self, args: &CopyArgs, from: u64, counters: &Counters, seconds: f64) -> String {
        let bytes = self.source.bytes;
        let rate = (bytes - from) as f64 / seconds.max(1e-3);
        // Far below 2^64.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rate = rate as u64;
        let resumed = match self.start {
            0 => String::new(),
            start => format!(", resumed at {}", Size(start)),
        };
        let verified = if args.verify { ", verified" } else { "" };
        let reserved = match self.prealloc {
            Prealloc::Off => "",
            Prealloc::Falloc => " reserved",
            Prealloc::Full => " written",
        };
        let shared = match from - self.start {
            0 => String::new(),
            shared => format!("  {} shared", Size(shared)),
        };
        let copied = match bytes - from {
            0 if bytes > 0 => String::new(),
            copied => format!(
                "  {} copied: {} data, {} zeroes{reserved}",
                Size(copied),
                Size(counters.written),
                Size(counters.zeroes)
            ),
        };
        let rate = if bytes == from { String::new() } else { format!("  {}/s", Size(rate)) };
        format!(
            "{} to {}{resumed}{shared}{copied}  {seconds:.2} s{rate}{verified}",
            args.source, args.destination
        )
    }
}

fn engine(wanted: EngineArg) -> anyhow::Result<Box<dyn Engine>> {
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
fn bar(name: &'static str, start: u64, bytes: u64, quiet: bool) -> ProgressBar {
    let style = "{prefix:>7} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(bytes) };
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.with_prefix(name).with_position(start)
}

struct Watch<'a> {
    bar: ProgressBar,
    signal: &'a AtomicUsize,
    journal: Option<&'a mut Journal>,
}

impl Watcher for Watch<'_> {
    fn progress(&mut self, done: u64) -> bool {
        self.bar.set_position(done);
        self.signal.load(Relaxed) != 0
    }

    fn durable(&mut self, done: u64) -> anyhow::Result<()> {
        self.journal.as_mut().map_or(Ok(()), |journal| journal.note(done))
    }
}
