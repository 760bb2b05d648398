//! How a queue is named on its worker.

/// Names a queue on its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueId(pub u32);
