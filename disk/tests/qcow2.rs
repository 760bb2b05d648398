//! Disks of qcow2 images: random requests of several kinds at a time, by the engines, against a model;
//! QEMU's programs judge what was written.

// Content is bytes of larger numbers.
#![allow(clippy::cast_possible_truncation)]

use ringway_aio::{
    Engine, Fault, Faulty, Io, IoOp, IoUring, IoUringSetup, Reaped, Threads, ThreadsSetup,
};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::open::open_unmapped;
use ringway_disk::{
    Alignment, CacheMode, Disk, DiskQueue, LockedBase, NoSnapshot, NotCommitted, OpenError,
    OpenOptions, Qcow2, ResizeError, STATE_FILE_BYTES, SchedulerMode, Source, open,
};
use ringway_image::{Bases, Format, NewImage};
use ringway_testkit::{Need, Rng, skip};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of the disks.
const BYTES: usize = 8 << 20;
/// Bytes of a request's memory.
const ROOM: usize = 1 << 20;
/// Requests in flight.
const DEPTH: u16 = 16;
const BELL: u32 = 7;

fn options(path: &Path) -> OpenOptions {
    let mut options = OpenOptions::new(Source::Path(path.into()));
    options.qcow2 = Some(Qcow2::default());
    options
}

fn qemu(args: &[&str]) -> bool {
    for patience in (0..200).rev() {
        match Command::new("qemu-img").args(args).output() {
            Ok(output) if output.status.success() => return true,
            Ok(output) => {
                let error = String::from_utf8_lossy(&output.stderr);
                // A child of another test has copies of all locked descriptors until it runs its program.
                assert!(
                    patience > 0 && error.contains("Is another process using"),
                    "{args:?}: {error}"
                );
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(_) => {
                skip(Need::Qemu, "qemu-img".to_owned());
                return false;
            }
        }
    }
    unreachable!("the last try has ended")
}

fn content(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("content");
    let (from, to) = (path.to_str().unwrap(), raw.to_str().unwrap());
    assert!(qemu(&["convert", "-f", "qcow2", "-O", "raw", from, to]));
    std::fs::read(raw).unwrap()
}

/// One queue with an engine, and memory for each of its requests.
struct Bench<E> {
    queue: DiskQueue<usize>,
    engine: E,
    memory: Vec<Mapping>,
    reaped: Reaped,
    /// Answers by request.
    answers: Vec<Option<Status>>,
}

#[derive(Clone, Debug)]
struct Asked {
    op: Op,
    at: usize,
    len: usize,
    byte: u8,
}

impl<E: Engine> Bench<E> {
    fn new(disk: Disk, mut engine: E, durable: bool) -> Self {
        let disk = Arc::new(disk);
        let file = engine.attach(&disk.file()).unwrap();
        let limits = engine.limits().clone();
        let client = disk.image_client(DEPTH).unwrap().expect("it is no raw image");
        let mut queue = DiskQueue::new(disk, &limits, file, 0, DEPTH).unwrap();
        queue.attach_image(&mut engine, client, BELL).unwrap();
        queue.set_durable_writes(durable);
        let memory = (0..DEPTH).map(|_| Mapping::anonymous(ROOM).unwrap()).collect();
        let reaped = Reaped::with_capacity(256, 16);
        Self { queue, engine, memory, reaped, answers: vec![None; usize::from(DEPTH)] }
    }

    /// Carries out requests at the same time; all of them succeed.
    fn run(&mut self, asked: &[Asked]) {
        self.answers.fill(None);
        for (nth, asked) in asked.iter().enumerate() {
            let tag = self.queue.acquire().unwrap();
            let memory = &self.memory[nth];
            // SAFETY: the memory is this test's, and no request uses it now.
            unsafe {
                let byte = if asked.op == Op::Write { asked.byte } else { 0xee };
                memory.at(0).write_bytes(byte, asked.len.min(ROOM));
            }
            let request = self.queue.request_mut(tag);
            request.op = asked.op;
            request.range = ByteRange::new(asked.at as u64, asked.len as u64).unwrap();
            request.unmap = true;
            request.segments.clear();
            if matches!(asked.op, Op::Read | Op::Write) {
                let half = asked.len / 1024 * 512;
                for (from, to) in [(0, half), (half, asked.len)] {
                    if from < to {
                        let segment = Segment { base: memory.at(from), len: to - from };
                        assert!(request.segments.push(segment));
                    }
                }
            }
            // SAFETY: the memory stays until the answer is there.
            unsafe { self.queue.start(&mut self.engine, tag, nth) };
        }
        self.queue.unplug(&mut self.engine);
        while self.queue.in_flight() > 0 || self.queue.has_late() {
            self.turn();
        }
        assert!(self.answers.iter().take(asked.len()).all(|answer| *answer == Some(Status::Ok)));
    }

    fn turn(&mut self) {
        self.engine.submit().unwrap();
        self.reaped.clear();
        let moved = self.engine.reap(&mut self.reaped);
        for done in std::mem::take(&mut self.reaped.done) {
            let slot = u16::try_from(done.tag & 0xffff).unwrap();
            if let Some(answer) = self.queue.finish(&mut self.engine, slot, done.result) {
                self.answers[answer.context] = Some(answer.status);
            }
        }
        let rung = self.reaped.rung.contains(&BELL);
        if rung {
            self.queue.take_answers(&mut self.engine);
        }
        while let Some(answer) = self.queue.take_late() {
            self.answers[answer.context] = Some(answer.status);
        }
        if self.queue.has_deferred() {
            self.queue.retry(&mut self.engine, 16);
            // What waits may wait for one that the image's thread has answered.
            self.engine.poll_doorbells().unwrap();
        } else if moved == 0 && !rung && self.queue.in_flight() > 0 {
            self.engine.submit().unwrap();
            self.engine.wait(Some(Duration::from_secs(5))).unwrap();
        }
    }

    fn bytes(&self, nth: usize, len: usize) -> &[u8] {
        // SAFETY: no request uses it now.
        unsafe { std::slice::from_raw_parts(self.memory[nth].at(0), len) }
    }
}

/// Requests that do not touch each other.
fn random_requests(rng: &mut Rng) -> Vec<Asked> {
    let mut all: Vec<Asked> = Vec::new();
    for _ in 0..DEPTH {
        let op = rng.pick(&[
            Op::Read,
            Op::Read,
            Op::Write,
            Op::Write,
            Op::Write,
            Op::WriteZeroes,
            Op::Discard,
            Op::Flush,
        ]);
        let most = rng.pick(&[8, 8, 64, 256, 2048]);
        let at = usize::try_from(rng.below(BYTES as u64 / 512)).unwrap() * 512;
        let len = (usize::try_from(rng.below(most) + 1).unwrap() * 512).min(BYTES - at);
        let byte = rng.next_u64() as u8;
        let (at, len) = if op == Op::Flush { (0, 0) } else { (at, len) };
        if all.iter().all(|other| at + len <= other.at || other.at + other.len <= at) {
            all.push(Asked { op, at, len, byte });
        }
    }
    all
}

fn work<E: Engine>(rng: &mut Rng, bench: &mut Bench<E>, model: &mut [u8], rounds: usize) {
    for _ in 0..rounds {
        let asked = random_requests(rng);
        bench.run(&asked);
        for (nth, one) in asked.iter().enumerate() {
            let range = one.at..one.at + one.len;
            match one.op {
                Op::Read => assert!(bench.bytes(nth, one.len) == &model[range], "{one:?}"),
                Op::Write => model[range].fill(one.byte),
                Op::WriteZeroes => model[range].fill(0),
                _ => {}
            }
        }
        // What was discarded may read as anything the disk is free to choose; it has chosen now.
        let read = |one: &Asked| Asked { op: Op::Read, ..one.clone() };
        let discarded = asked.iter().filter(|one| one.op == Op::Discard).map(read);
        let discarded: Vec<_> = discarded.collect();
        bench.run(&discarded);
        for (nth, one) in discarded.iter().enumerate() {
            model[one.at..one.at + one.len].copy_from_slice(bench.bytes(nth, one.len));
        }
    }
}

/// An image of its own, or an overlay of two others.
fn image(rng: &mut Rng, folder: &Path, nth: u32, small: bool) -> Option<PathBuf> {
    let path = folder.join("top.qcow2");
    let name = path.to_str().unwrap();
    let cluster = rng.pick(&[if small { "512" } else { "8k" }, "4k", "64k", "1M"]);
    let (options, size) = (format!("cluster_size={cluster}"), BYTES.to_string());
    println!("cluster {cluster}, {}", ["alone", "on qcow2 on raw"][nth as usize % 2]);
    if nth % 2 == 0 {
        return qemu(&["create", "-f", "qcow2", "-o", &options, name, &size]).then_some(path);
    }
    let raw: Vec<u8> = (0..BYTES - 3 * 512).map(|at| (at / 512 * 7) as u8).collect();
    std::fs::write(folder.join("low.raw"), raw).unwrap();
    let middle = folder.join("middle.qcow2");
    let middle = middle.to_str().unwrap();
    let other = "cluster_size=16k,lazy_refcounts=on";
    let made = qemu(&["create", "-f", "qcow2", "-o", other, "-b", "low.raw", "-F", "raw", middle])
        && qemu(&[
            "create",
            "-f",
            "qcow2",
            "-o",
            &options,
            "-b",
            "middle.qcow2",
            "-F",
            "qcow2",
            name,
        ])
        && qemu(&["resize", "-f", "qcow2", name, &size]);
    made.then_some(path)
}

/// With a journal, which the next process would put into the image if this one died.
fn open_with_journal(mut disk: Disk) -> Disk {
    let state = tempfile::tempfile().unwrap();
    state.set_len(STATE_FILE_BYTES).unwrap();
    disk.keep_state(&state, Arc::new(())).unwrap();
    disk.defer_entries();
    disk.map_image().unwrap();
    disk
}

/// Through the page cache, or by direct I/O in blocks of so many bytes and with a journal.
fn open_for(path: &Path, block: Option<u32>) -> Option<Disk> {
    let Some(block) = block else { return Some(open(&options(path)).unwrap()) };
    let mut options = options(path);
    options.cache = Some(CacheMode::None);
    let mut parts = match open_unmapped(&options) {
        Ok(disk) => disk.into_parts(),
        Err(error @ OpenError::NoDirect { .. }) => {
            skip(Need::Direct, error.to_string());
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    // As on a disk with larger blocks than this one.
    assert!(parts.alignment.offset <= block && parts.alignment.memory <= block);
    parts.alignment = Alignment { memory: block, offset: block };
    Some(open_with_journal(Disk::from(parts)))
}

fn random_work<E: Engine>(name: &str, engine: impl Fn() -> E) {
    random_work_in_blocks(name, engine, None);
}

fn random_work_in_blocks<E: Engine>(name: &str, engine: impl Fn() -> E, block: Option<u32>) {
    let mut rng = Rng::for_test(name);
    for nth in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let small = block.is_none_or(|block| block == 512);
        let Some(path) = image(&mut rng, folder.path(), nth, small) else { return };
        let mut model = content(&path);
        for durable in [false, true] {
            let Some(disk) = open_for(&path, block) else { return };
            assert_eq!(disk.capacity(), BYTES as u64);
            let mut bench = Bench::new(disk, engine(), durable);
            // Each round waits for the disk several times.
            work(&mut rng, &mut bench, &mut model, if block.is_some() { 12 } else { 40 });
            drop(bench);
            assert!(qemu(&["check", "-f", "qcow2", path.to_str().unwrap()]));
            let found = content(&path);
            let differs = |sector: &usize| {
                let range = sector * 512..sector * 512 + 512;
                found[range.clone()] != model[range]
            };
            assert_eq!((0..BYTES / 512).find(differs), None, "the first sector that differs");
        }
    }
}

/// What a power cut would leave of it is what is in its file.
#[test]
fn c38_entries_are_in_the_file_before_a_flush_or_a_durable_write_is_answered() {
    for durable in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (path, cut) = (folder.path().join("top.qcow2"), folder.path().join("cut.qcow2"));
        std::fs::write(folder.path().join("base.raw"), vec![0xba; BYTES]).unwrap();
        let name = path.to_str().unwrap();
        let base = ["-b", "base.raw", "-F", "raw"];
        if !qemu(&[&["create", "-f", "qcow2"][..], &base, &[name]].concat()) {
            return;
        }
        let disk = open_with_journal(open_unmapped(&options(&path)).unwrap());
        let setup = ThreadsSetup { depth: 64, threads: 4, cached_inline: false };
        let mut bench = Bench::new(disk, Threads::new(setup).unwrap(), durable);
        let mut model = vec![0xba; BYTES];
        let found = || {
            std::fs::copy(&path, &cut).unwrap();
            content(&cut)
        };
        let flush = Asked { op: Op::Flush, at: 0, len: 0, byte: 0 };
        for round in 1..5_u8 {
            let writes: Vec<Asked> = (0..8)
                .map(|nth| (usize::from(round) * 8 + nth) * 131_072)
                .map(|at| Asked { op: Op::Write, at: at % BYTES + 512, len: 4096, byte: round })
                .collect();
            bench.run(&writes);
            for Asked { at, len, .. } in writes {
                model[at..at + len].fill(round);
            }
            // The first ones make a table, which is written at once.
            assert!(round == 1 || (found() == model) == durable, "round {round}");
            bench.run(&[flush.clone(), flush.clone()]);
            assert!(found() == model, "round {round}");
        }
    }
}

#[test]
fn images_hold_what_was_written_by_threads() {
    let setup = ThreadsSetup { depth: 64, threads: 4, cached_inline: false };
    random_work("threads", || Threads::new(setup).unwrap());
}

/// A third of the transfers ends early, or asks to be begun again, wherever in the image it was.
#[test]
fn images_hold_what_was_written_in_short_transfers() {
    let setup = ThreadsSetup { depth: 64, threads: 4, cached_inline: false };
    random_work("short transfers", || {
        let mut nth = 0u32;
        let choose = move |io: &Io<'_>| {
            nth += 1;
            match nth % 9 {
                0 => Some(Fault::Error(libc::EINTR)),
                3 => Some(Fault::Error(libc::EAGAIN)),
                6 if io.op.moves_data() => Some(Fault::Short((io.len as u32 / 2).max(1))),
                _ => None,
            }
        };
        Faulty::new(Threads::new(setup).unwrap(), 1, choose)
    });
}

#[test]
fn images_hold_what_was_written_by_io_uring() {
    if let Err(error) = IoUring::new(IoUringSetup::new(64)) {
        return skip(Need::IoUring, error.to_string());
    }
    random_work("io_uring", || IoUring::new(IoUringSetup::new(64)).unwrap());
}

#[test]
fn c03_images_hold_what_was_written_by_direct_io() {
    let setup = ThreadsSetup { depth: 64, threads: 4, cached_inline: false };
    for block in [512, 4096] {
        random_work_in_blocks("direct", || Threads::new(setup).unwrap(), Some(block));
    }
    if IoUring::new(IoUringSetup::new(64)).is_ok() {
        let engine = || IoUring::new(IoUringSetup::new(64)).unwrap();
        random_work_in_blocks("direct io_uring", engine, Some(4096));
    }
}

/// Requests that lie one behind the other go as one where the image has them so; others go by themselves.
#[test]
fn requests_of_an_image_are_merged_where_they_lie_in_one_piece() {
    let setup = ThreadsSetup { depth: 64, threads: 2, cached_inline: false };
    let mut rng = Rng::for_test("requests_of_an_image_are_merged");
    for nth in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let Some(path) = image(&mut rng, folder.path(), nth, true) else { return };
        let mut model = content(&path);
        let mut options = options(&path);
        options.path = SchedulerMode::Request;
        let disk = open(&options).unwrap();
        assert_eq!(disk.policy().mode(), SchedulerMode::Request);
        let mut bench = Bench::new(disk, Threads::new(setup).unwrap(), false);
        work(&mut rng, &mut bench, &mut model, 40);
        // A cluster that is there: sixteen neighbours.
        let ask = |op, nth: usize| Asked { op, at: nth * 1024, len: 1024, byte: nth as u8 + 1 };
        for op in [Op::Write, Op::Write, Op::Read] {
            let before = bench.queue.stats().path;
            let asked: Vec<_> = (0..16).map(|nth| ask(op, nth)).collect();
            bench.run(&asked);
            let merged = bench.queue.stats().path;
            println!("{op:?}: {before:?} → {merged:?}");
            for (nth, one) in asked.iter().enumerate() {
                let range = one.at..one.at + one.len;
                match op {
                    Op::Write => model[range].fill(one.byte),
                    _ => assert!(bench.bytes(nth, one.len) == &model[range]),
                }
            }
        }
        let path_stats = bench.queue.stats().path;
        assert!(path_stats.merged > 0, "{path_stats:?}");
        drop(bench);
        assert!(qemu(&["check", "-f", "qcow2", path.to_str().unwrap()]));
        assert!(content(&path) == model);
    }
}

/// What the map of an image has in one piece of its file is an operation of the engine there, as a raw disk's
/// request is; zeroes are none. The image's thread is asked for what has no place yet.
#[test]
fn what_has_its_place_is_read_and_written_there() {
    const CLUSTER: usize = 64 << 10;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    let name = path.to_str().unwrap();
    let size = BYTES.to_string();
    if !qemu(&["create", "-f", "qcow2", "-o", "cluster_size=64k", name, &size]) {
        return;
    }
    for mode in [SchedulerMode::Bio, SchedulerMode::Request] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let seer = Arc::clone(&seen);
        let choose = move |io: &Io<'_>| {
            seer.lock().unwrap().push((io.op, io.len as usize));
            None
        };
        let setup = ThreadsSetup { depth: 64, threads: 2, cached_inline: false };
        let engine = Faulty::new(Threads::new(setup).unwrap(), 512, choose);
        let mut options = options(&path);
        (options.path, options.cache) = (mode, Some(CacheMode::Writeback));
        let mut bench = Bench::new(open(&options).unwrap(), engine, false);
        let mut run = |op, at, len| {
            bench.run(&[Asked { op, at, len, byte: 7 }]);
            if op == Op::Read {
                assert!(bench.bytes(0, 512).iter().all(|&byte| byte == 7 || at >= CLUSTER));
            }
            std::mem::take(&mut *seen.lock().unwrap())
        };
        // The first of them finds its place, and after each opening the map has to be read.
        run(Op::Write, 0, CLUSTER);
        run(Op::Read, 0, 512);
        let (read, write) = (IoOp::Read, IoOp::Write);
        assert_eq!(run(Op::Read, 0, CLUSTER), [(read, CLUSTER)], "{mode}");
        assert_eq!(run(Op::Read, 512, 1024), [(read, 1024)], "{mode}");
        assert_eq!(run(Op::Write, 0, CLUSTER), [(write, CLUSTER)], "{mode}");
        assert_eq!(run(Op::Write, 512, 1024), [(write, 1024)], "{mode}");
        assert_eq!(run(Op::Read, CLUSTER - 512, 1024), [(read, 512)], "{mode}: half is nowhere");
        assert_eq!(run(Op::Read, 3 * CLUSTER, CLUSTER), [(read, 0); 0], "{mode}: nor is this");
    }
}

/// Clusters that an internal snapshot has too are written elsewhere, by merged requests as by others.
#[test]
fn merged_writes_leave_what_a_snapshot_holds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    let name = path.to_str().unwrap();
    let size = BYTES.to_string();
    if !qemu(&["create", "-f", "qcow2", "-o", "cluster_size=64k", name, &size]) {
        return;
    }
    let setup = ThreadsSetup { depth: 64, threads: 2, cached_inline: false };
    let bench = || {
        let mut options = options(&path);
        options.path = SchedulerMode::Request;
        Bench::new(open(&options).unwrap(), Threads::new(setup).unwrap(), false)
    };
    let neighbours = |op, byte| -> Vec<_> {
        (0..16).map(|nth| Asked { op, at: nth * 1024, len: 1024, byte: byte + nth as u8 }).collect()
    };
    let mut before = bench();
    before.run(&neighbours(Op::Write, 1));
    drop(before);
    let held = content(&path);
    assert!(qemu(&["snapshot", "-c", "held", name]));

    let mut after = bench();
    // The map says now where the cluster is.
    after.run(&neighbours(Op::Read, 0));
    after.run(&neighbours(Op::Read, 0));
    let stats = after.queue.stats().path;
    assert!(stats.merged > 0, "{stats:?}");
    after.run(&neighbours(Op::Write, 101));
    drop(after);
    assert!(qemu(&["check", "-f", "qcow2", name]));
    let now = content(&path);
    assert!((0..16).all(|nth| now[nth * 1024] == 101 + nth as u8));
    let raw = folder.path().join("held.raw");
    let raw = raw.to_str().unwrap();
    assert!(qemu(&["convert", "-l", "snapshot.name=held", "-f", "qcow2", "-O", "raw", name, raw]));
    assert!(std::fs::read(raw).unwrap() == held, "the snapshot has changed");
}

/// An image whose data are in another file: each is read and written where it belongs, and a flush makes
/// both durable. With `raw` the file is the disk.
#[test]
fn c20_data_files_of_images_are_written() {
    let setup = ThreadsSetup { depth: 64, threads: 2, cached_inline: false };
    let mut rng = Rng::for_test("data_files_of_images");
    for (raw, cache) in [(false, CacheMode::Writeback), (true, CacheMode::Writeback)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("top.qcow2");
        let data = folder.path().join("top.data");
        let more = format!(
            "cluster_size=4k,data_file={},data_file_raw={}",
            data.display(),
            if raw { "on" } else { "off" }
        );
        let size = BYTES.to_string();
        if !qemu(&["create", "-f", "qcow2", "-o", &more, path.to_str().unwrap(), &size]) {
            return;
        }
        let mut model = content(&path);
        let mut options = options(&path);
        options.cache = Some(cache);
        for durable in [false, true] {
            let disk = open(&options).unwrap();
            let mut bench = Bench::new(disk, Threads::new(setup).unwrap(), durable);
            work(&mut rng, &mut bench, &mut model, 30);
            let flush = Asked { op: Op::Flush, at: 0, len: 0, byte: 0 };
            bench.run(&[flush]);
            drop(bench);
            assert!(qemu(&["check", "-f", "qcow2", path.to_str().unwrap()]));
            assert!(content(&path) == model);
            assert!(!raw || std::fs::read(&data).unwrap() == model);
        }
    }
}

#[test]
fn what_an_image_with_a_map_cannot_do_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    if !qemu(&["create", "-f", "qcow2", path.to_str().unwrap(), "8M"]) {
        return;
    }
    let refused = |change: &dyn Fn(&mut OpenOptions)| {
        let mut options = options(&path);
        change(&mut options);
        let error = open(&options).unwrap_err();
        assert!(matches!(error, OpenError::NotQcow2 { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(&|options| options.create_bytes = Some(1 << 20)).contains("--size"));
    let disk = open(&options(&path)).unwrap();
    assert!(matches!(disk.next_size(Some(4 << 20)), Err(ResizeError::Image)));
    assert_eq!(
        (disk.next_size(Some(16 << 20)).unwrap(), disk.next_size(None).unwrap()),
        (16 << 20, 8 << 20)
    );
    // One who writes, or any number who read: of backing files, too.
    let error = open(&options(&path)).unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    let other = folder.path().join("other.qcow2");
    let name = other.to_str().unwrap();
    assert!(qemu(&["create", "-f", "qcow2", "-b", "top.qcow2", "-F", "qcow2", "-u", name, "8M"]));
    let error = open(&options(&other)).unwrap_err();
    assert!(matches!(error, OpenError::Chain(_)), "{error}");
    drop(disk);
    assert!(open(&options(&other)).is_ok());
}

/// Between the header that names what was merged into and the disk that is opened anew.
#[test]
fn c30_no_snapshot_is_taken_of_what_was_not_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, on) in [("base", None), ("middle", Some("base")), ("top", Some("middle"))] {
        let path = at(name);
        let backing: Vec<_> = on.iter().flat_map(|on| ["-F", "qcow2", "-b", on]).collect();
        let rest = [path.to_str().unwrap(), "8M"];
        if !qemu(&[&["create", "-q", "-f", "qcow2"], &backing[..], &rest].concat()) {
            return;
        }
    }
    let disk = open(&options(&at("top"))).unwrap();
    let bases = Bases::default();
    let read = disk.base_to_write(false).unwrap();
    let writable = File::options().read(true).write(true).open(at("base")).unwrap();
    let base = LockedBase::new(read.file, writable, &bases).unwrap();
    let merge = || {
        let (mut commit, image) = disk.commit(&base, &bases).unwrap();
        assert_eq!(commit.copy(0, u64::MAX).unwrap().next, BYTES as u64);
        let written = commit.finish().unwrap();
        image.skip_middle().unwrap();
        (commit, written)
    };
    disk.overlay_shape().unwrap();
    drop(merge());
    assert!(matches!(disk.overlay_shape(), Err(NoSnapshot::Unfinished)));
    assert!(matches!(disk.base_to_write(true), Err(NotCommitted::Unfinished)));
    // Once more, and to the end.
    disk.base_to_write(false).unwrap();
    let (commit, written) = merge();
    let beneath = disk.base_without_middle(&base, written, &bases).unwrap();
    drop(disk.leave_middle(&beneath).unwrap());
    commit.give_back().unwrap();
    disk.overlay_shape().unwrap();
    assert!(disk.base_to_write(true).is_ok());
    assert!(matches!(disk.base_to_write(false), Err(NotCommitted::NoMiddle)));
}

/// It would keep the former base below the snapshot, which is not needed any more, and may be overwritten.
#[test]
fn c72_no_snapshot_is_taken_of_a_flattened_disk_that_was_not_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("top.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![7; BYTES]).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let disk = open(&options(&path)).unwrap();
    let flatten = || {
        let image = disk.image_to_flatten().unwrap();
        assert_eq!(image.pull(0, u64::MAX >> 1).unwrap().next, BYTES as u64);
        image.detach().unwrap();
    };
    disk.overlay_shape().unwrap();
    flatten();
    assert!(matches!(disk.overlay_shape(), Err(NoSnapshot::Detached)));
    // Once more, and to the end.
    flatten();
    drop(disk.leave_backing().unwrap());
    disk.overlay_shape().unwrap();
}

/// Whoever may use the image may use it on.
#[test]
fn c77_a_new_image_on_top_belongs_to_whom_the_old_one_does() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let path = folder.path().join("vm.qcow2");
    let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing: None };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let named = rustix::fs::XattrFlags::empty();
    let has_attributes = rustix::fs::setxattr(&path, "user.tenant", b"seven", named).is_ok();
    // A list: the owner, user 107, the group, the mask, others.
    let entry = |tag: u16, may: u16, id: u32| {
        [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let list = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 6, u32::MAX),
        entry(2, 6, 107),
        entry(4, 4, u32::MAX),
        entry(16, 6, u32::MAX),
        entry(32, 0, u32::MAX),
    ];
    let access = "system.posix_acl_access";
    let has_lists = rustix::fs::setxattr(&path, access, &list.concat(), named).is_ok();
    let is_root = std::os::unix::fs::chown(&path, Some(1234), Some(1235)).is_ok();
    let before = path.metadata().unwrap();
    let disk = open(&options(&path)).unwrap();
    let shape = disk.overlay_shape().unwrap();
    let snapshot = Path::new("snapshot.qcow2");
    let (_new, layer, _) =
        ringway_disk::NewOverlay::make(&path, &disk.file(), snapshot, shape).unwrap();
    let after = layer.file.metadata().unwrap();
    assert_ne!(before.ino(), after.ino());
    let facts = |meta: &std::fs::Metadata| (meta.mode(), meta.uid(), meta.gid());
    assert_eq!(facts(&before), facts(&after));
    let has = |name: &str, value: &[u8]| {
        let mut found = [0; 256];
        let len = rustix::fs::fgetxattr(&layer.file, name, &mut found[..]).unwrap();
        assert!(&found[..len] == value, "{name}");
    };
    if has_attributes {
        has("user.tenant", b"seven");
    }
    if has_lists {
        has(access, &list.concat());
    }
    if !is_root {
        skip(Need::Root, "owners");
    }
}

/// A snapshot is not taken, and its names have changed meanwhile: no file loses its last one.
#[test]
fn c110_names_are_given_back_only_if_they_are_as_they_were_taken() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let (path, snapshot) = (folder.path().join("vm.qcow2"), folder.path().join("snapshot"));
    let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing: None };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let inode = |path: &Path| path.metadata().unwrap().ino();
    let old = inode(&path);
    let named = || {
        let disk = open(&options(&path)).unwrap();
        let shape = disk.overlay_shape().unwrap();
        let made =
            ringway_disk::NewOverlay::make(&path, &disk.file(), Path::new("snapshot"), shape);
        let mut made = made.unwrap().0;
        made.take_name().unwrap();
        assert_eq!(inode(&snapshot), old);
        made
    };
    named().undo().unwrap();
    assert!(inode(&path) == old && !snapshot.exists());
    let made = named();
    let new = inode(&path);
    std::fs::rename(&snapshot, folder.path().join("elsewhere")).unwrap();
    std::fs::write(&snapshot, "somebody else's").unwrap();
    assert!(made.undo().is_err());
    assert_eq!(inode(&path), new);
    assert_eq!(std::fs::read(&snapshot).unwrap(), b"somebody else's");
}

/// A snapshot was not taken, and its names could not be given back: who comes next may find the new image, so nothing
/// waits beside the old one.
#[test]
fn c112_a_disk_whose_names_have_not_come_back_has_no_journal() {
    for stays in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.qcow2");
        let new = NewImage { virtual_size: BYTES as u64, cluster_bits: 16, backing: None };
        new.write(&File::create_new(&path).unwrap()).unwrap();
        let disk = open_with_journal(open_unmapped(&options(&path)).unwrap());
        let setup = ThreadsSetup { depth: 64, threads: 4, cached_inline: false };
        let mut bench = Bench::new(disk, Threads::new(setup).unwrap(), false);
        let write = |bench: &mut Bench<Threads>, nth: usize| {
            bench.run(&[Asked { op: Op::Write, at: nth << 16, len: 4096, byte: 1 }]);
            std::fs::read(&path).unwrap()[88..96] != [0; 8]
        };
        // The first one makes a table.
        write(&mut bench, 0);
        assert!(write(&mut bench, 1), "it has a journal");
        let (without_journal, left) = bench.queue.disk().without_journal();
        left.unwrap();
        assert!(!write(&mut bench, 2));
        match stays {
            true => without_journal.stay(),
            false => drop(without_journal),
        }
        assert_eq!(write(&mut bench, 3), !stays);
    }
}
