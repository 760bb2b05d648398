//! Removals that are under way, and disks that are closed after them.

use super::super::served::{Served, lock};
use std::mem::forget;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long whoever removes a disk waits for it to be closed: as a rule that takes no time.
const CLOSING: Duration = Duration::from_secs(1);

/// Disks that are closed at a time: those whose storage does not let them go.
const CLOSING_MAX: usize = 64;

/// How often to look whether one can be closed: first, and at last.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// How many there are. The daemon ends after them, and after they were answered.
#[derive(Default)]
pub(crate) struct Removals {
    count: Mutex<usize>,
    ended: Condvar,
    /// Each thread that closes a disk has this.
    closing: Arc<()>,
}

/// One, until this is dropped.
pub(crate) struct Removing(Arc<Removals>);

impl Removals {
    pub(crate) fn begin(self: &Arc<Self>) -> Removing {
        *lock(&self.count) += 1;
        Removing(Arc::clone(self))
    }

    /// As [`Removals::close`].
    pub(super) fn close_disk(&self, disk: Arc<Served>) {
        let name = disk.name().to_owned();
        // Of one whose worker has failed nothing will ever be over; that worker lets nothing go.
        if !self.close(disk, |disk| disk.export.is_clear() || disk.export.disk().is_abandoned()) {
            tracing::error!(
                disk = name,
                "it was removed and cannot be closed, as the storage of too many others hangs: its image stays in use \
                 until this daemon ends"
            );
        }
    }

    /// Closes a disk that was removed, once nothing of it is in flight any more (`is_over`): its last queue would have its
    /// worker close it. That may take as long as its storage likes, so it has a thread of its own, for which nobody
    /// waits for long. False if there are too many of these, or there is none: it stays open until this process ends.
    fn close<T: Send + 'static>(
        &self,
        disk: T,
        is_over: impl Fn(&T) -> bool + Send + 'static,
    ) -> bool {
        let counted = Arc::clone(&self.closing);
        if Arc::strong_count(&counted) > CLOSING_MAX + 1 {
            forget(disk);
            return false;
        }
        let (done, closed) = sync_channel::<()>(1);
        // Whoever gives it away: it does not go with the thread that cannot be started.
        let disk = Arc::new(Mutex::new(Some(disk)));
        let its = Arc::clone(&disk);
        let thread = std::thread::Builder::new().name("close".into()).spawn(move || {
            let Some(disk) = lock(&its).take() else { return };
            let mut pause = LOOK_EVERY.0;
            while !is_over(&disk) {
                // Nobody unparks this thread.
                std::thread::park_timeout(pause);
                pause = (pause * 2).min(LOOK_EVERY.1);
            }
            drop(disk);
            drop((done, counted));
        });
        if thread.is_err() {
            lock(&disk).take().into_iter().for_each(forget);
            return false;
        }
        let _ = closed.recv_timeout(CLOSING);
        true
    }

    /// Waits until there are none.
    pub(crate) fn wait(&self) {
        let count = lock(&self.count);
        let none = self.ended.wait_while(count, |count| *count > 0);
        drop(none.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Removing {
    fn drop(&mut self) {
        *lock(&self.0.count) -= 1;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    /// Closing it waits until the other end is dropped.
    struct Hung(Receiver<()>, Sender<String>);

    impl Drop for Hung {
        fn drop(&mut self) {
            let _ = self.0.recv();
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let _ = self.1.send(name);
        }
    }

    #[test]
    fn b51_nobody_waits_for_storage_that_does_not_let_a_disk_go() {
        let (removals, (closed, closes)) = (Removals::default(), channel());
        let (over, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let is_over = |over: &Arc<AtomicBool>| {
            let (over, looks) = (Arc::clone(over), Arc::clone(&looks));
            move |_: &Hung| {
                looks.fetch_add(1, SeqCst);
                over.load(SeqCst)
            }
        };
        let (hold, hung) = channel();
        assert!(removals.close(Hung(hung, closed.clone()), is_over(&over)));
        drop(hold);
        let (begun, before) = (Instant::now(), looks.load(SeqCst));
        while looks.load(SeqCst) < before + 2 {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it does not wait until all is over"
            );
            std::thread::yield_now();
        }
        assert!(closes.try_recv().is_err(), "something of it is in flight");
        over.store(true, SeqCst);
        assert_eq!(closes.recv().unwrap(), "close");
        // As many as there may be, and none of them waits for another.
        // Of the first one's thread nobody knows when it ends.
        let removals = Removals::default();
        let holds: Vec<_> = std::thread::scope(|scope| {
            let close = || {
                let (hold, hung) = channel();
                assert!(removals.close(Hung(hung, closed.clone()), is_over(&over)));
                hold
            };
            let all: Vec<_> = (0..CLOSING_MAX).map(|_| scope.spawn(close)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let (hold, hung) = channel();
        assert!(!removals.close(Hung(hung, closed.clone()), is_over(&over)), "one too many");
        drop((hold, holds));
        let names: Vec<_> = closes.iter().take(CLOSING_MAX).collect();
        assert!(names.iter().all(|name| name == "close"), "{names:?}");
    }
}
