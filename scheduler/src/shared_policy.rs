//! The policy of one disk, shared by all its queues.

use crate::auto::{Auto, Seen};
use crate::mode::{Policy, SchedulerMode};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// Called when the choice of a disk changes.
pub type OnSwitch = Box<dyn Fn(Policy) + Send + Sync>;

/// The policy of one disk: what was asked for, and what is in use.
///
/// Its queues report to it by their [`QueuePolicy`](crate::QueuePolicy)s and take the policy from
/// it. No request takes the lock: it is a `try_lock` fifty times a second.
pub struct SharedPolicy {
    mode: SchedulerMode,
    /// A [`Policy`], which may be on trial.
    present: AtomicU8,
    chosen: AtomicU8,
    switches: AtomicU64,
    /// Held for some nanoseconds, fifty times a second; nobody waits for it.
    pub(crate) auto: Mutex<Auto>,
    on_switch: OnceLock<OnSwitch>,
}

impl fmt::Debug for SharedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPolicy").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl SharedPolicy {
    /// One whose clock begins at 0.
    #[must_use]
    pub fn new(mode: SchedulerMode) -> Self {
        let policy = if mode == SchedulerMode::Request { Policy::Request } else { Policy::Bio };
        Self {
            mode,
            present: AtomicU8::new(policy as u8),
            chosen: AtomicU8::new(policy as u8),
            switches: AtomicU64::new(0),
            auto: Mutex::new(Auto::new(0)),
            on_switch: OnceLock::new(),
        }
    }

    /// What was asked for.
    #[must_use]
    pub fn mode(&self) -> SchedulerMode {
        self.mode
    }

    /// The policy to use now, which may be on trial.
    #[must_use]
    pub fn present(&self) -> Policy {
        policy_of(&self.present)
    }

    /// The policy that was chosen; short trials of the other one do not show.
    #[must_use]
    pub fn chosen(&self) -> Policy {
        policy_of(&self.chosen)
    }

    /// How often the choice has changed.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches.load(Relaxed)
    }

    /// Calls `listener` whenever the choice has changed, from the thread of a queue: it must neither
    /// block nor allocate. The first one is kept.
    pub fn on_switch(&self, listener: OnSwitch) {
        // A second listener would be a mistake of ours; the first one goes on hearing.
        let kept = self.on_switch.set(listener).is_ok();
        debug_assert!(kept, "one listener");
    }

    /// Hands in what a queue has seen. False if another queue is doing so right now.
    pub(crate) fn report(&self, now: u64, seen: &Seen) -> bool {
        let Ok(mut auto) = self.auto.try_lock() else { return false };
        auto.observe(now, seen);
        self.present.store(auto.policy() as u8, Relaxed);
        let chosen = auto.chosen();
        if self.chosen.swap(chosen as u8, Relaxed) != chosen as u8 {
            self.switches.store(auto.switches(), Relaxed);
            if let Some(listener) = self.on_switch.get() {
                listener(chosen);
            }
        }
        true
    }
}

fn policy_of(word: &AtomicU8) -> Policy {
    if word.load(Relaxed) == Policy::Request as u8 { Policy::Request } else { Policy::Bio }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const MS: u64 = 1_000_000;

    /// A stream on a disk that carries three times as much if requests are merged.
    fn stream(policy: Policy) -> Seen {
        match policy {
            Policy::Bio => Seen {
                requests: 50,
                bytes: 50 * 4096,
                sampled: 50,
                adjacent: 50,
                in_flight: 50 * 32,
                timed: 50,
                latency: 50 * 100_000,
                ..Seen::default()
            },
            Policy::Request => Seen {
                requests: 150,
                bytes: 150 * 4096,
                plugged: 150,
                merged: 140,
                ..Seen::default()
            },
        }
    }

    #[test]
    fn a_choice_is_announced_once_and_shown() {
        let shared = SharedPolicy::new(SchedulerMode::Auto);
        assert_eq!(
            (shared.present(), shared.chosen(), shared.switches()),
            (Policy::Bio, Policy::Bio, 0)
        );
        let heard = Arc::new(Mutex::new(Vec::new()));
        let heard_by = Arc::clone(&heard);
        shared.on_switch(Box::new(move |policy| heard_by.lock().unwrap().push(policy)));
        let mut tried = false;
        for step in 1..400 {
            assert!(shared.report(step * 5 * MS, &stream(shared.present())));
            tried |= shared.present() == Policy::Request && shared.chosen() == Policy::Bio;
        }
        assert!(tried, "the other policy is tried before it is chosen");
        assert_eq!((shared.present(), shared.chosen()), (Policy::Request, Policy::Request));
        assert_eq!((shared.switches(), &*heard.lock().unwrap()), (1, &vec![Policy::Request]));
    }

    #[test]
    fn nobody_waits_for_a_policy_that_another_queue_reports_to() {
        let shared = SharedPolicy::new(SchedulerMode::Auto);
        let held = shared.auto.lock().unwrap();
        assert!(!shared.report(1, &stream(Policy::Bio)));
        drop(held);
        assert_eq!(shared.auto.lock().unwrap().seen, Seen::default());
        assert!(shared.report(1, &stream(Policy::Bio)));
        assert_eq!(shared.auto.lock().unwrap().seen, stream(Policy::Bio));
    }

    #[test]
    fn a_policy_begins_as_it_was_asked_to() {
        for (mode, policy) in [
            (SchedulerMode::Bio, Policy::Bio),
            (SchedulerMode::Request, Policy::Request),
            (SchedulerMode::Auto, Policy::Bio),
        ] {
            let shared = SharedPolicy::new(mode);
            assert_eq!((shared.mode(), shared.present(), shared.chosen()), (mode, policy, policy));
            assert_eq!(mode.name().parse(), Ok(mode));
        }
        assert_eq!((Policy::Bio.name(), Policy::Request.name()), ("bio", "request"));
        assert_eq!(SchedulerMode::ALL.map(SchedulerMode::name), ["bio", "request", "auto"]);
    }
}
