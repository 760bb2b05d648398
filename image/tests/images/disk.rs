//! A queue of one test: what a worker does with an image, one request at a time or several.

use ringway_core::mem::{Segment, Segments};
use ringway_core::{ByteRange, Op};
use ringway_image::{
    Answer, Ask, Bases, Header, Image, ImageClient, Journal, Layer, LayerFormat, Place, Replayed,
    Room, Shape, Use, replay,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A change of a disk.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) op: Op,
    pub(crate) at: u64,
    /// Of writes; of others only the length counts.
    pub(crate) bytes: Vec<u8>,
}

/// An image with a queue.
pub(crate) struct TestDisk {
    client: ImageClient,
    pub(crate) image: Image,
}

/// The files of an image, by the names in its headers.
pub(crate) fn layers(path: &Path, read_only: bool) -> Vec<Layer> {
    let (mut layers, mut next) = (Vec::new(), Some((path.to_owned(), true)));
    while let Some((path, qcow2)) = next.take() {
        let write = layers.is_empty() && !read_only;
        let file = Arc::new(File::options().read(true).write(write).open(&path).unwrap());
        let file_bytes = file.metadata().unwrap().len();
        let mut format = LayerFormat::Raw;
        if qcow2 {
            let header = Header::read(&*file, file_bytes).unwrap().unwrap();
            next = header.backing.as_ref().map(|backing| {
                let raw = backing.format.as_deref() == Some("raw");
                (path.parent().unwrap().join(&backing.name), !raw)
            });
            let data = header.data_file.as_ref().map(|data| {
                let name = data.name.as_ref().unwrap();
                let path = path.parent().unwrap().join(name);
                let file = File::options().read(true).write(write).open(path).unwrap();
                let bytes = file.metadata().unwrap().len();
                (Arc::new(file), bytes)
            });
            format = LayerFormat::Qcow2 { shape: Shape::from(&header), data };
        }
        layers.push(Layer { file, file_bytes, format, name: path.to_path_buf() });
    }
    layers
}

/// A journal in a file that is made if there is none.
pub(crate) fn journal(path: &Path) -> Journal {
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(Journal::BYTES).unwrap();
    Journal::map(Arc::new(file), 0).unwrap()
}

/// As [`replay`]; that something is lost is said exactly if that comes out.
pub(crate) fn replayed_by(
    file: &Arc<File>,
    unit: u32,
    journal: Option<&Journal>,
) -> std::io::Result<Replayed> {
    let (mut lost, bytes) = (false, file.metadata().unwrap().len());
    let replayed = replay(file, bytes, unit, journal, &mut || lost = true);
    assert!(replayed.is_err() || lost == matches!(replayed, Ok(Replayed::Lost)));
    replayed
}

/// Memory of a request.
pub(crate) fn memory(bytes: &mut [u8]) -> Segments {
    let mut segments = Segments::with_capacity(4);
    // Guests' memory is seldom in one piece.
    let (one, other) = bytes.split_at_mut(bytes.len() / 3);
    for part in [one, other] {
        assert!(segments.push(Segment { base: part.as_mut_ptr(), len: part.len() }));
    }
    segments
}

impl TestDisk {
    pub(crate) fn open(path: &Path, read_only: bool) -> Self {
        Self::open_in_units(path, read_only, 1)
    }

    /// As if its files were open for direct I/O of multiples of `unit` bytes, if that is more than 1: the
    /// image's thread has others help it then.
    pub(crate) fn open_in_units(path: &Path, read_only: bool, unit: u32) -> Self {
        let usage = Use { read_only, grows: true, barriers: true };
        let (layers, bases) = (layers(path, read_only), Bases::default());
        Self::of(Image::open_beside(layers, usage, &bases, unit).unwrap())
    }

    pub(crate) fn of(image: Image) -> Self {
        Self { client: image.client(256).unwrap(), image }
    }

    /// As [`TestDisk::open_in_units`], with a journal in a file that is made if there is none; and what became of
    /// what was left in it.
    pub(crate) fn open_with_journal(path: &Path, unit: u32, journal: &Path) -> (Self, Replayed) {
        let (kept, layers) = (self::journal(journal), layers(path, false));
        let replayed = replayed_by(&layers[0].file, unit, Some(&kept)).unwrap();
        (Self::open_beside_journal(path, unit, journal), replayed)
    }

    /// What is left in the journal waits on.
    pub(crate) fn open_beside_journal(path: &Path, unit: u32, journal: &Path) -> Self {
        let (journal, layers) = (Arc::new(self::journal(journal)), layers(path, false));
        let usage = Use { read_only: false, grows: true, barriers: true };
        let bases = Bases::default();
        let image = Image::open_with_journal(layers, usage, &bases, unit, &journal).unwrap();
        Self { client: image.client(256).unwrap(), image }
    }

    /// As a guest's flush.
    pub(crate) fn flush(&mut self) {
        if self.image.has_deferred() {
            self.ask(0, Op::Flush, ByteRange::default(), &Segments::with_capacity(1), 0);
            assert_eq!(self.wait().result, 0);
        }
        self.image.files()[0].sync_data().unwrap();
    }

    pub(crate) fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; len];
        let segments = memory(&mut bytes);
        let mut done = 0;
        while done < len as u64 {
            let range = ByteRange::new(at + done, len as u64 - done).unwrap();
            match self.image.place(range, false) {
                Place::Direct { file, offset, len } => {
                    let mut part = vec![0; usize::try_from(len).unwrap()];
                    let generation = self.client.began();
                    self.image.files()[usize::from(file)].read_exact_at(&mut part, offset).unwrap();
                    self.client.ended(generation);
                    // SAFETY: the list names parts of `bytes`.
                    unsafe { segments.scatter(done, &part) };
                    done += len;
                }
                Place::Zero { len } => {
                    // SAFETY: as above.
                    unsafe { segments.scatter(done, &vec![0; usize::try_from(len).unwrap()]) };
                    done += len;
                }
                Place::Ask { len } => {
                    let range = ByteRange::new(range.offset(), len).unwrap();
                    self.ask(0, Op::Read, range, &segments, done);
                    let answer = self.wait();
                    done += u64::try_from(answer.result).expect("a read succeeds");
                }
            }
        }
        drop(segments);
        bytes
    }

    /// Carries out changes, all of them at once.
    pub(crate) fn change(&mut self, changes: &mut [Change]) {
        let results = self.try_change(changes);
        assert!(results.iter().all(|result| *result == 0), "{results:?}");
    }

    /// As [`TestDisk::change`]; a negative `errno` of each that failed.
    pub(crate) fn try_change(&mut self, changes: &mut [Change]) -> Vec<i64> {
        let lists: Vec<Segments> =
            changes.iter_mut().map(|change| memory(&mut change.bytes)).collect();
        let (mut done, mut results) = (vec![0; changes.len()], vec![0; changes.len()]);
        let mut open = 0;
        for (tag, change) in changes.iter().enumerate() {
            open += usize::from(self.advance(tag, change, &lists[tag], &mut done[tag]));
        }
        while open > 0 {
            let answer = self.wait();
            let tag = usize::from(answer.tag);
            open -= 1;
            match u64::try_from(answer.result) {
                Err(_) => results[tag] = answer.result,
                Ok(more) => {
                    done[tag] += more;
                    let (change, list) = (&changes[tag], &lists[tag]);
                    open += usize::from(self.advance(tag, change, list, &mut done[tag]));
                }
            }
        }
        results
    }

    /// The next step of a change; true if the image's thread was asked.
    fn advance(&mut self, tag: usize, change: &Change, list: &Segments, done: &mut u64) -> bool {
        let tag = u16::try_from(tag).unwrap();
        let len = change.bytes.len() as u64;
        while *done < len {
            let rest = ByteRange::new(change.at + *done, len - *done).unwrap();
            if change.op != Op::Write {
                self.ask(tag, change.op, rest, list, 0);
                return true;
            }
            let range = rest;
            match self.image.place(range, true) {
                Place::Direct { file, offset, len } => {
                    let mut part = vec![0; usize::try_from(len).unwrap()];
                    // SAFETY: the list names the bytes of the change.
                    unsafe { list.gather(*done, &mut part) };
                    let generation = self.client.began();
                    let data = self.image.data_file().map_or(0, |(file, _)| file);
                    assert_eq!(file, data, "only the top is written");
                    self.image.files()[usize::from(file)].write_all_at(&part, offset).unwrap();
                    self.client.ended(generation);
                    *done += len;
                }
                Place::Zero { .. } => panic!("a write is never zeroes"),
                Place::Ask { len } => {
                    let range = ByteRange::new(range.offset(), len).unwrap();
                    self.ask(tag, change.op, range, list, *done);
                    return true;
                }
            }
        }
        false
    }

    /// Whoever asks keeps the list and its memory until it has waited for the answer.
    pub(crate) fn ask(&mut self, tag: u16, op: Op, range: ByteRange, list: &Segments, skip: u64) {
        let ask = Ask { tag, op, range, memory: list, skip, room: Room::Freed };
        // SAFETY: callers keep list and memory until they have waited for the answer.
        unsafe { self.client.ask(ask) }.unwrap();
    }

    /// The next answer.
    pub(crate) fn wait(&mut self) -> Answer {
        loop {
            if let Some(answer) = self.client.take().expect("the thread lives") {
                return answer;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Looks whether the thread wants something of a queue that asks nothing.
    pub(crate) fn look(&mut self) {
        assert_eq!(self.client.take().expect("the thread lives"), None);
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) {
        let change = Change { op: Op::Write, at, bytes: bytes.to_vec() };
        self.change(&mut [change]);
    }
}
