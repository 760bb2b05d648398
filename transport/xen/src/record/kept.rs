//! What a request asks for, in two bytes of a record.

use ringway_core::Status;
use ringway_ring::blkif::{Asked, Command, Refused};

/// What a request asks for, as it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It was malformed: to be answered with this.
    Refused(Status),
    Read,
    Write,
    /// With or without pieces.
    Barrier,
    Flush,
    Discard,
}

impl Kept {
    pub(super) fn of(asked: &Result<&Asked, Refused>) -> Self {
        match asked {
            Err(refused) => Self::Refused(refused.status()),
            Ok(asked) => match asked.command() {
                Command::Read => Self::Read,
                Command::Write => Self::Write,
                Command::WriteBarrier => Self::Barrier,
                // What comes with a flush is written after it, and nobody waits: as a barrier it is
                // more than it has to be.
                Command::Flush if !asked.pieces().is_empty() => Self::Barrier,
                Command::Flush => Self::Flush,
                Command::Discard { .. } => Self::Discard,
            },
        }
    }

    pub(super) fn byte(self) -> (u8, u8) {
        match self {
            Self::Refused(Status::Unsupported) => (0, 2),
            Self::Refused(_) => (0, 1),
            Self::Read => (1, 0),
            Self::Write => (2, 0),
            Self::Barrier => (3, 0),
            Self::Flush => (4, 0),
            Self::Discard => (5, 0),
        }
    }

    pub(super) fn from_byte(command: u8, status: u8) -> Option<Self> {
        Some(match (command, status) {
            (0, 2) => Self::Refused(Status::Unsupported),
            (0, 1) => Self::Refused(Status::IoError),
            (1, 0) => Self::Read,
            (2, 0) => Self::Write,
            (3, 0) => Self::Barrier,
            (4, 0) => Self::Flush,
            (5, 0) => Self::Discard,
            _ => return None,
        })
    }
}
