//! What every storage has to keep to: the suite for those of your own.

use super::{Flush, KeptBy, NotAdopted, Parcel, Size, Storage, take_over};
use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::open::OpenError;
use crate::parts::Parts;
use crate::queue::DiskQueue;
use crate::resize::ResizeError;
use ringway_aio::faulty::Choose;
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp, Reaped};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The part of a disk that the suite writes, in bytes. The disk has more.
const PART: usize = 4 << 20;
/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The contract of a storage, tried with one disk on it.
pub struct Suite<'a> {
    /// Opens the disk, always the same one, to be written: more than 4 MiB. Each has gone before the next is opened,
    /// but where the suite tries what comes of that.
    pub open: &'a dyn Fn() -> Result<Disk, OpenError>,
    /// An engine for it, of so many operations at a time.
    pub engine: &'a dyn Fn(&Disk, u32) -> Box<dyn Engine>,
    /// What is written can be read.
    pub moves_data: bool,
}

impl Suite<'_> {
    /// Tries all of it.
    ///
    /// # Panics
    /// Where the storage breaks the contract.
    pub fn run(&self) {
        self.judges_itself();
        self.does_what_is_asked();
        self.goes_on_where_it_fell_short();
        self.says_what_failed();
        self.keeps_others_away();
        self.comes_to_another_process();
        self.has_the_size_it_says();
    }

    /// A process that somebody starts at this moment has its lock until it runs its own program.
    fn open(&self) -> Disk {
        let begun = Instant::now();
        loop {
            match (self.open)() {
                Ok(disk) => return disk,
                Err(OpenError::InUse { .. }) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn hand<F: Choose>(&self, disk: Disk, choose: F) -> Hand<F> {
        let granule = disk.alignment().offset.max(512);
        let engine = Faulty::new((self.engine)(&disk, 64), granule, choose);
        Hand::new(engine, Arc::new(disk), self.moves_data)
    }

    /// Report, alignment, limits.
    fn judges_itself(&self) {
        let disk = self.open();
        let (nature, shape) = (*disk.nature(), disk.geometry());
        assert_eq!(disk.storage().nature(), nature, "what it is like changes");
        assert!(!disk.name().is_empty() && !disk.engine().name().is_empty());
        assert!(nature.engine.is_none_or(|engine| engine == disk.engine()));
        assert!(
            shape.capacity > PART as u64 && shape.capacity % u64::from(shape.logical_block) == 0
        );
        assert!(shape.logical_block >= 512 && shape.logical_block.is_power_of_two());
        let alignment = disk.alignment();
        assert!(alignment.memory.is_power_of_two() && alignment.offset.is_power_of_two());
        assert!(nature.max_bytes >= alignment.offset.max(4096));
        let most = disk.storage().engines_most();
        assert_ne!(most, Some(0), "nobody could serve it");
        if nature.size == Size::Asked {
            let bytes = disk.storage().bytes(&disk.file()).expect("its size can be asked");
            assert!(bytes >= shape.capacity);
        }
        is_sound(&**disk.storage(), &disk.file());
        let mut engine = (self.engine)(&disk, 8);
        disk.storage().share_among(1);
        let [one, other] = [0; 2].map(|_| disk.attach(&mut engine).expect("its engine takes it"));
        engine.detach(other);
        engine.detach(one);
    }

    /// Requests of any place and length, with memory at odd addresses.
    fn does_what_is_asked(&self) {
        let mut hand = self.hand(self.open(), |_: &Io<'_>| None);
        let end = hand.disk.capacity();
        hand.fill();
        for (op, block, blocks) in [
            (Op::Write, 1, 1),
            (Op::Write, 7, 17),
            (Op::WriteZeroes, 3, 9),
            (Op::Write, 100, 600),
            (Op::WriteZeroes, 64, 256),
            (Op::Discard, 512, 64),
        ] {
            let offered = op != Op::Discard || hand.disk.geometry().discard;
            let right = if offered { Status::Ok } else { Status::Unsupported };
            assert_eq!(hand.ask(op, block, blocks), right, "{op:?} {block} {blocks}");
            hand.compare();
        }
        assert_eq!(hand.ask(Op::Flush, 0, 0), Status::Ok);
        let block = hand.block;
        for (op, at) in
            [(Op::Read, end), (Op::Write, end - block), (Op::Read, u64::MAX - 2 * block)]
        {
            let range = ByteRange::new(at, 2 * block).expect("within 64 bits");
            assert_ne!(hand.request(op, range, 0), Status::Ok, "{op:?} beyond its end");
        }
        hand.compare();
    }

    /// Short transfers, of each length once.
    fn goes_on_where_it_fell_short(&self) {
        let mut left = 0;
        let mut hand = self.hand(self.open(), move |io: &Io<'_>| {
            left = if left == 0 { 4 } else { left - 1 };
            let half = u32::try_from(io.len / 2).unwrap_or(u32::MAX) & !511;
            (io.op.moves_data() && left > 0 && half > 0).then_some(Fault::Short(half))
        });
        hand.fill();
        for (block, blocks) in [(0, 64), (5, 1), (9, 513)] {
            assert_eq!(hand.ask(Op::Write, block, blocks), Status::Ok);
            hand.compare();
        }
    }

    /// Failed requests, and a failed flush, which none after it makes good.
    fn says_what_failed(&self) {
        let fail = Arc::new(Mutex::new(None));
        let choose = {
            let fail = Arc::clone(&fail);
            move |io: &Io<'_>| {
                let mut fail = lock(&fail);
                let hit = *fail == Some(io.op);
                hit.then(|| *fail = None);
                hit.then_some(Fault::Error(libc::EIO))
            }
        };
        let mut hand = self.hand(self.open(), choose);
        hand.fill();
        for (op, io) in [(Op::Read, IoOp::Read), (Op::Write, IoOp::Write)] {
            *lock(&fail) = Some(io);
            assert_eq!(hand.ask(op, 8, 8), Status::IoError, "{op:?}");
            assert_eq!(hand.ask(op, 8, 8), Status::Ok, "{op:?}, once more");
        }
        hand.compare();
        if hand.disk.cache() != CacheMode::Unsafe {
            assert_eq!(hand.ask(Op::Flush, 0, 0), Status::Ok);
            assert_eq!(hand.ask(Op::Write, 0, 8), Status::Ok);
            *lock(&fail) = Some(IoOp::Sync);
            assert_eq!(hand.ask(Op::Flush, 0, 0), Status::IoError);
            assert_eq!(hand.ask(Op::Flush, 0, 0), Status::IoError, "what was lost stays lost");
        }
    }

    /// One who writes, and the lock's way to a successor.
    fn keeps_others_away(&self) {
        let disk = self.open();
        if disk.nature().kept_by == KeptBy::File {
            assert!((self.open)().is_err(), "two write it");
            disk.hand_over();
            disk.lock().expect("it is nobody's");
        }
        drop(disk);
        drop(self.open());
    }

    /// The half that opens it and the one that serves it.
    fn comes_to_another_process(&self) {
        let mut hand = self.hand(self.open(), |_: &Io<'_>| None);
        hand.fill();
        assert_eq!(hand.ask(Op::Flush, 0, 0), Status::Ok);
        let (memory, model) = hand.end();
        let disk = self.open();
        let adopted = disk.storage().parcel().ok().map(|parcel| {
            disk.hand_over();
            let file = sent(&disk.file());
            let storage =
                take_over(copy(&parcel), disk.name(), &file).expect("it is one of its kind");
            let parts = disk.into_parts();
            let disk = Disk::from(Parts { file, storage, ..parts });
            disk.lock().expect("it was handed over");
            disk
        });
        let Some(disk) = adopted else { return };
        let mut hand = self.hand(disk, |_: &Io<'_>| None);
        (hand.memory, hand.model) = (memory, model);
        hand.compare();
        assert_eq!(hand.ask(Op::Write, 3, 5), Status::Ok);
        hand.compare();
    }

    /// Another size, or why there is none.
    fn has_the_size_it_says(&self) {
        let disk = self.open();
        let (bytes, nature) = (disk.capacity(), *disk.nature());
        let longer = bytes + (1 << 20);
        let refused = |to| disk.next_size(to).expect_err("it has another size");
        match nature.size {
            Size::Fixed(why) => assert_eq!(refused(Some(longer)).to_string(), why),
            Size::Told => {
                assert!(matches!(refused(None), ResizeError::NoFile));
                assert_eq!(disk.next_size(Some(longer)).expect("it is told"), longer);
            }
            Size::Asked => {
                assert_eq!(disk.next_size(None).expect("it says its own"), bytes);
                if !nature.has_length {
                    assert!(matches!(refused(Some(longer)), ResizeError::Device { .. }));
                }
            }
        }
        assert!(matches!(
            disk.next_size(Some(1)),
            Err(ResizeError::Size { .. } | ResizeError::Fixed(_))
        ));
        if !nature.has_length {
            return;
        }
        disk.set_file_bytes(longer).expect("a longer file");
        disk.set_capacity(longer);
        let mut hand = self.hand(disk, |_: &Io<'_>| None);
        let range = ByteRange::new(longer - PART as u64, PART as u64).expect("within the disk");
        assert_eq!(hand.request(Op::Read, range, 0), Status::Ok);
        let disk = Arc::clone(&hand.disk);
        drop(hand);
        disk.set_capacity(bytes);
        disk.set_file_bytes(bytes).expect("a shorter file");
    }
}

/// A descriptor of the same file, as another process gets it.
fn sent(file: &Arc<File>) -> Arc<File> {
    Arc::new(file.try_clone().expect("a descriptor"))
}

fn copy(parcel: &Parcel) -> Parcel {
    Parcel { files: parcel.files.iter().map(sent).collect(), ..parcel.clone() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of the contract that needs no disk: `file` is what would be that of one.
pub(super) fn is_sound(storage: &dyn Storage, file: &Arc<File>) {
    let nature = storage.nature();
    assert!(nature.max_bytes >= 4096);
    assert_eq!(nature.kept_by == KeptBy::File, nature.flush == Flush::Host, "{storage:?}");
    assert!(!matches!(nature.size, Size::Fixed(_)) || !nature.has_length, "{storage:?}");
    if nature.size != Size::Asked {
        assert!(storage.bytes(file).is_err(), "{storage:?} says its size unasked");
    }
    let Ok(parcel) = storage.parcel() else { return };
    let (there, number) = (sent(file), parcel.files.len());
    let adopted = take_over(copy(&parcel), "disk", &there).expect("it is one of its kind");
    assert_eq!(adopted.nature(), nature);
    assert_eq!(adopted.beside().is_some(), storage.beside().is_some());
    assert_eq!(adopted.bytes(&there).ok(), storage.bytes(file).ok());
    // A successor of the successor has the same.
    let again = adopted.parcel().expect("it goes on");
    let said = |of: &Parcel| (of.kind.clone(), of.numbers.clone(), of.words.clone());
    assert_eq!((said(&again), again.files.len()), (said(&parcel), number));

    let refused = |parcel: Parcel| take_over(parcel, "disk", &there).expect_err("it is damaged");
    for numbers in [0, parcel.numbers.len() - 1, parcel.numbers.len() + 1] {
        let mut damaged = copy(&parcel);
        damaged.numbers.resize(numbers, 0);
        assert!(matches!(refused(damaged), NotAdopted::Parcel(_)), "{storage:?}: {numbers}");
    }
    let mut damaged = copy(&parcel);
    damaged.words.push(None);
    assert!(matches!(refused(damaged), NotAdopted::Parcel(_)), "{storage:?}");
    let unknown = Parcel { kind: "tape".into(), ..parcel };
    let why = refused(unknown).to_string();
    assert!(why.contains("'tape'"), "{why}");
}

/// A queue on the disk, its engine, and what the part should hold.
struct Hand<F> {
    // First, so that they are dropped first: they may use the memory.
    engine: Faulty<Box<dyn Engine>, F>,
    queue: DiskQueue<()>,
    disk: Arc<Disk>,
    memory: Mapping,
    model: Vec<u8>,
    block: u64,
    round: u8,
    moves_data: bool,
}

impl<F: Choose> Hand<F> {
    fn new(mut engine: Faulty<Box<dyn Engine>, F>, disk: Arc<Disk>, moves_data: bool) -> Self {
        disk.storage().share_among(1);
        let file = disk.attach(&mut engine).expect("its engine takes it");
        let limits = engine.limits().clone();
        let queue = DiskQueue::new(Arc::clone(&disk), &limits, file, 0, 8).expect("memory");
        let memory = Mapping::anonymous(PART + 1).expect("memory");
        let (block, model) = (disk.geometry().logical_block.into(), vec![0; PART]);
        Self { engine, queue, disk, memory, model, block, round: 0, moves_data }
    }

    fn end(self) -> (Mapping, Vec<u8>) {
        (self.memory, self.model)
    }

    /// One byte behind a page.
    fn segment(&self, at: usize, len: usize) -> Segment {
        Segment { base: self.memory.at(1 + at), len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours and as long, and nothing is in flight between requests.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(1), PART) }
    }

    /// Writes all of the part.
    fn fill(&mut self) {
        assert_eq!(self.ask(Op::Write, 0, PART as u64 / self.block), Status::Ok);
        self.compare();
    }

    /// A request within the part. What a write brings is new each time.
    fn ask(&mut self, op: Op, block: u64, blocks: u64) -> Status {
        let range =
            ByteRange::new(block * self.block, blocks * self.block).expect("within 64 bits");
        let at = usize::try_from(range.offset()).expect("within the part");
        let part = at..at + usize::try_from(range.len()).expect("within the part");
        if op == Op::Write {
            self.round = self.round.wrapping_add(1);
            let round = self.round;
            for (at, byte) in self.bytes()[part.clone()].iter_mut().enumerate() {
                *byte = (at / 512 + at).to_le_bytes()[0] ^ round;
            }
        }
        let new = self.bytes()[part.clone()].to_vec();
        let status = self.request(op, range, at);
        match op {
            Op::Write => self.model[part].copy_from_slice(&new),
            Op::WriteZeroes => self.model[part].fill(0),
            // It may read as anything: that is what it holds from now on.
            Op::Discard => {
                assert_eq!(self.request(Op::Read, range, at), Status::Ok);
                let found = self.bytes()[part.clone()].to_vec();
                self.model[part].copy_from_slice(&found);
            }
            _ => {}
        }
        status
    }

    /// Reads the part, and looks whether it holds what it should.
    fn compare(&mut self) {
        self.bytes().fill(0xee);
        let range = ByteRange::new(0, PART as u64).expect("within 64 bits");
        assert_eq!(self.request(Op::Read, range, 0), Status::Ok);
        if self.moves_data {
            let (found, model) = (self.bytes().to_vec(), &self.model);
            let wrong = found.iter().zip(model).position(|(found, model)| found != model);
            assert_eq!(wrong, None, "the first byte that is another");
        }
    }

    /// One request, with memory from byte `at` of ours on.
    fn request(&mut self, op: Op, range: ByteRange, at: usize) -> Status {
        let slot = self.queue.acquire().expect("a free slot");
        let segment = self.segment(at, usize::try_from(range.len()).expect("within memory"));
        let request = self.queue.request_mut(slot);
        (request.op, request.range, request.unmap) = (op, range, true);
        request.segments.clear();
        if op.moves_data() {
            assert!(request.segments.push(segment));
        }
        // SAFETY: the memory is mapped as long as this lives, and nobody looks at it before the answer.
        unsafe { self.queue.start(&mut self.engine, slot, ()) };
        let (begun, mut out) = (Instant::now(), Reaped::with_capacity(64, 0));
        loop {
            self.queue.unplug(&mut self.engine);
            if self.queue.has_deferred() {
                self.queue.retry(&mut self.engine, 16);
            }
            if let Some(late) = self.queue.take_late() {
                return late.status;
            }
            self.engine.submit_and_wait(Some(Duration::from_millis(1))).expect("a sound engine");
            self.engine.reap(&mut out);
            for done in out.done.drain(..) {
                let slot = u16::try_from(done.tag & 0xffff).expect("16 bits");
                if let Some(answer) = self.queue.finish(&mut self.engine, slot, done.result) {
                    return answer.status;
                }
            }
            assert!(begun.elapsed() < PATIENCE, "{op:?} at {range:?} has no answer");
        }
    }
}
