//! What images are based on: files that are only read, with one table for all images of a process that
//! are based on them.

use crate::budget::Budget;
use crate::l2::Tables;
use crate::layer::{Found, Layer, LayerFormat, Open, piece};
use crate::layout::Shape;
use crate::table::{Table, Word};
use crate::units::{Units, page_bits};
use ringway_core::host::sync::{Mutex, MutexGuard};
use ringway_core::host::{File, Identity, identity};
use std::io;
use std::sync::{Arc, PoisonError, Weak};

/// The files below the top of a chain.
#[derive(Debug)]
pub(crate) struct Base {
    /// Where each of their clusters is, with files numbered as in images that are based on them: from
    /// one.
    pub(crate) table: Arc<Table>,
    /// All files that hold data.
    pub(crate) files: Vec<Arc<File>>,
    /// The chain itself, for an image that is to be based on all of it.
    pub(crate) chain: Vec<Layer>,
    /// What is missing of the first of them that lacks its end, in words.
    pub(crate) missing: Option<String>,
    stack: Mutex<Stack>,
}

#[derive(Debug)]
struct Stack {
    open: Vec<Open>,
    units: Units,
}

impl Base {
    /// Reads what is needed to begin with, for images with clusters of 2 to the power of
    /// `cluster_bits` bytes. Nothing below what holds the whole disk is needed.
    fn open(
        chain: Vec<Layer>,
        cluster_bits: u32,
        unit: u32,
        budget: &mut Budget,
    ) -> io::Result<Self> {
        let mut open = Vec::new();
        for layer in chain.iter().cloned() {
            let file = u8::try_from(open.len()).map_err(io::Error::other)?;
            open.push(Open::new(layer, file, unit, budget)?.0);
        }
        Self::of(open, chain, cluster_bits)
    }

    /// Of files that are open, as [`Base::open`].
    fn of(open: Vec<Open>, chain: Vec<Layer>, cluster_bits: u32) -> io::Result<Self> {
        let files = open.iter().map(|layer| Arc::clone(layer.data())).collect();
        let missing = open.iter().find_map(|layer| layer.missing.clone());
        let bytes = open.first().map_or(0, |top: &Open| top.bytes);
        let table = Arc::new(Table::new(bytes, cluster_bits, false)?);
        // What one L2 table says costs one read, and a raw file none; but no more than 16 pages.
        let most = page_bits() + 4;
        let l2_bits = |tables: &Tables| {
            let shape = tables.shape;
            (shape.l2_bits() + shape.cluster_bits).saturating_sub(cluster_bits)
        };
        let bits = open.first().and_then(|top| top.tables.as_ref()).map_or(most, l2_bits);
        let units = Units::new(&table, bits.min(most))?;
        Ok(Self { table, files, chain, missing, stack: Mutex::new(Stack { open, units }) })
    }

    /// Its files, to be those from number `first` on of another base. Nothing is read for it.
    fn fresh(&self, first: u8) -> Vec<Open> {
        (first..).zip(&self.stack().open).map(|(file, layer)| layer.fresh(file)).collect()
    }

    /// What is behind the lock is whole at any time.
    fn stack(&self) -> MutexGuard<'_, Stack> {
        self.stack.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the beginning of a range is, and how many bytes of it.
    pub(crate) fn find(&self, at: u64, len: u64) -> io::Result<(Found, u64)> {
        self.stack().find(at, len)
    }

    /// Bytes of its disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.stack().open.first().map_or(0, |top| top.bytes)
    }

    /// Has the table say where a cluster is, and its neighbours.
    pub(crate) fn load(&self, cluster: u64) {
        let mut stack = self.stack();
        let Some(clusters) = stack.units.load(&self.table, cluster) else { return };
        let size = self.table.cluster();
        for cluster in clusters {
            let find = |at, len| stack.find(at, len);
            let found = piece(find, cluster * size, size);
            self.table.publish(cluster, word(found));
        }
    }
}

impl Stack {
    fn find(&mut self, at: u64, len: u64) -> io::Result<(Found, u64)> {
        let mut len = len;
        for layer in &mut self.open {
            if let Some(found) = layer.find(at, &mut len)? {
                return Ok((found.above(), len));
            }
        }
        Ok((Found::Zero, len))
    }
}

/// The word of a cluster that is only read.
pub(crate) fn word(found: io::Result<Option<Found>>) -> Word {
    match found {
        Ok(Some(Found::Zero)) => Word::ZERO,
        Ok(Some(Found::Data { file, offset })) if offset % 512 == 0 => {
            Word::data(file, offset, false)
        }
        Ok(_) => Word::ASK,
        Err(error) => {
            // Whoever asks for it is told.
            tracing::debug!("a mapping cannot be read: {error}");
            Word::ASK
        }
    }
}

/// A base that is open, for an image that is to be based on it.
#[derive(Clone, Debug)]
pub struct OpenBase(pub(crate) Arc<Base>);

/// What images of this process are based on. Those that are based on the same files share them, their
/// locks, and the table of what is where.
#[derive(Debug, Default)]
pub struct Bases(Mutex<Vec<(Key, Arc<Place>)>>);

/// Where a base is once it is open. Who opens it has this, too, from when the list names it.
#[derive(Debug, Default)]
struct Place {
    /// One opens it, and others wait that want the same one: nobody else does.
    opening: Mutex<()>,
    /// Held for no longer than a look.
    base: Mutex<Weak<Base>>,
}

impl Place {
    fn base(&self) -> MutexGuard<'_, Weak<Base>> {
        self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What makes two bases the same one.
#[derive(Debug, PartialEq, Eq)]
struct Key {
    cluster_bits: u32,
    /// Files for direct I/O are others ([`FileKey::direct`]), also those that are read in other blocks.
    unit: u32,
    layers: Vec<(FileKey, Option<Shape>, Option<FileKey>)>,
}

/// A file, and what changes when its content does.
#[derive(Debug, PartialEq, Eq)]
struct FileKey {
    place: (u64, u64, u64),
    bytes: u64,
    /// When it was written last.
    written: (i64, u64),
    /// It is open for direct I/O.
    direct: bool,
}

impl FileKey {
    fn of(file: &File, bytes: u64) -> io::Result<Self> {
        let Identity { place, written, direct } = identity(file)?;
        Ok(Self { place, bytes, written, direct })
    }
}

impl Key {
    fn of(chain: &[Layer], cluster_bits: u32, unit: u32) -> io::Result<Self> {
        let layer = |layer: &Layer| {
            let file = FileKey::of(&layer.file, layer.file_bytes)?;
            Ok(match &layer.format {
                LayerFormat::Raw | LayerFormat::Elsewhere(_) => (file, None, None),
                LayerFormat::Qcow2 { shape, data } => {
                    let data = data.as_ref().map(|(data, bytes)| FileKey::of(data, *bytes));
                    (file, Some(*shape), data.transpose()?)
                }
            })
        };
        let layers = chain.iter().map(layer).collect::<io::Result<_>>()?;
        Ok(Self { cluster_bits, unit, layers })
    }

    /// Whether a file is one of its layers.
    fn has(&self, place: (u64, u64, u64)) -> bool {
        self.layers.iter().any(|(file, ..)| file.place == place)
    }
}

impl Bases {
    /// How many images of this process are based on a file, by whichever chain.
    ///
    /// # Errors
    /// What the host says to the question of which file it is.
    pub fn based_on(&self, file: &File) -> io::Result<usize> {
        let place = FileKey::of(file, 0)?.place;
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut images = 0;
        for (_, at) in list.iter().filter(|(key, _)| key.has(place)) {
            // Those that have it not yet, first: by the time that they leave they have it.
            images += Arc::strong_count(at) - 1;
            let base = at.base().upgrade();
            // An image and the layers of its thread have it each, and this function. One that is just being opened has
            // it once.
            images += base.map_or(0, |base| (Arc::strong_count(&base) - 1).div_ceil(2));
        }
        Ok(images)
    }

    /// Another base of images of this process, which `key` tells from others.
    fn add(&self, key: Key, base: &Arc<Base>) {
        let at = Place { opening: Mutex::new(()), base: Mutex::new(Arc::downgrade(base)) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((key, Arc::new(at)));
    }

    /// The files of a base have changed, and what they hold for it has not: who is to be based on the same finds it as
    /// they are now.
    ///
    /// # Errors
    /// What the host says to the question of what they are; it is found as before then.
    pub(crate) fn renew(&self, base: &Arc<Base>) -> io::Result<()> {
        let layers = Key::of(&base.chain, 0, 0)?.layers;
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |at: &Place| std::ptr::eq(at.base().as_ptr(), Arc::as_ptr(base));
        if let Some((key, _)) = list.iter_mut().find(|(_, at)| is_it(at)) {
            key.layers = layers;
        }
        Ok(())
    }

    /// The base that an image with such clusters will have, opened before anybody has to wait for it: `chain` is that of
    /// the image without its top. All I/O is in multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says, or what is wrong with a file.
    pub fn open_early(&self, chain: Vec<Layer>, cluster: u64, unit: u32) -> io::Result<OpenBase> {
        let opened = self.open(chain, cluster.ilog2(), unit, &mut Budget::default())?;
        opened.map(OpenBase).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// The base that a chain without its top is; the one that others have, if they do.
    ///
    /// # Errors
    /// What the host says, or what is wrong with a file.
    pub(crate) fn open(
        &self,
        chain: Vec<Layer>,
        cluster_bits: u32,
        unit: u32,
        budget: &mut Budget,
    ) -> io::Result<Option<Arc<Base>>> {
        if chain.is_empty() {
            return Ok(None);
        }
        let key = Key::of(&chain, cluster_bits, unit)?;
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody begins to open one while the list is locked.
        list.retain(|(_, at)| Arc::strong_count(at) > 1 || at.base().strong_count() > 0);
        let known = list.iter().find(|(other, _)| *other == key).map(|(_, at)| Arc::clone(at));
        let at = known.unwrap_or_else(|| {
            let at = Arc::<Place>::default();
            list.push((key, Arc::clone(&at)));
            at
        });
        // Files may be slow, or hang: only who wants the same ones waits for them.
        drop(list);
        let _opening = at.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(base) = at.base().upgrade() {
            return Ok(Some(base));
        }
        let base = Arc::new(Base::open(chain, cluster_bits, unit, budget)?);
        *at.base() = Arc::downgrade(&base);
        Ok(Some(base))
    }
}

/// What a new image on top of one that is served will be based on, but for the present state of that.
#[derive(Debug)]
pub(crate) struct Beneath {
    /// The files below it.
    open: Vec<Open>,
    chain: Vec<Layer>,
    key: Key,
}

impl Beneath {
    /// For an image with clusters of 2 to the power of `cluster_bits` bytes on top of `chain`, whose first is served on
    /// meanwhile, and the others are `base`.
    ///
    /// # Errors
    /// What the host says to the question of what the files are.
    pub(crate) fn new(
        chain: &[Layer],
        base: Option<&Arc<Base>>,
        cluster_bits: u32,
        unit: u32,
    ) -> io::Result<Self> {
        let key = Key::of(chain, cluster_bits, unit)?;
        let open = base.map_or_else(Vec::new, |base| base.fresh(1));
        Ok(Self { open, chain: chain.to_vec(), key })
    }

    /// With its first as it is now, which is not written any more. No file is looked at.
    ///
    /// # Errors
    /// What the host says to the memory of its table.
    pub(crate) fn finish(
        mut self,
        top: Open,
        first: Layer,
        bases: &Bases,
    ) -> io::Result<Arc<Base>> {
        self.open.insert(0, top);
        if let (Some(there), LayerFormat::Qcow2 { shape, .. }) =
            (self.chain.first_mut(), &first.format)
        {
            // By the time of its last change it is known once it is at rest ([`Bases::renew`]).
            self.key.layers[0].0.bytes = first.file_bytes;
            self.key.layers[0].1 = Some(*shape);
            *there = first;
        }
        let base = Arc::new(Base::of(self.open, self.chain, self.key.cluster_bits)?);
        bases.add(self.key, &base);
        Ok(base)
    }
}
