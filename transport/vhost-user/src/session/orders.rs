//! What workers tell a session, what the control plane asks of it, and who else wants the disk.

use super::{Refusal, Session};
use ringway_export::{Alarm, Broken, Order};
use tracing::{error, warn};

impl Session<'_> {
    /// Hears alarms and obeys orders. True if the connection must end.
    pub(super) fn answer_door(&mut self) -> bool {
        let (alarms, orders) = self.door.take();
        let mut fatal = self.door.was_blocked();
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

    /// Has the next connection wait if the front-end has made a notification block, and with it all that
    /// its worker serves.
    pub(super) fn punish_if_blocked(&self) {
        if !self.door.was_blocked() {
            return;
        }
        let pause = self.export.offended().as_secs();
        self.tell_end(format_args!(
            "a notification did not return. The front-end has filled the counter of a call or log \
             eventfd and made it blocking, which holds up other disks. The next connection is taken \
             in {pause} s"
        ));
    }

    /// Another front-end waits for the disk.
    pub(super) fn tell_of_another(&mut self) {
        self.others = None;
        if let Some(pass) = self.export.limits().waiting_clients.pass() {
            warn!(
                disk = self.export.disk().name(),
                suppressed = pass.suppressed,
                "another front-end waits for this disk: it is served once the present one has gone"
            );
        }
    }

    fn hear(&mut self, queue: usize, alarm: &Alarm) -> bool {
        let disk = self.export.disk().name();
        let fatal = matches!(alarm, Alarm::WorkerFailed | Alarm::Broken(Broken::MemoryGone));
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
            let _ = err.ring();
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
