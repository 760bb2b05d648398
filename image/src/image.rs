//! An image that is served: its table, its files, its thread.

mod entries;
mod hand_over;
mod on_top;
#[cfg(test)]
mod tests;
mod whole;

use crate::ahead::FOR_GROWTH;
use crate::base::{Base, Bases, OpenBase};
use crate::budget::Budget;
use crate::client::{ImageClient, line};
use crate::header::autoclear;
use crate::journal::{Journal, MARK_BITS, unused};
use crate::layer::{Layer, LayerFormat};
use crate::layers::Layers;
use crate::map::Map;
use crate::refcounts::Metadata;
use crate::refcounts::Refcounts;
use crate::table::{Place, Table};
use crate::thread::{Mailbox, Task, Work};
use crate::writer::{Writer, needs_to_grow};
pub use on_top::OnTop;
use ringway_core::ByteRange;
use ringway_core::host::File;
use ringway_core::host::sync::Mutex;
use ringway_core::host::sync::mpsc::{RecvTimeoutError, sync_channel};
use ringway_core::host::thread::{Builder, JoinHandle};
use ringway_core::sync_turn::sync_patiently;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use whole::{whole_clusters, whole_data_file};

/// How an image is to be served.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    /// Nothing is changed.
    pub read_only: bool,
    /// The top's file can grow: it is no device.
    pub grows: bool,
    /// What has to be durable first is made so. Without it a power cut may leave an image that is
    /// beyond use.
    pub barriers: bool,
}

/// An image, shared by all queues that serve it.
///
/// # Example
///
/// ```no_run
/// use ringway_image::{Image, Layer, LayerFormat, Place, Use};
/// # fn layers() -> Vec<Layer> { Vec::new() }
/// let usage = Use { read_only: false, grows: true, barriers: true };
/// let image = Image::open(layers(), usage)?;
/// let range = ringway_core::ByteRange::new(65536, 4096).ok_or("beyond 64 bits")?;
/// match image.place(range, false) {
///     Place::Direct { file, offset, len } => println!("{len} bytes at {offset} of file {file}"),
///     Place::Zero { len } => println!("{len} zeroes"),
///     Place::Ask { len } => println!("{len} bytes that Image::client leads to"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Image {
    table: Arc<Table>,
    files: Vec<Arc<File>>,
    base: Option<Arc<Base>>,
    /// Which of the files holds the top's data; 0 is the top itself.
    data: u8,
    size: AtomicU64,
    cluster: u64,
    zeroes_clusters: bool,
    chain: Vec<Layer>,
    usage: Use,
    /// Its header may name another base than this was opened with ([`Image::skip_middle`]).
    pub(crate) skips_middle: Arc<AtomicBool>,
    /// Its header may name none any more ([`Image::detach`]).
    pub(crate) is_detached: AtomicBool,
    mailbox: Arc<Mailbox>,
    /// Its journal, and the mark that its header has of that; 0 if it has none.
    entries: Option<(Arc<Journal>, Arc<AtomicU64>)>,
    /// Entries are in the journal and not in the file.
    deferred: Arc<AtomicBool>,
    thread: Mutex<Thread>,
}

/// What the tables of an image take, as far as they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageMemory {
    /// Of the image itself, in bytes.
    pub own_bytes: u64,
    /// Of what it is based on, in bytes.
    pub base_bytes: u64,
    /// How many images share that, this one among them.
    pub base_images: usize,
}

/// The image's thread.
#[derive(Debug)]
enum Thread {
    /// It starts with the first queue, by which time its process is in its sandbox.
    Waits(Box<Work>),
    Runs(JoinHandle<()>),
    Over,
}

impl Image {
    /// Reads what is needed to begin with. The first layer is the top, which is qcow2, and whose
    /// header has been judged.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the metadata.
    pub fn open(chain: Vec<Layer>, usage: Use) -> io::Result<Self> {
        Self::open_beside(chain, usage, &Bases::default(), 1)
    }

    /// As [`Image::open`]; what it is based on is shared with other images that are based on the same.
    /// Files that are open for direct I/O take multiples of `unit` bytes only, a power of two.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn open_beside(
        chain: Vec<Layer>,
        usage: Use,
        bases: &Bases,
        unit: u32,
    ) -> io::Result<Self> {
        Self::open_inner(chain, usage, bases, unit, None)
    }

    /// As [`Image::open_beside`], with a journal for entries of its tables that wait for a flush: one is to be
    /// asked for then ([`Image::has_deferred`]). What is left in it of an earlier process has to be in the tables
    /// already, or have found no room there ([`crate::replay()`], which has judged it): then it waits on. One image
    /// at a time uses it.
    ///
    /// # Errors
    /// As [`Image::open_beside`].
    pub fn open_with_journal(
        chain: Vec<Layer>,
        usage: Use,
        bases: &Bases,
        unit: u32,
        journal: &Arc<Journal>,
    ) -> io::Result<Self> {
        Self::open_inner(chain, usage, bases, unit, Some(journal))
    }

    fn open_inner(
        chain: Vec<Layer>,
        usage: Use,
        bases: &Bases,
        unit: u32,
        journal: Option<&Arc<Journal>>,
    ) -> io::Result<Self> {
        let top = chain.first().cloned().ok_or(io::ErrorKind::Unsupported)?;
        let mut layers = Layers::open(chain, bases, unit)?;
        let writes = !usage.read_only && usage.barriers;
        if writes && layers.top().l2_offsets().next().is_none() {
            let below = layers.base.as_ref().and_then(|base| base.chain.first());
            flush_snapshot(below).map_err(|error| io::Error::other(BelowLost(error)))?;
        }
        Opened::new(top, layers, usage, journal)?.into_image()
    }

    /// As [`Image::open_beside`], of an image whose base is open already ([`OpenBase`]).
    ///
    /// # Errors
    /// As [`Image::open_beside`].
    pub fn open_on(
        top: Layer,
        base: Option<&OpenBase>,
        usage: Use,
        unit: u32,
        journal: Option<&Arc<Journal>>,
    ) -> io::Result<Self> {
        let base = base.map(|base| Arc::clone(&base.0));
        let layers = Layers::on(top.clone(), base, unit, &mut Budget::default())?;
        Opened::new(top, layers, usage, journal)?.into_image()
    }
}

/// An image of which all that is in its own file is known.
#[derive(Debug)]
struct Opened {
    top: Layer,
    layers: Layers,
    usage: Use,
    writer: Option<Writer>,
    entries: Option<(Arc<Journal>, Arc<AtomicU64>)>,
    metadata: Metadata,
    mailbox: Mailbox,
}

impl Opened {
    /// Reads what is needed to begin with, and has its file be as long as its clusters.
    fn new(
        top: Layer,
        mut layers: Layers,
        usage: Use,
        journal: Option<&Arc<Journal>>,
    ) -> io::Result<Self> {
        let grows = usage.grows;
        let (mut writer, mut entries, mailbox) = (None, None, Mailbox::default());
        let mut metadata = Metadata::default();
        match layers.missing() {
            Some(missing) if usage.read_only => {
                tracing::warn!("{missing}. Reads of what is lost are errors");
            }
            Some(missing) => {
                let text = format!(
                    "{missing}. Nothing is written to it, which would make zeroes of what is lost. Put a whole copy \
                     in its place, or copy the rest (`ringway copy --salvage`), or serve it with --read-only: reads \
                     of what is lost are errors then"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            None => {}
        }
        if !usage.read_only {
            let end = whole_clusters(&mut layers, grows)?;
            whole_data_file(&mut layers)?;
            let kept = if layers.has_data_file() { autoclear::RAW_DATA } else { 0 };
            let tables = layers.top();
            let mark = tables.shape.autoclear & MARK_BITS;
            let left = journal.filter(|journal| journal.has_mark(mark));
            let kept = tables.shape.autoclear & (kept | left.map_or(0, |_| mark));
            if tables.shape.autoclear != kept {
                // autoclear_features: what others keep beside the data is true no more.
                tables.file.write_at(&kept.to_be_bytes(), 88)?;
                tables.shape.autoclear = kept;
            }
            let used: Vec<u64> = tables.l2_offsets().collect();
            let (file, shape) = (tables.file.clone(), tables.shape);
            let mut refcounts = Refcounts::open(file, shape, end, grows, used.into_iter())?;
            refcounts.barriers = usage.barriers;
            metadata = refcounts.metadata.clone();
            // Nothing has an order without barriers, and a data file would have to be made durable by whoever
            // finds the journal. Version 2 has no place for the mark.
            let takes = usage.barriers && shape.version >= 3 && !layers.has_data_file();
            let journal = journal.filter(|journal| takes && journal.is_of_use());
            entries = journal.map(|journal| (Arc::clone(journal), Arc::default()));
            let mut freed = Vec::new();
            if let Some(left) = left {
                let words: BTreeMap<u64, u64> = left.entries().into_iter().collect();
                layers.top().defer(&words.into_iter().collect::<Vec<_>>());
                entries = Some((Arc::clone(left), Arc::new(AtomicU64::new(left.go_on(mark)))));
                refcounts.loose.go_on(left);
                let unused = unused(layers.top(), &mut refcounts, left.loose());
                freed = unused.unwrap_or_else(|error| {
                    tracing::warn!("clusters that are not used could not be given back: {error}");
                    Vec::new()
                });
            }
            refcounts.failure = Arc::clone(&mailbox.failure);
            refcounts.data_file = layers.has_data_file().then(|| layers.data().clone());
            let mut new = Writer::new(refcounts, entries.clone());
            new.freed = freed;
            writer = Some(new);
        }
        Ok(Self { top, layers, usage, writer, entries, metadata, mailbox })
    }

    /// Reads nothing more.
    fn into_image(self) -> io::Result<Image> {
        let Self { top, layers, usage, writer, entries, metadata, mailbox } = self;
        // What is shared is not held a second time.
        let shared = layers.base.iter().flat_map(|base| base.chain.iter().cloned());
        let chain = std::iter::once(top).chain(shared).collect();
        let mut map = Map::new(layers, usage.read_only, metadata)?;
        let shape = map.layers.top().shape;
        Ok(Image {
            table: Arc::clone(&map.table),
            files: map.layers.files.clone(),
            base: map.layers.base.clone(),
            data: map.layers.data,
            size: AtomicU64::new(shape.size),
            cluster: shape.cluster(),
            zeroes_clusters: map.zeroes_clusters(),
            chain,
            usage,
            skips_middle: Arc::default(),
            is_detached: AtomicBool::new(false),
            mailbox: Arc::new(mailbox),
            entries,
            deferred: map.layers.top().has_deferred(),
            thread: Mutex::new(Thread::Waits(Box::new(Work::new(map, writer)))),
        })
    }
}

impl Image {
    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(SeqCst)
    }

    /// Makes the disk larger: it has `size` bytes when this returns, durably, and what was added reads as
    /// zeroes. Waits for the image's thread, and for a server if that has the rest of the last cluster.
    ///
    /// # Errors
    /// What the host says, or why it cannot be so large; the disk is as it was then.
    pub fn grow(&self, size: u64) -> io::Result<()> {
        let fetched = self.fetch(FOR_GROWTH, &|| true, move |map| Ok(needs_to_grow(map, size)))?;
        let grown = self.in_thread(move |work| {
            let (writer, map) = work.writer()?;
            writer.grow(map, size)
        });
        fetched.iter().for_each(|ahead| ahead.forget(&[FOR_GROWTH]));
        grown??;
        self.size.store(size, SeqCst);
        Ok(())
    }

    /// Makes the disk smaller, and ends: what lies beyond `size` bytes is gone when this returns, durably.
    /// Nothing may be in flight.
    ///
    /// # Errors
    /// What the host says, or why it cannot be so small. What lies beyond `size` may be gone then, and all
    /// before it is as it was.
    pub fn shrink(self, size: u64) -> io::Result<()> {
        self.in_thread(move |work| {
            let (writer, map) = work.writer()?;
            let shrunk = writer.shrink(map, size);
            // Also if it has failed: what was taken ahead is not to leak.
            shrunk.and(work.give_back())
        })?
    }

    /// Has something done where the tables are, between two batches, and waits for it.
    pub(crate) fn in_thread<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Work) -> T + Send + 'static,
    ) -> io::Result<T> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = match &mut *thread {
            Thread::Waits(work) => return Ok(act(work)),
            Thread::Runs(handle) if handle.is_finished() => return Err(ended()),
            Thread::Runs(handle) => handle,
            Thread::Over => return Err(ended()),
        };
        let (reply, answer) = sync_channel(1);
        let mailbox = Arc::clone(&self.mailbox);
        let task = Task(Box::new(move |work| {
            let result = act(work);
            work.note(&mailbox);
            let _ = reply.send(result);
        }));
        *self.mailbox.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        handle.thread().unpark();
        loop {
            match answer.recv_timeout(Duration::from_secs(1)) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if !handle.is_finished() => {}
                Err(_) => return Err(ended()),
            }
        }
    }

    /// The file with the top's data, if that is another one than that of its tables, and its number among
    /// [`Image::files`]. A flush has to make it durable, too.
    #[inline]
    #[must_use]
    pub fn data_file(&self) -> Option<(u8, &Arc<File>)> {
        (self.data != 0).then(|| (self.data, &self.files[usize::from(self.data)]))
    }

    /// Bytes of a cluster.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    /// True if whole clusters can be made to read as zeroes without writing them.
    #[must_use]
    pub fn zeroes_clusters(&self) -> bool {
        self.zeroes_clusters
    }

    /// How it is served.
    #[must_use]
    pub fn usage(&self) -> Use {
        self.usage
    }

    /// The files that it is made of, top first, as they were opened.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.chain
    }

    /// The files that it is made of, top first, for an image that is to be based on it. Nothing may
    /// be in flight.
    ///
    /// # Errors
    /// What the host says to the question of how long the top is by now, or that its thread has ended.
    pub fn chain(&self) -> io::Result<Vec<Layer>> {
        let mut chain = self.chain.clone();
        if let Some(top) = chain.first_mut() {
            if self.usage.grows {
                top.file_bytes = top.file.metadata()?.len();
            }
            if let LayerFormat::Qcow2 { shape, .. } = &mut top.format {
                // Its tables may be elsewhere than when it was opened, and its journal over.
                *shape = self.in_thread(Work::shape)?;
            }
        }
        Ok(chain)
    }

    /// What its tables take.
    #[must_use]
    pub fn memory(&self) -> ImageMemory {
        let base = self.base.as_ref();
        ImageMemory {
            own_bytes: self.table.loaded(),
            base_bytes: base.map_or(0, |base| base.table.loaded()),
            // An image and the layers of its thread have it each.
            base_images: base.map_or(0, |base| Arc::strong_count(base) / 2),
        }
    }

    /// The files that [`Place::Direct`] names, the top first.
    #[must_use]
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// Where the beginning of `range` is, which lies within the disk and is not empty.
    #[inline]
    #[must_use]
    pub fn place(&self, range: ByteRange, write: bool) -> Place {
        self.table.place(range, write)
    }

    /// A line to the image's thread for a queue of `depth` requests. Starts the thread, if it is the
    /// first; if it has ended, whatever is asked fails with [`ThreadLost`](crate::ThreadLost).
    ///
    /// # Errors
    /// What the host says.
    pub fn client(&self, depth: u16) -> io::Result<ImageClient> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        *thread = match std::mem::replace(&mut *thread, Thread::Over) {
            Thread::Waits(work) => match start(work, &self.mailbox) {
                Ok(handle) => Thread::Runs(handle),
                Err((error, work)) => {
                    // It may be started for the next queue.
                    *thread = work.map_or(Thread::Over, Thread::Waits);
                    return Err(error);
                }
            },
            other => other,
        };
        let Thread::Runs(handle) = &*thread else { return Err(ended()) };
        let (client, far) = line(depth, handle.thread().clone())?;
        self.mailbox.admit(far);
        handle.thread().unpark();
        Ok(client)
    }
}

/// Starts the thread of an image. If the host has none, its work is there still.
#[allow(clippy::type_complexity, reason = "what it takes, or that again with the reason")]
fn start(
    work: Box<Work>,
    mailbox: &Arc<Mailbox>,
) -> Result<JoinHandle<()>, (io::Error, Option<Box<Work>>)> {
    let taken = Arc::new(Mutex::new(Some(work)));
    let take = |taken: &Mutex<Option<Box<Work>>>| {
        taken.lock().unwrap_or_else(PoisonError::into_inner).take()
    };
    let (its, mailbox) = (Arc::clone(&taken), Arc::clone(mailbox));
    let spawned = Builder::new().name("image".into()).spawn(move || {
        take(&its).into_iter().for_each(|work| work.run(&mailbox));
    });
    spawned.map_err(|error| (error, take(&taken)))
}

/// What was written to the image below a new one could not be made durable when that was opened: it may be lost, and the
/// host tells it once.
#[derive(Debug, thiserror::Error)]
#[error("the image that it is based on, and that was served before, cannot be made durable: {0}")]
pub struct BelowLost(io::Error);

impl BelowLost {
    /// True if an image was not opened for this reason.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|error| error.is::<Self>())
    }
}

/// An image that holds nothing may have got its name when its daemon was killed, before that went on with it: what was
/// answered last is in the image below then, and flushes make the top durable alone. A file system that is only read
/// has nothing to make durable, and says EINVAL.
fn flush_snapshot(below: Option<&Layer>) -> io::Result<()> {
    let Some(Layer { file, format: LayerFormat::Qcow2 { .. }, .. }) = below else { return Ok(()) };
    match sync_patiently(|| file.sync_data()) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EROFS)) => Ok(()),
        synced => synced,
    }
}

/// What panics has said why.
fn ended() -> io::Error {
    io::Error::other(
        "its thread has ended: nothing but a restart of the daemon has it served again",
    )
}

impl Drop for Image {
    /// Clusters that were taken ahead are given back.
    fn drop(&mut self) {
        self.mailbox.ends.store(true, SeqCst);
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Thread::Runs(handle) = std::mem::replace(thread, Thread::Over) {
            handle.thread().unpark();
            // One that has panicked has said so.
            let _ = handle.join();
        }
    }
}
