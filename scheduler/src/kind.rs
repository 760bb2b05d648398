//! The words for the paths.

use std::fmt;
use std::str::FromStr;

/// The way in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Path {
    /// Straight through.
    Bio,
    /// Plugged, sorted, merged.
    Request,
}

impl Path {
    /// The word in statistics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bio => "bio",
            Self::Request => "request",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is plugged and probed: operations that move data. Only those of one kind are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DataOp {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
    /// To the disk, and durable before it is done.
    WriteDurable,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathKind {
    /// Always [`Path::Bio`].
    Bio,
    /// Always [`Path::Request`].
    Request,
    /// Whichever carries more.
    #[default]
    Auto,
}

impl PathKind {
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

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A word that names no path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not one of bio, request, auto")]
pub struct UnknownPath(String);

impl FromStr for PathKind {
    type Err = UnknownPath;
    fn from_str(word: &str) -> Result<Self, UnknownPath> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == word);
        found.ok_or_else(|| UnknownPath(word.to_owned()))
    }
}
