//! Reads and writes at places of a file, by the calls that a sandboxed thread may make.

use crate::aligned::Aligned;
use crate::read_at::{ReadAt, ReadElsewhere, cut_off};
use ringway_core::host::{self, File};
use std::io;
use std::sync::Arc;

/// Zeroes to write where a file cannot punch holes, in pieces of so many bytes.
static ZEROES: [u8; 65536] = [0; 65536];

/// A file of an image, as the image's thread uses it.
#[derive(Clone, Debug)]
pub(crate) struct BlockFile {
    file: Arc<File>,
    /// What memory, offsets and lengths are a multiple of, in bytes: 1 through the page cache. What is
    /// not goes through memory that is; blocks that are written in part are read first. Nobody else
    /// writes to such a block meanwhile.
    unit: usize,
    /// Where its bytes are, if not on this host: they are only read then.
    elsewhere: Option<Arc<dyn ReadElsewhere>>,
}

/// Bytes that were not replaced ([`BlockFile::replace_at`]).
#[derive(Debug)]
pub(crate) struct NotReplaced {
    pub(crate) error: io::Error,
    /// The file holds what it did; else nobody knows what it holds.
    pub(crate) is_old: bool,
}

impl BlockFile {
    pub(crate) fn new(file: Arc<File>, unit: u32) -> Self {
        // At most a page or so.
        Self { file, unit: unit.max(1) as usize, elsewhere: None }
    }

    /// What is only read, and on no file of this host.
    pub(crate) fn elsewhere(file: Arc<File>, elsewhere: Arc<dyn ReadElsewhere>) -> Self {
        Self { file, unit: elsewhere.unit().max(1) as usize, elsewhere: Some(elsewhere) }
    }

    /// What I/O is a multiple of, in bytes.
    pub(crate) fn unit(&self) -> usize {
        self.unit
    }

    /// True if memory, offset and length are as the file wants them.
    fn takes(&self, memory: *const u8, len: usize, at: u64) -> bool {
        let mask = self.unit - 1;
        (memory as usize | len) & mask == 0 && at & mask as u64 == 0
    }

    /// The blocks that a range touches: where they begin, how many bytes they have, and where the range
    /// begins in them.
    fn blocks(&self, at: u64, len: usize) -> (u64, usize, usize) {
        let mask = self.unit - 1;
        // Less than a block.
        #[allow(clippy::cast_possible_truncation)]
        let within = (at & mask as u64) as usize;
        (at - within as u64, (within + len + mask) & !mask, within)
    }

    /// Reads until `buffer` is full or the file ends; how many bytes.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        if self.takes(buffer.as_ptr(), buffer.len(), at) {
            return self.read_blocks(buffer, at);
        }
        let (from, bytes, within) = self.blocks(at, buffer.len());
        let mut blocks = Aligned::new(bytes, self.unit);
        let read = self.read_blocks(&mut blocks, from)?;
        let got = read.saturating_sub(within).min(buffer.len());
        buffer[..got].copy_from_slice(&blocks[within..within + got]);
        Ok(got)
    }

    fn read_blocks(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let mut done = 0;
        // What is no whole block is the end of the file.
        while done < buffer.len() && done % self.unit == 0 {
            let (into, from) = (&mut buffer[done..], place(at, done)?);
            let read = match &self.elsewhere {
                None => host::read_at(&self.file, into, from),
                Some(elsewhere) => elsewhere.read_at(into, from),
            };
            match read {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(error) => interrupted(error)?,
            }
        }
        Ok(done)
    }

    /// Fills `buffer` with what the file had when it was opened, or has got since.
    ///
    /// # Errors
    /// What the host says, or that the file ends before that by now.
    pub(crate) fn read_whole(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        if self.read_at(buffer, at)? == buffer.len() { Ok(()) } else { Err(cut_off()) }
    }

    /// Fills `buffer` with a table, whose end the file may lack: that reads as zeroes.
    ///
    /// # Errors
    /// What the host says, or that the file ends before the table.
    pub(crate) fn read_table(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let read = self.read_at(buffer, at)?;
        buffer[read..].fill(0);
        if read > 0 { Ok(()) } else { Err(cut_off()) }
    }

    /// Fills `buffer`; what lies behind the end of the file reads as zeroes.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn read_or_zero(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let read = self.read_at(buffer, at)?;
        buffer[read..].fill(0);
        Ok(())
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// What the host says; any part of it may be written then.
    pub(crate) fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if self.takes(bytes.as_ptr(), bytes.len(), at) {
            return self.write_blocks(bytes, at);
        }
        let (from, len, within) = self.blocks(at, bytes.len());
        let mut blocks = Aligned::new(len, self.unit);
        let (first, last) = (0, len - self.unit);
        if within > 0 {
            self.read_or_zero(&mut blocks[first..first + self.unit], from)?;
        }
        if within + bytes.len() < len && (last > first || within == 0) {
            self.read_or_zero(&mut blocks[last..], from + last as u64)?;
        }
        blocks[within..within + bytes.len()].copy_from_slice(bytes);
        self.write_blocks(&blocks, from)
    }

    fn write_blocks(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match host::write_at(&self.file, &bytes[done..], place(at, done)?) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => done += moved,
                Err(error) => interrupted(error)?,
            }
        }
        Ok(())
    }

    /// Writes `new` where the file holds `old`, a few bytes of one sector. If the call fails the file is read: it
    /// succeeds all the same if they are there.
    ///
    /// # Errors
    /// What the host says, and whether the file is known to hold `old` still.
    pub(crate) fn replace_at(&self, old: &[u8], new: &[u8], at: u64) -> Result<(), NotReplaced> {
        let Err(error) = self.write_at(new, at) else { return Ok(()) };
        let mut there = vec![0; new.len()];
        match self.read_or_zero(&mut there, at) {
            Ok(()) if there == new => Ok(()),
            Ok(()) => Err(NotReplaced { error, is_old: there == old }),
            Err(_) => Err(NotReplaced { error, is_old: false }),
        }
    }

    /// Has the file system find room for a range of a file that reads as zeroes, and reads so afterwards: several
    /// writes at a time go there then, where a hole is filled by one after the other (ext4 with direct I/O). Where
    /// it cannot, each write finds its own.
    pub(crate) fn find_room(&self, at: u64, len: u64) {
        let _ = host::allocate(&self.file, at, len);
    }

    /// Has a range within the file read as zeroes, and gives its space back where the file system can.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        loop {
            let Err(error) = host::punch(&self.file, at, len) else { return Ok(()) };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // EINVAL: the device has larger sectors.
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL) => break,
                _ => return Err(error),
            }
        }
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(ZEROES.len() as u64);
            // At most the length of the array.
            #[allow(clippy::cast_possible_truncation)]
            self.write_at(&ZEROES[..piece as usize], at + done)?;
            done += piece;
        }
        Ok(())
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Bytes of the file, if it is no device.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Gives the file another length.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }
}

impl ReadAt for BlockFile {
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        Self::read_at(self, memory, at)
    }
}

fn place(at: u64, done: usize) -> io::Result<u64> {
    at.checked_add(done as u64).ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}

/// An interrupted call is made again; every other error is one.
fn interrupted(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::Rng;
    use std::os::unix::fs::OpenOptionsExt;

    /// A file that takes whole blocks only, as with O_DIRECT, holds what one through the page cache
    /// does.
    #[test]
    fn c03_any_range_of_an_image_is_read_and_written_in_blocks() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("file");
        let mut model: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &model).unwrap();
        model.resize(1 << 17, 0);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 17).unwrap();
        let mut options = File::options();
        let direct = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path);
        let direct =
            direct.ok().filter(|file| file.read_at(&mut Aligned::new(4096, 4096), 0).is_ok());
        let file = direct.unwrap_or_else(|| {
            // The same code, where no file system refuses what is not aligned.
            options.custom_flags(0).open(&path).unwrap()
        });
        let file = BlockFile::new(Arc::new(file), 4096);
        let mut rng = Rng::for_test("any_range_of_an_image");
        for round in 0..400_u32 {
            let at = usize::try_from(rng.below(1 << 17)).unwrap();
            let len = usize::try_from(rng.below(20_000)).unwrap().min((1 << 17) - at);
            if round % 2 == 0 && len > 0 {
                let bytes = vec![round.to_le_bytes()[0]; len];
                model[at..at + len].copy_from_slice(&bytes);
                file.write_at(&bytes, at as u64).unwrap();
            }
            let mut found = vec![0xee; len + 3];
            let read = file.read_at(&mut found, at as u64).unwrap();
            let there = (len + 3).min((1 << 17) - at);
            assert_eq!(read, there);
            assert!(found[..read] == model[at..at + there], "{at} {len}");
        }
    }

    /// A device gives back whole sectors only, and clusters may be smaller.
    #[test]
    fn c46_less_than_a_sector_of_a_device_reads_as_zeroes_afterwards() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let device = match ringway_testkit::LoopDevice::new(folder.path(), 1 << 20, 4096) {
            Ok(device) => device,
            Err(lack) => return lack.skip(),
        };
        let file = File::options().read(true).write(true).open(device.path()).unwrap();
        let file = BlockFile::new(Arc::new(file), 1);
        let mut model = vec![0xff; 1 << 16];
        file.write_at(&model, 0).unwrap();
        for (at, len) in [(512, 512), (4096, 4096), (10_240, 20_480), (40_448, 512)] {
            file.punch(at as u64, len as u64).unwrap();
            model[at..at + len].fill(0);
        }
        let mut found = vec![0xee; 1 << 16];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), found.len());
        assert!(found == model);
    }
}
