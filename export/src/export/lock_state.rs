//! Whether an export has the lock of its image: what follows what. `image_lock.rs` does it, and the
//! model in `lock_state/model.rs` goes through every order in which two daemons can do it. [ADR 0017]
//! has the reasons.
//!
//! [ADR 0017]: ../../../docs/adr/0017-live-migration.md

/// Whether an export has the lock of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LockState {
    /// It has. Only now queues may run.
    Held,
    /// It has, and no queue runs. What was written is made durable; then the lock is given up, unless
    /// a queue wants to run by then.
    Releasing {
        /// A queue wants to run.
        wanted: bool,
    },
    /// It has not. Whoever wants a queue to run has to take it first.
    Free,
}

/// What a queue that is ready to run has to do first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// Nothing.
    Run,
    /// Take the lock and say [`LockState::locked`]; if that fails ask again later.
    Lock,
    /// Ask again later.
    Wait,
}

impl LockState {
    /// A queue is ready to run.
    pub(crate) fn ready(&mut self) -> Before {
        match self {
            Self::Held => Before::Run,
            Self::Releasing { wanted } => {
                *wanted = true;
                Before::Wait
            }
            Self::Free => Before::Lock,
        }
    }

    /// The lock was taken.
    pub(crate) fn locked(&mut self) {
        *self = Self::Held;
    }

    /// No queue runs any more, and none is ready to: with `leaving` because the guest goes elsewhere. If
    /// true is returned, what was written has to be made durable ([`LockState::gives_up`]).
    pub(crate) fn stopped(&mut self, leaving: bool) -> bool {
        match self {
            Self::Held if leaving => {
                *self = Self::Releasing { wanted: false };
                true
            }
            Self::Releasing { wanted } => {
                *wanted = false;
                false
            }
            Self::Held | Self::Free => false,
        }
    }

    /// What was written is durable, or cannot be made so. True if the lock has to be given up, before
    /// [`LockState::released`] is said.
    pub(crate) fn gives_up(self, durable: bool) -> bool {
        durable && self == Self::Releasing { wanted: false }
    }

    /// The lock was given up, or stays. A queue that has wanted to run since then takes it again.
    pub(crate) fn released(&mut self, given_up: bool) {
        *self = if given_up { Self::Free } else { Self::Held };
    }
}

#[cfg(test)]
mod model;
