//! Every engine passes the one contract suite.

use ringway_aio::contract::{Mode, Suite, takes_direct};
use ringway_aio::faulty::Fault;
use ringway_aio::io_uring::{Feature, probe};
use ringway_aio::{
    BellId, Counters, Engine, Faulty, FileId, Full, Handle, Immediate, Io, IoMemory, IoOp, IoUring,
    IoUringSetup, Limits, LinuxAio, Model, Null, Pair, Reaped, Second, Sim, SimSetup, Threads,
    ThreadsSetup,
};
use ringway_core::Segment;
use ringway_testkit::{Need, skip};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Cargo's folder for test files: on the disk that the sources are on.
fn disk() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn memory() -> &'static Path {
    Path::new("/dev/shm")
}

fn run(make: &dyn Fn(u32) -> Box<dyn Engine>, wanted: &[Mode], syscalls_per_io_max: f64) {
    let device = LoopDevice::new();
    let block_device = device.as_ref().map(|d| d.0.as_path());
    for dir in [disk(), memory()] {
        let modes: Vec<_> = wanted
            .iter()
            .copied()
            .filter(|&mode| mode == Mode::Cached || takes_direct(dir))
            .collect();
        if modes.len() < wanted.len() {
            skip(Need::Direct, dir.display());
        }
        let block_device = block_device.filter(|_| dir == disk());
        let modes = &modes;
        Suite { make, dir, modes, moves_data: true, syscalls_per_io_max, block_device }.run();
    }
}

/// A block device over a sparse file; only root gets one.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new() -> Option<Self> {
        let path = tempfile::NamedTempFile::new_in(disk()).unwrap();
        path.as_file().set_len(8 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(path.path()).output();
        match made {
            Ok(made) if made.status.success() => {
                let name = String::from_utf8(made.stdout).unwrap();
                Some(Self(PathBuf::from(name.trim())))
            }
            _ => {
                skip(Need::LoopDevice, "it takes root and losetup: discard is not tried");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

const BOTH: [Mode; 2] = [Mode::Cached, Mode::Direct];

#[test]
fn null() {
    Suite {
        make: &|depth| Box::new(Null::new(depth).unwrap()),
        dir: disk(),
        modes: &[Mode::Cached],
        moves_data: false,
        syscalls_per_io_max: 0.0,
        block_device: None,
    }
    .run();
}

#[test]
fn immediate() {
    let moved = |io: &Io<'_>| match io.op.moves_data() {
        true => i32::try_from(io.len).unwrap(),
        false => 0,
    };
    Suite {
        make: &|depth| Box::new(Immediate::new(depth, moved).unwrap()),
        dir: disk(),
        modes: &[Mode::Cached],
        moves_data: false,
        syscalls_per_io_max: 0.0,
        block_device: None,
    }
    .run();
}

/// What the function says comes out with the tag it was said of, whenever that is reaped.
#[test]
fn immediate_results_stay_with_their_tags() {
    let mut engine = Immediate::new(4, |io| -i32::try_from(io.offset).unwrap()).unwrap();
    let file = Arc::new(File::open("/dev/null").unwrap());
    let file = engine.attach(&file).unwrap();
    let queue = |engine: &mut dyn Engine, tag| {
        let (op, memory) = (IoOp::Sync, IoMemory::NONE);
        let io = Io { tag, op, file, offset: tag * 10, len: 0, memory };
        // SAFETY: no memory is named.
        unsafe { engine.queue(&io) }
    };
    let mut out = Reaped::with_capacity(4, 0);
    let mut found = Vec::new();
    for round in 0..3 {
        queue(&mut engine, round * 4).unwrap();
        engine.submit().unwrap();
        // Queued, and not submitted yet: the next round reaps it.
        queue(&mut engine, round * 4 + 1).unwrap();
        out.clear();
        engine.reap(&mut out);
        found.extend(out.done.iter().map(|done| (done.tag, done.result)));
    }
    assert_eq!(found, [(0, 0), (1, -10), (4, -40), (5, -50), (8, -80)]);
    queue(&mut engine, 10).unwrap();
    queue(&mut engine, 11).unwrap();
    queue(&mut engine, 12).unwrap();
    assert_eq!(queue(&mut engine, 13), Err(Full), "one is left of the last round");
}

#[test]
fn threads() {
    for threads in [1, 4] {
        let setup = |depth| ThreadsSetup { depth, threads, cached_inline: true };
        run(&|depth| Box::new(Threads::new(setup(depth)).unwrap()), &BOTH, 2.0);
    }
}

#[test]
fn threads_without_inline_reads() {
    let setup = |depth| ThreadsSetup { depth, threads: 2, cached_inline: false };
    run(&|depth| Box::new(Threads::new(setup(depth)).unwrap()), &BOTH, 2.0);
}

#[test]
fn linux_aio() {
    if let Err(e) = LinuxAio::new(1) {
        return skip(Need::LinuxAio, e);
    }
    run(&|depth| Box::new(LinuxAio::new(depth).unwrap()), &[Mode::Direct], 0.1);
    let cached = File::open("/proc/self/exe").unwrap();
    let refused = LinuxAio::new(1).unwrap().attach(&std::sync::Arc::new(cached)).unwrap_err();
    assert!(refused.to_string().contains("O_DIRECT"), "{refused}");
}

/// Takes files by a handle that says nothing, and handles as files: what `by_handle` says of a file decides.
struct ByHandle<E> {
    inner: E,
    by_handle: fn(&Arc<File>) -> bool,
}

impl<E: Engine> Engine for ByHandle<E> {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        if (self.by_handle)(file) {
            return self.inner.attach_handle(file, &(Arc::new(()) as Handle));
        }
        self.inner.attach(file)
    }
    fn attach_handle(&mut self, file: &Arc<File>, _: &Handle) -> io::Result<FileId> {
        self.inner.attach(file)
    }
    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.map_memory(regions) }
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
        // SAFETY: passed on to the caller.
        unsafe { self.inner.queue(io) }
    }
    fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }
    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.inner.reap(out)
    }
    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.inner.poll_doorbells()
    }
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.wait(timeout)
    }
    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.submit_and_wait(timeout)
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

/// Files go to either of them.
fn run_pair<B: Second + 'static>(second: impl Fn(u32) -> B, modes: &[Mode]) {
    let odd = |file: &Arc<File>| file.metadata().unwrap().ino() & 1 == 1;
    let kinds: [fn(&Arc<File>) -> bool; 3] = [odd, |_| true, |_| false];
    let first = |depth| ByHandle {
        inner: Threads::new(ThreadsSetup { depth, threads: 4, cached_inline: false }).unwrap(),
        by_handle: |_| false,
    };
    // The suite has one or two files at a time: each kind has its turn.
    for by_handle in kinds {
        let make = |depth| -> Box<dyn Engine> {
            let inner = Pair::new("pair", first(depth), second(depth)).unwrap();
            Box::new(ByHandle { inner, by_handle })
        };
        run(&make, modes, 2.0);
    }
}

#[test]
fn c99_a_pair_of_threads() {
    run_pair(|depth| Threads::new(ThreadsSetup::new(depth)).unwrap(), &BOTH);
}

#[test]
fn c99_a_pair_with_io_uring() {
    if let Err(e) = probe() {
        return skip(Need::IoUring, e);
    }
    run_pair(|depth| IoUring::new(IoUringSetup::new(depth)).unwrap(), &BOTH);
}

fn io_uring_without(without: &[Feature]) {
    if let Err(e) = probe() {
        return skip(Need::IoUring, e);
    }
    println!("without {without:?}");
    let make = |depth| IoUring::new(IoUringSetup { without, ..IoUringSetup::new(depth) }).unwrap();
    run(&|depth| Box::new(make(depth)), &BOTH, 0.1);
}

#[test]
fn io_uring() {
    io_uring_without(&[]);
}

#[test]
fn io_uring_without_each_feature() {
    for feature in Feature::ALL {
        io_uring_without(&[feature]);
    }
}

#[test]
fn io_uring_with_buffers_and_commands() {
    let features = match probe() {
        Ok(features) => features,
        Err(e) => return skip(Need::IoUring, e),
    };
    for feature in [Feature::RegisteredBuffers, Feature::Commands] {
        println!("{}: {:?}", feature.name(), features.why_not(feature));
    }
    let setup = |depth| IoUringSetup { buffers: 5, commands: 100, ..IoUringSetup::new(depth) };
    let make = |depth| IoUring::new(setup(depth)).unwrap();
    if make(1).limits().registered_buffers == 0 || make(1).limits().commands.is_none() {
        skip(Need::IoUringFeature, format!("{:?}", make(1).features()));
    }
    run(&|depth| Box::new(make(depth)), &BOTH, 0.1);
    // A polled ring has no buffers with numbers.
    assert!(IoUring::new(IoUringSetup { iopoll: true, ..setup(4) }).is_err());
}

#[test]
fn io_uring_of_an_old_kernel() {
    io_uring_without(&Feature::ALL);
}

#[test]
fn sim() {
    let never = |_: &Io<'_>| None::<Fault>;
    let late = (100, Duration::from_micros(500));
    let setup = SimSetup { late, reorder: true, seed: 42, ..SimSetup::new(Model::RAM) };
    for setup in [SimSetup::new(Model::RAM), SimSetup::new(Model::SSD), setup] {
        let threads =
            |depth| Threads::new(ThreadsSetup { depth, threads: 2, cached_inline: true }).unwrap();
        let make = |depth| Sim::new(Faulty::new(threads(depth), 512, never), setup);
        run(&|depth| Box::new(make(depth)), &BOTH, 2.0);
    }
}

/// Set up here, used there: the ring is bound to a thread at its first use, not before.
#[test]
fn io_uring_moves_to_its_worker() {
    let setup = IoUringSetup::new(4);
    let mut engine = match IoUring::new(setup) {
        Ok(engine) => engine,
        Err(e) => return skip(Need::IoUring, e),
    };
    let file = std::sync::Arc::new(tempfile::tempfile_in(disk()).unwrap());
    file.set_len(512).unwrap();
    let file = engine.attach(&file).unwrap();
    // SAFETY: no memory is involved.
    let bell = unsafe { libc::eventfd(1, libc::EFD_CLOEXEC) };
    engine.watch(3, bell).unwrap();
    let worker = std::thread::spawn(move || {
        let mut bytes = [1u8; 512];
        let segments = [Segment { base: bytes.as_mut_ptr(), len: 512 }];
        let (op, memory) = (IoOp::Read, IoMemory::Segments(&segments));
        // SAFETY: the memory is reaped below.
        unsafe { engine.queue(&Io { tag: 1, op, file, offset: 0, len: 512, memory }) }.unwrap();
        engine.submit().unwrap();
        let mut out = ringway_aio::Reaped::default();
        while out.done.is_empty() || out.rung.is_empty() {
            engine.wait(None).unwrap();
            engine.reap(&mut out);
        }
        assert_eq!((out.done[0].result, out.rung[0], bytes[0]), (512, 3, 0));
        engine
    });
    // With nothing in flight it may be dropped anywhere.
    drop(worker.join().unwrap());
}
