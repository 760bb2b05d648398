//! What of flushes and pauses outlives the process that serves a disk: the page that its successor reads.

use crate::bench::{Ask, Bench, Memory, Place, Surface, engine};
use ringway_aio::{Fault, Faulty, Io, IoOp};
use ringway_core::{Op, Status};
use ringway_disk::{
    CustomDisk, Disk, OpenOptions, Qcow2, STATE_BYTES, STATE_FLUSH_FAILED, STATE_FLUSHING, Source,
};
use ringway_image::{CheckOptions, Header, NewImage};
use ringway_testkit::Thin;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, UNIX_EPOCH};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const CAPACITY: u64 = 64 << 10;
/// As the page says it; no word of the crate's interface.
const PAUSED: u64 = 4;

/// So often something is said again that failed for want of room: the host may have tried to store more of it meanwhile,
/// of which whoever opens the file next is told.
const TIMES: usize = 4;

/// The page beside a disk, which stays when its process is gone.
struct Page(File);

impl Page {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(STATE_BYTES).unwrap();
        Self(file)
    }

    fn word(&self) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn leave(&self, word: u64) {
        self.0.write_all_at(&word.to_ne_bytes(), 0).unwrap();
    }

    /// The disk as the next process has it, and how many warnings came with that.
    fn serve(&self, place: &Place) -> (Arc<Disk>, usize) {
        let disk = Arc::into_inner(place.open()).expect("nobody else has it");
        let warnings = Warnings::default();
        let counted = Arc::clone(&warnings.0);
        tracing::subscriber::with_default(warnings, || {
            disk.keep_state(&self.0, Arc::new(())).unwrap();
        });
        (Arc::new(disk), counted.load(SeqCst))
    }
}

/// Counts warnings.
#[derive(Default)]
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, SeqCst);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn place(surface: Surface) -> Option<Place> {
    Place::new(surface, CAPACITY).map_err(|lack| lack.skip()).ok()
}

const FLUSH: Ask = Ask { op: Op::Flush, offset: 0, len: 0, at: 0, unmap: false };

#[test]
fn c15_a_flush_that_failed_before_fails_until_a_guest_begins_afresh() {
    let memory = Memory::new(4096, 0);
    for surface in [Surface::Cached, Surface::Direct] {
        let Some(place) = place(surface) else { continue };
        for left in [0, STATE_FLUSHING, STATE_FLUSH_FAILED, STATE_FLUSH_FAILED | STATE_FLUSHING] {
            let page = Page::new();
            page.leave(left);
            let (disk, warnings) = page.serve(&place);
            let failed = left & STATE_FLUSH_FAILED;
            // Past the page cache a flush that nobody saw the end of has lost nothing.
            let reported = failed != 0 || (left != 0 && surface == Surface::Cached);
            assert_eq!(warnings, usize::from(reported), "{left} {surface:?}");
            assert_eq!(page.word(), failed, "no flush of this process is under way");
            let mut bench =
                Bench::new(engine("threads", 8).unwrap(), Arc::clone(&disk), 4).unwrap();
            let expected = if failed == 0 { Status::Ok } else { Status::IoError };
            assert_eq!(bench.one(&memory, FLUSH), expected);
            assert_eq!(page.word(), failed, "its guest goes on");
            assert_eq!(disk.forgive_flush(), failed != 0);
            assert_eq!(
                (page.word(), disk.forgive_flush()),
                (0, false),
                "there is no more to forgive"
            );
            assert_eq!(bench.one(&memory, FLUSH), Status::Ok);
        }
    }
}

#[test]
fn c15_a_flush_that_fails_is_kept_for_whoever_serves_the_disk_next() {
    let memory = Memory::new(4096, 0);
    for surface in [Surface::Cached, Surface::Direct] {
        let Some(place) = place(surface) else { continue };
        let page = Page::new();
        page.leave(PAUSED);
        let (disk, _) = page.serve(&place);
        let fails = |io: &Io<'_>| (io.op == IoOp::Sync).then_some(Fault::Error(libc::EIO));
        let faulty = Faulty::new(engine("threads", 8).unwrap(), 512, fails);
        let mut bench = Bench::new(faulty, Arc::clone(&disk), 4).unwrap();
        assert_eq!(bench.one(&memory, FLUSH), Status::IoError);
        assert_eq!(page.word(), PAUSED | STATE_FLUSH_FAILED, "what else is kept stays");
        // This process has seen it itself: no guest of it may rely on a later flush.
        assert!(!disk.forgive_flush());
        assert_eq!(page.word(), PAUSED | STATE_FLUSH_FAILED);
        drop(bench);
        let mut bench = Bench::new(engine("threads", 8).unwrap(), Arc::clone(&disk), 4).unwrap();
        assert_eq!(bench.one(&memory, FLUSH), Status::IoError);
        // Its guest goes on elsewhere, or does not.
        disk.ends(false);
        assert_eq!(page.word(), STATE_FLUSH_FAILED);
        disk.ends(true);
        assert_eq!(page.word(), 0);
    }
}

#[test]
fn c15_a_flush_under_way_is_kept_where_it_goes_through_the_page_cache() {
    let memory = Memory::new(4096, 0);
    for (surface, kept) in [(Surface::Cached, STATE_FLUSHING), (Surface::Direct, 0)] {
        let Some(place) = place(surface) else { continue };
        let page = Page::new();
        let (disk, _) = page.serve(&place);
        let mut bench = Bench::new(engine("threads", 8).unwrap(), Arc::clone(&disk), 4).unwrap();
        for context in 0..2 {
            bench.start(&memory, FLUSH, context);
        }
        // Nobody has looked for their ends yet.
        assert_eq!(page.word(), kept, "{surface:?}");
        // One of the daemon's own waits for that: of the first nobody knows the outcome still.
        std::thread::scope(|scope| {
            let own = scope.spawn(|| disk.sync());
            assert_eq!(page.word(), kept, "{surface:?}");
            assert!(bench.finish().iter().all(|answer| answer.status == Status::Ok));
            own.join().unwrap().unwrap();
        });
        assert_eq!(page.word(), 0, "{surface:?}");
    }
}

#[test]
fn c15_a_pause_is_kept_and_is_no_failed_flush() {
    let Some(place) = place(Surface::Cached) else { return };
    let page = Page::new();
    let (disk, _) = page.serve(&place);
    assert!(!disk.was_paused());
    disk.keep_paused(true);
    drop(disk);
    let (disk, warnings) = page.serve(&place);
    assert_eq!((disk.was_paused(), page.word(), warnings), (true, PAUSED, 0));
    disk.ends(false);
    assert_eq!(page.word(), 0);
    page.leave(STATE_FLUSH_FAILED);
    drop(disk);
    let (disk, _) = page.serve(&place);
    assert!(!disk.was_paused());
    disk.keep_paused(false);
    assert_eq!(page.word(), STATE_FLUSH_FAILED);
}

/// A successor would find it running.
#[test]
fn c97_a_disk_of_which_nothing_is_kept_keeps_no_pause() {
    let null = OpenOptions::new(Source::Null { bytes: CAPACITY, latency_us: 0 });
    assert!(ringway_disk::open(&null).unwrap().can_keep_pause(), "there is nothing to copy");
    let custom = CustomDisk::new(CAPACITY).open(None).unwrap();
    assert!(!custom.can_keep_pause(), "as is an image of a Ceph cluster");
    custom.keep_state(&Page::new().0, Arc::new(())).unwrap();
    custom.keep_paused(true);
    assert!(custom.was_paused());
}

/// The host may have tables in its memory that look as if they were in the file.
#[test]
fn c103_after_a_failed_sync_tables_are_written_again_before_they_are_believed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let new = NewImage { virtual_size: 1 << 20, cluster_bits: 16, backing: None };
    new.write(&file).unwrap();
    let before = UNIX_EPOCH + Duration::from_secs(1000);
    // The last one: it was killed in a sync, and all who could have told with it.
    for left in [0, STATE_FLUSH_FAILED, STATE_FLUSHING] {
        file.set_modified(before).unwrap();
        let page = Page::new();
        page.leave(left);
        let mut options = OpenOptions::new(Source::Path(path.clone()));
        options.qcow2 = Some(Qcow2::default());
        let mut disk = ringway_disk::open::open_unmapped(&options).unwrap();
        disk.keep_state(&page.0, Arc::new(())).unwrap();
        disk.map_image().unwrap();
        let written = file.metadata().unwrap().modified().unwrap() > before;
        assert_eq!((written, page.word()), (left != 0, left & STATE_FLUSH_FAILED));
    }
}

/// An image that each program opens without a state folder: nobody says that a flush has failed.
#[test]
fn c103_where_nothing_is_kept_the_cache_is_not_believed() {
    const AT: u64 = 128 << 20;
    // Of more at a time, the pages that there is room for are enough for the loop device.
    const PAGE: u64 = 4096;
    let (mut failed, mut memory) = (0, Memory::new(4096, 0));
    for room in [0, 4, 8] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut thin = match Thin::new(folder.path()) {
            Ok(thin) => thin,
            Err(lack) => return lack.skip(),
        };
        let new = NewImage { virtual_size: 2 * AT, cluster_bits: 16, backing: None };
        new.write(&File::create_new(thin.path().join("image.qcow2")).unwrap()).unwrap();
        let ask = |thin: &Thin, memory: &Memory, asks: &[Ask]| {
            let mut options = OpenOptions::new(Source::Path(thin.path().join("image.qcow2")));
            options.qcow2 = Some(Qcow2::default());
            let disk = Arc::new(ringway_disk::open(&options).unwrap());
            let mut bench = Bench::new(engine("threads", 8).unwrap(), disk, 4).unwrap();
            asks.iter().all(|ask| bench.one(memory, *ask) == Status::Ok)
        };
        let (flush, write) = (Ask::new(Op::Flush, 0, 0), Ask::new(Op::Write, AT, PAGE));
        memory.bytes().fill(0x33);
        thin.fill(room << 10);
        let first = ask(&thin, &memory, &[write, flush]);
        thin.extend();
        if first {
            continue;
        }
        assert!((0..TIMES).any(|_| ask(&thin, &memory, &[write, flush])), "{room} KiB");
        if let Err(lack) = thin.forget() {
            return lack.skip();
        }
        if std::fs::read(thin.path().join("image.qcow2")).is_err() {
            // What the file system itself could not store.
            continue;
        }
        failed += 1;
        memory.bytes().fill(0);
        assert!(ask(&thin, &memory, &[Ask::new(Op::Read, AT, PAGE)]));
        assert!(memory.bytes().iter().all(|byte| *byte == 0x33), "{room} KiB: it was flushed");
    }
    assert!(failed > 0, "the pool was never full");
}

/// An image that was not closed: its counts of references are made right and cannot be stored, and are made right again.
#[test]
fn c117_counts_that_were_made_right_in_vain_are_not_believed() {
    const CLUSTER: u64 = 4096;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut thin = match Thin::new(folder.path()) {
        Ok(thin) => thin,
        Err(lack) => return lack.skip(),
    };
    let path = thin.path().join("image.qcow2");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let new = NewImage { virtual_size: 64 << 20, cluster_bits: 12, backing: None };
    new.write(&file).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let put = |at: u64, word: u64| file.write_all_at(&word.to_be_bytes(), at).unwrap();
    let (l1, counts) = (word(40), word(48));
    let (block, end) = (word(counts), file.metadata().unwrap().len().div_ceil(CLUSTER));
    // A table, and a second block of counts, which was never written. What it is to count is a cluster of the guest.
    let (l2, second, host) = (end, end + 8, 2100);
    for cluster in [l2, second] {
        file.write_all_at(&1_u16.to_be_bytes(), block + 2 * cluster).unwrap();
    }
    put(counts + 8, second * CLUSTER);
    file.write_all_at(&[0; 4096], l2 * CLUSTER).unwrap();
    put(l2 * CLUSTER + 8 * 16, (host * CLUSTER) | (1 << 63));
    put(l1, (l2 * CLUSTER) | (1 << 63));
    file.write_all_at(&[0x77; 4096], host * CLUSTER).unwrap();
    // Lazy reference counts, and it was not closed.
    put(72, 1);
    put(80, 1);
    drop(file);
    let opens = |path: &Path| {
        let mut options = OpenOptions::new(Source::Path(path.into()));
        options.qcow2 = Some(Qcow2::default());
        ringway_disk::open(&options).map(drop)
    };
    thin.fill(0);
    let error = opens(&path).unwrap_err();
    assert!(error.to_string().contains("reference counts"), "{error}");
    thin.extend();
    assert!((0..TIMES).any(|_| opens(&path).is_ok()));
    if let Err(lack) = thin.forget() {
        return lack.skip();
    }
    let file = File::open(thin.path().join("image.qcow2")).unwrap();
    let bytes = file.metadata().unwrap().len();
    let header = Header::read(&file, bytes).unwrap().unwrap();
    let found = ringway_image::check(&file, &header, bytes, CheckOptions::default());
    let found = found.unwrap().unwrap();
    assert_eq!((found.errors, header.is_dirty()), (0, false), "{found:?}");
}
