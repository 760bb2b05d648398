//! What goes on between kills: a guest switches its write cache, the client disconnects in order, a
//! daemon is told to end.

use super::daemon::ask;
use super::killer::Killer;
use super::oracle::{SECTOR, Wrong};
use super::plan::End;
use ringway_driver::Device;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The guest switches its write cache in one life in so many.
const SWITCHED: u64 = 3;
/// The client disconnects and comes back in one life in so many.
const RECONNECTED: u64 = 3;
/// One life in so many is told to end.
const ENDED_IN_ORDER: u64 = 4;

impl Killer<'_> {
    /// How this life ends, if it is not killed at a point.
    pub(super) fn end(&mut self) -> End {
        match self.plan.faults && self.random.below(ENDED_IN_ORDER) == 0 {
            true => End::Terminated,
            false => self.plan.end,
        }
    }

    /// Looks whether all of this life was durable, if it had to be; then something else happens.
    pub(super) fn trouble(&mut self, device: &mut Device) {
        if !self.plan.faults {
            return;
        }
        self.judge_durability();
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
    fn judge_durability(&mut self) {
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

/// Counts of the daemon that matter here.
#[derive(Clone, Copy, Debug)]
struct Counts {
    written: u64,
    durable: u64,
    cache: bool,
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
