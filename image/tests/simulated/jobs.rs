//! What is done to an image beside its guest, as the daemon and its helper do it: in part while queues go on, in part
//! when nothing is in flight.

use crate::model::SECTOR;
use crate::process::Rng;
use crate::served::{Host, Served};
use ringway_core::host::{File, FileExt, StateFile};
use ringway_image::{
    CheckOptions, Commit, Format, Header, Journal, Layer, LayerFormat, NewImage, Shape,
    read_as_stored, repair_counts, repair_leaks,
};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Longer chains are not made.
const CHAIN: usize = 5;

/// Header field incompatible_features, its bits for counts that are too low, and for data in another file.
const FEATURES_AT: u64 = 72;
const DIRTY: u64 = 1;
pub(crate) const DATA_FILE: u64 = 4;

const REFCOUNT_ORDER_AT: u64 = 96;

/// What has to be done when nothing is in flight.
pub(crate) enum Job {
    Nothing,
    /// A new image has the name of the one that is served, and goes on top of it.
    Snapshot(Layer, String),
    /// It is based on nothing any more.
    Flattened,
    /// What it was based on is merged into this.
    Merged(Box<Commit>, Layer, Arc<File>),
}

impl Job {
    /// Begins one while queues go on.
    pub(crate) fn begin(host: &Host, served: &Served, rng: &mut Rng, act: u64) -> Self {
        let job = match rng.below(8) {
            0 | 1 => grow(host, served, rng).map(|()| Self::Nothing),
            2 => flatten(host, served, rng),
            3 | 4 => snapshot(host, served, act),
            5 | 6 => merge(host, served, rng),
            _ => served.image.write_deferred().map(|()| Self::Nothing),
        };
        host.note_losses();
        // Errors are judged by what is there afterwards.
        job.unwrap_or(Self::Nothing)
    }

    /// Ends it. Nothing is in flight.
    pub(crate) fn end(self, host: &Host, served: &mut Served) -> io::Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Snapshot(overlay, name) => {
                let put = put_on_top(host, served, overlay, &name);
                if put.is_err() {
                    // The old one has its name again.
                    host.world.rename(&name, "top");
                    let _ = served.image.set_defers(true);
                }
                put
            }
            Self::Flattened => {
                served.sync(host)?;
                served.image.give_back()?;
                let mut chain = served.image.chain()?;
                chain.truncate(1);
                served.serve(host, chain).map(drop)
            }
            Self::Merged(commit, written, read) => {
                served.sync(host)?;
                served.image.give_back()?;
                let mut chain = served.image.chain()?;
                let below = chain.split_off(3);
                chain.truncate(1);
                chain.push(Layer { file: read, ..written });
                chain.extend(below);
                drop(served.serve(host, chain)?);
                // What it cannot give back leaks.
                let _ = commit.give_back();
                Ok(())
            }
        }
    }
}

pub(crate) fn grow(host: &Host, served: &Served, rng: &mut Rng) -> io::Result<()> {
    let now = host.model(|model| model.sectors());
    grow_to(host, served, now + 1 + usize::try_from(rng.below(200)).unwrap())
}

pub(crate) fn grow_to(host: &Host, served: &Served, sectors: usize) -> io::Result<()> {
    host.model(|model| model.resize(sectors));
    served.image.grow((sectors * SECTOR) as u64)?;
    let at = host.now();
    host.model(|model| model.resized(sectors, at));
    Ok(())
}

pub(crate) fn flatten(host: &Host, served: &Served, rng: &mut Rng) -> io::Result<Job> {
    let image = &served.image;
    if image.layers().len() < 2 {
        return Ok(Job::Nothing);
    }
    image.may_detach()?;
    let mut at = 0;
    while at < image.size() {
        at = image.pull(at, 1 + rng.below(20_000))?.next;
        host.note_losses();
    }
    image.detach()?;
    Ok(Job::Flattened)
}

pub(crate) fn snapshot(host: &Host, served: &Served, act: u64) -> io::Result<Job> {
    let image = &served.image;
    let is_whole = !image.skips_middle() && !image.is_detached() && image.data_file().is_none();
    let LayerFormat::Qcow2 { shape, .. } = &image.layers()[0].format else { unreachable!() };
    if !is_whole || image.layers().len() >= CHAIN {
        return Ok(Job::Nothing);
    }
    let name = format!("snap{act}");
    let file = host.world.open(&format!("new{act}"), host.unit);
    let backing = Some((Path::new(&name), Format::Qcow2));
    let (virtual_size, cluster_bits) = (image.size(), shape.cluster_bits);
    // As the helper does, through the page cache.
    let made = host.world.open(&format!("new{act}"), 1);
    NewImage { virtual_size, cluster_bits, backing }.write(&made).map_err(io::Error::other)?;
    made.sync_data()?;
    let file_bytes = file.metadata()?.len();
    let header = Header::read(&made, file_bytes)?.map_err(io::Error::other)?;
    served.sync(host)?;
    host.forgets.store(true, Relaxed);
    if let Err(error) = image.set_defers(false) {
        let _ = image.set_defers(true);
        return Err(error);
    }
    host.world.link("top", &name);
    host.world.rename(&format!("new{act}"), "top");
    let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
    Ok(Job::Snapshot(Layer { file: Arc::new(file), file_bytes, format, name: "top".into() }, name))
}

fn put_on_top(host: &Host, served: &mut Served, overlay: Layer, name: &str) -> io::Result<()> {
    served.sync(host)?;
    let mut chain = served.image.chain()?;
    chain[0].name = name.into();
    chain.insert(0, overlay);
    served.image.leave_journal()?;
    let old = served.serve(host, chain)?;
    let _ = old.leave_turn();
    host.forgets.store(false, Relaxed);
    Ok(())
}

pub(crate) fn merge(host: &Host, served: &Served, rng: &mut Rng) -> io::Result<Job> {
    let image = &served.image;
    let [_, middle, below @ ..] = image.layers() else { return Ok(Job::Nothing) };
    let (middle, mut below) = (middle.clone(), below.to_vec());
    if below.is_empty() || image.data_file().is_some() {
        return Ok(Job::Nothing);
    }
    image.may_skip_middle()?;
    Commit::judge(&middle, &below[0], host.unit)?;
    let read = Arc::clone(&below[0].file);
    let name = below[0].name.display().to_string();
    below[0].file = Arc::new(host.world.open(&name, host.unit));
    let mut commit = Commit::open(middle, below, &served.bases, host.unit, true)?;
    let mut at = 0;
    while at < commit.size() {
        at = commit.copy(at, 1 + rng.below(20_000))?.next;
        host.note_losses();
    }
    let written = commit.finish()?;
    image.skip_middle()?;
    Ok(Job::Merged(Box::new(commit), written, read))
}

/// The disk becomes smaller while nobody serves it.
pub(crate) fn shrink(host: &Host, served: Served, rng: &mut Rng) -> io::Result<()> {
    let now = host.model(|model| model.sectors());
    let sectors = 1 + usize::try_from(rng.below(now as u64 - 1)).unwrap();
    shrink_to(host, served, sectors)
}

pub(crate) fn shrink_to(host: &Host, served: Served, sectors: usize) -> io::Result<()> {
    if served.image.data_file().is_some() {
        return Ok(());
    }
    host.model(|model| model.resize(sectors));
    let image = Arc::into_inner(served.image).expect("nobody else has it");
    let shrunk = image.shrink((sectors * SECTOR) as u64);
    host.note_losses();
    shrunk?;
    let at = host.now();
    host.model(|model| model.resized(sectors, at));
    Ok(())
}

fn header_of(host: &Host) -> io::Result<(File, Header, u64)> {
    let file = host.world.open("top", 1);
    let bytes = file.metadata()?.len();
    let header = Header::read(&file, bytes)?.map_err(io::Error::other)?;
    Ok((file, header, bytes))
}

/// Whether tools may write to it: its header names no journal, in the upper bits of its autoclear features.
pub(crate) fn is_whole(host: &Host) -> bool {
    header_of(host).is_ok_and(|(_, header, _)| header.features[2] >> 16 == 0)
}

/// Whether it is not marked as one whose counts may be too low.
pub(crate) fn is_closed(host: &Host) -> bool {
    header_of(host).is_ok_and(|(_, header, _)| !header.is_dirty())
}

/// A file for a journal, of which nobody knows anything yet.
pub(crate) fn new_journal() -> Arc<StateFile> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(Journal::BYTES).unwrap();
    Arc::new(file)
}

/// As `ringway check --repair`, and as whoever opens an image that was written with lazy counts. It has no leaks then.
pub(crate) fn repair(host: &Host) -> io::Result<()> {
    read_as_stored(&host.world.open("top", 1))?;
    let (file, header, bytes) = header_of(host)?;
    let options = CheckOptions { range: 64, ..CheckOptions::default() };
    let repair = if header.is_dirty() { repair_counts } else { repair_leaks };
    let found = repair(&file, &header, bytes, options)?.map_err(io::Error::other)?;
    assert_eq!(found.errors, 0, "{:?}", found.problems);
    Ok(())
}

/// QEMU writes it with lazy counts, and is killed: any of them are too low.
pub(crate) fn spoil_counts(host: &Host, rng: &mut Rng) {
    let (file, header, bytes) = header_of(host).unwrap();
    let (cluster, table_at) = (1_u64 << header.cluster_bits, header.refcount_table_offset);
    let width = 1 << (header.refcount_order - 3);
    let per_block = cluster / width;
    let word = |at: u64| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        u64::from_be_bytes(word)
    };
    for at in 0..bytes / cluster {
        let block = word(table_at + 8 * (at / per_block));
        if block != 0 && at >= 4 && at % per_block != 0 && rng.once_in(4) {
            let count = vec![0; usize::try_from(width).unwrap()];
            file.write_all_at(&count, block + width * (at % per_block)).unwrap();
        }
    }
    let features = header.features[0] | DIRTY;
    file.write_all_at(&features.to_be_bytes(), FEATURES_AT).unwrap();
    file.sync_data().unwrap();
}

/// It counts its clusters, of 512 bytes, with 64 bits from now on: 4096 of them fill a table of one. It is new.
pub(crate) fn widen_counts(file: &File) {
    file.write_all_at(&6_u32.to_be_bytes(), REFCOUNT_ORDER_AT).unwrap();
    let counts: Vec<u8> = [1_u64; 4].into_iter().flat_map(u64::to_be_bytes).collect();
    file.write_all_at(&counts, 2 * 512).unwrap();
}

/// Its data are in another file from now on; it is new.
pub(crate) fn part_data(host_file: &File) {
    host_file.write_all_at(&DATA_FILE.to_be_bytes(), FEATURES_AT).unwrap();
}
