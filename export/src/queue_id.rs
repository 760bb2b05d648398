//! How a queue is named on its worker.

/// Names a queue on its worker, and never another one: whoever holds the name of a queue that has stopped, and has not
/// heard so yet, means nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueId {
    /// Its place, where another one may be after it.
    pub(crate) place: u32,
    /// How many queues its worker had taken in before.
    pub(crate) number: u64,
}
