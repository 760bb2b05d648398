//! Barriers: flush, write, flush, with nothing else under way.

use super::step::Step;
use super::{Queue, Token};
use crate::host::Host;
use ringway_core::{ByteRange, Op, Request, Status};
use ringway_export::Pop;

impl<H: Host> Queue<H> {
    /// The barrier's next step, if it is time for it.
    #[cold]
    pub(super) fn pop_barrier(&mut self, request: &mut Request) -> Pop<Token> {
        let Some(barrier) = &mut self.barrier else { return Pop::Empty };
        let entry = barrier.entry;
        if barrier.under_way || self.out > 0 {
            return Pop::Empty;
        }
        barrier.under_way = true;
        let step = barrier.step;
        self.out += 1;
        if self.flights[usize::from(entry)].failed {
            return Pop::Refused(Token::new(entry), Status::IoError);
        }
        match step {
            Step::Write => self.fill(entry, request),
            Step::First | Step::Last => {
                request.op = Op::Flush;
                (request.range, request.unmap) = (ByteRange::default(), false);
                request.segments.clear();
            }
        }
        Pop::Request(Token::new(entry))
    }

    /// True if the barrier's step is over and another one is to come.
    #[cold]
    pub(super) fn goes_on(&mut self, entry: u16, status: Status) -> bool {
        let Some(barrier) = self.barrier.as_mut().filter(|barrier| barrier.entry == entry) else {
            return false;
        };
        barrier.under_way = false;
        barrier.step = match barrier.step {
            Step::First if status == Status::Ok && !self.record.kept(entry).2.is_empty() => {
                Step::Write
            }
            Step::Write if status == Status::Ok => Step::Last,
            _ => {
                self.barrier = None;
                return false;
            }
        };
        true
    }

    pub(super) fn barrier_is_ready(&self) -> bool {
        self.barrier.as_ref().is_some_and(|barrier| !barrier.under_way && self.out == 0)
    }
}
