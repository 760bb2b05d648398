//! Tells when a disk's path has changed: an event, and a line of the log for who looks for it.

use super::events::Events;
use super::survive::survive;
use ringway_control::protocol::Happened;
use ringway_core::panic_point;
use ringway_disk::{Disk, Policy, SchedulerMode};
use ringway_export::WarningLimit;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Changes that are not logged yet. A disk changes its path every few seconds at most.
const ROOM: usize = 64;

/// Listens to disks whose path may change. Workers only leave a word; a thread writes the log.
pub(crate) struct Paths {
    changed: SyncSender<(Arc<Listened>, Policy)>,
}

/// A disk whose path may change.
struct Listened {
    id: u64,
    name: String,
    /// The guest's load decides how often it does.
    lines: WarningLimit,
}

impl Paths {
    /// Starts the thread; it ends with the last disk.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn start(events: &Arc<Events>) -> io::Result<Self> {
        let events = Arc::clone(events);
        let (changed, changes) = sync_channel::<(Arc<Listened>, Policy)>(ROOM);
        std::thread::Builder::new().name("paths".into()).spawn(move || {
            for (disk, path) in changes {
                let why = match path {
                    Policy::Bio => "merging does not win with this load",
                    Policy::Request => "merging carried more in a trial",
                };
                survive("the thread that tells of paths", || {
                    panic_point!("paths");
                    let path_changed = Happened::PathChanged { path: path.to_string() };
                    events.tell(Some((disk.id, &disk.name)), path_changed);
                    if let Some(pass) = disk.lines.pass() {
                        let (name, suppressed) = (&disk.name, pass.suppressed);
                        tracing::debug!(suppressed, "{name}: path {path} ({why})");
                    }
                });
            }
        })?;
        Ok(Self { changed })
    }

    /// Listens to one more disk.
    pub(crate) fn listen(&self, id: u64, disk: &Disk) {
        if disk.policy().mode() != SchedulerMode::Auto {
            return;
        }
        let listened = Arc::new(Listened {
            id,
            name: disk.name().into(),
            lines: WarningLimit::notes(Some(disk.name()), "changes of its path"),
        });
        let changed = self.changed.clone();
        disk.policy().on_switch(Box::new(move |path| {
            // A worker does not wait for the log; the counts tell of a word that is lost.
            let _ = changed.try_send((Arc::clone(&listened), path));
        }));
    }
}
