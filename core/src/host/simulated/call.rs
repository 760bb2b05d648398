//! What else is asked of the host.

use super::super::identity::Identity;
use super::storage::File;
use super::world::{World, here};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Reads a part of a file: so many bytes.
///
/// # Errors
/// As is wished.
pub fn read_at(file: &File, memory: &mut [u8], at: u64) -> io::Result<usize> {
    file.read(memory, at)
}

/// Writes a part of a file: so many bytes.
///
/// # Errors
/// As is wished.
pub fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<usize> {
    file.write(bytes, at)
}

/// Has the file system find room for a range, which it need not.
///
/// # Errors
/// None.
pub fn allocate(_: &File, _: u64, _: u64) -> io::Result<()> {
    Ok(())
}

/// Has the file system take a range within a file away.
///
/// # Errors
/// As is wished.
pub fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    file.punch(at, len)
}

/// Forgets what the host holds of a file in its memory, as far as that has not changed.
pub fn forget(file: &File) {
    file.forget();
}

/// Which file it is, when it was written last, and whether it is open for direct I/O.
///
/// # Errors
/// None.
pub fn identity(file: &File) -> io::Result<Identity> {
    Ok(file.identity())
}

/// In which boot of the host this is.
#[must_use]
pub fn boot() -> u64 {
    here().map_or(0, |(world, _)| world.lock().boot)
}

/// Bits of the seed.
#[must_use]
pub fn random() -> u64 {
    here().map_or(0, |(world, _)| world.lock().random())
}

/// Rings for a thread that waits.
#[derive(Debug)]
pub struct Bell(Arc<World>, usize);

/// What waits for a bell waits for this: no address, and no thread.
fn key(bell: usize) -> usize {
    usize::MAX - 1 - bell
}

impl Bell {
    /// A new one, that nobody has rung.
    ///
    /// # Errors
    /// None.
    ///
    /// # Panics
    /// If this is no thread of a world.
    pub fn new() -> io::Result<Self> {
        let (world, _) = here().expect("a thread of a world");
        let bell = world.new_bell();
        Ok(Self(world, bell))
    }

    /// Rings.
    pub fn ring(&self) {
        self.0.bell(self.1, |rung| *rung = true);
        self.0.wake(key(self.1), false);
    }

    /// Its number.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        RawFd::try_from(self.1).unwrap_or(RawFd::MAX)
    }
}

/// Waits until a bell has been rung since it was waited for last.
///
/// # Errors
/// None.
///
/// # Panics
/// If this is no thread of a world.
pub fn wait_for(bell: RawFd) -> io::Result<()> {
    let (world, me) = here().expect("a thread of a world");
    let bell = usize::try_from(bell).map_err(io::Error::other)?;
    while !world.bell(bell, std::mem::take) {
        world.wait(me, key(bell), None);
    }
    Ok(())
}
