//! One disk that a daemon serves.

use super::configured::DiskWords;
use super::endpoint::Endpoint;
use super::host::EphemeralClone;
use super::job::Job;
use super::limits::DiskLimits;
#[cfg(feature = "xen")]
use super::xen;
use super::xen::SessionOptions;
use anyhow::{Context, anyhow};
use ringway_control::config::Claim;
use ringway_core::thread::panic_message;
use ringway_export::Offered;
use ringway_terminal::reasons::in_full;
use ringway_vhost_user::Export;
use std::io::ErrorKind;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a server may take to close connections that have requests in flight.
const SERVER_CLOSES: Duration = Duration::from_secs(6);

/// A disk on offer, with the transport it is offered over.
pub(crate) enum Exported {
    /// Front-ends connect to a socket.
    VhostUser(Arc<Export>),
    /// NBD clients connect to a socket.
    Nbd(ringway_nbd::Export),
    /// A guest of this Xen host has its rings in granted pages.
    #[cfg(feature = "xen")]
    Xen(ringway_export::Export<xen::Queue>),
}

impl Deref for Exported {
    type Target = dyn Offered;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::VhostUser(export) => &**export,
            Self::Nbd(export) => export,
            #[cfg(feature = "xen")]
            Self::Xen(export) => export,
        }
    }
}

/// A disk with its place.
pub(crate) struct Served {
    /// Its number: never given to another disk of this daemon.
    pub(crate) id: u64,
    /// The disk, as offered.
    pub(crate) export: Exported,
    /// What it takes for itself, which no other disk may have.
    pub(crate) claim: Mutex<Claim>,
    /// The words it is served by.
    pub(crate) words: Mutex<DiskWords>,
    /// Held by whoever changes which files it is served from.
    pub(crate) files_change: Mutex<()>,
    /// Held while it is resized, and while it gets a new image, which has the size that it had before.
    pub(crate) resizing: Mutex<()>,
    /// What takes its time with these: the latest.
    pub(crate) job: Mutex<Option<Arc<Job>>>,
    /// Its socket file.
    pub(crate) socket: Option<PathBuf>,
    /// Its folder in xenstore.
    pub(crate) device: Option<String>,
    /// Threads that serve its queues.
    pub(crate) workers: usize,
    /// What its guest may ask of it.
    pub(crate) limits: Mutex<DiskLimits>,
    /// The worker of its first queue, and how many there were.
    pub(super) place: (usize, usize),
    pub(super) stop: Arc<OwnedFd>,
    /// What its image is a clone of, if that was said.
    pub(crate) base: Option<PathBuf>,
    /// Its image, if that goes with it.
    pub(super) clone: Mutex<Option<EphemeralClone>>,
    pub(super) leaving: AtomicBool,
    /// Nobody is served any more.
    pub(super) ended: AtomicBool,
    /// Its server was to flush at its end, and was not through in time.
    pub(super) flushing: AtomicBool,
    pub(super) server: Mutex<Option<Server>>,
}

/// How it ended to serve a disk: as it was told to, by an error, by a panic.
pub(super) type Outcome = std::thread::Result<std::io::Result<()>>;

/// Who serves a disk.
pub(super) enum Server {
    /// A thread of its own.
    Thread(JoinHandle<std::io::Result<()>>),
    /// The session threads, which tell how it ended.
    Task(Receiver<Outcome>),
}

impl Server {
    /// Waits for the end.
    fn join(self) -> Outcome {
        match self {
            Self::Thread(thread) => thread.join(),
            // A word is owed by whoever serves: without one, something is wrong with it.
            Self::Task(ended) => {
                ended.recv().unwrap_or_else(|gone| Err(Box::new(gone.to_string())))
            }
        }
    }
}

impl Served {
    /// Serves guests over a transport that has them served by a thread of the disk's own.
    ///
    /// # Errors
    /// What the host says to waiting for them.
    pub(super) fn serve(
        &self,
        endpoint: &Endpoint,
        xen: Option<SessionOptions>,
    ) -> std::io::Result<()> {
        let stop = self.stop.as_fd();
        match (&self.export, endpoint, xen) {
            #[cfg(feature = "xen")]
            (Exported::Xen(export), Endpoint::Xen(at), Some(options)) => {
                xen::serve(export, at, options, stop)
            }
            (Exported::Nbd(export), Endpoint::Nbd(clients), _) => clients.serve(export, stop),
            // Endpoints and exports are made in one place.
            _ => Ok(()),
        }
    }

    /// Tells whoever serves it to end: in order, after what is in flight.
    pub(super) fn stop(&self) {
        self.leaving.store(true, SeqCst);
        lock(&self.job).iter().for_each(|job| job.cancel());
        // One write can not fill the counter.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Stops what takes its time, and waits until it has.
    pub(super) fn end_job(&self) {
        let job = lock(&self.job).clone();
        job.iter().for_each(|job| job.end());
    }

    /// Its image goes with it.
    pub(crate) fn is_ephemeral(&self) -> bool {
        lock(&self.clone).is_some()
    }

    /// Has the server of its disk flush what it has answered, as a host does with a file by itself: with the
    /// connection goes the last word of whether it is still there. Nobody is served any more.
    pub(super) fn flush_server(&self) {
        let disk = self.export.disk();
        // A server that is away, or does not finish what is in flight, is not waited for once more.
        if !disk.storage().wants_flush() || !self.export.is_clear() {
            return;
        }
        let Err(error) = self.export.sync() else { return };
        // It may still end either way.
        self.flushing.store(error.kind() == ErrorKind::TimedOut, SeqCst);
        tracing::warn!(
            disk = self.name(),
            "what the NBD server has answered and not flushed may be lost with it: {error}"
        );
    }

    /// Nothing of it is in flight, nor with its server.
    pub(super) fn is_clear(&self) -> bool {
        self.export.is_clear() && !self.flushing.load(SeqCst)
    }

    /// Has nothing more be sent to the server of its disk, whatever is unanswered: others may use the export next.
    pub(super) fn end_server(&self) {
        self.export.disk().storage().give_up(!self.is_clear(), SERVER_CLOSES);
    }

    /// Leaves its image and what outlives this process, once nobody changes the image's files any more.
    ///
    /// # Errors
    /// That what its guest was answered is not in its image. Clusters that cannot be given back cost room alone.
    pub(super) fn leave(&self) -> anyhow::Result<()> {
        let _files = lock(&self.files_change);
        self.export.leave_image().map_err(|error| {
            anyhow!(
                "{}: what its guest was answered could not be put into the image ({error}), and is in the state folder \
                 (--state-dir) alone: make room, and serve the image again with that folder before anything else uses it",
                self.name()
            )
        })
    }

    /// As [`Served::leave`] for a disk that is served no more: others may have its image at once. One that goes with it
    /// ([`Served::end_clone`]) is deleted before that, while it is locked. With a disk that is `removed` for good whoever
    /// used it ends, but for a guest of a front-end: that may come back, and shows whether it begins.
    ///
    /// # Errors
    /// As [`Served::leave`].
    pub(super) fn leave_or_delete(&self, removed: bool) -> anyhow::Result<()> {
        let mut goes = false;
        let guest_ends = match self.export {
            Exported::VhostUser(_) => false,
            Exported::Nbd(_) => removed,
            // The toolstack removes a disk when its guest has let it go.
            #[cfg(feature = "xen")]
            Exported::Xen(_) => true,
        };
        self.export.end_image(guest_ends, &mut || {
            let deleted = self.end_clone(true);
            goes = deleted.is_some();
            deleted != Some(false)
        });
        self.end_clone(false);
        if goes { Ok(()) } else { self.leave() }
    }

    /// As [`Served::leave`], and others may have its image at once; if nobody has to be waited for.
    pub(super) fn let_go(&self) {
        if let Ok(_files) = self.files_change.try_lock() {
            let _ = self.ended.load(SeqCst) && self.export.let_go();
        }
    }

    /// Its image stays, whatever was said of it, unless the disk is `removed`, its image was ours until then,
    /// and it is ephemeral: if its guest has left, it is somebody else's. Says, if it was to go, whether it has: else it
    /// may do so later.
    pub(super) fn end_clone(&self, removed: bool) -> Option<bool> {
        let clone = lock(&self.clone).take().filter(|_| removed)?;
        let removed = clone.remove();
        match &removed {
            Ok(()) => tracing::info!(disk = self.name(), "its clone was deleted: it is ephemeral"),
            Err(error) => tracing::error!(
                disk = self.name(),
                "its clone is ephemeral and cannot be deleted: {}. Delete it: the next disk of that name \
                 would be served what it holds",
                in_full(error)
            ),
        }
        Some(removed.is_ok())
    }

    /// Its image, as it was given.
    pub(crate) fn name(&self) -> &str {
        self.export.disk().name()
    }

    /// It was told to go.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(SeqCst)
    }

    /// Waits until nobody is served any more. Only one caller gets the outcome.
    pub(super) fn join(&self) -> Option<anyhow::Result<()>> {
        self.end_job();
        let server = lock(&self.server).take()?;
        let name = self.export.disk().name();
        Some(match server.join() {
            Ok(ended) => ended.with_context(|| format!("{name}: cannot wait for front-ends")),
            Err(panic) => Err(anyhow!("{name}: its thread panicked: {}", panic_message(&*panic))),
        })
    }
}

/// What is behind it is whole at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
