//! What workers tell a session, and what the control plane asks of it.

use super::{Ended, Session};
use crate::queue::ConnectionEnd;
use ringway_export::{Alarm, Broken, GuestNotice, Notice, SessionCommand};
use tracing::error;

/// How the connection ends that a queue has no more use for.
fn end_of(broken: &Broken) -> Option<String> {
    let Broken::Rule(rule) = broken else { return Some(broken.to_string()) };
    match rule.downcast_ref::<ConnectionEnd>() {
        // As clients end it.
        Some(ConnectionEnd::Disconnected | ConnectionEnd::Closed) => None,
        _ => Some(rule.to_string()),
    }
}

/// True if the client is gone by that, and had not said that it would go.
fn is_desertion(broken: &Broken) -> bool {
    let Broken::Rule(rule) = broken else { return false };
    let end = rule.downcast_ref::<ConnectionEnd>();
    matches!(end, Some(ConnectionEnd::Closed | ConnectionEnd::Lost(_)))
}

impl Session<'_> {
    /// Handles alarms and commands; how the session ends, if it does.
    pub(super) fn handle_inbox(&mut self) -> Option<(Ended, Option<String>)> {
        let (alarms, commands) = self.inbox.take();
        let mut ended = None;
        for (queue, alarm) in alarms {
            match alarm {
                Alarm::Broken(broken) => {
                    let why = end_of(&broken);
                    self.deserted = is_desertion(&broken);
                    if let Some(why) = why.clone() {
                        self.export.notice(Notice::Broken { queue, why });
                    }
                    ended = Some((Ended::ByPeer, why));
                }
                Alarm::WorkerFailed => {
                    self.export.fail();
                    error!(
                        disk = self.export.disk().name(),
                        queue, "the worker of this queue failed"
                    );
                    return Some((Ended::Failed, Some("its worker failed".into())));
                }
            }
        }
        for command in commands {
            if let Some(why) = self.carry_out(command) {
                ended = ended.or(Some((Ended::ByPeer, Some(why))));
            }
        }
        if self.inbox.is_over() {
            ended = ended.or(Some((Ended::ByPeer, Some("it was told to end".into()))));
        }
        ended
    }

    /// Why the connection has to end, if it has. Whoever gave the command may have stopped waiting.
    fn carry_out(&mut self, command: SessionCommand) -> Option<String> {
        match command {
            SessionCommand::Announce(reply) => {
                // A client learns of another size when it connects again.
                let _ = reply.send(GuestNotice::NotListening);
                None
            }
            SessionCommand::Pause(reply) => {
                let done = self.stop();
                let _ = reply.send(done.is_ok());
                done.err().map(|refusal| refusal.to_string())
            }
            SessionCommand::Resume(reply) => {
                let done = self.start();
                let _ = reply.send(done.is_ok());
                done.err().map(|refusal| refusal.to_string())
            }
        }
    }
}
