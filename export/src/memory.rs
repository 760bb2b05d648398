//! Guest memory that a queue shares with its guest.

use ringway_core::mem::{GuestMap, HostRange};
use ringway_disk::Watcher;
use std::sync::Arc;

/// The guest memory of a queue whose tokens are `T`. It may vanish, be pinned, be written to in the sight
/// of others. Asked on rare occasions only.
pub trait SharedMemory<T> {
    /// All of it.
    fn map(&self) -> &Arc<GuestMap>;

    /// True if a part of it that the queue needs has vanished.
    fn is_lost(&self) -> bool;

    /// Who wants to be told of what is written to it. Asked when a worker takes the queue, and after
    /// every change to it.
    fn watcher(&self) -> Option<Watcher>;

    /// True if the answer to a request is written to memory in one of these ranges.
    fn answers_into(&self, token: &T, ranges: &[HostRange]) -> bool;
}
