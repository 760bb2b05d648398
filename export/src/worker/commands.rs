//! Commands of queues whose requests are results of such (ublk's FETCH). Workers of other queues have
//! nothing of this: [`QueueLifecycle::HAS_COMMANDS`] is known when they are compiled.

use super::Worker;
use super::queue::WorkerQueue;
use crate::answer::abandon;
use crate::queue::QueueLifecycle;
use crate::queue_commands::{CommandSender, CommandSetup, QueueCommands, queue_and_tag};
use ringway_aio::{Done, Engine};
use std::io;
use std::mem::forget;

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// Gives results to the queues whose commands they are of; true if there were any.
    pub(super) fn take_results(&mut self) -> bool {
        for at in 0..self.reaped.commands.len() {
            let Done { tag, result } = self.reaped.commands[at];
            let (id, tag) = queue_and_tag(tag);
            // A queue stays until its last result has come.
            let Some(Some(queue)) = self.queues.get_mut(id as usize) else { continue };
            queue.commands.in_flight -= 1;
            queue.ring.command_done(tag, result);
            self.activate(id);
        }
        !self.reaped.commands.is_empty()
    }

    /// Makes the file of a queue's commands known, and keeps room for them.
    ///
    /// # Errors
    /// That the engine does not take such commands, or not as many beside those of its other queues.
    #[cold]
    pub(super) fn attach_commands(&mut self, ring: &Q) -> io::Result<QueueCommands> {
        let Some(CommandSetup { file, depth, bytes }) = ring.command_setup() else {
            return Ok(QueueCommands::default());
        };
        let limits = self.engine.limits();
        let unsupported = |why: String| Err(io::Error::new(io::ErrorKind::Unsupported, why));
        let Some(port) = limits.commands else {
            return unsupported(format!(
                "the engine {} takes no commands, as which this queue gets its requests",
                limits.name
            ));
        };
        if bytes > port.bytes {
            return unsupported(format!(
                "the queue has commands of {bytes} bytes, where the engine {} takes {}",
                limits.name, port.bytes
            ));
        }
        let others: u32 = self.queues.iter().flatten().map(|queue| queue.commands.depth).sum();
        let left = port.depth.saturating_sub(others);
        if depth > left {
            return Err(io::Error::other(format!(
                "the queue has up to {depth} commands in flight, where the engine {} has room for {left} \
                 of {} beside its other queues",
                limits.name, port.depth
            )));
        }
        let file = Some(self.engine.attach(&file)?);
        Ok(QueueCommands { file, depth, in_flight: 0, refused: false })
    }

    /// Forgets the file of a queue none of whose commands is in flight.
    #[cold]
    pub(super) fn detach_commands(&mut self, commands: &QueueCommands) {
        debug_assert_eq!(commands.in_flight, 0);
        if let Some(file) = commands.file {
            self.engine.detach(file);
        }
    }
}

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// Lets the queue hand over what it has to send.
    #[inline]
    pub(super) fn send_commands<E: Engine>(&mut self, queue: u32, engine: &mut E) {
        self.commands.refused = false;
        let commands = &mut self.commands;
        self.ring.send_commands(&mut CommandSender { engine, commands, queue });
    }

    /// Drops the queue of a worker whose engine has ended. That waits for no commands, and their driver
    /// may go on using memory of the queue: then this is never given back.
    pub(super) fn outlive_commands(self) {
        let Self { ring, disk, commands, .. } = self;
        if commands.in_flight > 0 {
            forget(ring);
        } else {
            abandon(ring);
        }
        abandon(disk);
    }
}
