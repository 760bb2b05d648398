//! What a file is.

/// Which file it is, and how it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device, inode, and the number of a device that it is.
    pub place: (u64, u64, u64),
    /// When it was written last: seconds and nanoseconds.
    pub written: (i64, u64),
    /// It is open for direct I/O.
    pub direct: bool,
}
