//! Whether a front-end knows of a change.

/// Whether a front-end was told of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestNotice {
    /// There is none. The next one reads the size when it connects.
    NobodyThere,
    /// The message was sent.
    Yes,
    /// It has not asked to be told (BACKEND_REQ and CONFIG of vhost-user).
    NotListening,
    /// The message could not be sent, as a rule because the front-end does not read.
    Undelivered,
    /// Its connection was busy, or none of its queues runs: it is told as soon as that changes.
    Later,
}

impl GuestNotice {
    /// The word for programs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NobodyThere => "nobody-there",
            Self::Yes => "yes",
            Self::NotListening => "not-listening",
            Self::Undelivered => "undelivered",
            Self::Later => "later",
        }
    }
}
