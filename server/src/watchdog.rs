//! Looks every few seconds whether anything is stuck: requests that the disk does not answer, kicks
//! that were lost, workers that do not come back from the kernel. What it finds goes to the log.
//!
//! It asks; workers look between two of their turns. Nothing of it is on the way of a request. Once
//! all workers are quiet it looks once more, and then sleeps until one of them is asked for something:
//! a daemon without load wakes nobody.

use super::disks::Disks;
use super::promise::{IsPending, Promise, Promises, WorkerId};
use super::pulse::{Pulse, Silent, cpu_time};
use super::served::Served;
use super::survive::survive;
use ringway_control::protocol::Happened;
use ringway_control::size::Size;
use ringway_core::{Op, panic_point};
use ringway_disk::{Disk, Overdue};
use ringway_export::{QueueFindings, Rouse};
use rustix::thread::Pid;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long requests may take before they are reported, unless the user says so.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The longest time between looks, while there is something to look after.
const CHECK_EVERY_MAX: Duration = Duration::from_secs(1);
/// The shortest.
const CHECK_EVERY_MIN: Duration = Duration::from_millis(250);

/// How long a round waits for workers: they answer between two turns.
const TIMEOUT: Duration = Duration::from_millis(200);

/// A disk is not reported again before this is over.
const QUIET: Duration = Duration::from_secs(60);

/// Looks at quiet workers before the watchdog sleeps: a kick that the last request of a load has lost
/// is found by the first, and counted by the second.
const CALM_CHECKS: u32 = 2;

/// Why the thread wakes before its time.
enum Event {
    /// A worker that was quiet is asked for something, or there may be a new one.
    Roused,
    Stop,
}

/// The thread that looks. It ends when this is dropped.
pub(crate) struct Watchdog {
    events: SyncSender<Event>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Looks after the workers of `disks`, for requests that take `limit` or longer; `pulse` learns of
    /// those that loop for as long. With a limit of 0 nobody is told of anything: by these looks workers know what is
    /// late all the same (`ringway_disk`, `late.rs`).
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn start(disks: &Arc<Disks>, limit: Duration, pulse: Pulse) -> io::Result<Self> {
        let tells = !limit.is_zero();
        let limit = if tells { limit } else { Duration::MAX };
        // Full means that it is about to wake anyhow.
        let (events, heard) = sync_channel(1);
        let rousing = events.clone();
        let rouse: Rouse = Arc::new(move || drop(rousing.try_send(Event::Roused)));
        // Only the first one counts, and a daemon has no other.
        let _ = disks.bell.on_change.set(Arc::clone(&rouse));
        let disks = Arc::clone(disks);
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            let begun = Instant::now();
            let every = (limit / 4).clamp(CHECK_EVERY_MIN, CHECK_EVERY_MAX);
            let mut rounds = Rounds::new(limit);
            while pause(&heard, every, rounds.calm >= CALM_CHECKS) {
                let clock = || begun.elapsed();
                let round = survive("the watchdog", || {
                    panic_point!("watchdog");
                    let workers = disks.workers();
                    let lines = rounds.round(&clock, &mut |now, is_pending| {
                        workers.scan_stalled(now, limit, &rouse, is_pending)
                    });
                    if !tells {
                        return rounds.events.clear();
                    }
                    lines.iter().for_each(LogLine::tell);
                    pulse.set(rounds.loops);
                    rounds.tell_events(&disks);
                });
                if round.is_none() {
                    // What it had noted may be half a truth.
                    rounds = Rounds::new(limit);
                }
            }
        })?;
        Ok(Self { events, thread: Some(thread) })
    }
}

/// Waits for the next look, first of all until roused if all is `calm`; false to end.
fn pause(heard: &Receiver<Event>, every: Duration, calm: bool) -> bool {
    if calm && !matches!(heard.recv(), Ok(Event::Roused)) {
        return false;
    }
    let until = Instant::now() + every;
    loop {
        match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => return true,
            Ok(Event::Roused) => {}
            Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // It is heard once there is room; an error means that it has ended.
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
enum LogLine {
    Bad(String),
    Good(String),
}

impl LogLine {
    fn tell(&self) {
        match self {
            Self::Bad(line) => tracing::warn!("{line}"),
            Self::Good(line) => tracing::info!("{line}"),
        }
    }
}

/// A worker that was asked and has not answered yet.
struct PendingWorker {
    name: String,
    promise: Promise,
    at: Duration,
    logged: bool,
}

/// Which disk it is: several may have one name.
type DiskKey = *const Disk;

/// A disk of which something was reported.
struct OverdueNotice {
    /// As long as this is there no other disk gets its place in memory.
    disk: Weak<Disk>,
    name: String,
    at: Duration,
    /// Some of its requests are overdue.
    now: bool,
}

/// Lost kicks of a disk.
struct Kicks {
    /// As above.
    _disk: Weak<Disk>,
    name: String,
    /// When they were reported last.
    logged: Option<Duration>,
    /// Those since.
    more: u64,
}

/// What is known from one round to the next.
struct Rounds {
    limit: Duration,
    asked: BTreeMap<String, PendingWorker>,
    notices: BTreeMap<DiskKey, OverdueNotice>,
    kicks: BTreeMap<DiskKey, Kicks>,
    /// Events that are not reported yet, with their disks.
    events: Vec<(Weak<Disk>, Happened)>,
    /// Rounds in a row in which nothing was found to look after.
    calm: u32,
    threads: BTreeMap<String, Pid>,
    silent: Silent,
    /// A worker loops without end.
    loops: bool,
}

/// Engines of one name may be of more than one kind.
fn key((kind, number): WorkerId) -> String {
    format!("{kind:?}/{number}")
}

impl Rounds {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            asked: BTreeMap::new(),
            notices: BTreeMap::new(),
            kicks: BTreeMap::new(),
            events: Vec::new(),
            calm: 0,
            threads: BTreeMap::new(),
            silent: Silent::default(),
            loops: false,
        }
    }

    fn tell_events(&mut self, disks: &Disks) {
        for (disk, happened) in self.events.drain(..) {
            let is_it = |served: &Arc<Served>| Arc::as_ptr(served.export.disk()) == disk.as_ptr();
            // Nobody waits for what is said of one that has gone.
            if let Some(served) = disks.list().into_iter().find(is_it) {
                disks.events.tell(Some((served.id, served.name())), happened);
            }
        }
    }

    /// One look. `clock` tells the time since any moment, `ask` asks all workers but those that owe an
    /// answer, at the time it is given: looks that pile up would be carried out one after the other,
    /// and only the first one be heard.
    fn round(
        &mut self,
        clock: &dyn Fn() -> Duration,
        ask: &mut dyn FnMut(Duration, IsPending<'_>) -> Promises,
    ) -> Vec<LogLine> {
        let now = clock();
        let asked = ask(now, &|id| self.asked.contains_key(&key(id)));
        for (id, promise) in asked {
            let name = format!("{}/{}", id.0, id.1);
            self.asked.insert(key(id), PendingWorker { name, promise, at: now, logged: false });
        }
        let mut lines = Vec::new();
        let (mut found, mut quiet) = (Vec::new(), true);
        let limit = self.limit;
        self.loops = false;
        self.asked.retain(|key, asked| {
            let name = &asked.name;
            let left = (now + TIMEOUT).saturating_sub(clock());
            let said = match asked.promise.try_recv() {
                Err(TryRecvError::Empty) => asked.promise.recv_timeout(left),
                said => said.map_err(|_| RecvTimeoutError::Disconnected),
            };
            let silent = clock().saturating_sub(asked.at);
            match said {
                Ok(said) => {
                    self.silent.forget(key);
                    if let Some(thread) = said.thread {
                        self.threads.insert(key.clone(), thread);
                    }
                    quiet &= said.quiet;
                    found.extend(said.queues);
                }
                // It has ended, which others tell of.
                Err(RecvTimeoutError::Disconnected) => {
                    self.silent.forget(key);
                    self.threads.remove(key);
                    return false;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let cpu = self.threads.get(key).and_then(|&thread| cpu_time(thread));
                    let silent_for = |cpu| self.silent.loops(key, clock(), cpu, limit);
                    self.loops |= cpu.is_some_and(silent_for);
                    if silent >= limit && !asked.logged {
                        lines.push(LogLine::Bad(format!(
                            "worker {name} has not moved for {}: the kernel holds it, probably for a \
                             disk whose file system blocks whoever begins a request; all disks of \
                             this worker wait",
                            seconds(silent)
                        )));
                        asked.logged = true;
                    }
                    return true;
                }
            }
            if asked.logged {
                let silent = seconds(silent);
                lines.push(LogLine::Good(format!("worker {name} moves again, after {silent}")));
            }
            false
        });
        let silent = !self.asked.is_empty();
        self.disks(now, found, silent, &mut lines);
        // What is still to be reported keeps it awake.
        let unlogged = self.notices.values().any(|notice| notice.now)
            || self.kicks.values().any(|kicks| kicks.more > 0);
        self.calm = if quiet && !silent && !unlogged { self.calm.saturating_add(1) } else { 0 };
        lines
    }

    /// Of the queues that were looked at; `silent` if some were not.
    fn disks(
        &mut self,
        now: Duration,
        found: Vec<QueueFindings>,
        silent: bool,
        lines: &mut Vec<LogLine>,
    ) {
        let mut disks: BTreeMap<DiskKey, (Arc<Disk>, Overdue, u64)> = BTreeMap::new();
        for QueueFindings { disk, overdue, lost_kicks, .. } in found {
            let none = || (Arc::clone(&disk), Overdue::default(), 0);
            let (_, all, lost) = disks.entry(Arc::as_ptr(&disk)).or_insert_with(none);
            all.add(&overdue);
            *lost += lost_kicks;
        }
        for (&key, (disk, overdue, lost)) in &disks {
            let (name, weak) = (disk.name().to_owned(), Arc::downgrade(disk));
            if *lost > 0 {
                let (_disk, name) = (weak.clone(), name.clone());
                let new = Kicks { _disk, name, logged: None, more: 0 };
                self.kicks.entry(key).or_insert(new).more += lost;
            }
            let notice = self.notices.get(&key);
            let quiet = notice.is_some_and(|notice| now < notice.at + QUIET);
            if overdue.new > 0 && !quiet {
                lines.push(LogLine::Bad(self.words(&name, overdue)));
                let requests = overdue.requests;
                self.events.push((weak.clone(), Happened::Overdue { requests }));
                self.notices.insert(key, OverdueNotice { disk: weak, name, at: now, now: true });
            }
        }
        self.kicks.retain(|_, kicks| {
            let name = &kicks.name;
            // A guest may never kick at all.
            if kicks.logged.is_some_and(|at| now < at + QUIET) {
                return true;
            }
            let lost = std::mem::take(&mut kicks.more);
            if lost > 0 {
                lines.push(LogLine::Bad(format!(
                    "{name}: {lost} of its guest's kicks never came; its requests were taken all the \
                     same"
                )));
                kicks.logged = Some(now);
            }
            lost > 0
        });
        for (key, notice) in &mut self.notices {
            let still = disks.get(key).is_some_and(|(_, overdue, _)| overdue.requests > 0);
            if notice.now && !still && !silent {
                notice.now = false;
                let (limit, name) = (seconds(self.limit), &notice.name);
                self.events.push((notice.disk.clone(), Happened::InTime));
                lines.push(LogLine::Good(format!("{name}: no request waits for {limit} any more")));
            }
        }
        self.notices.retain(|_, notice| notice.now || now < notice.at + QUIET);
    }

    fn words(&self, name: &str, overdue: &Overdue) -> String {
        let (count, limit) = (overdue.requests, seconds(self.limit));
        let requests = if count == 1 { "request has" } else { "requests have" };
        let oldest = overdue.oldest.map(|oldest| {
            let (range, age) = (oldest.range, Duration::from_nanos(oldest.age_ns));
            let what = match oldest.op {
                Op::Flush => "a flush".to_owned(),
                Op::GetId => "a question for its name".to_owned(),
                op => {
                    let word = match op {
                        Op::Read => "a read",
                        Op::Write => "a write",
                        Op::Discard => "a discard",
                        _ => "zeroing",
                    };
                    format!("{word} of {} at byte {}", Size(range.len()), range.offset())
                }
            };
            format!(", the oldest, {what}, for {}", seconds(age))
        });
        let oldest = oldest.unwrap_or_default();
        format!(
            "{name}: {count} {requests} been under way for {limit} or longer{oldest}: its disk is \
             slow, or has lost them"
        )
    }
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_core::ByteRange;
    use ringway_disk::EngineKind;
    use ringway_disk::{Oldest, OpenOptions, Source, open};
    use ringway_export::Findings;
    use std::cell::Cell;
    use std::sync::mpsc::channel;

    fn disk(bytes: u64) -> Arc<Disk> {
        Arc::new(open(&OpenOptions::new(Source::Null { bytes, latency_us: 0 })).unwrap())
    }

    /// Rounds, a clock that is told, and one worker that answers or not.
    struct Scene {
        rounds: Rounds,
        now: Cell<u64>,
    }

    impl Scene {
        fn new() -> Self {
            Self { rounds: Rounds::new(Duration::from_secs(30)), now: Cell::new(0) }
        }

        /// A round at `now` seconds; the worker says this, or nothing.
        fn at(&mut self, now: u64, says: Option<Vec<QueueFindings>>) -> Vec<LogLine> {
            self.now.set(now);
            let (sender, promise) = channel();
            let keep = match says {
                Some(says) => {
                    // It is quiet if nothing of it is overdue.
                    let quiet = says.iter().all(|findings| findings.overdue.requests == 0);
                    sender.send(Findings { queues: says, quiet, thread: None }).unwrap();
                    None
                }
                None => Some(sender),
            };
            let mut promise = Some(promise);
            let mut ask = |_, is_pending: IsPending<'_>| match promise
                .take()
                .filter(|_| !is_pending((EngineKind::Threads, 2)))
            {
                Some(promise) => vec![((EngineKind::Threads, 2), promise)],
                None => vec![],
            };
            let now = &self.now;
            // Whoever waits in vain does so without waiting.
            let clock = || Duration::from_secs(now.replace(now.get()));
            let lines = self.rounds.round(&clock, &mut ask);
            // It owes an answer for good.
            std::mem::forget(keep);
            lines
        }
    }

    fn findings(disk: &Arc<Disk>, requests: usize, new: usize, lost_kicks: u64) -> QueueFindings {
        let range = ByteRange::new(8192, 4096).unwrap();
        let oldest = Oldest { op: Op::Write, range, age_ns: 31_500_000_000 };
        let oldest = (requests > 0).then_some(oldest);
        let overdue = Overdue { requests, new, oldest };
        QueueFindings { disk: Arc::clone(disk), overdue, lost_kicks }
    }

    #[test]
    fn c08_what_is_overdue_is_told_once_a_minute_and_its_end_as_well() {
        let (mut scene, disk) = (Scene::new(), disk(1 << 20));
        let name = disk.name();
        let says = |requests, new| Some(vec![findings(&disk, requests, new, 0)]);
        assert_eq!(scene.at(5, says(0, 0)), []);
        let line_text = format!(
            "{name}: 3 requests have been under way for 30 s or longer, the oldest, a write of 4 KiB \
             at byte 8192, for 31 s: its disk is slow, or has lost them"
        );
        assert_eq!(scene.at(10, says(3, 3)), [LogLine::Bad(line_text)]);
        assert_eq!(scene.at(15, says(3, 0)), [], "told already");
        assert_eq!(scene.at(20, says(4, 1)), [], "and no flood");
        // Whoever does not answer says nothing about its disks.
        assert_eq!(scene.at(25, None), []);
        let good = LogLine::Good(format!("{name}: no request waits for 30 s any more"));
        let mut scene = Scene::new();
        assert_eq!(scene.at(10, says(1, 1)).len(), 1);
        assert_eq!(scene.at(15, says(0, 0)), [good]);
        assert_eq!(scene.at(20, says(1, 1)), [], "not within the minute");
        assert_eq!(scene.at(75, says(2, 1)).len(), 1);
    }

    #[test]
    fn e08_it_is_calm_once_nothing_is_left_to_look_after_or_to_tell() {
        let (mut scene, disk) = (Scene::new(), disk(1 << 20));
        let says = |requests, kicks| Some(vec![findings(&disk, requests, requests, kicks)]);
        let calm = |scene: &mut Scene, now, says| {
            scene.at(now, says);
            scene.rounds.calm
        };
        assert_eq!(calm(&mut scene, 1, says(0, 0)), 1);
        assert_eq!(calm(&mut scene, 2, says(0, 0)), 2);
        assert_eq!(calm(&mut scene, 3, says(1, 0)), 0, "its end is still to be told");
        assert_eq!(calm(&mut scene, 4, says(0, 0)), 1);
        assert_eq!(calm(&mut scene, 5, says(0, 1)), 2, "told at once");
        assert_eq!(calm(&mut scene, 6, says(0, 1)), 0, "to be told in a minute");
        assert_eq!(calm(&mut scene, 60, says(0, 0)), 0);
        assert_eq!(calm(&mut scene, 66, says(0, 0)), 1, "told");
        assert_eq!(calm(&mut scene, 70, None), 0, "who does not answer is not quiet");
    }

    /// It sleeps for as long as nobody calls, and then takes its time as ever.
    #[test]
    fn e08_whoever_is_calm_sleeps_until_roused() {
        let (events, heard) = sync_channel(1);
        let every = Duration::from_millis(20);
        let sleeper = std::thread::spawn(move || {
            let checks = (0..3).filter(|_| pause(&heard, every, true)).count();
            (checks, heard)
        });
        std::thread::sleep(10 * every);
        assert!(!sleeper.is_finished());
        for _ in 0..3 {
            events.send(Event::Roused).unwrap();
            std::thread::sleep(10 * every);
        }
        let (checks, heard) = sleeper.join().unwrap();
        assert_eq!(checks, 3);
        assert!(pause(&heard, every, false), "without a call: when it is time");
        events.send(Event::Stop).unwrap();
        assert!(!pause(&heard, every, true));
        events.send(Event::Stop).unwrap();
        assert!(!pause(&heard, Duration::from_secs(3600), false));
        drop(events);
        assert!(!pause(&heard, every, true));
    }

    /// Two kinds of engine may have one name.
    #[test]
    fn workers_of_one_name_are_asked_both() {
        let (mut scene, disk) = (Scene::new(), disk(1 << 20));
        let mut asked = Vec::new();
        for (kind, requests) in [(EngineKind::Null, 0), (EngineKind::NullAfter(7), 2)] {
            let (sender, promise) = channel();
            let queues = vec![findings(&disk, requests, requests, 0)];
            sender.send(Findings { queues, quiet: false, thread: None }).unwrap();
            asked.push(((kind, 0), promise));
        }
        let lines = scene.rounds.round(&|| Duration::ZERO, &mut |_, _| std::mem::take(&mut asked));
        assert!(
            matches!(&lines[..], [LogLine::Bad(line)] if line.contains("2 requests")),
            "{lines:?}"
        );
    }

    #[test]
    fn c08_lost_kicks_are_told() {
        let (mut scene, disk) = (Scene::new(), disk(1 << 20));
        let lines = scene.at(5, Some(vec![findings(&disk, 0, 0, 2), findings(&disk, 0, 0, 1)]));
        assert!(
            matches!(&lines[..], [LogLine::Bad(line)] if line.contains("3 of its guest's kicks"))
        );
        // A guest that never kicks does not fill the log.
        for now in [10, 20, 60] {
            assert_eq!(scene.at(now, Some(vec![findings(&disk, 0, 0, 7)])), []);
        }
        let lines = scene.at(66, Some(vec![findings(&disk, 0, 0, 1)]));
        assert!(
            matches!(&lines[..], [LogLine::Bad(line)] if line.contains("22 of its guest's kicks"))
        );
        assert_eq!(scene.at(130, Some(vec![findings(&disk, 0, 0, 0)])), []);
        assert!(scene.rounds.kicks.is_empty(), "forgotten");
    }

    /// Or a worker that comes back after an hour would carry out hundreds of looks, and what the first
    /// of them found would be all that is heard.
    #[test]
    fn c12_who_owes_an_answer_is_not_asked_again() {
        let mut scene = Scene::new();
        let id = (EngineKind::Threads, 2);
        assert_eq!(scene.at(5, None), []);
        let mut pending = None;
        scene.rounds.round(&|| Duration::from_secs(10), &mut |_, is_pending| {
            pending = Some((is_pending(id), is_pending((EngineKind::Threads, 3))));
            vec![]
        });
        assert_eq!(pending, Some((true, false)));
    }

    #[test]
    fn c12_a_worker_that_does_not_move_is_told() {
        let mut scene = Scene::new();
        assert_eq!(scene.at(5, None), []);
        assert_eq!(scene.at(20, Some(vec![])), [], "it still owes the first answer");
        let lines = scene.at(36, Some(vec![]));
        assert!(
            matches!(&lines[..], [LogLine::Bad(line)] if line.contains("threads/2 has not moved for 31 s")),
            "{lines:?}"
        );
        assert_eq!(scene.at(40, Some(vec![])), [], "once");
        // It answers at last.
        let (sender, promise) = channel();
        sender.send(Findings::default()).unwrap();
        scene.rounds.asked.values_mut().next().unwrap().promise = promise;
        let lines = scene.at(50, Some(vec![]));
        let good = "worker threads/2 moves again, after 45 s";
        assert_eq!(lines, [LogLine::Good(good.into())]);
        // One that has ended is forgotten.
        assert_eq!(scene.at(60, Some(vec![])), []);
        assert!(scene.rounds.asked.is_empty());
    }
}
