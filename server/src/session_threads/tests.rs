use super::shared::Queues;
use super::*;
use crate::bell::event;
use ringway_core::thread::panic_message;
use ringway_testkit::Rng;
use ringway_vhost_user::Wakes;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long anything may take before a test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a test and its task share.
struct Probe {
    bell: OwnedFd,
    /// The sum of what was rung, and the turns that heard it.
    heard: AtomicU64,
    turns: AtomicUsize,
    /// A turn is being taken.
    busy: AtomicBool,
    /// Two were, at a time.
    overlapped: AtomicBool,
}

impl Probe {
    fn ring(&self) {
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).unwrap();
    }

    fn listen(&self) {
        let mut counter = [0; 8];
        if rustix::io::read(&self.bell, &mut counter).is_ok() {
            self.heard.fetch_add(u64::from_ne_bytes(counter), SeqCst);
        }
    }
}

type Act = Box<dyn FnMut(&Probe, Linger<'_>) -> io::Result<Turn> + Send>;

/// A task that does what a test wants once its bell rings, or when it is time.
struct Acting {
    probe: Arc<Probe>,
    at: Option<Instant>,
    act: Act,
    ended: Sender<Result<bool, String>>,
}

impl Task for Acting {
    fn wakes(&self) -> Wakes<'_> {
        Wakes { readable: vec![self.probe.bell.as_fd()], at: self.at }
    }

    fn turn(&mut self, linger: Linger<'_>) -> io::Result<Turn> {
        let busy = self.probe.busy.swap(true, SeqCst);
        self.probe.overlapped.fetch_or(busy, SeqCst);
        self.probe.listen();
        self.at = None;
        let turn = (self.act)(&self.probe, linger);
        self.probe.turns.fetch_add(1, SeqCst);
        self.probe.busy.store(false, SeqCst);
        turn
    }

    fn end(self: Box<Self>, outcome: std::thread::Result<io::Result<()>>) {
        let said = outcome.map_err(|panic| panic_message(&*panic).to_owned());
        self.ended.send(said.map(|ended| ended.is_ok())).unwrap();
    }
}

struct Bench {
    threads: SessionThreads,
    ended: Receiver<Result<bool, String>>,
    tell: Sender<Result<bool, String>>,
}

impl Bench {
    fn new() -> Self {
        let (tell, ended) = channel();
        Self { threads: SessionThreads::start().unwrap(), ended, tell }
    }

    fn add(
        &self,
        at: Option<Instant>,
        act: impl FnMut(&Probe, Linger<'_>) -> io::Result<Turn> + Send + 'static,
    ) -> Arc<Probe> {
        let probe = Arc::new(Probe {
            bell: event().unwrap(),
            heard: AtomicU64::new(0),
            turns: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            overlapped: AtomicBool::new(false),
        });
        let (act, ended) = (Box::new(act), self.tell.clone());
        self.threads.add(Box::new(Acting { probe: Arc::clone(&probe), at, act, ended }));
        probe
    }

    fn until(&self, what: &str, so: impl Fn(&Queues) -> bool) {
        let begun = Instant::now();
        while !so(&self.threads.shared.lock()) {
            assert!(begun.elapsed() < TIMEOUT, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What is rung is heard, by one thread at a time, whoever rings when.
#[test]
fn no_ring_is_lost_and_no_turns_of_a_task_overlap() {
    const RINGS: u64 = 2000;
    let mut rng = Rng::for_test("no_ring_is_lost");
    let bench = Bench::new();
    let task = |n: u64| {
        let mut rng = Rng::new(n);
        bench.add(None, move |probe, linger| {
            // Some messages of a conversation are waited for, some come when nobody waits.
            if rng.below(2) == 0 && linger().is_some_and(|time| time > Duration::ZERO) {
                std::thread::sleep(Duration::from_micros(rng.below(300)));
                probe.listen();
            }
            Ok(Turn::Waits)
        })
    };
    let probes: Vec<_> = (0..20).map(|_| task(rng.next_u64())).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (seed, probes) = (rng.next_u64(), &probes);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for n in 0..RINGS {
                    probes[usize::try_from(rng.below(20)).unwrap()].ring();
                    if n % 50 == 0 {
                        std::thread::sleep(Duration::from_micros(rng.below(2000)));
                    }
                }
            });
        }
    });
    let sum = |_: &Queues| probes.iter().map(|probe| probe.heard.load(SeqCst)).sum::<u64>();
    bench.until("rings are lost", |queues| sum(queues) == 2 * RINGS);
    assert!(probes.iter().all(|probe| !probe.overlapped.load(SeqCst)));
}

/// Many tasks that are held up have no other one wait, and the threads that it took end.
#[test]
fn tasks_that_are_held_up_cost_threads_and_nobody_waits() {
    let bench = Bench::new();
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let stuck: Vec<_> = (0..50)
        .map(|_| {
            let gate = Arc::clone(&gate);
            bench.add(None, move |_, _| {
                drop(gate.lock());
                Ok(Turn::Waits)
            })
        })
        .collect();
    let free = bench.add(None, |_, _| Ok(Turn::Waits));
    stuck.iter().for_each(|probe| probe.ring());
    for turn in 1..=3 {
        free.ring();
        bench.until("it waits for its neighbours", |_| free.heard.load(SeqCst) >= turn);
    }
    bench.until("not all are held up", |queues| queues.steps.len() == 50);
    assert!(stuck.iter().all(|probe| probe.turns.load(SeqCst) == 0), "nobody was let go");
    assert!(bench.threads.shared.lock().threads <= 51, "more threads than tasks");
    drop(held);
    bench.until("they go on", |_| stuck.iter().all(|probe| probe.turns.load(SeqCst) > 0));
    bench.until("threads do not end", |queues| queues.threads == 1 && queues.idle == 1);
    free.ring();
    bench.until("the last one serves on", |_| free.heard.load(SeqCst) >= 4);
}

/// Many that are held up for a moment each, again and again, keep nobody waiting for all of them.
#[test]
fn tasks_that_are_held_up_often_cost_threads_as_well() {
    let bench = Bench::new();
    let over = Arc::new(AtomicBool::new(false));
    let task = |_| {
        let over = Arc::clone(&over);
        bench.add(None, move |probe, _| {
            std::thread::sleep(Duration::from_millis(10));
            if !over.load(SeqCst) {
                probe.ring();
            }
            Ok(Turn::Waits)
        })
    };
    let probes: Vec<_> = (0..40).map(task).collect();
    probes.iter().for_each(|probe| probe.ring());
    bench.until("forty share four threads", |queues| queues.threads >= 16);
    over.store(true, SeqCst);
    bench.until("threads do not end", |queues| queues.threads == 1 && queues.idle == 1);
}

/// As long as nobody is held up there are not more threads than some, whatever there is to do.
#[test]
fn many_tasks_that_are_not_held_up_share_few_threads() {
    let bench = Bench::new();
    let names = Arc::new(Mutex::new(BTreeSet::new()));
    let task = |_| {
        let names = Arc::clone(&names);
        bench.add(None, move |_, _| {
            names.lock().unwrap().insert(std::thread::current().name().map(str::to_owned));
            Ok(Turn::Waits)
        })
    };
    let probes: Vec<_> = (0..500).map(task).collect();
    probes.iter().for_each(|probe| probe.ring());
    bench.until("not all are served", |_| probes.iter().all(|p| p.heard.load(SeqCst) == 1));
    let names = names.lock().unwrap();
    // On a host that is busy a turn may take long.
    assert!(names.len() < 50, "{names:?}");
}

#[test]
fn a_turn_is_taken_when_its_time_has_come() {
    let bench = Bench::new();
    let begun = Instant::now();
    let at = begun + Duration::from_millis(50);
    let late = bench.add(Some(begun + 2 * TIMEOUT), |_, _| Ok(Turn::Waits));
    let due = bench.add(Some(at), move |_, _| {
        assert!(Instant::now() >= at, "too early");
        Ok(Turn::Over)
    });
    assert_eq!(bench.ended.recv_timeout(TIMEOUT).unwrap(), Ok(true));
    assert_eq!((due.turns.load(SeqCst), late.turns.load(SeqCst)), (1, 0));
}

#[test]
fn an_error_or_a_panic_ends_its_task_alone() {
    let bench = Bench::new();
    let next = bench.add(None, |_, _| Ok(Turn::Waits));
    type Last = fn() -> io::Result<Turn>;
    let acts: [(Last, _); 3] = [
        (|| panic!("as wanted"), Err("as wanted".to_owned())),
        (|| Err(io::Error::other("no")), Ok(false)),
        (|| Ok(Turn::Over), Ok(true)),
    ];
    for (act, wanted) in acts {
        let ends = bench.add(None, move |_, _| act());
        ends.ring();
        assert_eq!(bench.ended.recv_timeout(TIMEOUT).unwrap(), wanted);
        let heard = next.heard.load(SeqCst);
        next.ring();
        bench.until("its neighbour waits", |_| next.heard.load(SeqCst) > heard);
    }
    bench.until("not all are over", |queues| queues.tasks == 1);
}

/// A descriptor that cannot be watched costs its task time, not the rest of its turns.
#[test]
fn what_cannot_be_watched_is_looked_at() {
    struct Unwatchable(OwnedFd, Sender<usize>, usize);
    impl Task for Unwatchable {
        fn wakes(&self) -> Wakes<'_> {
            Wakes { readable: vec![self.0.as_fd()], at: None }
        }
        fn turn(&mut self, _: Linger<'_>) -> io::Result<Turn> {
            self.2 += 1;
            self.1.send(self.2).unwrap();
            Ok(if self.2 < 3 { Turn::Waits } else { Turn::Over })
        }
        fn end(self: Box<Self>, _: std::thread::Result<io::Result<()>>) {}
    }
    let bench = Bench::new();
    let (tell, turns) = channel();
    // epoll takes no files.
    let file = tempfile::tempfile().unwrap().into();
    bench.threads.add(Box::new(Unwatchable(file, tell, 0)));
    for wanted in 1..=3 {
        assert_eq!(turns.recv_timeout(TIMEOUT), Ok(wanted));
    }
    assert!(bench.threads.shared.lock().threads <= 1);
}
