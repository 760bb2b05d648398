//! What of a source has to be read: its data in chunks, its holes as a whole.

use ringway_bench::elsewhere::{Allocated, ExportAllocation};
use ringway_image::Reader;
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

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

/// Who knows the holes of a source.
#[derive(Debug)]
pub(super) enum Holes {
    /// Nobody: all is data.
    Unknown,
    File(Arc<File>),
    Image(Box<Reader>),
    /// Of an NBD server.
    Export(Arc<ExportAllocation>),
    /// Of a Ceph cluster.
    Cluster(Box<Allocated>),
}

/// Goes through a source once, from `at` to `end`.
#[derive(Debug)]
pub(super) struct Extents {
    holes: Holes,
    at: u64,
    end: u64,
    chunk: u64,
    /// The edges of data are widened to multiples of this.
    edge: u64,
    /// Where what is being handed out ends, and whether it is a hole.
    until: u64,
    hole: bool,
}

impl Extents {
    /// Data comes in pieces that end at multiples of `chunk` bytes; its edges are multiples of `edge`.
    pub(super) fn new(holes: Holes, range: Range<u64>, chunk: u64, edge: u64) -> Self {
        let Range { start, end } = range;
        Self { holes, at: start, end, chunk, edge, until: start, hole: false }
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
            self.next_region()?;
        }
        let cut =
            if self.hole { self.at + HOLE_MAX } else { (self.at / self.chunk + 1) * self.chunk };
        let item = Item { offset: self.at, len: self.until.min(cut) - self.at, hole: self.hole };
        self.at += item.len;
        Ok(Some(item))
    }

    /// Finds out what begins at `at`, and where it ends.
    fn next_region(&mut self) -> io::Result<()> {
        (self.until, self.hole) = (self.end, false);
        let data = match &mut self.holes {
            Holes::Unknown => return Ok(()),
            Holes::Image(reader) => reader.next_data(self.at)?.unwrap_or(self.end),
            Holes::Export(allocation) => allocation.next_data(self.at).unwrap_or(self.end),
            Holes::Cluster(image) => {
                image.next_data(self.at).map_err(io::Error::other)?.unwrap_or(self.end)
            }
            Holes::File(file) => match seek(file, SeekFrom::Data(self.at)) {
                Ok(data) => data,
                // Nothing but a hole up to the end.
                Err(rustix::io::Errno::NXIO) => self.end,
                // Asked of a file system that cannot tell.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                    self.holes = Holes::Unknown;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            },
        };
        let edge = if data < self.end { data / self.edge * self.edge } else { data };
        if edge > self.at {
            (self.until, self.hole) = (edge.min(self.end), true);
            return Ok(());
        }
        // What is before the data, but behind the edge, goes with them.
        let hole = match &mut self.holes {
            Holes::Unknown => self.end,
            Holes::Image(reader) => reader.next_hole(data)?,
            Holes::Export(allocation) => allocation.next_hole(data),
            Holes::Cluster(image) => image.next_hole(data).map_err(io::Error::other)?,
            Holes::File(file) => seek(file, SeekFrom::Hole(data))?,
        };
        self.until = hole.next_multiple_of(self.edge).clamp(self.at + 1, self.end);
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
            all(Extents::new(Holes::Unknown, 4096..10_000, 8192, 4096)),
            [(4096, 4096, false), (8192, 1808, false)]
        );
        assert_eq!(all(Extents::new(Holes::Unknown, 0..0, 8192, 4096)), []);
    }

    #[test]
    fn pieces_begin_and_end_at_edges_that_are_larger_than_blocks() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        for at in [100_000, (4 << 20) + 200_000, (6 << 20) - 1] {
            file.write_all_at(&[1; 10], at).unwrap();
        }
        let edge = 2 << 20;
        let items = all(Extents::new(Holes::File(Arc::new(file)), 0..8 << 20, edge, edge));
        assert!(items.iter().all(|item| item.0 % edge == 0), "{items:?}");
        let data: Vec<_> = items.iter().filter(|item| !item.2).map(|item| item.0).collect();
        // A file system that knows no holes has data everywhere.
        assert!([0, 4 << 20, 6 << 20].iter().all(|at| data.contains(at)), "{items:?}");
    }

    #[test]
    fn holes_are_found_and_nothing_is_lost() {
        let file = tempfile::tempfile().unwrap();
        file.set_len((3 << 20) + 100).unwrap();
        file.write_all_at(&[1; 10], (1 << 20) + 70_000).unwrap();
        file.write_all_at(&[1; 100], 3 << 20).unwrap();
        let items =
            all(Extents::new(Holes::File(Arc::new(file)), 0..(3 << 20) + 100, 1 << 20, 4096));
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
