//! How a session is carried: as a whole, or in turns by whoever serves many on few threads.

use super::{Ended, Session};
use crate::message::{Event, MessageError};
use crate::vring::Vring;
use ringway_core::thread::panic_message;
use ringway_export::Notice;
use rustix::event::Timespec;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, info};
use vhost::vhost_user::message::FrontendReq;

/// How often to look whether a front-end is still there that waits for an answer, and for queues that stop.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Events that a turn handles at most: whoever shares its thread is heard in between.
const TURN_EVENTS: usize = 64;

/// What has a session that is quiet take its next turn.
pub struct Wakes<'a> {
    /// One of these is readable, or was closed by its peer.
    pub readable: Vec<BorrowedFd<'a>>,
    /// It is this late.
    pub at: Option<Instant>,
}

/// How far a turn has come.
enum Served {
    Quiet,
    Over,
}

impl Session {
    /// Serves the connection until it ends; all queues are drained and stopped then. A panic costs
    /// the connection, and nobody else (hazard E5).
    ///
    /// # Panics
    /// If stopping the queues panicked: the disk serves nobody from then on.
    pub fn run(self) -> Ended {
        let mut session = self;
        loop {
            match session.turn(&|| None) {
                ControlFlow::Continue(quiet) => session = quiet,
                ControlFlow::Break(ended) => return ended,
            }
        }
    }

    /// A part of [`Session::run`], for whoever serves many sessions on few threads: serves the
    /// connection until nothing has come for as long as `linger` says, which is asked before each
    /// wait. Stopping queues and answering make it wait as they do in `run`. The session comes back if
    /// it goes on: its next turn is due when [`Session::wakes`] says.
    ///
    /// # Panics
    /// As [`Session::run`].
    pub fn turn(mut self, linger: &dyn Fn() -> Option<Duration>) -> ControlFlow<Ended, Self> {
        let served =
            catch_unwind(AssertUnwindSafe(|| self.serve(linger))).unwrap_or_else(|panic| {
                let (disk, said) = (self.export.disk().name(), panic_message(&*panic));
                error!(disk, "a session panicked, its connection ends: {said}");
                Ok(Served::Over)
            });
        match served {
            Ok(Served::Quiet) => ControlFlow::Continue(self),
            served => ControlFlow::Break(self.end(served)),
        }
    }

    /// When the next turn is due. The descriptors stay open, and are the same, until it is taken.
    #[must_use]
    pub fn wakes(&self) -> Wakes<'_> {
        let mut readable = vec![self.stop.as_fd(), self.inbox.bell()];
        readable.extend(self.owed.is_none().then(|| self.channel.as_fd()));
        readable.extend(self.answers());
        Wakes { readable, at: self.wakes_at() }
    }

    fn wakes_at(&self) -> Option<Instant> {
        [self.ask_again, self.channel.deadline()].into_iter().flatten().min()
    }

    /// Where the front-end answers, if it was asked something.
    fn answers(&self) -> Option<BorrowedFd<'_>> {
        self.backend_channel.as_ref().filter(|_| self.is_asking()).map(AsFd::as_fd)
    }

    /// Drains and stops all queues.
    fn end(mut self, served: Result<Served, MessageError>) -> Ended {
        let export = Arc::clone(&self.export);
        let (disk, limits) = (export.disk().name(), export.limits());
        let mut why = None;
        let ended = match served {
            Err(MessageError::Closed) => {
                if let Some(pass) = limits.disconnected.pass() {
                    info!(disk, suppressed = pass.suppressed, "front-end disconnected");
                }
                Ended::ByPeer
            }
            Err(MessageError::Stopped) => Ended::ByOrder,
            Err(error) => {
                self.tell_end(format_args!("{error}"));
                why = Some(error.to_string());
                Ended::ByPeer
            }
            Ok(_) => Ended::ByPeer,
        };
        // A front-end that is there still, as after a message that is wrong, hears what became of its requests.
        let has_gone = matches!(ended, Ended::ByPeer) && self.channel.is_closed();
        let stop = if has_gone { Self::leave } else { Self::stop_in_time };
        let stopped = catch_unwind(AssertUnwindSafe(|| stop(&mut self)));
        if let Ok(Err(error)) = &stopped {
            self.tell_end(format_args!("could not stop all queues: {error}"));
        } else if let Err(panic) = &stopped {
            // Some may still run, and what they have in flight is known to nobody.
            export.fail();
            let said = panic_message(&**panic);
            error!(disk, "stopping queues panicked, the disk is served no more: {said}");
            self.abandon_queues();
        }
        // The last answers ring as well, so only now.
        self.punish_if_blocked();
        self.leave_write_cache();
        // Nobody wants the image's lock any more; one that is held stays held.
        export.rings_stopped(false);
        export.notice(Notice::Disconnected { why });
        stopped.map_or_else(|panic| resume_unwind(panic), |_| ended)
    }

    fn serve(&mut self, linger: &dyn Fn() -> Option<Duration>) -> Result<Served, MessageError> {
        for _ in 0..TURN_EVENTS {
            if !self.take_owed()? {
                return Ok(Served::Over);
            }
            self.ask_again = self.ask_again.or_else(|| self.next_look());
            let rest = self.channel.time_left()?;
            let again = self.ask_again.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = [rest, again, linger()].into_iter().flatten().min();
            let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
            let (stop, bell) = (self.stop.as_fd(), self.inbox.bell());
            let reads = self.owed.is_none();
            let event = self.channel.wait(reads, stop, bell, self.answers(), timeout.as_ref())?;
            if event == Event::Silence && self.wakes_at().is_none_or(|at| Instant::now() < at) {
                return Ok(Served::Quiet);
            }
            if !self.handle(event)? {
                return Ok(Served::Over);
            }
            self.ask_again = self.next_look();
        }
        // What waits is found by the next turn.
        Ok(Served::Quiet)
    }

    /// When to look again at what nobody rings for: the image's lock, queues that still stop, here and of connections
    /// that have ended, a worker that could not take a queue, and whether a front-end waits that nothing is read from.
    fn next_look(&self) -> Option<Instant> {
        let lock = self.lock_wait.as_ref().map(|wait| wait.pause());
        let stop = |vring: &Vring| vring.stopping.is_some();
        let waits = self.owed.is_some() || self.behind_others || self.vrings.iter().any(stop);
        let pause = lock.into_iter().chain(waits.then_some(LOOK_EVERY)).min();
        let look = pause.map(|pause| Instant::now() + pause);
        look.into_iter().chain(self.try_again).min()
    }

    /// Carries out the message again that could not be answered, if it can be by now. False if the connection
    /// must end. While the disk is paused a queue cannot start, and only that is waited for: QEMU holds up its whole
    /// machine until it is answered.
    fn take_owed(&mut self) -> Result<bool, MessageError> {
        let Some(message) = self.owed.take() else { return Ok(true) };
        let stops = message.request == Some(FrontendReq::GET_VRING_BASE);
        let at = message.u32(0) as usize;
        if self.export.holds() && stops && at < self.vrings.len() && self.owes(at) {
            self.owed = Some(message);
            return Ok(true);
        }
        self.take(message)
    }

    /// False if the connection must end.
    fn handle(&mut self, event: Event) -> Result<bool, MessageError> {
        let heard = match event {
            // A guest that waits for the image's lock or a worker, or the rest of a message.
            Event::Silence => {
                self.try_refused_again();
                self.start_ready().map(drop)
            }
            Event::Stop => return Err(MessageError::Stopped),
            Event::Alarm => return Ok(!self.handle_inbox()),
            Event::Answer => self.hear_answers(),
            Event::Message if self.owed.is_some() => return Err(MessageError::Closed),
            Event::Message => {
                // The inbox is heard while the rest of a message is to come.
                let Some(message) = self.channel.receive()? else { return Ok(true) };
                // Memory may have vanished while no worker had a queue to look at.
                return Ok(self.take(message)? && !self.map.is_lost());
            }
        };
        if let Err(refusal) = &heard {
            self.tell_end(format_args!("{refusal}"));
        }
        Ok(heard.is_ok())
    }
}
