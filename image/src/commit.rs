//! An image that is only read is merged into the one it is based on, part by part, while another image
//! on top of both is served.
//!
//! ```text
//! copy … copy     what the middle one holds goes into the base, which says in between what nobody sees:
//!                 whoever reads the chain finds the middle one first
//! finish          the base is durable
//! skip_middle     the header of the top names the base: from then on the middle one is not needed
//! ```
//!
//! No entry of the base's tables that changes is one that anybody looks up meanwhile, as its clusters are
//! no larger than those of the middle one. What is freed in it, former tables among it, is given back when the
//! chain is read without the middle one ([`Commit::give_back`]); it leaks if that never comes.

use crate::ahead::FOR_A_JOB;
use crate::ask::Pulled;
use crate::base::Bases;
use crate::budget::Budget;
use crate::decompress::Decompressor;
use crate::file::BlockFile;
use crate::format::Format;
use crate::header::Header;
use crate::image::{Image, Use};
use crate::journal::write_tables_again;
use crate::layer::{Found, Layer, LayerFormat, Open};
use crate::layout::{Shape, corrupt};
use crate::map::Map;
use crate::printable::printable;
use ringway_core::ByteRange;
use ringway_core::sync_turn::sync_patiently;
use std::io;
use std::path::{Component, Path};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// The most clusters that are looked at together, if there is nothing to read.
const CLUSTERS: u64 = 8192;

/// A part of the middle image.
#[derive(Debug)]
enum Piece {
    Data(u64, Vec<u8>),
    Zeroes(ByteRange),
}

/// What is written.
#[derive(Debug)]
enum Target {
    Raw(BlockFile, Layer),
    Qcow2(Image),
}

/// An image on its way into the one that it is based on.
#[derive(Debug)]
pub struct Commit {
    middle: Open,
    file: BlockFile,
    decompressor: Decompressor,
    size: u64,
    target: Target,
}

fn refuse<T>(text: String) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

/// What the header of an image says, if it has one.
fn header(layer: &Layer, unit: u32) -> io::Result<Option<Header>> {
    if matches!(layer.format, LayerFormat::Raw | LayerFormat::Elsewhere(_)) {
        return Ok(None);
    }
    let file = BlockFile::new(Arc::clone(&layer.file), unit);
    Header::read(&file, layer.file_bytes)?.map(Some).map_err(io::Error::other)
}

/// A file as it is by now: it may have been written, and given up, since the chain was opened.
fn fresh(layer: &Layer, unit: u32) -> io::Result<Layer> {
    let mut layer = Layer { file_bytes: layer.file.metadata()?.len(), ..layer.clone() };
    if let Some(header) = header(&layer, unit)? {
        if let LayerFormat::Qcow2 { shape, .. } = &mut layer.format {
            *shape = Shape::from(&header);
        }
    }
    Ok(layer)
}

/// Bytes of an image's disk.
fn size_of(layer: &Layer) -> u64 {
    match &layer.format {
        LayerFormat::Raw | LayerFormat::Elsewhere(_) => layer.file_bytes,
        LayerFormat::Qcow2 { shape, .. } => shape.size,
    }
}

impl Commit {
    /// Whether `middle` can be merged into `base`, which it is based on. I/O is in multiples of `unit`
    /// bytes.
    ///
    /// # Errors
    /// What is in the way, or what the host says.
    pub fn judge(middle: &Layer, base: &Layer, unit: u32) -> io::Result<()> {
        if header(middle, unit)?.is_some_and(|header| header.snapshots > 0) {
            return refuse(
                "the image to be merged has internal snapshots, which need what it is based on as it is. \
                 Delete them when it is not served (qemu-img snapshot -d)"
                    .into(),
            );
        }
        if matches!(base.format, LayerFormat::Elsewhere(_)) {
            return refuse(format!(
                "what it would be merged into is not on this host ({}), and is only read. Make the image \
                 independent instead (ringway ctl flatten; ringway flatten when it is not served)",
                printable(&base.name)
            ));
        }
        if !base.file.metadata()?.is_file() {
            return refuse("what it would be merged into is no regular file".into());
        }
        let base = &fresh(base, unit)?;
        if let Some(header) = header(base, unit)? {
            header.may_write().map_err(io::Error::other)?;
        }
        let (LayerFormat::Qcow2 { shape, .. }, bytes) = (&middle.format, size_of(base)) else {
            return refuse("the image to be merged is raw: it is based on nothing".into());
        };
        if bytes > shape.size {
            return refuse(format!(
                "what it would be merged into has {bytes} bytes, and it has {}: what lies behind would \
                 appear if the disk grew. Make the disk as large before (ringway ctl resize; ringway \
                 resize when it is not served)",
                shape.size
            ));
        }
        match &base.format {
            LayerFormat::Qcow2 { shape: base, .. } if base.cluster_bits > shape.cluster_bits => {
                refuse(format!(
                    "what it would be merged into has clusters of {} bytes, larger than its own of {}: \
                     only `qemu-img commit` does that, when it is not served",
                    base.cluster(),
                    shape.cluster()
                ))
            }
            _ => Ok(()),
        }
    }

    /// Begins to merge `middle` into the first of `base`, which is open for writing, with its data file if it
    /// has one, locked, and followed by what it is based on itself. It becomes as large as the middle one. [`Commit::judge`] has found
    /// nothing.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the metadata.
    pub fn open(
        middle: Layer,
        mut base: Vec<Layer>,
        bases: &Bases,
        unit: u32,
        barriers: bool,
    ) -> io::Result<Self> {
        let size = size_of(&middle);
        let (middle, data) = Open::new(middle, 0, unit, &mut Budget::default())?;
        if let Some(missing) = &middle.missing {
            return Err(io::Error::new(io::ErrorKind::InvalidData, missing.clone()));
        }
        let file = BlockFile::new(data, unit);
        let Some(first) = base.first_mut() else { return Err(corrupt()) };
        *first = fresh(first, unit)?;
        let first = first.clone();
        let smaller = size_of(&first) < size;
        let target = match first.format {
            LayerFormat::Elsewhere(_) => return Err(io::ErrorKind::Unsupported.into()),
            LayerFormat::Raw => {
                let into = BlockFile::new(Arc::clone(&first.file), unit);
                if smaller {
                    into.set_len(size)?;
                }
                let file_bytes = first.file_bytes.max(size);
                Target::Raw(into, Layer { file_bytes, ..first })
            }
            LayerFormat::Qcow2 { .. } => {
                // Another merge may have broken off when a sync failed.
                write_tables_again(&first.file, first.file_bytes, unit)?;
                let usage = Use { read_only: false, grows: true, barriers };
                let image = Image::open_beside(base, usage, bases, unit)?;
                // Whoever reads the chain reads the base by the tables it had.
                image.in_thread(|work| work.keep_freed(true))?;
                if smaller {
                    image.grow(size)?;
                }
                Target::Qcow2(image)
            }
        };
        let decompressor = Decompressor::default();
        Ok(Self { middle, file, decompressor, size, target })
    }

    /// Bytes of the disk that is looked through.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Copies what the middle image holds from `at` on, until some `most` bytes were read. Zeroes that it
    /// holds become zeroes.
    ///
    /// # Errors
    /// What the host says. The chain means what it did, whatever was copied.
    pub fn copy(&mut self, at: u64, most: u64) -> io::Result<Pulled> {
        let mut pulled = Pulled { next: at, read: 0, copied: 0 };
        let mut pieces = Vec::new();
        let cluster = self.middle.tables.as_ref().map_or(1, |tables| tables.shape.cluster());
        let end = self.size.min(at.saturating_add(CLUSTERS * cluster));
        while pulled.next < end && pulled.read < most {
            let len = self.piece(pulled.next, &mut pieces)?;
            if let Some(Piece::Data(from, bytes)) = pieces.last() {
                if *from == pulled.next {
                    pulled.read += bytes.len() as u64;
                    pulled.copied += bytes.len() as u64;
                }
            }
            pulled.next += len;
        }
        self.write(pieces)?;
        Ok(pulled)
    }

    /// Adds what the middle image holds from `at` on, if it holds something, and says how many bytes were
    /// looked at.
    fn piece(&mut self, at: u64, pieces: &mut Vec<Piece>) -> io::Result<u64> {
        let mut len = self.size - at;
        let bytes = match self.middle.find(at, &mut len)? {
            None => return Ok(len),
            Some(Found::Zero) => {
                pieces.extend(ByteRange::new(at, len).map(Piece::Zeroes));
                return Ok(len);
            }
            Some(Found::Data { offset, .. }) => {
                let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
                self.file.read_whole(&mut bytes, offset)?;
                bytes
            }
            Some(Found::Packed(packed, within)) => {
                let cluster = self.decompressor.cluster(&self.file, packed)?;
                let len = usize::try_from(len).map_err(io::Error::other)?;
                cluster[within..within + len].to_vec()
            }
        };
        pieces.push(Piece::Data(at, bytes));
        Ok(len)
    }

    fn write(&self, pieces: Vec<Piece>) -> io::Result<()> {
        match &self.target {
            Target::Raw(file, _) => pieces.into_iter().try_for_each(|piece| match piece {
                Piece::Data(at, bytes) => file.write_at(&bytes, at),
                Piece::Zeroes(range) => file.punch(range.offset(), range.len()),
            }),
            Target::Qcow2(image) => {
                let range = |piece: &Piece| match piece {
                    Piece::Data(at, bytes) => ByteRange::new(*at, bytes.len() as u64),
                    Piece::Zeroes(range) => Some(*range),
                };
                let written: Vec<_> = pieces.iter().filter_map(range).collect();
                let needs = move |map: &mut Map| {
                    Ok(written.into_iter().flat_map(|range| map.needs_to_write(range)).collect())
                };
                let fetched = image.fetch(FOR_A_JOB, &|| true, needs)?;
                let put = image.in_thread(move |work| {
                    let (writer, map) = work.writer()?;
                    let put = pieces.into_iter().try_for_each(|piece| match piece {
                        Piece::Data(at, bytes) => writer.put(map, at, &bytes),
                        Piece::Zeroes(range) => writer.put_zeroes(map, range),
                    });
                    // Also if one of them could not be written.
                    writer.commit(map)?;
                    put
                });
                fetched.iter().for_each(|ahead| ahead.forget(&[FOR_A_JOB]));
                put?
            }
        }
    }

    /// Makes all that was copied durable. Gives the base as it is by now.
    ///
    /// # Errors
    /// What the host says.
    pub fn finish(&mut self) -> io::Result<Layer> {
        match &self.target {
            Target::Raw(file, layer) => {
                // The last block was written as a whole.
                if layer.file.metadata()?.len() > layer.file_bytes {
                    file.set_len(layer.file_bytes)?;
                }
                sync_patiently(|| file.sync_data()).map(|()| layer.clone())
            }
            Target::Qcow2(image) => {
                image.in_thread(|work| {
                    let (writer, map) = work.writer()?;
                    writer.settle(map)
                })??;
                image.give_back()?;
                image.chain()?.into_iter().next().ok_or_else(corrupt)
            }
        }
    }
}

impl Commit {
    /// Gives back what the base needs no more. Nobody may read by the tables that it had. What a commit
    /// frees and does not give back leaks.
    ///
    /// # Errors
    /// What the host says; some of it leaks then.
    pub fn give_back(self) -> io::Result<()> {
        match &self.target {
            Target::Raw(..) => Ok(()),
            Target::Qcow2(image) => {
                image.in_thread(|work| work.keep_freed(false))?;
                image.give_back()
            }
        }
    }
}

impl Drop for Commit {
    /// Clusters that were taken ahead are given back.
    fn drop(&mut self) {
        if let Target::Qcow2(image) = &self.target {
            if let Err(error) = image.give_back() {
                tracing::warn!("clusters that are not used could not be given back: {error}");
            }
        }
    }
}

impl Image {
    /// Its header names what the image below it is based on, durably. That has to hold all that the
    /// image below holds.
    ///
    /// # Errors
    /// What the host says, and the header may name either then; both mean the same.
    pub fn skip_middle(&self) -> io::Result<()> {
        self.may_skip_middle()?;
        // The file may be longer than when it was opened, and its tables behind what was its end.
        let (chain, again) = (self.chain()?, self.skips_middle());
        self.skips_middle.store(true, SeqCst);
        self.in_thread(move |work| {
            let (writer, map) = work.writer()?;
            let (name, format) = base_of_middle(&chain, again, map.layers.unit)?;
            writer.name_backing(map, &name, format)
        })?
    }

    /// True once [`Image::skip_middle`] was asked for: whoever opens it by its header may find another
    /// chain than [`Image::layers`].
    #[must_use]
    pub fn skips_middle(&self) -> bool {
        self.skips_middle.load(SeqCst)
    }

    /// Whether [`Image::skip_middle`] can be.
    ///
    /// # Errors
    /// What is in the way.
    pub fn may_skip_middle(&self) -> io::Result<()> {
        // The file may be longer than when it was opened, and its tables behind what was its end.
        let (chain, again) = (self.chain()?, self.skips_middle());
        self.in_thread(move |work| {
            let (writer, map) = work.writer()?;
            let (name, format) = base_of_middle(&chain, again, map.layers.unit)?;
            writer.may_name_backing(map, &name, format)
        })?
    }
}

/// The name of what the second image of a chain is based on, for the header of the first, and its format.
/// `again` if that may have it already.
fn base_of_middle(chain: &[Layer], again: bool, unit: u32) -> io::Result<(Vec<u8>, Format)> {
    let [top, middle, base, ..] = chain else { return Err(corrupt()) };
    let backing = |layer| header(layer, unit).map(|header| header?.backing);
    let (Some(to_middle), Some(to_base)) = (backing(top)?, backing(middle)?) else {
        return refuse(
            "the header of an image names nothing that it is based on any more: it was flattened. Serve the \
             disk anew"
                .into(),
        );
    };
    let is_there = again && to_middle.name == to_base.name;
    if !is_there && !is_beside(&to_middle.name) && !to_base.name.is_absolute() {
        return refuse(format!(
            "the image to be merged is in another folder ({}): a name in its header would mean another \
             file in this one's. Stop serving it, then `qemu-img commit`",
            printable(&to_middle.name)
        ));
    }
    let format = match &base.format {
        LayerFormat::Raw | LayerFormat::Elsewhere(_) => Format::Raw,
        LayerFormat::Qcow2 { .. } => Format::Qcow2,
    };
    Ok((to_base.name.as_os_str().as_encoded_bytes().to_vec(), format))
}

/// True for a file of the folder where the name begins.
fn is_beside(name: &Path) -> bool {
    let parts = name.components().filter(|part| !matches!(part, Component::CurDir));
    let mut parts = parts.peekable();
    matches!(parts.next(), Some(Component::Normal(_))) && parts.peek().is_none()
}
