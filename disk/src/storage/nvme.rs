//! NVMe namespaces past the block layer.

use super::{Driver, Flush, KeptBy, Nature, Parcel, Size, Storage, device_bytes};
use crate::choices::EngineKind;
use ringway_aio::nvme::{Facts, Namespace};
use ringway_aio::{Engine, FileId, Handle};
use std::any::Any;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// A namespace whose generic character device is the disk's file.
#[derive(Debug)]
pub(crate) struct Passthrough(pub(crate) Arc<Namespace>);

impl Storage for Passthrough {
    fn nature(&self) -> Nature {
        Nature {
            engine: Some(EngineKind::Nvme),
            flush: Flush::Host,
            size: Size::Asked,
            has_length: false,
            kept_by: KeptBy::File,
            max_bytes: self.0.facts.max_bytes,
        }
    }

    fn bytes(&self, _: &File) -> io::Result<u64> {
        device_bytes(&self.0.block)
    }

    fn attach(&self, engine: &mut dyn Engine, file: &Arc<File>) -> io::Result<FileId> {
        let namespace: Handle = Arc::<Namespace>::clone(&self.0);
        engine.attach_handle(file, &namespace)
    }

    /// A character device has no sync; its block device flushes the same namespace.
    fn beside(&self) -> Option<&File> {
        Some(&self.0.block)
    }

    fn parcel(&self) -> io::Result<Parcel> {
        let facts = &self.0.facts;
        let numbers = [
            facts.id,
            facts.block_shift.into(),
            facts.max_bytes,
            facts.discard_blocks,
            facts.zero_blocks,
        ];
        let deallocates_zeroed = u64::from(facts.deallocates_zeroed);
        Ok(Parcel {
            kind: Namespaces.kind().to_owned(),
            numbers: numbers.into_iter().map(u64::from).chain([deallocates_zeroed]).collect(),
            words: Vec::new(),
            files: vec![Arc::new(self.0.block.try_clone()?)],
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) struct Namespaces;

impl Driver for Namespaces {
    fn kind(&self) -> &'static str {
        "nvme"
    }

    fn adopt(&self, parcel: Parcel, _: &str, _: &Arc<File>) -> Option<Arc<dyn Storage>> {
        let Parcel { numbers, words, files, .. } = parcel;
        let ([block], []) = (<[Arc<File>; 1]>::try_from(files).ok()?, &words[..]) else {
            return None;
        };
        let [id, shift, max_bytes, discard, zero, deallocates_zeroed] = numbers.try_into().ok()?;
        let facts = Facts {
            id: id.try_into().ok()?,
            block_shift: u8::try_from(shift).ok().filter(|shift| (9..=16).contains(shift))?,
            max_bytes: max_bytes.try_into().ok()?,
            discard_blocks: discard.try_into().ok()?,
            zero_blocks: zero.try_into().ok()?,
            deallocates_zeroed: deallocates_zeroed == 1,
        };
        let block = Arc::into_inner(block)?;
        Some(Arc::new(Passthrough(Arc::new(Namespace { facts, block }))))
    }
}
