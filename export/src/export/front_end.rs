//! What only the server can see of a front-end (`front_end.rs`), noted and told.

use super::{Export, lock};
use crate::front_end::Lack;
use crate::queue::QueueLifecycle;

impl<Q: QueueLifecycle> Export<Q> {
    /// A front-end has connected.
    pub fn front_end_came(&self) {
        lock(&self.front_end).came();
    }

    /// What it lacks now; said in the log once if it is memory.
    pub fn front_end_lacks(&self, lack: Option<Lack>) {
        let told = lock(&self.front_end).lacks(lack);
        if let Some(words) = told {
            tracing::warn!(disk = self.disk().name(), "{words}");
        }
    }

    /// It has a queue that runs; whether all that do are `new`, and not of a driver that has used them before.
    pub fn front_end_gets_on(&self, new: bool) {
        lock(&self.front_end).gets_on(new);
    }

    /// How many have connected so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        lock(&self.front_end).connections
    }

    /// What is wrong with the one that is there, or that comes and goes; nothing if all is well. Whether anything
    /// comes through its queues only their workers know: [`Export::report`].
    #[must_use]
    pub fn front_end_trouble(&self) -> Option<String> {
        lock(&self.front_end).trouble(false)
    }
}
