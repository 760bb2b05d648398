//! The order in which a run with `--verify` goes through a job's part of the target: every block once
//! before any comes twice.
//!
//! Whoever knows the order, and how far a run came, knows which blocks it has written: that is all a
//! later reader has to be told (`record.rs`).

use std::ops::Range;

/// The part of job `job` of `jobs`: whole stretches, the last of which may be shorter.
pub(crate) fn part(region: &Range<u64>, stretch: u64, jobs: u64, job: u64) -> Range<u64> {
    let stretches = (region.end - region.start).div_ceil(stretch);
    let at = |job: u64| {
        let first = u128::from(stretches) * u128::from(job) / u128::from(jobs);
        // At most all stretches.
        let first = u64::try_from(first).unwrap_or(u64::MAX);
        region.start.saturating_add(first.saturating_mul(stretch)).min(region.end)
    };
    at(job)..at(job + 1)
}

/// All stretches of a part, each once: in order, or shuffled.
#[derive(Clone, Debug)]
pub(crate) struct VisitOrder {
    part: Range<u64>,
    stretch: u64,
    shuffle: Option<Shuffle>,
}

impl VisitOrder {
    /// `seed` for one that is shuffled. `part` is not empty.
    pub(crate) fn new(part: Range<u64>, stretch: u64, seed: Option<u64>) -> Self {
        let stretches = (part.end - part.start).div_ceil(stretch);
        let shuffle = seed.map(|seed| Shuffle::new(stretches, seed));
        Self { part, stretch, shuffle }
    }

    pub(crate) fn part(&self) -> &Range<u64> {
        &self.part
    }

    fn stretches(&self) -> u64 {
        (self.part.end - self.part.start).div_ceil(self.stretch)
    }

    fn at(&self, number: u64) -> Range<u64> {
        let index = self.shuffle.as_ref().map_or(number, |shuffle| shuffle.forth(number));
        let start = self.part.start + index * self.stretch;
        start..(start + self.stretch).min(self.part.end)
    }

    /// When it is a byte's turn: the number of its stretch, and its place in that.
    fn turn(&self, offset: u64) -> (u64, u64) {
        let (index, within) =
            ((offset - self.part.start) / self.stretch, (offset - self.part.start) % self.stretch);
        (self.shuffle.as_ref().map_or(index, |shuffle| shuffle.back(index)), within)
    }

    /// True if whoever came so far has had this byte.
    pub(crate) fn is_behind(&self, reached: Reached, offset: u64) -> bool {
        reached.all || self.turn(offset) < (reached.number, reached.within)
    }

    /// Bytes that whoever came so far has had.
    pub(crate) fn behind(&self, reached: Reached) -> u64 {
        if reached.all {
            return self.part.end - self.part.start;
        }
        let whole = reached.number.min(self.stretches());
        let short = self.stretches() * self.stretch - (self.part.end - self.part.start);
        // The last stretch of the part may be shorter, and come at any time.
        let (last, _) = self.turn(self.part.end - 1);
        let missing = if last < whole { short } else { 0 };
        whole * self.stretch - missing + reached.within
    }
}

/// How far somebody came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reached {
    /// To the end, at least once.
    pub all: bool,
    /// Stretches that are done.
    pub number: u64,
    /// Bytes of the next one that are done.
    pub within: u64,
}

/// Goes through an order again and again.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    order: VisitOrder,
    reached: Reached,
    /// Before the last request.
    before: Reached,
    now: Range<u64>,
}

impl Round {
    pub(crate) fn new(order: VisitOrder) -> Self {
        let now = order.at(0);
        Self { order, reached: Reached::default(), before: Reached::default(), now }
    }

    pub(crate) fn order(&self) -> &VisitOrder {
        &self.order
    }

    /// Where a request of `len` bytes goes, and how much of it fits there.
    #[inline]
    pub(crate) fn next(&mut self, len: u32) -> (u64, u32) {
        self.before = self.reached;
        let offset = self.now.start + self.reached.within;
        let left = self.now.end - offset;
        let len = u32::try_from(left).unwrap_or(u32::MAX).min(len);
        self.reached.within += u64::from(len);
        if offset + u64::from(len) == self.now.end {
            self.turn_over();
        }
        (offset, len)
    }

    fn turn_over(&mut self) {
        self.reached.number += 1;
        self.reached.within = 0;
        if self.reached.number == self.order.stretches() {
            self.reached = Reached { all: true, ..Reached::default() };
        }
        self.now = self.order.at(self.reached.number);
    }

    /// How far it came; without the last request if that was never sent.
    pub(crate) fn reached(&self, held: bool) -> Reached {
        if held { self.before } else { self.reached }
    }
}

/// A permutation of the numbers below `count`, without memory: a Feistel network over the next power
/// of four, applied again to what lies beyond (cycle walking).
#[derive(Clone, Debug)]
struct Shuffle {
    count: u64,
    half: u32,
    keys: [u64; 4],
}

impl Shuffle {
    fn new(count: u64, seed: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let mut state = seed;
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        });
        Self { count, half: bits.div_ceil(2).max(1), keys }
    }

    fn mask(&self) -> u64 {
        (1 << self.half) - 1
    }

    fn forth(&self, mut number: u64) -> u64 {
        loop {
            let (mut left, mut right) = (number >> self.half, number & self.mask());
            for key in self.keys {
                (left, right) = (right, left ^ (mix(right ^ key) & self.mask()));
            }
            number = left << self.half | right;
            if number < self.count {
                return number;
            }
        }
    }

    fn back(&self, mut number: u64) -> u64 {
        loop {
            let (mut left, mut right) = (number >> self.half, number & self.mask());
            for key in self.keys.into_iter().rev() {
                (left, right) = (right ^ (mix(left ^ key) & self.mask()), left);
            }
            number = left << self.half | right;
            if number < self.count {
                return number;
            }
        }
    }
}

/// `SplitMix64`.
fn mix(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    #[test]
    fn a_shuffle_has_each_number_once_and_goes_back() {
        for count in [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4096, 5000] {
            for seed in 0..4 {
                let shuffle = Shuffle::new(count, seed);
                let mut all: Vec<_> = (0..count).map(|number| shuffle.forth(number)).collect();
                assert!((0..count).all(|number| shuffle.back(shuffle.forth(number)) == number));
                let in_order = all.windows(2).filter(|two| two[1] == two[0] + 1).count();
                assert!(count < 100 || in_order < all.len() / 10, "{in_order} of {count}");
                all.sort_unstable();
                assert!(all.into_iter().eq(0..count), "{count} {seed}");
            }
        }
        let far = Shuffle::new(u64::MAX / 512, 7);
        assert_eq!(far.back(far.forth(1 << 50)), 1 << 50);
    }

    #[test]
    fn parts_are_all_of_a_region_and_nothing_twice() {
        for (end, stretch, jobs) in [(1 << 20, 4096, 3), (65536, 512, 7), (66_048, 4096, 16)] {
            let region = 4096..end + 4096;
            let parts: Vec<_> = (0..jobs).map(|job| part(&region, stretch, jobs, job)).collect();
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (region.start, region.end));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
        }
    }

    /// Whatever the sizes, and wherever it ends: what was written is what the order says.
    #[test]
    fn what_was_written_is_known_from_how_far_it_came() {
        let mut random = Rng::with_seed(3);
        for (bytes, seed) in [(64 * 4096, Some(1)), (64 * 4096 + 512, Some(2)), (9 * 4096, None)] {
            let order = VisitOrder::new(8192..8192 + bytes, 4096, seed);
            let sectors = usize::try_from(bytes / 512).unwrap();
            let (mut round, mut written) = (Round::new(order), vec![0u32; sectors]);
            let mut sum = 0;
            while sum < 2 * bytes {
                let reached = round.reached(false);
                let order = round.order();
                for (sector, writes) in (0u64..).zip(&written) {
                    let behind = order.is_behind(reached, 8192 + sector * 512);
                    assert_eq!(behind, *writes > 0, "sector {sector} at {reached:?}");
                }
                assert_eq!(order.behind(reached), sum.min(bytes), "{reached:?}");
                let len = [512, 1024, 4096][usize::try_from(random.u64(..3)).unwrap()];
                let (offset, len) = round.next(len);
                assert_eq!(round.reached(true), reached, "one that was never sent");
                let first = usize::try_from((offset - 8192) / 512).unwrap();
                written[first..][..len as usize / 512].iter_mut().for_each(|n| *n += 1);
                sum += u64::from(len);
            }
            assert!(written.iter().all(|&writes| writes == 2), "{written:?}");
        }
    }
}
