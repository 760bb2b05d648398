//! Who says what a file asks of buffers and offsets.

/// Who says what O_DIRECT needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The file itself (statx, since Linux 6.1).
    Statx,
    /// The limits of the block device.
    Device,
    /// Small reads that succeeded.
    Trial,
}
