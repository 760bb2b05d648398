//! Requests that are left for later, or for a successor: they are in the record, and come first again.

use super::Queue;
use crate::host::Host;

impl<H: Host> Queue<H> {
    /// Nothing is done for a request that is out: it is as if a predecessor had left it.
    #[cold]
    pub(super) fn set_aside(&mut self, entry: u16) {
        self.out -= 1;
        self.let_go(entry);
        if let Some(barrier) = self.barrier.take() {
            if barrier.entry != entry {
                // It was waiting for the others, and nothing behind it was taken.
                self.let_go(barrier.entry);
                self.left.push_back(barrier.entry);
            }
        }
        // Requests that are in flight together have no order; a barrier stays behind all of them.
        self.left.push_front(entry);
    }
}
