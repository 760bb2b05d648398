//! Rings of io_uring, set up with a timeout or beforehand.

use ringway_aio::{IoUring, IoUringSetup, Nvme};
use ringway_disk::EngineKind;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Operations one engine may have in flight. More wait in their queues' backlog.
pub const ENGINE_DEPTH: u32 = 2048;

/// The same of an engine for NVMe: its ring, with entries twice as large, has 1024 of them with those for
/// doorbells, which is 128 KiB in one piece.
pub(crate) const NVME_DEPTH: u32 = 960;

/// How long to wait for memory for a ring. The kernel lets go of those of a process that was killed
/// some time after it has gone, and its successor comes at once.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Rings that were set up beforehand, by a process that is to lose the right to set up any: an
/// unrestricted one could open files and sockets past a filter of system calls.
#[derive(Clone, Default)]
pub struct RingPool(Arc<Mutex<FreeRings>>);

#[derive(Default)]
struct FreeRings {
    files: Vec<IoUring>,
    nvme: Vec<Nvme>,
}

impl RingPool {
    /// For `needed` workers, and for so many in all (`wanted`) if the host has memory for them.
    ///
    /// # Errors
    /// What the host says, such as that there is no io_uring for us.
    pub fn set_up(needed: usize, wanted: usize, iopoll: bool) -> io::Result<Self> {
        let files = collect(needed, wanted, TIMEOUT, || new(iopoll))?;
        Ok(Self(Arc::new(Mutex::new(FreeRings { files, nvme: Vec::new() }))))
    }

    /// Adds rings for NVMe namespaces, likewise.
    ///
    /// # Errors
    /// What the host says.
    pub fn set_up_nvme(&self, needed: usize, wanted: usize) -> io::Result<()> {
        let rings = collect(needed, wanted, TIMEOUT, || Nvme::new(NVME_DEPTH))?;
        self.lock().nvme.extend(rings);
        Ok(())
    }

    /// How many are left for workers with this engine; of others than these two nothing is limited.
    #[must_use]
    pub fn left(&self, engine: EngineKind) -> Option<usize> {
        match engine {
            EngineKind::IoUring | EngineKind::IoUringNbd => Some(self.lock().files.len()),
            EngineKind::Nvme => Some(self.lock().nvme.len()),
            _ => None,
        }
    }

    pub(crate) fn take(&self) -> io::Result<IoUring> {
        let ring = self.lock().files.pop();
        ring.ok_or_else(none_left)
    }

    pub(crate) fn take_nvme(&self) -> io::Result<Nvme> {
        let ring = self.lock().nvme.pop();
        ring.ok_or_else(none_left)
    }

    fn lock(&self) -> MutexGuard<'_, FreeRings> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

fn none_left() -> io::Error {
    io::Error::other("all rings that were set up at the start are in use")
}

/// One ring, now.
pub(crate) fn ring(iopoll: bool) -> io::Result<IoUring> {
    let one = collect(1, 1, TIMEOUT, || new(iopoll))?.pop();
    one.ok_or_else(|| io::Error::other("no ring"))
}

/// Whether there is io_uring for us.
pub(crate) fn probe() -> io::Result<()> {
    let small = || IoUring::new(IoUringSetup::new(4));
    collect(1, 1, TIMEOUT, small).map(drop)
}

fn new(iopoll: bool) -> io::Result<IoUring> {
    IoUring::new(IoUringSetup { iopoll, ..IoUringSetup::new(ENGINE_DEPTH) })
}

/// Waits for memory for those that are needed, and does without the others.
fn collect<T>(
    needed: usize,
    wanted: usize,
    timeout: Duration,
    mut make: impl FnMut() -> io::Result<T>,
) -> io::Result<Vec<T>> {
    let begun = Instant::now();
    let mut made = Vec::new();
    while made.len() < wanted.max(needed) {
        match make() {
            Ok(ring) => made.push(ring),
            Err(_) if made.len() >= needed => break,
            Err(e) if e.kind() == io::ErrorKind::OutOfMemory && begun.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn no_memory() -> io::Result<usize> {
        Err(io::ErrorKind::OutOfMemory.into())
    }

    #[test]
    fn needed_rings_are_waited_for_and_spare_ones_are_not() {
        // Memory comes at the fourth time, and goes after the second ring.
        let mut asked = 0;
        let made = collect(2, 8, LONG, || {
            asked += 1;
            if (4..6).contains(&asked) { Ok(asked) } else { no_memory() }
        });
        assert_eq!(made.unwrap(), [4, 5]);
        assert_eq!(asked, 6, "the third ring was tried once");
    }

    #[test]
    fn patience_ends_and_other_errors_end_it_at_once() {
        let made = collect(1, 1, Duration::ZERO, no_memory);
        assert_eq!(made.unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        let mut asked = 0;
        let made = collect(1, 1, LONG, || -> io::Result<()> {
            asked += 1;
            Err(io::ErrorKind::PermissionDenied.into())
        });
        assert_eq!((made.unwrap_err().kind(), asked), (io::ErrorKind::PermissionDenied, 1));
    }
}
