//! An image on this host that is based on an export of an NBD server: what is written goes to the one, and what nobody
//! has written comes from the other.

use super::{Export, Keep, Nature, Storage};
use crate::choices::EngineKind;
use crate::disk::Disk;
use crate::open::BaseExport;
use ringway_aio::{Engine, FileId, Handle, blocking};
use ringway_core::mem::MappingError;
use ringway_image::{LayerFormat, ReadElsewhere};
use ringway_nbd_client::{Nbd, Remote};
use std::any::Any;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A storage that is written, and the base that is only read.
#[derive(Debug)]
struct Chained {
    top: Arc<dyn Storage>,
    base: Arc<Remote>,
    /// What stands for the base among the files of the image.
    socket: Arc<File>,
}

impl Storage for Chained {
    fn nature(&self) -> Nature {
        self.top.nature()
    }

    fn bytes(&self, file: &File) -> io::Result<u64> {
        self.top.bytes(file)
    }

    fn attach(&self, engine: &mut dyn Engine, file: &Arc<File>) -> io::Result<FileId> {
        if Arc::ptr_eq(file, &self.socket) {
            return engine.attach_handle(file, &self.base.handle());
        }
        self.top.attach(engine, file)
    }

    fn beside(&self) -> Option<&File> {
        self.top.beside()
    }

    fn map_state(&self, file: &File) -> Result<Option<Keep<'_>>, MappingError> {
        self.top.map_state(file)
    }

    /// One connection is for those who wait ([`Reader`]).
    fn engines_most(&self) -> Option<usize> {
        Some((self.base.connections() - 1).max(1))
    }

    fn share_among(&self, engines: usize) {
        self.base.share_among(engines + 1);
    }

    fn give_up(&self, in_flight: bool, patience: Duration) {
        Export(Arc::clone(&self.base)).give_up(in_flight, patience);
        self.top.give_up(in_flight, patience);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Reads an export for threads that wait: the image's own, jobs, tools. One of its connections is theirs, and whoever
/// looks after lost ones has it while none of them reads.
#[derive(Debug)]
struct Reader {
    socket: Arc<File>,
    handle: Handle,
    unit: u32,
    one: Mutex<()>,
}

impl ReadElsewhere for Reader {
    fn unit(&self) -> u32 {
        self.unit
    }

    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        let attach = |engine: &mut Nbd| engine.attach_handle(&self.socket, &self.handle);
        blocking::read_at(Nbd::new(1)?, attach, memory, at)
    }
}

/// Why a disk cannot be based on an export.
#[derive(Debug, thiserror::Error)]
pub enum NotBased {
    /// A kind that is no base.
    #[error("{0}: only an export of an NBD server can be a base that is not a file of this host")]
    Kind(String),
    /// What is written in part, and workers, read by connections of their own.
    #[error(
        "{0}: its server takes one connection only, and a disk that is based on it needs two at least. Have it take \
         more (qemu-nbd --shared=N)"
    )]
    OneConnection(String),
    /// The image is served by an engine that has no pair.
    #[error(
        "{name}: with --engine {engine} no image can be based on an export: leave --engine out"
    )]
    Engine {
        /// The image.
        name: String,
        /// The engine.
        engine: EngineKind,
    },
}

impl Disk {
    /// What is to be known of it before an image is based on it, if it is an export.
    #[must_use]
    pub fn base_export(&self) -> Option<BaseExport> {
        let block = self.remote()?.negotiated().min_block;
        Some(BaseExport { bytes: self.capacity(), block: block.max(1) })
    }

    /// Has an image that was opened with an export as its base read that. Does nothing if the image is based on it no
    /// more. Before its tables are read.
    ///
    /// # Errors
    /// [`NotBased`].
    pub fn stand_on(&mut self, base: &Self) -> Result<(), NotBased> {
        let (Some(remote), Some(export)) = (base.remote(), base.base_export()) else {
            return Err(NotBased::Kind(base.name.clone()));
        };
        let mut active = self.active();
        let layers = active.unmapped.iter_mut().flat_map(|unmapped| unmapped.layers.iter_mut());
        let last = layers.last().filter(|last| matches!(last.format, LayerFormat::Elsewhere(_)));
        let Some(last) = last else { return Ok(()) };
        if remote.connections() < 2 {
            return Err(NotBased::OneConnection(base.name.clone()));
        }
        let (name, engine) = (self.name.clone(), self.engine);
        let pair = engine.with_nbd().ok_or(NotBased::Engine { name, engine })?;
        let (socket, handle, one) = (base.file(), remote.handle(), Mutex::default());
        let reader = Reader { socket: Arc::clone(&socket), handle, unit: export.block, one };
        last.file = Arc::clone(&socket);
        last.format = LayerFormat::Elsewhere(Some(Arc::new(reader)));
        drop(active);
        let (top, base) = (Arc::clone(&self.storage), Arc::clone(remote));
        base.share_among(2);
        self.storage = Arc::new(Chained { top, base, socket });
        self.nature = self.storage.nature();
        self.engine = pair;
        Ok(())
    }

    /// The export that its image is based on.
    #[must_use]
    pub fn remote_base(&self) -> Option<&Arc<Remote>> {
        self.storage.as_any().downcast_ref().map(|Chained { base, .. }| base)
    }
}
