//! An image that is served on a simulated host: its files, its journal, and queues of a guest.

use crate::jobs::{new_journal, repair};
use crate::model::{Model, SECTOR};
use crate::process::Acts;
use ringway_core::host::{Faults, File, FileExt, Life, StateFile, World, wait_for};
use ringway_core::mem::{Segment, Segments};
use ringway_core::sync_turn::SyncTurn;
use ringway_core::{ByteRange, Op};
use ringway_image::{
    Ask, BackingName, Bases, CheckOptions, Header, Image, ImageClient, Journal, Layer, LayerFormat,
    Place, Replayed, Room, Shape, Use, check, leave_unwritten, replay,
};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// What all lives of a disk have in common.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) world: Arc<World>,
    pub(crate) unit: u32,
    /// What outlives a kill, and not a power cut.
    pub(crate) journal: Option<Arc<StateFile>>,
    pub(crate) model: Arc<Mutex<Model>>,
    pub(crate) acts: Arc<Acts>,
    /// For now nobody knows the clusters that a kill would leave.
    pub(crate) forgets: Arc<AtomicBool>,
    /// A sync has failed, as its state page says, and the image was not opened since.
    unwritten: Arc<AtomicBool>,
    /// Syncs that had failed in this life before anything of the image was believed.
    before: Arc<AtomicU64>,
    /// Calls of files in this life before the image was open, and before it was given up.
    opened: Arc<AtomicU64>,
    used: Arc<AtomicU64>,
}

/// Says when an image is given up.
pub(crate) struct GivesUp(Host);

impl Drop for GivesUp {
    fn drop(&mut self) {
        self.0.used.store(self.0.world.counts().1, Relaxed);
    }
}

/// An image that is open, with what its process knows beside it.
pub(crate) struct Served {
    // The first to go.
    _gives_up: GivesUp,
    pub(crate) image: Arc<Image>,
    pub(crate) turn: Arc<SyncTurn>,
    pub(crate) bases: Bases,
    journal: Option<Arc<Journal>>,
}

pub(crate) const USAGE: Use = Use { read_only: false, grows: true, barriers: true };

impl Host {
    pub(crate) fn now(&self) -> u64 {
        self.world.event_count()
    }

    pub(crate) fn model<T>(&self, act: impl FnOnce(&mut Model) -> T) -> T {
        act(&mut self.model.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Nobody has opened it yet.
    pub(crate) fn new(
        world: Arc<World>,
        unit: u32,
        journal: Option<Arc<StateFile>>,
        content: impl Iterator<Item = u64>,
        acts: Arc<Acts>,
    ) -> Self {
        let model = Arc::new(Mutex::new(Model::of(content)));
        let (forgets, unwritten) = (Arc::default(), Arc::default());
        let (before, opened, used) = (Arc::default(), Arc::default(), Arc::default());
        Self { world, unit, journal, model, acts, forgets, unwritten, before, opened, used }
    }

    /// Another one like it.
    pub(crate) fn twin(&self) -> Self {
        let copy = |file: &Arc<StateFile>| {
            let (copy, mut bytes) =
                (new_journal(), vec![0; usize::try_from(Journal::BYTES).unwrap()]);
            std::os::unix::fs::FileExt::read_exact_at(&**file, &mut bytes, 0).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&*copy, &bytes, 0).unwrap();
            copy
        };
        Self {
            world: self.world.twin(),
            unit: self.unit,
            journal: self.journal.as_ref().map(copy),
            model: Arc::new(Mutex::new(self.model(|model| model.clone()))),
            acts: Arc::clone(&self.acts),
            forgets: Arc::new(AtomicBool::new(self.forgets.load(Relaxed))),
            unwritten: Arc::new(AtomicBool::new(self.unwritten.load(Relaxed))),
            before: Arc::default(),
            opened: Arc::default(),
            used: Arc::default(),
        }
    }

    /// Whether what a process leaves that is killed now is lost.
    pub(crate) fn forgets_loose(&self) -> bool {
        self.journal.is_none() || self.forgets.load(Relaxed)
    }

    /// The files of the image, top first: its headers name them.
    pub(crate) fn layers(&self) -> io::Result<Vec<Layer>> {
        let (mut layers, mut next) = (Vec::new(), Some(("top".to_owned(), true)));
        while let Some((name, is_qcow2)) = next.take() {
            let file = Arc::new(self.world.open(&name, self.unit));
            let file_bytes = file.metadata()?.len();
            let mut format = LayerFormat::Raw;
            if is_qcow2 {
                let header = header(&self.world, &name)?;
                next = header.backing.as_ref().map(|backing| {
                    let raw = backing.format.as_deref() == Some("raw");
                    (backing.name.display().to_string(), !raw)
                });
                let data = header.data_file.as_ref().map(|_| self.world.open("data", self.unit));
                let data =
                    data.map(|data| data.metadata().map(|meta| (Arc::new(data), meta.len())));
                let (shape, data) = (Shape::from(&header), data.transpose()?);
                format = LayerFormat::Qcow2 { shape, data };
            }
            layers.push(Layer { file, file_bytes, format, name: name.into() });
        }
        Ok(layers)
    }

    /// Opens the image as a daemon does; whether what was not flushed may be lost.
    pub(crate) fn open(&self) -> io::Result<(Served, bool)> {
        if header(&self.world, "top")?.is_dirty() {
            repair(self)?;
        }
        let journal = self.journal.clone().map(|file| Journal::map(file, 0).unwrap());
        if self.unwritten.load(Relaxed) {
            leave_unwritten(&self.layers()?, self.unit, journal.as_ref())?;
            self.before.store(self.world.counts().2, Relaxed);
            self.unwritten.store(false, Relaxed);
        }
        let top = Arc::new(self.world.open("top", self.unit));
        let (mut lost, bytes) = (false, top.metadata()?.len());
        let replayed = replay(&top, bytes, self.unit, journal.as_ref(), &mut || lost = true)?;
        assert_eq!(lost, replayed == Replayed::Lost);
        let (journal, bases, turn) = (journal.map(Arc::new), Bases::default(), Arc::default());
        let layers = self.layers()?;
        let image = open_image(self, layers, &bases, journal.as_ref(), &turn)?;
        self.forgets.store(image.data_file().is_some(), Relaxed);
        self.opened.store(self.world.counts().1, Relaxed);
        let gives_up = GivesUp(self.clone());
        Ok((Served { _gives_up: gives_up, image, turn, bases, journal }, lost))
    }

    /// Counts and references of all images of the chain, at rest. Gives the leaks of the first, and what it is
    /// based on.
    pub(crate) fn check(&self) -> Result<(u64, Option<String>), String> {
        let (mut first, mut next) = (None, Some("top".to_owned()));
        while let Some(name) = next.take() {
            let file = self.world.open(&name, 1);
            let bytes = file.metadata().map_err(|error| error.to_string())?.len();
            let header = header(&self.world, &name).map_err(|error| error.to_string())?;
            let found = check(&file, &header, bytes, CheckOptions::default());
            let found = found.map_err(|error| error.to_string())?.map_err(|why| why.to_string())?;
            if found.errors > 0 {
                return Err(format!("{name}: {:?}", found.problems));
            }
            let is_raw = |below: &BackingName| below.format.as_deref() == Some("raw");
            let name = |below: &BackingName| below.name.display().to_string();
            first.get_or_insert((found.leaks, header.backing.as_ref().map(name)));
            next = header.backing.as_ref().filter(|below| !is_raw(below)).map(name);
        }
        Ok(first.unwrap_or_default())
    }
}

fn open_image(
    host: &Host,
    layers: Vec<Layer>,
    bases: &Bases,
    journal: Option<&Arc<Journal>>,
    turn: &Arc<SyncTurn>,
) -> io::Result<Arc<Image>> {
    let image = match journal {
        Some(journal) => Image::open_with_journal(layers, USAGE, bases, host.unit, journal)?,
        None => Image::open_beside(layers, USAGE, bases, host.unit)?,
    };
    image.share_turn(Arc::clone(turn));
    Ok(Arc::new(image))
}

impl Served {
    /// Has all that was answered be durable.
    pub(crate) fn sync(&self, host: &Host) -> io::Result<()> {
        self.image.write_deferred()?;
        let synced = sync(&self.image, &self.turn);
        host.note_losses();
        synced
    }

    /// It is served from another chain from now on. Nothing is in flight.
    pub(crate) fn serve(&mut self, host: &Host, layers: Vec<Layer>) -> io::Result<Arc<Image>> {
        let journal = self.journal.as_ref();
        let image = open_image(host, layers, &self.bases, journal, &self.turn)?;
        Ok(std::mem::replace(&mut self.image, image))
    }

    /// It goes to another daemon, and comes back.
    pub(crate) fn move_there_and_back(&mut self, host: &Host) -> io::Result<()> {
        let mut chain = self.image.hand_over(host.unit)?;
        host.note_losses();
        chain[0] = Layer::taken_over(&chain[0], USAGE, host.unit)?;
        (self.bases, self.turn) = (Bases::default(), Arc::default());
        self.serve(host, chain).map(drop)
    }
}

/// The host tells one of all who sync what is lost, who says so before others are answered.
fn sync(image: &Image, turn: &SyncTurn) -> io::Result<()> {
    let files = || {
        image.data_file().map_or(Ok(()), |(_, file)| file.sync_data())?;
        image.files()[0].sync_data()
    };
    turn.by_thread(|| files().inspect_err(|_| image.has_lost())).transpose()?;
    if image.has_failed() {
        return Err(io::Error::from_raw_os_error(libc::EIO));
    }
    Ok(())
}

/// As a tool reads it, through the page cache.
pub(crate) fn header(world: &Arc<World>, name: &str) -> io::Result<Header> {
    let file = world.open(name, 1);
    let bytes = file.metadata()?.len();
    Header::read(&file, bytes)?.map_err(io::Error::other)
}

/// Memory of requests, aligned as direct I/O wants it.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; 4096]);

/// A queue of a guest, with one request at a time.
pub(crate) struct Queue {
    pub(crate) host: Host,
    pub(crate) image: Arc<Image>,
    client: ImageClient,
    turn: Arc<SyncTurn>,
    memory: Vec<Page>,
}

fn answer(result: i64) -> io::Result<u64> {
    u64::try_from(result)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)))
}

impl Queue {
    pub(crate) fn new(host: &Host, served: &Served) -> io::Result<Self> {
        let memory = vec![Page([0; 4096]); 64];
        let client = served.image.client(4)?;
        let (host, image, turn) = (host.clone(), served.image.clone(), served.turn.clone());
        Ok(Self { host, image, client, turn, memory })
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: pages are bytes without padding, and the slice ends with them.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.as_mut_ptr().cast(),
                self.memory.len() * 4096,
            )
        };
        &mut bytes[..len]
    }

    fn segments(&mut self, len: usize) -> Segments {
        let mut list = Segments::with_capacity(4);
        // Guests' memory is seldom in one piece.
        let (one, other) = self.bytes(len).split_at_mut(len / SECTOR / 3 * SECTOR);
        for part in [one, other].into_iter().filter(|part| !part.is_empty()) {
            assert!(list.push(Segment { base: part.as_mut_ptr(), len: part.len() }));
        }
        list
    }

    fn ask(&mut self, op: Op, range: ByteRange, list: &Segments, skip: u64) -> io::Result<u64> {
        let lost = |_| io::Error::other("the image's thread is lost");
        let ask = Ask { tag: 7, op, range, memory: list, skip, room: Room::Freed };
        // SAFETY: the list and its memory live until the answer is taken, or the world is over.
        unsafe { self.client.ask(ask) }.map_err(lost)?;
        loop {
            if let Some(told) = self.client.take().map_err(lost)? {
                return answer(told.result);
            }
            wait_for(self.client.bell())?;
        }
    }

    /// One of the image's files, for a part of a request.
    fn direct<T>(&mut self, file: u8, act: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let generation = self.client.began();
        let done = act(&self.image.files()[usize::from(file)]);
        self.client.ended(generation);
        done
    }

    /// Reads, and what was read.
    pub(crate) fn read_bytes(&mut self, at: usize, len: usize) -> io::Result<Vec<u8>> {
        self.bytes(len).fill(0xee);
        let list = self.segments(len);
        let mut done = 0;
        while done < len as u64 {
            let range = ByteRange::new(at as u64 + done, len as u64 - done).unwrap();
            let from = usize::try_from(done).unwrap();
            done += match self.image.place(range, false) {
                Place::Zero { len } => {
                    let end = from + usize::try_from(len).unwrap();
                    self.bytes(end)[from..].fill(0);
                    len
                }
                Place::Direct { file, offset, len } => {
                    let mut part =
                        vec![Page([0xee; 4096]); usize::try_from(len.div_ceil(4096)).unwrap()];
                    let bytes = usize::try_from(len).unwrap();
                    // SAFETY: as of `bytes`.
                    let part = unsafe {
                        std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<u8>(), bytes)
                    };
                    self.direct(file, |file| file.read_exact_at(part, offset))?;
                    self.bytes(from + bytes)[from..].copy_from_slice(part);
                    len
                }
                Place::Ask { len } => {
                    let range = ByteRange::new(range.offset(), len).unwrap();
                    self.ask(Op::Read, range, &list, done)?
                }
            };
        }
        Ok(self.bytes(len).to_vec())
    }

    /// A guest's read, judged.
    pub(crate) fn read(&mut self, at: usize, sectors: usize) -> io::Result<()> {
        self.host.world.tell(format_args!("guest reads {at} {sectors}"));
        let began = self.host.now();
        let may = self.host.model(|model| model.before_read(at..at + sectors, began));
        let found = self.read_bytes(at * SECTOR, sectors * SECTOR);
        // A sync may have failed meanwhile whose queue has not come to say so.
        self.host.note_losses();
        let judged = self.host.model(|model| {
            let judged = found.as_ref().map(|found| model.judge_read(at, found, may, began));
            model.after_read(began);
            judged.unwrap_or(Ok(()))
        });
        judged.unwrap_or_else(|why| panic!("{why}"));
        found.map(drop)
    }

    /// A guest's change: write, discard or write zeroes.
    pub(crate) fn change(&mut self, op: Op, at: usize, sectors: usize) -> io::Result<()> {
        let range = at..at + sectors;
        let now = self.host.now();
        let (id, value) = self.host.model(|model| model.begin(range.clone(), op != Op::Write, now));
        self.host.world.tell(format_args!("guest {op:?} {at} {sectors}: {value:x}"));
        let len = sectors * SECTOR;
        if op == Op::Write {
            self.bytes(len).copy_from_slice(&crate::model::sector(value).repeat(sectors));
        }
        let done = self.carry_out(op, (at * SECTOR) as u64, len as u64);
        // What is discarded may stay as it was.
        let (sure, now) = (done.is_ok() && op != Op::Discard, self.host.now());
        self.host.model(|model| model.end(range, id, sure, now));
        done
    }

    fn carry_out(&mut self, op: Op, at: u64, len: u64) -> io::Result<()> {
        // Zeroes have no memory.
        let list = match op {
            Op::Write => self.segments(usize::try_from(len).unwrap()),
            _ => Segments::with_capacity(1),
        };
        let mut done = 0;
        while done < len {
            let range = ByteRange::new(at + done, len - done).unwrap();
            if op != Op::Write {
                done += self.ask(op, range, &list, 0)?;
                continue;
            }
            done += match self.image.place(range, true) {
                Place::Direct { file, offset, len } => {
                    let (from, bytes) =
                        (usize::try_from(done).unwrap(), usize::try_from(len).unwrap());
                    let mut part = vec![Page([0; 4096]); bytes.div_ceil(4096)];
                    // SAFETY: as of `bytes`.
                    let part = unsafe {
                        std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<u8>(), bytes)
                    };
                    part.copy_from_slice(&self.bytes(from + bytes)[from..]);
                    self.direct(file, |file| file.write_all_at(part, offset))?;
                    len
                }
                Place::Zero { .. } => panic!("a write is never zeroes"),
                Place::Ask { len } => {
                    let range = ByteRange::new(range.offset(), len).unwrap();
                    self.ask(op, range, &list, done)?
                }
            };
        }
        Ok(())
    }

    /// A guest's flush.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let began = self.host.now();
        if self.image.has_deferred() {
            let none = Segments::with_capacity(1);
            self.ask(Op::Flush, ByteRange::default(), &none, 0)?;
        }
        let synced = sync(&self.image, &self.turn);
        self.host.note_losses();
        synced?;
        self.host.model(|model| model.flush(began));
        Ok(())
    }
}

impl Host {
    /// Whether a sync has failed in this process: what it holds is unknown until it is opened anew.
    pub(crate) fn has_lost(&self) -> bool {
        self.world.counts().2 > self.before.load(Relaxed)
    }

    /// Whether what the host has in its memory may be gone by the next time that the image is opened.
    pub(crate) fn has_unwritten(&self) -> bool {
        self.unwritten.load(Relaxed)
    }

    /// Whether the image was open in its last life when the call of a file with this number came, and not yet given up.
    pub(crate) fn was_open(&self, call: u64) -> bool {
        (self.opened.load(Relaxed) + 1..=self.used.load(Relaxed)).contains(&call)
    }

    /// A process is begun that does this.
    pub(crate) fn live<R: Send + 'static>(
        &self,
        faults: Faults,
        act: impl FnOnce(&Self) -> R + Send + 'static,
    ) -> Life<R> {
        self.before.store(0, Relaxed);
        self.used.store(0, Relaxed);
        let at = self.clone();
        let ended = self.world.live(faults, move || act(&at));
        let now = self.now();
        self.model(|model| model.is_killed(now));
        self.note_losses();
        ended
    }

    /// What a failed sync has lost may be missed from now on.
    pub(crate) fn note_losses(&self) {
        if self.has_lost() {
            self.model(|model| model.lossy = true);
            self.unwritten.store(true, Relaxed);
        }
    }
}
