//! A disk served in this process, for tools that talk to disks as guests do.

use crate::inside::{Inside, Serving};
use anyhow::Result;
use ringway_disk::Disk;
use std::os::unix::net::UnixStream;

/// Serves a disk with one queue until it is dropped, after its front-end.
pub struct ServedHere {
    _inside: Inside,
}

impl std::fmt::Debug for ServedHere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServedHere")
    }
}

impl ServedHere {
    /// Starts it; the other end of its socket is for a front-end.
    ///
    /// # Errors
    /// What the host says.
    pub fn start(disk: Disk) -> Result<(Self, UnixStream)> {
        let serving = Serving { queues: 1, queue_size: 1024, workers: 1, harvest_at_once: true };
        let (inside, stream) = Inside::start(disk, &serving)?;
        Ok((Self { _inside: inside }, stream))
    }
}
