//! One disk: the same words on the command line and in a `[[disk]]` table.

use super::counts::{
    queue_size, queue_size_in_file, queues, queues_in_file, server_connections_in_file,
};
use super::nbd::{connections_in_file, export_name};
use super::seconds::{seconds, seconds_in_file, some_seconds, some_seconds_in_file, whole_seconds};
use super::{LimitArgs, NbdAddress, NbdPlace, SocketMode, SocketRule, cpus};
use crate::size::Size;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use ringway_disk::{CacheMode, EngineKind, ErrorPolicy, OnError, SchedulerMode, Source};
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt::Display;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The most queues a disk gets without being asked: more only cost memory on most hosts.
const QUEUES_AUTO: u16 = 16;

/// The ring size offered without being asked, in descriptors: QEMU's limit.
const QUEUE_SIZE: u16 = 1024;

/// The least memory that a process of a disk can be limited to, in bytes: itself, and some queues.
const MEMORY_MIN: u64 = 32 << 20;

/// What one disk is served from, and how.
#[derive(Clone, Debug, Default, Args, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskArgs {
    /// Image file, block device, export of an NBD server (nbd:unix:/PATH:EXPORT), or image of a Ceph
    /// cluster (rbd:POOL/IMAGE, with @SNAP a snapshot of it). For tests also null:SIZE[,latency=100us],
    /// which holds no data, and sim:ram|ssd|hdd:SIZE, in memory.
    #[arg(value_name = "IMAGE")]
    pub image: Option<PathBuf>,
    /// Create IMAGE as a sparse file of this size if it is missing: 512, 64K, 10G, 1.5T. K, M, G and T are
    /// powers of 1024, in all sizes, also as 10g, 10GB or 10GiB.
    #[arg(long, value_name = "SIZE", help_heading = "Disk")]
    pub size: Option<Size>,
    /// The format of IMAGE [default: raw]. It is never guessed: to say raw also serves what looks like
    /// another format, such as a disk whose guest has written that. Say it in all services.
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Disk")]
    pub format: Option<Format>,
    /// The folder that names of backing files may not lead out of [default: that of IMAGE].
    #[arg(long, value_name = "DIR", help_heading = "Disk")]
    #[serde(default)]
    pub backing_root: Option<PathBuf>,
    /// IMAGE is a qcow2 clone of this file, or export of an NBD server (nbd://HOST/EXPORT): it is made if it is
    /// missing, in a moment, and holds what is written from then on. With --size it is larger than FILE. Nobody may
    /// write FILE any more.
    #[arg(long, value_name = "FILE", help_heading = "Clones")]
    #[serde(default)]
    pub base: Option<PathBuf>,
    /// The format of that file [default: qcow2 if its name ends in .qcow2, else raw].
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Clones")]
    #[serde(default)]
    pub base_format: Option<Format>,
    /// Serve a clone of IMAGE instead of IMAGE, in this folder: of vm7.sock it is DIR/vm7.qcow2.
    #[arg(long, value_name = "DIR", help_heading = "Clones")]
    #[serde(default)]
    pub overlay: Option<PathBuf>,
    /// Read what IMAGE is based on through the host's page cache, with --cache none, too: clones of one base
    /// share it there.
    #[arg(long, help_heading = "Clones")]
    #[serde(default)]
    pub cache_base: bool,
    /// Delete the clone when the disk is removed from a running daemon (`ctl remove`, or a file that is
    /// read again). When the daemon ends it stays, for the guest that comes back.
    #[arg(long, help_heading = "Clones")]
    #[serde(default)]
    pub ephemeral: bool,
    /// What becomes of a qcow2 image with lazy reference counts that was not closed: auto, they are made right
    /// before it is served; never, it is refused, for those who want to look first [default: auto].
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Disk")]
    #[serde(default)]
    pub repair: Option<Repair>,
    /// Refuse everything that changes the disk.
    #[arg(long, help_heading = "Disk")]
    #[serde(default)]
    pub read_only: bool,
    /// Serial number shown to the guest, up to 20 characters.
    #[arg(long, value_name = "TEXT", help_heading = "Disk")]
    pub serial: Option<String>,
    /// Block size shown to the guest [default: what the disk has].
    #[arg(long, value_name = "BYTES", help_heading = "Disk",
          value_parser = PossibleValuesParser::new(["512", "4096"]).map(|w| w.parse::<u32>().unwrap_or(512)))]
    pub block_size: Option<u32>,
    /// How long to wait for another daemon that has the image, in seconds or with a unit (30s, 2m, 1h)
    /// [default: 0, but 30s for the last writes of one that was killed].
    #[arg(long, value_name = "TIME", help_heading = "Disk", value_parser = whole_seconds)]
    #[serde(default, deserialize_with = "seconds_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<super::seconds::Seconds>"))]
    pub lock_wait: Option<u32>,
    /// Take over an image that another daemon still serves, as the destination of a live migration:
    /// it is locked when the guest starts here, not before.
    #[arg(long, help_heading = "Disk")]
    #[serde(default)]
    pub incoming: bool,
    /// The configuration of the Ceph cluster that has IMAGE [default: where Ceph looks for it,
    /// /etc/ceph/ceph.conf].
    #[arg(long, value_name = "FILE", help_heading = "Ceph")]
    #[serde(default)]
    pub ceph_conf: Option<PathBuf>,
    /// The user of that cluster, whose key is in a keyring that the configuration names [default: admin].
    #[arg(long, value_name = "USER", help_heading = "Ceph")]
    #[serde(default)]
    pub ceph_user: Option<String>,
    /// Unix socket to listen on.
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", help_heading = "Disk")]
    pub socket: Option<PathBuf>,
    /// Serve it to NBD clients instead: unix:PATH, or an address of this host with a port, such as
    /// 127.0.0.1:10809. Several disks may be at one address.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "socket", help_heading = "NBD")]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub nbd: Option<NbdAddress>,
    /// What NBD clients call the disk; those that name nothing get the first one at its address
    /// [default: its file's name; none for the only disk of `ringway nbd`].
    #[arg(long, value_name = "NAME", help_heading = "NBD", value_parser = export_name)]
    #[serde(default)]
    pub export: Option<String>,
    /// NBD connections at a time, up to 256: each is a queue of its own [default: 16].
    #[arg(long, value_name = "N", help_heading = "NBD",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    #[serde(default, deserialize_with = "connections_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u16>"))]
    pub connections: Option<u16>,
    /// Mode of the socket file: who may connect [default: 0600; 0660 with --user or --socket-group].
    #[arg(long, value_name = "MODE", help_heading = "Disk")]
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub socket_mode: Option<SocketMode>,
    /// Group of the socket file, by name or number: that of the virtual machines.
    #[arg(long, value_name = "GROUP", help_heading = "Disk")]
    #[serde(default)]
    pub socket_group: Option<String>,
    /// Serve it by a process of its own: memory that its guest makes the process use, and the death of
    /// the process, are this disk's alone. As an option of serve it holds for disks that are added
    /// later, too.
    #[arg(long, value_name = "BOOL", help_heading = "Safety", num_args = 0..=1,
          require_equals = true, default_missing_value = "true")]
    #[serde(default)]
    pub isolate: Option<bool>,
    /// The most memory that this process, and what its guest makes it fill, may take, where the daemon
    /// may make cgroups: guest memory counts, so leave room for all of it.
    #[arg(long, value_name = "SIZE", help_heading = "Safety")]
    #[serde(default)]
    pub memory_max: Option<Size>,

    /// Request queues, up to 256 [default: one per CPU, at most 16].
    #[arg(long, value_name = "N", help_heading = "Speed", value_parser = queues)]
    #[serde(default, deserialize_with = "queues_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u16>"))]
    pub queues: Option<u16>,
    /// Largest ring a guest may set up, in descriptors, a power of two [default: 1024].
    #[arg(long, value_name = "N", help_heading = "Speed", value_parser = queue_size)]
    #[serde(default, deserialize_with = "queue_size_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u16>"))]
    pub queue_size: Option<u16>,
    /// How to talk to the host's disk [default: auto, the best that works].
    #[arg(long, help_heading = "Speed", value_parser = engines())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub engine: Option<Choice<EngineKind>>,
    /// The host's caches: none is O_DIRECT; unsafe ignores flushes [default: none where it works, else
    /// writeback; of qcow2 images writeback].
    #[arg(long, value_name = "MODE", help_heading = "Speed", value_parser = cache_modes())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub cache: Option<CacheMode>,
    /// How requests travel: bio, each by itself at once; request, sorted by sector and merged; auto,
    /// whichever carries more, found by trying [default: auto].
    #[arg(long, value_name = "POLICY", help_heading = "Speed", value_parser = paths())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub path: Option<SchedulerMode>,

    /// Connections to the NBD server that has IMAGE, if that allows several, up to 64 [default: one per
    /// queue, at most 4].
    #[arg(long, value_name = "N", help_heading = "Speed",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    #[serde(default, deserialize_with = "server_connections_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u16>"))]
    pub nbd_connections: Option<u16>,

    /// When the host's disk fails a read: report tells the guest; hold lets it wait until `ctl retry`
    /// [default: report].
    #[arg(long, value_name = "ACTION", help_heading = "Errors", value_parser = on_error())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub on_read_error: Option<OnError>,
    /// The same for writes, discards and zeroing [default: report].
    #[arg(long, value_name = "ACTION", help_heading = "Errors", value_parser = on_error())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub on_write_error: Option<OnError>,
    /// When the host has no space for a write: hold also tries again every few seconds [default: hold
    /// if the image is sparse, else report].
    #[arg(long, value_name = "ACTION", help_heading = "Errors", value_parser = on_error())]
    #[serde(default, deserialize_with = "word_in_file", serialize_with = "word")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub on_enospc: Option<OnError>,
    /// How long a request is held before the guest is told after all [default: for ever].
    #[arg(long, value_name = "TIME", help_heading = "Errors", value_parser = some_seconds)]
    #[serde(default, deserialize_with = "some_seconds_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<super::seconds::Seconds>"))]
    pub hold_timeout: Option<NonZeroU32>,
    /// How long requests wait for an NBD server that is away before they fail, until it is back
    /// [default: for ever].
    #[arg(long, value_name = "TIME", help_heading = "Errors", value_parser = some_seconds)]
    #[serde(default, deserialize_with = "some_seconds_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<super::seconds::Seconds>"))]
    pub reconnect_timeout: Option<NonZeroU32>,
    /// How long an NBD server may take to accept a connection, and again to shake hands [default: 10s].
    #[arg(long, value_name = "TIME", help_heading = "Errors", value_parser = some_seconds)]
    #[serde(default, deserialize_with = "some_seconds_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<super::seconds::Seconds>"))]
    pub connect_timeout: Option<NonZeroU32>,
    /// How long an NBD server may answer nothing at all while requests wait for it; then it is connected to
    /// anew. It may take twice as long until that is seen [default: 60s].
    #[arg(long, value_name = "TIME", help_heading = "Errors", value_parser = some_seconds)]
    #[serde(default, deserialize_with = "some_seconds_in_file")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<super::seconds::Seconds>"))]
    pub response_timeout: Option<NonZeroU32>,
    /// What its guest may ask of it.
    #[command(flatten)]
    #[serde(default, deserialize_with = "limits_of_all")]
    pub limits: LimitArgs,
    /// The group of disks that it shares limits with: a [[limit-group]] of the file, or one made by
    /// `ringway ctl limit --create`.
    #[arg(long, value_name = "NAME", help_heading = "Limits")]
    #[serde(default)]
    pub limit_group: Option<String>,
}

/// A format of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment would be a line of the help")]
pub enum Format {
    // The bytes of the file are those of the disk.
    Raw,
    // QEMU copy-on-write.
    Qcow2,
}

/// When an image that was not closed is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment would be a line of the help")]
pub enum Repair {
    Auto,
    Never,
}

/// A choice that can be left to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// The program chooses.
    Auto,
    /// The user has chosen.
    Is(T),
}

impl<T> Choice<T> {
    /// What the user has chosen.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Is(choice) => Some(choice),
        }
    }
}

impl<T: FromStr<Err: Display>> FromStr for Choice<T> {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if word == "auto" {
            return Ok(Self::Auto);
        }
        word.parse().map(Self::Is).map_err(|error| format!("{error}, auto"))
    }
}

/// The words for an engine, for the command line.
pub fn engines() -> impl TypedValueParser<Value = Choice<EngineKind>> {
    let words = std::iter::once("auto").chain(EngineKind::ALL.map(EngineKind::name));
    PossibleValuesParser::new(words).try_map(|word| word.parse())
}

/// The words for a cache mode, for the command line.
pub fn cache_modes() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::ALL.map(CacheMode::name)).try_map(|word| word.parse())
}

/// The words for a path, for the command line.
pub fn paths() -> impl TypedValueParser<Value = SchedulerMode> {
    PossibleValuesParser::new(SchedulerMode::ALL.map(SchedulerMode::name))
        .try_map(|word| word.parse())
}

/// The words for what becomes of a request that fails, for the command line.
fn on_error() -> impl TypedValueParser<Value = OnError> {
    PossibleValuesParser::new(OnError::ALL.map(OnError::name)).try_map(|word| word.parse())
}

/// Limits that are all there are, so that a mistake in them is one already: its place is known here.
pub(super) fn limits_of_all<'de, D: Deserializer<'de>>(from: D) -> Result<LimitArgs, D::Error> {
    let limits = LimitArgs::deserialize(from)?;
    limits.rates().map_err(D::Error::custom)?;
    Ok(limits)
}

pub(super) fn word_in_file<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let word = Option::<String>::deserialize(deserializer)?;
    word.map(|word| word.parse()).transpose().map_err(D::Error::custom)
}

fn word<T: Display, S: Serializer>(word: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
    word.as_ref().map(T::to_string).serialize(to)
}

impl<T: Display> Display for Choice<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Is(choice) => choice.fmt(f),
        }
    }
}

/// Where a disk meets its front-end.
#[derive(Debug)]
pub enum Place {
    /// A socket file to listen on.
    Socket(PathBuf),
    /// A socket that was inherited.
    Inherited {
        /// The socket.
        fd: OwnedFd,
        /// True if it listens, false if it is connected.
        listens: bool,
        /// Where it is bound, if it is.
        path: Option<PathBuf>,
    },
    /// A guest of this Xen host.
    Xen(XenDevice),
    /// NBD clients.
    Nbd(NbdPlace),
}

/// A virtual device that a Xen host's toolstack has attached, as its folder in xenstore describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenDevice {
    /// The back-end's folder.
    pub back: String,
    /// The front-end's folder.
    pub front: String,
    /// The front-end's domain.
    pub domid: u16,
    /// The number of the device.
    pub devid: u32,
    /// What is to be served.
    pub params: String,
    /// The guest may not write.
    pub read_only: bool,
}

/// A disk to serve, nothing left open but what the disk itself decides.
#[derive(Debug)]
pub struct DiskSpec {
    /// What to serve.
    pub source: Source,
    /// Where.
    pub place: Place,
    /// Where this was said: `disks.toml, line 3`. Empty on the command line.
    pub origin: String,
    /// Size of the file if it is to be made, in bytes.
    pub create_bytes: Option<u64>,
    /// Refuse changes.
    pub read_only: bool,
    /// How long to wait for whoever has the image.
    pub lock_wait: Option<Duration>,
    /// How long requests wait for a server that is away before they fail; `None` for ever.
    pub reconnect_timeout: Option<Duration>,
    /// How long a server may answer nothing while requests wait for it; `None` for as long as is usual.
    pub response_timeout: Option<Duration>,
    /// Lock the image when the guest starts, not before.
    pub incoming: bool,
    /// What GET_ID answers.
    pub serial: Option<String>,
    /// Shown to the guest, in bytes.
    pub block_size: Option<u32>,
    /// Request queues.
    pub queues: u16,
    /// Descriptors of the largest ring.
    pub queue_size: u16,
    /// The engine, unless the disk chooses.
    pub engine: Option<EngineKind>,
    /// The cache mode, unless the disk chooses.
    pub cache: Option<CacheMode>,
    /// How requests travel.
    pub path: SchedulerMode,
    /// What becomes of requests that fail.
    pub errors: ErrorPolicy,
    /// The user says that it is raw.
    pub raw: bool,
    /// The user says that it is qcow2.
    pub qcow2: bool,
    /// The folder that names of backing files may not lead out of, where that was said.
    pub backing_root: Option<PathBuf>,
    /// What it is a clone of, and the format of that where it was said.
    pub base: Option<(PathBuf, Option<Format>)>,
    /// The socket that this clone is named after, of which the name has the last part alone.
    pub named_after: Option<PathBuf>,
    /// That base, if it is an export of a server.
    pub base_export: Option<Source>,
    /// What it is based on goes through the page cache in any case.
    pub cache_base: bool,
    /// A qcow2 image that was not closed is refused.
    pub never_repair: bool,
    /// The clone goes with the disk.
    pub ephemeral: bool,
    /// Who may connect to its socket, where that was said.
    pub access: SocketRule,
    /// Whether it has a process of its own, where that was said.
    pub isolate: Option<bool>,
    /// All of this as it was said, with image and socket, for such a process.
    pub words: Box<DiskArgs>,
}

impl DiskSpec {
    /// What a message about it begins with: `disks.toml, line 3: `, or nothing.
    pub fn lead(&self) -> String {
        if self.origin.is_empty() { String::new() } else { format!("{}: ", self.origin) }
    }

    /// The files that it names: its image, and the base that it is a clone of.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let image = match &self.source {
            Source::Path(path) => Some(path.as_path()),
            _ => None,
        };
        let base = self.base.as_ref().map(|(path, _)| path.as_path());
        image.into_iter().chain(base)
    }
}

impl DiskArgs {
    /// `self`, and where it says nothing `other`.
    pub fn or(self, other: &Self) -> Self {
        Self {
            image: self.image.or_else(|| other.image.clone()),
            size: self.size.or(other.size),
            format: self.format.or(other.format),
            backing_root: self.backing_root.or_else(|| other.backing_root.clone()),
            base: self.base.or_else(|| other.base.clone()),
            base_format: self.base_format.or(other.base_format),
            overlay: self.overlay.or_else(|| other.overlay.clone()),
            cache_base: self.cache_base || other.cache_base,
            ephemeral: self.ephemeral || other.ephemeral,
            repair: self.repair.or(other.repair),
            read_only: self.read_only || other.read_only,
            serial: self.serial.or_else(|| other.serial.clone()),
            block_size: self.block_size.or(other.block_size),
            lock_wait: self.lock_wait.or(other.lock_wait),
            incoming: self.incoming || other.incoming,
            ceph_conf: self.ceph_conf.or_else(|| other.ceph_conf.clone()),
            ceph_user: self.ceph_user.or_else(|| other.ceph_user.clone()),
            socket: self.socket.or_else(|| other.socket.clone()),
            nbd: self.nbd.or_else(|| other.nbd.clone()),
            export: self.export.or_else(|| other.export.clone()),
            connections: self.connections.or(other.connections),
            socket_mode: self.socket_mode.or(other.socket_mode),
            socket_group: self.socket_group.or_else(|| other.socket_group.clone()),
            isolate: self.isolate.or(other.isolate),
            memory_max: self.memory_max.or(other.memory_max),
            queues: self.queues.or(other.queues),
            queue_size: self.queue_size.or(other.queue_size),
            engine: self.engine.or(other.engine),
            cache: self.cache.or(other.cache),
            path: self.path.or(other.path),
            on_read_error: self.on_read_error.or(other.on_read_error),
            on_write_error: self.on_write_error.or(other.on_write_error),
            on_enospc: self.on_enospc.or(other.on_enospc),
            hold_timeout: self.hold_timeout.or(other.hold_timeout),
            reconnect_timeout: self.reconnect_timeout.or(other.reconnect_timeout),
            connect_timeout: self.connect_timeout.or(other.connect_timeout),
            response_timeout: self.response_timeout.or(other.response_timeout),
            nbd_connections: self.nbd_connections.or(other.nbd_connections),
            limits: self.limits.or(&other.limits),
            limit_group: self.limit_group.or_else(|| other.limit_group.clone()),
        }
    }

    fn errors(&self) -> ErrorPolicy {
        ErrorPolicy {
            on_read: self.on_read_error.unwrap_or_default(),
            on_write: self.on_write_error.unwrap_or_default(),
            on_enospc: self.on_enospc,
            hold_timeout: self.hold_timeout.map(seconds),
        }
    }

    /// Fills in the defaults.
    ///
    /// # Errors
    /// That `null:` or `sim:` is not followed by what belongs there, or that words do not go together.
    pub fn into_spec(mut self, image: &Path, place: Place) -> Result<DiskSpec, String> {
        self.limits.rates()?;
        if let Some(max) = self.memory_max.filter(|max| max.0 < MEMORY_MIN) {
            return Err(format!(
                "memory-max = {max} is less than a process takes that serves nobody: give {} at least, \
                 and room for all memory of the guest",
                Size(MEMORY_MIN)
            ));
        }
        let socket = match &place {
            Place::Socket(path) => Some(path.clone()),
            Place::Inherited { path, .. } => path.clone(),
            Place::Xen(_) | Place::Nbd(_) => None,
        };
        let image = &self.settle_clone(image, socket.as_deref())?;
        let named_after = socket.clone().filter(|_| self.overlay.is_some());
        let socket = socket.filter(|_| matches!(place, Place::Socket(_)));
        let words = Box::new(Self { image: Some(image.into()), socket, ..self.clone() });
        let errors = self.errors();
        let queues = self.queues.unwrap_or_else(|| cpus().min(QUEUES_AUTO));
        let (source, base_export) = words.sources(image, queues)?;
        Ok(DiskSpec {
            source,
            place,
            origin: String::new(),
            create_bytes: self.size.map(|Size(bytes)| bytes),
            read_only: self.read_only,
            lock_wait: self.lock_wait.map(|seconds| Duration::from_secs(seconds.into())),
            reconnect_timeout: self.reconnect_timeout.map(seconds),
            response_timeout: self.response_timeout.map(seconds),
            incoming: self.incoming,
            serial: self.serial,
            block_size: self.block_size,
            queues,
            queue_size: self.queue_size.unwrap_or(QUEUE_SIZE),
            engine: self.engine.and_then(Choice::given),
            cache: self.cache,
            path: self.path.unwrap_or_default(),
            errors,
            raw: self.format == Some(Format::Raw),
            qcow2: self.format == Some(Format::Qcow2),
            backing_root: self.backing_root,
            base: self.base.map(|base| (base, self.base_format)),
            named_after,
            base_export,
            cache_base: self.cache_base,
            never_repair: self.repair == Some(Repair::Never),
            ephemeral: self.ephemeral,
            access: SocketRule { mode: self.socket_mode, group: self.socket_group },
            isolate: self.isolate,
            words,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_can_be_left_open() {
        assert_eq!("auto".parse(), Ok(Choice::<EngineKind>::Auto));
        assert_eq!("threads".parse(), Ok(Choice::Is(EngineKind::Threads)));
        assert!("magic".parse::<Choice<EngineKind>>().unwrap_err().ends_with("auto"));
    }
}
