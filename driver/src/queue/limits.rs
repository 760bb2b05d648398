//! What a queue may ask for.

/// What a queue may ask for; fixed when the device is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(crate) seg_max: usize,
    pub(crate) size_max: u32,
    /// The most pieces of a merged request.
    pub(crate) merge_max: usize,
    pub(crate) flush: bool,
    pub(crate) discard_sectors: Option<u32>,
    pub(crate) write_zeroes_sectors: Option<u32>,
}
