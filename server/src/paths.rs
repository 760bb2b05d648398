//! Says in the log when a disk's path has changed.

use super::survive::survive;
use ringway_core::panic_point;
use ringway_disk::{Disk, Path, PathKind};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Changes that are not told yet. A disk changes its path every few seconds at most.
const ROOM: usize = 64;

/// Listens to disks whose path may change. Workers only leave a word; a thread writes the log.
pub(crate) struct Paths {
    changed: SyncSender<(Arc<str>, Path)>,
}

impl Paths {
    /// Starts the thread; it ends with the last disk.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn start() -> io::Result<Self> {
        let (changed, changes) = sync_channel::<(Arc<str>, Path)>(ROOM);
        std::thread::Builder::new().name("paths".into()).spawn(move || {
            for (name, path) in changes {
                let why = match path {
                    Path::Bio => "merging does not win with this load",
                    Path::Request => "merging carried more in a trial",
                };
                survive("the thread that tells of paths", || {
                    panic_point!("paths");
                    tracing::info!("{name}: path {path} ({why})");
                });
            }
        })?;
        Ok(Self { changed })
    }

    /// Listens to one more disk.
    pub(crate) fn listen(&self, disk: &Disk) {
        if disk.path().kind() != PathKind::Auto {
            return;
        }
        let (name, changed) = (Arc::from(disk.name()), self.changed.clone());
        disk.path().on_switch(Box::new(move |path| {
            // A worker does not wait for the log; the counts tell of a word that is lost.
            let _ = changed.try_send((Arc::clone(&name), path));
        }));
    }
}
