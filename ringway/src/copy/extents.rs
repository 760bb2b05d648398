//! What of a source has to be read: its data in chunks, its holes as a whole.

use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// The edges of data are widened to multiples of this, so that transfers can go around the page
/// cache.
const EDGE: u64 = 4096;

/// The longest hole handled at once.
const HOLE_MAX: u64 = 1 << 30;

/// A piece of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Known to be zeroes without reading.
    pub(super) hole: bool,
}

/// Goes through a source once, from `at` to `end`.
#[derive(Debug)]
pub(super) struct Extents {
    /// A file that can tell its holes.
    file: Option<Arc<File>>,
    at: u64,
    end: u64,
    chunk: u64,
    /// Where what is being handed out ends, and whether it is a hole.
    until: u64,
    hole: bool,
}

impl Extents {
    /// `file` is asked for its holes; `None` means all is data. Data comes in pieces that end at
    /// multiples of `chunk`.
    pub(super) fn new(file: Option<Arc<File>>, start: u64, end: u64, chunk: u64) -> Self {
        Self { file, at: start, end, chunk, until: start, hole: false }
    }

    /// True at the end.
    pub(super) fn is_done(&self) -> bool {
        self.at >= self.end
    }

    /// Where the next item begins.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// What the host says to the question for holes.
    pub(super) fn next(&mut self) -> io::Result<Option<Item>> {
        if self.at >= self.end {
            return Ok(None);
        }
        if self.at >= self.until {
            self.look()?;
        }
        let cut =
            if self.hole { self.at + HOLE_MAX } else { (self.at / self.chunk + 1) * self.chunk };
        let item = Item { offset: self.at, len: self.until.min(cut) - self.at, hole: self.hole };
        self.at += item.len;
        Ok(Some(item))
    }

    /// Finds out what begins at `at`, and where it ends.
    fn look(&mut self) -> io::Result<()> {
        (self.until, self.hole) = (self.end, false);
        let Some(file) = &self.file else { return Ok(()) };
        let data = match seek(file, SeekFrom::Data(self.at)) {
            Ok(data) => data / EDGE * EDGE,
            // Nothing but a hole up to the end.
            Err(rustix::io::Errno::NXIO) => self.end,
            // Asked of a file system that cannot tell.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                self.file = None;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        if data > self.at {
            (self.until, self.hole) = (data.min(self.end), true);
            return Ok(());
        }
        let hole = seek(file, SeekFrom::Hole(self.at))?;
        self.until = hole.next_multiple_of(EDGE).clamp(self.at + 1, self.end);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn all(mut extents: Extents) -> Vec<(u64, u64, bool)> {
        let mut items = Vec::new();
        while let Some(item) = extents.next().unwrap() {
            items.push((item.offset, item.len, item.hole));
        }
        items
    }

    #[test]
    fn data_is_cut_at_chunks_and_covers_the_file() {
        assert_eq!(
            all(Extents::new(None, 4096, 10_000, 8192)),
            [(4096, 4096, false), (8192, 1808, false)]
        );
        assert_eq!(all(Extents::new(None, 0, 0, 8192)), []);
    }

    #[test]
    fn holes_are_found_and_nothing_is_lost() {
        let file = tempfile::tempfile().unwrap();
        file.set_len((3 << 20) + 100).unwrap();
        file.write_all_at(&[1; 10], (1 << 20) + 70_000).unwrap();
        file.write_all_at(&[1; 100], 3 << 20).unwrap();
        let items = all(Extents::new(Some(Arc::new(file)), 0, (3 << 20) + 100, 1 << 20));
        let mut at = 0;
        for &(offset, len, _) in &items {
            assert_eq!(offset, at);
            at += len;
        }
        assert_eq!(at, (3 << 20) + 100);
        // A file system that knows no holes may say it is all data, but not the other way round.
        for byte in [(1 << 20) + 70_000, 3 << 20] {
            assert!(items.iter().any(|i| !i.2 && (i.0..i.0 + i.1).contains(&byte)), "{items:?}");
        }
    }
}
