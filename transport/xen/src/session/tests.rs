//! A disk in a store and over a hypervisor of the test's own.

use super::*;
use crate::access::Here;
use crate::fake_host::{FakeGuest, FakeHost};
use crate::limits::INDIRECT_SEGMENTS;
use crate::queue::QueueSetup;
use crate::record::{Identity, Record};
use ringway_aio::{Engine, Null};
use ringway_core::{Request, Status};
use ringway_disk::{CustomDisk, Disk, OpenOptions, Source, open};
use ringway_export::{
    ChangeError, ExportOptions, Handle, Pop, RequestQueue, Worker, WorkerOptions, abandon,
    command_channel,
};
use ringway_ring::blkif::{Abi, Ask, Command, Front, GrantPiece, RingAt, With};
use ringway_testkit::{FakeStore, StallingStore};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const RING_GRANT: u32 = 1;
const DATA_GRANT: u32 = 2;
const PORT: u32 = 5;

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a session is made of.
#[derive(Clone)]
struct Place {
    store: FakeStore,
    folder: PathBuf,
    guest: Arc<FakeGuest>,
    export: Arc<Export<Queue<FakeHost>>>,
    stop: Arc<OwnedFd>,
    /// Doorbells of the next queues; those that find none here have one of their own.
    bells: Arc<Mutex<Vec<OwnedFd>>>,
    /// That of the last one.
    bell: Arc<Mutex<Option<Arc<OwnedFd>>>>,
}

impl Place {
    fn access(&self) -> Arc<dyn Access> {
        let records = File::open(&self.folder).unwrap();
        Arc::new(Here::new(Some(self.folder.join("store")), records.into()))
    }

    fn session(&self) -> Session<'_, FakeHost> {
        let options = SessionOptions { movement: Movement::Copy, access: self.access() };
        let store = Xenstore::over(self.store.connect().into());
        let (back, front) = ("back".to_owned(), "front".to_owned());
        let at =
            Address { back, front, domid: 7, devid: 51712, params: "x".into(), read_only: false };
        let (guest, bells) = (Arc::clone(&self.guest), Arc::clone(&self.bells));
        let last = Arc::clone(&self.bell);
        let connect = move |_: &dyn Access, _: u16, pages: &[u32], _: u32| {
            let mut host = FakeHost::new(&guest);
            if let Some(bell) = bells.lock().unwrap().pop() {
                host.bell = Arc::new(bell);
            }
            *last.lock().unwrap() = Some(Arc::clone(&host.bell));
            let ring = host.map(pages, true)?;
            Ok((host, ring))
        };
        let stop = self.stop.as_fd();
        Session::over(&self.export, options, store, at, stop, Box::new(connect)).unwrap()
    }
}

/// A guest with one ring and one page of data, and a worker.
struct Rig {
    place: Place,
    front: Front,
    handle: Handle<Queue<FakeHost>>,
    threads: Vec<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Rig {
    /// With a null engine.
    fn new() -> Self {
        let disk = open(&OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 })).unwrap();
        Self::with(disk, || Null::new(64).unwrap())
    }

    fn with<E: Engine + 'static>(disk: Disk, engine: impl FnOnce() -> E + Send + 'static) -> Self {
        let (store, folder) = (FakeStore::default(), tempfile::tempdir().unwrap());
        store.listen(&folder.path().join("store")).unwrap();
        let guest = FakeGuest::new(2);
        guest.grant(RING_GRANT, 0, true);
        guest.grant(DATA_GRANT, 1, true);
        let at = RingAt { base: guest.memory.at(0), order: 0, abi: Abi::X86_64 };
        // SAFETY: the page stays mapped with the guest.
        let front = unsafe { Front::new(at, 0) }.unwrap();
        let (handle, inbox) = command_channel().unwrap();
        let worker = std::thread::spawn(move || {
            Worker::new(engine(), inbox, &WorkerOptions::default()).unwrap().run().unwrap();
        });
        let options = ExportOptions { queues: 1, queue_size: 128 };
        let export = Export::new(Arc::new(disk), options, vec![handle.clone()], 0);
        let export = Arc::new(export.with_drain_max(Duration::from_millis(100)));
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        for (key, value) in [
            ("back/params", "x"),
            ("back/online", "1"),
            ("back/state", "1"),
            ("front/ring-ref", "1"),
            ("front/event-channel", "5"),
            ("front/state", "1"),
        ] {
            store.set(key, value);
        }
        let (path, bells) = (folder.path().to_path_buf(), Arc::default());
        let bell = Arc::default();
        let place = Place { store, folder: path, guest, export, stop, bells, bell };
        Self { place, front, handle, threads: vec![worker], _folder: folder }
    }

    /// Serves the disk on a thread of its own.
    fn serve(&mut self) {
        let place = self.place.clone();
        self.threads.push(std::thread::spawn(move || {
            place.session().run();
        }));
    }

    fn until_state(&self, wanted: &str) {
        until(wanted, || self.place.store.get("back/state").as_deref() == Some(wanted));
    }

    /// What a front-end does once it has been offered a disk.
    fn connect(&self) {
        self.until_state("2");
        self.place.store.set("front/state", "3");
        self.until_state("4");
        self.place.store.set("front/state", "4");
    }

    fn ask(&mut self) {
        self.ask_to(Command::Write);
    }

    fn ask_to(&mut self, command: Command) {
        let piece = [GrantPiece::whole(DATA_GRANT)];
        let ask = Ask { command, sector: 8, with: With::Pieces(&piece) };
        self.front.push(ask).unwrap();
        let _ = self.front.publish();
        if let Some(bell) = &*self.place.bell.lock().unwrap() {
            rustix::io::write(&**bell, &1u64.to_ne_bytes()).unwrap();
        }
    }

    fn until_answered(&mut self) {
        let mut answer = None;
        let front = &mut self.front;
        until("an answer", || {
            answer = front.pop_response().unwrap();
            answer.is_some()
        });
        assert_eq!(answer.unwrap().status, Status::Ok);
    }

    /// Keeps the worker busy with something else until what is returned is dropped.
    fn keep_worker(&self) -> Sender<()> {
        let (go, may_go) = channel::<()>();
        let (kept, is_kept) = channel();
        let handle = self.handle.clone();
        let id = handle.stats().unwrap().queues[0].id;
        std::thread::spawn(move || {
            let edit = move |_: &mut Queue<FakeHost>| {
                kept.send(()).unwrap();
                let _ = may_go.recv();
            };
            handle.edit(id, edit).unwrap();
        });
        is_kept.recv().unwrap();
        go
    }

    fn has_record(&self) -> bool {
        self.place.folder.join("xen-7-51712-0").exists()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.place.stop, &1u64.to_ne_bytes());
        for thread in self.threads.drain(1..) {
            let _ = thread.join();
        }
        let _ = self.handle.exit();
    }
}

/// A disk that does not finish what is in flight cannot be paused. Its guest was told to close, which it cannot while it
/// uses the disk; so it had lost that for good.
#[test]
fn b48_a_guest_whose_disk_cannot_be_paused_in_time_keeps_it() {
    let mut rig = Rig::new();
    rig.serve();
    rig.connect();
    rig.ask();
    rig.until_answered();
    let kept = rig.keep_worker();
    rig.ask();
    let export = Arc::clone(&rig.place.export);
    assert!(matches!(export.pause(), Err(ChangeError::Disconnected)));
    assert!(!export.is_clear() && rig.has_record());
    drop(kept);
    until("its queue comes back", || export.is_clear());
    assert_eq!(rig.place.store.get("back/state").as_deref(), Some("4"), "nobody is to close");
    // What was in the ring is there still.
    until("it is paused", || export.pause().is_ok());
    export.resume().unwrap();
    rig.until_answered();
    rig.ask();
    rig.until_answered();
    assert_eq!(rig.place.store.get("back/state").as_deref(), Some("4"));
}

/// A daemon that takes over from one that was killed, and cannot start a queue at once: what its predecessor had in flight
/// is known to the next try.
#[test]
fn b48_rings_that_cannot_be_started_at_once_are_taken_over_later() {
    let mut rig = Rig::new();
    let guest = Arc::clone(&rig.place.guest);
    let mut pages = [0; 16];
    pages[0] = RING_GRANT;
    let pieces = INDIRECT_SEGMENTS.into();
    let identity =
        Identity { domid: 7, devid: 51712, queue: 0, slots: 32, pieces, port: PORT, pages };
    let mut host = FakeHost::new(&guest);
    let ring_pages = host.map(&[RING_GRANT], true).unwrap();
    let at = RingAt { base: crate::GrantMapping::base(&ring_pages), order: 0, abi: Abi::X86_64 };
    let offered = rig.place.session().saying().offered();
    let movement = Movement::Copy;
    let setup = QueueSetup { host, ring_pages, at, offered, movement, persistent: false };
    let record = Record::create_by(&rig.place.access(), &identity).unwrap();
    // SAFETY: the ring lies in its page, and there is no other back side yet.
    let mut killed = unsafe { Queue::new(setup, record) }.unwrap();
    rig.ask();
    let mut request = Request::with_capacity(11);
    let Ok(Pop::Request(token)) = killed.pop(&mut request) else { panic!("one was asked for") };
    abandon((token, killed));

    // No worker can listen to a file.
    rig.place.bells.lock().unwrap().push(tempfile::tempfile().unwrap().into());
    rig.place.store.set("back/state", "4");
    rig.place.store.set("front/state", "4");
    rig.serve();
    rig.until_answered();
    assert!(rig.place.bells.lock().unwrap().is_empty() && rig.has_record());
    rig.ask();
    rig.until_answered();
}

/// The toolstack tells a disk to go in the moment in which its state is written: that is not undone.
#[test]
fn b49_what_the_toolstack_has_written_is_not_overwritten() {
    let rig = Rig::new();
    let mut session = rig.place.session();
    let store = &rig.place.store;
    store.set("back/state", "5");
    session.tell_size(State::Connected, State::Connected).unwrap();
    session.say(&[], State::InitWait, State::Closing).unwrap();
    session.offer(State::Closed).unwrap();
    assert_eq!(store.get("back/state").as_deref(), Some("5"));
    assert_eq!(store.get("back/sectors"), None);
    session.tell_size(State::Closing, State::Closing).unwrap();
    assert_eq!(store.get("back/sectors").as_deref(), Some("2048"));
}

/// A guest goes while storage hangs, and uses its pages and grants for something else: what is read later is not copied
/// there.
#[test]
fn b56_pages_of_a_front_end_that_has_gone_are_not_written_to() {
    let store = StallingStore::new(1 << 20);
    store.stall_reads(true);
    let engine = store.clone();
    let disk = CustomDisk::new(1 << 20).open(None).unwrap();
    let mut rig = Rig::with(disk, move || engine.engine());
    rig.serve();
    rig.connect();
    rig.ask_to(Command::Read);
    store.wait_stalled(1);
    rig.place.store.set("front/state", "6");
    rig.until_state("6");
    let (guest, export) = (Arc::clone(&rig.place.guest), Arc::clone(&rig.place.export));
    assert!(!export.is_clear(), "storage has it still");
    guest.page(1).fill(7);
    store.stall_reads(false);
    until("it is over", || export.is_clear());
    assert!(guest.page(1).iter().all(|&byte| byte == 7), "the page is somebody else's");
    assert!(rig.front.pop_response().unwrap().is_none(), "nobody waits for an answer");
}

/// A session that ends while it stops its queues, as by a panic: what they have in flight counts until it is over.
#[test]
fn e05_a_xen_session_that_ends_while_it_stops_leaves_nothing_behind() {
    let rig = Rig::new();
    let mut session = rig.place.session();
    assert!(matches!(session.act(), Ok(None)));
    rig.place.store.set("front/state", "3");
    assert!(matches!(session.act(), Ok(None)));
    let QueuePlace::Running(id) = session.queues[0] else { panic!("it runs") };
    let kept = rig.keep_worker();
    session.queues[0] = QueuePlace::Stopping(rig.place.export.worker(0).stop(id).unwrap());
    drop(session);
    assert!(!rig.place.export.is_clear(), "nobody knows what it has in flight");
    drop(kept);
    until("it is over", || rig.place.export.is_clear());
}
