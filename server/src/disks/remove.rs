//! How a disk of this process goes while the daemon runs.

use super::super::departure::{Departure, Watch};
use super::super::served::{Served, lock};
use super::{BeingRemoved, Disks};
use anyhow::bail;
use ringway_control::protocol::Happened;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// How long to wait until nobody looks at a removed disk any more.
const LAST_LOOK: Duration = Duration::from_secs(1);

impl Disks {
    /// Drains a disk, disconnects its front-end, removes its socket file and closes it. A stuck disk
    /// may still write then.
    ///
    /// # Errors
    /// That somebody else removes it already, or what the host said to its thread; or that what its guest was
    /// answered is not in its image. It is served no more then, but for the first of these.
    pub(crate) fn remove(&self, served: Arc<Served>) -> anyhow::Result<Departure> {
        self.take_here(served, true)
    }

    /// As [`Disks::remove`]; unless it is `removed` for good, a clone stays.
    ///
    /// # Errors
    /// As [`Disks::remove`].
    pub(super) fn take_here(
        &self,
        served: Arc<Served>,
        removed: bool,
    ) -> anyhow::Result<Departure> {
        let _removing = self.removals.begin();
        if served.leaving.swap(true, SeqCst) {
            bail!(BeingRemoved);
        }
        if !removed {
            served.end_clone(false);
        }
        served.end_job();
        // A snapshot that is being taken ends first.
        let files_change = lock(&served.files_change);
        let watch = Watch::begin([&*served]);
        served.stop();
        drop(files_change);
        let outcome = served.join().unwrap_or(Ok(()));
        served.flush_server();
        self.forget(&served);
        let Departure { clear, held, .. } = watch.end([&*served]);
        served.end_server();
        tracing::info!(disk = served.name(), id = served.id, "disk removed");
        let happened = Happened::Removed { drained: clear, held };
        self.events.tell(Some((served.id, served.name())), happened);
        // Others may be looking at it for a moment.
        let begun = Instant::now();
        while Arc::strong_count(&served) > 1 && begun.elapsed() < LAST_LOOK {
            // Nobody unparks this thread.
            std::thread::park_timeout(Duration::from_millis(1));
        }
        if removed {
            self.forget_image(&served);
        }
        let left = outcome.and(served.leave_or_delete(removed));
        self.removals.close_disk(served);
        left.map(|()| Departure { clear, held, unsaved: false })
    }

    /// It is removed for good: if its image is missing when one of that name is added, it may be made. That is said
    /// before its lock goes: what others note of it later stays.
    pub(super) fn forget_image(&self, served: &Served) {
        if !served.export.is_locked() {
            return;
        }
        let image = lock(&served.claim).image().map(Path::to_owned);
        image.into_iter().for_each(|path| self.host.forget_image(&path));
    }
}
