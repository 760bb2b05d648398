//! Why a connection cannot go on.

use std::fmt;
use std::io;

/// Why a connection cannot go on.
#[derive(Debug)]
pub(crate) enum Loss {
    /// The server has closed it.
    Closed,
    /// It said that it goes down.
    Leaves,
    /// What the host says.
    Host(io::Error),
    /// The server breaks the rules.
    Violation(&'static str),
    /// The memory of an operation is not there any more: its guest's doing.
    Memory,
    /// Another connection of the export is lost.
    Other,
    /// Its owner has given up the export.
    Ended,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the server has closed it"),
            Self::Leaves => f.write_str("the server shuts down"),
            Self::Host(error) => error.fmt(f),
            Self::Violation(what) => {
                write!(f, "the server does not keep to the protocol: {what}")
            }
            Self::Other => f.write_str("another one to the same export is lost"),
            Self::Ended => f.write_str("the disk is removed"),
            Self::Memory => f.write_str("a guest's memory has vanished amid a request"),
        }
    }
}
