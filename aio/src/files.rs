//! The table of files an engine knows.
//!
//! ```
//! # use ringway_aio::files::Files;
//! # use std::{fs::File, sync::Arc};
//! let mut files = Files::new();
//! let id = files.attach(&Arc::new(File::open("/dev/null").unwrap()), "what the engine notes");
//! assert_eq!(files.get(id).note, "what the engine notes");
//! files.detach(id); // lets the file go
//! ```

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crate::engine::FileId;

/// Attached files, each with a note of the engine's about it.
///
/// # Invariants
/// 1. A slot holds its file open, so its descriptor is good as long as it is attached.
#[derive(Debug)]
pub struct Files<T> {
    slots: Vec<Option<Known<T>>>,
}

/// An attached file.
#[derive(Debug)]
pub struct Known<T> {
    /// Its descriptor.
    pub fd: RawFd,
    /// What the engine noted about it.
    pub note: T,
    _open: Arc<File>,
}

impl<T> Default for Files<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Files<T> {
    /// No files.
    #[must_use]
    pub fn new() -> Self {
        Self { slots: Vec::new() }
    }

    /// The identifier that [`Files::attach`] will give next.
    ///
    /// # Panics
    /// With 2^32 files, which no process can have open.
    #[must_use]
    pub fn next(&self) -> FileId {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        FileId(u32::try_from(free).expect("fewer files than descriptors"))
    }

    /// Takes a file in, and keeps it open. Allocates.
    pub fn attach(&mut self, file: &Arc<File>, note: T) -> FileId {
        let id = self.next();
        let known = Known { fd: file.as_raw_fd(), note, _open: Arc::clone(file) };
        match self.slots.get_mut(id.0 as usize) {
            Some(slot) => *slot = Some(known),
            None => self.slots.push(Some(known)),
        }
        id
    }

    /// Lets a file go.
    pub fn detach(&mut self, id: FileId) -> Option<Known<T>> {
        self.slots.get_mut(id.0 as usize)?.take()
    }

    /// The file.
    ///
    /// # Panics
    /// If it is not attached, which is a duty of [`crate::Engine::queue`]'s caller.
    #[inline]
    #[must_use]
    pub fn get(&self, id: FileId) -> &Known<T> {
        self.slots[id.0 as usize].as_ref().expect("the file is attached")
    }
}
