//! What workers tell a session, and what the control plane asks of it.

use super::{Refusal, Session};
use crate::command::Alarm;
use crate::door::Order;
use crate::queue::Broken;
use crate::ring_bell::ring_bell;
use tracing::{error, warn};

impl Session<'_> {
    /// Hears alarms and obeys orders. True if the connection must end.
    pub(super) fn answer_door(&mut self) -> bool {
        let (alarms, orders) = self.door.take();
        let mut fatal = false;
        for (queue, alarm) in alarms {
            fatal |= self.hear(queue, &alarm);
        }
        self.answer_misses();
        for order in orders {
            fatal |= self.carry_out(&order);
        }
        // Vanished memory may show as a broken queue first.
        fatal || self.door.is_over() || self.map.is_poisoned()
    }

    fn hear(&mut self, queue: usize, alarm: &Alarm) -> bool {
        let disk = self.export.disk().name();
        let fatal = matches!(alarm, Alarm::WorkerFailed | Alarm::Broken(Broken::MEMORY_GONE));
        match alarm {
            Alarm::Broken(broken) => {
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
            let _ = ring_bell(err);
        }
        fatal
    }

    /// Whoever gave the order may have stopped waiting for the answer.
    fn carry_out(&mut self, order: &Order) -> bool {
        match order {
            Order::Announce(reply) => {
                let _ = reply.send(self.announce());
                false
            }
            Order::Pause(reply) => {
                let done = self.stop_all();
                let _ = reply.send(done.is_ok());
                self.fails("pause", done)
            }
            Order::Resume(reply) => {
                let done = self.start_ready().map(drop);
                let _ = reply.send(done.is_ok());
                self.fails("resume", done)
            }
        }
    }

    fn fails(&self, what: &str, done: Result<(), Refusal>) -> bool {
        if let Err(refusal) = &done {
            self.tell_end(format_args!("cannot {what}: {refusal}"));
        }
        done.is_err()
    }
}
