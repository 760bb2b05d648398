//! Every storage passes the one contract suite.

use crate::bench::engine;
use ringway_aio::sim::{Model, Sim, SimSetup};
use ringway_aio::{Engine, Immediate, Io, IoOp, Null, Threads, ThreadsSetup};
use ringway_disk::storage::contract::Suite;
use ringway_disk::{
    Alignment, CacheMode, CustomDisk, Disk, EngineKind, OpenOptions, SimModel, Source, open,
};
use ringway_testkit::LoopDevice;
use ringway_testkit::nbd::NbdRig;
use ringway_testkit::rig::{RigOptions, image};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BYTES: u64 = 16 << 20;

/// The engine that a worker would have for it.
fn its_own(disk: &Disk, depth: u32) -> Box<dyn Engine> {
    match disk.engine() {
        EngineKind::Own(own) => (own.make)(depth).unwrap(),
        EngineKind::Null => Box::new(Null::new(depth).unwrap()),
        EngineKind::Sim(_) => {
            let threads = Threads::new(ThreadsSetup::new(depth)).unwrap();
            Box::new(Sim::new(threads, SimSetup::new(Model::RAM)))
        }
        other => engine(other.name(), depth).unwrap_or_else(|_| engine("threads", depth).unwrap()),
    }
}

fn run(options: &OpenOptions, moves_data: bool) {
    Suite { open: &|| open(options), engine: &its_own, moves_data }.run();
}

fn path(path: PathBuf, cache: CacheMode) -> OpenOptions {
    let mut options = OpenOptions::new(Source::Path(path));
    options.cache = Some(cache);
    options
}

#[test]
fn f54_a_file_passes_the_contract() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run(&path(image(folder.path(), BYTES), CacheMode::Writeback), true);
    let direct = path(image(folder.path(), BYTES), CacheMode::None);
    match open(&direct).map(drop) {
        Ok(()) => run(&direct, true),
        Err(error) => println!("without O_DIRECT: {error}"),
    }
}

#[test]
fn f54_a_device_passes_the_contract() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = match LoopDevice::new(folder.path(), BYTES, 4096) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let mut options = path(device.path().into(), CacheMode::None);
    run(&options, true);
    options.block_size = Some(512);
    run(&options, true);
}

#[test]
fn f54_an_export_passes_the_contract() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = image(folder.path(), BYTES);
    // It hears later than the next one comes that a client has gone.
    let rig = RigOptions::buffered(&image, EngineKind::Threads).queues(16, 1);
    let server = NbdRig::start(&rig, Duration::from_secs(60));
    let name = format!("nbd:unix:{}:disk", server.socket().display());
    run(&OpenOptions::new(Source::Nbd(name.parse().unwrap())), true);
}

#[test]
fn f54_what_nobody_keeps_passes_the_contract() {
    run(&OpenOptions::new(Source::Null { bytes: BYTES, latency_us: 0 }), false);
    // Each opening makes a new one.
    run(&OpenOptions::new(Source::Sim { model: SimModel::Ram, bytes: BYTES }), true);
}

#[test]
fn f54_a_disk_of_the_callers_own_passes_the_contract() {
    let sectors = Arc::new(Mutex::new(vec![0u8; usize::try_from(BYTES).unwrap()]));
    let carry_out = move |io: &Io<'_>| {
        let mut sectors = sectors.lock().unwrap();
        let mut at = usize::try_from(io.offset).unwrap();
        for segment in io.memory.segments() {
            let ours = sectors[at..at + segment.len].as_mut_ptr();
            let (from, to) =
                if io.op == IoOp::Read { (ours, segment.base) } else { (segment.base, ours) };
            // SAFETY: both are mapped, as long as this, and apart.
            unsafe { to.copy_from_nonoverlapping(from, segment.len) };
            at += segment.len;
        }
        if matches!(io.op, IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard) {
            sectors[at..at + usize::try_from(io.len).unwrap()].fill(0);
        }
        i32::try_from(at - usize::try_from(io.offset).unwrap()).unwrap()
    };
    let plain = CustomDisk::new(BYTES);
    let aligned = CustomDisk {
        alignment: Alignment { memory: 512, offset: 4096 },
        block_device: true,
        ..plain
    };
    for shape in [plain, aligned] {
        let engine = |_: &Disk, depth| -> Box<dyn Engine> {
            Box::new(Immediate::new(depth, carry_out.clone()).unwrap())
        };
        Suite { open: &|| shape.open(Some("mine")), engine: &engine, moves_data: true }.run();
    }
}
