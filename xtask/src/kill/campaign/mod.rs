//! A campaign: the daemon is killed again and again under verified traffic, and started again; the
//! front-end reconnects and goes on.

pub(crate) mod oracle;
mod writer;

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use oracle::{Findings, Oracle, SCRAMBLE, SECTOR};
use ringway_driver::Options;
use ringway_testkit::Rng;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use writer::Writer;

const QUEUES: u16 = 2;
/// Bytes of the image.
const BYTES: u64 = 64 << 20;
/// Sectors that each queue uses, few so that each is written often.
const SECTORS: usize = 2048;
/// A kill comes within so many microseconds after traffic has resumed, or after the start.
const WITHIN_US: u64 = 30_000;
/// One kill in so many does not wait for traffic: it comes while the daemon starts or recovers.
const EARLY: u64 = 4;

/// How a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Told,
}

/// A mistake made on purpose half-way, which has to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// The sectors of one queue are what they were in the beginning.
    Lost,
    /// The sectors of one queue are what memory given back holds.
    Replayed,
    /// A successor is stopped, and answers nothing.
    Missing,
}

impl Harm {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Lost, Self::Replayed, Self::Missing];
}

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The program.
    pub(crate) ringway: PathBuf,
    pub(crate) engine: String,
    pub(crate) cache: String,
    pub(crate) packed: bool,
    pub(crate) kills: u64,
    pub(crate) end: End,
    /// Requests in flight on each of two queues.
    pub(crate) depth: u16,
    pub(crate) seed: u64,
    /// Where image and socket are put, in a folder of their own [temporary files' place].
    pub(crate) dir: Option<PathBuf>,
    /// How long anything may take.
    pub(crate) patience: Duration,
    pub(crate) harm: Option<Harm>,
    /// Called now and then with the number of kills so far.
    pub(crate) progress: fn(&Plan, u64),
}

impl Plan {
    /// The name of the ring's format.
    pub(crate) fn ring(&self) -> &'static str {
        if self.packed { "packed" } else { "split" }
    }
}

/// The command that repeats it: the same requests and delays; where exactly a kill strikes depends
/// on the machine too.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, engine, cache, depth, seed, .. } = self;
        write!(
            f,
            "cargo run --release -p xtask -- kill --count {kills} --engine {engine} --ring {} \
             --cache {cache} --depth {depth} --seed {seed}",
            self.ring()
        )?;
        self.harm.map_or(Ok(()), |harm| write!(f, " --harm {harm:?}"))
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) kills: u64,
    /// How many of them before traffic had resumed.
    pub(crate) early: u64,
    pub(crate) requests: u64,
    /// How many requests completed after one that was issued later.
    pub(crate) overtaken: u64,
    pub(crate) findings: Findings,
    /// From the last kill to the first completion of a request issued after it, in microseconds.
    pub(crate) reattach: Histogram<u64>,
    pub(crate) elapsed: Duration,
    /// The image and the last logs, if something was wrong.
    pub(crate) kept: Option<PathBuf>,
}

/// Between the queues' threads and the one that kills.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// A queue is over.
    fatal: AtomicBool,
    /// Daemons that have ended, and one.
    life: AtomicU64,
    findings: Mutex<Findings>,
    /// The latest life in which a request was issued and completed, and when.
    resumed: Mutex<(u64, Option<Instant>)>,
    has_resumed: Condvar,
}

impl Shared {
    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request of this life is complete: only the daemon of this life can have done it.
    fn resumed(&self, life: u64) {
        let now = Instant::now();
        let mut last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        if life > last.0 {
            *last = (life, Some(now));
            self.has_resumed.notify_all();
        }
    }

    /// When traffic resumed in this life, if it does within `patience`.
    fn wait_resumed(&self, life: u64, patience: Duration) -> Option<Instant> {
        let last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.has_resumed.wait_timeout_while(last, patience, |last| last.0 < life);
        let (last, _) = waited.unwrap_or_else(PoisonError::into_inner);
        last.1.filter(|_| last.0 == life)
    }
}

/// A running daemon; dropping it kills it.
#[derive(Debug)]
struct Daemon(Child);

impl Daemon {
    /// Starts one, without waiting until it is ready. The logs of the last two are kept.
    fn start(plan: &Plan, dir: &Path, life: u64) -> Result<Self> {
        let log = File::create(dir.join(format!("log.{}", life % 2)))?;
        let mut command = Command::new(&plan.ringway);
        command.args(["serve", "disk.img", "--socket", "s", "--queues", &QUEUES.to_string()]);
        command.args(["--engine", &plan.engine, "--cache", &plan.cache]).current_dir(dir);
        for name in ["RUST_LOG", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let started = command.spawn();
        Ok(Self(started.with_context(|| format!("cannot start {}", plan.ringway.display()))?))
    }

    fn signal(&self, signal: i32) -> Result<()> {
        let pid = i32::try_from(self.0.id())?;
        // SAFETY: our own child, not waited for yet, so the number is still its own.
        match unsafe { libc::kill(pid, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()).context("cannot signal the daemon"),
        }
    }

    /// Ends it, and says when.
    fn end(mut self, end: End) -> Result<Instant> {
        if let Some(status) = self.0.try_wait()? {
            bail!("the daemon ended by itself: {status}");
        }
        let begun = Instant::now();
        self.signal(if end == End::Killed { libc::SIGKILL } else { libc::SIGTERM })?;
        let status = self.0.wait()?;
        // Told before it listens for signals, it dies of the signal.
        if end == End::Told && !status.success() && status.code().is_some() {
            bail!("the daemon ended with {status} after SIGTERM");
        }
        Ok(begun)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs it. What is wrong with the daemon is in the outcome; an error means that it could not be
/// carried out, or that a daemon ended by itself.
pub(crate) fn run(plan: &Plan) -> Result<Outcome> {
    let mut folder = tempfile::Builder::new();
    let folder = folder.prefix("ringway-kill-");
    let folder = match &plan.dir {
        Some(dir) => folder.tempdir_in(dir).with_context(|| dir.display().to_string())?,
        None => folder.tempdir()?,
    };
    let result = run_in(plan, folder.path());
    match result {
        Ok(outcome) if outcome.findings.is_empty() => Ok(outcome),
        Ok(outcome) => Ok(Outcome { kept: Some(folder.keep()), ..outcome }),
        Err(error) => {
            let dir = folder.keep();
            Err(error).with_context(|| format!("image and logs: {}", dir.display()))
        }
    }
}

fn run_in(plan: &Plan, dir: &Path) -> Result<Outcome> {
    let begun = Instant::now();
    File::create(dir.join("disk.img"))?.set_len(BYTES)?;
    let daemon = Daemon::start(plan, dir, 1)?;
    let mut device = Options::new()
        .queues(QUEUES)
        .queue_size((plan.depth * 4).next_power_of_two())
        .memory(16 << 20)
        .packed(plan.packed)
        .patience(plan.patience)
        .timeout(plan.patience)
        .reconnect(plan.patience)
        .connect(dir.join("s"))?;
    let mut random = Rng::new(plan.seed);
    let shared = Shared::default();
    shared.life.store(1, Relaxed);
    let mut writers = Vec::new();
    for (queue, number) in device.queues()?.into_iter().zip(0..) {
        let oracle = Oracle::new(plan.seed, first_sector(number), SECTORS);
        let random = Rng::new(random.next_u64());
        let writer = Writer::new(queue, &device, oracle, random, (plan.depth, plan.patience));
        writers.push(writer.context("not enough shared memory")?);
    }
    let mut killer = Killer {
        plan,
        dir,
        random,
        shared: &shared,
        early: 0,
        kills: 0,
        reattach: Histogram::new(3)?,
        killed: None,
    };
    // The daemon comes back out: it has to live until the queues are done.
    let ended = std::thread::scope(|scope| {
        let threads: Vec<_> =
            writers.iter_mut().map(|writer| scope.spawn(|| writer.run(&shared))).collect();
        let ended = killer.work(daemon);
        shared.stop.store(true, Relaxed);
        let panicked = threads.into_iter().any(|thread| thread.join().is_err());
        assert!(!panicked, "a queue's thread panicked");
        ended
    });
    if shared.fatal.load(Relaxed) {
        // Not every request came back, so the image has no one right content; the daemon dies here.
        if let Err(error) = ended {
            shared.findings().note(format!("{error:#}"));
        }
    } else {
        let daemon = ended?;
        device.stop()?;
        daemon.end(End::Told)?;
        compare(dir, &mut writers, &shared)?;
    }
    let Killer { early, kills, reattach, .. } = killer;
    let findings = shared.findings().clone();
    Ok(Outcome {
        kills,
        early,
        requests: writers.iter().map(|writer| writer.done).sum(),
        overtaken: writers.iter().map(|writer| writer.overtaken).sum(),
        findings,
        reattach,
        elapsed: begun.elapsed(),
        kept: None,
    })
}

/// Where the sectors of a queue begin.
const fn first_sector(queue: u64) -> u64 {
    queue * (BYTES / QUEUES as u64 / SECTOR as u64)
}

/// Compares the file itself with all that was acknowledged.
fn compare(dir: &Path, writers: &mut [Writer], shared: &Shared) -> Result<()> {
    let image = File::open(dir.join("disk.img"))?;
    let mut bytes = vec![0; SECTORS * SECTOR];
    for writer in writers {
        image.read_exact_at(&mut bytes, writer.oracle.offset(&(0..SECTORS)))?;
        writer.oracle.judge(&(0..SECTORS), &bytes, &mut shared.findings());
    }
    Ok(())
}

/// The thread that kills.
#[derive(Debug)]
struct Killer<'a> {
    plan: &'a Plan,
    dir: &'a Path,
    random: Rng,
    shared: &'a Shared,
    early: u64,
    kills: u64,
    reattach: Histogram<u64>,
    /// When the last daemon was killed.
    killed: Option<Instant>,
}

impl Killer<'_> {
    /// Kills as often as planned; returns the last daemon once traffic has resumed.
    fn work(&mut self, mut daemon: Daemon) -> Result<Daemon> {
        let plan = self.plan;
        self.resume(&mut daemon)?;
        for kill in 1..=plan.kills {
            if self.shared.fatal.load(Relaxed) {
                break;
            }
            let early = kill > 1 && self.random.below(EARLY) == 0;
            let delay = Duration::from_micros(self.random.below(WITHIN_US));
            if early {
                self.early += 1;
            } else if kill > 1 {
                self.resume(&mut daemon)?;
            }
            std::thread::sleep(delay);
            self.killed = Some(daemon.end(plan.end)?);
            self.kills = kill;
            // From here on nothing is completed but by a successor.
            let life = self.shared.life.fetch_add(1, Relaxed) + 1;
            let harm = plan.harm.filter(|_| kill == plan.kills.div_ceil(2));
            self.spoil(harm)?;
            daemon = Daemon::start(plan, self.dir, life)?;
            if harm == Some(Harm::Missing) {
                daemon.signal(libc::SIGSTOP)?;
            }
            if kill % 100 == 0 {
                (plan.progress)(plan, kill);
            }
        }
        self.resume(&mut daemon)?;
        Ok(daemon)
    }

    /// Waits until traffic has resumed, and notes how long that took.
    fn resume(&mut self, daemon: &mut Daemon) -> Result<()> {
        let life = self.shared.life.load(Relaxed);
        let deadline = Instant::now() + self.plan.patience * 2;
        loop {
            if let Some(at) = self.shared.wait_resumed(life, Duration::from_millis(100)) {
                if let Some(killed) = self.killed.take() {
                    let us = at.saturating_duration_since(killed).as_micros();
                    self.reattach.record(u64::try_from(us)?)?;
                }
                return Ok(());
            }
            if let Some(status) = daemon.0.try_wait()? {
                bail!("daemon {life} ended by itself: {status}");
            }
            if self.shared.fatal.load(Relaxed) || Instant::now() > deadline {
                // The queues have said, or will say, what they miss.
                bail!("traffic does not resume with daemon {life}");
            }
        }
    }

    fn spoil(&self, harm: Option<Harm>) -> Result<()> {
        let byte = match harm {
            None | Some(Harm::Missing) => return Ok(()),
            Some(Harm::Lost) => 0,
            Some(Harm::Replayed) => SCRAMBLE,
        };
        let image = File::options().write(true).open(self.dir.join("disk.img"))?;
        let bytes = vec![byte; SECTORS * SECTOR];
        Ok(image.write_all_at(&bytes, first_sector(0) * SECTOR as u64)?)
    }
}
