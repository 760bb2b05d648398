//! Who a completion is for, by the top bits of its user data. Tags of operations leave the topmost
//! clear, so that one test tells them from all others.

/// A doorbell, a command, or nobody.
pub(crate) const BELL: u64 = 1 << 63;
/// With [`BELL`]: a command. Doorbells leave it clear: they are numbered from 1, in steps of 2^16.
pub(crate) const COMMAND: u64 = 1 << 62;
/// The user data of what nobody waits for. No doorbell has the number 0.
pub(crate) const NOBODY: u64 = BELL;
