//! A worker that panics, or whose engine does (hazard E5): nobody waits for it, and no memory goes
//! that the kernel may still write to.

use ringway_aio::{BellId, Counters, Engine, FileId, Full, Io, Limits, Null, Reaped};
use ringway_disk::{Disk, EngineKind, OpenOptions, Source, open};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::rig::{Rig, RigOptions};
use ringway_vhost_user::Ended;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Where an engine goes wrong once it has taken a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Never,
    Queue,
    Submit,
    Reap,
    Wait,
    /// In the first look for what is done after it was told to ([`Known::told`]).
    Later,
    /// It fails with an error, and panics when it is dropped.
    FailsAndDrop,
}

/// What one engine of several is told, and what it tells.
#[derive(Default)]
struct Known {
    engines: AtomicUsize,
    /// Where the guest's memory lies that a transfer is to fill, in this process.
    memory: AtomicU64,
    told: AtomicBool,
}

/// Completes nothing once it has gone wrong: to the kernel all of it is in flight for ever.
struct Panicking {
    inner: Null,
    wrong: Wrong,
    known: Arc<Known>,
    taken: bool,
}

impl Panicking {
    fn pass(&self, here: Wrong) {
        assert!(!self.taken || self.wrong != here, "the engine panics in {here:?}");
    }
}

impl Engine for Panicking {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.inner.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.inner.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.inner.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.inner.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        self.known.memory.store(io.memory.segments()[0].base.expose_provenance() as u64, SeqCst);
        if self.wrong == Wrong::Never {
            // SAFETY: passed on to the caller.
            return unsafe { self.inner.queue(io) };
        }
        self.taken = true;
        self.pass(Wrong::Queue);
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.pass(Wrong::Submit);
        if self.taken && self.wrong == Wrong::FailsAndDrop {
            return Err(io::Error::other("as wanted"));
        }
        self.inner.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.pass(Wrong::Reap);
        if self.known.told.load(SeqCst) {
            self.pass(Wrong::Later);
        }
        self.inner.reap(out)
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.inner.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.pass(Wrong::Wait);
        self.inner.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        self.pass(Wrong::FailsAndDrop);
    }
}

fn disk() -> Disk {
    open(&OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 })).unwrap()
}

/// A back-end of two queues on two workers, of which the first one goes wrong.
fn rig(wrong: Wrong, known: &Arc<Known>) -> Rig {
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let mut options = RigOptions::new(source, EngineKind::Null).queues(2, 2);
    if wrong == Wrong::Later {
        options.drain_max = Duration::from_millis(100);
    }
    let known = Arc::clone(known);
    Rig::with_engines(disk(), &options, move || {
        let first = known.engines.fetch_add(1, SeqCst) == 0;
        let wrong = if first { wrong } else { Wrong::Never };
        let inner = Null::new(64).unwrap();
        Panicking { inner, wrong, known: Arc::clone(&known), taken: false }
    })
}

/// Begins one read.
fn begin(device: &Device, queue: &mut BlkQueue<()>) {
    queue.read(0, device.pool().alloc(4096).unwrap(), ()).unwrap();
    queue.submit().unwrap();
}

/// True if the front-end's end of the connection says that the other one is closed.
fn is_closed(mut stream: UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut byte = [0; 1];
    match stream.read(&mut byte) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

/// True if `address` is memory of this process.
fn is_mapped(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let range = line.split(' ').next().unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|hex| u64::from_str_radix(hex, 16).unwrap());
        (from..to).contains(&address)
    })
}

#[test]
fn e05_a_worker_that_panics_ends_its_sessions_and_keeps_their_memory() {
    use Wrong::{FailsAndDrop, Never, Queue, Reap, Submit, Wait};
    for wrong in [Never, Queue, Submit, Reap, Wait, FailsAndDrop] {
        let known = Arc::default();
        let mut rig = rig(wrong, &known);
        let stream = rig.connect();
        let peer = stream.try_clone().unwrap();
        let mut device = Options::new().queues(2).over(stream).unwrap();
        let mut queues: Vec<BlkQueue<()>> = device.queues().unwrap();
        // The other worker serves.
        begin(&device, &mut queues[1]);
        while queues[1].completions().count() == 0 {
            std::thread::yield_now();
        }
        if wrong == Wrong::Never {
            // The control: what is let go of in order is unmapped.
            drop((queues, device, peer));
            assert_eq!(rig.join_sessions(), [Ended::ByPeer]);
            assert!(rig.export().is_clear() && !is_mapped(known.memory.load(SeqCst)));
            continue;
        }
        begin(&device, &mut queues[0]);
        assert_eq!(rig.join_sessions(), [Ended::ByPeer], "{wrong:?}: nobody hangs");
        assert!(is_closed(peer), "{wrong:?}: the front-end sees it");
        drop((queues, device));
        assert!(rig.stats_of(0).is_none(), "{wrong:?}: the worker has ended");
        let other = rig.stats_of(1).expect("the other one lives");
        assert!(other.queues.is_empty(), "{wrong:?}: no queue is served without a session");
        // To the kernel the transfer is still under way.
        let memory = known.memory.load(SeqCst);
        assert!(is_mapped(memory), "{wrong:?}: guest memory that may still be written to is gone");
        assert!(!rig.export().is_clear(), "{wrong:?}: what is in flight is not known to be over");
    }
}

/// Its front-end has gone before, and has left a request to the disk.
#[test]
fn b50_what_a_worker_that_panics_had_of_connections_that_ended_may_still_land() {
    let known: Arc<Known> = Arc::default();
    let mut rig = rig(Wrong::Later, &known);
    let mut device = Options::new().queues(1).over(rig.connect()).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    begin(&device, &mut queue);
    while known.memory.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    drop((queue, device));
    assert_eq!(rig.join_sessions(), [Ended::ByPeer]);
    assert!(!rig.export().is_clear(), "it is in flight");
    known.told.store(true, SeqCst);
    assert!(rig.stats_of(0).is_none(), "the worker has ended");
    let export = rig.export();
    assert!(!export.is_clear() && export.has_failed(), "nobody can know that it is over");
    assert!(is_mapped(known.memory.load(SeqCst)), "guest memory that may be written to is gone");
}
