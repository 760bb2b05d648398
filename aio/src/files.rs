//! The table of files an engine knows.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crate::engine::FileId;

/// Attached files, each with a note of the engine's about it.
///
/// # Invariants
/// 1. A slot holds its file open, so its descriptor is good as long as it is attached.
#[derive(Debug)]
pub(crate) struct Files<T> {
    slots: Vec<Option<Known<T>>>,
}

/// An attached file.
#[derive(Debug)]
pub(crate) struct Known<T> {
    pub(crate) fd: RawFd,
    pub(crate) note: T,
    _open: Arc<File>,
}

impl<T> Files<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new() }
    }

    /// The identifier that [`Files::attach`] will give next.
    pub(crate) fn next(&self) -> FileId {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        FileId(u32::try_from(free).expect("fewer files than descriptors"))
    }

    pub(crate) fn attach(&mut self, file: &Arc<File>, note: T) -> FileId {
        let id = self.next();
        let known = Known { fd: file.as_raw_fd(), note, _open: Arc::clone(file) };
        match self.slots.get_mut(id.0 as usize) {
            Some(slot) => *slot = Some(known),
            None => self.slots.push(Some(known)),
        }
        id
    }

    pub(crate) fn detach(&mut self, id: FileId) -> Option<Known<T>> {
        self.slots.get_mut(id.0 as usize)?.take()
    }

    /// The file; that it is attached is a duty of [`crate::Engine::queue`]'s caller.
    #[inline]
    pub(crate) fn get(&self, id: FileId) -> &Known<T> {
        self.slots[id.0 as usize].as_ref().expect("the file is attached")
    }
}
