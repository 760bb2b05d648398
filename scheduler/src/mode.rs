//! What a scheduler can be asked to do, and what it does.

use std::fmt;
use std::str::FromStr;

/// What is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Policy {
    /// Each request by itself, at once.
    Bio,
    /// Plugged, sorted, merged.
    Request,
}

impl Policy {
    /// The word in statistics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bio => "bio",
            Self::Request => "request",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulerMode {
    /// Always [`Policy::Bio`].
    Bio,
    /// Always [`Policy::Request`].
    Request,
    /// Whichever carries more.
    #[default]
    Auto,
}

impl SchedulerMode {
    /// All kinds, in the order of the help text.
    pub const ALL: [Self; 3] = [Self::Bio, Self::Request, Self::Auto];

    /// The word used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bio => "bio",
            Self::Request => "request",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for SchedulerMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A word that names no mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not one of bio, request, auto")]
pub struct UnknownMode(String);

impl FromStr for SchedulerMode {
    type Err = UnknownMode;
    fn from_str(word: &str) -> Result<Self, UnknownMode> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == word);
        found.ok_or_else(|| UnknownMode(word.to_owned()))
    }
}
