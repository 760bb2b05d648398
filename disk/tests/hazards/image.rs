//! Disks of images with a map: which requests go to a file, where, and which to the image's thread.

// Bytes of a small disk.
#![allow(clippy::cast_possible_truncation)]

use crate::bench::{Ask, BELL, Bench, Memory, engine};
use ringway_aio::{Engine, Fault, Faulty, FileId, Io, IoOp};
use ringway_core::{Op, Status};
use ringway_disk::open::open_unmapped;
use ringway_disk::{Alignment, CacheMode, Disk, OpenOptions, Qcow2, SchedulerMode, Source};
use ringway_image::{Format, NewImage};
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;
const BYTES: u64 = 1 << 20;
const FLUSH: Ask = Ask { op: Op::Flush, offset: 0, len: 0, at: 0, unmap: false };

/// What an engine was asked for: what, which file, where in it, how long, in how many pieces.
type Asked = (IoOp, FileId, u64, u64, usize);
type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;

#[derive(Default)]
struct Script {
    asked: Vec<Asked>,
    /// What befalls the next operations, one after the other.
    faults: VecDeque<Fault>,
}

/// An image on a file with other content, and a queue on it. The first two clusters were written.
struct Scene {
    // Before the memory that its thread may use.
    bench: Bench<Faulty<Box<dyn Engine>, Choice>>,
    memory: Memory,
    script: Arc<Mutex<Script>>,
    /// What is on the disk.
    model: Vec<u8>,
    folder: TempDir,
}

fn make(folder: &Path) -> PathBuf {
    let path = folder.join("top.qcow2");
    let base: Vec<u8> = (0..BYTES / 2).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(folder.join("base.raw"), base).unwrap();
    let backing = Some((Path::new("base.raw"), Format::Raw));
    let new = NewImage { virtual_size: BYTES, cluster_bits: CLUSTER.ilog2(), backing };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    path
}

/// An image whose data are in a file of their own.
fn make_with_data_file(folder: &Path) -> PathBuf {
    let path = folder.join("top.qcow2");
    let new = NewImage { virtual_size: BYTES, cluster_bits: CLUSTER.ilog2(), backing: None };
    let image = File::create_new(&path).unwrap();
    new.write(&image).unwrap();
    File::create_new(folder.join("data")).unwrap();
    // The incompatible feature, and the extension that names the file, behind a header of 112 bytes.
    image.write_all_at(&4_u64.to_be_bytes(), 72).unwrap();
    image.write_all_at(b"DATA\0\0\0\x04data\0\0\0\0", 112).unwrap();
    path
}

impl Scene {
    fn new(path: SchedulerMode, max_bytes: u32) -> Self {
        let mut scene = Self::on(make, path, None, max_bytes);
        let base = std::fs::read(scene.folder.path().join("base.raw")).unwrap();
        scene.model[..base.len()].copy_from_slice(&base);
        scene.write(0, 2 * CLUSTER, 0xa0);
        assert_eq!(scene.take(), [], "clusters that are not there are made by the thread");
        scene
    }

    /// On an image that `make` makes, in a folder; its files take what is aligned so.
    fn on(
        make: impl FnOnce(&Path) -> PathBuf,
        path: SchedulerMode,
        alignment: Option<Alignment>,
        max_bytes: u32,
    ) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut options = OpenOptions::new(Source::Path(make(folder.path())));
        (options.qcow2, options.path) = (Some(Qcow2::default()), path);
        options.cache = Some(CacheMode::Writeback);
        let mut parts = open_unmapped(&options).unwrap().into_parts();
        parts.alignment = alignment.unwrap_or(parts.alignment);
        let mut disk = Disk::from(parts);
        disk.map_image().unwrap();
        let script: Arc<Mutex<Script>> = Arc::default();
        let seer = Arc::clone(&script);
        let choose: Choice = Box::new(move |io| {
            let mut script = seer.lock().unwrap();
            script.asked.push((io.op, io.file, io.offset, io.len, io.memory.segments().len()));
            script.faults.pop_front()
        });
        let engine = Faulty::new(engine("threads", 64).unwrap(), 1, choose);
        let bench = Bench::limited(engine, Arc::new(disk), 32, |limits| {
            limits.max_bytes = limits.max_bytes.min(max_bytes);
        });
        let (memory, model) = (Memory::new(BYTES as usize, 0), vec![0; BYTES as usize]);
        Self { bench: bench.unwrap(), memory, script, model, folder }
    }

    fn plain() -> Self {
        Self::new(SchedulerMode::Bio, u32::MAX)
    }

    fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut self.script.lock().unwrap().asked)
    }

    /// What the engine was asked for, without where.
    fn ops(&self) -> Vec<(IoOp, u64)> {
        self.take().iter().map(|asked| (asked.0, asked.3)).collect()
    }

    #[track_caller]
    fn write(&mut self, offset: u64, len: u64, byte: u8) {
        let range = offset as usize..(offset + len) as usize;
        self.model[range.clone()].fill(byte);
        self.memory.bytes()[range].fill(byte);
        let ask = Ask::new(Op::Write, offset, len).at(offset as usize);
        assert_eq!(self.bench.one(&self.memory, ask), Status::Ok);
    }

    /// Reads, and compares with the model.
    #[track_caller]
    fn read(&mut self, offset: u64, len: u64) {
        self.memory.bytes().fill(0xee);
        let ask = Ask::new(Op::Read, offset, len).at(offset as usize);
        assert_eq!(self.bench.one(&self.memory, ask), Status::Ok);
        let range = offset as usize..(offset + len) as usize;
        assert!(self.memory.bytes()[range.clone()] == self.model[range.clone()], "{range:?}");
        let (before, behind) = (&self.memory.bytes()[..range.start].to_vec(), range.end);
        assert!(before.iter().chain(&self.memory.bytes()[behind..]).all(|&byte| byte == 0xee));
    }

    fn errors(&self) -> Vec<(i32, u64)> {
        let incidents = self.bench.queue.disk().incidents();
        let all = (0..ringway_disk::Incidents::KINDS).filter_map(|kind| incidents.take(kind));
        all.map(|failures| (failures.errno, failures.count)).collect()
    }
}

#[test]
fn what_lies_in_a_file_is_read_and_written_there() {
    let mut scene = Scene::plain();
    let top = scene.bench.queue.file();
    scene.write(8192, 4096, 0xb1);
    let asked = scene.take();
    assert_eq!(asked.len(), 1, "{asked:?}");
    let (op, file, offset, len, _) = asked[0];
    assert_eq!((op, file, len), (IoOp::Write, top, 4096));
    let mut found = vec![0; 4096];
    let path = scene.folder.path().join("top.qcow2");
    File::open(path).unwrap().read_exact_at(&mut found, offset).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xb1));
    // All of it in one piece; across the end of a cluster and of what was written.
    scene.read(8192, 4096);
    assert_eq!(scene.take(), [(IoOp::Read, top, offset, 4096, 1)]);
    scene.read(4096, 8192);
    assert_eq!(scene.take(), [(IoOp::Read, top, offset - 4096, 8192, 1)]);
    // Below it is another file, in which it lies where it is on the disk.
    scene.read(4 * CLUSTER, 4096);
    scene.take();
    scene.read(4 * CLUSTER + 512, 4096);
    let asked = scene.take();
    assert_eq!((asked.len(), asked[0].2, asked[0].3), (1, 4 * CLUSTER + 512, 4096));
    assert_ne!(asked[0].1, top);
    // Nowhere: behind the end of that.
    scene.read(BYTES - CLUSTER, CLUSTER);
    scene.take();
    scene.read(BYTES - CLUSTER, CLUSTER);
    assert_eq!(scene.take(), []);
    // In both, and nowhere.
    scene.read(0, BYTES);
    assert_eq!(scene.bench.queue.stats().errors, 0);
}

/// The engine's limits hold wherever a cluster lies, and what ends early goes on where it ended.
#[test]
fn pieces_in_a_file_keep_within_limits_and_go_on() {
    let mut scene = Scene::new(SchedulerMode::Bio, 20_480);
    for op in [IoOp::Write, IoOp::Read] {
        let mut go = || match op {
            IoOp::Read => scene.read(4096, 3 * 20_480 - 4096),
            _ => scene.write(4096, 3 * 20_480 - 4096, 0xc1),
        };
        go();
        assert_eq!(scene.ops(), [(op, 20_480), (op, 20_480), (op, 16_384)]);
    }
    let faults = [Fault::Error(libc::EINTR), Fault::Short(1000), Fault::Error(libc::EAGAIN)];
    let right = [4096, 4096, 3096, 3096].map(|len| (IoOp::Write, len));
    scene.script.lock().unwrap().faults.extend(faults);
    scene.write(8192, 4096, 0xc2);
    assert_eq!(scene.ops(), right);
    scene.script.lock().unwrap().faults.extend(faults);
    scene.read(8192, 4096);
    assert_eq!(scene.ops(), right.map(|(_, len)| (IoOp::Read, len)));
    assert_eq!(scene.bench.queue.stats().continued, 6);
    scene.read(0, BYTES);
}

/// What says where a cluster is has to be as durable as what is in it: a sync follows every durable
/// write, whoever has written.
#[test]
fn durable_writes_to_an_image_are_followed_by_a_sync() {
    let mut scene = Scene::plain();
    for (durable, syncs) in [(false, 0), (true, 1)] {
        scene.bench.queue.set_durable_writes(durable);
        let sync = &[(IoOp::Sync, 0)][..syncs];
        scene.write(0, 4096, 0xd1);
        assert_eq!(scene.ops(), [&[(IoOp::Write, 4096)], sync].concat());
        // By the thread.
        scene.write((3 + syncs as u64) * CLUSTER, 4096, 0xd2);
        assert_eq!(scene.ops(), sync);
        let zeroes = Ask::new(Op::WriteZeroes, 4096, 4096);
        scene.model[4096..8192].fill(0);
        assert_eq!(scene.bench.one(&scene.memory, zeroes), Status::Ok);
        assert_eq!(scene.ops(), sync);
        scene.read(0, 4096);
        assert_eq!(scene.ops(), [(IoOp::Read, 4096)]);
    }
    assert_eq!(scene.bench.one(&scene.memory, FLUSH), Status::Ok);
    assert_eq!(scene.ops(), [(IoOp::Sync, 0)]);
    scene.read(0, BYTES);
}

/// Neighbours go as one where the image has them in one piece; else each by itself, and all arrive.
#[test]
fn neighbours_in_an_image_are_merged_if_it_has_them_in_one_piece() {
    let mut scene = Scene::new(SchedulerMode::Request, u32::MAX);
    // Within the first cluster; across the end of the second, behind which nothing was written.
    for (first, in_one_piece) in [(0, true), (2 * CLUSTER - 16_384, false)] {
        for (op, io_op) in [(Op::Write, IoOp::Write), (Op::Read, IoOp::Read)] {
            if op == Op::Read {
                scene.memory.bytes().fill(0xee);
            }
            for n in 0..8 {
                let offset = first + n * 4096;
                let range = offset as usize..offset as usize + 4096;
                if op == Op::Write {
                    scene.model[range.clone()].fill(n as u8 + 1);
                    scene.memory.bytes()[range.clone()].fill(n as u8 + 1);
                }
                scene.bench.start(&scene.memory, Ask::new(op, offset, 4096).at(range.start), n);
            }
            let answers = scene.bench.finish();
            assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{op:?} {first}");
            assert_eq!(answers.len(), 8);
            let asked = scene.take();
            let one = asked.len() == 1 && (asked[0].0, asked[0].3) == (io_op, 8 * 4096);
            // Once written, the clusters are neighbours in the file too.
            assert_eq!(one, in_one_piece || op == Op::Read, "{op:?} {first}: {asked:?}");
            let range = first as usize..first as usize + 8 * 4096;
            let bytes = &scene.memory.bytes()[range.clone()];
            assert!(*bytes == scene.model[range], "{op:?} {first}");
        }
    }
    // A durable write has its own sync, so it is no part of another one.
    scene.bench.queue.set_durable_writes(true);
    for n in 0..2 {
        let at = n as usize * 4096;
        scene.memory.bytes()[at..at + 4096].copy_from_slice(&scene.model[at..at + 4096]);
        scene.bench.start(&scene.memory, Ask::new(Op::Write, n * 4096, 4096).at(at), n);
    }
    assert!(scene.bench.finish().iter().all(|answer| answer.status == Status::Ok));
    let writes = scene.ops().iter().filter(|op| **op == (IoOp::Write, 4096)).count();
    assert_eq!(writes, 2);
    scene.read(0, BYTES);
}

/// A sync begins with the file that has the data, also when it begins again.
#[test]
fn a_sync_of_an_image_begins_with_its_data_file() {
    let mut scene = Scene::on(make_with_data_file, SchedulerMode::Bio, None, u32::MAX);
    scene.write(0, CLUSTER, 0xe1);
    scene.take();
    scene.write(4096, 4096, 0xe2);
    let data = scene.take()[0].1;
    let top = scene.bench.queue.file();
    assert_ne!(data, top);
    for interrupted in [None, Some(0), Some(1)] {
        if let Some(first) = interrupted {
            let mut script = scene.script.lock().unwrap();
            script
                .faults
                .extend([Fault::Short(1), Fault::Error(libc::EINTR)].into_iter().skip(1 - first));
        }
        assert_eq!(scene.bench.one(&scene.memory, FLUSH), Status::Ok);
        let files: Vec<_> = scene.take().iter().map(|asked| (asked.0, asked.1)).collect();
        let begun = interrupted.map_or(0, |first| first + 1);
        let right = [&[data, top][..begun], &[data, top]].concat();
        assert_eq!(files, right.iter().map(|&file| (IoOp::Sync, file)).collect::<Vec<_>>());
    }
    scene.read(0, BYTES);
    let data = std::fs::read(scene.folder.path().join("data")).unwrap();
    assert_eq!(data.iter().filter(|&&byte| byte == 0xe2).count(), 4096);
}

/// What the files do not take goes by the image's thread, which has memory that they take.
#[test]
fn what_the_files_of_an_image_do_not_take_goes_by_its_thread() {
    let blocks = Some(Alignment { memory: 512, offset: 4096 });
    for path in [SchedulerMode::Bio, SchedulerMode::Request] {
        let mut scene = Scene::on(make, path, blocks, u32::MAX);
        scene.memory.bytes().fill(0xf0);
        assert_eq!(scene.bench.one(&scene.memory, Ask::new(Op::Write, 0, CLUSTER)), Status::Ok);
        scene.take();
        let mut bounced = 0;
        for (offset, len, at, direct) in [
            (8192, 4096, 0, true),
            (8192, 4096, 512, true),
            (8192, 4096, 513, false),
            (8192 + 512, 4096, 0, false),
            (8192, 512, 0, false),
            (8192 + 512, 512, 1, false),
        ] {
            for op in [Op::Write, Op::Read] {
                let what = format!("{path}: {op:?} {offset} {len} {at}");
                let byte = if op == Op::Write { 0xf1 } else { 0xee };
                scene.memory.bytes().fill(byte);
                let ask = Ask::new(op, offset, len).at(at);
                assert_eq!(scene.bench.one(&scene.memory, ask), Status::Ok, "{what}");
                let io_op = if op == Op::Write { IoOp::Write } else { IoOp::Read };
                let right = if direct { vec![(io_op, len)] } else { Vec::new() };
                assert_eq!(scene.ops(), right, "{what}");
                bounced += u64::from(!direct);
                assert_eq!(scene.bench.queue.stats().bounced, bounced, "{what}");
                let found = &scene.memory.bytes()[at..at + len as usize];
                assert!(found.iter().all(|&byte| byte == 0xf1), "{what}");
            }
        }
    }
}

/// Without its thread an image answers nothing, and says so; nobody waits for it.
#[test]
fn an_image_without_its_thread_fails_requests() {
    for detach in [false, true] {
        let mut scene = Scene::plain();
        scene.read(0, 4096);
        if detach {
            scene.bench.queue.detach_image(&mut scene.bench.engine, BELL);
        } else {
            scene.bench.queue.close_image();
        }
        scene.take();
        for (count, (op, offset)) in
            (1..).zip([(Op::Read, 0), (Op::Write, 0), (Op::Write, 5 * CLUSTER)])
        {
            let ask = Ask::new(op, offset, 4096);
            assert_eq!(scene.bench.one(&scene.memory, ask), Status::IoError, "{op:?} {offset}");
            let errors = scene.errors();
            assert_eq!(errors, [(0, 1)], "{op:?} {offset}");
            assert_eq!(scene.bench.queue.stats().errors, count);
        }
        assert_eq!(scene.take(), []);
    }
}

/// Engines that see doorbells by a system call look at them now and then; what the image's thread has answered is in
/// memory, and is looked at each turn.
#[test]
fn a27_answers_of_an_images_thread_are_found_without_its_bell() {
    let mut scene = Scene::plain();
    let ask = Ask::new(Op::Write, 9 * CLUSTER, 4096);
    scene.bench.start(&scene.memory, ask, 0);
    assert!(scene.bench.queue.has_deferred() && !scene.bench.queue.has_to_look(), "its bell rings");
    let begun = std::time::Instant::now();
    let answer = loop {
        scene.bench.queue.retry(&mut scene.bench.engine, 16);
        if let Some(answer) = scene.bench.queue.take_late() {
            break answer;
        }
        assert!(begun.elapsed().as_secs() < 60, "it is not looked at");
        std::thread::yield_now();
    };
    assert_eq!((answer.status, scene.bench.queue.has_deferred()), (Status::Ok, false));
}
