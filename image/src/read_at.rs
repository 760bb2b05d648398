//! Bytes at offsets: a file, or what a test has in memory.

use ringway_core::host::{File, FileExt};
use std::fmt::Debug;
use std::io;

/// The error of a file that ends before what it is to hold: it lacks its end, or has become shorter.
pub(crate) fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "its file ends before that")
}

/// True for [`cut_off`].
pub(crate) fn is_cut_off(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// Bytes that are in no file of this host: of a layer that is only read. Whoever asks waits.
pub trait ReadElsewhere: Debug + Send + Sync {
    /// What offsets and lengths are a multiple of, in bytes; a power of two.
    fn unit(&self) -> u32;

    /// Reads from byte `at` on, as much as there is and fits; 0 at the end.
    ///
    /// # Errors
    /// What whoever has them says.
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize>;
}

/// What headers and tables are read from.
pub trait ReadAt {
    /// Reads from byte `at` on, as much as there is and fits; 0 at the end.
    ///
    /// # Errors
    /// What reading says.
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize>;

    /// Reads until `memory` is full or the end is reached; the number of bytes that were read.
    ///
    /// # Errors
    /// What reading says.
    fn read_up_to(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < memory.len() {
            let Some(from) = at.checked_add(filled as u64) else { break };
            match self.read_at(&mut memory[filled..], from) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    /// Fills `memory`. What is beyond the end reads as zeroes, as in QEMU.
    ///
    /// # Errors
    /// What reading says.
    fn read_padded(&self, memory: &mut [u8], at: u64) -> io::Result<()> {
        let read = self.read_up_to(memory, at)?;
        memory[read..].fill(0);
        Ok(())
    }
}

impl ReadAt for File {
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        FileExt::read_at(self, memory, at)
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.get(at..)).unwrap_or_default();
        let len = rest.len().min(memory.len());
        memory[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}
