//! How the device side of a split virtqueue waits, and how it polls.

use super::SplitDevice;
use crate::shared::fence;
use crate::virtqueue::layout::USED_F_NO_NOTIFY;
use crate::virtqueue::types::{Armed, Broken};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

impl SplitDevice {
    /// Asks the driver for kicks again, then looks once more (§2.7.10): drain, re-arm, look again.
    ///
    /// # Errors
    /// [`Broken`] ends the queue.
    pub fn arm(&mut self) -> Result<Armed, Broken> {
        if self.event_idx {
            self.ring.avail_event().store(self.next_avail, Relaxed);
        } else {
            self.ring.used_flags().store(0, Relaxed);
        }
        // The wish must be visible before the index is read again; pairs with the driver's fence
        // between its store of the index and its load of the wish.
        fence(SeqCst);
        Ok(if self.read_avail_index()? { Armed::WorkArrived } else { Armed::Quiet })
    }

    /// Asks the driver not to kick: the device is polling. With EVENT_IDX nothing needs to be done,
    /// because the event index stays behind until the queue is armed again.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.ring.used_flags().store(USED_F_NO_NOTIFY, Relaxed);
        }
    }
}
