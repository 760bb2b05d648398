//! How files come to the table of an engine, and leave it.

use super::{FileId, Files, Known};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

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
}
