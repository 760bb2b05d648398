//! How an image's files are made durable, and that this has failed, for all who have to know.

use ringway_core::host::{File, forget};
use ringway_core::sync_turn::{SyncTurn, sync_patiently};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

/// What is known of syncs that have failed, and whose turn it is to sync.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    /// One has, of the image's thread or of a queue.
    pub(crate) failed: AtomicBool,
    /// Whoever serves the image next knows it, whatever its header says.
    pub(crate) kept: AtomicBool,
    /// Shared with queues and others that sync the same files, if the host tells only one of them what is lost.
    pub(crate) turn: OnceLock<Arc<SyncTurn>>,
    /// Nobody else syncs its files any more: others have another one.
    pub(crate) apart: AtomicBool,
}

impl Failure {
    /// Makes durable what was written before; `sync` does, all of it.
    ///
    /// # Errors
    /// What the host says, here or to somebody else who has done it.
    pub(crate) fn sync(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let failed = self.failed.load(SeqCst);
        let sync = || {
            if !failed && self.failed.load(SeqCst) {
                // The one that it has waited for: the host tells nobody else.
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            // Before the turn ends: those who share it are answered then.
            sync_patiently(sync).inspect_err(|_| self.failed.store(true, SeqCst))
        };
        let turn = self.turn.get().filter(|_| !self.apart.load(SeqCst));
        let Some(turn) = turn else { return sync() };
        match turn.by_thread(sync) {
            Some(synced) => synced,
            None if self.failed.load(SeqCst) => Err(io::Error::from_raw_os_error(libc::EIO)),
            None => Ok(()),
        }
    }
}

/// Has what the host holds in its cache of a file be in storage, and then forgets it: what it could not write earlier looks
/// as if it were there.
///
/// # Errors
/// What the host says to a sync; it is forgotten all the same.
pub fn read_as_stored(file: &File) -> io::Result<()> {
    let synced = sync_patiently(|| file.sync_data());
    forget(file);
    synced
}
