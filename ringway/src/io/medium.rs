//! What `ringway io` works on, one request after the other.

use super::disk;
use super::target::{Target, kind};
use crate::new_file::cannot_open;
use anyhow::{Context, anyhow, bail};
use ringway_bench::{ServedHere, elsewhere};
use ringway_control::config::{CephArgs, Format};
use ringway_core::mem::Mapping;
use ringway_disk::{ForeignFormat, LockError, OpenOptions as OpenDisk, Qcow2, Source, lock_image};
use ringway_driver::{BlkQueue, Buffer, Device, Options, Rejected};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Bytes of a request; longer commands are several of them.
const CHUNK: usize = 1 << 20;

/// How to open a target.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    pub(crate) read_only: bool,
    pub(crate) direct: bool,
    /// What its owner says.
    pub(crate) format: Option<Format>,
    /// The folder that names of backing files may not lead out of.
    pub(crate) backing_root: Option<PathBuf>,
    /// How to get to a Ceph cluster.
    pub(crate) ceph: CephArgs,
}

/// A file or device, or a disk behind a socket.
#[derive(Debug)]
pub(crate) struct Medium {
    kind: MediumKind,
    bytes: u64,
    read_only: bool,
    /// A file of another format than raw: not to be written.
    foreign: Option<ForeignFormat>,
    chunk: usize,
}

// There is one of it.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
enum MediumKind {
    /// With page-aligned memory for O_DIRECT.
    File { file: File, block: bool, memory: Mapping },
    /// With the only buffer, and who serves it, and what it is, if that is this process.
    Disk {
        device: Box<Device>,
        queue: BlkQueue<()>,
        buffer: Option<Buffer>,
        image: Option<(ServedHere, &'static str)>,
    },
}

impl Medium {
    /// Opens `target`.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub(crate) fn open(target: &Target, how: Open) -> anyhow::Result<Self> {
        let Open { read_only, direct, .. } = how;
        let qcow2 = how.format == Some(Format::Qcow2);
        match target {
            Target::VhostUser(_) | Target::Elsewhere(..) if qcow2 => {
                bail!("{target} is used as its server offers it: leave out --format")
            }
            Target::Elsewhere(..) if direct => {
                bail!("{target} is no file: leave out --direct")
            }
            Target::Elsewhere(_, source) => {
                let disk = elsewhere::open(source, &how.ceph, read_only)?;
                let (here, stream) = ServedHere::start(disk)?;
                Self::served(stream, Some((here, kind(source))), read_only)
            }
            Target::VhostUser(socket) => {
                Self::served(ringway_bench::peer::connect(socket)?, None, read_only)
            }
            Target::Path(_) if qcow2 && direct => {
                bail!("{target}: qcow2 goes through the page cache: leave out --direct")
            }
            Target::Path(path) if qcow2 => {
                let mut options = OpenDisk::new(Source::Path(path.clone()));
                options.read_only = read_only;
                options.engines = ringway_export::usable_engines();
                options.qcow2 = Some(Qcow2 { backing_root: how.backing_root, ..Qcow2::default() });
                let (image, stream) = ServedHere::start(ringway_disk::open(&options)?)?;
                Self::served(stream, Some((image, "qcow2 image")), read_only)
            }
            Target::Path(path) => {
                let flags = if direct { libc::O_DIRECT } else { 0 };
                let mut options = OpenOptions::new();
                let options = options.read(true).write(!read_only).custom_flags(flags);
                let file = options.open(path).map_err(|error| cannot_open(path, error))?;
                let look = || format!("{target}: cannot look at it");
                let kind = file.metadata().with_context(look)?.file_type();
                let block = kind.is_block_device();
                if !block && !kind.is_file() {
                    bail!("{target} is neither a file nor a block device");
                }
                match lock_image(&file, read_only) {
                    Ok(()) => {}
                    // A block device or file system without locks can be used alone only.
                    Err(LockError::Host(error)) => tracing::warn!("cannot lock {target}: {error}"),
                    Err(error) => {
                        let holder = error.holder(&file);
                        bail!("{target} is in use by {holder}: use its socket, or stop it");
                    }
                }
                let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
                let raw = how.format == Some(Format::Raw);
                let foreign = if raw { None } else { ForeignFormat::of(&file, bytes)? };
                let memory = Mapping::anonymous(CHUNK)?;
                let kind = MediumKind::File { file, block, memory };
                Ok(Self { kind, bytes, read_only, foreign, chunk: CHUNK })
            }
        }
    }

    /// A disk at the other end of a connection.
    fn served(
        stream: UnixStream,
        image: Option<(ServedHere, &'static str)>,
        read_only: bool,
    ) -> anyhow::Result<Self> {
        let mut device = Options::new().over(stream)?;
        let queue = device.queue()?;
        let info = device.info();
        let most = info.size_max.map_or(usize::MAX, |max| max as usize).max(512);
        let chunk = CHUNK.min(most / 512 * 512);
        let buffer = Some(device.pool().alloc(chunk).context("out of shared memory")?);
        let (bytes, read_only) = (device.capacity(), read_only || info.read_only);
        let device = Box::new(device);
        let kind = MediumKind::Disk { device, queue, buffer, image };
        Ok(Self { kind, bytes, read_only, foreign: None, chunk })
    }

    /// What there is to know of it.
    pub(crate) fn facts(&self) -> String {
        let kind = match &self.kind {
            MediumKind::File { block: true, .. } => "block device".to_owned(),
            MediumKind::File { .. } => "file".to_owned(),
            MediumKind::Disk { image: Some((_, what)), .. } => (*what).to_owned(),
            MediumKind::Disk { device, .. } => {
                format!("vhost-user-blk disk, blocks of {} bytes", device.block_size())
            }
        };
        let read_only = if self.read_only { ", read-only" } else { "" };
        format!(
            "{} ({} bytes), {kind}{read_only}",
            ringway_control::size::Size(self.bytes),
            self.bytes
        )
    }

    fn check(&self, offset: u64, len: u64, writes: bool) -> anyhow::Result<()> {
        if writes && self.read_only {
            bail!("it is read-only");
        }
        if let Some(format) = self.foreign.filter(|_| writes) {
            bail!(
                "it looks like {}, which writing to its bytes destroys. Start with {}--format raw if \
                 they are what you mean",
                format.words(),
                if format == ForeignFormat::Qcow2 { "--format qcow2, or " } else { "" }
            );
        }
        if offset.checked_add(len).is_none_or(|end| end > self.bytes) {
            bail!(
                "bytes {offset} to {} are beyond the end at {}",
                offset.saturating_add(len),
                self.bytes
            );
        }
        if matches!(self.kind, MediumKind::Disk { .. }) && (offset | len) & 511 != 0 {
            bail!("offset {offset} and length {len} must be multiples of 512");
        }
        Ok(())
    }

    /// Reads `len` bytes, handing them over piece by piece with their offsets.
    ///
    /// # Errors
    /// Of the disk, or of `each`.
    pub(crate) fn read(
        &mut self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.check(offset, len, false)?;
        self.pieces(offset, len, |kind, at, len| match kind {
            MediumKind::File { file, memory, .. } => {
                // SAFETY: the mapping is ours, as long as a piece, and nobody else uses it.
                let bytes = unsafe { std::slice::from_raw_parts_mut(memory.at(0), len) };
                file.read_exact_at(bytes, at).map_err(direct_hint)?;
                each(at, bytes)
            }
            MediumKind::Disk { queue, buffer, .. } => {
                let mut memory = buffer.take().context("the last request was never answered")?;
                memory.set_len(len);
                put(buffer, queue.read(at, memory, ()))?;
                transfer(queue, buffer)?;
                each(at, buffer.as_ref().context("no buffer came back")?)
            }
        })
    }

    /// Writes what `fill` puts there.
    ///
    /// # Errors
    /// Of the disk.
    pub(crate) fn write(
        &mut self,
        offset: u64,
        len: u64,
        fill: impl Fn(u64, &mut [u8]),
    ) -> anyhow::Result<()> {
        self.check(offset, len, true)?;
        self.pieces(offset, len, |kind, at, len| match kind {
            MediumKind::File { file, memory, .. } => {
                // SAFETY: as in `read`.
                let bytes = unsafe { std::slice::from_raw_parts_mut(memory.at(0), len) };
                fill(at, bytes);
                Ok(file.write_all_at(bytes, at).map_err(direct_hint)?)
            }
            MediumKind::Disk { queue, buffer, .. } => {
                let mut memory = buffer.take().context("the last request was never answered")?;
                memory.set_len(len);
                fill(at, &mut memory);
                put(buffer, queue.write(at, memory, ()))?;
                transfer(queue, buffer)
            }
        })
    }

    fn pieces(
        &mut self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(&mut MediumKind, u64, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let len = usize::try_from((end - at).min(self.chunk as u64))?;
            each(&mut self.kind, at, len).with_context(|| format!("at byte {at}"))?;
            at += len as u64;
        }
        Ok(())
    }

    /// Makes the range zero; with `unmap` its space may be freed.
    ///
    /// # Errors
    /// Of the disk, or that it cannot.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, unmap: bool) -> anyhow::Result<()> {
        self.check(offset, len, true)?;
        match &mut self.kind {
            MediumKind::File { file, .. } => {
                let how =
                    if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
                Ok(fallocate(&*file, how | FallocateFlags::KEEP_SIZE, offset, len)?)
            }
            MediumKind::Disk { device, queue, .. } => {
                let max = device.info().max_write_zeroes_sectors;
                ranges(offset, len, max, |at, len| {
                    queue.write_zeroes(at, len, unmap, ()).map_err(|rejected| rejected.why)?;
                    answer(queue)
                })
            }
        }
    }

    /// Says that the range is no longer needed.
    ///
    /// # Errors
    /// Of the disk, or that it cannot.
    pub(crate) fn discard(&mut self, offset: u64, len: u64) -> anyhow::Result<()> {
        /// `_IO(0x12, 119)` of `linux/fs.h`.
        const BLKDISCARD: libc::c_ulong = 0x1277;
        self.check(offset, len, true)?;
        match &mut self.kind {
            MediumKind::File { file, block: true, .. } => {
                let range = [offset, len];
                let fd = file.as_raw_fd();
                // SAFETY: the request reads two words.
                let rc = unsafe { libc::ioctl(fd, BLKDISCARD as _, &raw const range) };
                if rc < 0 { Err(io::Error::last_os_error().into()) } else { Ok(()) }
            }
            MediumKind::File { file, .. } => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(&*file, how, offset, len)?)
            }
            MediumKind::Disk { device, queue, .. } => {
                let max = device.info().max_discard_sectors;
                ranges(offset, len, max, |at, len| {
                    queue.discard(at, len, ()).map_err(|rejected| rejected.why)?;
                    answer(queue)
                })
            }
        }
    }

    /// Makes all writes so far durable.
    ///
    /// # Errors
    /// Of the disk.
    pub(crate) fn flush(&mut self) -> anyhow::Result<()> {
        match &mut self.kind {
            MediumKind::File { file, .. } => Ok(file.sync_data()?),
            MediumKind::Disk { queue, .. } => {
                queue.flush(()).map_err(|rejected| rejected.why)?;
                answer(queue)
            }
        }
    }

    /// The serial number.
    ///
    /// # Errors
    /// Of the disk, or that it has none.
    pub(crate) fn id(&mut self) -> anyhow::Result<String> {
        match &mut self.kind {
            MediumKind::File { .. } => bail!("a file has no serial number"),
            MediumKind::Disk { device, queue, .. } => disk::serial(queue, &device.pool(), ())?
                .ok_or_else(|| anyhow!("the server has no serial number to tell")),
        }
    }
}

/// Calls `each` with parts of at most `sectors` each.
fn ranges(
    offset: u64,
    len: u64,
    sectors: Option<u32>,
    mut each: impl FnMut(u64, u64) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // Without a limit the feature is missing, which the queue says better.
    let max = sectors.map_or(len, |sectors| u64::from(sectors) * 512).max(512);
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let part = (end - at).min(max);
        each(at, part).with_context(|| format!("at byte {at}"))?;
        at += part;
    }
    Ok(())
}

/// A request that was refused gives its buffer back.
fn put(buffer: &mut Option<Buffer>, queued: Result<(), Rejected<()>>) -> anyhow::Result<()> {
    queued.map_err(|rejected| {
        *buffer = rejected.data.into_buffer();
        rejected.why.into()
    })
}

fn transfer(queue: &mut BlkQueue<()>, buffer: &mut Option<Buffer>) -> anyhow::Result<()> {
    let done = disk::finish(queue)?;
    let status = done.status;
    *buffer = done.into_buffer();
    judge(status)
}

fn answer(queue: &mut BlkQueue<()>) -> anyhow::Result<()> {
    judge(disk::finish(queue)?.status)
}

fn judge(status: ringway_driver::Status) -> anyhow::Result<()> {
    match status {
        ringway_driver::Status::Ok => Ok(()),
        ringway_driver::Status::IoError | ringway_driver::Status::NoSpace => {
            bail!("the server reports an I/O error")
        }
        ringway_driver::Status::Unsupported => bail!("the server does not support it"),
    }
}

fn direct_hint(error: io::Error) -> anyhow::Error {
    let aligned = error.raw_os_error() == Some(libc::EINVAL);
    let error = anyhow::Error::new(error);
    if aligned {
        error.context("with --direct, offsets and lengths must be whole blocks")
    } else {
        error
    }
}
