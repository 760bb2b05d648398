//! Exports of NBD servers.

use super::{Driver, Flush, Keep, KeptBy, Nature, Parcel, Size, Storage};
use crate::choices::{EngineKind, OwnEngine};
use crate::disk::Disk;
use crate::state::STATE_EXPORT_AT;
use ringway_aio::{Engine, FileId};
use ringway_core::mem::MappingError;
use ringway_nbd_client::{Connected, Counts, Nbd, Negotiated, Remote, Target};
use std::any::Any;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The engine of exports.
pub(crate) const NBD: EngineKind =
    EngineKind::Own(OwnEngine { name: "nbd", make: |depth| Ok(Box::new(Nbd::new(depth)?)) });

/// An export, by its connections.
#[derive(Debug)]
pub(crate) struct Export(pub(crate) Arc<Remote>);

impl Storage for Export {
    fn nature(&self) -> Nature {
        Nature {
            engine: Some(NBD),
            flush: Flush::Engine,
            size: Size::Fixed(
                "it is as large as the NBD server says, which is told at the start of a connection. Resize it \
                 there, then serve it anew",
            ),
            has_length: false,
            kept_by: KeptBy::Name,
            max_bytes: u32::MAX,
        }
    }

    fn attach(&self, engine: &mut dyn Engine, file: &Arc<File>) -> io::Result<FileId> {
        engine.attach_handle(file, &self.0.handle())
    }

    fn map_state(&self, file: &File) -> Result<Option<Keep<'_>>, MappingError> {
        let counts = Counts::map(file, STATE_EXPORT_AT)?;
        Ok(Some(Box::new(move |lost| self.0.keep_counts(counts, lost))))
    }

    fn engines_most(&self) -> Option<usize> {
        Some(self.0.connections())
    }

    fn share_among(&self, engines: usize) {
        self.0.share_among(engines);
    }

    fn wants_flush(&self) -> bool {
        self.0.wants_flush()
    }

    fn give_up(&self, in_flight: bool, patience: Duration) {
        self.0.end();
        if in_flight {
            self.0.await_end(patience);
        }
    }

    fn parcel(&self) -> io::Result<Parcel> {
        let in_use = || io::Error::other("its connections are in use");
        let Connected { others, negotiated: facts, export, away, .. } =
            self.0.unused().ok_or_else(in_use)?;
        let blocks = [facts.min_block, facts.preferred_block, facts.max_block].map(u64::from);
        let [min, preferred, max] = blocks;
        let structured = facts.structured.into();
        Ok(Parcel {
            kind: Exports.kind().to_owned(),
            numbers: vec![facts.bytes, facts.flags.into(), min, preferred, max, structured],
            words: vec![export, away],
            files: others,
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) struct Exports;

impl Driver for Exports {
    fn kind(&self) -> &'static str {
        "nbd"
    }

    fn identity(&self, name: &str, locate: &dyn Fn(&Path) -> PathBuf) -> Option<String> {
        name.parse::<Target>().ok().map(|target| target.identity(locate))
    }

    fn adopt(&self, parcel: Parcel, name: &str, file: &Arc<File>) -> Option<Arc<dyn Storage>> {
        let [bytes, flags, min, preferred, max, structured] = parcel.numbers.try_into().ok()?;
        let [export, away] = parcel.words.try_into().ok()?;
        let negotiated = Negotiated {
            bytes,
            flags: flags.try_into().ok()?,
            min_block: min.try_into().ok()?,
            preferred_block: preferred.try_into().ok()?,
            max_block: max.try_into().ok()?,
            structured: structured == 1,
            // Only tools ask for it.
            block_status: None,
        };
        let (socket, others) = (Arc::clone(file), parcel.files);
        let connected = Connected { socket, others, negotiated, export, away };
        Some(Arc::new(Export(Arc::new(Remote::new(name, &connected)))))
    }
}

impl Disk {
    /// The export that holds the data, if it is one of an NBD server.
    #[must_use]
    pub fn remote(&self) -> Option<&Arc<Remote>> {
        self.storage.as_any().downcast_ref().map(|Export(remote)| remote)
    }

    /// Why the server that has its data, or those of its base, is away, if it is.
    #[must_use]
    pub fn server_away(&self) -> Option<String> {
        self.remote().or_else(|| self.remote_base())?.outage()
    }

    /// Has `call` be called when that server has gone and when it is back. It must not block.
    pub fn on_server_away(&self, call: impl Fn() + Send + Sync + 'static) {
        if let Some(remote) = self.remote().or_else(|| self.remote_base()) {
            remote.on_outage(Box::new(call));
        }
    }
}
