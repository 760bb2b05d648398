//! Descriptors of a peer that may be neither used nor closed.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Descriptors kept open after which a disk takes no more connections. A last message may add as many
/// as the kernel lets one send pass on (253, SCM_MAX_FD).
const KEPT_MAX: usize = 128;

/// How many descriptors a disk's front-ends have sent that stay open until the process ends.
///
/// To close one may wait for the peer for ever: the file of a FUSE file system, a socket that lingers.
#[derive(Debug, Default)]
pub struct Quarantine(AtomicUsize);

impl Quarantine {
    /// Whether the disk takes no more connections.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.load(SeqCst) >= KEPT_MAX
    }

    /// Leaves it open for as long as the process lives.
    pub fn put(&self, fd: OwnedFd) {
        self.0.fetch_add(1, SeqCst);
        let _open_until_the_end = fd.into_raw_fd();
    }
}
