//! Places of a worker's engine, which several disks share: one whose storage hangs takes places that are its own, and
//! a part of those that are nobody's.
//!
//! ```text
//! depth of the engine ┌ own ┬ own ┬ own ┬──────── shared ────────┐
//!                       A     B     C      a quarter for one at most
//! ```

use crate::disk::Disk;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// Places of each disk that nobody else gets: what a disk has in flight that is used by few guests at a time.
const OWN: u32 = 16;

/// The part of the others that one disk gets at most.
const PART: u32 = 4;

/// The places of one engine. It is used by its worker's thread alone, as are the shares: that they are atomics lets them
/// move there.
#[derive(Debug)]
pub struct Places {
    depth: u32,
    shares: Vec<Weak<Share>>,
    rule: Arc<Rule>,
}

/// How they are divided now.
#[derive(Debug, Default)]
struct Rule {
    own: AtomicU32,
    /// Beside these, for one disk.
    most: AtomicU32,
    /// Of those that are shared, how many there are, and how many are taken.
    shared: AtomicU32,
    taken: AtomicU32,
}

/// A disk's part in the places of an engine, whatever its queues there.
#[derive(Debug)]
pub struct Share {
    disk: Weak<Disk>,
    used: AtomicU32,
    rule: Arc<Rule>,
}

impl Places {
    /// Those of an engine that takes `depth` operations at a time.
    #[must_use]
    pub fn new(depth: u32) -> Self {
        Self { depth, shares: Vec::new(), rule: Arc::default() }
    }

    /// The part of a disk, which has one as long as somebody holds it. Control plane: allocates.
    pub fn share(&mut self, disk: &Arc<Disk>) -> Arc<Share> {
        let of_disk = |share: &Arc<Share>| Weak::as_ptr(&share.disk) == Arc::as_ptr(disk);
        if let Some(share) = self.shares.iter().filter_map(Weak::upgrade).find(of_disk) {
            return share;
        }
        let (disk, rule) = (Arc::downgrade(disk), Arc::clone(&self.rule));
        let share = Arc::new(Share { disk, used: AtomicU32::new(0), rule });
        self.shares.push(Arc::downgrade(&share));
        self.divide();
        share
    }

    /// Divides them among the disks that have a part by now.
    pub fn divide(&mut self) {
        self.shares.retain(|share| share.strong_count() > 0);
        let disks = u32::try_from(self.shares.len()).unwrap_or(u32::MAX).max(1);
        let own = OWN.min(self.depth / disks).max(1);
        let shared = self.depth.saturating_sub(own.saturating_mul(disks));
        let used = |share: Arc<Share>| share.used.load(Relaxed).saturating_sub(own);
        let taken = self.shares.iter().filter_map(Weak::upgrade).map(used).sum();
        self.rule.own.store(own, Relaxed);
        self.rule.shared.store(shared, Relaxed);
        self.rule.most.store(shared / PART, Relaxed);
        self.rule.taken.store(taken, Relaxed);
    }
}

impl Share {
    /// Takes a place for one operation, if the disk has one.
    #[inline]
    #[must_use]
    pub fn take(&self) -> bool {
        let (used, rule) = (self.used.load(Relaxed), &*self.rule);
        let own = rule.own.load(Relaxed);
        if used >= own {
            let taken = rule.taken.load(Relaxed);
            if used - own >= rule.most.load(Relaxed) || taken >= rule.shared.load(Relaxed) {
                return false;
            }
            rule.taken.store(taken + 1, Relaxed);
        }
        self.used.store(used + 1, Relaxed);
        true
    }

    /// The operation is over, or the engine has not taken it.
    #[inline]
    pub fn give_back(&self) {
        let (used, rule) = (self.used.load(Relaxed), &*self.rule);
        debug_assert!(used > 0, "each place is taken before it is given back");
        if used > rule.own.load(Relaxed) {
            rule.taken.store(rule.taken.load(Relaxed) - 1, Relaxed);
        }
        self.used.store(used - 1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CustomDisk;

    fn disk() -> Arc<Disk> {
        Arc::new(CustomDisk::new(4096).open(None).unwrap())
    }

    /// As many as it gets.
    fn fill(share: &Share) -> u32 {
        (0..u32::MAX).take_while(|_| share.take()).count().try_into().unwrap()
    }

    /// Half of all disks hang with all that they get: the others have as many places as before.
    #[test]
    fn c62_each_disk_has_places_that_nobody_else_gets() {
        for count in [2, 4, 8, 32, 100, 128] {
            let mut places = Places::new(2048);
            let disks: Vec<_> = (0..count).map(|_| disk()).collect();
            let shares: Vec<_> = disks.iter().map(|disk| places.share(disk)).collect();
            let (hung, others) = shares.split_at(count / 2);
            let taken: u32 = hung.iter().map(|share| fill(share)).sum();
            let shared = 2048 - 16 * u32::try_from(count).unwrap();
            assert!(hung[0].used.load(Relaxed) <= 16 + shared / 4, "{count}");
            for share in others {
                assert!((0..16).all(|_| share.take()), "{count}");
            }
            let all: u32 = shares.iter().map(|share| share.used.load(Relaxed)).sum();
            assert!(all <= 2048 && all >= taken, "{count}: {all}");
            // They come back.
            for share in &shares {
                (0..share.used.load(Relaxed)).for_each(|_| share.give_back());
            }
            assert_eq!(places.rule.taken.load(Relaxed), 0, "{count}");
        }
    }

    #[test]
    fn what_is_in_flight_counts_when_disks_come_and_go() {
        let mut places = Places::new(64);
        let (one, other) = (disk(), disk());
        let first = places.share(&one);
        assert_eq!(fill(&first), 16 + 48 / 4);
        let second = places.share(&other);
        assert_eq!(fill(&second), 16 + 32 / 4, "a queue of another disk");
        assert!(Arc::ptr_eq(&first, &places.share(&one)), "one part, whatever its queues");
        // The first has more than it would get by now, and gets none before that is over.
        (0..4).for_each(|_| first.give_back());
        assert!(!first.take());
        first.give_back();
        assert!(first.take());
        drop(second);
        places.divide();
        assert_eq!(fill(&first), 4);
        // More disks than places: one each, and the engine has the last word.
        let many: Vec<_> = (0..70).map(|_| disk()).collect();
        let shares: Vec<_> = many.iter().map(|disk| places.share(disk)).collect();
        assert!(shares.iter().all(|share| fill(share) == 1));
    }
}
