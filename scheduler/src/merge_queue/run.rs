//! A run, and how long it may wait.

/// How long a read may be passed over. Somebody waits for it. (That of Linux's mq-deadline.)
pub const READ_DEADLINE_NS: u64 = 500_000_000;

/// How long a write may be passed over. Caches wait for it. (That of Linux's mq-deadline.)
pub const WRITE_DEADLINE_NS: u64 = 5_000_000_000;

/// Requests that lie one behind the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunState {
    pub(super) kind: u8,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) segments: usize,
    /// First and last slot; the others hang on `next`.
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) count: u16,
    /// Bytes of the request that came last: the next one will be like it.
    pub(super) step: u64,
    /// When the oldest of its requests came.
    pub(super) born: u64,
}

pub(super) const NO_RUN: RunState = RunState {
    kind: 0,
    start: 0,
    end: 0,
    segments: 0,
    first: 0,
    last: 0,
    count: 0,
    step: 0,
    born: 0,
};

impl RunState {
    pub(super) fn deadline(&self) -> u64 {
        let deadline = if self.kind == 0 { READ_DEADLINE_NS } else { WRITE_DEADLINE_NS };
        self.born.saturating_add(deadline)
    }
}
