//! Removals that are under way.

use super::super::served::lock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// How many there are. The daemon ends after them, and after they were answered.
#[derive(Default)]
pub(crate) struct Removals {
    count: Mutex<usize>,
    ended: Condvar,
}

/// One, until this is dropped.
pub(crate) struct Removing(Arc<Removals>);

impl Removals {
    pub(crate) fn begin(self: &Arc<Self>) -> Removing {
        *lock(&self.count) += 1;
        Removing(Arc::clone(self))
    }

    /// Waits until there are none.
    pub(crate) fn wait(&self) {
        let count = lock(&self.count);
        let none = self.ended.wait_while(count, |count| *count > 0);
        drop(none.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Removing {
    fn drop(&mut self) {
        *lock(&self.0.count) -= 1;
        self.0.ended.notify_all();
    }
}
