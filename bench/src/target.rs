//! What is measured: a served disk, a file, or a disk served in this process.

use crate::fill;
use crate::inside::{Inside, Serving};
use crate::load::{AccessArgs, Load};
use crate::peer;
use anyhow::{Context, Result, anyhow, bail, ensure};
use ringway_control::config::missing_folder;
use ringway_control::config::{Choice, Format, cpus, source};
use ringway_control::size::Size;
use ringway_disk::{CacheMode, Disk, OpenError, OpenOptions, Source};
use ringway_driver::{BlkQueue, Buffer, Device, Options, SchedulerMode};
use ringway_export::usable_engines;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// A target, as it is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    name: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Socket(PathBuf),
    Disk(Source),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let kind = if let Some(path) = word.strip_prefix("vhost-user:") {
            Kind::Socket(path.into())
        } else if let Some(path) = word.strip_prefix("file:") {
            Kind::Disk(Source::Path(path.into()))
        } else {
            Kind::Disk(source(Path::new(word))?)
        };
        if let Kind::Socket(path) | Kind::Disk(Source::Path(path)) = &kind
            && path.as_os_str().is_empty()
        {
            return Err("a path is missing: vhost-user:SOCKET, file:PATH, or a path".into());
        }
        Ok(Self { name: word.to_owned(), kind })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Where one job sits.
pub(crate) enum Handle {
    /// The queue, buffers for its requests, and whether these may be merged.
    Ring(Box<BlkQueue<u32>>, Vec<Buffer>, bool),
    File {
        disk: Arc<Disk>,
        depth: u32,
        room: usize,
        skew: usize,
    },
}

/// Whose CPU time is the server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    /// There is none.
    None,
    /// Somebody in another container.
    Unknown,
    Process(u32),
    /// Threads of this process.
    Inside,
}

/// A target that is ready.
pub(crate) struct Opened {
    /// What it is, in words.
    pub facts: String,
    /// Bytes.
    pub capacity: u64,
    /// Requests are multiples of this, in bytes.
    pub block: u32,
    pub handles: Vec<Handle>,
    pub server: Server,
    /// Stopped before the back-end ends.
    device: Option<Device>,
    pub inside: Option<Inside>,
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
    /// Opens it with a handle per job.
    ///
    /// # Errors
    /// What is wrong with it, or that it holds data.
    pub(crate) fn open(&self, load: &Load, access: &AccessArgs) -> Result<Opened> {
        match &self.kind {
            Kind::Socket(path) => {
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
            Kind::Disk(Source::Path(path)) => {
                ensure!(
                    access.path.is_none(),
                    "{self} is measured bare, without a front-end: leave out --path"
                );
                self.open_file(path, load, access).map(|disk| bare(disk, load, 0))
            }
            Kind::Disk(source) => {
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
        let disk = ringway_disk::open(&OpenOptions::new(source.clone()))?;
        let facts = match source {
            Source::Sim { .. } => "a simulation, served in this process",
            _ => "no data moves; served in this process",
        };
        let serving = Serving {
            queues: load.jobs,
            queue_size: ring_size(load.depth),
            workers: cpus().min(load.jobs).into(),
            harvest_at_once,
        };
        let mut opened = served_here(disk, &serving, load, access)?;
        opened.facts = format!("{}, {facts}", opened.facts);
        Ok(opened)
    }

    fn open_file(&self, path: &Path, load: &Load, access: &AccessArgs) -> Result<Disk> {
        let mut options = OpenOptions::new(Source::Path(path.into()));
        options.read_only = !load.rw.writes();
        options.cache = Some(if access.cached { CacheMode::Writeback } else { CacheMode::None });
        options.engine = access.engine.and_then(Choice::given);
        options.engines = usable_engines();
        // Reading does no harm to any format.
        options.raw = options.read_only || access.format == Some(Format::Raw);
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
            OpenError::NoDirect { path, why } => {
                anyhow!("{}: O_DIRECT does not work here: {why}. Use --cached", path.display())
            }
            // In words for a measurement.
            OpenError::InUse { path, holder } => anyhow!(
                "{}: it is in use by {holder}. Measure its socket instead (vhost-user:SOCKET), or \
                 stop the other one",
                path.display()
            ),
            OpenError::Permission { path, mode, .. } => {
                anyhow!("{}: no permission to open it for {mode}", path.display())
            }
            error => error.into(),
        })
    }
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
    let handle = || Handle::File { disk: Arc::clone(&disk), depth, room, skew };
    Opened {
        facts,
        capacity: geometry.capacity,
        block: if direct { disk.alignment().offset.max(512) } else { 512 },
        handles: (0..load.jobs).map(|_| handle()).collect(),
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

/// Descriptors for `depth` requests.
fn ring_size(depth: u32) -> u16 {
    // At most 4096 requests.
    u16::try_from((depth * 2).next_power_of_two().max(256)).unwrap_or(8192)
}

/// Opens the device behind a connection, a queue per job.
fn over(stream: UnixStream, load: &Load, access: &AccessArgs, server: Server) -> Result<Opened> {
    let room = load.sizes.most() as usize;
    let buffers = room.next_multiple_of(4096) * load.depth as usize * usize::from(load.jobs);
    let path = access.path.unwrap_or(SchedulerMode::Bio);
    let merges = path != SchedulerMode::Bio;
    let mut device = Options::new()
        .queues(load.jobs)
        .queue_size(ring_size(load.depth))
        .memory(buffers + (1 << 20))
        .packed(access.packed)
        .path(path)
        .timeout(Duration::from_secs(10))
        .over(stream)?;
    ensure!(
        !(load.rw.writes() && device.info().read_only),
        "this disk is read-only: use --rw read or randread"
    );
    let pool = device.pool();
    let handles = device.queues()?.into_iter().map(|queue| {
        let buffers = (0..load.depth).map(|_| pool.alloc(room)).collect::<Option<Vec<_>>>();
        let buffers = buffers.context("the shared memory is too small")?;
        Ok(Handle::Ring(Box::new(queue), buffers, merges))
    });
    let handles = handles.collect::<Result<Vec<_>>>()?;
    Ok(Opened {
        facts: format!(
            "{}, {} of {} queues{}",
            Size(device.capacity()),
            load.jobs,
            device.server_queues(),
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
    if path.metadata().with_context(name)?.file_type().is_block_device() {
        return Ok(true);
    }
    let file = File::open(path).with_context(|| format!("{}: cannot read it", name()))?;
    match seek(&file, SeekFrom::Data(0)) {
        Err(Errno::NXIO) => Ok(false),
        Ok(_) => Ok(true),
        Err(error) => Err(error).with_context(name),
    }
}

/// Makes a file of which every byte is written, none left in the page cache; so no hole is measured.
pub(crate) fn fill(path: &Path, bytes: u64) -> Result<()> {
    let name = path.display();
    ensure!(
        bytes > 0 && bytes.is_multiple_of(512),
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
        assert_eq!(kind("vhost-user:/run/a"), Ok(Kind::Socket("/run/a".into())));
        let file = |path: &str| Ok(Kind::Disk(Source::Path(path.into())));
        assert_eq!(kind("file:null:1G"), file("null:1G"));
        assert_eq!(kind("disk.img"), file("disk.img"));
        let null = Source::Null { bytes: 1 << 30, latency_us: 0 };
        assert_eq!(kind("null:1G"), Ok(Kind::Disk(null)));
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
