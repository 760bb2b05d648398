//! Where a step of a connection leads.

/// What a step has led to.
pub(super) enum Step {
    /// A request for the disk.
    Request(u16),
    /// One that is answered without it.
    Refused(u16),
    /// To the next step.
    Again,
    /// Something has to come first.
    Wait,
}
