//! A qcow2 image, with those it is based on.

use super::clone::make_clone;
use super::created::Created;
use super::direct::turn_on;
use super::engine::{check_block_size, check_engine, choose_engine};
use super::fence::{self, Fenced};
use super::file::open_file;
use super::serial::{place, serial_bytes};
use super::{Base, OpenError, OpenOptions, Qcow2, nbd, probe};
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
use crate::new_image::Backing;
use crate::parts::Parts;
use crate::storage::Local;
use crate::unmapped::Unmapped;
use ringway_core::{Geometry, SECTOR_BYTES};
use ringway_image::{
    Chain, CheckOptions, Elsewhere, Format, Header, Layer, LayerFormat, Refused, Shape, Top, Use,
    printable, read_as_stored,
};
use ringway_scheduler::SchedulerMode;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Opens the image and its chain.
pub(super) fn open(path: &Path, qcow2: &Qcow2, options: &OpenOptions) -> Result<Disk, OpenError> {
    check(path, options)?;
    if let Some(size) = options.block_size {
        check_block_size(size)?;
    }
    let serial = serial_bytes(options.serial.as_deref(), &place(path))?;
    let cache = options.cache.unwrap_or(CacheMode::Writeback);
    let cache_why = match options.cache {
        Some(_) => "as asked",
        None => "qcow2 goes through the page cache",
    };
    // Else the engine could be one for O_DIRECT.
    let options = &OpenOptions { cache: Some(cache), ..options.clone() };
    check_engine(options)?;
    let (created, base) = clone_of(path, qcow2, options)?;
    let (created, file, kind) = open_locked(path, options, created)?;
    let (engine, engine_why) = engine_of(path, qcow2, options)?;
    let host = |what| move |source| OpenError::Host { path: path.into(), what, source };
    if !options.read_only && !options.incoming && !qcow2.never_repair {
        repair_counts(path, &file).map_err(host("make its reference counts right"))?;
    }
    let chain = open_chain(path, &file, (qcow2, base.as_ref()), options)?;
    let grows = kind == probe::FileKind::File;
    let usage = Use { read_only: options.read_only, grows, barriers: cache != CacheMode::Unsafe };
    let layers = Layer::of_chain(chain).map_err(host("learn the sizes of its files"))?;
    // Not before: headers are read as they come.
    let found = match cache {
        // What it is based on is only read: through the page cache clones of one base share it.
        CacheMode::None if qcow2.cache_base => turn_on(path, layers.get(..1).unwrap_or_default())?,
        CacheMode::None => turn_on(path, &layers)?,
        _ => Alignment::ANY,
    };
    let file = layers.first().map_or_else(|| Arc::new(file), |top| Arc::clone(&top.file));
    let Shape { size: bytes, cluster_bits, .. } = shape_of(path, layers.first(), options)?;
    let unit = options.block_size.unwrap_or(512);
    let alignment = with_base(path, found, (qcow2, unit, 1 << cluster_bits))?;
    check_whole(path, bytes, unit)?;
    let logical_block = unit;
    let found = probe::Host::of(path, &file, kind, false);
    let created = created.keep(Some(&file));
    Ok(Disk::from(Parts {
        storage: Arc::new(Local { is_device: !grows }),
        name: path.display().to_string(),
        file,
        created,
        block_device: !grows,
        erase_block: 1,
        geometry: Geometry {
            capacity: bytes,
            logical_block,
            physical_block: found.physical_block.max(logical_block).max(alignment.offset),
            optimal_io: found.optimal_io,
            read_only: options.read_only,
            discard: !options.read_only,
            discard_granularity: (1 << cluster_bits).max(logical_block),
        },
        serial,
        incoming: options.incoming,
        cache,
        cache_why: cache_why.into(),
        engine,
        engine_why,
        alignment,
        // Trying out what merging gains is for raw images.
        path: match options.path {
            SchedulerMode::Request => SchedulerMode::Request,
            _ => SchedulerMode::Bio,
        },
        image: Some(Unmapped { layers, usage }),
    }))
}

/// Makes the reference counts right of an image that was written with lazy ones and not closed, before anybody takes
/// clusters by them; other images are left alone. One that has something else wrong, or more entries than can be gone
/// through in a bounded time, keeps its mark, and is refused by whoever opens it. The file is open for writing, and
/// locked.
///
/// # Errors
/// What the host says; what was made right by then stays.
pub fn repair_counts(path: &Path, file: &File) -> io::Result<()> {
    /// Of 5 TiB of data in clusters of 64 KiB: each way through looks at all of them for each 512 GiB of clusters.
    const STEPS: u64 = 1 << 30;
    let bytes = (&*file).seek(SeekFrom::End(0))?;
    let Ok(header) = Header::read(file, bytes)? else { return Ok(()) };
    if !header.is_dirty() || header.may_write() != Err(Refused::Dirty) {
        return Ok(());
    }
    let begin = Instant::now();
    // An earlier try may have broken off when a sync failed.
    read_as_stored(file)?;
    let Ok(header) = Header::read(file, bytes)? else { return Ok(()) };
    let options = CheckOptions { steps: STEPS, ..CheckOptions::default() };
    let found = ringway_image::repair_counts(file, &header, bytes, options)?;
    if found.is_ok_and(|found| found.cleaned) {
        tracing::warn!(
            "{}: it was not closed (lazy refcounts): its reference counts were made right, in {:.1} s",
            printable(path),
            begin.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// The engine for files some of which may be in the page cache.
fn engine_of(
    path: &Path,
    qcow2: &Qcow2,
    options: &OpenOptions,
) -> Result<(EngineKind, String), OpenError> {
    let direct = options.cache == Some(CacheMode::None);
    if let Some(engine) = options.engine.filter(|engine| engine.needs_direct()) {
        if direct && qcow2.cache_base {
            let why = "with --cache-base what the image is based on is read through the page cache, where the kernel \
                       carries each request out while it is submitted";
            return Err(OpenError::Engine { engine, why: why.into() });
        }
    }
    choose_engine(path, options, direct && !qcow2.cache_base)
}

/// What the top says; refuses one that cannot be handed over with a guest, if that is what is asked for.
fn shape_of(path: &Path, top: Option<&Layer>, options: &OpenOptions) -> Result<Shape, OpenError> {
    match top.map(|top| &top.format) {
        Some(LayerFormat::Qcow2 { data: Some(_), .. }) if options.incoming => {
            let hint = "Its data are in another file, and the daemon that has it keeps the locks of both until \
                        it ends. Migrate its guest with its storage";
            Err(refused(path, "--incoming", hint))
        }
        Some(LayerFormat::Qcow2 { shape, .. }) => Ok(*shape),
        _ => {
            let source = io::ErrorKind::InvalidData.into();
            Err(OpenError::Host { path: path.into(), what: "find its top", source })
        }
    }
}

fn check_whole(path: &Path, bytes: u64, unit: u32) -> Result<(), OpenError> {
    match bytes {
        0 => Err(OpenError::Empty(path.into())),
        _ if bytes % u64::from(unit) == 0 => Ok(()),
        _ => Err(OpenError::NotWholeDisk { path: path.into(), bytes, unit }),
    }
}

/// Opens the image's own file, and locks it.
fn open_locked(
    path: &Path,
    options: &OpenOptions,
    mut created: Created,
) -> Result<(Created, File, probe::FileKind), OpenError> {
    let opened = fence::locked(path, options, || {
        let kind = probe::kind(path)?;
        Ok((open_file(path, options, kind, 0)?, kind))
    });
    match opened {
        Ok((file, kind)) => {
            created.is_locked(&file);
            Ok((created, file, kind))
        }
        Err(Fenced::Open(error)) => Err(error),
        Err(Fenced::Theirs(error)) => {
            // Who has the lock of a new file serves it: it is not ours to remove any more.
            created.keep(None);
            Err(error)
        }
    }
}

/// Refuses what is not there for images with a map.
fn check(path: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    let clones = options.qcow2.as_ref().is_some_and(|qcow2| qcow2.base.is_some());
    if options.create_bytes.is_some() && !clones {
        let hint = "Make the image first: `ringway create`; or a clone with --base";
        return Err(refused(path, "--size", hint));
    }
    Ok(())
}

fn refused(path: &Path, what: &str, hint: &'static str) -> OpenError {
    OpenError::NotQcow2 { path: path.into(), what: what.to_owned(), hint }
}

/// What the files of an image take, together with an export that it is based on: the strictest of both, within what the
/// guest and the clusters of the image are.
fn with_base(
    path: &Path,
    files: Alignment,
    (qcow2, unit, cluster): (&Qcow2, u32, u32),
) -> Result<Alignment, OpenError> {
    let Some(Base { path: base, export: Some(export), .. }) = &qcow2.base else {
        return Ok(files);
    };
    let block = export.block;
    let refuse = |why| Err(OpenError::BaseBlocks { path: path.into(), base: base.clone(), why });
    if u64::from(block) <= SECTOR_BYTES {
        return Ok(files);
    }
    if block > unit {
        return refuse(format!(
            "its server takes blocks of {block} bytes, and the guest's would have {unit}: give --block-size {block}, \
             if that is one of 512 and 4096, or have the server take smaller ones"
        ));
    }
    if block > cluster {
        return refuse(format!(
            "its server takes blocks of {block} bytes, and clusters of the image have {cluster}: make it with larger ones"
        ));
    }
    Ok(Alignment { offset: files.offset.max(block), ..files })
}

/// What it is to be a clone of, if it is, and the clone if that is made now.
fn clone_of(
    path: &Path,
    qcow2: &Qcow2,
    options: &OpenOptions,
) -> Result<(Created, Option<Backing>), OpenError> {
    let missing = path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    if missing && options.incoming {
        return Err(OpenError::NothingIncoming(path.into()));
    }
    let Some(Base { path: base, format, export }) = &qcow2.base else {
        return Ok((Created::nothing(), None));
    };
    if let Some(note) = options.served_before.clone().filter(|_| missing) {
        return Err(OpenError::Gone { path: path.into(), note });
    }
    let fail = |source| OpenError::Base { base: base.clone(), source };
    let backing = match export {
        Some(export) => nbd::backing(base, export.bytes)?,
        None => Backing::inspect(base, *format).map_err(fail)?,
    };
    let host = |source| OpenError::Host { path: path.into(), what: "look at it", source };
    let created = match missing && make_clone(path, &backing, options.create_bytes)? {
        true => Created::just_now(path).map_err(host)?,
        false => Created::nothing(),
    };
    Ok((created, Some(backing)))
}

/// The image with all that it is based on, each of them locked for reading.
fn open_chain(
    path: &Path,
    file: &File,
    (qcow2, base): (&Qcow2, Option<&Backing>),
    options: &OpenOptions,
) -> Result<Chain, OpenError> {
    let host = |source| OpenError::Host { path: path.into(), what: "open it once more", source };
    let top = Top {
        file: file.try_clone().map_err(host)?,
        name: path.into(),
        format: Format::Qcow2,
        read_only: options.read_only,
    };
    // A daemon that was killed in a snapshot was still writing to what is only read by now.
    let mut lock = |file: &File, name: &Path, read_only: bool| {
        let locked = fence::LockWait::new(name, options, false).lock(file, read_only);
        locked.map_err(|error| {
            // Whoever says that it is not to be had names it.
            let (text, named) = (error.to_string(), format!("{}: ", name.display()));
            text.strip_prefix(&named).unwrap_or(&text).to_owned()
        })
    };
    let root = qcow2.backing_root.as_deref();
    let said = qcow2.base.as_ref();
    Ok(match base {
        Some(Backing { is_elsewhere: true, virtual_size: bytes, .. }) => {
            let name = said.map_or(Path::new(""), |base| &base.path);
            let is_called = nbd::is_called(name)?;
            let base = Elsewhere { is_called: &is_called, name, bytes: *bytes };
            Chain::open_on(top, root, &base, &mut lock)?
        }
        Some(base) => Chain::open_clone(top, root, (&base.path, base.format), &mut lock)?,
        None => Chain::open(top, root, &mut lock)?,
    })
}
