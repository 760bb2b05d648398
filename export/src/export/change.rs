//! Changes to a disk that guests are using: its size, whether it takes requests.

use super::guest_notice::GuestNotice;
use super::{Export, lock};
use crate::queue::QueueLifecycle;
use crate::session_inbox::{SessionCommand, SessionInbox};
use ringway_core::kill_point;
use ringway_disk::ResizeError;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// How long a session may take to pass a message on. Longer only if it waits for a disk that is
/// stuck, or for a front-end that stopped in the middle of a message.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(2);

/// How often to look whether what ended connections had in flight is over.
const POLL_EVERY: Duration = Duration::from_millis(5);

/// What became of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size before, in bytes.
    pub from: u64,
    /// The size now, in bytes.
    pub to: u64,
    /// Whether the guest knows.
    pub notice: GuestNotice,
}

/// Why a disk could not be changed: what is wrong, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// One change at a time.
    #[error("another change of this disk is under way: try again when it is done")]
    Busy,
    /// It would lose data, and nobody said that this is meant.
    #[error(
        "it has {from} bytes now: making it smaller loses all that lies beyond {to} bytes. Shrink \
         the guest's file systems first, then say that shrinking is meant"
    )]
    Shrinks {
        /// The size now, in bytes.
        from: u64,
        /// What was asked for, in bytes.
        to: u64,
    },
    /// The size cannot be.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// Requests in flight do not end.
    #[error(
        "the disk does not finish what is in flight, after {seconds} s; nothing was changed. Look at \
         the host's disk"
    )]
    Stuck {
        /// How long it had.
        seconds: u64,
    },
    /// Requests in flight did not end, so the connection had to, unless its front-end waits for them itself.
    #[error(
        "the disk does not finish what is in flight: the front-end was disconnected, unless it waits for \
         that itself. It is served again when these requests are over"
    )]
    Disconnected,
    /// A connection has ended, and the disk has not finished what it had in flight.
    #[error(
        "requests of a connection that has ended are still with the disk, after {seconds} s: what they write \
         may land at any time. Look at the host's disk, then ask again"
    )]
    LeftInFlight {
        /// How long it had.
        seconds: u64,
    },
    /// Its session does not even end.
    #[error(
        "the session of the front-end neither answers nor ends: the disk is not paused, its guest may \
         still write. It is paused as soon as that changes: ask again"
    )]
    Unanswered,
    /// Requests wait because the disk has failed them.
    #[error(
        "{count} {} held ({reason}), so that not all that is in flight can be carried out. \
         Mend the disk and try them again (ctl retry), or give them up (ctl retry --fail)",
        requests_are(*.count)
    )]
    Held {
        /// How many.
        count: u64,
        /// Why.
        reason: String,
    },
    /// A queue that was stopped cannot be started again.
    #[error("the front-end's queues could not be started again: it was disconnected")]
    NotResumed,
    /// Another daemon may have the image.
    #[error(
        "its image is not locked by this daemon, because no guest runs here yet, or because it was \
         migrated: another daemon may have it. Ask the daemon that serves the guest"
    )]
    NotLocked,
    /// What was written cannot be made durable.
    #[error("cannot make it durable: {0}")]
    Sync(io::Error),
}

fn requests_are(count: u64) -> &'static str {
    if count == 1 { "request is" } else { "requests are" }
}

impl<Q: QueueLifecycle> Export<Q> {
    pub(super) fn change(&self) -> Result<MutexGuard<'_, ()>, ChangeError> {
        match self.changing.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(ChangeError::Busy),
        }
    }

    /// Gives the disk another size, or without one the size that its file or device has by now, and
    /// tells the guest. A regular file is made longer or shorter when a size is given.
    ///
    /// A disk becomes smaller only if `shrink` says that this is meant: from then on requests beyond
    /// the new end fail, those in flight end first, and only then the file is cut.
    ///
    /// # Errors
    /// [`ChangeError`]; the size is as it was then.
    pub fn resize(&self, to: Option<u64>, shrink: bool) -> Result<Resized, ChangeError> {
        let _alone = self.change()?;
        if !self.is_locked() {
            return Err(ChangeError::NotLocked);
        }
        let (from, cut_file) = (self.disk.capacity(), to.is_some());
        let to = self.disk.next_size(to)?;
        if to < from {
            if !shrink {
                return Err(ChangeError::Shrinks { from, to });
            }
            self.disk.set_capacity(to);
            let restore = || self.disk.set_capacity(from);
            self.settle(to).inspect_err(|_| restore())?;
            kill_point!(Settled);
            if cut_file {
                self.disk.set_file_bytes(to).inspect_err(|_| restore())?;
            }
        } else if to > from {
            if cut_file {
                self.disk.set_file_bytes(to)?;
            }
            kill_point!(Grown);
            self.disk.set_capacity(to);
        }
        kill_point!(Resized);
        self.retry_held_by_the_way();
        let notice = match to == from {
            true if lock(&self.inboxes).is_empty() => GuestNotice::NobodyThere,
            true => GuestNotice::Yes,
            false => self.announce(),
        };
        Ok(Resized { from, to, notice })
    }

    /// Waits until nothing is in flight beyond `end`.
    fn settle(&self, end: u64) -> Result<(), ChangeError> {
        let deadline = Instant::now() + self.drain_max;
        // A worker that has ended has nothing in flight.
        let promises: Vec<_> = self
            .workers
            .iter()
            .filter_map(|w| w.settle(Arc::clone(&self.disk), end).ok())
            .collect();
        for promise in promises {
            let left = deadline.saturating_duration_since(Instant::now());
            if promise.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                return Err(ChangeError::Stuck { seconds: self.drain_max.as_secs() });
            }
        }
        Ok(())
    }

    /// Tells all front-ends that the configuration space has changed.
    fn announce(&self) -> GuestNotice {
        self.resizes.fetch_add(1, SeqCst);
        let answers = self.send(SessionCommand::Announce);
        let notice = answers.iter().map(|(_, answer)| match answer.recv_timeout(ANSWER_MAX) {
            Ok(notice) => notice,
            Err(RecvTimeoutError::Timeout) => GuestNotice::Later,
            // It has gone meanwhile.
            Err(RecvTimeoutError::Disconnected) => GuestNotice::NobodyThere,
        });
        // Of several the one that is worst off.
        let rank = |notice: &GuestNotice| match notice {
            GuestNotice::NobodyThere => 0,
            GuestNotice::Yes => 1,
            GuestNotice::Later => 2,
            GuestNotice::Undelivered => 3,
            GuestNotice::NotListening => 4,
        };
        notice.max_by_key(rank).unwrap_or(GuestNotice::NobodyThere)
    }

    /// Gives a command to all sessions; the answers come later.
    fn send<T>(
        &self,
        make: impl Fn(SyncSender<T>) -> SessionCommand,
    ) -> Vec<(Arc<SessionInbox>, Receiver<T>)> {
        let inboxes: Vec<Arc<SessionInbox>> = lock(&self.inboxes).clone();
        inboxes
            .iter()
            .map(|inbox| {
                let (reply, answer) = sync_channel(1);
                inbox.send(make(reply));
                (Arc::clone(inbox), answer)
            })
            .collect()
    }

    /// Takes no more requests, and waits until nothing is in flight. The front-end stays connected;
    /// what its guest asks for meanwhile waits in the rings, and so does the guest.
    ///
    /// A successor of this process finds the disk paused, if the disk keeps its state
    /// ([`Disk::keep_state`](ringway_disk::Disk::keep_state)).
    ///
    /// # Errors
    /// [`ChangeError::Disconnected`] and [`ChangeError::LeftInFlight`] if the disk is stuck, [`ChangeError::Sync`] if
    /// not all that was answered is in its file; it stays paused.
    pub fn pause(&self) -> Result<(), ChangeError> {
        let _alone = self.change()?;
        self.disk.keep_paused(true);
        kill_point!(Pausing);
        self.pause_alone()?;
        // Whoever copies the image now is to find in it what was answered.
        self.disk.leave_journal().map_err(ChangeError::Sync)
    }

    fn pause_alone(&self) -> Result<(), ChangeError> {
        self.paused.store(true, SeqCst);
        let answered = self.all_answer(SessionCommand::Pause);
        // Not before: a snapshot that is taken while a queue runs is torn.
        self.rests.store(answered != Err(Silent), SeqCst);
        match answered {
            // Of earlier connections there may be more.
            Ok(true) => self.await_clear(),
            Ok(false) => Err(ChangeError::Disconnected),
            Err(Silent) => Err(ChangeError::Unanswered),
        }
    }

    /// Waits until nothing of connections that have ended is in flight.
    ///
    /// # Errors
    /// [`ChangeError::LeftInFlight`], after [`Export::drain_max`].
    pub fn await_clear(&self) -> Result<(), ChangeError> {
        let begun = Instant::now();
        while !self.is_clear() {
            if begun.elapsed() >= self.drain_max {
                return Err(ChangeError::LeftInFlight { seconds: self.drain_max.as_secs() });
            }
            // Nobody unparks this thread.
            std::thread::park_timeout(POLL_EVERY);
        }
        Ok(())
    }

    /// Takes requests again.
    ///
    /// # Errors
    /// [`ChangeError::NotResumed`] if a queue could not be started.
    pub fn resume(&self) -> Result<(), ChangeError> {
        let _alone = self.change()?;
        self.disk.keep_paused(false);
        self.resume_alone()
    }

    fn resume_alone(&self) -> Result<(), ChangeError> {
        self.rests.store(false, SeqCst);
        self.paused.store(false, SeqCst);
        match self.all_answer(SessionCommand::Resume) {
            Ok(true) => Ok(()),
            _ => Err(ChangeError::NotResumed),
        }
    }

    /// A moment of rest: carries out all that is in flight, makes it durable, and goes on, unless the
    /// disk was paused before.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn drain(&self) -> Result<(), ChangeError> {
        self.at_rest(&mut || {}).map(drop)
    }

    /// Whether [`Export::at_rest`] would get as far as stopping queues now: neither is it changed by somebody else, nor
    /// are requests held.
    ///
    /// # Errors
    /// [`ChangeError`].
    pub fn may_rest(&self) -> Result<(), ChangeError> {
        let _alone = self.change()?;
        self.holds_nothing(self.disk.held_and_left())
    }

    /// As [`Export::drain`], and does something while nothing is in flight and all that was written is
    /// durable; not if it does not get so far. For how long no requests were taken.
    ///
    /// # Errors
    /// [`ChangeError`]; it may have been done all the same.
    pub fn at_rest(&self, act: &mut dyn FnMut()) -> Result<Duration, ChangeError> {
        let _alone = self.change()?;
        let was_paused = self.holds();
        let left = self.disk.held_and_left();
        self.holds_nothing(left)?;
        let begun = Instant::now();
        let rests = self.pause_alone().and_then(|()| self.holds_nothing(left));
        let durable = || self.disk.leave_journal().and_then(|()| self.sync());
        let synced = rests.and_then(|()| durable().map_err(ChangeError::Sync));
        if synced.is_ok() {
            act();
        }
        let resumed = if was_paused { Ok(()) } else { self.resume_alone() };
        synced.and(resumed).map(|()| begun.elapsed())
    }

    /// True unless a session says no, or was ended because it said nothing for too long. By then its
    /// queues have stopped in any case.
    fn all_answer(
        &self,
        make: impl Fn(SyncSender<bool>) -> SessionCommand,
    ) -> Result<bool, Silent> {
        let timeout = self.drain_max + ANSWER_MAX;
        let (mut all, mut silent) = (true, false);
        for (inbox, answer) in self.send(make) {
            match answer.recv_timeout(timeout) {
                Ok(done) => all &= done,
                // It has ended meanwhile.
                Err(RecvTimeoutError::Disconnected) => {}
                Err(RecvTimeoutError::Timeout) => {
                    all = false;
                    inbox.end();
                    let ended = answer.recv_timeout(timeout);
                    silent |= ended == Err(RecvTimeoutError::Timeout);
                }
            }
        }
        if silent { Err(Silent) } else { Ok(all) }
    }
}

/// A session neither answers nor ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Silent;
