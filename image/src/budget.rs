//! How much of an image's tables is looked through before it is opened.

use std::io;

/// Entries that are looked at, of all files of a chain together. It is seconds, whatever an image says: an honest one has
/// as many if it is about 16 TiB large, with clusters of 64 KiB and written all over.
const ENTRIES: u64 = 1 << 28;

/// A table costs as much as so many entries at least: it is a call to the host, and is remembered.
const TABLE_MIN: u64 = 512;

/// What may still be looked at.
#[derive(Debug)]
pub(crate) struct Budget {
    left: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: ENTRIES }
    }
}

impl Budget {
    #[cfg(test)]
    pub(crate) const fn of(entries: u64) -> Self {
        Self { left: entries }
    }

    #[cfg(test)]
    pub(crate) const fn left(&self) -> u64 {
        self.left
    }

    /// Takes what a table of so many entries costs.
    ///
    /// # Errors
    /// Nothing is left.
    pub(crate) fn take(&mut self, entries: u64) -> io::Result<()> {
        let left = self.left.checked_sub(entries.max(TABLE_MIN));
        self.left = left.ok_or_else(|| {
            let text = "its tables are too many to be looked through for what is missing of its file: it is damaged, or \
                        hostile, or very large. Look at it with `ringway check`";
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        Ok(())
    }
}
