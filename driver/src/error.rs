//! What can go wrong, in words that say what to do.

use ringway_core::mem::MappingError;
use ringway_ring::blkif;
use ringway_ring::virtqueue::{DeviceFault, LayoutError};
use std::io;
use std::path::PathBuf;

/// Why a device cannot be opened, or can no longer be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not exist.
    #[error("there is no socket at {path}: start `ringway serve IMAGE --socket {path}`")]
    NoSocket {
        /// Where the socket should be.
        path: PathBuf,
    },
    /// The socket file is there, its server is not.
    #[error(
        "no one listens at {path} (its server has ended): \
         start `ringway serve IMAGE --socket {path}`"
    )]
    NoListener {
        /// Where the socket is.
        path: PathBuf,
    },
    /// The path names a file or a directory.
    #[error("{path} is not a socket: give the path that the server prints when it is ready")]
    NotASocket {
        /// What was given.
        path: PathBuf,
    },
    /// Any other failure to connect.
    #[error("cannot connect to {path}: {source}")]
    Connect {
        /// Where the socket is.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// The other side closed the socket.
    #[error("the server closed the connection at {during}: its log should say why")]
    Disconnected {
        /// The message that was not answered.
        during: &'static str,
    },
    /// The other side does not answer.
    #[error(
        "the server did not answer {during} within {seconds} s: \
         is it stopped, or busy with another client?"
    )]
    Silent {
        /// The message that was not answered.
        during: &'static str,
        /// How long the driver waited.
        seconds: u64,
    },
    /// A message was answered with an error.
    #[error("the server refused {message}: its log should say why")]
    Refused {
        /// Name of the vhost-user message.
        message: &'static str,
    },
    /// A message failed in another way.
    #[error("{message} failed: {reason}: is this a vhost-user-blk server?")]
    Protocol {
        /// Name of the vhost-user message.
        message: &'static str,
        /// What the protocol layer says.
        reason: String,
    },
    /// The server lacks something that a disk needs.
    #[error("the server does not offer {0}: is this a vhost-user-blk server?")]
    Lacks(&'static str),
    /// After a reconnect the server offers less than before.
    #[error(
        "the server came back without features {missing:#x}: connect anew instead of reconnecting"
    )]
    FeaturesLost {
        /// Feature bits in use that are no longer offered.
        missing: u64,
    },
    /// More queues than there are.
    #[error("{wanted} queues were asked for but the server has {max}: ask for fewer")]
    TooManyQueues {
        /// What the options say.
        wanted: u16,
        /// What the server says.
        max: u16,
    },
    /// Options that cannot be.
    #[error("{0}")]
    Options(String),
    /// The queues were handed out before.
    #[error("the queues of this device were taken already: they are handed out once")]
    QueuesTaken,
    /// The device was stopped, or its server is gone.
    #[error("the device is not connected: its server ended, or it was stopped; reconnect first")]
    NotConnected,
    /// Reconnecting was asked for, and the server cannot have a successor.
    #[error(
        "the server does not record what is in flight (INFLIGHT_SHMFD): after it ends nobody could \
         tell which requests were done, so it cannot be reconnected to"
    )]
    NoInflight,
    /// The connection was lost and could not be taken up again.
    #[error(
        "the connection was lost and cannot be taken up again, requests in flight are not done: \
         {0}"
    )]
    GivenUp(String),
    /// The connection was made over a socket without a path.
    #[error("this device was opened over an existing socket: give a new one to reconnect")]
    NoPath,
    /// The connection broke while requests were in flight, so nobody knows what became of them.
    #[error("the connection broke and was not stopped cleanly: connect anew instead")]
    NotStopped,
    /// Shared memory could not be had.
    #[error("cannot map {bytes} bytes of shared memory: {source}")]
    Memory {
        /// How much was wanted.
        bytes: usize,
        /// What the kernel says.
        source: MappingError,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the kernel says.
        source: io::Error,
    },
    /// The shape of a queue is wrong.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The device broke the rules of a queue.
    #[error("the server broke the rules of the queue: {0}; disconnect from it")]
    Device(#[from] DeviceFault),
    /// The shape of a block ring is wrong.
    #[error(transparent)]
    Blkif(#[from] blkif::LayoutError),
    /// The back end broke the rules of a block ring.
    #[error("the back end broke the rules of the ring: {0}; give the ring up")]
    BlkifBack(#[from] blkif::BackFault),
    /// The front end broke the rules of a block ring.
    #[error("the front end broke the rules of the ring: {0}; give the ring up")]
    BlkifFront(#[from] blkif::Broken),
}

impl Error {
    /// Makes an [`Error::Host`] of the last system call's error.
    pub(crate) fn last_os(what: &'static str) -> Self {
        Self::Host { what, source: io::Error::last_os_error() }
    }
}

/// Why a request was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Take completions, then try again.
    #[error("the queue is full: take completions first")]
    Full,
    /// virtio-blk counts in sectors of 512 bytes.
    #[error("offset {offset} and length {len} must be multiples of 512")]
    Misaligned {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A block ring counts memory in sectors of pages.
    #[error("a buffer must begin at a multiple of 512 bytes: cut buffers there")]
    BufferMisaligned,
    /// A request or a buffer without bytes.
    #[error("a request needs at least one byte")]
    Empty,
    /// More segments than the device takes in one request. A buffer is one, or as many as `size_max`
    /// makes of it.
    #[error("{have} segments in one request, but this device takes {max}: use several requests")]
    TooManySegments {
        /// Segments of the request.
        have: usize,
        /// The smaller of `seg_max` and what fits in the queue.
        max: usize,
    },
    /// A chain holds less than 4 GiB.
    #[error("a request of {0} bytes is too long: stay below 4 GiB")]
    TooLong(u64),
    /// A discard or write-zeroes beyond the limit of the device.
    #[error("{sectors} sectors at once, but this device takes {max}: use several requests")]
    EraseTooLong {
        /// Sectors of the request.
        sectors: u64,
        /// `max_discard_sectors` or `max_write_zeroes_sectors`.
        max: u32,
    },
    /// The feature was not negotiated.
    #[error("the device does not offer {0}")]
    NotOffered(&'static str),
    /// The buffer is shared with another device, not with this one.
    #[error("the buffer belongs to another device: take it from this one's pool")]
    ForeignBuffer,
    /// GET_ID needs 20 bytes.
    #[error("the serial needs a buffer of 20 bytes, not {0}")]
    IdBuffer(usize),
}
