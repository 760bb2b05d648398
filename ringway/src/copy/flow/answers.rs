//! What comes back from the ends, and what follows from it.

use super::{DST, Flow, Halt, RequestFailed, SRC, Watcher};
use crate::copy::end::{End, Ticket, Verb, put_back};
use crate::copy::flow::slots::Transfer;
use anyhow::{Context, anyhow, bail};
use ringway_core::Status;
use std::io;

impl Flow<'_> {
    /// Takes what is done, at both ends.
    pub(super) fn harvest(&mut self, watcher: &mut dyn Watcher) -> anyhow::Result<usize> {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.clear();
        let mut found = self.engine.reap(&mut reaped) + reaped.rung.len();
        let mut first_error = None;
        for done in &reaped.done {
            let ticket = Ticket::of_tag(done.tag);
            let result = match u64::try_from(done.result) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(-done.result),
            };
            if let Err(error) = self.on_file(ticket, result, watcher) {
                first_error.get_or_insert(error);
            }
        }
        self.reaped = reaped;
        for end in [SRC, DST] {
            while let End::Disk(disk) = &mut self.ends[end] {
                let popped = disk.queue.pop().inspect_err(|_| self.dead = true);
                let Some(done) = popped? else { break };
                found += 1;
                let (flight, status) = (done.ctx, done.status);
                if let Some(slot) = self.slots.get_mut(flight.ticket.slot as usize) {
                    put_back(&mut slot.memory[end].pieces, &flight, done.data);
                }
                if let Err(error) = self.on_disk(end, flight.ticket, status, flight.len, watcher) {
                    first_error.get_or_insert(error);
                }
            }
        }
        for end in [SRC, DST] {
            while let End::Image(image) = &mut self.ends[end] {
                let Some((ticket, result)) = image.pop() else { break };
                found += 1;
                if let Err(error) = self.on_file(ticket, result, watcher) {
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(found), Err)
    }

    fn on_file(
        &mut self,
        ticket: Ticket,
        result: Result<u64, i32>,
        watcher: &mut dyn Watcher,
    ) -> anyhow::Result<()> {
        let host = io::Error::from_raw_os_error;
        if ticket == Ticket::SYNC {
            let done = self.syncing.take();
            self.sync_failed |= result.is_err();
            result.map_err(host).context("the destination cannot be made durable")?;
            return done.map_or(Ok(()), |done| watcher.durable(done));
        }
        let slot = ticket.slot as usize;
        let part = &self.slots[slot].parts[ticket.part as usize];
        let (verb, method, end, left) = (part.verb, part.method, part.end, part.len - part.done);
        let at = part.offset + part.done;
        match result {
            Err(errno) => {
                if let End::File(file) = &mut self.ends[end] {
                    if self.halt.is_none() && file.adapt(method, errno) {
                        return self.send_again(slot, ticket.part as usize);
                    }
                }
                self.failed(slot);
                Err(anyhow!(host(errno)).context(doing(verb, at)))
            }
            Ok(0) if verb != Verb::Zero => {
                self.failed(slot);
                let what = doing(verb, at);
                Err(anyhow!("{what}: there is nothing more, {left} bytes were expected"))
            }
            Ok(_) if verb == Verb::Zero => self.advance(slot, ticket.part as usize, left),
            Ok(bytes) => self.advance(slot, ticket.part as usize, bytes),
        }
    }

    fn on_disk(
        &mut self,
        end: usize,
        ticket: Ticket,
        status: Status,
        bytes: u64,
        watcher: &mut dyn Watcher,
    ) -> anyhow::Result<()> {
        if ticket == Ticket::SYNC {
            let done = self.syncing.take();
            if status != Status::Ok {
                self.sync_failed = true;
                bail!("the destination cannot be made durable: its server fails the flush");
            }
            return done.map_or(Ok(()), |done| watcher.durable(done));
        }
        let slot = ticket.slot as usize;
        let part = &self.slots[slot].parts[ticket.part as usize];
        let (verb, at) = (part.verb, part.offset + part.done);
        if status == Status::Ok {
            return self.advance(slot, ticket.part as usize, bytes);
        }
        if let End::Disk(disk) = &mut self.ends[end] {
            if self.halt.is_none() && disk.adapt(verb, status) {
                return self.send_again(slot, ticket.part as usize);
            }
        }
        self.failed(slot);
        let what = doing(verb, at);
        let why = if status == Status::Unsupported { "does not offer it" } else { "fails it" };
        Err(anyhow!("{what}: the server {why}"))
    }

    /// So many bytes more of a part are done.
    fn advance(&mut self, slot: usize, part: usize, bytes: u64) -> anyhow::Result<()> {
        let Transfer { len, done, .. } = &mut self.slots[slot].parts[part];
        *done += bytes;
        if *done < *len {
            if self.halt.is_none() {
                return self.send_again(slot, part);
            }
            self.failed(slot);
            return Ok(());
        }
        self.slots[slot].pending -= 1;
        if self.slots[slot].pending > 0 {
            return Ok(());
        }
        self.next_step(slot)
    }

    /// The slot's piece will not be done; it still counts for [`Flow::mark`].
    pub(super) fn retire(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// A part of the slot's work has failed.
    pub(super) fn failed(&mut self, slot: usize) {
        self.slots[slot].pending -= 1;
        self.release_failed(slot);
        if self.halt.is_none() {
            // So that nobody begins anything before the error gets to `run`.
            self.halt = Some(Halt::Failed(RequestFailed.into()));
        }
    }

    pub(super) fn release_failed(&mut self, slot: usize) {
        if self.slots[slot].pending == 0 {
            self.retire(slot);
        }
    }
}

fn doing(verb: Verb, at: u64) -> String {
    match verb {
        Verb::Read => format!("reading at byte {at} failed"),
        Verb::Write => format!("writing at byte {at} failed"),
        Verb::Zero => format!("zeroing at byte {at} failed"),
    }
}
