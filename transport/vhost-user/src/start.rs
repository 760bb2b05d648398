//! What a queue needs to start, and why it cannot.

use ringway_core::mem::MappingError;
use ringway_ring::virtqueue::InflightError;

/// The three addresses of SET_VRING_ADDR, in the address space of the front-end, or I/O virtual
/// addresses with ACCESS_PLATFORM; for a packed queue `avail` is the driver area and `used` the
/// device area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserAddresses {
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
}

/// Why a queue could not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("the {0} is not in shared memory")]
    NotShared(&'static str),
    #[error(transparent)]
    Ring(#[from] InflightError),
    #[error(
        "the {0} is scattered: its I/O virtual addresses adjoin, the memory behind them does not, and cannot \
         be mapped so that it does: {1}"
    )]
    Scattered(&'static str, MappingError),
    #[error(
        "ACCESS_PLATFORM needs the protocol features REPLY_ACK and BACKEND_REQ, and \
         SET_BACKEND_REQ_FD before a queue starts: there is nobody to ask for translations"
    )]
    NoChannel,
    #[error(
        "its record names requests that nobody has answered, and the front-end has not told where its ring is: it has \
         no place to stop at"
    )]
    Unreachable,
    #[error("the worker refuses it: {0}")]
    Worker(std::io::Error),
}
