//! What a guest may do to a disk (hot).

use crate::disk::Disk;
use ringway_core::{Op, Request, Status};
use std::sync::atomic::Ordering::Relaxed;

impl Disk {
    /// The one place that says whether a request may be carried out: bounds and read-only, for
    /// every operation.
    ///
    /// # Errors
    /// The answer for the guest.
    #[inline]
    pub fn authorise(&self, request: &Request) -> Result<(), Status> {
        if request.op.changes_disk() && self.geometry.read_only {
            return Err(Status::IoError);
        }
        if request.range.end() > self.capacity.load(Relaxed) {
            return Err(Status::IoError);
        }
        if request.op == Op::Discard && !self.geometry.discard {
            return Err(Status::Unsupported);
        }
        Ok(())
    }
}
