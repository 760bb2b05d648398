//! What holds the bytes of a disk. There is one implementation for each kind, and whoever has a disk asks it, not what
//! kind it is: when a disk is opened, when a queue begins, for a job or a report, and never for a request.

mod chained;
#[cfg(any(test, feature = "contract"))]
pub mod contract;
mod custom;
mod local;
mod nbd;
mod nvme;
mod rbd;
mod table;
mod unreal;

pub use chained::NotBased;
pub(crate) use custom::Custom;
pub(crate) use local::{Local, block_ioctl, device_bytes};
pub(crate) use nbd::{Export, NBD};
pub(crate) use nvme::Passthrough;
pub(crate) use rbd::{Cluster, RBD};
pub use table::{NotAdopted, identity_of, take_over};
pub(crate) use unreal::Unreal;

use crate::choices::EngineKind;
use ringway_aio::{Engine, FileId};
use ringway_core::mem::MappingError;
use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Who makes durable what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// The host, by a sync of the file, whichever thread asks for it.
    Host,
    /// Only the engine: the data are somewhere else.
    Engine,
    /// Nobody: there is nothing to keep.
    Nobody,
}

/// What says how large a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The storage, which can be asked again ([`Storage::bytes`]).
    Asked,
    /// The storage, once and for all: why it cannot have another size while it is served, and what to do.
    Fixed(&'static str),
    /// Whoever serves it.
    Told,
}

/// By what is known what outlives a process that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptBy {
    /// Its file.
    File,
    /// Its name.
    Name,
    /// Nothing of it is kept.
    Nothing,
}

/// What a storage is like, as long as it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nature {
    /// The only engine that serves it, if there is only one.
    pub engine: Option<EngineKind>,
    /// Who makes durable what was written.
    pub flush: Flush,
    /// What says how large it is.
    pub size: Size,
    /// The disk becomes longer and shorter with its file.
    pub has_length: bool,
    /// By what is known what outlives this process.
    pub kept_by: KeptBy,
    /// The longest operation it takes, in bytes, whatever the engine does.
    pub max_bytes: u32,
}

/// What a storage does once the disk keeps its state: it calls what it is given if writes that an earlier process had
/// answered may be lost.
pub type Keep<'a> = Box<dyn FnOnce(&dyn Fn()) + 'a>;

/// A storage on its way from the process that has opened it to the one that serves it. Both are this very program.
#[derive(Clone, Debug, Default)]
pub struct Parcel {
    /// What the table calls its kind.
    pub kind: String,
    /// What is known of it, in numbers.
    pub numbers: Vec<u64>,
    /// What is known of it, in words.
    pub words: Vec<Option<String>>,
    /// Its files besides that of the disk.
    pub files: Vec<Arc<File>>,
}

/// A kind of storage, for whoever serves what another process has opened.
pub trait Driver: Sync {
    /// What the table calls it.
    fn kind(&self) -> &'static str;

    /// What a disk of this kind is, by a name that people give it; `None` if the name is of another kind. `locate` says
    /// where a path leads.
    fn identity(&self, name: &str, locate: &dyn Fn(&Path) -> PathBuf) -> Option<String> {
        let _ = (name, locate);
        None
    }

    /// Takes over what [`Storage::parcel`] has put up: no path is looked up, and nothing is connected to. `name` and
    /// `file` are those of the disk. `None` if the parcel is none of this kind.
    fn adopt(&self, parcel: Parcel, name: &str, file: &Arc<File>) -> Option<Arc<dyn Storage>>;
}

/// What holds the bytes of a disk.
pub trait Storage: Any + Debug + Send + Sync {
    /// What it is like; the disk asks once.
    fn nature(&self) -> Nature;

    /// Its present size in bytes, if it can be asked; `file` is that of the disk.
    ///
    /// # Errors
    /// What the host says, or whoever has the data.
    fn bytes(&self, file: &File) -> io::Result<u64> {
        let _ = file;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Has an engine know `file`, which is that of the disk or one that its image is based on: all that the hot path
    /// keeps.
    ///
    /// # Errors
    /// As [`Engine::attach`].
    fn attach(&self, engine: &mut dyn Engine, file: &Arc<File>) -> io::Result<FileId> {
        engine.attach(file)
    }

    /// A second file of the same bytes, which is locked with the disk's own, and synced in its place.
    fn beside(&self) -> Option<&File> {
        None
    }

    /// Maps what it has of its own in the state of the disk, which `file` holds.
    ///
    /// # Errors
    /// That it cannot be mapped.
    fn map_state(&self, file: &File) -> Result<Option<Keep<'_>>, MappingError> {
        let _ = file;
        Ok(None)
    }

    /// How many engines it can be shared among, if that is limited.
    fn engines_most(&self) -> Option<usize> {
        None
    }

    /// So many engines share it, at most as many as can. Said before the first of them comes.
    fn share_among(&self, engines: usize) {
        let _ = engines;
    }

    /// True if it has answered writes that may be lost with it, and a flush can change that.
    fn wants_flush(&self) -> bool {
        false
    }

    /// Nothing more is sent to whoever has the data: others may use it next. If something is in flight it is waited
    /// for until all that was sent has been taken, for `patience` at most.
    fn give_up(&self, in_flight: bool, patience: Duration) {
        let _ = (in_flight, patience);
    }

    /// All of it that another process needs to serve it, beside the file of the disk. Nobody may use it yet.
    ///
    /// # Errors
    /// That it stays with this process, or that it is used already.
    fn parcel(&self) -> io::Result<Parcel> {
        Err(io::Error::other("it stays with the process that has opened it"))
    }

    /// For whoever knows its kind.
    fn as_any(&self) -> &dyn Any;
}

#[cfg(test)]
mod tests;
