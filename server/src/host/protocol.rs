//! What daemon and helper say to each other. Both are this very program, so nothing here has to last.

use super::image_message::ImageMessage;
use super::local::{CloneWords, Engines};
use super::parcel_message::ParcelMessage;
use super::path_message::Name;
use super::remote_message::RemoteMessage;
#[cfg(feature = "xen")]
use crate::xen::{Named, RecordName};
use anyhow::{Context, anyhow, ensure};
use ringway_control::config::Location;
use ringway_core::Geometry;
use ringway_disk::storage::take_over;
use ringway_disk::{
    Alignment, Base, BaseExport, Disk, EngineKind, OpenOptions, Parts, Qcow2, Source,
};
use ringway_terminal::reasons::in_full;
use ringway_vhost_user::BindError;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What the daemon asks for.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum HelperRequest {
    /// Open an image. The answer is `Wait`, then one on a line of its own.
    Open(Box<Wanted>),
    /// Make a socket file and listen. What names a path is answered with `Wait`, then on a line of its own.
    Listen { path: Name, private: bool, mode: u32, group: Option<u32> },
    /// Look after what outlives the daemon of a disk, whose image comes with it, locked. It goes through the page
    /// cache if it is `cached`.
    State { cached: bool },
    /// The same for an export that the daemon has.
    StateOfExport { name: Name },
    /// The data of its image are in the file that comes with this.
    StateWatches { number: u64 },
    /// The daemon leaves the image in order, and still has its lock: look after it no more.
    Stateless { number: u64 },
    /// The disk is about to be served from the image that comes with this.
    StateFollows { number: u64 },
    /// It is, or it is not.
    StateSettled { number: u64, follows: bool },
    /// Make a new image on top of one that is served, which comes with this. This and the next two are
    /// answered with `Wait`, then on a line of their own.
    Overlay(Box<OverlayWanted>),
    /// Give it the name of that one.
    NameOverlay { number: u64 },
    /// Let all names be as they are, or as they were before.
    EndOverlay { number: u64, kept: bool },
    /// Open for writing as well what comes with this, unless it is this base, or this name leads to it no
    /// more. Answered as these.
    Writable { name: Name, base: Option<Name> },
    /// Open the configuration file.
    Configuration,
    /// Say what a path leads to.
    Locate { path: Name },
    /// Say who has this image.
    Holder { path: Name, read_only: bool },
    /// The disk of this image was removed for good: that it was served says nothing any more.
    Forget { path: Name },
    /// Let this file stay.
    Keep { number: u64 },
    /// Remove this file.
    Remove { number: u64 },
    /// From now on act as the user that the daemon has become.
    Started,
    /// Open what a guest of this Xen host needs.
    #[cfg(feature = "xen")]
    Xen(#[serde(with = "NamedWords")] Named),
}

/// [`Named`], as it is sent.
#[cfg(feature = "xen")]
#[derive(Deserialize, Serialize)]
#[serde(remote = "Named")]
enum NamedWords {
    Grants,
    Events,
    Store,
    NewRecord(#[serde(with = "RecordWords")] RecordName, u64),
    LeftRecord(#[serde(with = "RecordWords")] RecordName),
    EndedRecord(#[serde(with = "RecordWords")] RecordName),
}

/// [`RecordName`], as it is sent.
#[cfg(feature = "xen")]
#[derive(Deserialize, Serialize)]
#[serde(remote = "RecordName")]
struct RecordWords {
    domid: u16,
    devid: u32,
    queue: u32,
}

/// What the helper answers.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum HelperAnswer {
    /// It may take its time; comes with the line on which the answer will be.
    Wait,
    /// Comes with the file, which is not locked. `new` is the number of an image that was made,
    /// `clone` of one that goes with the disk.
    Opened { found: Box<Found>, new: Option<u64>, clone: Option<u64> },
    /// A new image, which comes with this; `snapshot` is what the old one is to be called.
    Overlay { number: u64, image: ImageMessage, alignment: (u32, u32), snapshot: Name },
    /// Follows that, once for each further file of its image; comes with it.
    Layer,
    /// Comes with a file that is open for writing.
    Writable,
    /// Comes with the socket; `number` is that of the file, `path` where it is from the root.
    Listening { number: u64, path: Name },
    /// Comes with the configuration file.
    Configuration,
    /// What a path leads to.
    Located(Location),
    /// Comes with its file.
    State { number: u64 },
    /// Nothing is kept of the disk, and cannot be.
    NoPlace { why: String },
    /// As far as can be seen.
    Holder(Option<String>),
    /// Comes with it, if there is one.
    #[cfg(feature = "xen")]
    Named { there: bool },
    /// It is done.
    Done,
    /// It cannot be: what is wrong, where, what to do; and whether that is a socket at which somebody
    /// else listens.
    Refused { why: String, socket_busy: bool },
}

impl HelperAnswer {
    /// The answer to what has failed.
    pub(super) fn refused(error: &anyhow::Error) -> Self {
        Self::Refused { why: reason(error), socket_busy: is_socket_busy(error) }
    }
}

/// Why something has failed, in a message that names what was asked for, however long that is.
pub(crate) fn reason(error: &anyhow::Error) -> String {
    /// Bytes: with all of them escaped it fits into a message.
    const LONGEST: usize = 8 << 10;
    let mut why = in_full(error);
    if let Some((end, _)) = why.char_indices().find(|(at, _)| *at > LONGEST) {
        why.truncate(end);
        why.push('…');
    }
    why
}

/// Somebody else listens at a socket, the helper says, in its own words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct SocketBusy(pub(super) String);

/// True if a socket cannot be made because somebody else listens there, whoever has found that out.
pub(crate) fn is_socket_busy(error: &anyhow::Error) -> bool {
    let here = error.downcast_ref::<BindError>();
    matches!(here, Some(BindError::Busy(_))) || error.is::<SocketBusy>()
}

/// A new image on top of one that is served.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct OverlayWanted {
    /// The one that is served.
    pub(super) path: Name,
    /// What that is to be called.
    pub(super) snapshot: Name,
    pub(super) format: String,
    pub(super) virtual_size: u64,
    pub(super) cluster_bits: u32,
    pub(super) direct: bool,
}

/// How an image is to be opened: [`OpenOptions`], but for the engines, which the helper knows.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Wanted {
    path: Name,
    /// It is not a path, but the name of an export of an NBD server.
    remote: Option<RemoteMessage>,
    read_only: bool,
    cache: Option<String>,
    engine: Option<String>,
    serial: Option<String>,
    block_size: Option<u32>,
    create_bytes: Option<u64>,
    lock_wait: Option<Duration>,
    incoming: bool,
    policy: String,
    raw: bool,
    qcow2: bool,
    /// Of a qcow2 image, if one was named.
    backing_root: Option<Name>,
    cache_base: bool,
    never_repair: bool,
    /// What it is a clone of, and the format of that if it was said.
    base: Option<(Name, Option<String>)>,
    /// Bytes and blocks of that, if it is an export.
    base_export: Option<(u64, u32)>,
    /// The clone goes with the disk.
    ephemeral: bool,
    /// The socket that it is named after.
    named_after: Option<Name>,
}

impl Wanted {
    pub(super) fn of(
        options: &OpenOptions,
        (clone, again): (&CloneWords, bool),
    ) -> anyhow::Result<Self> {
        let (path, remote) = match &options.source {
            Source::Path(path) => (path.clone(), None),
            Source::Nbd(target) => {
                (target.to_string().into(), Some(RemoteMessage::of(target, again)))
            }
            _ => return Err(anyhow!("only files and exports are opened by somebody else")),
        };
        let qcow2 = options.qcow2.as_ref();
        Ok(Self {
            path: path.as_path().into(),
            remote,
            read_only: options.read_only,
            cache: options.cache.map(|cache| cache.name().into()),
            engine: options.engine.map(|engine| engine.name().into()),
            serial: options.serial.clone(),
            block_size: options.block_size,
            create_bytes: options.create_bytes,
            lock_wait: options.lock_wait,
            incoming: options.incoming,
            policy: options.path.name().into(),
            raw: options.raw,
            qcow2: qcow2.is_some(),
            backing_root: qcow2.and_then(|q| q.backing_root.as_deref()).map(Name::from),
            cache_base: qcow2.is_some_and(|qcow2| qcow2.cache_base),
            never_repair: qcow2.is_some_and(|qcow2| qcow2.never_repair),
            base: qcow2.and_then(|qcow2| qcow2.base.as_ref()).map(|base| {
                (base.path.as_path().into(), base.format.map(|format| format.name().into()))
            }),
            ephemeral: clone.ephemeral,
            named_after: clone.named_after.as_deref().map(Name::from),
            base_export: qcow2
                .and_then(|qcow2| qcow2.base.as_ref()?.export)
                .map(|export| (export.bytes, export.block)),
        })
    }

    /// What was said of it as a clone.
    pub(super) fn clone_words(&self) -> CloneWords {
        let named_after = self.named_after.clone().map(PathBuf::from);
        CloneWords { ephemeral: self.ephemeral, named_after }
    }

    /// The export that is to be connected to, if it is one.
    pub(super) fn remote(&self) -> Option<&[u8]> {
        self.remote.is_some().then_some(&self.path.0)
    }

    /// A lost connection to that is made anew.
    pub(super) fn is_again(&self) -> bool {
        self.remote.as_ref().is_some_and(RemoteMessage::is_again)
    }

    pub(super) fn into_options(
        self,
        engines: impl Fn(Option<EngineKind>) -> Engines,
    ) -> anyhow::Result<OpenOptions> {
        let engine = self.engine.map(|word| word.parse()).transpose()?;
        let export = self.base_export.map(|(bytes, block)| BaseExport { bytes, block });
        let base = |(path, format): (Name, Option<String>)| {
            let format = format.map(|word| word.parse()).transpose()?;
            anyhow::Ok(Base { path: path.into(), format, export })
        };
        let base = self.base.map(base).transpose()?;
        let path = PathBuf::from(self.path);
        let source = match self.remote {
            Some(words) => Source::Nbd(words.apply(&path)?),
            None => Source::Path(path),
        };
        Ok(OpenOptions {
            source,
            read_only: self.read_only,
            cache: self.cache.map(|word| word.parse()).transpose()?,
            engine,
            engines: engines(engine),
            serial: self.serial,
            block_size: self.block_size,
            create_bytes: self.create_bytes,
            served_before: None,
            lock_wait: self.lock_wait,
            incoming: self.incoming,
            path: self.policy.parse()?,
            raw: self.raw,
            qcow2: self.qcow2.then(|| Qcow2 {
                backing_root: self.backing_root.map(PathBuf::from),
                base,
                cache_base: self.cache_base,
                never_repair: self.never_repair,
            }),
        })
    }
}

/// What opening an image has found out: [`Parts`], but for the file.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Found {
    name: String,
    created: bool,
    incoming: bool,
    block_device: bool,
    erase_block: u32,
    capacity: u64,
    logical_block: u32,
    physical_block: u32,
    optimal_io: u32,
    read_only: bool,
    discard: bool,
    discard_granularity: u32,
    serial: Vec<u8>,
    cache: String,
    cache_why: String,
    engine: String,
    engine_why: String,
    alignment: (u32, u32),
    policy: String,
    /// Its image, if that is no raw one.
    image: Option<ImageMessage>,
    /// What holds its bytes; the files that come with that are the last.
    storage: ParcelMessage,
}

impl Found {
    /// With the files: the disk's own, and then those that its image needs besides.
    ///
    /// # Errors
    /// That its storage cannot be served by another process, and what the host says to another descriptor.
    pub(super) fn of(parts: Parts) -> io::Result<(Self, Vec<Arc<File>>)> {
        let geometry = parts.geometry;
        let mut files = vec![parts.file];
        let image = parts.image.map(|image| ImageMessage::of(image, &mut files));
        let storage = ParcelMessage::of(parts.storage.parcel()?, &mut files);
        let found = Self {
            name: parts.name,
            created: parts.created,
            incoming: parts.incoming,
            block_device: parts.block_device,
            erase_block: parts.erase_block,
            capacity: geometry.capacity,
            logical_block: geometry.logical_block,
            physical_block: geometry.physical_block,
            optimal_io: geometry.optimal_io,
            read_only: geometry.read_only,
            discard: geometry.discard,
            discard_granularity: geometry.discard_granularity,
            serial: parts.serial.into(),
            cache: parts.cache.name().into(),
            cache_why: parts.cache_why,
            engine: parts.engine.name().into(),
            engine_why: parts.engine_why,
            alignment: (parts.alignment.memory, parts.alignment.offset),
            policy: parts.path.name().into(),
            image,
            storage,
        };
        Ok((found, files))
    }

    /// How many files come besides the disk's own.
    pub(super) fn others(&self) -> usize {
        let image = self.image.as_ref().map_or(0, ImageMessage::others);
        image + self.storage.others()
    }

    pub(super) fn into_disk(self, file: OwnedFd, mut others: Vec<OwnedFd>) -> anyhow::Result<Disk> {
        let file = Arc::new(File::from(file));
        ensure!(others.len() == self.others(), "files are missing");
        let its = others.split_off(others.len() - self.storage.others());
        let storage = take_over(self.storage.into_parcel(its), &self.name, &file)?;
        let (memory, offset) = self.alignment;
        ensure!(memory.is_power_of_two() && offset.is_power_of_two(), "an odd alignment");
        let serial = self.serial.try_into();
        Ok(Disk::from(Parts {
            image: self.image.map(|image| image.into_image(&file, others)).transpose()?,
            file,
            name: self.name,
            created: self.created,
            incoming: self.incoming,
            block_device: self.block_device,
            erase_block: self.erase_block,
            geometry: Geometry {
                capacity: self.capacity,
                logical_block: self.logical_block,
                physical_block: self.physical_block,
                optimal_io: self.optimal_io,
                read_only: self.read_only,
                discard: self.discard,
                discard_granularity: self.discard_granularity,
            },
            serial: serial.ok().context("a serial number that is not of 20 bytes")?,
            cache: self.cache.parse()?,
            cache_why: self.cache_why,
            engine: match storage.nature().engine {
                Some(only) => only,
                None => self.engine.parse()?,
            },
            storage,
            engine_why: self.engine_why,
            alignment: Alignment { memory, offset },
            path: self.policy.parse()?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_disk::{CacheMode, SchedulerMode, open};
    use std::os::unix::ffi::OsStrExt;

    #[cfg(feature = "xen")]
    #[test]
    fn what_xen_needs_is_named_by_numbers() {
        let name = RecordName { domid: 7, devid: 51712, queue: 3 };
        for what in [
            Named::Grants,
            Named::Events,
            Named::Store,
            Named::NewRecord(name, 1 << 20),
            Named::LeftRecord(name),
            Named::EndedRecord(name),
        ] {
            let text = serde_json::to_vec(&HelperRequest::Xen(what)).unwrap();
            let HelperRequest::Xen(back) = serde_json::from_slice(&text).unwrap() else { panic!() };
            assert_eq!(back, what);
        }
    }

    #[test]
    fn a_busy_socket_is_known_whoever_finds_it() {
        use anyhow::Context;
        let busy = || Err::<(), _>(BindError::Busy("s".into())).context("the control socket");
        let here = busy().unwrap_err();
        assert!(is_socket_busy(&here));
        let text = serde_json::to_vec(&HelperAnswer::refused(&here)).unwrap();
        let HelperAnswer::Refused { why, socket_busy: true } =
            serde_json::from_slice(&text).unwrap()
        else {
            panic!()
        };
        let there = anyhow::Error::from(SocketBusy(why));
        assert!(is_socket_busy(&there) && there.to_string() == in_full(&here));
        let other = BindError::NotASocket("s".into());
        let HelperAnswer::Refused { socket_busy: false, .. } = HelperAnswer::refused(&other.into())
        else {
            panic!()
        };
    }

    #[test]
    fn c39_any_refusal_fits_into_a_message() {
        let (ours, its) = crate::host::forked::line().unwrap();
        for letter in ["z", "\u{1}", "\u{10ffff}"] {
            let refused = HelperAnswer::refused(&anyhow!(letter.repeat(100_000)));
            crate::host::wire::send(&ours, &refused, None).unwrap();
            let (HelperAnswer::Refused { why, .. }, _) = crate::host::wire::receive(&its).unwrap()
            else {
                panic!()
            };
            assert!(why.starts_with(letter) && why.ends_with('…'));
        }
    }

    #[test]
    fn nothing_is_lost_on_the_way() {
        let folder = tempfile::tempdir().unwrap();
        // A name that is no text.
        let path = folder.path().join(std::ffi::OsStr::from_bytes(b"\xffdisk"));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let mut options = OpenOptions::new(Source::Path(path));
        options.read_only = true;
        options.cache = Some(CacheMode::Writethrough);
        options.engine = Some(EngineKind::Threads);
        options.serial = Some("A b".into());
        options.block_size = Some(4096);
        options.create_bytes = Some(512);
        options.lock_wait = Some(Duration::from_millis(7));
        options.incoming = true;
        options.path = SchedulerMode::Request;
        let text =
            serde_json::to_vec(&Wanted::of(&options, (&CloneWords::default(), false)).unwrap())
                .unwrap();
        let wanted: Wanted = serde_json::from_slice(&text).unwrap();
        let back = wanted.into_options(|_| options.engines.clone()).unwrap();
        assert_eq!(format!("{back:?}"), format!("{options:?}"));

        let disk = open(&options).unwrap();
        let fd = disk.file().try_clone().unwrap();
        let all = |disk: Disk| {
            format!("{:?}", Parts { file: Arc::new(fd.try_clone().unwrap()), ..disk.into_parts() })
        };
        let without_numbers = |text: String| {
            text.split("fd:")
                .map(|part| {
                    part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').to_owned()
                })
                .collect::<String>()
        };
        let (found, _files) = Found::of(open(&options).unwrap().into_parts()).unwrap();
        let text = serde_json::to_vec(&found).unwrap();
        let found: Found = serde_json::from_slice(&text).unwrap();
        let back = found.into_disk(fd.try_clone().unwrap().into(), Vec::new()).unwrap();
        assert_eq!(without_numbers(all(back)), without_numbers(all(disk)));
        let base = |format: Option<ringway_image::Format>| {
            let export = format.map(|_| BaseExport { bytes: 7 << 30, block: 4096 });
            Some(Base { path: folder.path().join("base"), format, export })
        };
        for (backing_root, base, cache_base) in [
            (None, None, false),
            (Some(folder.path().to_owned()), base(None), true),
            (None, base(Some(ringway_image::Format::Qcow2)), false),
        ] {
            options.qcow2 =
                Some(Qcow2 { backing_root, base, cache_base, never_repair: cache_base });
            let clone = CloneWords { ephemeral: true, named_after: Some("/s".into()) };
            let text = serde_json::to_vec(&Wanted::of(&options, (&clone, false)).unwrap()).unwrap();
            let wanted: Wanted = serde_json::from_slice(&text).unwrap();
            assert_eq!(wanted.clone_words(), clone);
            assert_eq!(wanted.into_options(|_| Vec::new()).unwrap().qcow2, options.qcow2);
        }
        let null = OpenOptions::new(Source::Null { bytes: 512, latency_us: 0 });
        assert!(Wanted::of(&null, (&CloneWords::default(), false)).is_err());
    }
}
