//! `ringway copy`: a disk from one place to another.
//!
//! `open.rs` opens the two ends and makes sure that nobody else uses them, `journal.rs` keeps what
//! an interrupted copy needs to go on, `flow.rs` moves the bytes (`extents.rs` what to read, `zero.rs`
//! what to leave out, `end.rs` how each end takes it).

mod end;
mod extents;
mod flow;
mod guard;
mod journal;
mod open;
mod zero;

use crate::cli::LogArgs;
use crate::io::target::Target;
use crate::logging;
use crate::size::Size;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum, ValueHint};
use end::{DIRECT, End};
use flow::{Course, DST, Flow, Halt, Mode, SRC, Tally, Watcher};
use guard::{discard_if_new, is_same, journal_path, may_write, mode_of, set_size};
use indicatif::{ProgressBar, ProgressStyle};
use journal::{Identity, Journal, sync_folder};
use open::Buffers;
use ringway_aio::{Engine, IoUring, IoUringSetup, Threads, ThreadsSetup};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ringway copy disk.img backup.img              holes and zeroes take no space
  ringway copy --verify disk.img backup.img     and read back to compare
  ringway copy --resume disk.img backup.img     go on after an interruption
  ringway copy --force disk.img /dev/vg0/vm1    onto a block device
  ringway copy vhost-user:/run/disk.sock backup.img
  ringway copy --force backup.img vhost-user:/run/disk.sock

While a copy is unfinished there is a journal beside DST (DST.ringway-copy).
When the exit status is 0, DST is complete and durable, the journal is gone.
After 1 and 128+N the copy can go on with --resume.
Exit status: 0 copied, 1 failed, 2 wrong usage, 3 DST differs from SRC,
128+N ended by signal N.";

/// What `ringway copy` is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CopyArgs {
    /// What to copy: a raw image file, a block device, or vhost-user:SOCKET.
    #[arg(value_name = "SRC", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    source: Target,
    /// Where to: a file (made if it is not there), a block device, or vhost-user:SOCKET.
    #[arg(value_name = "DST", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    destination: Target,
    /// Overwrite DST. Block devices and served disks always need it.
    #[arg(short, long)]
    force: bool,
    /// Go on with a copy that was interrupted; begin if there is none.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// For --resume from a block device or a socket, whose changes cannot be seen: SRC was not
    /// written since.
    #[arg(long, requires = "resume")]
    source_unchanged: bool,
    /// Afterwards read DST back and compare it with SRC.
    #[arg(long)]
    verify: bool,
    /// DST (a device or socket) reads as zeroes already: leave zeroes out.
    #[arg(long)]
    target_is_zero: bool,
    /// Write the zeroes that SRC holds as data; only its holes stay holes.
    #[arg(long)]
    keep_zeroes: bool,
    /// The journal [default: DST.ringway-copy; none for block devices].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    journal: Option<PathBuf>,
    /// Requests in flight, of 1 MiB each.
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Speed",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    in_flight: u16,
    /// How files are read and written.
    #[arg(long, value_enum, default_value_t = EngineArg::Auto, help_heading = "Speed")]
    engine: EngineArg,
}

/// The engine for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EngineArg {
    // The first one that works here.
    Auto,
    #[value(name = "io_uring")]
    IoUring,
    Threads,
}

/// Bytes of a request, if the ends take so many.
const CHUNK: usize = 1 << 20;

/// Carries out `ringway copy`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &CopyArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM] {
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
                // A reader that has gone is no failure.
                let _ = writeln!(anstream::stdout(), "{line}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Differs(at) => {
            crate::complain(&anyhow::anyhow!(
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
        let buffers = Buffers { slots: args.in_flight.into(), chunk: CHUNK };
        let source = open::source(from, buffers)?;
        let path = journal_path(args);
        let story = path.as_deref().map(Journal::read).transpose();
        let story = if args.force { None } else { story?.flatten() };
        let there = match to {
            Target::VhostUser(_) => true,
            Target::Path(path) => path.symlink_metadata().is_ok(),
        };
        may_write(args, there, story.as_ref(), &source.identity)?;
        let story = story.filter(|_| there);
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
            (Some(path), None) => Journal::begin(path, src, dst).map(Some),
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
        let ends = [source.end, destination.end];
        if let (End::File(file), true, 0) = (&ends[DST], regular, start) {
            set_size(&file.file, bytes).with_context(|| format!("cannot size {to}"))?;
        }
        let chunk = ends.iter().map(|end| match end {
            End::Disk(disk) => disk.chunk().next_multiple_of(usize::try_from(DIRECT).unwrap_or(1)),
            End::File(_) => CHUNK,
        });
        let chunk = chunk.fold(CHUNK, usize::min);
        let fresh = start == 0 && (regular || args.target_is_zero);
        let mode = Mode::Copy { fresh, find_zeroes: !args.keep_zeroes };
        Ok(Self { ends, source: source.identity, journal, start, mode, chunk, quiet })
    }

    fn carry_out(&mut self, args: &CopyArgs, signal: &AtomicUsize) -> anyhow::Result<Outcome> {
        let begin = Instant::now();
        let (done, tally, halt) = self.flow(args, signal, self.mode, "copy", self.start)?;
        let bytes = self.source.bytes;
        if let Some(halt) = halt {
            let durable = done > 0 && self.sync(args).is_ok();
            if durable && let Some(journal) = &mut self.journal {
                journal.note(done)?;
            }
            let resumable = self.journal.is_some();
            let hint = if resumable { "go on with --resume" } else { "begin anew with --force" };
            let percent = 100 * u128::from(done) / u128::from(bytes.max(1));
            let unfinished = format!("{} is unfinished ({percent} %): {hint}", args.destination);
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
        Ok(Outcome::Done(self.summary(args, &tally, took)))
    }

    fn flow(
        &mut self,
        args: &CopyArgs,
        signal: &AtomicUsize,
        mode: Mode,
        name: &'static str,
        start: u64,
    ) -> anyhow::Result<(u64, Tally, Option<Halt>)> {
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

    fn summary(&self, args: &CopyArgs, tally: &Tally, seconds: f64) -> String {
        let bytes = self.source.bytes;
        let rate = (bytes - self.start) as f64 / seconds.max(1e-3);
        // Far below 2^64.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rate = rate as u64;
        let resumed = match self.start {
            0 => String::new(),
            start => format!(", resumed at {}", Size(start)),
        };
        let verified = if args.verify { ", verified" } else { "" };
        format!(
            "{} to {}  {}{resumed}  {} data  {} zeroes  {seconds:.2} s  {}/s{verified}",
            args.source,
            args.destination,
            Size(bytes),
            Size(tally.written),
            Size(tally.zeroes),
            Size(rate)
        )
    }
}

fn engine(wanted: EngineArg) -> anyhow::Result<Box<dyn Engine>> {
    /// Enough for all parts of all pieces in flight; more of them wait.
    const DEPTH: u32 = 1024;
    let uring = || IoUring::new(IoUringSetup { depth: DEPTH, without: &[], iopoll: false });
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
