//! What goes wrong besides kills: sectors that cannot be written, a disk that is full, a sync that
//! fails; and what goes on meanwhile: a guest switches its write cache, the client disconnects in order.
//! The errors are made inside the daemon ([`injected!`](ringway_core::injected)), by rules that the
//! oracle knows.

use super::daemon::ask;
use super::killer::Killer;
use super::oracle::{SECTOR, Wrong};
use super::{End, Plan, Shared};
use crate::Rng;
use ringway_driver::Device;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// Writes that touch a sector whose number leaves the second when divided by the first fail.
const EIO: (u64, u64) = (509, 7);
const ENOSPC: (u64, u64) = (701, 11);
/// In one life in so many a sync fails, once the second half of the campaign has begun.
const SYNC_FAILS: u64 = 6;
/// How a sync that fails is told to a daemon.
pub(super) const SYNC: &str = ",sync=";
/// The guest switches its write cache in one life in so many.
const SWITCHED: u64 = 3;
/// The client disconnects and comes back in one life in so many.
const RECONNECTED: u64 = 3;
/// One life in so many is told to end.
const TOLD: u64 = 4;

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

    /// The environment of a daemon.
    pub(super) fn variable(self, life: u64, random: &mut Rng) -> String {
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
}

/// Counts of the daemon that matter here.
#[derive(Clone, Copy, Debug)]
struct Counts {
    written: u64,
    durable: u64,
    cache: bool,
}

impl Killer<'_> {
    /// How this life ends, if it is not killed at a point.
    pub(super) fn end(&mut self) -> End {
        match self.plan.faults && self.random.below(TOLD) == 0 {
            true => End::Told,
            false => self.plan.end,
        }
    }

    /// Looks whether all of this life was durable, if it had to be; then something else happens.
    pub(super) fn trouble(&mut self, device: &mut Device) {
        if !self.plan.faults {
            return;
        }
        self.look_at_durability();
        if self.random.below(RECONNECTED) == 0 {
            // If the daemon dies meanwhile, its successor is connected to.
            // Whoever begins to serve it may not know that its cache is on.
            self.shared.cache_off.store(true, SeqCst);
            self.stopped = device.stop().and_then(|()| device.reconnect()).is_err();
            self.disconnects += u64::from(!self.stopped);
        }
        if self.random.below(SWITCHED) == 0 {
            self.switch_cache(device);
        }
    }

    /// The guest switches its write cache on or off, more often off.
    pub(super) fn switch_cache(&mut self, device: &mut Device) {
        let on = self.random.below(3) == 0;
        self.shared.cache_off.fetch_or(!on, SeqCst);
        // A guest that gets no answer believes anything until it is told.
        self.cache = device.set_writeback(on).ok().map(|()| on);
    }

    /// A guest that had switched its cache off before this daemon began to serve it.
    fn look_at_durability(&mut self) {
        if self.cache != Some(false) {
            return;
        }
        let Some(Counts { written, durable, cache }) = counts(self.dir) else { return };
        self.durable_lives += 1;
        if cache || durable < written {
            let life = self.shared.life.load(Relaxed);
            self.shared.findings().add(
                Wrong::Volatile,
                written.saturating_sub(durable).div_ceil(SECTOR as u64).max(1),
                format_args!(
                    "daemon {life} wrote {written} bytes for a guest without a write cache, {durable} of \
                     them durably; its cache is {}",
                    if cache { "on" } else { "off" }
                ),
            );
        }
    }
}

/// What the daemon has counted, if it lives.
fn counts(dir: &std::path::Path) -> Option<Counts> {
    let answer = ask(dir, &serde_json::json!({ "command": "stats" }))?;
    let disk = &answer["disks"][0];
    let number = |name: &str| disk["counts"][name].as_u64();
    Some(Counts {
        written: number("written_bytes")?,
        durable: number("durable_bytes")?,
        cache: disk["write_cache"].as_bool()?,
    })
}
