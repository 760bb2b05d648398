//! What is done with a piece once it was read.

use super::{DST, Flow, Halt, Mode, SRC};
use crate::copy::end::Verb;
use crate::copy::extents::Item;
use crate::copy::zero::{self, Run};
use anyhow::Context;

impl Flow<'_> {
    /// All parts of a slot are done.
    pub(super) fn next_step(&mut self, slot: usize) -> anyhow::Result<()> {
        let item = self.slots[slot].busy.context("a slot without work has completed some")?;
        self.slots[slot].parts.clear();
        if self.halt.is_some() && !self.slots[slot].writing {
            // Stays busy in the books: it is not done.
            self.retire(slot);
            return Ok(());
        }
        match self.mode {
            Mode::Compare => self.compare(slot, item),
            Mode::Copy { .. } if self.slots[slot].writing => {
                self.finish(slot);
                Ok(())
            }
            Mode::Copy { fresh, find_zeroes } => self.write(slot, item, fresh, find_zeroes),
        }
    }

    /// Writes what was read.
    fn write(&mut self, slot: usize, item: Item, fresh: bool, find: bool) -> anyhow::Result<()> {
        let len = usize::try_from(item.len)?;
        self.slots[slot].writing = true;
        let [from, to] = [SRC, DST].map(|end| self.slots[slot].memory[end].base);
        let mut runs = std::mem::take(&mut self.runs);
        {
            // SAFETY: the slot's memory, of which nothing is under way.
            let bytes = unsafe { std::slice::from_raw_parts(from, len) };
            if find {
                zero::runs(bytes, self.unit, &mut runs);
            } else {
                runs.clear();
                runs.push(Run { bytes: 0..len, zero: false });
            }
        }
        for Run { bytes, zero } in &runs {
            let (at, part) = (item.offset + bytes.start as u64, bytes.len());
            if *zero {
                self.counters.zeroes += part as u64;
            } else {
                self.counters.written += part as u64;
            }
            if *zero && fresh {
                continue;
            }
            if from != to {
                // SAFETY: both memories are the slot's, apart, and hold a chunk.
                unsafe {
                    to.add(bytes.start).copy_from_nonoverlapping(from.add(bytes.start), part)
                };
            }
            // The last sector of a disk may hold less than 512 bytes of a file.
            let padded = part.next_multiple_of(512).min(self.chunk - bytes.start);
            // SAFETY: within the chunk, behind what was read.
            unsafe { to.add(bytes.end).write_bytes(0, padded - part) };
            let verb = if *zero { Verb::Zero } else { Verb::Write };
            self.push(slot, DST, verb, at, part as u64, bytes.start);
        }
        self.runs = runs;
        if self.slots[slot].parts.is_empty() {
            self.finish(slot);
            return Ok(());
        }
        self.send_all(slot)
    }

    fn compare(&mut self, slot: usize, item: Item) -> anyhow::Result<()> {
        let len = usize::try_from(item.len.min(self.chunk as u64))?;
        let [src, dst] = [SRC, DST].map(|end| {
            // SAFETY: the slot's memory, of which nothing is under way.
            unsafe { std::slice::from_raw_parts(self.slots[slot].memory[end].base, len) }
        });
        let same = if item.hole { zero::is_zero(dst) } else { src == dst };
        if !same {
            let first = match item.hole {
                true => dst.iter().position(|&byte| byte != 0),
                false => src.iter().zip(dst).position(|(a, b)| a != b),
            };
            let at = item.offset + first.unwrap_or(0) as u64;
            // The first one in the order of the disk, not of the completions.
            match &mut self.halt {
                None => self.halt = Some(Halt::Differs(at)),
                Some(Halt::Differs(first)) => *first = at.min(*first),
                Some(_) => {}
            }
            self.retire(slot);
            return Ok(());
        }
        let rest = Item { offset: item.offset + len as u64, len: item.len - len as u64, ..item };
        if rest.len == 0 || self.halt.is_some() {
            self.finish(slot);
            return Ok(());
        }
        self.slots[slot].busy = Some(rest);
        self.compare_next(slot, rest);
        self.send_all(slot)
    }

    /// The slot's piece is done.
    fn finish(&mut self, slot: usize) {
        self.slots[slot].busy = None;
        self.slots[slot].parts.clear();
        self.free.push(slot);
    }
}
