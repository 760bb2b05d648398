//! Whence it is known whether a guest's write cache is on.

/// Whence a connection knows whether its guest's write cache is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// It does not: this is what the disk is offered with.
    Offered,
    /// The front-end has read it from the configuration space, and so knows it a guest that begins now.
    Read,
    /// The guest has set it, or the region of what is in flight says it, or it is off for want of
    /// knowledge.
    Settled,
}
