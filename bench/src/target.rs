//! What is measured: a served disk, a file, or a disk served in this process.

use crate::backend::{Backend, RingBackend};
use crate::file_backend::FileBackend;
use crate::fill;
use crate::handle::{Handle, handle};
use crate::image_disk::{self, ring_size};
use crate::inside::{Inside, Serving};
use crate::load::{AccessArgs, Load};
use crate::peer;
use crate::queue_set::QueueSet;
use crate::refusal;
use anyhow::{Context, Result, anyhow, bail, ensure};
use ringway_control::config::{Choice, Format, missing_folder, source};
use ringway_control::size::Size;
use ringway_disk::open::is_namespace;
use ringway_disk::{CacheMode, Disk, OpenError, OpenOptions, Source};
use ringway_driver::{Device, Options, SchedulerMode};
use ringway_export::usable_engines;
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A target, as it is named: `vhost-user:SOCKET`, `file:PATH` or a path, `null:SIZE`, `sim:MODEL:SIZE`, an
/// export of an NBD server, an image of a Ceph cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    name: String,
    kind: TargetKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
// A measurement has a few of them.
#[allow(clippy::large_enum_variant)]
enum TargetKind {
    Socket(PathBuf),
    Disk(Source),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let kind = if let Some(path) = word.strip_prefix("vhost-user:") {
            TargetKind::Socket(path.into())
        } else if let Some(path) = word.strip_prefix("file:") {
            TargetKind::Disk(Source::Path(path.into()))
        } else {
            TargetKind::Disk(source(Path::new(word))?)
        };
        if let TargetKind::Socket(path) | TargetKind::Disk(Source::Path(path)) = &kind {
            if path.as_os_str().is_empty() {
                return Err("a path is missing: vhost-user:SOCKET, file:PATH, or a path".into());
            }
        }
        Ok(Self { name: word.to_owned(), kind })
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.name)
    }
}

/// Whose CPU time is the server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// There is none.
    None,
    /// Somebody in another container.
    Unknown,
    /// A process, by its id.
    Process(u32),
    /// Threads of this process.
    Inside,
}

/// A target that is ready.
pub struct Opened {
    /// What it is, in words.
    pub(crate) facts: String,
    /// Bytes.
    pub(crate) capacity: u64,
    /// Requests are multiples of this, in bytes.
    pub(crate) block: u32,
    /// One for each job.
    pub(crate) handles: Vec<Handle>,
    pub(crate) server: Server,
    /// Stopped before the back-end ends.
    device: Option<Device>,
    pub(crate) inside: Option<Inside>,
}

impl Opened {
    /// A target of your own, of `capacity` bytes in blocks of `block` bytes, with what makes the
    /// backend of each job. A backend needs [`Load::slots`] slots of the longest request's size.
    pub fn custom<B: Backend + 'static, F: FnOnce() -> Result<B> + Send + 'static>(
        capacity: u64,
        block: u32,
        server: Server,
        backends: impl IntoIterator<Item = F>,
    ) -> Self {
        Self {
            facts: String::new(),
            capacity,
            block,
            handles: backends.into_iter().map(handle).collect(),
            server,
            device: None,
            inside: None,
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(mut device) = self.device.take() {
            // What failed before has been said.
            let _ = device.stop();
        }
    }
}

impl Target {
    /// What it names, unless that is a served disk.
    pub(crate) fn source(&self) -> Option<&Source> {
        if let TargetKind::Disk(source) = &self.kind { Some(source) } else { None }
    }

    /// As [`Target::open`], of a server that may need a while until it listens; `alive` says whether
    /// it runs.
    ///
    /// # Errors
    /// What `alive` says, or what is wrong after that while.
    pub fn open_within(
        &self,
        timeout: Duration,
        load: &Load,
        access: &AccessArgs,
        mut alive: impl FnMut() -> Result<()>,
    ) -> Result<Opened> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.open(load, access) {
                Err(_) if Instant::now() < deadline => {}
                done => return done,
            }
            alive()?;
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Opens it for a load.
    ///
    /// # Errors
    /// What is wrong with it, or that it holds data.
    pub fn open(&self, load: &Load, access: &AccessArgs) -> Result<Opened> {
        match &self.kind {
            TargetKind::Socket(path) => {
                if load.rw.writes() && !access.allow_write {
                    bail!(
                        "{self}: writing destroys what the disk behind it holds. Add --allow-write \
                         if that is what you want"
                    );
                }
                let (stream, pid) = connect(path)?;
                let pid = access.server_pid.or(pid);
                let server = pid.map_or(Server::Unknown, Server::Process);
                over(stream, load, access, server)
            }
            TargetKind::Disk(Source::Path(path)) if access.format == Some(Format::Qcow2) => {
                let disk = image_disk::open(path, load, access)?;
                served_alike(disk, "a qcow2 image, served in this process", load, access, true)
            }
            TargetKind::Disk(Source::Path(path)) => {
                ensure!(
                    access.path.is_none(),
                    "{self} is measured bare, without a front-end: leave out --path"
                );
                ensure!(
                    load.queues == 1,
                    "{self} is measured bare, without queues: leave out --queues"
                );
                self.open_file(path, load, access).map(|disk| bare(disk, load, 0))
            }
            TargetKind::Disk(source) => {
                ensure!(
                    access.engine.is_none() && !access.cached,
                    "{self} is no file: leave out --engine and --cached"
                );
                self.open_inside(source, load, access, true)
            }
        }
    }

    fn open_inside(
        &self,
        source: &Source,
        load: &Load,
        access: &AccessArgs,
        harvest_at_once: bool,
    ) -> Result<Opened> {
        let (disk, facts) = image_disk::no_file(&self.name, source, load, access)?;
        served_alike(disk, facts, load, access, harvest_at_once)
    }

    fn open_file(&self, path: &Path, load: &Load, access: &AccessArgs) -> Result<Disk> {
        let mut options = OpenOptions::new(Source::Path(path.into()));
        options.read_only = !load.rw.writes();
        options.cache = Some(if access.cached { CacheMode::Writeback } else { CacheMode::None });
        options.engine = access.engine.and_then(Choice::given);
        options.engines = usable_engines();
        // Reading does no harm to any format.
        let raw = access.format == Some(Format::Raw);
        options.raw = options.read_only || raw;
        if !path.exists() {
            if let Some(folder) = missing_folder(path) {
                bail!("{}: there is no such folder: {folder}", path.display());
            }
            let size = load.size.map(|size| size + load.offset).ok_or_else(|| {
                anyhow!(
                    "{}: there is no such file; --size SIZE makes and fills one",
                    path.display()
                )
            })?;
            fill(path, size)?;
        } else if load.rw.writes() && !access.allow_write && holds_data(path)? {
            bail!(
                "{}: it holds data, which writing destroys. Add --allow-write if that is what you \
                 want",
                path.display()
            );
        }
        ringway_disk::open(&options).map_err(|error| match error {
            // What there is to say of its size is of raw images.
            OpenError::NotWhole { .. } | OpenError::NoDirect { .. } if !raw => {
                refusal::foreign(path).unwrap_or_else(|| refusal::in_words(error))
            }
            error => refusal::in_words(error),
        })
    }
}

/// Serves a disk in this process as a daemon would.
fn served_alike(
    disk: Disk,
    facts: &str,
    load: &Load,
    access: &AccessArgs,
    harvest_at_once: bool,
) -> Result<Opened> {
    let serving = image_disk::serving(&disk, load, access, harvest_at_once);
    let mut opened = served_here(disk, &serving, load, access)?;
    opened.facts = format!("{}, {facts}", opened.facts);
    Ok(opened)
}

/// Handles on a disk without a device in between; buffers begin `skew` bytes behind a page.
pub(crate) fn bare(disk: Disk, load: &Load, skew: usize) -> Opened {
    let disk = Arc::new(disk);
    let direct = disk.cache() == CacheMode::None;
    let geometry = disk.geometry();
    let facts = format!(
        "{}, {}, engine {}",
        Size(geometry.capacity),
        if direct { "O_DIRECT" } else { "page cache" },
        disk.engine()
    );
    let (depth, room) = (load.depth, load.sizes.most() as usize);
    let one = || {
        let disk = Arc::clone(&disk);
        handle(move || FileBackend::new(&disk, depth, room, skew))
    };
    Opened {
        facts,
        capacity: geometry.capacity,
        block: if direct { disk.alignment().offset.max(512) } else { 512 },
        handles: (0..load.jobs).map(|_| one()).collect(),
        server: Server::None,
        device: None,
        inside: None,
    }
}

/// Serves a disk in this process, and connects to it.
///
/// # Errors
/// What the host says.
pub(crate) fn served_here(
    disk: Disk,
    serving: &Serving,
    load: &Load,
    access: &AccessArgs,
) -> Result<Opened> {
    let (inside, stream) = Inside::start(disk, serving)?;
    let mut opened = over(stream, load, access, Server::Inside)?;
    opened.inside = Some(inside);
    Ok(opened)
}

/// Connects, and finds out who listens.
fn connect(path: &Path) -> Result<(UnixStream, Option<u32>)> {
    let stream = peer::connect(path)?;
    let pid = peer::server(&stream);
    Ok((stream, pid))
}

/// Opens the device behind a connection, a queue per job.
fn over(stream: UnixStream, load: &Load, access: &AccessArgs, server: Server) -> Result<Opened> {
    let room = load.sizes.most() as usize;
    let (depth, queues) = (load.depth, load.all_queues());
    let buffers = room.next_multiple_of(4096) * depth as usize * usize::from(queues);
    let path = access.path.unwrap_or(SchedulerMode::Bio);
    let merges = path != SchedulerMode::Bio;
    let mut device = Options::new()
        .queues(queues)
        .queue_size(access.queue_size.unwrap_or(ring_size(depth)))
        .memory(buffers + (1 << 20))
        .packed(access.packed)
        .indirect(access.indirect.unwrap_or_default().into())
        .path(path)
        .timeout(Duration::from_secs(10))
        .over(stream)?;
    ensure!(
        !(load.rw.writes() && device.info().read_only),
        "this disk is read-only: use --rw read or randread"
    );
    let pool = device.pool();
    let rings = device.queues()?.into_iter().map(|queue| {
        let buffers = (0..depth).map(|_| pool.alloc(room)).collect::<Option<Vec<_>>>();
        let buffers = buffers.context("the shared memory is too small")?;
        Ok(RingBackend::new(queue, buffers, merges))
    });
    let mut rings = rings.collect::<Result<Vec<_>>>()?.into_iter();
    let handles = (0..load.jobs).map(|_| {
        if load.queues == 1 {
            let ring = rings.next();
            return handle(move || ring.context("a queue is missing"));
        }
        let set: Vec<_> = rings.by_ref().take(load.queues.into()).collect();
        handle(move || Ok(QueueSet::new(set, depth)))
    });
    let handles = handles.collect();
    Ok(Opened {
        facts: format!(
            "{}, {} of {} {}{}",
            Size(device.capacity()),
            queues,
            device.server_queues(),
            if device.server_queues() == 1 { "queue" } else { "queues" },
            if merges { format!(", path {path}") } else { String::new() }
        ),
        capacity: device.capacity(),
        block: device.block_size(),
        handles,
        server,
        device: Some(device),
        inside: None,
    })
}

/// True for devices, and for files that are more than one hole.
fn holds_data(path: &Path) -> Result<bool> {
    let name = || path.display().to_string();
    if path.metadata().with_context(name)?.file_type().is_block_device() || is_namespace(path) {
        return Ok(true);
    }
    // What is no file is refused, with more words, by whoever opens it.
    if !path.metadata().with_context(name)?.is_file() {
        return Ok(false);
    }
    let file = File::open(path).with_context(|| format!("{}: cannot read it", name()))?;
    match seek(&file, SeekFrom::Data(0)) {
        Err(rustix::io::Errno::NXIO) => Ok(false),
        Ok(_) => Ok(true),
        Err(error) => Err(error).with_context(name),
    }
}

/// Makes a file of which every byte is written, none left in the page cache; so no hole is measured.
pub(crate) fn fill(path: &Path, bytes: u64) -> Result<()> {
    let name = path.display();
    ensure!(
        bytes > 0 && bytes % 512 == 0,
        "--size {}: a file has a multiple of 512 bytes",
        Size(bytes)
    );
    let file = File::options().write(true).create_new(true).open(path);
    let file = file.with_context(|| format!("cannot create {name}"))?;
    tracing::info!("filling {name} with {}", Size(bytes));
    let written = fill::fill(&file, bytes).with_context(|| format!("cannot fill {name}"));
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_apart() {
        let kind = |word: &str| word.parse::<Target>().map(|target| target.kind);
        assert_eq!(kind("vhost-user:/run/a"), Ok(TargetKind::Socket("/run/a".into())));
        let file = |path: &str| Ok(TargetKind::Disk(Source::Path(path.into())));
        assert_eq!(kind("file:null:1G"), file("null:1G"));
        assert_eq!(kind("disk.img"), file("disk.img"));
        let null = Source::Null { bytes: 1 << 30, latency_us: 0 };
        assert_eq!(kind("null:1G"), Ok(TargetKind::Disk(null)));
        for word in ["vhost-user:", "file:", "null:", "sim:tape:1G"] {
            assert!(kind(word).is_err(), "{word}");
        }
    }

    #[test]
    fn a_file_that_is_one_hole_holds_no_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        assert!(!holds_data(&path).unwrap());
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(holds_data(&path).unwrap(), "zeroes are data");
    }
}
