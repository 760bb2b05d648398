//! What goes wrong besides kills: sectors that cannot be written, a disk that is full, a sync that
//! fails; and what goes on meanwhile: a guest switches its write cache, the client disconnects in order.
//! The errors are made inside the daemon ([`injected!`](ringway_core::injected)), by rules that the
//! oracle knows.

use super::oracle::SECTOR;
use super::plan::Plan;
use super::shared::Shared;
use crate::Rng;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

/// Writes that touch a sector whose number leaves the second when divided by the first fail.
const EIO: (u64, u64) = (509, 7);
const ENOSPC: (u64, u64) = (701, 11);
/// In one life in so many a sync fails, once the second half of the campaign has begun.
const SYNC_FAILS: u64 = 6;
/// A disk that is full for some writes out of many.
const FULL: &str = "full=64:6";
/// How a sync that fails is told to a daemon.
pub(super) const SYNC: &str = ",sync=";

/// Which requests have to fail, and which may.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    /// The first life in which writes and syncs fail with EIO; flushes may fail for good then.
    broken: u64,
    /// The first life in which no write or sync fails: the last ones have to end well.
    healthy: u64,
    /// What a durable write could not write may be lost, so that later flushes fail, too.
    loses: bool,
}

impl Faults {
    pub(super) fn of(plan: &Plan) -> Self {
        Self { broken: plan.kills / 2 + 1, healthy: plan.kills + 1, loses: plan.cache != "none" }
    }

    /// What goes wrong in a life of a daemon, for its environment; nothing in the last one.
    pub(super) fn in_life(plan: &Plan, life: u64, random: &mut Rng) -> Option<String> {
        match plan {
            _ if life > plan.kills => None,
            Plan { faults: true, .. } => Some(Self::of(plan).variable(life, random)),
            Plan { hold: true, .. } => Some(FULL.into()),
            _ => None,
        }
    }

    fn variable(self, life: u64, random: &mut Rng) -> String {
        let mut word = format!("enospc={}:{}", ENOSPC.0, ENOSPC.1);
        if life >= self.broken {
            word += &format!(",eio={}:{}", EIO.0, EIO.1);
            if random.below(SYNC_FAILS) == 0 {
                word += &format!("{SYNC}{}", 1 + random.below(4));
            }
        }
        word
    }

    /// What is to become of a write of these bytes, issued in one life and answered in another: `Some`
    /// if only one answer is right.
    pub(super) fn write_fails(self, bytes: Range<u64>, issued: u64, answered: u64) -> Option<bool> {
        let sector = SECTOR as u64;
        let hit = |(every, at): (u64, u64)| {
            (bytes.start / sector..bytes.end.div_ceil(sector)).any(|number| number % every == at)
        };
        match (hit(ENOSPC), hit(EIO)) {
            _ if issued >= self.healthy => Some(false),
            (true, _) if answered >= self.healthy => None,
            (_, true) if answered >= self.healthy && issued >= self.broken => None,
            (true, _) => Some(true),
            (false, true) if issued >= self.broken => Some(true),
            (false, true) if answered >= self.broken => None,
            _ => Some(false),
        }
    }

    /// True if there is a reason for a flush to fail that is answered in this life.
    pub(super) fn flush_may_fail(self, answered: u64, shared: &Shared) -> bool {
        let durable_write = self.loses && shared.cache_off.load(SeqCst);
        answered >= self.broken && (durable_write || shared.sync_fails.load(SeqCst))
    }

    /// True if there is a reason for a write to fail that is answered in this life, whatever its sectors: a guest without
    /// a write cache is answered by the disk's syncs, and after one that has failed all others do.
    pub(super) fn durable_may_fail(self, answered: u64, shared: &Shared) -> bool {
        answered >= self.broken && shared.cache_off.load(SeqCst) && shared.sync_fails.load(SeqCst)
    }
}
