//! How data gets to and from the guest's pages, chosen by what it costs here.

use std::time::Duration;

/// How data moves, as whoever serves the disk wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Movement {
    /// Whichever costs less, found by trying; persistent grants are offered.
    #[default]
    Auto,
    /// The hypervisor copies, a batch of requests at a time.
    Copy,
    /// The pages of each request are mapped for as long as it takes.
    Map,
    /// Pages stay mapped, if the front-end uses the same ones again; else as `Copy`.
    Persistent,
}

impl Movement {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Copy, Self::Map, Self::Persistent];

    /// True if persistent grants are offered to front-ends.
    #[must_use]
    pub const fn offers_persistent(self) -> bool {
        matches!(self, Self::Auto | Self::Persistent)
    }
}

/// One way to move the data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    Copy,
    Map,
    Persistent,
}

/// Batches of one way in a trial. The first half does not count: pages become known to the host.
const TRIAL: u32 = 32;
/// Batches between trials.
const SETTLED: u32 = 16 * 1024;

/// Chooses a way for each batch.
///
/// In a trial each of two transfers has its batches; from then on the one that cost less a page is taken,
/// until the next trial.
#[derive(Debug)]
pub(super) struct Chooser {
    transfers: [Transfer; 2],
    /// The index of the way in use.
    now: usize,
    in_trial: bool,
    left: u32,
    spent: [Duration; 2],
    pages: [u64; 2],
}

impl Chooser {
    /// `persistent`: the front-end grants the same pages again.
    pub(super) fn new(movement: Movement, persistent: bool) -> Self {
        let transfers = match movement {
            Movement::Auto if persistent => [Transfer::Persistent, Transfer::Copy],
            Movement::Auto => [Transfer::Copy, Transfer::Map],
            Movement::Persistent if persistent => [Transfer::Persistent; 2],
            Movement::Copy | Movement::Persistent => [Transfer::Copy; 2],
            Movement::Map => [Transfer::Map; 2],
        };
        let in_trial = transfers[0] != transfers[1];
        let (spent, pages) = Default::default();
        Self { transfers, now: 0, in_trial, left: TRIAL, spent, pages }
    }

    /// The way in use.
    #[inline]
    pub(super) fn transfer(&self) -> Transfer {
        self.transfers[self.now]
    }

    /// True if [`Chooser::cost`] wants to know.
    #[inline]
    pub(super) fn measures(&self) -> bool {
        self.in_trial && self.left <= TRIAL / 2
    }

    /// What moving `pages` pages by `way` took, or a part of it.
    pub(super) fn cost(&mut self, transfer: Transfer, spent: Duration, pages: u64) {
        if let Some(at) = self.transfers.iter().position(|other| *other == transfer) {
            self.spent[at] += spent;
            self.pages[at] += pages;
        }
    }

    /// A batch that moved data is over.
    #[inline]
    pub(super) fn batch_is_over(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            self.turn();
        }
    }

    #[cold]
    fn turn(&mut self) {
        let differ = self.transfers[0] != self.transfers[1];
        (self.left, self.in_trial, self.now) = match (differ, self.in_trial, self.now) {
            (false, ..) => (SETTLED, false, 0),
            (true, true, 0) => (TRIAL, true, 1),
            (true, true, _) => (SETTLED, false, self.cheaper()),
            (true, false, _) => {
                (self.spent, self.pages) = Default::default();
                (TRIAL, true, 0)
            }
        };
    }

    fn cheaper(&self) -> usize {
        // Nanoseconds a page, compared without dividing; a way without pages says nothing.
        let cost = |at: usize, other: usize| {
            self.spent[at].as_nanos().saturating_mul(self.pages[other].into())
        };
        usize::from(self.pages[1] > 0 && cost(1, 0) < cost(0, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(chooser: &mut Chooser, cost: impl Fn(Transfer) -> u64) -> Transfer {
        for _ in 0..2 * TRIAL {
            if chooser.measures() {
                let transfer = chooser.transfer();
                chooser.cost(transfer, Duration::from_nanos(8 * cost(transfer)), 8);
            }
            chooser.batch_is_over();
        }
        assert!(!chooser.in_trial);
        chooser.transfer()
    }

    #[test]
    fn takes_what_costs_less_and_looks_again() {
        let mut chooser = Chooser::new(Movement::Auto, false);
        let dear_copy = |transfer| if transfer == Transfer::Copy { 900 } else { 300 };
        assert_eq!(settle(&mut chooser, dear_copy), Transfer::Map);
        for _ in 0..SETTLED {
            assert_eq!(chooser.transfer(), Transfer::Map);
            chooser.batch_is_over();
        }
        assert!(chooser.in_trial);
        let dear_map = |transfer| if transfer == Transfer::Copy { 200 } else { 300 };
        assert_eq!(settle(&mut chooser, dear_map), Transfer::Copy);
    }

    #[test]
    fn a_forced_way_is_kept_and_costs_no_measuring() {
        for (movement, transfer) in [
            (Movement::Copy, Transfer::Copy),
            (Movement::Map, Transfer::Map),
            (Movement::Persistent, Transfer::Persistent),
        ] {
            let mut chooser = Chooser::new(movement, true);
            for _ in 0..2 * SETTLED {
                assert_eq!((chooser.transfer(), chooser.measures()), (transfer, false));
                chooser.batch_is_over();
            }
        }
        // Without a front-end that takes part there is nothing to keep.
        assert_eq!(Chooser::new(Movement::Persistent, false).transfer(), Transfer::Copy);
    }
}
