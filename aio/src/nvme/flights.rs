//! What is in flight (hot): operations that became commands, and those that take more than one.

use super::command::{self, Blocks, Bytes, DiscardRange};
use super::namespace::Facts;
use crate::engine::IoOp;

/// One operation, as long as commands of it are in flight, one at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// Of its [`crate::Io`].
    pub(super) tag: u64,
    /// Its file in the ring's table.
    pub(super) file: u32,
    /// What it answers if the device does not refuse: the bytes that move.
    pub(super) bytes: u32,
    pub(super) facts: Facts,
    /// What is erased, and what of it no command has been sent for.
    erase: Option<(IoOp, Blocks)>,
    /// What the device reads while it discards.
    range: DiscardRange,
}

impl Flight {
    /// One command, which moves so many bytes.
    #[inline]
    pub(super) fn of_one(tag: u64, file: u32, bytes: u32, facts: Facts) -> Self {
        Self { tag, file, bytes, facts, erase: None, range: DiscardRange::default() }
    }

    /// As many commands as erasing `blocks` takes.
    pub(super) fn erasing(tag: u64, file: u32, facts: Facts, op: IoOp, blocks: Blocks) -> Self {
        Self { erase: Some((op, blocks)), ..Self::of_one(tag, file, 0, facts) }
    }

    /// The next command of one that erases; `None` once all were sent. It has to stay where it is until
    /// that command is done.
    pub(super) fn next_erase(&mut self) -> Option<Bytes> {
        let (op, left) = self.erase.as_mut()?;
        let facts = &self.facts;
        let most = if *op == IoOp::Discard { facts.discard_blocks } else { facts.zero_blocks };
        let now = Blocks { first: left.first, count: left.count.min(most.into()) };
        if now.count == 0 {
            return None;
        }
        (left.first, left.count) = (left.first + now.count, left.count - now.count);
        Some(match op {
            IoOp::Discard => {
                self.range = DiscardRange::new(now);
                command::discard(facts, (&raw const self.range).expose_provenance() as u64)
            }
            IoOp::PunchHole => command::write_zeroes(facts, now, facts.deallocates_zeroed),
            _ => command::write_zeroes(facts, now, false),
        })
    }
}

/// All that can be in flight.
///
/// # Invariants
/// 1. A place is free, and its number in `free`, or its operation is in flight.
#[derive(Debug)]
pub(super) struct Flights {
    places: Box<[Option<Flight>]>,
    free: Vec<u32>,
}

impl Flights {
    /// Room for `depth`. Allocates; nothing else does.
    pub(super) fn new(depth: u32) -> Self {
        let places = vec![None; depth as usize].into_boxed_slice();
        Self { places, free: (0..depth).rev().collect() }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Takes an operation in: its place, where it stays.
    #[inline]
    pub(super) fn take(&mut self, flight: Flight) -> Option<(u32, &mut Flight)> {
        let at = self.free.pop()?;
        Some((at, self.places[at as usize].insert(flight)))
    }

    /// The operation at a place.
    #[inline]
    pub(super) fn at(&mut self, at: u32) -> Option<&mut Flight> {
        self.places.get_mut(at as usize)?.as_mut()
    }

    /// An operation has ended.
    #[inline]
    pub(super) fn end(&mut self, at: u32) {
        if self.places[at as usize].take().is_some() {
            self.free.push(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        id: 1,
        block_shift: 9,
        max_bytes: 1 << 17,
        discard_blocks: 1000,
        zero_blocks: 256,
        deallocates_zeroed: true,
    };

    /// The commands of an operation: opcode, first block, dword 12.
    fn commands(op: IoOp, blocks: Blocks) -> Vec<(u8, u32, u32)> {
        let mut flight = Flight::erasing(3, 0, FACTS, op, blocks);
        let dword =
            |bytes: &Bytes, at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let commands = std::iter::from_fn(|| flight.next_erase());
        commands.map(|bytes| (bytes[0], dword(&bytes, 40), dword(&bytes, 48))).collect()
    }

    #[test]
    fn what_is_erased_goes_in_as_many_commands_as_it_takes() {
        let blocks = Blocks { first: 10, count: 600 };
        assert_eq!(commands(IoOp::ZeroRange, blocks), [(8, 10, 255), (8, 266, 255), (8, 522, 87)]);
        let deallocates = 1 << 25;
        let punched = commands(IoOp::PunchHole, Blocks { first: 0, count: 256 });
        assert_eq!(punched, [(8, 0, 255 | deallocates)]);
        assert_eq!(commands(IoOp::Discard, Blocks { first: 0, count: 2001 }).len(), 3);
        assert_eq!(commands(IoOp::ZeroRange, Blocks { first: 0, count: 0 }), []);
    }

    #[test]
    fn places_are_given_again_and_never_twice() {
        let mut flights = Flights::new(2);
        let flight = Flight::of_one(7, 0, 512, FACTS);
        let (one, _) = flights.take(flight).unwrap();
        let (other, _) = flights.take(flight).unwrap();
        assert!(one != other && flights.take(flight).is_none() && flights.count() == 2);
        flights.end(one);
        flights.end(one);
        assert_eq!((flights.count(), flights.take(flight).unwrap().0), (1, one));
        assert!(flights.take(flight).is_none());
    }
}
