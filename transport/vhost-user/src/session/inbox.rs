//! What workers tell a session, and what the control plane asks of it.

use super::{Refusal, Session};
use ringway_export::{Alarm, Broken, Notice, SessionCommand};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use tracing::{error, warn};

impl Session {
    /// Handles alarms and commands. True if the connection must end.
    pub(super) fn handle_inbox(&mut self) -> bool {
        let (alarms, commands) = self.inbox.take();
        let mut fatal = self.inbox.was_blocked();
        for (queue, alarm) in alarms {
            fatal |= self.hear(queue, &alarm);
        }
        self.answer_misses();
        for command in commands {
            fatal |= self.carry_out(&command);
        }
        // Vanished memory may show as a broken queue first.
        fatal || self.inbox.is_over() || self.map.is_lost()
    }

    /// Has the next connection wait if the front-end has made a notification block, and with it all that
    /// its worker serves.
    pub(super) fn punish_if_blocked(&self) {
        if !self.inbox.was_blocked() {
            return;
        }
        let pause = self.export.offended().as_secs();
        self.tell_end(format_args!(
            "a notification did not return. The front-end has filled the counter of a call or log \
             eventfd and made it blocking, which holds up other disks. The next connection is taken \
             in {pause} s"
        ));
    }

    fn hear(&mut self, queue: usize, alarm: &Alarm) -> bool {
        let disk = self.export.disk().name();
        let fatal = matches!(alarm, Alarm::WorkerFailed | Alarm::Broken(Broken::MemoryGone));
        match alarm {
            Alarm::Broken(broken) => {
                self.export.notice(Notice::Broken { queue, why: broken.to_string() });
                if let Some(pass) = self.export.limits().broken.pass() {
                    warn!(disk, queue, suppressed = pass.suppressed, "queue stopped: {broken}");
                }
            }
            Alarm::WorkerFailed => {
                self.export.fail();
                error!(disk, queue, "the worker of this queue failed");
            }
        }
        if let Some(err) = self.vrings.get(queue).and_then(|vring| vring.err.as_ref()) {
            // Best effort: the front-end may not listen.
            let _ = err.signal();
        }
        fatal
    }

    /// Whoever gave the command may have stopped waiting for the answer.
    fn carry_out(&mut self, command: &SessionCommand) -> bool {
        match command {
            SessionCommand::Announce(reply) => {
                let _ = reply.send(self.announce());
                false
            }
            SessionCommand::Pause(reply) => {
                let done = self.stop_in_time();
                let _ = reply.send(done.is_ok());
                self.fails("pause", done)
            }
            SessionCommand::Resume(reply) => {
                let done = self.start_ready().map(drop);
                let _ = reply.send(done.is_ok());
                self.fails("resume", done)
            }
        }
    }

    /// While a message waits for the disk, which has had its time: what else there is to do. False if the
    /// connection must end.
    pub(super) fn may_wait_on(&mut self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
        let ordered = !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0));
        if ordered || self.channel.is_closed() || self.inbox.is_over() || self.inbox.was_blocked() {
            return false;
        }
        let (alarms, commands) = self.inbox.take();
        let fatal =
            alarms.into_iter().fold(false, |fatal, (at, alarm)| self.hear(at, &alarm) | fatal);
        self.answer_misses();
        for command in commands {
            match command {
                SessionCommand::Announce(reply) => drop(reply.send(self.announce())),
                SessionCommand::Pause(reply) => {
                    let _ = self.begin_stop(|_| true);
                    let _ = reply.send(false);
                }
                // Queues start when the message was carried out.
                SessionCommand::Resume(reply) => drop(reply.send(true)),
            }
        }
        !fatal && !self.map.is_lost()
    }

    fn fails(&self, what: &str, done: Result<(), Refusal>) -> bool {
        if let Err(refusal) = &done {
            self.tell_end(format_args!("cannot {what}: {refusal}"));
        }
        done.is_err()
    }
}
