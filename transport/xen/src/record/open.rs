//! Where a record is kept: made, found and removed.

use super::storage::Storage;
use super::types::{Identity, RecordError};
use super::{MAGIC, Record, files};
use crate::access::{Access, Named, RecordName, need};
use ringway_core::file::FileShape;
use ringway_core::mem::{Mapping, MappingError};
use rustix::fs::CWD;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

impl Identity {
    /// Where its record is.
    fn name(&self) -> (RecordName, PathBuf) {
        // A domain has 16 bits.
        #[allow(clippy::cast_possible_truncation)]
        let domid = self.domid as u16;
        let name = RecordName { domid, devid: self.devid, queue: self.queue };
        (name, name.to_string().into())
    }
}

fn mapping_error(path: &Path) -> impl Fn(MappingError) -> RecordError + '_ {
    move |error| RecordError::Host { path: path.into(), error: io::Error::other(error) }
}

impl Record {
    /// A new record at `path`.
    ///
    /// # Errors
    /// What the host says to the file.
    pub fn create(path: &Path, identity: &Identity) -> Result<Self, RecordError> {
        let file = files::make(CWD, path, Self::bytes_of(identity))?;
        Self::over(&file, path, identity, Storage::File(path.into())).map(|new| new.begun(identity))
    }

    /// The same in the folder of records.
    ///
    /// # Errors
    /// What the host says to the file.
    pub fn create_by(access: &Arc<dyn Access>, identity: &Identity) -> Result<Self, RecordError> {
        let (name, path) = identity.name();
        let file = need(&**access, Named::NewRecord(name, Self::bytes_of(identity)));
        let file = file.map_err(|error| RecordError::Host { path: path.clone(), error })?;
        let storage = Storage::Named(Arc::clone(access), name);
        Self::over(&file.into(), &path, identity, storage).map(|new| new.begun(identity))
    }

    fn bytes_of(identity: &Identity) -> u64 {
        Self::bytes(identity.slots as usize, identity.pieces as usize) as u64
    }

    fn over(
        file: &File,
        path: &Path,
        identity: &Identity,
        storage: Storage,
    ) -> Result<Self, RecordError> {
        let bytes = Self::bytes_of(identity);
        let mapping = Mapping::of_file(file, 0, bytes).map_err(mapping_error(path))?;
        let (entries, pieces) = (identity.slots as usize, identity.pieces as usize);
        Ok(Self { mapping, entries, pieces, storage })
    }

    /// The record of these rings that a predecessor has left.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn open(path: &Path, identity: &Identity) -> Result<Self, RecordError> {
        let file = files::find(CWD, path)?;
        Self::left(&file, path, identity, Storage::File(path.into()))
    }

    /// The same from the folder of records.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn open_by(access: &Arc<dyn Access>, identity: &Identity) -> Result<Self, RecordError> {
        let (name, path) = identity.name();
        match access.open(Named::LeftRecord(name)) {
            Ok(Some(file)) => {
                let storage = Storage::Named(Arc::clone(access), name);
                Self::left(&file.into(), &path, identity, storage)
            }
            Ok(None) => Err(RecordError::None(path)),
            Err(error) => Err(RecordError::Host { path, error }),
        }
    }

    fn left(
        file: &File,
        path: &Path,
        identity: &Identity,
        storage: Storage,
    ) -> Result<Self, RecordError> {
        let shape = FileShape::of(file);
        let shape = shape.map_err(|error| RecordError::Host { path: path.into(), error })?;
        if shape.bytes != Self::bytes_of(identity) {
            return Err(RecordError::Other(path.into()));
        }
        let record = Self::over(file, path, identity, storage)?;
        let head = record.head();
        if head.magic.load(Acquire) != MAGIC || head.identity != *identity {
            return Err(RecordError::Other(path.into()));
        }
        Ok(record)
    }

    /// Removes its file: the rings are over.
    pub fn discard(&self) {
        match &self.storage {
            Storage::Nowhere => {}
            Storage::File(path) => files::remove(CWD, path),
            // Best effort: a file that stays is replaced by the next record.
            Storage::Named(access, name) => drop(access.open(Named::EndedRecord(*name))),
        }
    }
}
