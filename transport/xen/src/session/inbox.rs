//! What workers tell a session, and what the control plane asks of it.

use super::{Refusal, Session};
use crate::host::Host;
use crate::keys;
use crate::xenstore::StoreError;
use ringway_export::{Alarm, GuestNotice, Notice, SessionCommand};
use tracing::{error, warn};

impl<H: Host> Session<'_, H> {
    /// Handles alarms and commands. True if the session must end. One that was told to, because it had not answered a
    /// command in time, answers that here and goes on: its front-end would lose the disk for good.
    pub(super) fn handle_inbox(&mut self) -> Result<bool, StoreError> {
        let (alarms, commands) = self.inbox.take();
        let mut fatal = false;
        let disk = self.export.disk().name();
        for (queue, alarm) in alarms {
            match alarm {
                Alarm::Broken(broken) => {
                    self.export.notice(Notice::Broken { queue, why: broken.to_string() });
                    if let Some(pass) = self.export.limits().broken.pass() {
                        let (domain, suppressed) = (self.at.domid, pass.suppressed);
                        warn!(disk, queue, domain, suppressed, "ring stopped: {broken}");
                    }
                }
                Alarm::WorkerFailed => {
                    self.export.fail();
                    error!(disk, queue, "the worker of this queue failed");
                    fatal = true;
                }
            }
        }
        for command in commands {
            self.carry_out(&command)?;
        }
        Ok(fatal)
    }

    /// Whoever gave the command may have stopped waiting for the answer.
    fn carry_out(&mut self, command: &SessionCommand) -> Result<(), StoreError> {
        match command {
            SessionCommand::Announce(reply) => {
                let notice = self.announce();
                let _ = reply.send(*notice.as_ref().unwrap_or(&GuestNotice::Later));
                notice.map(drop)
            }
            SessionCommand::Pause(reply) => {
                let done = self.stop_all();
                let _ = reply.send(done.is_ok());
                self.leave_unless("pause", done);
                Ok(())
            }
            SessionCommand::Resume(reply) => {
                let done = self.start_stopped();
                let _ = reply.send(done.is_ok());
                self.leave_unless("resume", done);
                Ok(())
            }
        }
    }

    /// A front-end that were told to close would lose its disk for good. Its rings are taken again, as a predecessor's
    /// are, once that can be.
    fn leave_unless(&mut self, what: &str, done: Result<(), Refusal>) {
        let Err(refusal) = done else { return };
        if let Some(pass) = self.export.limits().ended.pass() {
            let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
            warn!(disk, suppressed, "the guest's rings are left for now, cannot {what}: {refusal}");
        }
        let _ = self.leave();
    }

    /// Tells the front-end of the disk's size.
    fn announce(&mut self) -> Result<GuestNotice, StoreError> {
        let seen = keys::read(&mut self.store, &self.at)?;
        if !seen.present || self.resizes_announced == self.export.resizes() {
            return Ok(if seen.present { GuestNotice::Yes } else { GuestNotice::NobodyThere });
        }
        self.tell_size(seen.back, seen.back)?;
        Ok(if seen.is_connected() { GuestNotice::Yes } else { GuestNotice::Later })
    }
}
