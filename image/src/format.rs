//! Formats that are known here. Which one an image has is said by its owner, never found.

use std::fmt;
use std::str::FromStr;

/// How the bytes of an image are to be understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The disk itself, byte for byte.
    #[default]
    Raw,
    /// QEMU copy-on-write, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// As `qemu-img` calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is raw or qcow2")]
pub struct UnknownFormat;

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(word: &str) -> Result<Self, UnknownFormat> {
        match word {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(UnknownFormat),
        }
    }
}
