//! Who submits: a turn, or the sleep after it.

use super::*;
use ringway_aio::{BellId, Counters, Done, FileId, Full, Io, Limits, Reaped};
use std::sync::Mutex;

/// What an engine was asked to do with operations that were queued, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Submit,
    SubmitAndWait,
}

/// An engine whose operations are done when somebody has slept for them, or with their submission.
struct Slow {
    bells: Null,
    queued: Vec<Done>,
    started: Vec<Done>,
    done: Vec<Done>,
    prompt: Arc<AtomicBool>,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Slow {
    fn begin(&mut self, call: Call) {
        if self.queued.is_empty() {
            return;
        }
        self.calls.lock().unwrap().push(call);
        let prompt = self.prompt.load(SeqCst);
        let to = if prompt { &mut self.done } else { &mut self.started };
        to.append(&mut self.queued);
    }
}

impl Engine for Slow {
    fn limits(&self) -> &Limits {
        self.bells.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.bells.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.bells.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.bells.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let result = i32::try_from(io.len).unwrap();
        self.queued.push(Done { tag: io.tag, result });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.begin(Call::Submit);
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.reap(out);
        let before = out.done.len();
        out.done.append(&mut self.done);
        out.done.len() - before
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.done.append(&mut self.started);
        if self.done.is_empty() { self.bells.wait(timeout) } else { Ok(()) }
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.begin(Call::SubmitAndWait);
        self.wait(timeout)
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// A worker with such an engine, and one queue.
struct Scene {
    handle: crate::Handle<Silent>,
    thread: std::thread::JoinHandle<io::Result<()>>,
    kick: Arc<OwnedFd>,
    asked: Arc<AtomicU32>,
    answered: Arc<AtomicU32>,
    prompt: Arc<AtomicBool>,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Scene {
    fn new() -> Self {
        let (handle, inbox) = command_channel().unwrap();
        let (prompt, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::default()));
        let engine = Slow {
            bells: Null::new(16).unwrap(),
            queued: Vec::new(),
            started: Vec::new(),
            done: Vec::new(),
            prompt: Arc::clone(&prompt),
            calls: Arc::clone(&calls),
        };
        let thread =
            std::thread::spawn(|| Worker::new(engine, inbox, &never_spins()).unwrap().run());
        let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (asked, answered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let queue = Silent {
            op: Op::Read,
            kick: Arc::clone(&kick),
            asked: Arc::clone(&asked),
            answered: Arc::clone(&answered),
        };
        handle.add(queue, null_disk(), false, Box::new(|_| {})).unwrap();
        Self { handle, thread, kick, asked, answered, prompt, calls }
    }

    /// So many requests, one after the other; how often something was submitted in which way.
    fn ask(&self, number: u32) -> (usize, usize) {
        self.calls.lock().unwrap().clear();
        for _ in 0..number {
            let wanted = self.answered.load(SeqCst) + 1;
            self.asked.fetch_add(1, SeqCst);
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            while self.answered.load(SeqCst) < wanted && Instant::now() < deadline {
                std::thread::yield_now();
            }
            assert_eq!(self.answered.load(SeqCst), wanted);
        }
        let calls = self.calls.lock().unwrap();
        let submits = calls.iter().filter(|&&call| call == Call::Submit).count();
        (submits, calls.len() - submits)
    }

    fn end(self) {
        self.handle.exit().unwrap();
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn what_a_slow_disk_is_asked_goes_with_the_sleep() {
    let scene = Scene::new();
    scene.ask(3);
    // One of 32 is submitted by itself, to see whether the disk is still slow.
    assert_eq!(scene.ask(320), (10, 310));
    scene.end();
}

#[test]
fn a_disk_that_is_prompt_is_soon_asked_at_once() {
    let scene = Scene::new();
    scene.ask(40);
    scene.prompt.store(true, SeqCst);
    let (submits, with_sleep) = scene.ask(100);
    assert!(with_sleep < 32 && submits == 100 - with_sleep, "{submits} and {with_sleep}");
    assert_eq!(scene.ask(100), (100, 0));
    scene.prompt.store(false, SeqCst);
    let (submits, with_sleep) = scene.ask(320);
    assert!(with_sleep > 300 && submits > 0, "{submits} and {with_sleep}");
    scene.end();
}
