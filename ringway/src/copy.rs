//! `ringway copy`: a disk from one place to another.
//!
//! `open.rs` opens the two ends and makes sure that nobody else uses them, `journal.rs` keeps what
//! an interrupted copy needs to go on, `flow.rs` moves the bytes (`extents.rs` what to read, `zero.rs`
//! what to leave out, `end.rs` how each end takes it, `image.rs` qcow2 images), `share.rs` does without
//! moving them, `new_image.rs` makes a qcow2 image.

pub(crate) mod args;
mod end;
mod extents;
mod finish;
mod flow;
mod guard;
mod image;
mod journal;
mod new_image;
mod open;
mod operation;
mod report;
mod share;
mod space;
mod watch;
mod zero;

use crate::interrupt;
use crate::io::target::Target;
use anyhow::{Context, bail};
use args::{CopyArgs, Prealloc};
use end::{DIRECT, End};
use flow::{Counters, Course, DST, Ended, Flow, Halt, Mode, SRC};
use guard::{discard_if_new, is_same, journal_path, may_write, mode_of};
use journal::{Identity, Journal, Story};
use new_image::NewImage;
use open::{Buffers, Opened};
use report::Summary;
use ringway_control::log::{LogArgs, LogLevel};
use ringway_terminal::logging;
use share::Shared;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;
pub(crate) use watch::bar;
use watch::{Watch, engine};

/// Bytes of a request, if the ends take so many.
const CHUNK: usize = 1 << 20;

/// Carries out `ringway copy`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &CopyArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    // A daemon's coming and going is no news where a disk is served to this process alone.
    logging::start(log, None, Some(LogLevel::Warn));
    let mut copy = Copy::prepare(args, log.quiet)?;
    let signal = Arc::clone(&copy.signal);
    let outcome = copy.carry_out(args, &signal);
    let is_whole = match &copy.ends[SRC] {
        End::Image(image) => image.source.as_ref().is_none_or(|from| from.lost.is_empty()),
        _ => true,
    };
    copy.end();
    match outcome? {
        Outcome::Done(summary) => {
            let text = match (args.json, log.quiet) {
                (true, _) => Some(serde_json::to_string_pretty(&summary)?),
                (false, quiet) => (!quiet).then(|| summary.line()),
            };
            if let Some(text) = text {
                ringway_terminal::output::print(&(text + "\n"))
                    .context("the copy is complete, but")?;
            }
            Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(4) })
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
    Done(Box<Summary>),
    Differs(u64),
    Stopped(String),
}

/// A copy, ends opened.
struct Copy {
    ends: [End; 2],
    /// Not 0 once the program is to end.
    signal: Arc<AtomicUsize>,
    source: Identity,
    journal: Option<Journal>,
    /// A destination that is a new qcow2 image.
    image: Option<NewImage>,
    /// Where to begin.
    start: u64,
    /// The destination was not there before.
    is_new: bool,
    /// It holds nothing of a copy yet: it is as it was, or new.
    untouched: bool,
    prealloc: Prealloc,
    mode: Mode,
    chunk: usize,
    /// Zeroes are looked for in multiples of this many bytes.
    unit: usize,
    quiet: bool,
}

impl Copy {
    fn prepare(args: &CopyArgs, quiet: bool) -> anyhow::Result<Self> {
        let (from, to) = (&args.source, &args.destination);
        if is_same(from, to) {
            bail!("{from} and {to} are the same: nothing to copy");
        }
        guard::are_disks(args)?;
        // Whole clusters, if they are compressed.
        let cluster_bits = args.cluster_size.filter(|_| args.compress.is_some()).unwrap_or(0);
        let chunk = CHUNK.max(1 << cluster_bits);
        let buffers = Buffers { slots: args.in_flight.into(), chunk };
        let source = open::source(args, buffers)?;
        guard::is_raw(args, &source)?;
        if guard::makes_image(args)? {
            return Self::to_image(args, source, quiet);
        }
        let path = journal_path(args)?;
        let left = path.as_deref().map(Journal::read).transpose()?.flatten();
        if let (Some(path), Some(left)) = (&path, &left) {
            guard::is_own_story(args, path, left)?;
        }
        let replace = left.is_some();
        let story = left.filter(|_| !args.force);
        let there = match to {
            Target::VhostUser(_) | Target::Elsewhere(..) => true,
            Target::Path(path) => path.symlink_metadata().is_ok(),
        };
        may_write(args, there, story.as_ref(), &source.identity)?;
        let story = story.filter(|_| there);
        let prealloc = guard::space(args, story.as_ref())?;
        // Before it is touched, know that the source fits.
        let destination = open::destination(args, buffers, there, mode_of(&source))?;
        let signal = interrupt::listen()?;
        let regular = destination.identity.kind == "file";
        let is_zero = args.target_is_zero || destination.end.is_known_to_be_empty();
        let (bytes, room) = (source.identity.bytes, destination.identity.bytes);
        if !regular && bytes > room {
            bail!("{from} ({bytes} bytes) does not fit on {to} ({room} bytes)");
        }
        let start = guard::start_of(to, story.as_ref(), &destination, bytes)?;
        // The journal is durable before anything else changes.
        let identities = [&source.identity, &destination.identity];
        let journal =
            match journal_of(path.as_deref(), story.as_ref(), identities, prealloc, replace) {
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
        let chunk = chunk_of(&ends);
        let fresh = start == 0 && (regular || is_zero);
        let mode = match prealloc {
            Prealloc::Full => Mode::Copy { fresh: false, find_zeroes: false },
            _ => Mode::Copy { fresh, find_zeroes: !args.keep_zeroes },
        };
        let source = source.identity;
        // What was begun before has been written to, even if nothing of it is durable.
        let (is_new, untouched) = (!there, story.is_none());
        let (image, unit) = (None, zero::UNIT);
        Ok(Self {
            ends,
            signal,
            source,
            journal,
            image,
            start,
            is_new,
            untouched,
            prealloc,
            mode,
            chunk,
            unit,
            quiet,
        })
    }

    /// A copy to a new qcow2 image.
    fn to_image(args: &CopyArgs, source: Opened, quiet: bool) -> anyhow::Result<Self> {
        let (signal, mode) = (interrupt::listen()?, mode_of(&source));
        let (image, end) = NewImage::begin(args, source.identity.bytes, mode)?;
        let ends = [source.end, end];
        let cluster = usize::try_from(image.cluster)?;
        let unit = if image.compressed { zero::UNIT.max(cluster) } else { zero::UNIT };
        Ok(Self {
            // Whole clusters, if they are compressed.
            chunk: chunk_of(&ends).next_multiple_of(unit),
            ends,
            signal,
            source: source.identity,
            journal: None,
            image: Some(image),
            start: 0,
            is_new: true,
            untouched: true,
            prealloc: Prealloc::Off,
            mode: Mode::Copy { fresh: true, find_zeroes: true },
            unit,
            quiet,
        })
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
        let without_flow =
            |halt| Ended { done: from, counters: Counters::default(), halt, may_sync: true };
        let Ended { done, counters, halt, may_sync } = match shared {
            Some(Shared { end: share::End::Stopped, .. }) => without_flow(Some(Halt::Stopped)),
            _ if from == bytes => without_flow(None),
            _ => self.flow(args, signal, self.mode, "copy", from)?,
        };
        match halt {
            Some(Halt::Failed(error)) if self.image.is_some() => {
                return Err(error.context(format!("{} was not made", args.destination)));
            }
            Some(_) if self.image.is_some() => {
                let line = format!("interrupted; {} was not made", args.destination);
                return Ok(Outcome::Stopped(line));
            }
            Some(halt) => {
                let durable = done > 0 && may_sync && self.sync(args, signal).is_ok();
                if durable {
                    if let Some(journal) = &mut self.journal {
                        journal.note(done)?;
                    }
                }
                let unfinished = unfinished(self.journal.is_some(), done);
                return match halt {
                    Halt::Failed(error) => Err(error.context(unfinished)),
                    _ => Ok(Outcome::Stopped(format!("interrupted; {unfinished}"))),
                };
            }
            None => {}
        }
        match self.sync(args, signal) {
            Ok(()) => {}
            // A server that did not answer the flush in time.
            Err(_) if signal.load(Relaxed) != 0 && self.ends[DST].awaits_server() => {
                let unfinished = unfinished(self.journal.is_some(), self.start);
                return Ok(Outcome::Stopped(format!("interrupted; {unfinished}")));
            }
            Err(error) => return Err(error),
        }
        self.check_source(args)?;
        let took = begin.elapsed().as_secs_f64();
        if args.verify {
            if let Some(outcome) = self.verify(args, signal)? {
                return Ok(outcome);
            }
        }
        if let Some(journal) = self.journal.take() {
            journal.remove()?;
        }
        let summary = Box::new(self.summary(args, from, &counters, took));
        if let Some(image) = self.image.take() {
            image.name()?;
        }
        Ok(Outcome::Done(summary))
    }

    /// Lets go of all it has. A server that has not answered is not waited for: the process is about to
    /// end.
    fn end(self) {
        if self.ends.iter().any(End::awaits_server) {
            std::mem::forget(self.ends);
        }
    }

    fn flow(
        &mut self,
        args: &CopyArgs,
        signal: &AtomicUsize,
        mode: Mode,
        name: &'static str,
        start: u64,
    ) -> anyhow::Result<Ended> {
        let course = Course {
            mode,
            start,
            end: self.source.bytes,
            slots: args.in_flight.into(),
            chunk: self.chunk,
            unit: self.unit,
            // A file takes no more space than its source has data, but for whole blocks of a file system. Elsewhere
            // few requests are worth more.
            edge: match &self.ends[DST] {
                End::File(file) if file.regular => DIRECT,
                _ => self.unit as u64,
            },
        };
        let journal = self.journal.as_mut();
        let mut watch = Watch { bar: bar(name, start, self.source.bytes, self.quiet), journal };
        let flow = Flow::new(engine(args.engine)?, &mut self.ends, &course)?;
        let result = flow.run(&mut watch, signal);
        watch.bar.finish_and_clear();
        Ok(result)
    }
}

/// A journal that begins or goes on, if there is a place for it.
fn journal_of(
    path: Option<&Path>,
    story: Option<&Story>,
    [source, destination]: [&Identity; 2],
    prealloc: Prealloc,
    replace: bool,
) -> anyhow::Result<Option<Journal>> {
    match (path, story) {
        (None, _) => Ok(None),
        (Some(path), Some(story)) => Journal::resume(path, story).map(Some),
        (Some(path), None) => {
            Journal::begin(path, source, destination, prealloc, replace).map(Some)
        }
    }
}

/// Bytes of a piece, as both ends take them.
fn chunk_of(ends: &[End; 2]) -> usize {
    let direct = usize::try_from(DIRECT).unwrap_or(1);
    let chunk = ends.iter().map(|end| match end {
        End::Disk(disk) => disk.chunk().next_multiple_of(direct),
        End::File(_) | End::Image(_) => CHUNK,
    });
    chunk.fold(CHUNK, usize::min)
}
