//! How a simulated disk is made, and what fails of it.

use super::Lie;

/// How often operations fail without any lie, of a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Transfers that fall short.
    pub short: u16,
    /// EINTR and EAGAIN.
    pub again: u16,
    /// EIO: a write may have arrived in part.
    pub error: u16,
    /// EIO of a flush.
    pub sync_error: u16,
    /// Zeroing and discarding are not supported: all or none.
    pub no_erase: bool,
}

/// How a [`SimulatedDisk`] is made.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedSetup {
    /// Size in bytes, a multiple of 4096.
    pub bytes: usize,
    /// The unit of offsets and lengths of transfers, in bytes: 512 or 4096. Others get EINVAL.
    pub granule: usize,
    /// The same of zeroing and discarding: file systems take any range.
    pub erase_granule: usize,
    /// A flush that fails loses what it should have covered, as the page cache does.
    pub failed_flush_loses: bool,
    /// What fails.
    pub faults: Faults,
    /// What is broken on purpose.
    pub lie: Option<Lie>,
    /// Of all choices.
    pub seed: u64,
}
