//! When a disk begins to hold requests that it has failed, and when it holds none any more.
//!
//! The one place where that is noticed: the thread `incidents` looks whenever a disk rings, which it
//! does at either.

use ringway_control::protocol::Happened;
use ringway_disk::{Disk, HeldRequests};

/// What is known of a disk's held requests from one look to the next.
#[derive(Debug, Default)]
pub(crate) struct Spell {
    /// Spells that were told of.
    told: u64,
    /// The last one goes on.
    open: bool,
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
    /// What has changed, in its order.
    pub(crate) fn look(&mut self, disk: &Disk) -> Vec<Change> {
        // First the number: a spell that begins in between is found by the next look.
        let spells = disk.held_spells();
        self.change(spells, disk.held())
    }

    fn change(&mut self, spells: u64, held: Option<HeldRequests>) -> Vec<Change> {
        let mut changes = Vec::new();
        let new = spells > self.told;
        if self.open && (new || held.is_none()) {
            changes.push(Change::Released);
            self.open = false;
        }
        if new {
            self.told = spells;
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

    /// A line of the log.
    pub(crate) fn tell(&self, disk: &Disk) {
        let name = disk.name();
        match self {
            Self::Held(Some(held)) => {
                let (operation, reason) = (held.op.name(), held.reason());
                let again = match held.retry_in {
                    Some(_) => "tried again every few seconds, and by ctl retry",
                    None => "tried again by ctl retry",
                };
                tracing::error!(
                    disk = name,
                    errno = (held.errno != 0).then_some(held.errno),
                    "requests are held, and their guest waits: {operation} failed: {reason}; {again}"
                );
            }
            Self::Held(None) => tracing::warn!(disk = name, "requests were held for a moment"),
            Self::Released => tracing::info!(disk = name, "no request is held any more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_disk::FailedOp;
    use std::time::Duration;

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
}
