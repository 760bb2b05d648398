//! Says in the log when a disk's path has changed.

use ringway_disk::{Disk, Path, PathKind};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

/// Changes that are not told yet. A disk changes its path every few seconds at most.
const ROOM: usize = 64;

/// Listens to disks whose path may change. Workers only leave a word; a thread writes the log.
///
/// # Errors
/// What the host says to a thread.
pub(crate) fn tell<'a>(disks: impl Iterator<Item = &'a Arc<Disk>>) -> io::Result<()> {
    let (changed, changes) = sync_channel::<(usize, Path)>(ROOM);
    let mut names = Vec::new();
    for disk in disks.filter(|disk| disk.path().kind() == PathKind::Auto) {
        let (index, changed) = (names.len(), changed.clone());
        names.push(disk.name().to_owned());
        disk.path().on_switch(Box::new(move |path| {
            // A worker does not wait for the log; the counts tell of a word that is lost.
            let _ = changed.try_send((index, path));
        }));
    }
    drop(changed);
    if names.is_empty() {
        return Ok(());
    }
    std::thread::Builder::new().name("paths".into()).spawn(move || {
        for (index, path) in changes {
            let why = match path {
                Path::Bio => "merging does not win with this load",
                Path::Request => "merging carried more in a trial",
            };
            tracing::info!("{}: path {path} ({why})", names[index]);
        }
    })?;
    Ok(())
}
