//! When a disk begins to hold requests that it has failed, and when it holds none any more.
//!
//! The one place where that is noticed: the thread `incidents` looks whenever a disk rings, which it
//! does at either.

use ringway_control::protocol::Happened;
use ringway_disk::{Disk, HeldRequests};
use std::time::{Duration, Instant};

/// Changes that are reported in a minute. A guest that restarts a queue makes more: what has become of
/// them is reported when the minute is over.
const CHANGES_MAX: usize = 10;
const MINUTE: Duration = Duration::from_secs(60);

/// What is known of a disk's held requests from one look to the next.
#[derive(Debug, Default)]
pub(crate) struct Spell {
    /// Spells that were reported.
    seen: u64,
    /// The last one goes on.
    open: bool,
    /// When the present minute has begun, and what was reported in it.
    begun: Option<Instant>,
    changes: usize,
}

/// What has changed since the last look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Requests are held, or were for a moment (`None`).
    Held(Option<HeldRequests>),
    /// None is held any more.
    Released,
}

impl Spell {
    /// What has changed, in its order, and how often requests were held since that was reported last; or in
    /// how long there is more to tell.
    pub(crate) fn changes(
        &mut self,
        disk: &Disk,
        now: Instant,
    ) -> Result<(Vec<Change>, u64), Duration> {
        // First the number: a spell that begins in between is found by the next look.
        let spells = disk.held_spells();
        self.changes_at(now, spells, disk.held())
    }

    fn changes_at(
        &mut self,
        now: Instant,
        spells: u64,
        held: Option<HeldRequests>,
    ) -> Result<(Vec<Change>, u64), Duration> {
        if spells == self.seen && !(self.open && held.is_none()) {
            return Ok((Vec::new(), 0));
        }
        let age = self.begun.map_or(MINUTE, |begun| now.saturating_duration_since(begun));
        if age >= MINUTE {
            (self.begun, self.changes) = (Some(now), 0);
        } else if self.changes >= CHANGES_MAX {
            return Err(MINUTE - age);
        }
        let times = spells - self.seen;
        let changes = self.change(spells, held);
        self.changes += changes.len();
        Ok((changes, times))
    }

    fn change(&mut self, spells: u64, held: Option<HeldRequests>) -> Vec<Change> {
        let mut changes = Vec::new();
        let new = spells > self.seen;
        if self.open && (new || held.is_none()) {
            changes.push(Change::Released);
            self.open = false;
        }
        if new {
            self.seen = spells;
            self.open = true;
            changes.push(Change::Held(held));
            if held.is_none() {
                changes.push(Change::Released);
                self.open = false;
            }
        }
        changes
    }
}

impl Change {
    /// What readers of events are told.
    pub(crate) fn happened(&self) -> Happened {
        match self {
            Self::Held(held) => Happened::Held { held: held.map(Into::into) },
            Self::Released => Happened::Released,
        }
    }

    /// A line of the log; requests began to be held so many `times` since the last one.
    pub(crate) fn tell(&self, disk: &Disk, times: u64) {
        let (name, times) = (disk.name(), (times > 1).then_some(times));
        match self {
            Self::Held(Some(held)) => {
                let (operation, reason) = (held.op.name(), held.reason());
                let again = match held.retry_in {
                    Some(_) => "tried again every few seconds, and by ctl retry",
                    None => "tried again by ctl retry",
                };
                tracing::error!(
                    disk = name,
                    times,
                    errno = (held.errno != 0).then_some(held.errno),
                    "requests are held, and their guest waits: {operation} failed: {reason}; {again}"
                );
            }
            Self::Held(None) => {
                tracing::warn!(disk = name, times, "requests were held for a moment");
            }
            Self::Released => tracing::info!(disk = name, "no request is held any more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_disk::FailedOp;

    #[test]
    fn each_spell_is_told_of_once_whenever_somebody_looks() {
        let held = HeldRequests {
            count: 3,
            age: Duration::ZERO,
            op: FailedOp::Write,
            errno: libc::ENOSPC,
            retry_in: None,
        };
        let mut spell = Spell::default();
        assert_eq!(spell.change(0, None), []);
        assert_eq!(spell.change(1, Some(held)), [Change::Held(Some(held))]);
        assert_eq!(spell.change(1, Some(held)), []);
        assert_eq!(spell.change(1, None), [Change::Released]);
        assert_eq!(spell.change(1, None), []);
        // Over before anybody looked.
        assert_eq!(spell.change(2, None), [Change::Held(None), Change::Released]);
        assert_eq!(spell.change(3, Some(held)), [Change::Held(Some(held))]);
        // One ended and another one began between two looks.
        let both = [Change::Released, Change::Held(Some(held))];
        assert_eq!(spell.change(4, Some(held)), both);
        assert_eq!(spell.change(4, None), [Change::Released]);
    }

    /// A guest that restarts its queue has the same request held again each time.
    #[test]
    fn e04_a_storm_of_held_requests_is_told_ten_times_a_minute() {
        let (mut spell, begun) = (Spell::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let changes: Vec<_> =
            (1..1000).map(|spells| spell.changes_at(at(0), spells, None)).collect();
        assert_eq!(changes.iter().flatten().map(|(changes, _)| changes.len()).sum::<usize>(), 10);
        assert_eq!(changes[998], Err(Duration::from_secs(60)));
        assert_eq!(spell.changes_at(at(59), 1000, None), Err(Duration::from_secs(1)));
        let both = vec![Change::Held(None), Change::Released];
        assert_eq!(spell.changes_at(at(60), 1000, None), Ok((both, 995)));
        assert_eq!(spell.changes_at(at(60), 1000, None), Ok((vec![], 0)));
    }
}
