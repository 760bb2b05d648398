//! Opening the two ends: what they are, who else uses them, by what they are known again.

use super::args::CopyArgs;
use super::end::{DiskEnd, End, FileEnd, Flight};
use super::image::ImageEnd;
use super::journal::Identity;
use super::new_image;
use crate::io::disk;
use crate::io::target::{Target, kind};
use crate::new_file::cannot_open;
use crate::wrong_usage::wrong_usage;
use anyhow::{Context, bail};
use ringway_bench::ServedHere;
use ringway_bench::elsewhere::{self, Allocation};
use ringway_control::config::{CephArgs, Format};
use ringway_disk::{LockError, Source, lock_image};
use ringway_image::printable;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the kernel may take to finish what a killed process had in flight.
const DYING: Duration = Duration::from_secs(2);

/// An opened end.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) end: End,
    pub(super) identity: Identity,
}

/// Shared memory for the buffers of a disk behind a socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    pub(super) slots: usize,
    pub(super) chunk: usize,
}

/// Opens the source.
///
/// # Errors
/// What keeps it from being read, in words for the user.
pub(super) fn source(args: &CopyArgs, buffers: Buffers) -> anyhow::Result<Opened> {
    let qcow2 = args.from_format == Some(Format::Qcow2);
    if args.backing_root.is_some() && !qcow2 {
        wrong_usage!("--backing-root is for a source that is qcow2: add --from-format qcow2");
    }
    match &args.source {
        Target::VhostUser(_) | Target::Elsewhere(..) if args.from_format.is_some() => {
            wrong_usage!(
                "{} is copied as its server offers it: leave out --from-format",
                args.source
            )
        }
        Target::VhostUser(socket) => disk_end(Served::at(socket)?, buffers),
        Target::Elsewhere(name, source) => {
            disk_end(Served::here(name, source, &args.ceph, true)?, buffers)
        }
        Target::Path(path) => {
            let mut options = OpenOptions::new();
            options.read(true);
            let file = open(path, &options)?;
            lock(path, &file, true)?;
            if qcow2 {
                return image_end(args, &file);
            }
            file_end(path, file, &options, true)
        }
    }
}

fn image_end(args: &CopyArgs, file: &File) -> anyhow::Result<Opened> {
    let end = new_image::open_chain(args, file)?;
    let End::Image(image) = &end else { bail!("{}: it is no image", args.source) };
    let identity = identity_of_image(args.source.path(), image)?;
    Ok(Opened { end, identity })
}

/// By what a qcow2 image is known again. A change of what it is based on cannot be seen.
///
/// # Errors
/// What the host says.
pub(super) fn identity_of_image(path: &Path, image: &ImageEnd) -> anyhow::Result<Identity> {
    let Some(source) = &image.source else { bail!("{}: it is being made", printable(path)) };
    let of_file = identity(path, &source.top)?;
    let changed = of_file.changed.filter(|_| !source.has_backing());
    Ok(Identity { kind: "qcow2 image".into(), bytes: source.bytes, changed, ..of_file })
}

/// Opens the destination; a file that is not `there` yet is made, empty, with the mode `mode`.
///
/// # Errors
/// What keeps it from being written, in words for the user.
pub(super) fn destination(
    args: &CopyArgs,
    buffers: Buffers,
    there: bool,
    mode: u32,
) -> anyhow::Result<Opened> {
    let target = &args.destination;
    match target {
        Target::VhostUser(socket) => writable(disk_end(Served::at(socket)?, buffers)?, || {
            format!("{target} is served read-only: serve it without --read-only")
        }),
        Target::Elsewhere(name, source) => {
            let served = Served::here(name, source, &args.ceph, false)?;
            writable(disk_end(served, buffers)?, || format!("{target} can only be read"))
        }
        Target::Path(path) => {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let meta = path.metadata();
            let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
            // What was not there when that was asked, nobody has said that it may be overwritten.
            let file = if !there || meta.as_ref().is_err_and(missing) {
                open(path, options.clone().create_new(true).mode(mode))?
            } else {
                // A block device that is mounted must not be written.
                if meta.is_ok_and(|meta| meta.file_type().is_block_device()) {
                    options.custom_flags(libc::O_EXCL);
                }
                open(path, &options)?
            };
            lock(path, &file, false)?;
            options.custom_flags(0);
            file_end(path, file, &options, false)
        }
    }
}

/// A disk that is reached as a guest reaches it.
struct Served {
    kind: &'static str,
    path: PathBuf,
    stream: UnixStream,
    /// Who serves it, if that is this process.
    here: Option<ServedHere>,
    /// Who tells where it has data, if anybody does.
    allocation: Option<Allocation>,
}

impl Served {
    fn at(socket: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(socket)?;
        let stream = ringway_bench::peer::connect(socket)?;
        Ok(Self { kind: "vhost-user", path, stream, here: None, allocation: None })
    }

    fn here(name: &Path, source: &Source, ceph: &CephArgs, reads: bool) -> anyhow::Result<Self> {
        let (disk, allocation) = match reads {
            true => elsewhere::open_with_allocation(source, ceph)?,
            false => {
                let disk = elsewhere::open(source, ceph, false)?;
                let allocation = Allocation::of_cluster(&disk);
                (disk, allocation)
            }
        };
        if let Some(image) = disk.cluster_image().filter(|image| image.target().snapshot.is_none())
        {
            if reads {
                if let Some(holder) = image.facts()?.holder.filter(|holder| holder.lives) {
                    let (name, address) = (printable(name), holder.address);
                    bail!(
                        "{name} is in use by {address}: its content may change; copy a snapshot of it (`rbd snap \
                 create`), copy from its socket, or stop it"
                    );
                }
            }
        }
        let whole = disk.remote().map(|remote| remote.negotiated().bytes);
        if let Some(bytes) = whole.filter(|&bytes| reads && bytes != disk.capacity()) {
            bail!(
                "{}: the export has {bytes} bytes, and the last {}, less than a block, would not be copied. \
                 `nbdcopy` or `qemu-img convert` copies all of it",
                printable(name),
                bytes - disk.capacity()
            );
        }
        let (here, stream) = ServedHere::start(disk)?;
        let kind = kind(source);
        Ok(Self { kind, path: name.into(), stream, here: Some(here), allocation })
    }
}

fn writable(opened: Opened, why_not: impl FnOnce() -> String) -> anyhow::Result<Opened> {
    if let End::Disk(disk) = &opened.end {
        if disk.device.info().read_only {
            bail!(why_not());
        }
    }
    Ok(opened)
}

fn disk_end(served: Served, buffers: Buffers) -> anyhow::Result<Opened> {
    let Buffers { slots, chunk } = buffers;
    let Served { kind, path, stream, here, allocation } = served;
    let room = (slots + 1) * chunk + (1 << 20);
    let options = ringway_driver::Options::new().queue_size(1024).memory(room);
    let mut end = DiskEnd::new(options.over(stream)?, here, allocation)?;
    let serial = disk::serial(&mut end.queue, &end.device.pool(), Flight::NONE)?;
    let identity = Identity {
        kind: kind.into(),
        path,
        bytes: end.device.capacity(),
        device: 0,
        inode: 0,
        changed: None,
        serial,
    };
    Ok(Opened { end: End::Disk(Box::new(end)), identity })
}

fn file_end(
    path: &Path,
    file: File,
    options: &OpenOptions,
    source: bool,
) -> anyhow::Result<Opened> {
    let meta = file.metadata()?;
    let regular = meta.is_file();
    if !regular && !meta.file_type().is_block_device() {
        bail!("{}: neither a file nor a block device", printable(path));
    }
    // Where the file system has none, or cannot tell, the page cache does.
    let direct = options.clone().custom_flags(libc::O_DIRECT).open(path).ok();
    let direct = direct.filter(|direct| same(&meta, direct));
    let identity = identity(path, &file)?;
    let end = End::File(FileEnd::new(file, direct, regular, source));
    Ok(Opened { end, identity })
}

/// False if the path leads elsewhere by now.
fn same(meta: &Metadata, direct: &File) -> bool {
    direct.metadata().is_ok_and(|now| {
        (now.dev(), now.ino(), now.rdev()) == (meta.dev(), meta.ino(), meta.rdev())
    })
}

/// By what a file or block device is known again.
///
/// # Errors
/// What the host says.
pub(super) fn identity(path: &Path, file: &File) -> anyhow::Result<Identity> {
    let meta = file.metadata()?;
    let regular = meta.is_file();
    let bytes = if regular { meta.len() } else { rustix::fs::seek(file, END)? };
    Ok(Identity {
        kind: if regular { "file" } else { "block device" }.into(),
        path: path.canonicalize().unwrap_or_else(|_| path.into()),
        bytes,
        device: if regular { meta.dev() } else { meta.rdev() },
        inode: if regular { meta.ino() } else { 0 },
        changed: regular
            .then(|| [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()]),
        serial: None,
    })
}

const END: rustix::fs::SeekFrom = rustix::fs::SeekFrom::End(0);

fn open(path: &Path, options: &OpenOptions) -> anyhow::Result<File> {
    options.open(path).map_err(|error| {
        let name = printable(path);
        match error.raw_os_error() {
            Some(libc::EBUSY) => anyhow::anyhow!(
                "{name} is in use by the host itself (mounted, or part of another device)"
            ),
            _ => cannot_open(path, error),
        }
    })
}

/// Refuses a disk that somebody writes, or that somebody uses while it is to be written.
fn lock(path: &Path, file: &File, source: bool) -> anyhow::Result<()> {
    let name = printable(path);
    let (begin, mut waits) = (Instant::now(), false);
    let error = loop {
        match lock_image(file, source) {
            Ok(()) => return Ok(()),
            Err(error) if matches!(error, LockError::Host(_)) || begin.elapsed() > DYING => {
                break error;
            }
            Err(error) => {
                if !waits {
                    tracing::warn!(
                        "{name} is in use by {}: waiting for {} s, in case it was killed and has writes under way",
                        error.holder(file),
                        DYING.as_secs()
                    );
                }
                waits = true;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    };
    let remedy = if source { "its content may change" } else { "it would be destroyed" };
    match error {
        LockError::Host(error) => Err(error).with_context(|| format!("cannot lock {name}")),
        LockError::Locked | LockError::Marked(_) => bail!(
            "{name} is in use by {}: {remedy}; copy from or to its socket, or stop it",
            error.holder(file)
        ),
    }
}
