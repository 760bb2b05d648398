//! Which rings a record is of, and why it cannot be had.

use std::io;
use std::path::PathBuf;

/// Which rings a record belongs to. A front-end that connects again has others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Identity {
    /// The front-end's domain.
    pub domid: u32,
    /// The virtual device.
    pub devid: u32,
    /// The number of the queue.
    pub queue: u32,
    /// Slots of the ring.
    pub slots: u32,
    /// The most pieces of a request.
    pub pieces: u32,
    /// The event channel.
    pub port: u32,
    /// The pages of the ring.
    pub pages: [u32; 16],
}

/// A record that was in use has vanished: its content is zeroes from then on.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the record of what is in flight is lost: its file was cut short, or has no room")]
pub(crate) struct RecordLost;

/// Why a record cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is none.
    #[error("there is no record of what is in flight at {}", .0.display())]
    None(PathBuf),
    /// It is of other rings, or was never whole.
    #[error("the record at {} is not of these rings", .0.display())]
    Other(PathBuf),
    /// It contradicts itself or the ring.
    #[error("the record is damaged: {0}")]
    Damaged(&'static str),
    /// Somebody else could have written it.
    #[error("{} does not belong to this user alone", .0.display())]
    Foreign(PathBuf),
    /// The host says no.
    #[error("{}: {error}", path.display())]
    Host {
        /// The file.
        path: PathBuf,
        /// What it says.
        error: io::Error,
    },
}
